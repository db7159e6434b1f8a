"""A run in a real Redis without a store: what the queue's scripts see, and hands that use them."""

import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec
import redis

from common import names
from common.ids import fingerprint_of, key_of
from common.models import Claim, Counts, Outcome, Params, Prompt, Result, RunRecord
from common.queue import AddReply, ClaimReply, Jobs, Ledger, Runs, SlotReply

SERVER = "http://gpu.test:30000"
GROUP = "gpu0@test"
MARK_BYTES = 1 << 40
SECRET = "the words of a prompt"


class QueueWorld:
    """One run with `prompts` queued. Prompt n has the id n, and says `SECRET`.

    Args:
        client: Of a real Redis.
        prompts: How many.
        run, uid, bits, partitions, priority: As the run is made.
    """

    def __init__(
        self,
        client: "redis.Redis",
        *,
        prompts: int = 0,
        run: str = "demo",
        uid: str = "1" * 32,
        bits: int = 12,
        partitions: int = 1,
        priority: int = 0,
    ) -> None:
        self.client = client
        self.run = run
        self.runs = Runs(client)
        self.record = self.runs.create(
            RunRecord(
                run=run,
                uid=uid,
                params=Params(max_tokens=16),
                output="/nowhere",
                created_at="2026-01-01T00:00:00+00:00",
                partitions=partitions,
                bits=bits,
            ),
            priority=priority,
        )
        self.ledger = Ledger(client, self.record)
        self.known: dict[bytes, int] = {}
        self.add(range(prompts))

    # --- Prompts ---------------------------------------------------------------------------------

    def key(self, number: int) -> bytes:
        return key_of(self.run, b"%d" % number)

    def hex(self, number: int) -> str:
        return self.key(number).hex()

    def number(self, key: bytes) -> int:
        return self.known[key]

    def item(self, number: int, text: str = SECRET) -> tuple[bytes, bytes, bytes]:
        """Key, fingerprint, request, as the producer sends them."""
        body = {"messages": [{"role": "user", "content": f"{text} {number}"}]}
        prompt = Prompt(
            id=msgspec.Raw(b"%d" % number),
            line=number + 1,
            endpoint="chat",
            body=body,
            source="prompts.jsonl",
        )
        return self.key(number), fingerprint_of("chat", body), msgspec.json.encode(prompt)

    def add(
        self,
        numbers: Iterable[int],
        *,
        text: str = SECRET,
        retry: bool = False,
        replace: bool = False,
    ) -> AddReply:
        wanted = list(numbers)
        self.known.update({self.key(number): number for number in wanted})
        replies = [
            self.ledger.add(
                [self.item(number, text) for number in wanted[first : first + 1000]],
                retry=retry,
                replace=replace,
            )
            for first in range(0, max(len(wanted), 1), 1000)
        ]
        return replies[-1]

    # --- Worker processes ------------------------------------------------------------------------

    def jobs(
        self, epoch: str, *, group: str = GROUP, server: str = SERVER, slots: int = 1000
    ) -> Jobs:
        """A worker process that holds slots."""
        jobs = Jobs(self.client, epoch=epoch, group=group, server=server)
        assert take(jobs, slots, bound=1_000_000, quiet=True).what == "granted"
        return jobs

    def claim(self, jobs: Jobs, count: int = 10, *, alone: bool = False) -> ClaimReply:
        return jobs.claim(count, stream_mark_bytes=MARK_BYTES, worker_name="gpu0", alone=alone)

    def claimed(self, jobs: Jobs, count: int = 10, *, alone: bool = False) -> list[int]:
        """Claim, and say which prompts came."""
        return [self.number(claim.key) for claim in self.claim(jobs, count, alone=alone).claims]

    def result(
        self,
        number: int,
        outcome: Outcome = "completed",
        *,
        try_: int = 1,
        text: str = SECRET,
        **members: Any,
    ) -> Result:
        key, fingerprint, _ = self.item(number, text)
        result = Result(
            run=self.run,
            uid=self.record.uid,
            key=key,
            fingerprint=fingerprint,
            try_=try_,
            outcome=outcome,
            row=b'{"n":%d}' % number,
            input_tokens=10,
            output_tokens=5,
            reason="" if outcome == "completed" else "bad_request",
        )
        return msgspec.structs.replace(result, **members)

    def finish(
        self, jobs: Jobs, numbers: Iterable[int], outcome: Outcome = "completed", *, try_: int = 1
    ) -> list[str]:
        return jobs.finish([self.result(number, outcome, try_=try_) for number in numbers])

    def held(self, numbers: Iterable[int]) -> list[tuple[str, bytes]]:
        return [(self.run, self.key(number)) for number in numbers]

    # --- Time, by changing what Redis holds ------------------------------------------------------

    def expire_leases(self, numbers: Iterable[int]) -> None:
        self.client.zadd(
            names.leases(self.run), {self.hex(number): 1 for number in numbers}, xx=True
        )

    # --- What is there ---------------------------------------------------------------------------

    def counts(self) -> Counts:
        return self.runs.counts(self.run)

    def states(self) -> dict[int, str]:
        """Prompt -> state and try by the ledger, as `queued/1`."""
        wanted = sorted(self.known.values())
        entries = self.ledger.lookup([self.key(number) for number in wanted])
        return {
            number: f"{entry.state}/{entry.try_}"
            for number, entry in zip(wanted, entries, strict=True)
            if entry
        }

    def listed(self) -> list[int]:
        """RQ's list, in order."""
        raw = cast("list[bytes]", self.client.lrange(names.rq_queue(self.run), 0, -1))
        return [self.number(bytes.fromhex(job_id.decode())) for job_id in raw]

    def leased(self) -> set[int]:
        return self._members(names.leases(self.run))

    def parked(self) -> set[int]:
        return self._members(names.parked(self.run))

    def failed_registry(self) -> set[int]:
        return self._members(names.rq_failed(self.run))

    def started(self) -> set[str]:
        """RQ's started registry: job:execution."""
        raw = cast("list[bytes]", self.client.zrange(names.rq_started(self.run), 0, -1))
        return {member.decode() for member in raw}

    def job(self, number: int) -> dict[str, bytes]:
        raw = cast("dict[bytes, bytes]", self.client.hgetall(names.rq_job(self.hex(number))))
        return {name.decode(): value for name, value in raw.items()}

    def entries(self, partition: int = 0) -> list[tuple[int, str, int]]:
        """(prompt, outcome letter, try) of what waits in a result stream."""
        raw = cast("list[Any]", self.client.xrange(names.results(self.run, partition)))
        return [
            (self.number(fields[b"k"]), fields[b"o"].decode(), int(fields[b"t"]))
            for _, fields in raw
        ]

    def check(self) -> None:
        """Counters, ledger, leases and RQ's registries say the same."""
        counts = self.counts()
        states = Counter(state.split("/")[0] for state in self.states().values())
        assert (counts.total, counts.completed, counts.failed, counts.cancelled) == (
            sum(states.values()),
            states["completed"],
            states["failed"],
            states["cancelled"],
        )
        assert counts.in_flight == len(self.leased())
        ended = counts.completed + counts.failed + counts.cancelled
        assert ended + counts.in_flight + counts.queued == counts.total
        assert min(counts.queued, counts.in_flight) >= 0
        assert len(self.started()) == len(self.leased())
        assert {member.split(":")[0] for member in self.started()} == {
            self.hex(number) for number in self.leased()
        }
        waiting = self.client.xlen(names.results(self.run, 0))
        assert self.record.partitions > 1 or counts.stream_entries == waiting

    def _members(self, name: str) -> set[int]:
        raw = cast("list[bytes]", self.client.zrange(name, 0, -1))
        return {self.number(bytes.fromhex(job_id.decode())) for job_id in raw}


