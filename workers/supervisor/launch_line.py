"""Make the command line of an SGLang server, for the version that is installed. Pure.

Whatever the versions call it, the words here are the same: no_buffer, extra_buffer,
extra_buffer_lazy, no_radix (no prefix cache at all), auto (as SGLang chooses) and best (the one
that runs most requests at once, which the caller works out).

Flags of SGLang's own may follow. What decides where and how the server is reached, and which
strategy it has, is said by our flags alone: the same thing said in two places would leave records
and tables that are untrue. `--host` is the exception: it opens the server to others and changes
nothing for us.
"""

import shlex
from collections.abc import Mapping, Sequence

import msgspec

from common.errors import UsageError
from workers.releases import NEWEST_KNOWN, Release, dotted, is_untagged
from workers.supervisor import versions

STRATEGIES = ("no_buffer", "extra_buffer", "extra_buffer_lazy", "no_radix", "auto", "best")
DEFAULT_STRATEGY = "no_buffer"

MODULE = "sglang.launch_server"
API_KEY = "HEADRACE_API_KEY"
VISIBLE = "CUDA_VISIBLE_DEVICES"

_ANYWHERE = frozenset({"0.0.0.0", "::", "[::]"})  # noqa: S104 - compared with, not bound to

_BY_OUR_FLAG = {
    "--model-path": "--model",
    "--model": "--model",
    "--port": "--port",
    "--tp": "--tp",
    "--tp-size": "--tp",
    "--tensor-parallel-size": "--tp",
    "--mamba-scheduler-strategy": "--strategy",
    "--mamba-radix-cache-strategy": "--strategy",
    "--disable-radix-cache": "--strategy no_radix",
    "--base-gpu-id": "--gpu",
    "--gpu-id-step": "--gpu",
}
"""Flags of SGLang that are not passed on, and what says the same here."""

_KEYS = ("--api-key", "--admin-api-key")
_LEAST_PREFIX = len("--x")


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is launched for.

    Attributes:
        version: SGLang's, as its environment tells it.
        python: The interpreter that has it.
        model: Path or name.
        gpus: Which ones it spans, as many as `--tp` says.
        port: Where it listens.
        strategy: One of `STRATEGIES` but best; None where nobody asked: the default.
        recurrent: Whether the model has layers with states; None where that is not known.
        arguments: SGLang's own, as the user gave them.
    """

    version: str
    python: str
    model: str
    gpus: tuple[int, ...]
    port: int
    strategy: str | None = None
    recurrent: bool | None = None
    arguments: tuple[str, ...] = ()


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A launch line.

    Attributes:
        arguments: The whole command.
        strategy: What it asks for; empty where the model has no states and a prefix cache.
        host: Where it listens, for us.
        config: It reads a file of the user's, in which a key may stand.
        notes: What people should know about it.
    """

    arguments: tuple[str, ...]
    strategy: str
    host: str
    config: bool
    notes: tuple[str, ...] = ()


def launch_line(launch: Launch) -> Line:
    """Make the line.

    Raises:
        UsageError: This version has no such strategy, or an argument says what our flags say.
    """
    release = versions.release_to_launch(launch.version)
    notes: list[str] = []
    if is_untagged(launch.version):
        notes.append(
            f"SGLang {launch.version} is a build that does not tell its release; taken for "
            f"{dotted(release)}"
        )
    if versions.is_newer_than_known(release):
        notes.append(
            f"SGLang {launch.version} is newer than what is known here; taken for "
            f"{dotted(NEWEST_KNOWN)}"
        )
    strategy, chosen = _strategy(launch, release, notes)
    given = _given(launch.arguments, release, strategy, notes)
    arguments = [
        launch.python, "-m", MODULE,
        "--model-path", launch.model,
        "--host", "127.0.0.1",
        "--port", str(launch.port),
        "--enable-metrics",
    ]  # fmt: skip
    if len(launch.gpus) > 1:
        arguments += ["--tp-size", str(len(launch.gpus))]
    host = value_of(given, "--host") or "127.0.0.1"
    if host != "127.0.0.1":
        notes.append(f"--host {host}: others than this machine may reach the server")
    return Line(
        arguments=(*arguments, *chosen, *given),
        strategy=strategy,
        host="127.0.0.1" if host in _ANYWHERE else host,
        config=any(_name(each) == "--config" for each in given),
        notes=tuple(notes),
    )


