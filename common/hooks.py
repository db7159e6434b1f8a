"""Carry news of a run to whom `--notify` names: a command, or an address.

    a command   run by /bin/sh, JSON on its standard input, HEADRACE_NOTIFY_EVENT, _RUN, _STATUS
                and _TEXT in its environment; 30 s
    an address  gets the JSON as a POST; 10 s, tried three times

Nothing that fails here harms a run, and nothing is logged of the command or the address but the
host: they may hold a key.
"""

import hashlib
import logging
import os
import queue
import re
import signal
import subprocess
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec

from common.errors import UsageError
from common.mishaps import surviving

log = logging.getLogger(__name__)

COMMAND_S = 30.0
POST_S = 10.0
AGAIN_S = (2.0, 10.0)
MOST_WAITING = 50

_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]*)://")


class Hook:
    """One command or address.

    Args:
        target: As `--notify` gives it.

    Attributes:
        is_url: It is an address.
        name: 16 hex digits: the same hook in another process has the same.
        shown: What people may see of it.

    Raises:
        UsageError: It is an address of another kind than http.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        scheme = _SCHEME.match(target)
        self.is_url = scheme is not None and scheme[1].lower() in {"http", "https"}
        if not target.strip() or (scheme and not self.is_url):
            raise UsageError("--notify takes a command, or an http:// or https:// address")
        self.name = hashlib.sha256(target.encode()).hexdigest()[:16]
        self.shown = f"{urlsplit(target).hostname}/…" if self.is_url else "the command"

    def send(self, told: dict[str, Any]) -> str:
        """Tell it; returns why that failed, empty when it did not."""
        body = msgspec.json.encode(told)
        return self._post(body) if self.is_url else self._run(told, body)

    def _post(self, body: bytes) -> str:
        # A sink that notifies nobody does not wait for this import.
        import httpx  # noqa: PLC0415

        try:
            answer = httpx.post(
                self._target,
                content=body,
                headers={"content-type": "application/json", "user-agent": "headrace"},
                timeout=POST_S,
            )
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            return type(error).__name__
        return "" if answer.is_success else f"HTTP {answer.status_code}"

    def _run(self, told: dict[str, Any], body: bytes) -> str:
        about = {
            f"HEADRACE_NOTIFY_{name.upper()}": str(told[name])
            for name in ("event", "run", "status", "text")
        }
        # Its own commands of ours, if it calls any, are to notify nobody.
        kept = {name: value for name, value in os.environ.items() if name != "HEADRACE_NOTIFY"}
        try:
            process = subprocess.Popen(  # noqa: S603 - what the user asked for
                ["/bin/sh", "-c", self._target],
                env={**kept, **about},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            return type(error).__name__
        try:
            process.communicate(body, timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return f"not done after {COMMAND_S:.0f} s"
        return "" if not process.returncode else f"exit code {process.returncode}"


class Messenger:
    """Tells a hook in a thread of its own, so that nobody waits for it."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._tell_all, name="notify", daemon=True)
        self._thread.start()

    def tell(self, told: dict[str, Any]) -> None:
        """Take what is to be told; gives it up where so much waits already."""
        try:
            self._waiting.put_nowait(told)
        except queue.Full:
            log.warning("too much waits for %s: %s is not told", self.hook.shown, told["event"])

    def close(self, limit_s: float) -> None:
        """Tell what waits, within so many seconds."""
        try:
            self._waiting.put(None, timeout=limit_s)
        except queue.Full:
            return
        self._thread.join(limit_s)

    def _tell_all(self) -> None:
        while (told := self._waiting.get()) is not None:
            with surviving("notify"):
                self._tell(told)

    def _tell(self, told: dict[str, Any]) -> None:
        why = self.hook.send(told)
        # A command that failed may have done its work.
        for wait_s in AGAIN_S if self.hook.is_url else ():
            if why:
                time.sleep(wait_s)
                why = self.hook.send(told)
        if why:
            log.warning(
                "notify: %s was not told that run %s is %s: %s",
                *(self.hook.shown, told["run"], told["event"], why),
            )
        else:
            log.info(
                "notify: told %s that run %s is %s",
                self.hook.shown,
                told["run"],
                told["event"],
            )
