"""Step 2 of `producer.enqueue`: pass 1 over the files, and what it means for the call."""

from pathlib import Path

from producer.intake import Intake
from producer.meter import MeterFor
from producer.prompts.reader import STDIN
from producer.prompts.rows import RowRules
from producer.request import Outcome, Request


def read(
    request: Request, rules: RowRules, folder: Path, *, meter: MeterFor
) -> tuple[Outcome, Intake]:
    """Carry out pass 1; exit code 3 in the outcome says that nothing may be queued."""
    intake = Intake(
        request.files,
        rules,
        run=request.run,
        folder=folder,
        limit=request.limit,
        samples=request.samples,
    )
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
