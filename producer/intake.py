"""Pass 1: read every file, check every row, spool what is accepted. Writes nothing elsewhere."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from common.errors import InputError, UsageError
from common.harmless import one_line
from producer.meter import Meter
from producer.prompts.reader import STDIN, FileReader
from producer.prompts.rows import RowChecker, RowRules
from producer.prompts.verdicts import FileRefusedError, Reject, shown
from producer.spool import Spool, no_room

KEPT_REJECTS = 10_000
"""Rejects that are kept for the report; all are counted, and all are written to a file."""

_SHOWN_REJECTS = 20
_SHOWN_ID = 60
_SHOWN_UNSENT = 5
_TICK_ROWS = 1024
_ROW_TEXT_BYTES = 1024 * 1024
"""A longer rejected line is named in the file of rejects, but not repeated there."""

_encode = msgspec.json.Encoder().encode


class Reading(msgspec.Struct, kw_only=True):
    """What the files held. lines_read = ok + duplicates + blank + rejected.

    Attributes:
        source: The files as they were named.
        ok: Distinct rows that were accepted.
        samples: Prompts that each of them becomes.
        rejects: The first KEPT_REJECTS of them.
        model: That all rows have, by the flags or by themselves; None where nothing names one.
        answered: Rows of `messages` that end with an assistant turn and are sent as they are.
        unsent: Members of plain rows that are kept with the prompt and not sent -> rows.
        refused: The message of the file that was refused whole; then all else is 0.
    """

    source: str
    lines_read: int = 0
    ok: int = 0
    samples: int = 1
    duplicates: int = 0
    blank: int = 0
    rejected: int = 0
    rejects: list[Reject] = []
    model: str | None = None
    answered: int = 0
    unsent: dict[str, int] = {}
    refused: str = ""

    @property
    def prompts(self) -> int:
        """How many prompts the accepted rows are."""
        return self.ok * self.samples

    @property
    def problem(self) -> str:
        """Say why nothing is queued from these files, empty when there is no reason."""
        if self.refused:
            return self.refused
        if not self.rejected:
            return self.no_prompts
        rows = "row" if self.rejected == 1 else "rows"
        return (
            f"{self.rejected:,} {rows} of {self.source} cannot be used, so nothing was queued: "
            "mend them, or pass --skip-invalid to queue the others"
        )

    @property
    def no_prompts(self) -> str:
        """Say that there is nothing to queue, empty when there is."""
        if self.ok:
            return ""
        return f"{self.source} holds no prompts" + (
            f": all of its {self.rejected:,} rows were rejected" if self.rejected else ""
        )

    def unsent_line(self) -> str:
        """Say what is kept and not sent, most frequent first: a mistyped parameter is there."""
        told = [
            f"{one_line(name, _SHOWN_ID)} ({rows:,} {'row' if rows == 1 else 'rows'})"
            for name, rows in [*self.unsent.items()][:_SHOWN_UNSENT]
        ]
        if len(self.unsent) > _SHOWN_UNSENT:
            told.append("…")
        return f"kept with the prompt but not sent: {', '.join(told)}" if told else ""

    def reject_lines(self) -> list[str]:
        """List the first rejects for people, a line each."""
        lines = [
            f"{shown(reject.source)} line {reject.line}{_named(reject)}: {reject.message} "
            f"({reject.reason})"
            for reject in self.rejects[:_SHOWN_REJECTS]
            if reject.line is not None
        ]
        more = self.rejected - len(lines)
        return [*lines, f"… and {more:,} more"] if lines and more > 0 else lines


class Intake:
    """Read files into a spool.

    Args:
        files: As they were named, `-` for stdin.
        rules: What the flags say about rows.
        folder: A temporary folder, for the spool and the rejects.
        limit: Stop after so many accepted rows.
        samples: Prompts that each row becomes.
    """

    def __init__(
        self,
        files: Sequence[str],
        rules: RowRules,
        *,
        run: str,
        folder: Path,
        limit: int | None = None,
        samples: int = 1,
    ) -> None:
        self._files = files
        self._rules = rules
        self._limit = limit
        self.spool = Spool(run, folder, samples=samples)
        self.rejected_path = folder / "rejected"
        self._rejected_file: BinaryIO | None = None
        source = ", ".join(shown(name) for name in files)
        self._reading = Reading(source=source, samples=samples, rejects=[])

    def read(self, meter: Meter) -> Reading:
        """Read all files and settle which rows repeat another.

        Raises:
            UsageError: A file cannot be read, a row lacks a limit of tokens, or no row has the
                member that `--id-field` names.
            BackendError: No room for the spool.
        """
        reading = self._reading
        checker = RowChecker(self._rules)
        try:
            self._read_files(checker, meter)
            self.spool.finish()
            self._reject_conflicts()
            self._close_rejected()
        except FileRefusedError as error:
            return _refused(reading, error)
        except OSError as error:
            raise no_room(error, self.rejected_path) from error
        finally:
            self.spool.close()
            with suppress(OSError):
                self._close_rejected()
        field = self._rules.id_field
        if field and self.spool.rows and not checker.ids_found:
            raise UsageError(
                f"no row of {reading.source} has a member {field!r}: correct --id-field, or leave "
                "it out to name rows by their content"
            )
        reading.ok = self.spool.distinct
        reading.duplicates = self.spool.duplicates
        reading.lines_read = reading.ok + reading.duplicates + reading.blank + reading.rejected
        reading.model = checker.model
        reading.answered = checker.answered
        reading.unsent = dict(checker.unsent.most_common())
        return reading

    def _read_files(self, checker: RowChecker, meter: Meter) -> None:
        for number, source in enumerate(self._files):
            reader = FileReader(
                source,
                checker,
                on_reject=self._reject,
                on_read=lambda done: meter.show(self.spool.rows, part=done),
            )
            name = "" if source == STDIN else Path(source).name
            left = None if self._limit is None else self._limit - self.spool.rows
            taken = 0
            for line, row in reader.rows():
                self.spool.add(row, source=number, name=name, line=line)
                taken += 1
                if taken == left:
                    break
                if not taken % _TICK_ROWS:
                    meter.show(self.spool.rows, part=reader.read_bytes)
            meter.end_part(reader.read_bytes)
            self._reading.blank += reader.blank
            if taken == left:
                return

    def _close_rejected(self) -> None:
        if self._rejected_file is not None:
            self._rejected_file.close()

    def _reject(self, reject: Reject, line: bytes | None) -> None:
        reading = self._reading
        reading.rejected += 1
        if len(reading.rejects) < KEPT_REJECTS:
            reading.rejects.append(reject)
        if self._rejected_file is None:
            self._rejected_file = self.rejected_path.open("wb")
        row: dict[str, Any] = msgspec.structs.asdict(reject)
        if line is not None and len(line) <= _ROW_TEXT_BYTES:
            row["row"] = line.decode(errors="backslashreplace")
        self._rejected_file.write(_encode(row) + b"\n")

    def _reject_conflicts(self) -> None:
        """Reject rows that have another row's id; that row stays."""
        for conflict in self.spool.conflicting():
            first = shown(self._files[conflict.first_source])
            source = self._files[conflict.source]
            where = "" if source == self._files[conflict.first_source] else f" of {first}"
            reject = Reject(
                line=conflict.line,
                id=msgspec.json.decode(conflict.id_json),
                reason="dup_id_conflict",
                message=f"has the id of line {conflict.first_line}{where} and another request: "
                f"lines {conflict.first_line} and {conflict.line} need ids of their own",
                source=source,
            )
            self._reject(reject, conflict.prompt)
        # Found last, but told in the order of the lines like all others.
        order = {name: number for number, name in enumerate(self._files)}
        self._reading.rejects.sort(key=lambda reject: (order[reject.source], reject.line or 0))


