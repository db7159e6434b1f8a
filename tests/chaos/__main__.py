"""`python -m tests.chaos`: play rounds until there are enough kills, or the time is over."""

import argparse
import random
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from tests.chaos import report
from tests.chaos.kit import Kit
from tests.chaos.round import play_round

SHOW_EVERY_S = 10.0


def main() -> int:
    given = _arguments()
    if given.show:
        print(report.text_of([each for path in given.show for each in report.read(path)]))  # noqa: T201
        return 0
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    kit = Kit(fsync=given.redis, store=given.store, kills=given.kills_a_round)
    if given.prompts:
        kit = msgspec.structs.replace(kit, prompts=given.prompts)
    folder = Path(given.folder or tempfile.mkdtemp(prefix="chaos-"))
    deadline_s = time.monotonic() + given.minutes * 60
    rounds: list[report.Round] = []
    _say(f"seed {seed}, folders below {folder}")
    while _go_on(rounds, given, deadline_s):
        number = seed + len(rounds)
        command = shlex.join(
            [
                "python",
                "-m",
                "tests.chaos",
                "--seed",
                str(number),
                "--rounds",
                "1",
                "--redis",
                kit.fsync,
                "--store",
                kit.store,
                "--prompts",
                str(kit.prompts),
                "--kills-a-round",
                str(kit.kills),
            ]
        )
        place = folder / f"seed{number}"
        played = play_round(
            number,
            kit,
            place,
            command=command,
            limit_s=max(deadline_s - time.monotonic(), 30),
            show=_Shown(number),
        )
        rounds.append(played)
        _save(given.add, played)
        _say(
            f"seed {number}: {played.total} kills, {played.redone} redone of {played.at_risk} at "
            f"risk, {played.seconds:.0f} s, {'ok' if played.well else 'WRONG'}"
        )
        if not played.well:
            for line in played.wrong:
                _say(f"  {line}")
            _say(f"its folder is kept: {place}\nagain: {command}")
            if not given.go_on:
                break
        elif not given.keep:
            shutil.rmtree(place, ignore_errors=True)
    every = report.read(given.add) if given.add else rounds
    print(report.text_of(every))  # noqa: T201 - this is what the program is for
    return 0 if rounds and all(each.well for each in rounds) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="of the first round; the others follow")
    parser.add_argument("--minutes", type=float, default=10.0, help="after which no round begins")
    parser.add_argument("--kills", type=int, default=500, help="enough for all rounds together")
    parser.add_argument("--rounds", type=int, default=1_000)
    parser.add_argument("--kills-a-round", type=int, default=150)
    parser.add_argument("--prompts", type=int, help="a round")
    parser.add_argument("--redis", choices=["everysec", "always"], default="everysec")
    parser.add_argument("--store", choices=["directory", "s3"], default="directory")
    parser.add_argument("--add", type=Path, metavar="FILE", help="JSON of rounds, added to")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="only add these up")
    parser.add_argument("--folder", help="below which each round has its folder")
    parser.add_argument("--keep", action="store_true", help="keep all folders")
    parser.add_argument("--go-on", action="store_true", help="play on after a round that failed")
    return parser.parse_args()


def _go_on(rounds: list[report.Round], given: argparse.Namespace, deadline_s: float) -> bool:
    if len(rounds) >= given.rounds or time.monotonic() > deadline_s:
        return False
    return sum(each.total for each in rounds) < int(given.kills)


def _save(path: Path | None, played: report.Round) -> None:
    if path is not None:
        report.write(path, [*report.read(path), played])


class _Shown:
    """Shows a round's progress every few seconds."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._again_s = 0.0

    def __call__(self, line: str) -> None:
        if time.monotonic() >= self._again_s:
            self._again_s = time.monotonic() + SHOW_EVERY_S
            _say(f"seed {self._seed}: {line}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - progress


if __name__ == "__main__":
    sys.exit(main())
