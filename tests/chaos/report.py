"""What came of campaigns: rounds as JSON, added up, and the tables for people."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tests.chaos.schedule import KINDS


class Kill(msgspec.Struct, frozen=True):
    """How many processes of a kind died at a point.

    Attributes:
        how: `random`: at a random moment, after passing the point; `armed`: at the point itself.
    """

    kind: str
    how: str
    point: str
    count: int


class Round(msgspec.Struct, kw_only=True):
    """One round's verdict.

    Attributes:
        command: That plays it again.
        wrong: What must not be; empty when all is well.
        redone, at_risk: Requests beyond one a prompt; how many the deaths could cost at most.
        forgot: Deaths of Redis after which answered writes were gone; `forgot_s` the longest span.
        most_open: The most requests of live processes at one server, which may have `bound`.
        stood_still_s: The longest that the machine kept the runner itself from looking.
        failed: Prompts that ended as failures before they were tried again.
    """

    seed: int
    command: str
    fsync: str
    store: str
    prompts: int
    seconds: float = 0.0
    kills: list[Kill] = []
    missed: dict[str, int] = {}
    others: dict[str, int] = {}
    redone: int = 0
    at_risk: int = 0
    forgot: int = 0
    forgot_s: float = 0.0
    most_open: int = 0
    bound: int = 0
    failed: int = 0
    stood_still_s: float = 0.0
    verified: bool = False
    wrong: list[str] = []

    @property
    def total(self) -> int:
        return sum(kill.count for kill in self.kills)

    @property
    def well(self) -> bool:
        return self.verified and not self.wrong


def read(path: Path) -> list[Round]:
    """Read the rounds that an earlier campaign wrote; none where there is no file."""
    return msgspec.json.decode(path.read_bytes(), type=list[Round]) if path.exists() else []


def write(path: Path, rounds: list[Round]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(rounds), indent=1) + b"\n")


def text_of(rounds: list[Round]) -> str:
    """Write the tables as Markdown: kills by kind and point, then a line a round."""
    by_point: Counter[tuple[str, str, str]] = Counter()
    for each in rounds:
        for kill in each.kills:
            by_point[kill.kind, kill.point, kill.how] += kill.count
    lines = ["| kind | last crash point passed | random | armed |", "|---|---|---:|---:|"]
    for kind in KINDS:
        points = sorted({point for k, point, _ in by_point if k == kind})
        lines += [
            f"| {kind} | {point} | {by_point[kind, point, 'random']} "
            f"| {by_point[kind, point, 'armed']} |"
            for point in points
        ]
        lines.append(_sum_line(kind, by_point))
    lines += ["", _totals(rounds, by_point), ""]
    columns = (
        "seed",
        "AOF",
        "store",
        "prompts",
        "kills",
        "redone",
        "at risk",
        "Redis forgot",
        "most open",
        "s",
        "",
    )
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [_round_line(each) for each in rounds]
    return "\n".join(lines) + "\n"


def _sum_line(kind: str, by_point: Counter[tuple[str, str, str]]) -> str:
    sums = [
        sum(count for (k, _, h), count in by_point.items() if k == kind and h == how)
        for how in ("random", "armed")
    ]
    return f"| **{kind}** | **{sum(sums)}** | **{sums[0]}** | **{sums[1]}** |"


def _totals(rounds: Iterable[Round], by_point: Counter[tuple[str, str, str]]) -> str:
    rounds = list(rounds)
    well = sum(each.well for each in rounds)
    redone = sum(each.redone for each in rounds)
    at_risk = sum(each.at_risk for each in rounds)
    prompts = sum(each.prompts for each in rounds)
    return (
        f"{by_point.total()} kills in {len(rounds)} rounds of {prompts} prompts together; "
        f"{well} rounds verified and accounted for; {redone} requests redone of at most {at_risk} "
        "that were at risk."
    )


def _round_line(each: Round) -> str:
    forgot = f"{each.forgot} ({each.forgot_s:.2f} s)" if each.forgot else "0"
    state = "ok" if each.well else "; ".join(each.wrong)[:200].replace("|", "/")
    return (
        f"| {each.seed} | {each.fsync} | {each.store} | {each.prompts} | {each.total} "
        f"| {each.redone} | {each.at_risk} | {forgot} | {each.most_open}/{each.bound} "
        f"| {each.seconds:.0f} | {state} |"
    )
