"""A run in a real Redis and a real store, with results finished as a worker group does."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import msgspec
import redis

from common import catalog, manifests, names, object_names
from common.ids import fingerprint_of, key_of
from common.models import (
    CompletionRow,
    FailureRow,
    Outcome,
    Params,
    Prompt,
    Record,
    Result,
    RunRecord,
    Seal,
    Usage,
)
from common.queue import Jobs, Ledger, Runs
from common.reader import current_records
from common.store import ObjectStore
from common.store.frames import compress, digest_name

RUN = "demo"
SERVER = "http://test:30000"
INPUT_TOKENS = 10


class World:
    """One run: `prompts` accepted and queued, sealed.

    Args:
        client: Of a real Redis.
        store: Its output.
        prompts: How many.
        partitions: Result streams.
        window: Most requests in Redis.
    """

    def __init__(
        self,
        client: "redis.Redis",
        store: ObjectStore,
        *,
        prompts: int = 10,
        partitions: int = 1,
        uid: str = "0" * 31 + "1",
        sealed: bool = True,
        window: int | None = None,
    ) -> None:
        self.store = store
        self.record = RunRecord(
            run=RUN,
            uid=uid,
            params=Params(max_tokens=16),
            output=store.url,
            created_at="2026-01-01T00:00:00+00:00",
            partitions=partitions,
        )
        self.accepted = 0
        self.closers: list[Callable[[], None]] = []
        self.client = client
        self.use(client)
        store.put_if_absent(names.RUN_JSON, msgspec.json.encode(self.record))
        self.runs.create(self.record)
        if window is not None:
            self.runs.set_window(RUN, window)
        self.accept(prompts, sealed=sealed)

    def use(self, client: "redis.Redis") -> None:
        """Go on with another client, as after a restart of the server."""
        self.client.close()
        self.client = client
        self.runs = Runs(client)
        self.ledger = Ledger(client, self.record)
        self.jobs = Jobs(client, epoch="e1", group="gpu0@test", server=SERVER)

    def close(self) -> None:
        """End what uses the client, then the client."""
        while self.closers:
            self.closers.pop()()
        self.client.close()

    # --- Prompts ---------------------------------------------------------------------------------

    def body(self, number: int) -> dict[str, object]:
        return {"messages": [{"role": "user", "content": f"prompt {number}"}]}

    def key(self, number: int) -> bytes:
        return key_of(RUN, b"%d" % number)

    def fingerprint(self, number: int) -> bytes:
        return fingerprint_of("chat", self.body(number))

    def prompt(self, number: int) -> bytes:
        return msgspec.json.encode(
            Prompt(
                id=msgspec.Raw(b"%d" % number),
                line=number + 1,
                endpoint="chat",
                body=self.body(number),
                source="prompts.jsonl",
            )
        )

    def accept(self, count: int, *, sealed: bool = True, queue: bool = True) -> None:
        """Write `inputs/`, then queue, then seal."""
        numbers = range(self.accepted, self.accepted + count)
        self.accepted += count
        rows = b"".join(
            b'{"key":"%b","fp":"%b","prompt":%b}\n'
            % (
                self.key(n).hex().encode(),
                self.fingerprint(n).hex().encode(),
                self.prompt(n),
            )
            for n in numbers
        )
        seq = 0
        if rows:
            sha256, digest = digest_name(rows)
            seq = self.runs.next_inputs_seq(RUN)
            name = object_names.inputs_object(seq, digest)
            self.store.put_if_absent(name, compress(rows), rows_sha256=sha256)
        if queue:
            self.queue(numbers, inputs_seq=seq)
        self.seal(sealed=sealed)

    def queue(self, numbers: Iterable[int], *, inputs_seq: int = 0) -> None:
        batch = [(self.key(n), self.fingerprint(n), self.prompt(n)) for n in numbers]
        for first in range(0, len(batch), 1000):
            self.ledger.add(batch[first : first + 1000], inputs_seq=inputs_seq)

    def seal(self, *, sealed: bool = True) -> None:
        seal = Seal(sealed=sealed, source="prompts.jsonl", rows=self.accepted, ended_at="now")
        data = msgspec.json.encode(seal)
        self.store.put_if_absent(
            object_names.seal_object(self.runs.next_inputs_seq(RUN), digest_name(data)[1]), data
        )
        self.runs.close_producer(RUN, "source", sealed=sealed)

    # --- Results ---------------------------------------------------------------------------------

    def result(
        self, number: int, outcome: Outcome = "completed", *, try_: int = 1, text: str = "answer"
    ) -> Result:
        key, fingerprint = self.key(number), self.fingerprint(number)
        common: dict[str, Any] = {
            "id": msgspec.Raw(b"%d" % number),
            "sample": 0,
            "key": key.hex(),
            "fingerprint": fingerprint.hex(),
            "line": number + 1,
            "source": "prompts.jsonl",
            "server": SERVER,
            "try_": try_,
        }
        tokens = len(text)
        row: CompletionRow | FailureRow
        if outcome == "completed":
            usage = Usage(prompt_tokens=INPUT_TOKENS, completion_tokens=tokens)
            row = CompletionRow(
                **common,
                endpoint="chat",
                messages=[{"role": "assistant", "content": text}],
                prompt=None,
                choices=[],
                usage=usage,
                params={},
                params_hash="0" * 16,
                model="m",
                server_version="0",
                attempts=1,
                latency_s=1.0,
                completed_at="now",
                flags=[],
                extra={},
            )
        else:
            row = FailureRow(
                **common,
                outcome=outcome,
                reason="bad_request",
                status=400,
                message="no",
                attempts=1,
                failed_at="now",
                request=msgspec.Raw(self.prompt(number)),
            )
        return Result(
            run=RUN,
            uid=self.record.uid,
            key=key,
            fingerprint=fingerprint,
            try_=try_,
            outcome=outcome,
            row=msgspec.json.encode(row),
            input_tokens=INPUT_TOKENS if outcome == "completed" else 0,
            output_tokens=tokens if outcome == "completed" else 0,
        )

    def finish(
        self,
        numbers: Iterable[int],
        outcome: Outcome = "completed",
        *,
        try_: int = 1,
        text: str = "answer",
    ) -> list[str]:
        results = [self.result(n, outcome, try_=try_, text=text) for n in numbers]
        words: list[str] = []
        for first in range(0, len(results), 500):
            words += self.jobs.finish(results[first : first + 500])
        return words

    def retry(self, numbers: Sequence[int]) -> None:
        self.ledger.add(
            [(self.key(n), self.fingerprint(n), self.prompt(n)) for n in numbers], retry=True
        )

    # --- What is there ---------------------------------------------------------------------------

    def records(self) -> list[Record]:
        """Every terminal record in the store, superseded ones too."""
        every = catalog.manifests_of(self.store, self.record.uid)
        return [record for m in every for record in catalog.records(self.store, m)]

    def current(self) -> dict[int, Record]:
        """Current record by prompt number."""
        numbers = {self.key(n): n for n in range(self.accepted)}
        return {numbers[key]: r for key, r in current_records(self.records()).items()}

    def check_store(self) -> None:
        """At most one record a (key, try), at most one completion a key, rows as listed."""
        records = self.records()
        assert max(Counter((r.key, r.try_) for r in records).values(), default=1) == 1
        done = Counter(r.key for r in records if r.outcome == "completed")
        assert max(done.values(), default=1) == 1
        every = catalog.manifests_of(self.store, self.record.uid)
        for partition in range(self.record.partitions):
            seqs = [m.seq for m in every if m.partition == partition]
            assert seqs == list(range(1, len(seqs) + 1)), "a gap, or two manifests"
        for manifest in every:
            rows = catalog.rows(self.store, manifest.shard)
            rows += catalog.rows(self.store, manifest.failures)
            listed = {(r.key.hex(), r.try_) for r in catalog.records(self.store, manifest)}
            held = [msgspec.json.decode(row) for row in rows]
            assert {(row["key"], row["try"]) for row in held} == listed
            assert len(rows) == len(listed) == manifests.rows_of(manifest)

    def check_counts(self) -> None:
        """Redis' counters are what its ledger and the store say."""
        counts = self.runs.counts(RUN)
        entries = [e for e in self.ledger.lookup([self.key(n) for n in range(self.accepted)]) if e]
        states = Counter(entry.state for entry in entries)
        assert counts.total == len(entries)
        assert counts.completed == states["completed"]
        assert counts.failed == states["failed"]
        assert counts.cancelled == states["cancelled"]
        assert counts.queued + counts.in_flight == states["queued"]
        assert counts.stream_entries == self.waiting()
        if self.waiting() == 0:
            assert counts.stream_bytes == 0
            tokens = [r for r in self.current().values() if r.outcome == "completed"]
            assert counts.output_tokens == sum(r.output_tokens for r in tokens)
            assert counts.input_tokens == sum(r.input_tokens for r in tokens)
            assert counts.s3_uploaded == len(self.records())

    def waiting(self) -> int:
        return sum(
            self.client.xlen(names.results(RUN, partition))
            for partition in range(self.record.partitions)
        )

    def entries(self, first: str = "-", last: str = "+") -> list[tuple[bytes, dict[bytes, bytes]]]:
        """What waits in the first partition's stream, as Redis gives it."""
        found = self.client.xrange(names.results(RUN, 0), first, last)
        return cast("list[tuple[bytes, dict[bytes, bytes]]]", found)
