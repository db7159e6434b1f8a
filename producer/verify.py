"""Prove from the store alone that every accepted prompt has exactly one result, and its own."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from common import catalog
from common.advice import count_of
from common.models import Prompt, RunRecord
from common.store import ObjectStore
from producer.findings import KINDS, SHOWN, Findings
from producer.intake import Intake, Reading
from producer.meter import MeterFor
from producer.prompts.rows import RowRules
from producer.proof import Proof, prove

_prompts = msgspec.json.Decoder(Prompt)


class FileCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Files that the run is compared with, and how their rows are read; see `producer.request`."""

    files: tuple[str, ...]
    rules: RowRules
    samples: int = 1


class Verdict(msgspec.Struct, kw_only=True):
    """What came of a verification.

    Attributes:
        findings: What is wrong; still open, so that all of it can be told.
        file: What the files held, None where none were given.
        seconds: How long it took.
        waits: Results that wait for a sink, of a run that goes on; None of one that does not, or
            where Redis was not asked.
    """

    record: RunRecord
    output: str
    proof: Proof
    findings: Findings
    file: Reading | None = None
    seconds: float = 0.0
    waits: int | None = None

    @property
    def proven(self) -> bool:
        """Every accepted prompt has exactly one current record, and it is as it was written."""
        closed = self.proof.sealed or self.proof.cancelled
        return not self.findings.counts and closed

    @property
    def done(self) -> bool:
        """Proven, and every prompt is completed."""
        proof = self.proof
        return self.proven and proof.tally.outcomes["completed"] == proof.tally.accepted


def verify(
    record: RunRecord,
    store: ObjectStore,
    findings: Findings,
    *,
    check: FileCheck | None,
    meter: MeterFor,
) -> Verdict:
    """Prove a run.

    Args:
        record: Its run.json.
        store: Its output.
        findings: Takes what is wrong.
        check: Files to compare it with, too.
        meter: Shows how far it is.

    Raises:
        HeadraceError: The store, or a file, cannot be read.
    """
    if check is None:
        proof = prove(store, record, findings, meter=meter)
        return Verdict(record=record, output=store.url, proof=proof, findings=findings)
    with catalog.Bins() as wanted:
        reading = _read_files(check, record, wanted, meter=meter)
        proof = prove(store, record, findings, meter=meter, wanted=wanted)
    return Verdict(record=record, output=store.url, proof=proof, findings=findings, file=reading)


def _read_files(
    check: FileCheck, record: RunRecord, wanted: catalog.Bins, *, meter: MeterFor
) -> Reading:
    """Read files as `enqueue` does, into lines of key, fingerprint and id."""
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        intake = Intake(
            check.files, check.rules, run=record.run, folder=Path(folder), samples=check.samples
        )
        with meter("reading files", None) as bar:
            reading = intake.read(bar)
        for batch in intake.spool.batches():
            wanted.add(
                b"%b\t%b\t%b\n"
                % (
                    prompt.key.hex().encode(),
                    prompt.fingerprint.hex().encode(),
                    bytes(_prompts.decode(prompt.prompt).id),
                )
                for prompt in batch
            )
    return reading


# --- Telling -------------------------------------------------------------------------------------


def as_text(verdict: Verdict) -> Iterator[str]:
    """Give what people read, a line each; the first one says it all."""
    yield _headline(verdict)
    for kind, heading in KINDS.items():
        count = verdict.findings.counts[kind]
        # What has not come yet is no finding while the run goes on.
        if not count or (kind == "missing" and verdict.waits is not None):
            continue
        yield f"{count:,} {heading}:"
        yield from (f"  {finding.text}" for finding in verdict.findings.first[kind])
        if count > SHOWN:
            yield f"  … and {count - SHOWN:,} more (--json lists all)"
    yield from notes(verdict)


