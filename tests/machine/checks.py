"""What must hold after every step, read from Redis and the stores themselves."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Container, Iterable
from typing import NamedTuple, cast

import msgspec

from common import catalog, ending, manifests, names
from common.connect import run_id_of
from common.models import Manifest, Record, Result, RunRecord
from common.queue import Jobs, LedgerEntry, Runs
from common.queue.ledger import Ledger
from common.reader import current_records, rank
from tests.machine.model import Answer, Known, RunModel
from tests.machine.workers import BOUND, Worker
from tests.machine.world import RUNS, World

LETTERS = {b"c": "completed", b"f": "failed", b"x": "cancelled"}


def on(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=4).hexdigest()


def _may_have_open(worker: Worker, listed: Container[str]) -> int:
    """How many requests a process may have open before it asks Redis again.

    One that Redis has forgotten is not given jobs before it has declared what it has.
    """
    slots = worker.believes()
    if worker.epoch not in listed:
        slots = min(slots, len(worker.open) + len(worker.ready))
    return slots


class Waiting(NamedTuple):
    """An entry of a result stream."""

    key: bytes
    try_: int
    outcome: str
    bytes: int


class Stored:
    """What an output holds; objects never change, so each is read once.

    Attributes:
        accepted: Key -> fingerprints of the texts that were accepted for it.
    """

    def __init__(self, world: World, run: str) -> None:
        self._store = world.stores[world.urls[run]]
        self._model = world.models[run]
        self._conditional = world.conditional
        self._seen: set[str] = set()
        self.accepted: dict[bytes, set[bytes]] = defaultdict(set)
        self.records: list[Record] = []
        self.tries: dict[bytes, set[int]] = defaultdict(set)
        self.current: dict[bytes, Record] = {}
        self.seqs: Counter[tuple[int, int]] = Counter()

    def update(self) -> None:
        listing = catalog.list_inputs(self._store)
        for name in self._fresh(listing.rows):
            for key, fingerprint, _ in catalog.input_rows(self._store, name):
                self.accepted[bytes.fromhex(key.decode())].add(bytes.fromhex(fingerprint.decode()))
        for place, listed in sorted(manifests.listed(self._store).items()):
            for name in self._fresh(listed):
                manifest = manifests.read(self._store, name)
                assert manifest is not None
                self.seqs[place] += 1
                self._commit(manifest)
        for partition in {place[0] for place in self.seqs}:
            mine = sorted(seq for part, seq in self.seqs if part == partition)
            assert mine == list(range(1, len(mine) + 1)), f"a gap in the manifests: {mine}"

    def _fresh(self, listed: Iterable[str]) -> list[str]:
        fresh = [name for name in listed if name not in self._seen]
        self._seen.update(fresh)
        return fresh

    def _commit(self, manifest: Manifest) -> None:
        records = catalog.records(self._store, manifest)
        rows = catalog.rows(self._store, manifest.shard)
        rows += catalog.rows(self._store, manifest.failures)
        assert len(rows) == len(records) == manifests.rows_of(manifest)
        by_key = {(r.key, r.try_): r for r in records}
        assert len(by_key) == len(records)
        for row in rows:
            self._check_row(row, by_key)
        for record in records:
            name = f"{self._model.name(record.key)} try {record.try_}"
            assert record.try_ not in self.tries[record.key], f"{name}: stored twice"
            known = self.current.get(record.key)
            both = known and known.outcome == record.outcome == "completed"
            assert not both, f"{name}: completed twice"
            assert record.fingerprint in self.accepted[record.key], f"{name}: never accepted"
            self.tries[record.key].add(record.try_)
        self.records += records
        self.current = current_records(self.records)

    def _check_row(self, row: bytes, by_key: dict[tuple[bytes, int], Record]) -> None:
        """It is a row that somebody produced for this very try."""
        head = msgspec.json.decode(row)
        key = bytes.fromhex(head["key"])
        record = by_key[key, head["try"]]
        if record.outcome == "cancelled":
            assert head["outcome"] == "cancelled"
            return
        if record.outcome == "failed" and head["reason"] == "unstorable":
            assert key in self._model.poisoned, "a good result was given up"
            return
        answers = self._model.answers.get((key, record.try_), [])
        made = Answer(record.outcome, record.fingerprint, row)
        assert made in answers, f"{self._model.name(key)}: a row that nobody produced"

    def stands(self) -> bool:
        return ending.stands(self._store)


class Checks:
    """Of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._stored = {run: Stored(world, run) for run in RUNS}

    def all(self) -> None:
        for run in RUNS:
            stored, model = self.stored(run), self._world.models[run]
            record = self._world.record(run)
            if record is None:
                model.known = Known()
            else:
                _Run(self._world, run, record, model, stored).check()
            if stored.stands():
                missing = stored.accepted.keys() - stored.current.keys()
                assert not missing, f"_SUCCESS, and {len(missing)} prompts have no record"
        self._slots()

    def stored(self, run: str) -> Stored:
        stored = self._stored[run]
        stored.update()
        return stored

    def ledger(self, run: str) -> dict[bytes, LedgerEntry]:
        record = self._world.record(run)
        if record is None:
            return {}
        keys = list(self._world.models[run].keys)
        found = Ledger(self._world.client, record).lookup(keys)
        return {key: entry for key, entry in zip(keys, found, strict=True) if entry}

    def _slots(self) -> None:
        for server in self._world.servers:
            listed = Jobs(self._world.client, epoch="-", group="-", server=server.url).holders()
            may_open = sum(
                _may_have_open(worker, listed)
                for worker in self._world.workers.values()
                if worker.server is server
            )
            assert may_open <= BOUND, f"{may_open} requests may be open at {server.url}"

    def turn(self, worker: Worker, key: tuple[str, bytes], serial: int) -> bytes:
        """A turn that says on which text it was generated."""
        before = worker.turns.get(key, b"")
        return f"{serial} by {worker.epoch} on {on(before)}\n".encode()

    def finished(self, result: Result, word: str) -> None:
        """Redis has answered for a result."""
        model = self._world.models[result.run]
        name = f"{model.name(result.key)} try {result.try_}"
        if word == "ok":
            model.note_taken(result.key, result.try_, result.outcome)
        elif word in {"duplicate", "repeated"}:
            assert result.repeat == (word == "repeated"), f"{name}: {word}"
            entry = self.ledger(result.run)[result.key]
            live = entry.state == "queued" and entry.try_ == result.try_
            assert not live, f"{name}: dropped as {word}, and is not done"
        elif word == "changed":
            assert self.ledger(result.run)[result.key].fingerprint != result.fingerprint
        else:
            assert word == "forgotten", word
            assert self._world.record(result.run) is None, f"{name}: dropped as forgotten"

    def taken_unheard(self, batch: Iterable[Result]) -> None:
        """The answer was lost: what Redis has of them now."""
        for result in batch:
            model, entry = self._world.models[result.run], self.ledger(result.run).get(result.key)
            new = (result.key, result.try_) not in model.known.ended
            taken = entry and (entry.state, entry.try_) == (result.outcome, result.try_)
            if new and taken:
                model.note_taken(result.key, result.try_, result.outcome)

    def is_gone(self, run: str) -> None:
        """Nothing of a forgotten run is left but its tombstone."""
        if self._world.record(run) is not None:
            return  # brought back since
        left = [
            name.decode()
            for name in cast("list[bytes]", self._world.client.keys("*"))
            if f":{run}" in name.decode() and b"tombstone" not in name
        ]
        jobs = [
            (self._world.models[run].name(key), job)
            for key in self._world.models[run].keys
            if (job := self._world.client.hgetall(names.rq_job(key.hex())))
        ]
        assert not left + jobs, f"left of a forgotten run: {left} {jobs}"


