"""A real SGLang server on the CPU, and what it says itself of the requests that it had.

The server writes two logs. `log` is what its operator sees: batches, the cap, status codes. The
journal (`--log-requests`) holds each request with its id and its answer, so that the bound and the
answers are judged from the server's side, with nothing of ours between.
"""

import datetime as dt
import json
import os
import re
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import psutil

from tests.support.server_process import free_port, wait_until

WARM = "The server is fired up"
START_LIMIT_S = 600.0
"""It takes 20 s on an idle machine, and took 250 s on two cores with twelve at work."""

STOP_LIMIT_S = 20.0
LOOK_EVERY_S = 0.2
"""The server needs the cores."""

SCHEDULER = "sglang::scheduler"

_CAPPED = re.compile(r"capped to (\d+) by the mamba state cache")
_SUMMARY = re.compile(r"max_running_requests=(\d+), context_len=")
_RUNNING = re.compile(r"#running-req: (\d+)")
_MAMBA = re.compile(r"mamba usage: ([0-9.]+)")
# Not the server's own, not the probes', not the tests'.
_OUR_RID = re.compile(r"[0-9a-f]{12}-")
_ANSWERED = re.compile(r'"POST (/\S+) HTTP/1.1" (\d+)')


class Place(NamedTuple):
    """What `run.sh` has made: SGLang's venv, the hybrid model, the folder with `start.sh`."""

    venv: Path
    model: Path
    recipe: Path

    @classmethod
    def found(cls) -> "Place | None":
        """Read it from the environment; None when there is none."""
        names = ("HEADRACE_REAL_SGLANG", "HEADRACE_REAL_MODEL", "HEADRACE_REAL_RECIPE")
        values = [os.environ.get(name) for name in names]
        return cls(*(Path(value) for value in values if value)) if all(values) else None


class Seen(msgspec.Struct, kw_only=True):
    """One request as the server had it; seconds since the epoch.

    Attributes:
        text: The whole prompt, after the chat template.
        answer, output_tokens, finish: None when it was refused, cut off, or died with the server.
    """

    rid: str
    text: str = ""
    begun_s: float
    ended_s: float | None = None
    answer: str | None = None
    output_tokens: int | None = None
    finish: str | None = None

    @property
    def group(self) -> str:
        """The worker group's process that sent it: its epoch is the first part of the id."""
        return self.rid.partition("-")[0]


