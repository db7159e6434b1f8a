"""A long run through a small Redis: only a window of its requests is there, memory stays constant.

`python -m bench.window [PROMPTS [MAXMEMORY]]` (10,000,000 through 2gb takes about an hour on two
cores) enqueues short prompts by the real command while a real sink stores and feeds, and
`bench.drain` claims and finishes in the worker groups' place. Ends with `producer verify`.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from bench.stage import Row, verdict
from common.queue import Runs
from tests.support.fleet import write_prompts
from tests.support.redis_server import RedisServer

RUN = "many"
SAMPLE_S = 2.0
SETTINGS = {"hash-max-listpack-value": "65536"}


def window(*, prompts: int = 1_000_000, maxmemory: str = "200mb") -> list[Row]:
    """Enqueue, drain and verify; memory in both halves of the run, and while its end is proven."""
    with (
        TemporaryDirectory(prefix="headrace-bench-") as name,
        RedisServer(
            "valkey", appendonly=True, settings=SETTINGS | {"maxmemory": maxmemory}
        ) as server,
    ):
        folder = Path(name)
        path = write_prompts(folder / f"{RUN}.jsonl", prompts)
        # Its processes run in the folder, where `bench` is not found by itself.
        root = str(Path(__file__).parents[1])
        env = {**os.environ, "HEADRACE_REDIS": server.url, "PYTHONPATH": root}
        began_s = time.monotonic()
        output = ["--output", str(folder / "out")]
        with (
            _process(
                ["producer", "enqueue", str(path), *output, "--max-tokens", "64"], env, folder
            ) as enqueue,
            _process(["workers", "sink"], env, folder) as sink,
            _process(["bench.drain", RUN], env, folder) as drain,
        ):
            peaks = Peaks(server, {"enqueue": enqueue, "sink": sink, "drain": drain})
            accepted_s = 0.0
            while not (folder / "out" / "_SUCCESS").exists():
                peaks.sample(prompts)
                if not accepted_s and enqueue.poll() is not None:
                    accepted_s = time.monotonic() - began_s
                    _check("enqueue", enqueue.returncode)
                for what, process in (("sink", sink), ("drain", drain)):
                    if process.poll() is not None:
                        _check(what, process.returncode or 1)
                time.sleep(SAMPLE_S)
            took_s = time.monotonic() - began_s
        with _process(["producer", "verify", RUN], env, folder) as verify:
            _check("verify", verify.wait())
    about = f"{prompts:,} short prompts through a Redis of {maxmemory}"
    early, late, proof = (each / 2**20 for each in peaks.redis)
    return [
        Row(
            f"{about}: accepted, and all done, stored, verified",
            f"{accepted_s:.0f} s, {took_s:.0f} s",
        ),
        Row(
            "  most of Redis' memory used: first half, second half, end test",
            f"{early:.0f}, {late:.0f}, {proof:.0f} MiB",
        ),
        *(
            Row(
                f"  resident memory of {what}, likewise",
                f"{first / 2**20:.0f}, {second / 2**20:.0f}, {last / 2**20:.0f} MiB",
                verdict(met=second <= first * 1.25 + 16 * 2**20, asked="as in the first half"),
            )
            for what, (first, second, last) in peaks.processes.items()
        ),
        Row("  most requests in Redis at once", f"{peaks.held:,}"),
    ]


class Peaks:
    """The most memory of each process and of Redis, in both halves and in the end test."""

    def __init__(
        self, server: RedisServer, processes: dict[str, "subprocess.Popen[bytes]"]
    ) -> None:
        self._client = server.client()
        self._runs = Runs(self._client)
        self._processes = processes
        self.redis = [0, 0, 0]
        self.processes = {what: [0, 0, 0] for what in processes}
        self.held = 0
        self._said_s = time.monotonic()

    def sample(self, prompts: int) -> None:
        """Look once."""
        counts = self._runs.counts(RUN)
        half = 2 if counts.completed == prompts else int(counts.completed * 2 >= prompts)
        used = int(self._client.info("memory")["used_memory"])
        self.redis[half] = max(self.redis[half], used)
        self.held = max(self.held, counts.queued + counts.in_flight - counts.unfed)
        for what, process in self._processes.items():
            try:
                rss = psutil.Process(process.pid).memory_info().rss
            except psutil.NoSuchProcess:
                continue
            self.processes[what][half] = max(self.processes[what][half], rss)
        if time.monotonic() - self._said_s >= 60:
            self._said_s = time.monotonic()
            print(
                f"{counts.total:,} accepted, {counts.unfed:,} unfed, {counts.completed:,} done, "
                f"{counts.s3_uploaded:,} stored, Redis {used / 2**20:.0f} MiB",
                file=sys.stderr,
            )


@contextmanager
def _process(
    command: list[str], env: dict[str, str], folder: Path
) -> Iterator["subprocess.Popen[bytes]"]:
    with (folder / f"{command[0]}-{command[1]}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            yield process
        except BaseException:
            print(Path(log.name).read_text()[-2000:], file=sys.stderr)
            raise
        finally:
            process.kill()
            process.wait()


def _check(what: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{what} ended with {code}")


if __name__ == "__main__":
    given = sys.argv[1:]
    for row in window(
        prompts=int(given[0]) if given else 10_000_000, maxmemory=given[1] if given[1:] else "2gb"
    ):
        print(row.what, "|", row.figure, "|", row.target)
