"""Die between two durable steps, on request: how tests prove that a kill anywhere is harmless.

`HEADRACE_CRASH_AT=name` kills the process with SIGKILL when it reaches the point `name`;
`name:3` at the third time. `HEADRACE_CRASH_TRACE=file` keeps the name of the last point that the
process has passed in that file, so that whoever kills it at some other moment can say where it
was. Without the variables nothing happens. `POINTS` names them all, and what is durable there that
was not before; a test sees that each is in the code and is killed at.
"""

import mmap
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

VARIABLE = "HEADRACE_CRASH_AT"
TRACE_VARIABLE = "HEADRACE_CRASH_TRACE"
TRACE_BYTES = 64

POINTS = {
    # A producer.
    "enqueue.recorded": "run.json is in the store; Redis need not know the run",
    "enqueue.created": "Redis knows the run",
    "enqueue.remade": "an output that had lost its run.json has one again",
    "enqueue.opened": "the producer is registered as open",
    "enqueue.revoked": "_SUCCESS is gone, since prompts come",
    "enqueue.inputs": "an object of inputs/; its prompts are not queued",
    "enqueue.queued": "a call's prompts are in ledger and queue",
    "enqueue.sealed": "the seal is in the store; Redis still calls the producer open",
    "enqueue.closed": "the producer is closed, its last word stands",
    "mark.noted": "a mark that somebody set is in Redis; the store lacks it",
    "retry.revoked": "_SUCCESS is gone, since prompts are tried again",
    "retry.queued": "some failed prompts are queued with a new try",
    "pause.set": "no claims of the run",
    "priority.set": "the run stands elsewhere in the order of claims",
    "resume.lifted": "the pause is over; nothing is put back yet",
    "resume.compared": "what Redis had lost of the store is back",
    "resume.audited": "what RQ's tools took is back",
    "resume.sealed": "the seal of producers that died is in the store; Redis has them open",
    "cancel.marked": "the store calls the run cancelled, Redis does not",
    "cancel.revoked": "_SUCCESS is gone too",
    "cancel.told": "Redis calls it cancelled; nothing has ended by that",
    "cancel.ended": "some prompts have ended as cancelled",
    "cancel.closed": "all have",
    "forget.begun": "the run's hash is gone, its tombstone stands",
    "forget.swept": "a slice of ledger and jobs is gone",
    "forget.emptied": "all of them are",
    "forget.ended": "nothing of the run is left but the tombstone",
    # A worker group.
    "run.pinned": "the run's first server is pinned",
    "slots.aborted": "requests of an expired holder are aborted; its slots are still its own",
    "slots.taken": "slots are taken or renewed",
    "slots.released": "slots are given up",
    "takeover.aborted": "a predecessor's requests are aborted",
    "takeover.reaped": "its leases have gone back",
    "takeover.settled": "its slots have gone",
    "claim.leased": "jobs are leased that no process knows of",
    "serve.answered": "the server has answered; nobody has recorded it",
    "charge.counted": "an attempt is charged",
    "turn.kept": "finished turns are on their jobs",
    "finish.recorded": "results are recorded; their process does not know",
    "return.turns": "finished turns of jobs that go back are kept; the jobs are leased",
    "return.given": "jobs have gone back",
    "lease.renewed": "leases are renewed",
    "reap.ended": "leases that had run out have ended",
    "sample.kept": "a sample is in its worker group's stream",
    "audit.cancelled": "jobs that RQ's tools cancelled have ended",
    "audit.listed": "jobs that were in no list are listed again",
    "audit.restored": "lost requests are back from inputs/",
    # Whoever drains a server.
    "drain.taken": "a server is drained; its worker group may not know yet",
    "drain.lifted": "it is not any more",
    # Whoever restarts servers.
    "restart.drained": "nothing is open at the server; nothing is ordered yet",
    "restart.ordered": "the order lies there; its supervisor may not know yet",
    "restart.ready": "the server gives tokens anew, and is still drained",
    # Feeding, by whoever can.
    "feed.begun": "this process has the turn to feed",
    "feed.fed": "some requests came from inputs/; where to go on is not yet told",
    "feed.advanced": "an object of inputs/ is through",
    # A server's supervisor.
    "server.launched": "a server runs; its record has its mark, not its process",
    # A sink.
    "sink.took": "a partition is held",
    "sink.pinned": "the pinned model is in the store",
    "sink.read": "nothing; a batch is in memory",
    "sink.intent": "an intent stands",
    "sink.attempted": "its attempt is counted",
    "sink.built": "nothing more; the batch's objects are made",
    "sink.shards": "the shard is in the store",
    "sink.failures": "the failures are",
    "sink.keys": "the list of its keys is",
    "sink.manifest": "the batch is committed; its entries are still in the stream",
    "sink.acknowledged": "its entries are gone",
    "sink.set_aside": "an entry that cannot be stored is a failure now",
    "sink.giving_up": "nothing; a sequence is to be given up",
    "sink.void": "it is closed by a void; its intent stands",
    "mark.stored": "a mark is in the store; Redis does not know that",
    "archive.stored": "an object of telemetry/ is; nobody else knows that it need not be again",
    "progress.kept": "progress.json is in the state directory",
    "progress.stored": "and beside the results",
    # Whoever reconciles or ends a run.
    "adopt.made": "Redis has the run again, without its prompts",
    "reconcile.begun": "this process has the turn; the store's cancellation and pin are told",
    "reconcile.adopting": "what an orphan needs is in the store; its manifest is not",
    "reconcile.closed": "no sink of the past can add to a sequence",
    "reconcile.taught": "the ledger has all manifests",
    "reconcile.forgotten": "what had ended without a record is out of the ledger",
    "reconcile.dropped": "the streams hold nothing that the store has",
    "reconcile.bodies": "failed jobs have their requests",
    "reconcile.marks": "Redis has the marks that the store has",
    "reconcile.inputs": "the ledger has all of inputs/",
    "reconcile.marked": "claims and sinks go on",
    "end.sealed": "the store has the seal that Redis knows of",
    "end.pending": "Redis says that a _SUCCESS may stand",
    "end.written": "it stands, and may be untrue",
    "end.untrue": "it was, and is gone; Redis still says pending",
    "end.revoked": "_SUCCESS is gone, since the run goes on; Redis still names it",
}

