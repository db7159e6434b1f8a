"""Which runs this worker group may serve, read anew every few seconds.

A run is left out when its model is another than the server's: by `--model`, or by what its first
server pinned (protocol.md §1). SGLang itself answers for any model name, so this is the only check.
"""

import logging
import time

import redis

from common.errors import RedisUnusableError
from common.models import RunRecord
from common.queue import Runs
from workers.loads import ServerIdentity

log = logging.getLogger(__name__)

REFRESH_S = 1.0
DEFAULT_MARK_BYTES = 2 * 1024**3
_PINNED = (
    "model_path",
    "context_length",
    "template_hash",
    "reasoning_parser",
    "sampling_defaults",
)


class Eligible:
    """The runs in Redis, and which of them the server fits. Used from the Redis threads."""

    def __init__(self, client: "redis.Redis", *, only: tuple[str, ...] = ()) -> None:
        self._client = client
        self._runs = Runs(client)
        self._only = only
        self._records: dict[str, RunRecord] = {}
        self._fits: dict[str, bool] = {}
        self._read_at_s = 0.0
        self._mark_bytes = DEFAULT_MARK_BYTES
        self.wrong_model = ""
        self.all_names: list[str] = []

    def record(self, run: str) -> RunRecord | None:
        """Give a run's record as last read."""
        return self._records.get(run)

    def names(self, identity: ServerIdentity | None) -> list[str]:
        """List the runs to claim from, in claim order; empty when there are none."""
        if identity is None:
            return []
        if time.monotonic() - self._read_at_s > REFRESH_S:
            self.refresh()
        wrong = ""
        names = []
        for name in self.all_names:
            why = self._misfit(name, identity)
            if why:
                wrong = why
            else:
                names.append(name)
        if wrong and wrong != self.wrong_model:
            log.error("%s", wrong)
        self.wrong_model = wrong
        return names

    def stream_mark_bytes(self) -> int:
        """How much the result streams may hold before claims stop: 2 GiB, or a quarter of Redis."""
        return self._mark_bytes

    def refresh(self) -> None:
        """Read the runs and Redis's limit anew."""
        names = [name for name in self._runs.names() if not self._only or name in self._only]
        records = {name: self._records.get(name) or self._runs.get(name) for name in names}
        for name in names:
            fresh = self._runs.get(name)
            if fresh is not None:
                if records[name] is None or fresh.uid != records[name].uid:  # type: ignore[union-attr]
                    self._fits.pop(name, None)
                records[name] = fresh
        self._records = {name: record for name, record in records.items() if record is not None}
        self.all_names = [name for name in names if name in self._records]
        try:
            limit = int(self._client.info("memory").get("maxmemory", 0))
        except redis.RedisError as error:
            raise RedisUnusableError("Redis does not answer") from error
        self._mark_bytes = min(DEFAULT_MARK_BYTES, limit // 4) if limit else DEFAULT_MARK_BYTES
        self._read_at_s = time.monotonic()

    def _misfit(self, name: str, identity: ServerIdentity) -> str:
        record = self._records[name]
        asked = record.params.model
        if asked is not None and asked != identity.model:
            return (
                f"run {name} wants model {asked}, this server serves {identity.model}: "
                "start the right model behind it"
            )
        pinned = self._runs.state(name)
        if pinned is None or pinned.pinned is None:
            mine = {field: getattr(identity, field) for field in ("model", *_PINNED)}
            was = self._runs.pin(name, mine)
        else:
            was = pinned.pinned
        for field in ("model", *_PINNED):
            have = getattr(identity, field)
            if field in was and was[field] != have:
                return (
                    f"run {name} began with {field} {was[field]}, this server has {have}: "
                    "it gets no job of this run"
                )
        return ""
