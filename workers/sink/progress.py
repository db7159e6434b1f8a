"""Write progress.json: every few seconds to a file, every minute to an output that is far away."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from common import names, snapshot
from common.crashpoints import reached
from common.errors import HeadraceError, RedisUnusableError
from common.marks.noting import Watchman
from common.mishaps import surviving
from common.models import RunRecord
from common.notify import Notifier
from common.quality import oddities
from common.replacing import replace_file
from common.store import ObjectStore

if TYPE_CHECKING:
    import redis

log = logging.getLogger(__name__)

FILE_S = 5.0
STORE_S = 60.0


class Written(Protocol):
    """What is written about: a run and its output."""

    record: RunRecord
    store: ObjectStore


class ProgressWriter:
    """Writes the figures of some runs, in a thread of its own.

    Args:
        client: From `common.connect`.
        state_dir: Holds one folder a run.
        written: Gives the runs.
        notifier: Is shown the figures too.
    """

    def __init__(
        self,
        client: "redis.Redis",
        state_dir: Path,
        written: Callable[[], Sequence[Written]],
        *,
        notifier: Notifier | None = None,
    ) -> None:
        self._client = client
        self._state_dir = state_dir
        self._written = written
        self._notifier = notifier
        self._watchman = Watchman(client)
        self._stored_s: dict[str, float] = {}
        # (uid, text) of what was said once: what is odd about answers, why nothing is written.
        self._said: set[tuple[str, str]] = set()

    def run(self, ended: threading.Event) -> None:
        """Write until the event is set. Nothing that fails here harms anything else."""
        self.write_all()
        while not ended.wait(FILE_S):
            self.write_all()

    def write_all(self) -> None:
        """Write the figures of every run once."""
        with surviving("the look at worker groups"):
            self._look()
        for run in self._written():
            try:
                self._write(run)
            except RedisUnusableError as error:
                if self._notifier is not None:
                    self._notifier.redis_away(str(error))
                return
            except (HeadraceError, OSError) as error:
                self._say_unwritten(run.record, error)
            except Exception:
                # What stands in Redis beside the counters may be anybody's; others go on.
                log.exception("the figures of run %s cannot be read", run.record.run)

    def _look(self) -> None:
        try:
            self._watchman.look()
        except HeadraceError as error:
            log.debug("nobody looked after the worker groups: %s", error)

    def _say_unwritten(self, record: RunRecord, error: Exception) -> None:
        """Log once that progress.json is not written; a full disk harms nothing else."""
        why = getattr(error, "strerror", None) or str(error)
        if (record.uid, why) not in self._said:
            self._said.add((record.uid, why))
            log.warning("run %s goes on, but its progress is not written: %s", record.run, why)

    def look(self, name: str) -> None:
        """Show the figures of a run that cannot be served to who is notified."""
        with suppress(HeadraceError):
            read = snapshot.read(self._client, name) if self._notifier else None
            if read is not None:
                self._notify(read.figures())

    def _write(self, run: Written) -> None:
        name = run.record.run
        read = snapshot.read(self._client, name)
        if read is None:
            return
        self._say_odd(read)
        figures = read.figures()
        self._notify(figures)
        data = msgspec.json.encode(figures)
        path = self._state_dir / name / names.PROGRESS
        try:
            replace_file(path, data)
        except OSError as error:
            self._say_unwritten(run.record, OSError(error.errno, f"{path}: {error.strerror}"))
        else:
            reached("progress.kept")
        far = "://" in run.store.url
        if time.monotonic() - self._stored_s.get(name, float("-inf")) >= (STORE_S if far else 0):
            self._stored_s[name] = time.monotonic()
            run.store.put(names.PROGRESS, data)
            reached("progress.stored")

    def _notify(self, figures: dict[str, Any]) -> None:
        if self._notifier is None:
            return
        try:
            self._notifier.note(figures)
        except HeadraceError as error:
            log.debug("run %s: nobody was notified: %s", figures["run"], error)

    def _say_odd(self, read: snapshot.Snapshot) -> None:
        """Log once what is odd about so many answers that somebody should look."""
        for flag, text in oddities(read.counts, run=read.record.run):
            if (read.record.uid, flag) not in self._said:
                self._said.add((read.record.uid, flag))
                log.warning("run %s: %s", read.record.run, text)
