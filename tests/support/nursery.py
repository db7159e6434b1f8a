"""Become a program of ours at once: by a fork of a process that has imported them all.

Half of what the suite used of a machine was Python importing the same modules again, thousands of
times. This process imports them once and does nothing else: no thread, no loop, no connection is
there to be copied. What is forked from it runs the same module as `python -m` would, with
arguments, environment, folder and descriptors of its own. At its end threads are awaited, what is
registered for the exit runs and streams are flushed; taking all modules apart, which is most of
what an interpreter does there, is left to the kernel.

`tests.support.programs` asks for it, over the socket on descriptor 0, one order a message:
{module, arguments, env, folder, parent, session, dies_with_parent} with the program's three
descriptors; the answer is its process id. It is a child of whoever asked, who is a subreaper for
that moment: the process between the two ends at once.
"""

import array
import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import socket
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from tests.support.once import read_once
from tests.support.programs import die_with_parent

PACKAGES = ("producer.commands", "workers.commands")
MODULES = (
    "common.reconcile",
    "common.restore",
    "common.store.s3",
    "httpx_aiohttp",
    "producer.queueing",
    "workers.group",
    "workers.simulator.command",
)
LONGEST_ORDER = 1 << 20


def main() -> dict[str, Any]:
    """Fork on order; returns in the forked process alone, with its order."""
    for package in PACKAGES:
        for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
            importlib.import_module(f"{package}.{found.name}")
    for module in MODULES:
        importlib.import_module(module)
    read_once()
    importlib.import_module("workers.simulator.text").warm()
    control = socket.socket(fileno=os.dup(0))
    gc.collect()
    gc.freeze()
    while True:
        order, descriptors = _hear(control)
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                _take(descriptors)
                return order
            os.write(tell, b"%d" % child)
            os._exit(0)
        os.waitpid(between, 0)
        control.send(os.read(told, 64))
        for descriptor in (told, tell, *descriptors):
            os.close(descriptor)


def _hear(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, ancillary, _, _ = control.recvmsg(LONGEST_ORDER, socket.CMSG_SPACE(3 * 4))
    if not data:
        os._exit(0)  # whoever asked is gone
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content)
    return json.loads(data), list(descriptors)


def _take(descriptors: list[int]) -> None:
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def become(order: dict[str, Any]) -> NoReturn:
    """Be the program that was ordered, to its end."""
    code = 1
    try:
        _run(order)
        code = 0
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            code = ended.code or 0
        else:
            sys.stderr.write(f"{ended.code}\n")
    except BaseException:  # noqa: BLE001 - as the interpreter does at its end
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code & 0xFF)


def _run(order: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["folder"])
    if order["session"]:
        os.setsid()
    while os.getppid() != order["parent"]:
        time.sleep(0.0002)
    if order["dies_with_parent"]:
        die_with_parent()
    _open_streams()
    importlib.import_module("common.crashpoints").arm(os.environ)
    module = order["module"]
    sys.path[0] = order["folder"]
    sys.argv = [module, *order["arguments"]]
    # Imported by others: `runpy` would warn.
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _open_streams() -> None:
    """Make `sys.stdin` and the others anew, as an interpreter does."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        before = getattr(sys, f"__{name}__")
        stream: Any = None
        with contextlib.suppress(OSError):
            raw = io.FileIO(descriptor, mode, closefd=False)
            binary = io.BufferedWriter(raw) if mode == "w" else io.BufferedReader(raw)
            stream = io.TextIOWrapper(
                binary,
                encoding=before.encoding,
                errors=before.errors,
                line_buffering=name == "stderr" or raw.isatty(),
                write_through=unbuffered and mode == "w",
            )
            stream.mode = mode
        setattr(sys, f"__{name}__", stream)
        setattr(sys, name, stream)


if __name__ == "__main__":
    become(main())
