"""What a node consists of: which commands `workers up` runs, from what it was told. Pure.

A part is one of our own commands with the arguments that only the whole node knows. All else it
reads itself, from the environment and from its own table of headrace.toml.
"""

import re
from collections.abc import Sequence
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from common.errors import UsageError
from workers.options import FIRST_PORT, LAST_PORT, group_name, parse_gpus, port_of, server_url

Kind = Literal["server", "worker group", "sink"]

_PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_MOST_GPUS = 256
"""A port further from the first one than this tells no GPU."""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What `workers up` was told of its parts.

    Attributes:
        gpu, tp, attach, model, python, strategy, runs, concurrency, ramp, grace_s,
            until_done: As the flags of these names; None and empty where they were not given.
        simulate: How many GPUs are simulated; then model and python are the simulator's.
        sink: Whether a sink belongs to the node.
        first_port: Of the first server; None for 30000 and the number of its GPU.
        sglang: Arguments for SGLang itself.
    """

    gpu: str | None = None
    tp: int = 1
    attach: str | None = None
    simulate: int | None = None
    model: str | None = None
    python: str | None = None
    strategy: str | None = None
    runs: tuple[str, ...] = ()
    concurrency: str | None = None
    ramp: float | None = None
    grace_s: float | None = None
    until_done: bool = False
    sink: bool = True
    first_port: int | None = None
    sglang: tuple[str, ...] = ()


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the node.

    Attributes:
        kind: Which command it is.
        name: For people: `worker group gpu0`.
        unit: `gpu0@host`, which server and worker group share; empty for the sink.
        arguments: Of `workers`.
        log: Name of its log.
    """

    kind: Kind
    name: str
    unit: str = ""
    arguments: tuple[str, ...]
    log: str


def plan(told: Told, host: str) -> list[Part]:
    """Give the parts, servers first, the sink last.

    Raises:
        UsageError: What was told does not go together; the text says what does.
    """
    _check(told)
    ports: list[int] = []
    if told.attach is not None:
        sets, urls = _attached(told)
    else:
        sets = parse_gpus(_gpus(told), told.tp)
        ports = [port_of(told.first_port, gpus[0], sets[0][0]) for gpus in sets]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
    parts: list[Part] = []
    if told.attach is None:
        parts = [_server(told, gpus, port, host) for gpus, port in zip(sets, ports, strict=True)]
    parts += [_group(told, gpus, url, host) for gpus, url in zip(sets, urls, strict=True)]
    if told.sink:
        parts.append(_sink(told))
    return parts


def _check(told: Told) -> None:
    if told.attach is None and told.simulate is None and told.model is None:
        raise UsageError(
            "which servers? Give --attach 30000-30007 for SGLang servers that run here, --gpu 0-7 "
            "--model PATH for ones to start, or --simulate 2 for a trial without a GPU"
        )
    if told.attach is not None and told.simulate is not None:
        raise UsageError(
            "--attach and --simulate exclude each other: servers run or are simulated"
        )
    if told.attach is not None:
        for flag in ("model", "python", "strategy", "sglang"):
            if getattr(told, flag):
                name = "arguments of SGLang" if flag == "sglang" else f"--{flag}"
                raise UsageError(
                    f"{name} and --attach exclude each other: servers that run are not touched"
                )
    elif told.simulate is None and told.gpu is None:
        raise UsageError("--model needs --gpu too: which GPUs, such as --gpu 0-7")
    if told.until_done and not (told.runs and told.sink):
        raise UsageError("--until-done needs --run NAME, and a sink here, which knows of the end")


def _gpus(told: Told) -> str:
    if told.simulate is None:
        return told.gpu or ""
    given = told.gpu or f"0-{told.simulate * told.tp - 1}"
    if len(parse_gpus(given, told.tp)) != told.simulate:
        raise UsageError(f"--simulate {told.simulate} does not fit --gpu {given}: leave one out")
    return given


# --- servers that run ----------------------------------------------------------------------------


