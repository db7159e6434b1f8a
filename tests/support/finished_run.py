"""A whole run in a store, without Redis: made as producer, worker group and sink make it."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from common import catalog, ending, manifests, names, object_names
from common.ids import fingerprint_of, key_of
from common.models import (
    Choice,
    Claim,
    Endpoint,
    Entry,
    Manifest,
    Outcome,
    Params,
    PartFile,
    Prompt,
    RunRecord,
    Seal,
    Usage,
)
from common.store import ObjectStore
from common.store.frames import compress, digest_name
from producer.adding import OBJECT_ROWS
from workers.client.answers import Answer
from workers.client.requests import build_request, read_prompt
from workers.client.rows import Completion, Failure, Origin, completion_row, failure_row
from workers.sink.batch import Place, build

RUN = "demo"
UID = "0" * 31 + "1"
WHEN = "2026-01-01T00:00:00+00:00"
ORIGIN = Origin(server="http://127.0.0.1:30000", model="m", server_version="0.5.23")

Rows = list[bytes]


class FinishedRun:
    """`prompts` accepted, and ended in another order.

    Args:
        store: Its output, empty.
        prompts: How many.
        batch: Results a shard.
        fails: Numbers of the prompts that fail.
        leave_out: How many have no result yet.
        token_ids: The run keeps them.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        prompts: int = 30,
        batch: int = 8,
        fails: Sequence[int] = (),
        leave_out: int = 0,
        endpoint: Endpoint = "chat",
        token_ids: bool = False,
    ) -> None:
        store.probe()
        self.store = store
        self.endpoint = endpoint
        self.prompts = prompts
        self.left_out = leave_out
        self.record = RunRecord(
            run=RUN,
            uid=UID,
            params=Params(max_tokens=64, keep_token_ids=token_ids),
            output=store.url,
            created_at=WHEN,
        )
        store.put_if_absent(names.RUN_JSON, msgspec.json.encode(self.record))
        half = prompts // 2
        objects = [*_cut(range(half)), *_cut(range(half, prompts))]
        for seq, numbers in enumerate(objects, 1):
            self.accept(seq, numbers)
        self.seal(len(objects) + 1)
        order = list(range(prompts))
        random.Random(1).shuffle(order)
        order = order[: prompts - leave_out]
        for seq, first in enumerate(range(0, len(order), batch), 1):
            ended = order[first : first + batch]
            self.commit(
                seq, [self.entry(n, "failed" if n in fails else "completed") for n in ended]
            )
        if not leave_out:
            self.succeed()

    # --- Making it -------------------------------------------------------------------------------

    def body(self, number: int) -> dict[str, Any]:
        if self.endpoint == "chat":
            return {"messages": [{"role": "user", "content": f"prompt {number} é"}]}
        return {"prompt" if self.endpoint == "completions" else "text": f"prompt {number}"}

    def choices(self, number: int) -> list[Choice]:
        text = f"answer {number} " + "word " * (number % 7)
        return [Choice(index=0, content=text, finish_reason="stop")]

    def id_json(self, number: int) -> bytes:
        return msgspec.json.encode(f"row-{number}" if number % 2 else number)

    def key(self, number: int) -> bytes:
        return key_of(RUN, self.id_json(number))

    def fingerprint(self, number: int) -> bytes:
        return fingerprint_of(self.endpoint, self.body(number))

    def prompt(self, number: int) -> bytes:
        return msgspec.json.encode(
            Prompt(
                id=msgspec.Raw(self.id_json(number)),
                line=number + 1,
                endpoint=self.endpoint,
                body=self.body(number),
                source="prompts.jsonl",
                extra={"tag": number},
            )
        )

    def accept(self, seq: int, numbers: Sequence[int]) -> None:
        rows = b"".join(
            b'{"key":"%b","fp":"%b","prompt":%b}\n'
            % (self.key(n).hex().encode(), self.fingerprint(n).hex().encode(), self.prompt(n))
            for n in numbers
        )
        sha256, digest = digest_name(rows)
        self.store.put_if_absent(
            object_names.inputs_object(seq, digest), compress(rows), rows_sha256=sha256
        )

    def seal(self, seq: int, *, sealed: bool = True) -> None:
        data = msgspec.json.encode(
            Seal(sealed=sealed, source="prompts.jsonl", rows=self.prompts, ended_at=WHEN)
        )
        self.store.put_if_absent(object_names.seal_object(seq, digest_name(data)[1]), data)

    def entry(self, number: int, outcome: Outcome = "completed", *, try_: int = 1) -> Entry:
        claim = Claim(
            run=RUN,
            uid=UID,
            key=self.key(number),
            fingerprint=self.fingerprint(number),
            try_=try_,
            attempts=0,
            deaths=0,
            lost=0,
            prompt=self.prompt(number),
        )
        tokens = 5 + number % 3 if outcome == "completed" else 0
        return Entry(
            entry_id=f"1-{number}",
            key=claim.key,
            fingerprint=claim.fingerprint,
            try_=try_,
            outcome=outcome,
            row=self._row(claim, number, tokens) if tokens else _failed(claim),
            input_tokens=3 if tokens else 0,
            output_tokens=tokens,
        )

    def _row(self, claim: Claim, number: int, tokens: int) -> bytes:
        raw = read_prompt(claim.prompt)
        choices = self.choices(number)
        if self.record.params.keep_token_ids:
            ids, mask = list(range(3 + tokens)), [0] * 3 + [1] * tokens
            choices = [
                msgspec.structs.replace(choice, token_ids=ids, loss_mask=mask)
                for choice in choices
            ]
        answer = Answer(
            choices=choices,
            usage=Usage(prompt_tokens=3, completion_tokens=tokens),
            empty=False,
            truncated=False,
            reasoning_cut=False,
        )
        done = Completion(
            request=build_request(
                raw, self.record.params, model="m", rid="e-1", context_length=None
            ),
            answer=answer,
            origin=ORIGIN,
            flags=(),
            latency_s=1.0,
            completed_at=WHEN,
        )
        return completion_row(claim, raw, done)

    def commit(self, seq: int, entries: Sequence[Entry]) -> Manifest:
        batch = build(entries, Place(uid=UID, partition=0, seq=seq), written_at=WHEN)
        for part in batch.parts:
            self.store.put_if_absent(part.file.name, part.data, rows_sha256=part.file.sha256)
        return manifests.write(self.store, batch.manifest)

    def succeed(self) -> None:
        """Write `_SUCCESS` for what is there."""
        every, listing = self.manifests(), catalog.list_inputs(self.store)
        tally = ending.count(self.store, every, listing)
        success = ending.Success(
            run=RUN,
            uid=UID,
            status="completed" if tally.completed == tally.accepted else "completed_with_failures",
            total=tally.accepted,
            completed=tally.completed,
            failed=tally.failed,
            cancelled=tally.cancelled,
            input_tokens=tally.input_tokens,
            output_tokens=tally.output_tokens,
            manifests=sum(not manifest.void for manifest in every),
            inputs=listing.names,
            written_at=WHEN,
        )
        self.store.put(names.SUCCESS, msgspec.json.encode(success))

    # --- Tampering -------------------------------------------------------------------------------

    def manifests(self) -> list[Manifest]:
        return catalog.manifests_of(self.store, UID)

    def manifest(self, seq: int) -> Manifest:
        return next(m for m in self.manifests() if m.seq == seq)

    def rows(self, part: PartFile | None) -> Rows:
        return catalog.rows(self.store, part)

    def tamper(
        self, seq: int, member: str, change: Callable[[Rows], Rows], *, mend: bool = False
    ) -> None:
        """Change the rows of one object of a batch.

        Args:
            seq: Of the batch.
            member: shard, failures or keys.
            change: Gives the new rows.
            mend: Give the object the name, and the manifest the hash and numbers, that fit.
        """
        manifest = self.manifest(seq)
        part: PartFile = getattr(manifest, member)
        rows = change(self.rows(part))
        data = b"\n".join([*rows, b""])
        if not mend:
            self.store.put(part.name, compress(data))
            return
        sha256, digest = digest_name(data)
        folder, _, suffix = part.name.partition("/")
        name = object_names.part_object(f"{folder}/", 0, seq, digest, suffix.partition(".")[2])
        packed = compress(data)
        mended = PartFile(name=name, rows=len(rows), bytes=len(packed), sha256=sha256)
        self.store.delete(part.name)
        self.store.put(name, packed)
        self.replace_manifest(msgspec.structs.replace(manifest, **{member: mended}))

    def replace_manifest(self, manifest: Manifest) -> None:
        self.store.put(
            object_names.manifest_object(manifest.partition, manifest.seq),
            msgspec.json.encode(manifest),
        )


def _cut(numbers: range) -> list[range]:
    """Cut prompts as `producer enqueue` cuts its objects; without any there is one still."""
    ends = range(0, max(len(numbers), 1), OBJECT_ROWS)
    return [numbers[first : first + OBJECT_ROWS] for first in ends]


def _failed(claim: Claim) -> bytes:
    return failure_row(
        claim,
        Failure(reason="bad_request", status=400, message="no", attempts=1, failed_at=WHEN),
    )
