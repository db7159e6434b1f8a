"""Sinks in the test's own process: stepped by hand, killed by an exception."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from common import crashpoints, names
from common.queue.sinklease import Intent, PartitionLease, new_token
from tests.support.run_world import World
from workers.sink.batch import Limits
from workers.sink.partition import PartitionSink
from workers.sink.run_sink import RunSink, Standing


class KilledError(BaseException):
    """Stands for SIGKILL: nothing that the code does may catch it."""


def run_sink(world: World, *, rows: int = 4, token: str | None = None) -> RunSink:
    """A sink for the world's run with small batches."""
    sink = RunSink(
        world.client,
        world.store,
        world.record,
        token=token or new_token(),
        limits=Limits(rows=rows),
    )

    def close() -> None:
        for partition in sink._sinks.values():
            partition._reader._pool.shutdown()

    world.closers.append(close)
    return sink


def drain(sink: RunSink, *, most: int = 200) -> Standing:
    """Step until the run has ended; fails when it does not."""
    for _ in range(most):
        standing = sink.step()
        if standing in {Standing.COMPLETED, Standing.FAILED}:
            return standing
    raise AssertionError("the run did not end")


def partition_sink(
    world: World, *, token: str, partition: int = 0, rows: int = 4
) -> PartitionSink:
    """One partition's sink, without the loop around it."""
    lease = PartitionLease(world.client, world.record, partition=partition, token=token)
    sink = PartitionSink(
        world.client, world.store, world.record, lease=lease, limits=Limits(rows=rows)
    )
    # A killed one may still read ahead; its thread is to end before the client does.
    world.closers.append(sink._reader._pool.shutdown)
    return sink


def expire_lease(world: World, partition: int = 0) -> None:
    """Age the lease in Redis instead of waiting for its end."""
    world.client.hset(names.sink(world.record.run, partition), "deadline_ms", 1)


def standing_intent(world: World, partition: int = 0) -> Intent | None:
    raw = world.client.hget(names.sink(world.record.run, partition), "intent")
    return msgspec.json.decode(raw, type=Intent) if raw else None


@contextmanager
def killed_at(point: str, *, nth: int = 1) -> Iterator[None]:
    """Die when this process reaches a crash point for the n-th time; see that it did."""
    seen = 0

    def watch(name: str) -> None:
        nonlocal seen
        seen += name == point
        if name == point and seen == nth:
            raise KilledError(point)

    with watching(watch):
        try:
            yield
        except KilledError:
            return
    raise AssertionError(f"{point} was not reached {nth} times")


@contextmanager
def watching(watcher: Callable[[str], None]) -> Iterator[None]:
    """Call `watcher` at every crash point that this process reaches."""
    crashpoints.watcher = watcher
    try:
        yield
    finally:
        crashpoints.watcher = None
