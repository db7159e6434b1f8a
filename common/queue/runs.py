"""The runs that this Redis knows: creation, state, producers, pause. One call a round trip."""

from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, cast

import msgspec

from common import connect, names
from common.errors import ConflictError, StateLostError
from common.models import Counts, RunRecord
from common.queue.records import KnownRun, RunState
from common.queue.scripts import call

if TYPE_CHECKING:
    import redis

_FIXED = ("params", "output", "partitions")
"""What a later call may not change."""

PRIORITY_STEP_MS = 10**13
"""Claim order is one score: priority first (higher is earlier), then age in ms."""


class Runs:
    """Every run in one Redis.

    All calls raise `RedisUnusableError`, or `RedisFullError` when there is no room.
    """

    def __init__(self, client: "redis.Redis", *, where: str = "") -> None:
        self._client = client
        self._where = where or "the given address"

    def create(self, record: RunRecord, *, priority: int = 0) -> RunRecord:
        """Create the run, or join the one that is there.

        Returns:
            The stored record: `record`, or an earlier one with the same parameters.

        Raises:
            ConflictError: The run exists with another value; names the field and both values.
        """
        with self._errors():
            created_ms = self._now_ms()
            reply = call(
                self._client,
                "create_run",
                record.run,
                record.uid,
                msgspec.json.encode(record),
                record.bits,
                record.partitions,
                priority,
                created_ms,
                created_ms - priority * PRIORITY_STEP_MS,
            )
        if not reply:
            raise being_forgotten(record.run)
        if reply == b"foreign":
            raise foreign_queue(record.run)
        stored = msgspec.json.decode(cast("bytes", reply), type=RunRecord)
        refuse_change(stored, record)
        return stored

    def get(self, name: str) -> RunRecord | None:
        """Read a run's record; None when this Redis does not know the run."""
        with self._errors():
            raw = self._client.hget(names.run(name), "record")
        return record_of(name, cast("bytes", raw)) if raw else None

    def names(self) -> list[str]:
        """List the runs in claim order; what is no run's name was not written by Headrace."""
        with self._errors():
            found = cast("list[bytes]", self._client.zrange(names.RUNS, 0, -1))
        listed = (raw.decode(errors="replace") for raw in found)
        return [name for name in listed if names.RUN_NAME.fullmatch(name)]

    def known(self) -> dict[str, KnownRun]:
        """Read all runs, in claim order, as those need them who serve them.

        Two round trips. One whose record cannot be read is left out: others go on.
        """
        listed = self.names()
        with self._errors(), self._client.pipeline(transaction=False) as pipe:
            for name in listed:
                pipe.hmget(names.run(name), ["record", "pinned", "seal", "cancelled"])
                pipe.hmget(names.counts(name), ["total", "completed", "failed", "cancelled"])
            found = pipe.execute()
        read: dict[str, KnownRun] = {}
        for name, said, counted in zip(listed, found[::2], found[1::2], strict=True):
            record, pinned, seal, cancelled = said
            total, *ended = (int(count or 0) for count in counted)
            with suppress(StateLostError):
                if record:
                    read[name] = KnownRun(
                        record=record_of(name, record),
                        pinned=msgspec.json.decode(pinned) if pinned else None,
                        over=(seal == b"1" or cancelled is not None) and total == sum(ended),
                    )
        return read

    def state(self, name: str) -> RunState | None:
        """Read all that Redis says of a run besides its counters; None when it is unknown."""
        with self._errors(), self._client.pipeline(transaction=True) as pipe:
            pipe.hgetall(names.run(name))
            pipe.hgetall(names.open_producers(name))
            members, producers = pipe.execute()
        if b"record" not in members:
            return None
        text = {key.decode(): value for key, value in members.items()}
        pinned = text.get("pinned")
        return RunState(
            record=record_of(name, text["record"]),
            paused=text["paused"].decode() if "paused" in text else None,
            cancelled="cancelled" in text,
            sealed=text.get("seal") == b"1" and not producers,
            open_producers={key.decode(): value.decode() for key, value in producers.items()},
            pinned=msgspec.json.decode(pinned) if pinned else None,
            reconciled=text["reconciled"].decode() if "reconciled" in text else None,
            priority=int(text.get("priority", 0)),
            window=int(text["window"]) if "window" in text else None,
            created_ms=int(text.get("created_ms", 0)),
            last_active_ms=int(float(text.get("last_active_ms", 0))),
        )

    def counts(self, name: str) -> Counts:
        """Read the run's counters by one script, so that they add up."""
        with self._errors():
            reply = cast("list[Any]", call(self._client, "counts", name))
        in_flight = int(reply[0])
        values = {
            raw.decode(): int(value)
            for raw, value in zip(reply[3::2], reply[4::2], strict=True)
            if raw.decode() in Counts.__struct_fields__
        }
        ended = sum(values.get(part, 0) for part in ("completed", "failed", "cancelled"))
        queued = values.get("total", 0) - ended - in_flight
        return Counts(**{**values, "in_flight": in_flight, "queued": queued})

    def completions_per_bucket(self, name: str) -> tuple[int, dict[int, int]]:
        """Read (Redis TIME in ms, {5-second bucket: completions}) for a rate over a window."""
        with self._errors():
            raw = self._client.hgetall(names.rate(name))
            return self._now_ms(), {int(bucket): int(value) for bucket, value in raw.items()}

    def open_producer(self, name: str, source: str, about: str) -> None:
        """Register a producer: the run is not sealed until it has ended."""
        self._change("open", name, source, about)

    def close_producer(self, name: str, source: str, *, sealed: bool) -> None:
        """End a producer; its last word says whether more will come."""
        self._change("close", name, source, "1" if sealed else "0")

    def next_inputs_seq(self, name: str) -> int:
        """Take the next number for an object of `inputs/`."""
        return int(self._change("increase", name, "inputs_seq"))

    def sequences(self, record: RunRecord) -> tuple[int, list[int]]:
        """Read the last number of `inputs/`, and the last closed sequence of each partition."""
        with self._errors(), self._client.pipeline(transaction=True) as pipe:
            pipe.hget(names.run(record.run), "inputs_seq")
            for partition in range(record.partitions):
                pipe.hget(names.sink(record.run, partition), "seq")
            inputs_seq, *seqs = pipe.execute()
        return int(inputs_seq or 0), [int(seq or 0) for seq in seqs]

    def set_window(self, name: str, requests: int) -> None:
        """Say how many requests of the run Redis may hold; the rest waits in `inputs/`."""
        self._change("set", name, "window", requests)

    def set_priority(self, name: str, priority: int) -> int:
        """Change where the run stands in the order of claims; returns what it was."""
        return int(self._change("prioritise", name, priority, PRIORITY_STEP_MS))

    def pause(self, name: str, reason: str) -> None:
        """Stop claims; what is in flight ends normally."""
        self._change("set", name, "paused", reason)

    def resume(self, name: str) -> None:
        """Lift a pause."""
        if self.get(name) is None:
            raise self._unknown(name)
        with self._errors():
            self._client.hdel(names.run(name), "paused", "faults")

    def pin(self, name: str, identity: dict[str, Any]) -> dict[str, Any]:
        """Pin the model of the first server; returns what is pinned, this or an earlier one."""
        try:
            raw = self._change("set_first", name, "pinned", msgspec.json.encode(identity))
        except StateLostError:
            # Forgotten since it was listed; whoever serves finds out by its next look.
            return identity
        return cast("dict[str, Any]", msgspec.json.decode(raw))

    def pin_again(self, name: str, identity: bytes) -> None:
        """Take what the store says the first server was, JSON, for what this Redis says."""
        self._change("set", name, "pinned", identity)

    def tombstoned(self, name: str) -> bool:
        """Tell whether the run was forgotten on purpose within the last 24 hours."""
        with self._errors():
            return bool(self._client.exists(names.tombstone(name)))

    def _change(self, operation: str, name: str, *args: Any) -> Any:
        with self._errors():
            reply = cast("list[Any]", call(self._client, "member", operation, name, *args))
        if reply[0] == b"unknown":
            raise self._unknown(name)
        return reply[1]

    def _unknown(self, name: str) -> StateLostError:
        return StateLostError(
            f"Redis at {self._where} has no run {name!r}: `producer runs` lists what it has"
        )

    def _now_ms(self) -> int:
        seconds, micros = self._client.time()
        return seconds * 1000 + micros // 1000

    def _errors(self) -> AbstractContextManager[None]:
        return connect.mapping_errors(self._client, self._where)


