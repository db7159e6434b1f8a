"""Bear processes that have imported everything: a start takes milliseconds, not a second.

A thousand kills are a thousand starts, and nearly all of a start is importing. The nursery imports
once and forks; what it forks then calls the very `main` that the command calls, with arguments,
environment, output and working directory of its own. It runs nothing itself: no thread, no
connection, no loop is there to be copied.

Spoken over its stdin and stdout, a JSON line each: {program, arguments, env, log} is answered by
{pid}; {pid, code} says that one has ended (code as `subprocess` gives it) and stays unburied, so
that its number is nobody else's, until {bury: pid}.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from common import crashpoints

MODULES = (
    "workers.cli",
    "workers.commands.start",
    "workers.commands.sink",
    "workers.group",
    "producer.cli",
    "producer.commands.enqueue",
    "producer.queueing",
    "common.reconcile",
    "common.restore",
    "common.store.s3",
    "httpx_aiohttp",
)
POLL_S = 0.005
_PR_SET_PDEATHSIG = 1


def main() -> None:
    for name in MODULES:
        importlib.import_module(name)
    libc = ctypes.CDLL(None)
    gc.freeze()
    control = os.dup(1)
    living: set[int] = set()
    rest = b""
    while True:
        if select.select([0], [], [], POLL_S)[0]:
            data = os.read(0, 1 << 20)
            if not data:
                return  # whoever asked is gone
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                _carry_out(msgspec.json.decode(line), living, control, libc)
        for pid in list(living):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                living.discard(pid)
                clean = ended.si_code == os.CLD_EXITED
                _say(control, {"pid": pid, "code": ended.si_status if clean else -ended.si_status})


def _carry_out(order: dict[str, Any], living: set[int], control: int, libc: ctypes.CDLL) -> None:
    if "bury" in order:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(order["bury"], 0)
        return
    pid = os.fork()
    if pid == 0:
        os.close(control)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _become(order)
    living.add(pid)
    _say(control, {"pid": pid})


def _say(control: int, what: dict[str, int]) -> None:
    os.write(control, msgspec.json.encode(what) + b"\n")


def _become(order: dict[str, Any]) -> NoReturn:
    """Be the program that was ordered, to its end."""
    code = 1
    try:
        log = Path(order["log"])
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, output), (2, output)):
            os.dup2(source, target)
        os.environ.clear()
        os.environ.update(order["env"])
        os.chdir(log.parent)
        crashpoints.arm(os.environ)
        sys.argv = [order["program"], *order["arguments"]]
        importlib.import_module(f"{order['program']}.cli").main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does at its end
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
