"""Judge a run by the lines of `producer.evidence`, some thousand keys at a time. Pure.

What holds for every key: it was accepted; it has one current record by the reader function, at
most one record a try and at most one completion; every record has its row, every row its record;
and the row answers the request that was accepted under that key.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from common.models import Record
from common.reader import current_records, parse_key_line
from producer.evidence import AFTER_FP, AFTER_KEY, NO_CONTENT
from producer.findings import Finding

RECORD_FIELDS = 6
MOST_STRANGERS = 100_000
"""Rows with another conversation that are kept to find whose it is; more are only told."""


class Tally(msgspec.Struct, kw_only=True):
    """A run by its store alone.

    Attributes:
        accepted: Distinct keys.
        outcomes: Current records by outcome.
        superseded: Records that another one of their key has taken the place of.
        changed: Completions of a text that was replaced later (`--accept-changes`).
        input_tokens, output_tokens: Of the current completions.
    """

    accepted: int = 0
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    superseded: int = 0
    changed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def recorded(self) -> int:
        """Keys that have a current record."""
        return self.outcomes.total()


class _Stranger(msgspec.Struct, frozen=True):
    """A row that holds another conversation than was accepted under its key."""

    accepted: bytes
    asked: bytes
    answered: bytes


class Judge:
    """Compares accepted prompts, records and rows.

    Args:
        manifests: Names of the manifests, by the numbers that lines give them.

    Attributes:
        tally: What was found to be there.
    """

    def __init__(self, manifests: Sequence[str]) -> None:
        self.tally = Tally()
        self._manifests = manifests
        self._strangers: list[_Stranger] = []

    def judge(
        self, accepted: Sequence[bytes], recorded: Sequence[bytes], rows: Sequence[bytes]
    ) -> Iterator[Finding]:
        """Judge all keys of one bin.

        Args:
            accepted: All lines of its accepted prompts, in their order, without newlines.
            recorded: Likewise of its records.
            rows: Likewise of its rows.
        """
        records, found = _by_key(recorded), _by_key(rows)
        asked = _by_key(accepted)
        self.tally.accepted += len(asked)
        for key, prompts in asked.items():
            mine, answers = records.pop(key, []), found.pop(key, [])
            if len(mine) == len(answers) == len(prompts) == 1:
                # Nearly all of them, and told by two comparisons.
                record, prompt = mine[0], prompts[0]
                fits = record[:AFTER_FP] == prompt[:AFTER_FP]
                if fits and answers[0] == record + prompt[AFTER_FP:]:
                    self._count(_record(record))
                    continue
            yield from self._judge_key(prompts, mine, answers)
        for key in records.keys() | found.keys():
            lines = [*records.get(key, []), *found.get(key, [])]
            yield self._finding("unknown", lines[-1], at=lines[0])

    def settle(self) -> Iterator[Finding]:
        """Tell of the rows that hold another conversation, when all keys have been judged."""
        owners = {stranger.asked: stranger.accepted for stranger in self._strangers}
        for stranger in self._strangers:
            owner = owners.get(stranger.answered)
            if owner is None:
                yield _other_conversation(stranger.accepted)
            else:
                whose = f"it holds the answer of id {_id_of(owner).decode()}"
                yield self._finding("swapped", stranger.accepted, whose)

    def _judge_key(
        self, prompts: Sequence[bytes], recorded: Sequence[bytes], rows: Sequence[bytes]
    ) -> Iterator[Finding]:
        prompt = prompts[-1]
        yield from self._rows_against_records(prompt, recorded, rows)
        for row in rows:
            yield from self._row_against_prompts(row, prompts)
        if not recorded:
            if not rows:
                yield self._finding("missing", prompt)
            return
        records = [_record(line) for line in recorded]
        yield from self._doubled(prompt, records)
        [current] = current_records(records).values()
        self._count(current)
        self.tally.superseded += len({record.try_ for record in records}) - 1

    def _rows_against_records(
        self, prompt: bytes, recorded: Sequence[bytes], rows: Sequence[bytes]
    ) -> Iterator[Finding]:
        heads = Counter(_head(row) for row in rows)
        without: list[bytes] = []
        for record in dict.fromkeys(recorded):
            count = heads.pop(record, 0)
            if count > recorded.count(record):
                yield self._finding("doubled", prompt, f"its row stands {count} times", at=record)
            if not count:
                without.append(record)
        left = {_place(head): head for head in heads}
        for record in without:
            if left.pop(_place(record), None) is None:
                yield self._finding("no_row", prompt, at=record)
            else:
                yield self._finding(
                    "altered", prompt, "it differs from what keys/ says of it", at=record
                )
        for head in left.values():
            yield self._finding("no_record", prompt, at=head)

    def _row_against_prompts(self, row: bytes, prompts: Sequence[bytes]) -> Iterator[Finding]:
        """Tell whether a row answers what was accepted under its key, in any of its texts."""
        texts = [prompt for prompt in prompts if prompt[:AFTER_FP] == row[:AFTER_FP]]
        if not texts:
            what = "its fingerprint is not the accepted one"
            yield self._finding("altered", prompts[-1], what, at=row)
            return
        prompt = texts[-1]
        if prompt is not prompts[-1] and b"\tcompleted\t" in row:
            self.tally.changed += 1
        asked, asked_id = prompt[AFTER_FP + 1 :].split(b"\t", 1)
        _, content, id_json = row.rsplit(b"\t", 2)
        if content == NO_CONTENT:
            return  # a job that could not be read: its failure says so
        if content != asked:
            if len(self._strangers) < MOST_STRANGERS:
                self._strangers.append(_Stranger(prompt, asked, content))
            else:
                yield _other_conversation(prompt)
        elif id_json != asked_id:
            yield self._finding("altered", prompt, "its id is not the accepted one", at=row)

    def _doubled(self, prompt: bytes, records: Sequence[Record]) -> Iterator[Finding]:
        tries = Counter(record.try_ for record in records)
        for try_, count in tries.items():
            if count > 1:
                yield self._finding("doubled", prompt, f"{count} results of try {try_}")
        completions = sum(record.outcome == "completed" for record in records)
        if completions > 1 and len(tries) == len(records):
            yield self._finding("doubled", prompt, f"{completions} completions")

    def _count(self, record: Record) -> None:
        self.tally.outcomes[record.outcome] += 1
        if record.outcome == "completed":
            self.tally.input_tokens += record.input_tokens
            self.tally.output_tokens += record.output_tokens

    def _finding(self, kind: str, line: bytes, detail: str = "", *, at: bytes = b"") -> Finding:
        """Make a finding of a key; `at` is a record or row whose manifest is named."""
        fields = at.split(b"\t", RECORD_FIELDS + 1)
        known = len(fields) > RECORD_FIELDS
        return Finding(
            kind=kind,
            key=line[:AFTER_KEY].decode(),
            id=_finding_id(line),
            object=self._manifests[int(fields[RECORD_FIELDS])] if known else "",
            detail=detail,
        )


def not_accepted(wanted: Sequence[bytes], accepted: Sequence[bytes]) -> Iterator[Finding]:
    """Tell of the prompts of a file that a run does not have, or has with another text.

    Args:
        wanted: key TAB fp TAB id, a line each, of one bin.
        accepted: All lines of its accepted prompts.
    """
    texts = {line[:AFTER_FP] for line in accepted}
    keys = {line[:AFTER_KEY] for line in accepted}
    for line in wanted:
        if line[:AFTER_FP] in texts:
            continue
        key = line[:AFTER_KEY]
        detail = "the run has another text for it" if key in keys else "it was never accepted"
        id_json = msgspec.Raw(line[AFTER_FP + 1 :])
        yield Finding(kind="file", key=key.decode(), id=id_json, detail=detail)


def _by_key(lines: Sequence[bytes]) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    for line in lines:
        key = line[:AFTER_KEY]
        if key in found:
            found[key].append(line)
        else:
            found[key] = [line]
    return found


def _record(line: bytes) -> Record:
    return parse_key_line(line.rpartition(b"\t")[0])


def _head(row: bytes) -> bytes:
    """Give the part of a row's line that its record's line is."""
    return row.rsplit(b"\t", 2)[0]


def _place(line: bytes) -> tuple[bytes, bytes]:
    """Give the try and the manifest of a record or of a row's head."""
    fields = line.split(b"\t")
    return fields[2], fields[RECORD_FIELDS]


def _id_of(accepted: bytes) -> bytes:
    return accepted[AFTER_FP + 1 :].split(b"\t", 1)[1]


def _finding_id(line: bytes) -> msgspec.Raw | None:
    fields = line.split(b"\t", RECORD_FIELDS + 2)
    if len(fields) == RECORD_FIELDS + 1:
        return None  # a record: keys/ holds no ids
    return msgspec.Raw(fields[-1])


def _other_conversation(accepted: bytes) -> Finding:
    return Finding(
        kind="altered",
        key=accepted[:AFTER_KEY].decode(),
        id=_finding_id(accepted),
        detail="its conversation is not the accepted one",
    )
