"""The named crash points, read from the code, so that a new one joins by itself."""

import re
from collections.abc import Iterator
from functools import cache

from tests.chaos.schedule import Kind
from tests.conftest import REPOSITORY

_REACHED = re.compile(r'reached\(f?"([^"]+)"')
_OBJECT = re.compile(r"\{[^}]*\}")
OBJECTS = ("shards", "failures", "keys")
"""What `sink.{folder}` stands for."""

OF_SINKS = {"partition", "sink", "run_sink", "batch", "reading", "unstorable", "progress"}
OF_ENQUEUE = {"adding", "queueing", "accepted", "joining", "mending", "resume"}
"""Modules of `producer` that the producers of a round come through."""

COMMON = {
    "sink": ("reconcile", "end", "feed"),
    "group": ("reconcile", "feed", "claim", "finish", "renew", "reap", "slots"),
    "producer": ("enqueue", "adopt"),
}
"""Which points of `common` a kind may come to, by their first word."""


@cache
def points_of(kind: Kind) -> tuple[str, ...]:
    """List the points that a process of this kind may die at, in order.

    Those of its own package stand there three times: it comes to them more often than to those of
    what it does now and then, and who picks one wants to see it die.
    """
    found = {
        point: package
        for package, module, point in all_points()
        if _passes(kind, package, module, point)
    }
    return tuple(
        point
        for point, package in sorted(found.items())
        for _ in range(1 if package == "common" else 3)
    )


def all_points() -> Iterator[tuple[str, str, str]]:
    """Give every point with its package and module."""
    for package in ("common", "producer", "workers"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            if "simulator" in path.parts:
                continue
            for name in _REACHED.findall(path.read_text(encoding="utf-8")):
                for each in OBJECTS if "{" in name else ("",):
                    yield package, path.stem, _OBJECT.sub(each, name)


def _passes(kind: Kind, package: str, module: str, point: str) -> bool:
    if package == "producer":
        return kind == "producer" and module in OF_ENQUEUE
    if package == "workers":
        return kind == ("sink" if module in OF_SINKS else "group")
    return point.partition(".")[0] in COMMON.get(kind, ())