def _strategy(launch: Launch, release: Release, notes: list[str]) -> tuple[str, tuple[str, ...]]:
    """Say which strategy is asked for, and by which flags."""
    asked = launch.strategy or DEFAULT_STRATEGY
    if asked not in STRATEGIES or asked == "best":
        raise UsageError(f"--strategy {asked}: give one of {', '.join(STRATEGIES)}")
    if asked == "no_radix":
        return asked, ("--disable-radix-cache",)
    if launch.recurrent is False:
        if launch.strategy not in {None, "auto"}:
            notes.append(
                f"--strategy {asked} says how the states of hybrid models are kept; "
                "this model has none, so it is left out"
            )
        return "", ()
    if launch.strategy is None and launch.recurrent is None:
        notes.append(
            "no config.json of the model lies here: whether it is a hybrid one is not known, and "
            f"SGLang chooses (auto); a hybrid one gets more slots by --strategy {DEFAULT_STRATEGY}"
        )
        asked = "auto"
    if asked == "auto":
        notes.append(f"auto is, in SGLang {launch.version}, {versions.auto_means(release)}")
        return asked, ()
    if asked not in versions.strategies(release):
        raise UsageError(
            f"--strategy {asked}: SGLang {launch.version} does not have it yet; give one of "
            f"{', '.join(versions.strategies(release))} or no_radix, or upgrade SGLang to 0.5.13"
        )
    companions = versions.no_buffer_companions(release) if asked == "no_buffer" else ()
    return asked, (versions.strategy_flag(release), asked, *companions)


def _given(
    arguments: Sequence[str], release: Release, strategy: str, notes: list[str]
) -> list[str]:
    """Look through the user's own arguments; give them by the names that this version has."""
    given: list[str] = []
    for each in arguments:
        name = _name(each)
        if name is None:
            given.append(each)
            continue
        _refuse_ours(name, strategy)
        here = versions.named_here(name, release)
        if here != name:
            notes.append(f"{name} is called {here} in this version, and passed on as that")
        given.append(here + each[len(name) :])
    size = value_of(given, "--page-size")
    if strategy == "no_buffer" and size not in {None, "1"}:
        raise UsageError(
            f"--page-size {size} with --strategy no_buffer: no_buffer works on single tokens; "
            "leave --page-size out, or give --strategy extra_buffer or no_radix"
        )
    return given


def _refuse_ours(name: str, strategy: str) -> None:
    if name == "--disable-radix-cache" and strategy == "no_radix":
        return
    for flag in _KEYS:
        if _means(name, flag):
            raise UsageError(
                f"{flag} stands in the list of processes for everybody: give the key in {API_KEY}"
            )
    for flag, ours in _BY_OUR_FLAG.items():
        if _means(name, flag):
            what = f"{name} (short for {flag})" if name != flag else flag
            raise UsageError(f"{what} after `--`: say {ours} before it instead")


def _means(name: str, flag: str) -> bool:
    """Whether an argument is this flag: SGLang's parser takes any beginning of one for it."""
    return name == flag or (len(name) >= _LEAST_PREFIX and flag.startswith(name))


def _name(argument: str) -> str | None:
    """Give the flag's name of an argument; None of a value."""
    return argument.partition("=")[0] if argument.startswith("--") else None


def value_of(arguments: Sequence[str], flag: str) -> str | None:
    """Give the last value of a flag, however short it is written; None when it is not there."""
    found = None
    for number, each in enumerate(arguments):
        name = _name(each)
        if name is not None and _means(name, flag):
            follows = arguments[number + 1] if number + 1 < len(arguments) else None
            found = each[len(name) + 1 :] if "=" in each else follows
    return found


def visible_devices(gpus: Sequence[int], environment: Mapping[str, str]) -> str:
    """Say which devices the server may see.

    Args:
        gpus: Their numbers among those that this process sees.
        environment: Ours. A scheduler may have confined us to some devices, by number or by UUID.

    Raises:
        UsageError: It was confined to fewer.
    """
    confined = environment.get(VISIBLE)
    if confined is None:
        return ",".join(map(str, gpus))
    ours = [each.strip() for each in confined.split(",") if each.strip()]
    if not ours:
        return ""
    if max(gpus) >= len(ours):
        raise UsageError(
            f"--gpu {max(gpus)}: {VISIBLE} gives this process {len(ours)} of the machine's GPUs "
            f"({confined}), which count from 0"
        )
    return ",".join(ours[gpu] for gpu in gpus)


def shown(arguments: Sequence[str], environment: Mapping[str, str], *, with_key: bool) -> str:
    """Write a launch line as a shell takes it; the key stands in it as its variable.

    Args:
        arguments: Of the line.
        environment: What is set for it besides what is set here.
        with_key: The server is to ask for a key.
    """
    words = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    words += [shlex.quote(each) for each in arguments]
    if with_key:
        words.append(f'--api-key "${API_KEY}"')
    return " ".join(words)
