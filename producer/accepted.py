"""Write accepted prompts into the run's `inputs/`, before they are queued, and a producer's seal.

Failures:
    Redis is full       waits and says so, until there is room, somebody interrupts, or there has
                        been none for `--room-wait` seconds
    the store is away   waits and says so for some minutes; a denied write ends the call at once
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from common import object_names
from common.connect import jittered
from common.errors import RedisFullError, StoreUnusableError
from common.models import Seal
from common.queue import Runs
from common.store import ObjectStore, outer_retry
from common.store.frames import compress, digest_name
from common.utc import utc_now
from producer.request import ROOM_WAIT_S, Say
from producer.spool import SpooledPrompt

FULL_WAIT_S = 2.0
LEAST_FULL_WAIT_S = 0.05
STORE_WAIT_S = 300.0

T = TypeVar("T")


class Inputs:
    """The `inputs/` of one run.

    Args:
        runs: Gives the objects their numbers.
        store: The run's output.
        run: Its name.
        say: Tells people that and why it waits.
        room_wait_s: How long a full Redis is waited for.
        sleep: How to wait.
    """

    def __init__(
        self,
        runs: Runs,
        store: ObjectStore,
        run: str,
        *,
        say: Say,
        room_wait_s: float = ROOM_WAIT_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store = store
        self._runs = runs
        self._run = run
        self._say = say
        self._room_wait_s = room_wait_s
        self._sleep = sleep

    def write(self, prompts: Sequence[SpooledPrompt]) -> int:
        """Write one object with these prompts, at least one; returns its sequence."""
        rows = b"".join(
            b'{"key":"%b","fp":"%b","prompt":%b}\n'
            % (prompt.key.hex().encode(), prompt.fingerprint.hex().encode(), prompt.prompt)
            for prompt in prompts
        )
        digest, short = digest_name(rows)
        seq = self._next_seq()
        self._put(object_names.inputs_object(seq, short), compress(rows), digest=digest)
        return seq

    def seal(self, source: str, *, sealed: bool, rows: int) -> None:
        """Write this producer's last word: whether more will come."""
        word = Seal(
            sealed=sealed,
            source=source,
            rows=rows,
            ended_at=utc_now(),
        )
        data = msgspec.json.encode(word)
        digest, short = digest_name(data)
        self._put(object_names.seal_object(self._next_seq(), short), data, digest=digest)

    def until_room(self, call: Callable[[], T]) -> T:
        """Repeat a call while Redis is full.

        Raises:
            RedisFullError: It still is, after `room_wait_s`.
        """
        said = False
        until_s = time.monotonic() + self._room_wait_s
        while True:
            try:
                return call()
            except RedisFullError as error:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise RedisFullError(
                        f"{error}; there was no room for {self._room_wait_s:.0f} s (--room-wait): "
                        "start worker groups and sinks, or raise maxmemory, then call this again"
                    ) from error
                if not said:
                    self._say(
                        "Redis is full: waiting for room (workers and sinks make it; Ctrl-C ends "
                        "this call, the same call again goes on)"
                    )
                    said = True
            self._sleep(min(jittered(FULL_WAIT_S), max(left_s, LEAST_FULL_WAIT_S)))

    def _next_seq(self) -> int:
        return self.until_room(lambda: self._runs.next_inputs_seq(self._run))

    def _put(self, name: str, data: bytes, *, digest: str) -> None:
        said = False

        def on_wait(error: StoreUnusableError, delay_s: float) -> None:
            nonlocal said
            del delay_s
            if not said:
                self._say(f"the store does not answer, trying again: {error}")
                said = True

        outer_retry(
            lambda: self.store.put_if_absent(name, data, rows_sha256=digest),
            deadline_s=STORE_WAIT_S,
            on_wait=on_wait,
            sleep=self._sleep,
        )