class _Run:
    """One run that Redis knows, at one instant: read in one round trip, judged after that."""

    def __init__(
        self, world: World, run: str, record: RunRecord, model: RunModel, stored: Stored
    ) -> None:
        self.run, self.model, self.stored = run, model, stored
        self.keys = list(model.keys)
        with world.client.pipeline(transaction=True) as pipe:
            pipe.info("server")
            pipe.info("replication")
            pipe.hgetall(names.run(run))
            pipe.lrange(names.rq_queue(run), 0, -1)
            for zset in (names.leases(run), names.parked(run), names.rq_started(run)):
                pipe.zrange(zset, 0, -1)
            for key in self.keys:
                bucket = names.ledger_bucket(run, key, record.bits)
                pipe.hget(bucket, names.ledger_field(key, record.bits))
            for key in self.keys:
                pipe.hmget(names.rq_job(key.hex()), ["request", "status", "turns"])
            for lane in range(record.partitions):
                pipe.xrange(names.results(run, lane))
            server, replication, members, listed, leased, parked, started, *rest = pipe.execute()
        self.counts = Runs(world.client).counts(run)
        self.members = cast("dict[bytes, bytes]", members)
        reconciled = self.members.get(b"reconciled", b"").decode()
        self.trusted = reconciled == run_id_of(server, replication)
        self.listed, self.leased, self.parked = (
            {bytes.fromhex(job_id.decode()) for job_id in found}
            for found in (listed, leased, parked)
        )
        self.started = [member.decode() for member in started]
        many = len(self.keys)
        values = dict(zip(self.keys, rest[:many], strict=True))
        self.ledger = {k: LedgerEntry.read(value) for k, value in values.items() if value}
        self.unfed = {k for k, value in values.items() if value and value[8:9] == b"u"}
        self.jobs = dict(zip(self.keys, rest[many : 2 * many], strict=True))
        self.streams = [
            Waiting(f[b"k"], int(f[b"t"]), LETTERS[f[b"o"]], len(f[b"r"]) + 100)
            for lane in rest[2 * many :]
            for _, f in lane
            if b"k" in f
        ]

    def check(self) -> None:
        self._counters()
        self._registries()
        self._every_end_has_its_record()
        self._every_queued_prompt_is_somewhere()
        self._what_was_taken_stays()
        self._turns()
        if self.trusted:
            self._ledger_is_not_behind_the_store()

    def _counters(self) -> None:
        counts, states = self.counts, Counter(entry.state for entry in self.ledger.values())
        told = (counts.total, counts.completed, counts.failed, counts.cancelled)
        there = (len(self.ledger), states["completed"], states["failed"], states["cancelled"])
        assert told == there, f"{self.run}: counters {told}, ledger {there}"
        assert counts.queued >= 0
        assert counts.queued + counts.in_flight == states["queued"]
        assert counts.unfed == len(self.unfed), f"{self.run}: unfed"
        assert counts.stream_entries == len(self.streams)
        assert counts.stream_bytes == sum(waiting.bytes for waiting in self.streams)

    def _registries(self) -> None:
        assert len(self.started) == len(self.leased) == self.counts.in_flight
        started = {member.split(":")[0] for member in self.started}
        assert started == {key.hex() for key in self.leased}
        queued = {key for key, entry in self.ledger.items() if entry.state == "queued"}
        assert self.leased <= queued, "an ended prompt is leased"
        both = self.leased & self.parked
        assert not both, f"leased and parked: {[self.model.name(key) for key in both]}"

    def _every_end_has_its_record(self) -> None:
        waiting = {(w.key, w.try_): w.outcome for w in self.streams}
        assert len(waiting) == len(self.streams), "two entries of one try wait"
        for key, entry in self.ledger.items():
            if entry.state == "queued":
                continue
            record = self.stored.current.get(key)
            here = waiting.get((key, entry.try_))
            held = here == entry.state or (record is not None and record.outcome == entry.state)
            assert held, f"{self.model.name(key)} is {entry.state} and nobody has its record"

    def _every_queued_prompt_is_somewhere(self) -> None:
        held = self.listed | self.leased | self.parked
        self.model.known.touched -= {key for key in held if self._whole(key)}
        if b"cancelled" in self.members:
            return
        for key, entry in self.ledger.items():
            if entry.state != "queued" or key in held | self.model.known.touched:
                continue
            assert key in self.unfed, f"{self.model.name(key)} is queued and in no list"
            assert key in self.stored.accepted, f"{self.model.name(key)} waits, and is nowhere"

    def _whole(self, key: bytes) -> bool:
        """Its job has all that Headrace needs of it."""
        request, status, _ = self.jobs[key]
        return bool(request) and status != b"canceled"

    def _what_was_taken_stays(self) -> None:
        for (key, try_), outcome in self.model.known.ended.items():
            entry = self.ledger.get(key)
            name = f"{self.model.name(key)} try {try_}"
            assert entry is not None, f"{name} was {outcome} and is not known any more"
            if entry.state == "completed" or entry.try_ > try_:
                regressed = outcome == "completed" and entry.state != "completed"
            else:
                regressed = entry.state == "queued" or outcome == "completed"
            # What a past of this Redis had stored of the try counts; what cannot be stored fails.
            excused = try_ in self.stored.tries[key] or key in self.model.poisoned
            assert not regressed or excused, f"{name} was {outcome}, and now is {entry}"

    def _turns(self) -> None:
        for key in self.leased | self.listed | self.parked:
            kept, before = self.jobs[key][2] or b"", b""
            for line in kept.splitlines(keepends=True):
                ending_ = f"on {on(before)}\n".encode()
                assert line.endswith(ending_), f"{self.model.name(key)}: turns of two talks"
                before += line

    def _ledger_is_not_behind_the_store(self) -> None:
        for key, record in self.stored.current.items():
            entry = self.ledger.get(key)
            assert entry is not None, f"{self.model.name(key)} is stored and not known"
            ahead = (entry.state == "completed", entry.try_) >= rank(record)
            again = entry.state == "queued" and entry.try_ == record.try_
            told = f"{self.model.name(key)}: store {record}, ledger {entry}"
            assert ahead, told
            assert not again, told
