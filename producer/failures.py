"""Go through the prompts of a run that have failed, with why: in the result streams and the store.

The streams are read first: what goes from stream to store meanwhile is seen twice, and never
missed. Whether a row is its prompt's current end is the ledger's to say: state and try. Memory is
that of one object, and of the keys that wait in the streams.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from common import catalog, connect
from common.errors import StateLostError
from common.models import RawRow, RunRecord
from common.queue.ledger import CALL_ROWS, Ledger
from common.queue.scripts import call
from common.store import ObjectStore

if TYPE_CHECKING:
    import redis

STREAM_STEP = 500


class Failure(msgspec.Struct, frozen=True):
    """What a retry needs of a row of `failures/`; see `FailureRow`."""

    id: msgspec.Raw
    key: str
    fingerprint: str
    outcome: Literal["failed", "cancelled"]
    reason: str
    request: msgspec.Raw
    status: int | None = None
    try_: int = msgspec.field(name="try", default=1)

    @property
    def raw_key(self) -> bytes:
        """The key's 16 bytes."""
        return bytes.fromhex(self.key)

    @property
    def item(self) -> RawRow:
        """The prompt as the queue takes it."""
        return self.raw_key, bytes.fromhex(self.fingerprint), bytes(self.request)

    @property
    def readable(self) -> bool:
        """Whether the request is there; of a job that could not be read it is not."""
        return bytes(self.request).startswith(b"{")


_decode = msgspec.json.Decoder(Failure).decode


def current_failures(
    client: "redis.Redis", store: ObjectStore, record: RunRecord, *, ledger: Ledger
) -> Iterator[list[Failure]]:
    """Give the prompts that have failed or were cancelled and have no later try, each once.

    Yields:
        Some of them at a time, at most 1,000.
    """
    in_streams: set[bytes] = set()
    for rows in _stream_rows(client, record):
        found = _current(rows, ledger)
        in_streams.update(failure.raw_key for failure in found)
        yield found
    for manifest in catalog.manifests_of(store, record.uid):
        rows = catalog.rows(store, manifest.failures)
        for first in range(0, len(rows), CALL_ROWS):
            found = _current(rows[first : first + CALL_ROWS], ledger)
            yield [failure for failure in found if failure.raw_key not in in_streams]


def with_requests(store: ObjectStore, failures: Iterable[Failure]) -> list[Failure]:
    """Give failures whose row has no request the one that `inputs/` has; others fall out."""
    wanted = {(each.key.encode(), each.fingerprint.encode()): each for each in failures}
    found: dict[str, Failure] = {}
    for name in catalog.list_inputs(store).rows if wanted else ():
        for key, fingerprint, prompt in catalog.input_rows(store, name):
            failure = wanted.get((key, fingerprint))
            if failure is not None:
                request = msgspec.Raw(prompt)
                found[failure.key] = msgspec.structs.replace(failure, request=request)
    return list(found.values())


def _stream_rows(client: "redis.Redis", record: RunRecord) -> Iterator[list[bytes]]:
    for partition in range(record.partitions):
        first = "-"
        while True:
            with connect.mapping_errors(client):
                fixed = (record.run, record.uid, partition, first, STREAM_STEP)
                reply = cast("list[Any]", call(client, "stream_failures", *fixed))
            if reply[0] == b"unknown":
                raise StateLostError(
                    f"Redis at {connect.address_of(client)} does not know run {record.run!r} any "
                    "more: call this again"
                )
            if not reply[1]:
                break
            yield reply[2:]
            first = f"({reply[1].decode()}"


def _current(rows: Sequence[bytes], ledger: Ledger) -> list[Failure]:
    failures = [_decode(row) for row in rows]
    if not failures:
        return []
    entries = ledger.lookup([failure.raw_key for failure in failures])
    return [
        failure
        for failure, entry in zip(failures, entries, strict=True)
        if entry is not None
        and entry.state == failure.outcome
        and entry.try_ == failure.try_
        and entry.fingerprint.hex() == failure.fingerprint
    ]
