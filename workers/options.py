"""What a worker group's process is told: read once from flags and environment, passed as a value."""

import os
import re
import socket
from typing import Literal

import msgspec

from common.errors import UsageError

DEFAULT_SERVER = "http://127.0.0.1:{port}"
FIRST_PORT = 30_000
DEFAULT_RAMP = 8.0
DEFAULT_GRACE_S = 25.0

_GPUS = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*")


class GroupOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One worker group.

    Attributes:
        group: `gpu0@host`; with tensor parallelism `gpu0-1@host`.
        server: Canonical URL of its SGLang server.
        concurrency: Bound asked for, or auto.
        ramp: New requests a second until the server is full once.
        grace_s: What open requests get after SIGTERM.
        runs: Serve only these; empty serves all.
        worker_name: RQ's name of this process.
        most_connections: Above every bound that may come.
    """

    group: str
    server: str
    host: str
    concurrency: int | Literal["auto"] = "auto"
    ramp: float = DEFAULT_RAMP
    grace_s: float = DEFAULT_GRACE_S
    runs: tuple[str, ...] = ()
    api_key: str | None = None
    worker_name: str = ""
    pid: int = msgspec.field(default_factory=os.getpid)
    most_connections: int = 4096


def parse_gpus(text: str, tp: int) -> list[tuple[int, ...]]:
    """Read `N`, `A-B` or `A,B` into one tuple of GPUs a worker group.

    Args:
        text: What `--gpu` says.
        tp: GPUs that one server spans.

    Raises:
        UsageError: Not of that form, a GPU twice, or no multiple of `tp`.
    """
    if not _GPUS.fullmatch(text):
        raise UsageError(f"--gpu {text!r}: give one number, a range A-B, or a list A,B")
    gpus: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        gpus += range(int(first), int(last or first) + 1)
    if len(set(gpus)) != len(gpus) or not gpus:
        raise UsageError(f"--gpu {text!r}: each GPU once, ranges upwards")
    if len(gpus) % tp:
        raise UsageError(f"--gpu {text!r} has {len(gpus)} GPUs, which --tp {tp} does not divide")
    return [tuple(gpus[i : i + tp]) for i in range(0, len(gpus), tp)]


def group_name(gpus: tuple[int, ...], host: str) -> str:
    """Name the worker group of these GPUs: `gpu0@host`, `gpu0-1@host`."""
    numbers = str(gpus[0]) if len(gpus) == 1 else f"{gpus[0]}-{gpus[-1]}"
    return f"gpu{numbers}@{host}"


def server_url(pattern: str | None, gpu: int) -> str:
    """Give the URL of a GPU's server.

    Args:
        pattern: What `--server` says, perhaps with `{gpu}`; None for port 30000 + gpu here.

    Returns:
        Scheme, host and port, without a slash at the end. A loopback address is written with this
        host's name in slots' keys elsewhere, not here.
    """
    if pattern is None:
        return DEFAULT_SERVER.format(port=FIRST_PORT + gpu)
    url = pattern.replace("{gpu}", str(gpu)).rstrip("/")
    if not re.match(r"https?://[^/\s]+", url):
        raise UsageError(f"--server {pattern!r}: give http://HOST:PORT, {{gpu}} stands for the GPU")
    return url


def slots_server(url: str, host: str) -> str:
    """Name a server so that everyone who can reach it names it alike: loopback is this host."""
    scheme, _, rest = url.partition("://")
    address = rest.partition("/")[0]
    name, _, port = address.rpartition(":")
    if name in {"127.0.0.1", "localhost", "[::1]", "0.0.0.0"}:  # noqa: S104 - compared, not bound
        return f"{scheme}://{host}:{port}"
    return f"{scheme}://{address}"


def this_host() -> str:
    """Give the name under which worker groups of this machine appear."""
    return os.environ.get("HEADRACE_HOST") or socket.gethostname()
