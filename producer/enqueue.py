"""`producer enqueue`: from files of prompts to queued jobs, so that a kill anywhere costs nothing.

    1. find the run, in Redis or else in the store, and refuse what contradicts it     nothing is
    2. pass 1: read and check every row, spool it on disk                              written
    3. compare every prompt with the ledger
    4. make the run; register as open; remove `_SUCCESS` where prompts are added
    5. pass 2: `inputs/`, then the queue
    6. seal, and close

Ended between any two of these, the same call again goes on: nothing counts twice, since a prompt
is its key. A producer that was killed stays registered as open, so the run cannot pass for
complete before the rest has come.
"""

import tempfile
from pathlib import Path

from producer.intake import Intake
from producer.meter import Meter, MeterFor
from producer.prompts.reader import STDIN
from producer.prompts.rows import RowRules
from producer.request import Outcome, Request, Say


def enqueue(request: Request, *, say: Say, meter: MeterFor = Meter) -> Outcome:
    """Carry out one call; see the module.

    Raises:
        HeadraceError: With the exit code of the command; rows that cannot be used are an outcome.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        if request.dry_run:
            return read(request, request.rules, Path(folder), meter=meter)[0]
        # Redis' client is slow to import, and a dry run needs none.
        from producer.queueing import Call  # noqa: PLC0415

        return Call(request, Path(folder), say=say, meter=meter).carry_out()


def read(
    request: Request, rules: RowRules, folder: Path, *, meter: MeterFor
) -> tuple[Outcome, Intake]:
    """Carry out pass 1; exit code 3 in the outcome says that nothing may be queued."""
    intake = Intake(request.files, rules, run=request.run, folder=folder, limit=request.limit)
    with meter("reading", _size_bytes(request.files)) as bar:
        reading = intake.read(bar)
    outcome = Outcome(run=request.run, reading=reading, notes=[])
    unusable = reading.no_prompts if request.skip_invalid else reading.problem
    if reading.refused or unusable:
        outcome.exit_code = 3
    if reading.answered:
        outcome.notes.append(
            f"{reading.answered:,} rows of messages end with an assistant turn and are sent as "
            "they are: --turns last drops that turn and asks for it again"
        )
    return outcome, intake


def _size_bytes(files: tuple[str, ...]) -> int | None:
    try:
        return sum(Path(name).stat().st_size for name in files) if STDIN not in files else None
    except OSError:
        return None  # said when it is opened