def _named(reject: Reject) -> str:
    """Name the row for people; an id as long as a text is not one that they look for."""
    if reject.id is None:
        return ""
    return f" (id {one_line(str(reject.id), _SHOWN_ID)})"


def _refused(reading: Reading, error: FileRefusedError) -> Reading:
    reject = Reject(
        line=None, id=None, reason=error.reason, message=error.message, source=error.source
    )
    return Reading(
        source=reading.source,
        samples=reading.samples,
        lines_read=1,
        rejected=1,
        rejects=[reject],
        refused=str(error),
    )


def place_rejects(path: Path, files: Sequence[str], *, run: str) -> Path:
    """Move the file of rejects to where its reader will look.

    Args:
        path: Where pass 1 wrote it.
        files: The inputs: one file gives `FILE.rejected.jsonl` beside it, or in the current
            directory where that may not be written; several, or stdin, give RUN.rejected.jsonl.
        run: Name of the run.

    Raises:
        InputError: It can be written in neither place.
    """
    name = f"{run}.rejected.jsonl"
    folders = [Path()]
    if len(files) == 1 and files[0] != STDIN:
        name = f"{stem_of(files[0])}.rejected.jsonl"
        folders.insert(0, Path(files[0]).parent)
    fault = ""
    for folder in folders:
        target = folder / name
        try:
            target.write_bytes(b"")
            with path.open("rb") as rejects, target.open("wb") as file:
                while piece := rejects.read(1024 * 1024):
                    file.write(piece)
        except OSError as error:
            fault = str(error.strerror)
        else:
            return target
    raise InputError(f"{name} cannot be written ({fault}): call this from another directory")


_ENDINGS = (".gz", ".zst", ".jsonl", ".ndjson", ".json", ".parquet", ".txt")


def stem_of(file: str) -> str:
    """Give a file's name without folder and known endings: `a/x.jsonl.gz` gives `x`."""
    name = Path(file).name
    shorter = True
    while shorter:
        shorter = False
        for ending in _ENDINGS:
            if name.lower().endswith(ending) and len(name) > len(ending):
                name = name[: -len(ending)]
                shorter = True
    return name