def _headline(verdict: Verdict) -> str:
    run, tally = verdict.record.run, verdict.proof.tally
    outcomes = tally.outcomes
    parts = [f"{outcomes[word]:,} {word}" for word in ("completed", "failed", "cancelled")]
    counts = ": ".join(
        part
        for part in (
            count_of(tally.accepted, "prompt"),
            ", ".join(part for part in parts if not part.startswith("0 ")),
        )
        if part
    )
    if verdict.done:
        return f"OK: run {run}: {counts}, each exactly once, proven from {verdict.output}"
    if verdict.proven and verdict.proof.cancelled:
        return f"CANCELLED: run {run}: {counts}, each exactly once, proven from {verdict.output}"
    if verdict.proven:
        return (
            f"NOT ALL COMPLETED: run {run}: {counts}, each exactly once, proven from "
            f"{verdict.output}; `producer retry {run}` tries the "
            "others again"
        )
    only_missing = set(verdict.findings.counts) <= {"missing"}
    if only_missing:
        left = tally.accepted - tally.recorded
        why = f"{left:,} have no result yet" if left else "more prompts may come (not sealed)"
        if verdict.waits is not None:
            answers = count_of(verdict.waits, "answer")
            why += f"; the run goes on: {answers} in Redis, not stored yet"
        return f"NOT DONE: run {run}: {counts}; {why}; what is there is as it was written"
    return f"NOT PROVEN: run {run}: {counts}; {verdict.findings.counts.total():,} faults found"


def notes(verdict: Verdict) -> Iterator[str]:
    """Tell what is no fault and yet worth knowing."""
    proof = verdict.proof
    if proof.cancelled and not verdict.proven:
        yield (
            "the run was cancelled; a sink ends what is left of it, or "
            f"`producer cancel {verdict.record.run}` again"
        )
    if not proof.sealed and not proof.cancelled:
        yield (
            "the run is open: more prompts may come, "
            f"`producer resume {verdict.record.run} --seal` ends that"
        )
    if verdict.proven and not proof.success and not proof.cancelled:
        yield "there is no _SUCCESS yet: a sink or worker group writes it when the run has ended"
    if proof.tally.superseded:
        yield f"{count_of(proof.tally.superseded, 'earlier result')} superseded by a later try"
    if proof.tally.changed:
        yield f"{proof.tally.changed:,} answers are to a text that was replaced afterwards"
    if proof.voids:
        yield f"{count_of(proof.voids, 'sequence')} given up (void)"
    if proof.strays:
        yield f"{count_of(proof.strays, 'object')} that no manifest names; readers skip them"
    if verdict.file is not None and verdict.file.rejected:
        yield f"{count_of(verdict.file.rejected, 'row')} of {verdict.file.source} cannot be used"


def as_json(verdict: Verdict) -> Iterator[bytes]:
    """Give the one object of `--json` in pieces: it lists every finding, however many."""
    proof, outcomes = verdict.proof, verdict.proof.tally.outcomes
    told: dict[str, Any] = {
        "run": verdict.record.run,
        "output": verdict.output,
        "ok": verdict.done,
        "proven": verdict.proven,
        "total": proof.tally.accepted,
        "completed": outcomes["completed"],
        "failed": outcomes["failed"],
        "cancelled": outcomes["cancelled"],
        "missing": proof.tally.accepted - proof.tally.recorded,
        "superseded": proof.tally.superseded,
        "sealed": proof.sealed,
        "run_cancelled": proof.cancelled,
        "success": proof.success,
        "manifests": proof.manifests,
        "voids": proof.voids,
        "strays": proof.strays,
        "rows": proof.rows,
        "bytes": proof.bytes,
        "total_input_tokens": proof.tally.input_tokens,
        "total_output_tokens": proof.tally.output_tokens,
        "seconds": round(verdict.seconds, 3),
        "counts": dict(verdict.findings.counts),
    }
    yield msgspec.json.encode(told)[:-1] + b',"findings":['
    comma = b""
    for finding in verdict.findings.all():
        yield comma + finding
        comma = b","
    yield b"]}\n"
