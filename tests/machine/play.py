"""Play the machine: `make soak`, or `python -m tests.machine.play --minutes 60 --seed 7`.

Goes through seeds and kinds until the time is over; each failure is told with the seed that
brings it back (`--seed N --kind K --once`, and `--shrink` for the shortest way to it). Ends with
how often each rule did what it is for. Exit code 1 where anything failed.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Iterator
from typing import cast

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.machine.machine import (
    Machine,
    OnDirectories,
    WithoutConditionsAndWithoutFreezes,
    WithoutConditionsAndWithoutRewinds,
)
from tests.machine.world import HITS

KINDS: dict[str, type[Machine]] = {
    kind.__name__: kind
    for kind in (
        Machine,
        WithoutConditionsAndWithoutFreezes,
        OnDirectories,
        WithoutConditionsAndWithoutRewinds,
    )
}


def play(
    kind: str, *, number: int | None, examples: int, steps: int, shrink: bool = False
) -> None:
    """Play some examples of one kind; without a number always the same ones."""
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    machine = cast("type[RuleBasedStateMachine]", type(kind, (KINDS[kind],), {}))
    if number is not None:
        machine = seed(number)(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=number is None,
            database=None,
            deadline=None,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=KINDS, default=None)
    parser.add_argument("--examples", type=int, default=30, help="a seed")
    parser.add_argument("--steps", type=int, default=50, help="an example, at most")
    parser.add_argument("--once", action="store_true", help="only this seed")
    parser.add_argument("--shrink", action="store_true")
    return parser.parse_args()


def main() -> int:
    asked = _arguments()
    number, failures, until_s = asked.seed, 0, time.monotonic() + asked.minutes * 60
    while True:
        kind = asked.kind or [*KINDS][number % len(KINDS)]
        try:
            play(
                kind,
                number=number,
                examples=asked.examples,
                steps=asked.steps,
                shrink=asked.shrink,
            )
        except Exception:  # noqa: BLE001 - told, and the next seed is played
            failures += 1
            told_of = f"FAILED after {HITS['steps']:,} steps: --seed {number} --kind {kind}"
            _say(f"{told_of}\n{traceback.format_exc()}")
        number += 1
        if asked.once or time.monotonic() >= until_s:
            break
    for line in told():
        _say(line)
    _say(f"{HITS['steps']:,} steps, seeds {asked.seed} to {number - 1}, {failures} failed")
    return 1 if failures else 0


def told() -> Iterator[str]:
    """How often each rule did what it is for."""
    yield from (f"{count:9,} {what}" for what, count in sorted(HITS.items()))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
