"""`python -m sglang.launch_server` of a simulated environment: one server, one process, its flags.

To the outside as the real one, in the version's ways:

    flags      an unknown one is argparse's error and exit 2; `no_buffer` without
               --disable-overlap-schedule is an AssertionError from 0.5.14 on; the strategy decides
               the pool and so the cap
    start      the port is closed while weights load, then /health says 503 while it warms up
    lines      on stderr, as SGLang writes them
    scheduler  a child process. Killed: from 0.5.10 on the server ends some seconds later, before
               that it stays as a zombie that answers nothing. Stopped: it hangs
    SIGTERM    /health says 503, open requests end, then it kills itself. Versions up to 0.5.12
               never end after they have refused a request
    SIGKILL    the end, at once

What no flag of SGLang says comes from the variables of `workers simulate`: HEADRACE_SIM_SPEED,
HEADRACE_SIM_LOG, HEADRACE_SIM_FAULT … A fault, and --slow, may name a server by its place: that
is its GPU's number. Two more: HEADRACE_SIM_LOAD, seconds until the port opens (2 unless set), and
HEADRACE_SIM_BOOT, which lets the start go wrong: `crash` or `hang`, or a file that says so.
"""

import argparse
import asyncio
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
import uvloop

from common.flags import name_variables
from workers.simulator import text
from workers.simulator.command import settings_from, simulate
from workers.simulator.control import Control
from workers.simulator.faults import Fault
from workers.simulator.journal import Journal
from workers.simulator.scheduler import Scheduler
from workers.simulator.server import SimulatedServer
from workers.simulator.settings import Settings, Strategy
from workers.simulator.sglang_flags import parser, version_key
from workers.simulator.sglang_log import TO_STDERR, SglangLog, stamped
from workers.simulator.wire import Connection, Request

LOAD_S = 2.0
WARM_UP_S = 0.5
WATCH_S = 0.1
SETTLE_S = 5.0
"""How long a server waits after its scheduler's death, and between two looks of its drain."""

_STRATEGY_VERSION = (0, 5, 14)
_WATCHDOG_VERSION = (0, 5, 10)
_LEAKS_UNTIL_VERSION = (0, 5, 12, 9)
_FIRST_PORT = 30_000


def main() -> None:
    """Serve until a signal ends it."""
    settings, faults, place = read(sys.argv[1:])
    served = _Launched(settings, faults, place)
    sys.exit(uvloop.run(served.run()))


# --- what it is told -----------------------------------------------------------------------------


def read(arguments: list[str]) -> tuple[Settings, list[Fault], int]:
    """Read the command line and the simulator's own variables.

    Returns:
        What the server does, the faults that are armed at it, and its place: its GPU's number.

    Raises:
        SystemExit: As SGLang's parser and its checks end the process.
    """
    name_variables(simulate)
    with simulate.make_context("simulate", []) as context:
        options: dict[str, Any] = dict(context.params)
    version = options["sglang_version"]
    made = parser(version)
    given = made.parse_args(_with_file(arguments))
    if given.model_path is None:
        made.error("the following arguments are required: --model-path/--model")
    place = _place(given)
    faults = [fault for fault in options.pop("faults") if fault.server in {None, place}]
    slow = dict(options.pop("slow"))
    slow = {0: slow[place]} if place in slow else {}
    options["info"] = dict(options["info"])
    for name in ("as_json", "until_eof", "servers", "ports", "config"):
        options.pop(name, None)
    options |= _told_by_flags(given, version) | {"slow": slow, "servers": 1}
    try:
        settings = settings_from(options)
    except click.UsageError as error:
        made.error(error.message)
    here = [msgspec.structs.replace(fault, server=None) for fault in faults]
    return settings, here, place


def _with_file(arguments: list[str]) -> list[str]:
    """Put what a file of --config says before the arguments, as SGLang does; texts alone."""
    if "--config" not in arguments:
        return arguments
    place = arguments.index("--config")
    lines = Path(arguments[place + 1]).read_text(encoding="utf-8").splitlines()
    told = [line.partition(": ") for line in lines if line.strip()]
    said = [each for name, _, value in told for each in (f"--{name}", msgspec.json.decode(value))]
    return said + arguments[:place] + arguments[place + 2 :]