def _attached(told: Told) -> tuple[list[tuple[int, ...]], list[str]]:
    pattern = told.attach or ""
    if told.gpu is not None and "{gpu}" in pattern:
        sets = parse_gpus(told.gpu, told.tp)
        return sets, [server_url(pattern, gpus[0], flag="--attach") for gpus in sets]
    urls = attached_urls(pattern)
    if told.gpu is not None:
        sets = parse_gpus(told.gpu, told.tp)
        if len(sets) != len(urls):
            raise UsageError(
                f"--attach names {len(urls)} servers and --gpu {told.gpu} {len(sets)}: a GPU "
                "(with --tp as many as that) for each server, in the same order"
            )
        return sets, urls
    numbers = [_number(url, place) for place, url in enumerate(urls)]
    if len(set(numbers)) != len(numbers):
        raise UsageError("--attach: give --gpu too, which names these servers' GPUs")
    return [(number,) for number in numbers], urls


def attached_urls(text: str) -> list[str]:
    """Read ports, ranges of ports and URLs, divided by commas, into URLs.

    Raises:
        UsageError: Something else stands there, or one twice.
    """
    urls: list[str] = []
    for item in filter(None, (each.strip() for each in text.split(","))):
        if "{gpu}" in item:
            raise UsageError("--attach with {gpu} in it needs --gpu, and stands alone")
        ports = _PORTS.fullmatch(item)
        if ports is None:
            urls.append(server_url(item, 0, flag="--attach"))
            continue
        first, last = int(ports[1]), int(ports[2] or ports[1])
        if not 0 < first <= last <= LAST_PORT:
            raise UsageError(f"--attach {item}: ports go from 1 to {LAST_PORT}, ranges upwards")
        urls += [f"http://127.0.0.1:{port}" for port in range(first, last + 1)]
    if not urls or len(set(urls)) != len(urls):
        raise UsageError(
            "--attach: give each server once: ports (30000-30007, or 30000,30002) or URLs"
        )
    return urls


def _number(url: str, place: int) -> int:
    """Give the GPU that a server's port stands for; where it tells none, its place."""
    port = urlsplit(url).port or 0
    return port - FIRST_PORT if 0 <= port - FIRST_PORT < _MOST_GPUS else place


# --- the parts -----------------------------------------------------------------------------------


def _listed(gpus: Sequence[int]) -> str:
    return ",".join(map(str, gpus))


def _short(gpus: tuple[int, ...]) -> str:
    return group_name(gpus, "").rstrip("@")


def _server(told: Told, gpus: tuple[int, ...], port: int, host: str) -> Part:
    arguments = ["serve", "--gpu", _listed(gpus), "--tp", str(told.tp)]
    arguments += ["--port", str(port)]
    for flag, value in (
        ("--model", told.model),
        ("--python", told.python),
        ("--strategy", told.strategy),
    ):
        if value is not None:
            arguments += [flag, value]
    if told.sglang:
        arguments += ["--", *told.sglang]
    short = _short(gpus)
    return Part(
        kind="server",
        name=f"server {short}",
        unit=group_name(gpus, host),
        arguments=tuple(arguments),
        log=f"server-{short}.log",
    )


def _group(told: Told, gpus: tuple[int, ...], url: str, host: str) -> Part:
    arguments = ["start", "--gpu", _listed(gpus), "--tp", str(told.tp), "--server", url]
    if told.concurrency is not None:
        arguments += ["--concurrency", told.concurrency]
    if told.ramp is not None:
        arguments += ["--ramp", f"{told.ramp:g}"]
    if told.grace_s is not None:
        arguments += ["--grace", f"{told.grace_s:g}"]
    for run in told.runs:
        arguments += ["--run", run]
    short = _short(gpus)
    return Part(
        kind="worker group",
        name=f"worker group {short}",
        unit=group_name(gpus, host),
        arguments=tuple(arguments),
        log=f"group-{short}.log",
    )


def _sink(told: Told) -> Part:
    arguments = ["sink", *told.runs]
    if told.until_done:
        arguments.append("--until-done")
    return Part(kind="sink", name="sink", arguments=tuple(arguments), log="sink.log")
