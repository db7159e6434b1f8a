"""Read which release of SGLang a version is, and since which release what differs. Pure.

Found in the wheels of 0.5.7 (2026-01) to 0.5.23 (2026-10). What one place alone has to know of a
release stands there: launch lines in `supervisor.versions`, caps in `capacity.capacity`, token ids
in `client.token_ids`.
"""

import re
from collections.abc import Mapping
from typing import Literal

Release = tuple[int, int, int]

OLDEST: Release = (0, 5, 7)
"""The first with a strategy for the states of hybrid models."""

NEWEST_KNOWN: Release = (0, 5, 23)

Strategy = Literal["no_buffer", "extra_buffer", "extra_buffer_lazy", "no_radix"]
"""How a server keeps the states of a hybrid model; `no_radix` is its prefix cache switched off."""

STRATEGIES: tuple[Strategy, ...] = ("no_buffer", "extra_buffer", "extra_buffer_lazy", "no_radix")

STRATEGY_SINCE: Mapping[str, Release] = {
    "no_buffer": OLDEST,
    "extra_buffer": OLDEST,
    "extra_buffer_lazy": (0, 5, 13),
}

AUTO_BUFFERS_SINCE: Release = (0, 5, 14)
"""Since then `auto` means `extra_buffer` where the overlap scheduler runs; before, `no_buffer`."""

_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")
_BEYOND: Release = (999, 0, 0)


def release_of(version: str) -> Release | None:
    """Read a version: 0.5.12.post1, 0.5.14rc1 and 0.5.14.dev3 count as the release they are of.

    Returns:
        None for what is no version, or that of a build from a checkout without its tags.
    """
    found = _VERSION.match(version)
    if found is None or is_untagged(version):
        return None
    return int(found[1]), int(found[2]), int(found[3] or 0)


def is_untagged(version: str) -> bool:
    """Whether SGLang was built where no tag told its release: 0.0.0.dev0 is what it says then."""
    return version.removeprefix("v").startswith("0.0.0")


def release_or_newest(version: str) -> Release:
    """Read a version; one that cannot be read counts as newer than all."""
    return release_of(version) or _BEYOND


def dotted(release: Release) -> str:
    """Write a release as its version."""
    return ".".join(map(str, release))


def is_offered(strategy: Strategy, version: str) -> bool:
    """Whether a version of SGLang knows a strategy; one that is unknown counts as the newest."""
    since = STRATEGY_SINCE.get(strategy)
    return since is None or release_or_newest(version) >= since


def resolved(told: str | None, *, version: str, overlap: bool = True) -> Strategy | None:
    """Say which strategy a server runs by, of what its arguments say; None where they don't.

    Args:
        told: Of its arguments; `no_radix` for a prefix cache switched off.
        version: SGLang's.
        overlap: Whether its overlap scheduler runs.
    """
    if told == "auto":
        buffers = overlap and release_or_newest(version) >= AUTO_BUFFERS_SINCE
        return "extra_buffer" if buffers else "no_buffer"
    return next((each for each in STRATEGIES if each == told), None)