class RealServer:
    """One server on one port, to be killed and started again; all its processes are one group.

    Args:
        place: Where SGLang and the model are.
        folder: For the logs.
        flags: Of SGLang, besides those of `start.sh hybrid`.
    """

    def __init__(self, place: Place, folder: Path, flags: tuple[str, ...] = ()) -> None:
        self.flags = flags
        self.model = place.model
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        self.deaths: list[Death] = []
        self._journal = folder / "journal"
        self._command = [
            *("bash", str(place.recipe / "start.sh"), str(place.venv), "hybrid"),
            *(str(place.model), str(self.port), *flags),
            *("--log-requests", "--log-requests-level", "3", "--log-requests-format", "json"),
            *("--log-requests-target", str(self._journal)),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    # --- life and death --------------------------------------------------------------------------

    def start(self) -> float:
        """Start it and wait for a token; returns the seconds that took.

        Its own warm-up, which takes it down where anything spoils it, is over as well.
        """
        since = self.mark() if self.log.exists() else 0
        began_s = time.monotonic()
        self.launch()
        wait_until(
            lambda: self.gives_token() or not self.alive(),
            "a token of the server",
            START_LIMIT_S,
            every_s=LOOK_EVERY_S,
        )
        if not self.alive():
            raise RuntimeError(f"SGLang did not start: {self.log.read_text()[-2000:]}")
        took_s = time.monotonic() - began_s
        wait_until(
            lambda: WARM in self.log_text(since),
            "the end of its warm-up",
            START_LIMIT_S,
            every_s=LOOK_EVERY_S,
        )
        return took_s

    def launch(self) -> None:
        """Start it and return at once."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.log.parent,
            )

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def gives_token(self) -> bool:
        ask = {"input_ids": [5], "rid": "test-token", "sampling_params": {"max_new_tokens": 1}}
        try:
            answer = httpx.post(f"{self.url}/generate", json=ask, timeout=5.0)
        except httpx.TransportError:
            return False
        return answer.status_code == httpx.codes.OK

    def kill(self) -> None:
        """SIGKILL all its processes at one instant."""
        self._signal_all(signal.SIGKILL)
        self._gone()

    def kill_scheduler(self) -> None:
        """SIGKILL the scheduler alone: the rest follows by itself, seconds later."""
        self.scheduler().kill()

    def wait_gone(self) -> None:
        """Wait until all of it has ended by itself."""
        wait_until(lambda: not self.alive(), "the end of the server", 60.0)
        self._gone()

    def scheduler(self) -> psutil.Process:
        """The process that runs the model."""
        if self._process is None:
            raise RuntimeError("not started")
        children = psutil.Process(self._process.pid).children(recursive=True)
        return next(child for child in children if SCHEDULER in " ".join(child.cmdline()))

    def stop(self) -> None:
        """SIGTERM, which drains; SIGKILL where that does not end it."""
        if self._process is None:
            return
        with suppress(psutil.NoSuchProcess, StopIteration):
            self.scheduler().resume()
        with suppress(ProcessLookupError):
            self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_LIMIT_S)
        self._gone()

    def _gone(self) -> None:
        # Those that outlive the first process are in its group still.
        self._signal_all(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            self.deaths.append(Death(time.time()))

    def _signal_all(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    # --- what its operator sees ------------------------------------------------------------------

    def mark(self) -> int:
        """Where its log ends now: figures of what comes later take it as `since`."""
        return self.log.stat().st_size

    def log_text(self, since: int = 0) -> str:
        return self.log.read_bytes()[since:].decode(errors="replace")

    def logged_cap(self) -> int:
        """The cap as its own start tells it: the mamba pool's where that is the smaller one."""
        text = self.log_text()
        return int((_CAPPED.findall(text) or _SUMMARY.findall(text))[-1])

    def most_running(self, since: int = 0) -> int:
        return max(map(int, _RUNNING.findall(self.log_text(since))), default=0)

    def decodes(self, since: int = 0) -> int:
        """How often it told of its decoding."""
        return self.log_text(since).count("Decode batch")

    def mamba_usages(self, since: int = 0) -> set[float]:
        return set(map(float, _MAMBA.findall(self.log_text(since))))

    def statuses(self, since: int = 0) -> Counter[tuple[str, int]]:
        """How often each (path, status) was answered."""
        return answered(self.log_text(since))

    def ask(self, path: str) -> Mapping[str, Any]:
        """One of its JSON pages."""
        page = httpx.get(f"{self.url}{path}", timeout=10.0).json()
        assert isinstance(page, dict)
        return page

    # --- its journal -----------------------------------------------------------------------------

    def seen(self, since_s: float = 0.0) -> list[Seen]:
        """Every request of a worker group that it has had, in order."""
        found: list[Seen] = []
        # Ids come back: the last request of an id is the one that an end belongs to.
        last: dict[str, Seen] = {}
        for event in self._events():
            rid, at_s = event["rid"], _seconds(event["timestamp"])
            if not _OUR_RID.match(rid):
                continue
            if event["event"] == "request.received":
                last[rid] = Seen(rid=rid, begun_s=at_s)
                found.append(last[rid])
            elif event["event"] == "request.finished" and rid in last:
                _finish(last[rid], event, at_s)
        return [seen for seen in found if seen.begun_s >= since_s]

    def _events(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self._journal.glob("*.log*")):
            for line in path.read_text("utf-8").split("\n"):
                text = line[line.find("{") :]
                # A killed server leaves half a line.
                with suppress(json.JSONDecodeError):
                    event = json.loads(text) if text.startswith('{"timestamp"') else {}
                    if isinstance(event.get("rid"), str):
                        yield event


def answered(log: str) -> Counter[tuple[str, int]]:
    """How often a server's log has each (path, status)."""
    return Counter((path, int(status)) for path, status in _ANSWERED.findall(log))


class Death(NamedTuple):
    """Something that ended open requests: a process of a worker group, or with None the server."""

    at_s: float
    group: str | None = None


def most_open(seen: Sequence[Seen], deaths: Sequence[Death] = ()) -> dict[str, int]:
    """How many requests each process of a worker group had open at most, by the server's journal.

    Args:
        seen: From `RealServer.seen`; without those that it refused, whose end it does not tell.
        deaths: What ended requests that have no end of their own.
    """
    return {
        group: max(open_now for _, open_now in open_over_time(each, deaths))
        for group, each in by_group(seen).items()
    }


def by_group(seen: Sequence[Seen]) -> dict[str, list[Seen]]:
    """Sort requests by the process that sent them."""
    groups: dict[str, list[Seen]] = defaultdict(list)
    for each in seen:
        groups[each.group].append(each)
    return groups


def open_over_time(seen: Sequence[Seen], deaths: Sequence[Death] = ()) -> list[tuple[float, int]]:
    """Each instant at which a request began or ended, and how many are open from there."""
    changes: list[tuple[float, int]] = []
    for each in seen:
        changes += [(each.begun_s, 1), (end_s(each, deaths), -1)]
    # An end goes before a beginning of the same microsecond.
    steps = sorted(changes)
    return [
        (at_s, now)
        for (at_s, _), now in zip(steps, accumulate(step for _, step in steps), strict=True)
    ]


def end_s(seen: Seen, deaths: Sequence[Death]) -> float:
    """When a request ended: by its own end, or by the first death that could have ended it."""
    if seen.ended_s is not None:
        return seen.ended_s
    ends = [d.at_s for d in deaths if d.at_s >= seen.begun_s and d.group in {None, seen.group}]
    return min(ends, default=float("inf"))


def _finish(seen: Seen, event: Mapping[str, Any], at_s: float) -> None:
    out = event["out"]
    seen.text = event["obj"]["text"] or ""
    seen.ended_s = at_s
    finish = out["meta_info"].get("finish_reason") or {}
    if finish.get("type") != "abort":
        seen.answer = out["text"]
        seen.output_tokens = out["meta_info"]["completion_tokens"]
        seen.finish = finish.get("type")


def _seconds(text: str) -> float:
    return dt.datetime.fromisoformat(text).timestamp()