def take(
    jobs: Jobs,
    wanted: int,
    *,
    bound: int,
    settled: str = "",
    quiet: bool = False,
    holds: int | None = None,
    heard: str = "",
    open_requests: int = 0,
) -> SlotReply:
    """Ask for slots as a worker process does."""
    about: dict[str, Any] = {"host": "test", "pid": 1, "started": 1.0}
    return jobs.take_slots(
        wanted,
        bound=bound,
        rid_prefix=f"{jobs.epoch}-",
        about=about if holds is None else {"holds": holds, **about},
        settled=settled,
        quiet=quiet,
        heard=heard,
        open_requests=open_requests,
    )


def expire_slots(client: "redis.Redis", epoch: str, server: str = SERVER) -> None:
    """Let a process's slots run out now."""
    raw = cast("bytes", client.hget(names.slots(server), epoch))
    holder = msgspec.json.decode(raw) | {"deadline_ms": 1}
    client.hset(names.slots(server), epoch, msgspec.json.encode(holder))


def new_run_id_seen_ago(client: "redis.Redis", ago_ms: int, server: str = SERVER) -> None:
    """Let the instant at which the slots' keeper noticed a new Redis lie so far back."""
    since = float(cast("bytes", client.hget(names.slots(server), "since")))
    client.hset(names.slots(server), "since", int(since - ago_ms))


def lua_partition(key: bytes, partitions: int) -> int:
    """int(key) mod P, by the definition."""
    high, low = struct.unpack(">QQ", key)
    return int((high << 64 | low) % partitions)


def keys_of(claims: Sequence[Claim]) -> list[bytes]:
    return [claim.key for claim in claims]
