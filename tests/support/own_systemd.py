"""A real systemd of the test's own, which runs units as the operator's does, seen from systemctl.

It is a user's manager in namespaces of its own, in a control group of its own: nothing of the
machine's is touched or seen. It knows the units of one folder alone.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.support.server_process import ServerProcess, wait_until
from tests.support.skips import skip_cannot_run

MANAGER = Path("/lib/systemd/systemd")
CGROUPS = Path("/sys/fs/cgroup")
LIMIT_S = 90.0

# The manager asks whether the machine was booted by systemd, and takes itself for the machine's
# own where it is the first process.
INSIDE = """
mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system
{manager} --user
exit 1
"""


class OwnSystemd:
    """Starts the manager; on leaving, all that it started is gone.

    Args:
        units: Folder of the units; what they need of targets is made there.
    """

    def __init__(self, units: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hr-sd-"))
        self._units = units
        self._groups = [
            hierarchy / f"headrace-test-{self.folder.name}"
            for hierarchy in (CGROUPS / "systemd", CGROUPS / "unified", CGROUPS)
            if (hierarchy / "cgroup.procs").exists()
        ]
        self._env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "XDG_RUNTIME_DIR": str(self.folder),
            "SYSTEMD_UNIT_PATH": str(units),
        }

    def __enter__(self) -> Self:
        tools = all(map(shutil.which, ("unshare", "nsenter", "systemctl"))) and MANAGER.exists()
        if not tools or os.geteuid() != 0 or not self._groups:
            skip_cannot_run("no systemd of one's own: it needs root, unshare and control groups")
        for name in ("basic", "default", "network-online", "shutdown", "sysinit"):
            path = self._units / f"{name}.target"
            path.write_text("[Unit]\nDescription=of the test\n")
        try:
            self._start()
        except BaseException:
            self._remove()
            raise
        return self

    def _start(self) -> None:
        joins = ""
        for group in self._groups:
            group.mkdir()
            joins += f"echo $$ >{group}/cgroup.procs; "
        self._process = ServerProcess(
            [
                *("sh", "-c", joins + 'exec "$@"', "sh"),
                *("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"),
                *("sh", "-c", INSIDE.format(manager=MANAGER)),
            ],
            log=self.folder / "log",
            env=self._env,
        )
        socket = self.folder / "systemd" / "private"
        wait_until(lambda: socket.exists() or not self._process.alive(), "systemd", LIMIT_S)
        if not self._process.alive():
            raise RuntimeError(f"systemd did not start: {self._process.tail()}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        self._process.kill()
        for group in self._groups:
            for path in [*sorted(group.rglob("*/"), reverse=True), group]:
                # What was killed leaves its group a moment later.
                wait_until(partial(_removed, path), f"{path} to be empty", LIMIT_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def ctl(self, *words: str) -> str:
        """Call systemctl, from inside: a manager listens to no process that it cannot see."""
        [first] = psutil.Process(self._process.pid).children()
        done = subprocess.run(
            [
                *("nsenter", f"--target={first.pid}", "--mount", "--pid"),
                *("systemctl", "--user", *words),
            ],
            env=self._env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0 or words[0] == "is-active", done.stderr
        return done.stdout

    def states(self, units: Sequence[str]) -> list[str]:
        """Whether each is active, inactive, failed …"""
        return self.ctl("is-active", *units).split()

    def tasks(self, unit: str) -> list[str]:
        """The processes of a unit, as numbers that only these have."""
        group = self.ctl("show", "--value", "--property=ControlGroup", unit).strip()
        for own in self._groups:
            listed = own.parent / group.lstrip("/") / "cgroup.procs"
            if listed.exists() and (found := listed.read_text().split()):
                return found
        return []


def _removed(path: Path) -> bool:
    with suppress(OSError):
        path.rmdir()
    return not path.exists()
