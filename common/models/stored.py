"""What a batch leaves in the store: its manifest and the records that it lists."""

import msgspec

from common.models.kinds import NonNegativeInt, Outcome, PositiveInt


class PartFile(msgspec.Struct, frozen=True, kw_only=True):
    """One object of a batch, as its manifest names it; `sha256` is of the uncompressed rows."""

    name: str
    rows: NonNegativeInt
    bytes: NonNegativeInt
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The commit record of one sequence of one partition; with `void` it commits nothing.

    Attributes:
        shard, failures: None where the batch has no such rows.
        keys: The list of every record in the batch: `key TAB fp TAB try TAB outcome TAB
            prompt_tokens TAB completion_tokens`, a line each, in the rows' order.
        first, last: Stream entry ids, empty for an adoption or a void.
        input_tokens, output_tokens: Sums over the batch's completions.
    """

    uid: str
    partition: NonNegativeInt
    seq: PositiveInt
    void: bool = False
    shard: PartFile | None = None
    failures: PartFile | None = None
    keys: PartFile | None = None
    first: str = ""
    last: str = ""
    completed: NonNegativeInt = 0
    failed: NonNegativeInt = 0
    cancelled: NonNegativeInt = 0
    input_tokens: NonNegativeInt = 0
    output_tokens: NonNegativeInt = 0
    written_at: str = ""
    schema: int = 1


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One terminal record as `keys/` lists it: what the reader function chooses among.

    Attributes:
        key, fingerprint: 16 and 8 bytes.
    """

    key: bytes
    fingerprint: bytes
    try_: PositiveInt
    outcome: Outcome
    input_tokens: NonNegativeInt = 0
    output_tokens: NonNegativeInt = 0
