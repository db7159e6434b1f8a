"""What the first server of a run pins (protocol.md §1), and how another differs from it. Pure."""

from collections.abc import Mapping
from typing import Any

PINNED = (
    "model",
    "model_path",
    "context_length",
    "template_hash",
    "reasoning_parser",
    "sampling_defaults",
)
"""Members of a server's identity that decide what its answers are; None is one that it lacks."""


def identity_of(server: object) -> dict[str, Any]:
    """Take what a run pins from all that a server says of itself."""
    return {name: getattr(server, name) for name in PINNED}


def difference(pinned: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    """Say how a server differs from the run's first one; empty where it does not.

    Args:
        pinned: What the first one was. A member that is missing, of an older Headrace, fits all.
        identity: What this one is.
    """
    return ", ".join(
        f"{name} {identity.get(name)} instead of {pinned[name]}"
        for name in PINNED
        if name in pinned and pinned[name] != identity.get(name)
    )
