"""Know what differs between versions of SGLang, where a launch line or a reader has to. Pure.

0.5.7 (2026-01) to 0.5.23 (2026-10), found in the wheels; `tests/sglang_flags` has their parsers.
"""

import re

from common.errors import UsageError

OLDEST = (0, 5, 7)
"""The first with a strategy for the states of hybrid models; older ones are refused."""

NEWEST_KNOWN = (0, 5, 23)

_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")

Release = tuple[int, int, int]

_LAZY: Release = (0, 5, 13)
_RENAMED: Release = (0, 5, 14)

_STRATEGIES = ("no_buffer", "extra_buffer", "extra_buffer_lazy")


def release_of(version: str) -> Release:
    """Read a version: 0.5.12.post1, 0.5.14rc1 and 0.5.14.dev3 count as the release they are of.

    Raises:
        UsageError: It is no version, or an older one than is known here.
    """
    found = _VERSION.match(version)
    if found is None:
        raise UsageError(f"SGLang's version is {version!r}, which is none: is it installed whole?")
    release = (int(found[1]), int(found[2]), int(found[3] or 0))
    if release < OLDEST:
        raise UsageError(
            f"SGLang {version} is older than {_dotted(OLDEST)}, the oldest that is known here: "
            f"upgrade it (pip install 'sglang>={_dotted(OLDEST)}')"
        )
    return release


def is_newer_than_known(release: Release) -> bool:
    """Whether nothing is known of it, so that it is taken for the newest that is."""
    return release > NEWEST_KNOWN


def strategy_flag(release: Release) -> str:
    """Name the flag that says how the states of a hybrid model are kept."""
    return "--mamba-radix-cache-strategy" if release >= _RENAMED else "--mamba-scheduler-strategy"


def strategies(release: Release) -> tuple[str, ...]:
    """List the values that the flag takes, without `auto`."""
    return _STRATEGIES if release >= _LAZY else _STRATEGIES[:2]


def no_buffer_companions(release: Release) -> tuple[str, ...]:
    """List the flags without which no_buffer does not start.

    Up to 0.5.13 the server sets both itself, with a warning; from 0.5.14 on it ends with an
    AssertionError where they are missing.
    """
    return ("--disable-overlap-schedule", "--page-size", "1") if release >= _RENAMED else ()


def auto_means(release: Release) -> str:
    """Say what the server makes of `auto` as a rule, for people."""
    if release < _RENAMED:
        return "no_buffer"
    return "extra_buffer where the model and the machine have it, else no_buffer"


def named_here(flag: str, release: Release) -> str:
    """Give the name that a flag has in this version; its own where it was never renamed."""
    for older, newer in _RENAMED_FLAGS:
        if flag in {older, newer}:
            return newer if release >= _RENAMED else older
    return flag


_RENAMED_FLAGS = (
    ("--mamba-scheduler-strategy", "--mamba-radix-cache-strategy"),
    ("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"),
    ("--cuda-graph-bs", "--cuda-graph-bs-decode"),
)
"""In 0.5.14. Up to 0.5.19 the older names are taken with a warning, from 0.5.20 on refused."""


def _dotted(release: Release) -> str:
    return ".".join(map(str, release))
