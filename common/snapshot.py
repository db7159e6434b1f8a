"""Read from Redis all that the figures of a run are made of."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from common import connect, names
from common.figures import as_seen, progress
from common.flow import flow_of
from common.group_figures import GroupFigures
from common.marks.effect import SHOWN, Bucket, buckets_of
from common.marks.mark import Mark
from common.models import Counts, RunRecord
from common.queue import Groups, Runs, RunState
from common.queue.ledger import request_timeout_s
from common.queue.marks import Marks
from common.queue.sinkview import sink_state
from common.standing import Standing
from common.streams import mark_bytes

if TYPE_CHECKING:
    import redis

FULL_SHARE = 0.97


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one instant; members as in `common.figures.progress`."""

    record: RunRecord
    counts: Counts
    standing: Standing
    now_ms: int
    groups: list[GroupFigures]
    per_bucket: dict[int, int]
    created_ms: int = 0
    marks: list[Mark] = []
    history: dict[int, Bucket] = {}

    def figures(self) -> dict[str, Any]:
        """Give the one object of `--json` and of progress.json."""
        return {
            "run": self.record.run,
            "output": self.record.output,
            "endpoint_url": self.record.endpoint_url,
            **progress(
                self.counts,
                standing=self.standing,
                now_ms=self.now_ms,
                groups=self.groups,
                per_bucket=self.per_bucket,
                marks=self.marks,
                history=self.history,
            ),
        }


def read(
    client: "redis.Redis", name: str, *, groups: Sequence[GroupFigures] | None = None
) -> Snapshot | None:
    """Read a run.

    Args:
        client: From `common.connect`.
        name: The run.
        groups: Worker groups, where they were read already.

    Returns:
        None when this Redis does not know the run.

    Raises:
        RedisUnusableError: Redis cannot be reached, or has been set to evict keys.
    """
    where = connect.address_of(client)
    runs = Runs(client, where=where)
    state = runs.state(name)
    if state is None:
        return None
    now_ms, per_bucket = runs.completions_per_bucket(name)
    counts = runs.counts(name)
    with connect.mapping_errors(client):
        standing = _standing(client, state, counts)
    if counts.queued and not counts.in_flight:
        standing = msgspec.structs.replace(standing, waits_behind=_first_in_line(runs, name))
    read = Snapshot(
        record=state.record,
        counts=counts,
        standing=standing,
        now_ms=now_ms,
        groups=list(Groups(client, where=where).fresh() if groups is None else groups),
        per_bucket=per_bucket,
        created_ms=state.created_ms,
    )
    return _with_marks(read, Marks(client, name, where=where))


def _with_marks(read: Snapshot, kept: Marks) -> Snapshot:
    """Add the newest marks, and what was done and generated around them."""
    # One more than is shown: a mark's figures do not reach over the one before.
    marks = kept.latest(SHOWN + 1)
    if not marks:
        return read
    standing = read.standing
    flow = flow_of(
        read.counts,
        groups=[
            as_seen(group, model=standing.model, pinned=standing.pinned, run=standing.run)
            for group in read.groups
        ],
        per_bucket=read.per_bucket,
        now_ms=read.now_ms,
    )
    wanted = buckets_of(marks, now_ms=read.now_ms, answer_s=flow.answer_s)
    return msgspec.structs.replace(read, marks=marks, history=kept.history(wanted))


def _standing(client: "redis.Redis", state: RunState, counts: Counts) -> Standing:
    name = state.record.run
    sinks = sink_state(client, state.record)
    with client.pipeline(transaction=False) as pipe:
        pipe.exists(names.RQ_SUSPENDED)
        pipe.hget(names.run(name), "ended")
        pipe.info("memory")
        pipe.info("server")
        pipe.info("replication")
        pipe.zrange(names.RUNS, 0, -1)
        pipe.hgetall(names.counts(name))
        pipe.zcard(names.parked(name))
        told = pipe.execute()
    suspended, ended, memory, server, replication, others, counters, suspects = told
    # Whatever the figures say, Redis may have dropped what they are made of.
    connect.refuse_eviction(memory, connect.address_of(client))
    asked = state.record.params.model or (state.pinned or {}).get("model")
    return Standing(
        run=name,
        model=str(asked) if asked else None,
        pinned=state.pinned,
        reasons=_reasons(counters),
        priority=state.priority,
        window=state.window,
        sealed=state.sealed,
        proven=_is_for(ended or b"", counts),
        paused=state.paused,
        suspects=int(suspects),
        suspended=bool(suspended),
        cancelled=state.cancelled,
        unreconciled=state.reconciled != connect.run_id_of(server, replication),
        s3_error=f"sink cannot write: {sinks.error}" if sinks.error else "",
        sinks=sinks.sinks,
        redis_full=_full(
            memory, stream_bytes=_stream_bytes(client, others), in_flight=counts.in_flight
        ),
        open_producers=len(state.open_producers),
        request_timeout_s=request_timeout_s(state.record.params),
    )


def _reasons(counters: Mapping[bytes, bytes]) -> dict[str, int]:
    """Take from all counters those of why prompts failed."""
    return {
        name.removeprefix(names.REASON).decode(): int(value)
        for name, value in counters.items()
        if name.startswith(names.REASON) and int(value) > 0
    }


def _first_in_line(runs: Runs, name: str) -> str:
    """Find the run that is claimed from before this one and has prompts to claim."""
    for other in runs.names():
        if other == name:
            break
        state = runs.state(other)
        if state is None or state.cancelled or state.paused is not None:
            continue
        if runs.counts(other).queued:
            return f"{other} (priority {state.priority})"
    return ""


def _is_for(signature: bytes, counts: Counts) -> bool:
    """Whether `_SUCCESS` was written for what the counters say now."""
    now = f"{counts.total}/{counts.completed}/{counts.failed}/{counts.cancelled}/"
    return signature.startswith(now.encode())


def _stream_bytes(client: "redis.Redis", runs: Sequence[bytes]) -> int:
    """Add up what waits for sinks: all runs share one Redis."""
    with client.pipeline(transaction=False) as pipe:
        for run in runs:
            pipe.hget(names.counts(run.decode()), "stream_bytes")
        return sum(int(value or 0) for value in pipe.execute())


def _full(memory: Mapping[str, Any], *, stream_bytes: int, in_flight: int) -> str:
    """Say why claims stop for want of room; empty while there is some."""
    limit, used = int(memory.get("maxmemory", 0)), int(memory["used_memory"])
    if limit and used >= FULL_SHARE * limit:
        return f"Redis holds {used:,} of {limit:,} bytes (maxmemory): sinks make room, or raise it"
    mark = mark_bytes(limit)
    # Claims that have stopped go on at half of it.
    if stream_bytes > mark or (stream_bytes > mark / 2 and not in_flight):
        return (
            f"{stream_bytes:,} bytes of results wait for a sink, and claims stop at {mark:,}: "
            "`workers sink` stores them"
        )
    return ""
