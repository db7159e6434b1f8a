"""RQ's own command and classes, of either version, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.server_process import ServerProcess

RQ_VERSIONS = ("3", "2.12")
LIMIT_S = 150.0
ROOT = Path(__file__).parents[2]
RQ2_FOLDER = Path(sys.prefix) / "rq2"  # made by `make install`


class RqTools:
    """`rq`, and Python with RQ, as a user types them.

    Args:
        version: One of RQ_VERSIONS.
        url: Of the Redis.
    """

    def __init__(self, version: str, url: str) -> None:
        assert version == "3" or RQ2_FOLDER.is_dir(), f"no {RQ2_FOLDER}: run make install"
        self.version = version
        self.url = url
        self._env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RQ_", "HEADRACE_"))
        }
        before = [str(RQ2_FOLDER)] if version != "3" else []
        self._env["PYTHONPATH"] = os.pathsep.join([*before, str(ROOT)])
        self._env["COLUMNS"] = "200"

    def rq(self, command: str, *arguments: str) -> str:
        """Run `rq COMMAND -u URL …` to its end; returns all that it printed."""
        return self._run(["-m", "rq.cli", command, "-u", self.url, *arguments])

    def start(self, command: str, *arguments: str, log: Path) -> ServerProcess:
        """Start `rq COMMAND` and let it run."""
        line = [sys.executable, "-m", "rq.cli", command, "-u", self.url, *arguments]
        return ServerProcess(line, log=log, env=self._env)

    def python(self, code: str) -> str:
        """Run Python with `redis` connected and RQ at hand."""
        head = (
            "import rq, redis as r; from rq.job import Job; from rq import Queue\n"
            f"assert rq.__version__.startswith('{self.version}'), rq.__version__\n"
            f"redis = r.Redis.from_url({self.url!r})\n"
        )
        return self._run(["-c", head + code])

    def _run(self, arguments: list[str]) -> str:
        ended = subprocess.run(
            [sys.executable, *arguments],
            env=self._env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout
        return ended.stdout