def _place(given: argparse.Namespace) -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    if visible.isdecimal():
        return int(visible)
    return int(given.base_gpu_id or max((given.port or _FIRST_PORT) - _FIRST_PORT, 0))


def _told_by_flags(given: argparse.Namespace, version: str) -> dict[str, Any]:
    said = {key: value for key, value in vars(given).items() if value is not None}
    strategy, overlap = _strategy(said, version)
    told: dict[str, Any] = {
        "port": given.port or _FIRST_PORT,
        "model": given.served_model_name or given.model_path,
        "strategy": strategy,
        "overlap": overlap,
        "metrics": bool(given.enable_metrics),
        "reasoning": given.reasoning_parser is not None,
        "api_key": given.api_key,
        "arguments": said,
        # The cap is what the flags and the pool make of it.
        "cap": None,
    }
    pools = {
        "max_running_requests": "max_running_requests",
        "max_queued_requests": "max_queued_requests",
        "max_mamba_cache_size": "mamba_states",
        "max_total_tokens": "kv_tokens",
        "context_length": "context_length",
    }
    for flag, option in pools.items():
        if said.get(flag) is not None:
            told[option] = said[flag]
    return told


def _strategy(said: dict[str, Any], version: str) -> tuple[Strategy, bool]:
    """Give the strategy that a command line ends up with, and whether overlap stays on."""
    overlap = not said.get("disable_overlap_schedule", False)
    if said.get("disable_radix_cache"):
        return "no_radix", overlap
    new = version_key(version) >= _STRATEGY_VERSION
    asked = said.get("mamba_radix_cache_strategy") or said.get("mamba_scheduler_strategy")
    if asked in {None, "auto"}:
        asked = "extra_buffer" if new and overlap else "no_buffer"
    elif asked == "no_buffer" and overlap and new:
        raise _refused(
            "no_buffer does not support the overlap schedule; use --disable-overlap-schedule"
        )
    elif asked == "extra_buffer_lazy" and not overlap:
        raise _refused("extra_buffer_lazy needs the overlap schedule")
    strategies: tuple[Strategy, ...] = ("no_buffer", "extra_buffer", "extra_buffer_lazy")
    for strategy in strategies:
        if asked == strategy:
            return strategy, overlap and strategy != "no_buffer"
    # Its old name is an alias that the parser does not check.
    raise _refused(f"unknown mamba strategy {asked}")


def _refused(why: str) -> SystemExit:
    print(  # noqa: T201 - as an uncaught error of the real one looks
        "Traceback (most recent call last):\n"
        '  File "sglang/srt/arg_groups/mamba_hook.py", line 157, in validate\n'
        f"AssertionError: {why}",
        file=sys.stderr,
    )
    return SystemExit(1)


# --- its life ------------------------------------------------------------------------------------