_name = ""
_remaining = 1
_trace: mmap.mmap | None = None


def _open_trace(path: str) -> mmap.mmap | None:
    """Map the file of the last point: what stands there outlives the process, however it dies."""
    if not path:
        return None
    with Path(path).open("w+b") as file:
        file.truncate(TRACE_BYTES)
        return mmap.mmap(file.fileno(), TRACE_BYTES)


def arm(environment: Mapping[str, str]) -> None:
    """Read the variables; done at import, and again by a forked process that has its own.

    Raises:
        ValueError: There is no such point, so that a test would prove nothing.
    """
    global _name, _remaining, _trace  # noqa: PLW0603 - one countdown and one trace a process
    _name, _, count = environment.get(VARIABLE, "").partition(":")
    _remaining = int(count or 1)
    if _name and _name not in POINTS:
        raise ValueError(f"{VARIABLE}: there is no crash point {_name!r}")
    _trace = _open_trace(environment.get(TRACE_VARIABLE, ""))


arm(os.environ)

watcher: Callable[[str], None] | None = None
"""Set by in-process tests, which cannot kill themselves: called at every point, may raise."""


def reached(name: str) -> None:
    """Say that the steps before this point are durable and those after it have not begun."""
    global _remaining  # noqa: PLW0603 - one countdown a process
    if _trace is not None:
        _trace[:] = name.encode().ljust(TRACE_BYTES)[:TRACE_BYTES]
    if watcher is not None:
        watcher(name)
    if name != _name:
        return
    _remaining -= 1
    if _remaining == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def last_point(path: Path) -> str:
    """Read the last point that a process with this trace has passed; empty before the first."""
    return path.read_bytes().decode().strip(" \0") if path.exists() else ""
