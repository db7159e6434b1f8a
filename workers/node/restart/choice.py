"""Choose which servers to restart, and see that what is asked can be had; asks nobody."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from common.errors import BackendError, UsageError
from workers.releases import STRATEGIES, is_offered
from workers.supervisor.records import ServerRecord, Wanted

State = Literal["restarted", "skipped", "failed", "stopped", "not begun"]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of each server.

    Attributes:
        strategy: None leaves it.
        arguments: SGLang's own, in place of those of earlier restarts; None leaves them.
        force: Restart also what has it already.
    """

    strategy: str | None = None
    arguments: tuple[str, ...] | None = None
    force: bool = False

    @property
    def text(self) -> str:
        """In words, for those who wait for it."""
        parts = [f"strategy {self.strategy}"] if self.strategy else []
        parts += ["other flags"] if self.arguments is not None else []
        return ", ".join(parts) or "as it is"

    @property
    def changes(self) -> bool:
        """Whether it asks for anything but a restart."""
        return self.strategy is not None or self.arguments is not None


class Had(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is launched by, and what that comes to."""

    strategy: str
    cap: int | None
    version: str

    @property
    def text(self) -> str:
        """For people: `extra_buffer 32 slots`."""
        slots = "unknown slots" if self.cap is None else f"{self.cap:,} slots"
        return f"{self.strategy or 'no states'} {slots}"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one server.

    Attributes:
        name: `gpu0@host`.
        state: stopped: whoever called was interrupted.
        before, after: What it had, and what it has; None where nobody knows.
        detail: Why, for people.
        code: What the command exits with for it.
        drained_s, away_s: How long it took to empty it, and to have it back.
    """

    name: str
    state: State
    before: Had | None = None
    after: Had | None = None
    detail: str = ""
    code: int = 0
    drained_s: float | None = None
    away_s: float | None = None


def had(record: ServerRecord) -> Had:
    """Say what a server has."""
    return Had(strategy=record.strategy, cap=record.cap, version=record.version)


def choose(records: Sequence[ServerRecord], gpus: Sequence[int] | None) -> list[ServerRecord]:
    """Give the servers that are meant, by GPU.

    Args:
        records: Those of this machine.
        gpus: On which GPUs; None for all.

    Raises:
        UsageError: There is none, or none on one of these GPUs.
    """
    if not records:
        raise UsageError(
            "no server here has a supervisor of Headrace's: `workers restart` restarts what "
            "`workers serve` or `workers up` runs on this machine (--state-dir says where they "
            "keep their records); servers that were attached are restarted by whoever runs them"
        )
    if gpus is None:
        return list(records)
    missing = set(gpus) - {gpu for record in records for gpu in record.gpus}
    if missing:
        known = ", ".join(record.name for record in records)
        raise UsageError(
            f"--gpu: no server of ours runs on GPU {', '.join(map(str, sorted(missing)))} of this "
            f"machine; there are {known}"
        )
    return [record for record in records if set(record.gpus) & set(gpus)]


def refuse_impossible(records: Sequence[ServerRecord], asked: Asked) -> None:
    """See, before anything is touched, that each server can be asked for this.

    Raises:
        UsageError: The strategy is none for its model or its version of SGLang.
        BackendError: Nobody watches it who would do it.
    """
    for record in records:
        if not record.supervisor.alive:
            raise BackendError(
                f"{record.name}: its supervisor (pid {record.supervisor.pid}) is gone, and nobody "
                "else would launch it: call `workers serve` for it again, then this"
            )
        _refuse_strategy(record, asked.strategy)


def _refuse_strategy(record: ServerRecord, strategy: str | None) -> None:
    known = next((each for each in STRATEGIES if each == strategy), None)
    if known is None:
        return  # none, or one that the launch chooses itself
    if record.version and not is_offered(known, record.version):
        raise UsageError(
            f"--strategy {strategy}: SGLang {record.version} of {record.name} does not know it"
        )
    if not record.strategy and record.state == "ready" and known != "no_radix":
        raise UsageError(
            f"--strategy {strategy}: it says how states of hybrid models are kept, and the model "
            f"of {record.name} has none"
        )


def has_already(record: ServerRecord, standing: Wanted | None, asked: Asked) -> bool:
    """Whether a server runs by what is asked.

    Args:
        record: Of the server.
        standing: The order that was given to it last; None without one.
        asked: What is asked now; a restart for its own sake is never done already.
    """
    if asked.force or not asked.changes or record.state != "ready":
        return False
    order = standing if standing and standing.over == record.flags else None
    if order is not None and (order.serial != record.serial or record.refused):
        return False  # it has not been carried out
    arguments = (order.arguments if order else None) or ()
    if asked.arguments is not None and asked.arguments != arguments:
        return False
    if asked.strategy is None:
        return True
    ordered = order.strategy if order else None
    return asked.strategy in {record.strategy, ordered}


def is_ordered(record: ServerRecord, standing: Wanted | None, asked: Asked) -> bool:
    """Whether an earlier call has ordered just this, and it has not come to its end yet.

    Args:
        record: Of the server.
        standing: The order that was given to it last; None without one.
        asked: What is asked now.
    """
    if standing is None or standing.over != record.flags or not asked.changes:
        return False
    open_still = standing.serial > record.serial or (
        standing.serial == record.serial and record.state != "ready" and not record.refused
    )
    same = asked.strategy in {None, standing.strategy}
    return open_still and same and asked.arguments in {None, standing.arguments}
