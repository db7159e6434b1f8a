"""Which runs this worker group may serve, read anew every second or so.

A run is left out when its model is another than the server's: by `--model`, or by what its first
server pinned (protocol.md §1). SGLang itself answers for any model name, so this is the only
check. It is also left out when one of its prompts has shown that the server cannot serve it.
"""

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from common import connect
from common.crashpoints import reached
from common.models import Claim, RunRecord
from common.pins import difference, identity_of
from common.queue import Runs
from common.queue.runs import unknown_run
from common.streams import mark_bytes
from workers.readings.loads import ServerIdentity

if TYPE_CHECKING:
    import redis

log = logging.getLogger(__name__)

REFRESH_S = 1.0
SAY_S = 60.0


class Eligible:
    """The runs in Redis, and which of them the server fits.

    Used from several threads: each reading replaces what was read before, as a whole.

    Args:
        client: From `common.connect`.
        only: Serve only these runs; empty serves all.

    Attributes:
        wrong_model: Why the server fits no run; empty when it fits one, or when all are over.
    """

    def __init__(self, client: "redis.Redis", *, only: tuple[str, ...] = ()) -> None:
        self._client = client
        self._runs = Runs(client)
        self._only = only
        self._records: dict[str, RunRecord] = {}
        # What the run's first server pinned; the store's word corrects that of a rewound Redis.
        self._pinned: dict[str, dict[str, Any]] = {}
        # A run's uid -> the server that cannot serve it, and why.
        self._left_out: dict[str, tuple[ServerIdentity | None, str]] = {}
        # Uids of runs that want nothing more.
        self._over: set[str] = set()
        self._said_odd: set[tuple[str, str]] = set()
        # What `_fitting` was made from: the records and the server.
        self._judged: tuple[dict[str, RunRecord], ServerIdentity] | None = None
        self._fitting: list[str] = []
        self._reading = threading.Lock()
        self._read_at_s = float("-inf")
        self._said_s = float("-inf")
        self._mark_bytes = mark_bytes(0)
        self.wrong_model = ""

    @property
    def all_names(self) -> list[str]:
        """The runs that it serves if the server fits them, in claim order."""
        return list(self._records)

    def record(self, run: str) -> RunRecord | None:
        """Give a run's record as last read."""
        return self._records.get(run)

    def names(self, identity: ServerIdentity | None) -> list[str]:
        """List the runs to claim from, in claim order; empty when there are none.

        Raises:
            RedisUnusableError: Away, set to evict keys, or full before the first server is pinned.
        """
        if identity is None:
            return []
        if time.monotonic() - self._read_at_s > REFRESH_S:
            self.refresh()
        records = self._records
        if self._judged is None or self._judged[0] is not records or self._judged[1] != identity:
            self._fitting = self._judge(records, identity)
            self._judged = (records, identity)
        return self._fitting

    def leave_out(self, claim: Claim, identity: ServerIdentity | None, why: str) -> None:
        """Claim nothing more of a run while the server is the one that it is.

        A judgement that another thread is just making may miss it: the next one, a second later,
        does not.

        Args:
            claim: Of the prompt that has shown it.
            identity: The server as it says it is.
            why: For people.
        """
        self._left_out[claim.uid] = (identity, why)
        self._judged = None

    def left_out(self, identity: ServerIdentity | None) -> dict[str, str]:
        """Tell which of the runs this server cannot serve, and why: what `leave_out` was told."""
        told = ((run, self._left_out.get(one.uid)) for run, one in self._records.items())
        return {run: out[1] for run, out in told if out is not None and out[0] == identity}

    def stream_mark_bytes(self) -> int:
        """Say how much the streams may hold before claims stop."""
        return self._mark_bytes

    def refresh(self) -> None:
        """Read the runs and Redis's limit anew, unless another thread is doing so.

        What it reads late must not take the place of what was read after it: jobs of a run that
        was made anew in between would be let go of as the older run's.
        """
        if not self._reading.acquire(blocking=False):
            return
        try:
            self._read()
        finally:
            self._reading.release()

    def _read(self) -> None:
        found = {
            name: each
            for name, each in self._runs.known().items()
            if not self._only or name in self._only
        }
        with connect.mapping_errors(self._client):
            memory = self._client.info("memory")
        # Somebody may have changed it since the start.
        connect.refuse_eviction(memory, connect.address_of(self._client))
        limit = int(memory.get("maxmemory", 0))
        self._pinned = {
            name: each.pinned for name, each in found.items() if each.pinned is not None
        }
        self._over = {each.record.uid for each in found.values() if each.over}
        self._records = {name: each.record for name, each in found.items()}
        self._mark_bytes = mark_bytes(limit)
        self._read_at_s = time.monotonic()
        self._say_unknown()

    def _say_unknown(self) -> None:
        """Say now and then which of the named runs are not there: it may be a typing error."""
        missing = [name for name in self._only if name not in self._records]
        if missing and time.monotonic() - self._said_s >= SAY_S:
            self._said_s = time.monotonic()
            for name in missing:
                log.warning("%s", unknown_run(name))

    def _judge(self, records: dict[str, RunRecord], identity: ServerIdentity) -> list[str]:
        reasons = {name: self._misfit(record, identity) for name, record in records.items()}
        fitting = [name for name, why in reasons.items() if not why]
        wanted = (why for name, why in reasons.items() if records[name].uid not in self._over)
        wrong = "" if fitting else next(wanted, "")
        if wrong and wrong != self.wrong_model:
            log.error("%s", wrong)
        if fitting:
            self._say_odd(reasons, identity)
        self.wrong_model = wrong
        return fitting

    def _misfit(self, record: RunRecord, identity: ServerIdentity) -> str:
        server, why = self._left_out.get(record.uid, (None, ""))
        if server == identity:
            return f"no job of run {record.run} is taken: {why}"
        asked = record.params.model
        # SGLang calls an adapter of its model MODEL:ADAPTER.
        if asked is not None and identity.model not in {asked, asked.rpartition(":")[0]}:
            return (
                f"run {record.run} wants model {asked}, this server serves {identity.model}: "
                "start the right model behind it"
            )
        was = self._pinned_of(record, identity)
        differs = difference(was, identity_of(identity))
        if not differs:
            return ""
        return (
            f"run {record.run} began with a server that differs from this one ({differs}): it "
            "gets no job of this run"
        )

    def _say_odd(self, reasons: dict[str, str], identity: ServerIdentity) -> None:
        """Say once of a server that others keep busy which runs of its model it does not fit."""
        for name, why in reasons.items():
            # Of another model it is where other runs want it; of this one somebody erred.
            same = self._pinned.get(name, {}).get("model") == identity.model
            if why and same and (name, why) not in self._said_odd:
                self._said_odd.add((name, why))
                log.warning("%s", why)

    def _pinned_of(self, record: RunRecord, identity: ServerIdentity) -> dict[str, Any]:
        """Read what the run's first server was, which is this one where there was none."""
        was = self._pinned.get(record.run)
        if was is None:
            was = self._pinned[record.run] = self._runs.pin(record.run, identity_of(identity))
            reached("run.pinned")
        return was