class _Launched:
    """One server from its start to its end."""

    def __init__(self, settings: Settings, faults: list[Fault], place: int) -> None:
        self._settings = settings
        self._faults = faults
        self._place = place
        self._version = version_key(settings.sglang_version)
        self._journal = Journal(settings.log)
        self._control = Control([])
        self._server = SimulatedServer(0, settings, self._journal, self._asked)
        self._scheduler: Scheduler | None = None
        self._ended: asyncio.Future[int] | None = None
        self._draining: asyncio.Task[None] | None = None

    def _asked(self, index: int, connection: Connection, request: Request) -> None:
        self._control.answer(index, connection, request)

    async def run(self) -> int:
        """Serve; returns the exit code where no signal gives one."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        loop.add_signal_handler(signal.SIGTERM, self._told_to_stop)
        loop.add_signal_handler(signal.SIGINT, self._end, 128 + signal.SIGINT)
        loop.add_signal_handler(signal.SIGQUIT, self._kill)
        self._scheduler = Scheduler()
        try:
            started = loop.create_task(self._start())
            watch = loop.create_task(self._watch(self._scheduler))
            done = await self._ended
            for task in (started, watch):
                task.cancel()
            return done
        finally:
            self._journal.close()
            self._scheduler.end()

    async def _start(self) -> None:
        said = _public(self._settings.arguments)
        _say(f"server_args=ServerArgs({', '.join(f'{k}={v!r}' for k, v in said.items())})")
        _say("Load weight begin. avail mem=139.20 GB")
        text.warm()
        wrong = _boot()
        load_s = float(os.environ.get("HEADRACE_SIM_LOAD") or LOAD_S)
        await asyncio.sleep(load_s / self._settings.speed)
        if wrong == "hang":
            return
        if wrong == "crash":
            _say(
                "Scheduler hit an exception: Traceback (most recent call last):\n"
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
            )
            self._end(1)
            return
        _say("Load weight end. elapsed=2.00 s, type=Qwen3NextForCausalLM, avail mem=104.10 GB")
        lines = SglangLog(self._settings, TO_STDERR)
        self._server.on_listening = partial(lines.attach, fired_up=False)
        try:
            await self._server.start(state="starting")
        except OSError as error:
            _say(f"ERROR:    [Errno {error.errno}] error while attempting to bind on address "
                 f"('127.0.0.1', {self._settings.port}): address already in use")  # fmt: skip
            self._end(1)
            return
        _say(f"INFO:     Started server process [{os.getpid()}]")
        _say(f"INFO:     Uvicorn running on http://127.0.0.1:{self._settings.port} "
             "(Press CTRL+C to quit)")  # fmt: skip
        self._control = Control([self._server])
        await asyncio.sleep(WARM_UP_S / self._settings.speed)
        if self._server.state == "starting":
            self._server.set_state("ready")
        _say("The server is fired up and ready to roll!")
        for fault in self._faults:
            self._control.arm(fault)

    async def _watch(self, scheduler: Scheduler) -> None:
        """Let the server be what its scheduler is."""
        stood = False
        while (code := scheduler.ended()) is None:
            stands = scheduler.stopped()
            if stands != stood and self._server.state in {"ready", "stalled"}:
                self._server.set_state("stalled" if stands else "ready")
                stood = stands
            await asyncio.sleep(WATCH_S)
        self._server.set_state("stalled")
        if self._version < _WATCHDOG_VERSION:
            return
        _say(
            f"Subprocess scheduler_0 (pid={scheduler.pid}) crashed with exit code {code}. "
            "Triggering SIGQUIT for cleanup..."
        )
        _say("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
        _say("Sleeping 5 seconds before crash diagnostics to let GPU activity settle.")
        await asyncio.sleep(SETTLE_S / self._settings.speed)
        self._kill()

    # --- its ends --------------------------------------------------------------------------------

    def _told_to_stop(self) -> None:
        if self._draining is not None:
            return
        _say("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        if self._server.serving is None or os.environ.get("SGL_FORCE_SHUTDOWN"):
            self._kill()
        if self._server.state == "ready":
            self._server.set_state("draining")
        while (remaining := self._remaining()) > 0:
            _say(
                f"Gracefully exiting... Remaining number of requests {remaining}. "
                "Remaining requests remaining_rids=[]."
            )
            await asyncio.sleep(SETTLE_S / self._settings.speed)
        _say("Gracefully exiting... Remaining number of requests 0.")
        self._kill()

    def _remaining(self) -> int:
        """Count what a drain waits for; old versions count what they refused, for ever."""
        tally = self._server.record.tally
        leaked = tally.refused if self._version < _LEAKS_UNTIL_VERSION else 0
        return tally.open + leaked

    def _kill(self) -> None:
        """End as the real one ends itself: by SIGKILL, its scheduler before."""
        if self._server.serving is not None:
            self._server.serving.die()
        self._journal.flush()
        if self._scheduler is not None:
            self._scheduler.end()
        _say(f"kill_process_tree called: parent_pid={os.getpid()}, include_parent=True")
        os.kill(os.getpid(), signal.SIGKILL)

    def _end(self, code: int) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(code)


def _say(line: str) -> None:
    os.write(sys.stderr.fileno(), stamped(line))


def _public(arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if not key.endswith("api_key")}


def _boot() -> str:
    said = os.environ.get("HEADRACE_SIM_BOOT", "")
    path = Path(said)
    if os.sep in said:
        return path.read_text(encoding="utf-8").strip() if path.exists() else ""
    return said
