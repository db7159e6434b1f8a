"""The rows as the shards hold them, byte for byte."""

from collections.abc import Sequence

from typing_extensions import override

from producer.formats.base import LineFormat


class Jsonl(LineFormat):
    """A JSON object a line: `common.models.CompletionRow`, and `FailureRow` for failures."""

    @override
    def lines(self, row: bytes) -> Sequence[bytes]:
        return (row,)


def make() -> Jsonl:
    """Make what writes one file."""
    return Jsonl()
