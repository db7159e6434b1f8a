"""Know in what launch lines differ between versions of SGLang. Pure.

Found in the wheels; `tests/sglang_flags` has their parsers.
"""

from common.errors import UsageError
from workers.releases import (
    AUTO_BUFFERS_SINCE,
    NEWEST_KNOWN,
    OLDEST,
    STRATEGY_SINCE,
    Release,
    dotted,
    is_untagged,
    release_of,
)

_RENAMED: Release = (0, 5, 14)


def release_to_launch(version: str) -> Release:
    """Read a version that is to be launched; one that tells no release is taken for the newest.

    Raises:
        UsageError: It is no version, or an older one than is known here.
    """
    if is_untagged(version):
        return NEWEST_KNOWN
    release = release_of(version)
    if release is None:
        raise UsageError(f"SGLang's version is {version!r}, which is none: is it installed whole?")
    if release < OLDEST:
        raise UsageError(
            f"SGLang {version} is older than {dotted(OLDEST)}, the oldest that is known here: "
            f"upgrade it (pip install 'sglang>={dotted(OLDEST)}')"
        )
    return release


def is_newer_than_known(release: Release) -> bool:
    """Whether nothing is known of it, so that it is taken for the newest that is."""
    return release > NEWEST_KNOWN


def strategy_flag(release: Release) -> str:
    """Name the flag that says how the states of a hybrid model are kept."""
    return named_here("--mamba-radix-cache-strategy", release)


def strategies(release: Release) -> tuple[str, ...]:
    """List the values that the flag takes, without `auto`."""
    return tuple(each for each, since in STRATEGY_SINCE.items() if release >= since)


def no_buffer_companions(release: Release) -> tuple[str, ...]:
    """List the flags without which no_buffer does not start.

    Up to 0.5.13 the server sets both itself, with a warning; from 0.5.14 on it ends with an
    AssertionError where they are missing.
    """
    return ("--disable-overlap-schedule", "--page-size", "1") if release >= _RENAMED else ()


def auto_means(release: Release) -> str:
    """Say what the server makes of `auto` as a rule, for people."""
    if release < AUTO_BUFFERS_SINCE:
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