def unknown_run(name: str) -> str:
    """Say that a process waits for a run that is not there: it may be a typing error."""
    return f"waiting for run {name!r}, which Redis does not know (`producer runs` lists them)"


def being_forgotten(name: str) -> ConflictError:
    """Say that a `producer forget` did not come to its end."""
    return ConflictError(
        f"run {name!r} is being forgotten, or that was interrupted: `producer forget {name}` ends "
        "it"
    )


def foreign_queue(name: str) -> ConflictError:
    """Say that the name is another program's: a run's name is its RQ queue."""
    return ConflictError(
        f"Redis has an RQ queue {name!r} with jobs of another program, and a run's queue bears "
        "its name: give another --run"
    )


def record_of(name: str, raw: bytes) -> RunRecord:
    """Read a run's record as Redis keeps it.

    Raises:
        StateLostError: It is none, or that of a run of another name: somebody else wrote it.
    """
    with suppress(msgspec.MsgspecError):
        record = msgspec.json.decode(raw, type=RunRecord)
        if record.run == name:
            return record
    raise StateLostError(
        f"what Redis holds as run {name} is no record of it: `redis-cli HDEL {names.run(name)} "
        "record` removes it, and the same enqueue, or resume with --output, makes it anew"
    )


def refuse_change(stored: RunRecord, asked: RunRecord) -> None:
    """Raise ConflictError where a fixed member of the run differs from what is asked now."""
    for field in _FIXED:
        have, want = getattr(stored, field), getattr(asked, field)
        if have == want:
            continue
        name = field
        if field == "params":
            name = next(
                part
                for part in type(have).__struct_fields__
                if getattr(have, part) != getattr(want, part)
            )
            have, want = getattr(have, name), getattr(want, name)
        raise ConflictError(
            f"run {stored.run!r} exists with {name} {have!r}, this call says {want!r}: give the "
            "same value, or another --run"
        )
