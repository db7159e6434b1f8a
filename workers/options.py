"""What a worker group's process is told: read once, passed as a value."""

import ipaddress
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec
import psutil

from common.errors import UsageError
from workers.timing import Timing

DEFAULT_SERVER = "http://127.0.0.1:{port}"
FIRST_PORT = 30_000
LAST_PORT = 65_535
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
        start_limit_s: Give up when the server has given no token by then; None waits for ever.
        worker_name: RQ's name of this process.
        parent_pid: Drain when this process is not our parent any more; None where nobody watches.
        most_connections: Above every bound that may come.
        find_log: Finds the server's log; None where there is none.
        timing: How often it looks and renews.
    """

    group: str
    server: str
    host: str
    concurrency: int | Literal["auto"] = "auto"
    ramp: float = DEFAULT_RAMP
    grace_s: float = DEFAULT_GRACE_S
    runs: tuple[str, ...] = ()
    api_key: str | None = None
    start_limit_s: float | None = None
    worker_name: str = ""
    pid: int = msgspec.field(default_factory=os.getpid)
    parent_pid: int | None = None
    most_connections: int = 4096
    find_log: Callable[[], Path | None] = lambda: None
    timing: Timing = Timing()


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


def port_of(first: int | None, gpu: int, first_gpu: int) -> int:
    """Give the port of a GPU's server.

    Args:
        first: Of the first server; None for 30000 and the number of its GPU.
        gpu: Whose.
        first_gpu: Of the first server.

    Raises:
        UsageError: There is no such port.
    """
    port = FIRST_PORT + gpu if first is None else first + gpu - first_gpu
    if port > LAST_PORT:
        raise UsageError(f"--port: GPU {gpu} would get port {port}; give a lower one")
    return port


def group_name(gpus: tuple[int, ...], host: str) -> str:
    """Name the worker group of these GPUs: `gpu0@host`, `gpu0-1@host`, `gpu0+2@host`."""
    in_a_row = gpus == tuple(range(gpus[0], gpus[-1] + 1))
    if len(gpus) > 1 and in_a_row:
        return f"gpu{gpus[0]}-{gpus[-1]}@{host}"
    return f"gpu{'+'.join(map(str, gpus))}@{host}"


def server_url(pattern: str | None, gpu: int, *, flag: str = "--server") -> str:
    """Give the URL of a GPU's server.

    Args:
        pattern: What `--server` says, perhaps with `{gpu}`; None for port 30000 + gpu here.
        gpu: Its number.
        flag: What says so, for errors.

    Returns:
        The URL without a slash at the end; `slots_server` gives the name that it counts under.
    """
    if pattern is None:
        return DEFAULT_SERVER.format(port=FIRST_PORT + gpu)
    url = pattern.replace("{gpu}", str(gpu)).rstrip("/")
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url) or not _has_port(url):
        shown = "with a password" if "@" in pattern else repr(pattern)
        raise UsageError(f"{flag} {shown}: give http://HOST:PORT, {{gpu}} stands for the GPU")
    return url


def _has_port(url: str) -> bool:
    """Whether the URL's port is one, or not given."""
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def slots_server(url: str, host: str) -> str:
    """Name a server so that everyone who can reach it names it alike.

    Args:
        url: As `server_url` gives it.
        host: This machine's name, which stands for each of its own addresses and names.

    Returns:
        Scheme, host, port and path. A name that is not ours and does not resolve stays as given.
    """
    parts = urlsplit(url)
    name = (parts.hostname or "").lower()
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    return f"{parts.scheme}://{host if _is_here(name) else name}:{port}{parts.path.rstrip('/')}"


def _is_here(name: str) -> bool:
    """Whether a host's name or address is one of this machine's own."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    addresses = {str(sockaddr[0]).partition("%")[0] for *_, sockaddr in found}
    own = {
        address.address.partition("%")[0]
        for interface in psutil.net_if_addrs().values()
        for address in interface
    }
    return any(
        ipaddress.ip_address(address).is_loopback
        or ipaddress.ip_address(address).is_unspecified
        or address in own
        for address in addresses
    )


def this_host() -> str:
    """Give the name under which worker groups of this machine appear."""
    return os.environ.get("HEADRACE_HOST") or socket.gethostname()
