"""What a round consists of: how many of everything, how quick, how large."""

import json
from typing import Literal

import msgspec

RUN = "job"

Fsync = Literal["everysec", "always"]
Store = Literal["directory", "s3"]

SINK_LEASE_S = 4.0
LEASES = {"slots_ms": 6_000, "sink_ms": round(SINK_LEASE_S * 1000), "turn_ms": 4_000}
"""Short, so that who comes after a dead process need not wait."""

BATCH_S = {"directory": 0.4, "s3": 1.5}
"""Age of a batch: after each restart of Redis all manifests are read, one call each."""


class Kit(msgspec.Struct, frozen=True, kw_only=True):
    """One round.

    Attributes:
        prompts, files: How many prompts, in how many files of equal size.
        groups: Worker groups, each with a server of its own.
        sinks, producers: Processes of each.
        partitions: Result streams.
        bound: Most requests that may be open at a server.
        latency: Of the servers' answers, as the simulator takes it.
        window: Most requests of the run in Redis; the rest waits in the store.
        kills: The round's kills end with so many; or when nine tenths of the prompts are done.
        patience_s: How long a victim is waited for until it holds work; then it lives on.
        calm: Few kills, one at a time, each kind in turn; for the suite.
        pace: Steps a second.
        lease_s: How long a job may be silent. The account allows no redo but after deaths, so it
            must be longer than a busy machine lets any process wait.
    """

    prompts: int = 3_000
    files: int = 8
    groups: int = 4
    sinks: int = 2
    producers: int = 2
    partitions: int = 3
    bound: int = 16
    latency: str = "lognormal:0.5:1"
    window: int = 2_000
    kills: int = 150
    patience_s: float = 0.8
    calm: bool = False
    pace: float = 2.0
    lease_s: float = 30.0
    fsync: Fsync = "everysec"
    store: Store = "directory"

    def environment(self) -> dict[str, str]:
        """Give what every process of the round is told of its clockwork."""
        timing = {
            "lease_s": self.lease_s,
            "leases_every_s": 1.0,
            "reap_every_s": 1.0,
            "slots_every_s": 1.0,
            "ask_again_s": 0.2,
            "faulty_again_s": 1.0,
            "publish_every_s": 0.3,
            "audit_every_s": 5.0,
        }
        return {"HEADRACE_TIMING": json.dumps(timing), "HEADRACE_LEASES": json.dumps(LEASES)}


SHORT = Kit(
    prompts=1_600,
    files=4,
    groups=2,
    sinks=2,
    producers=1,
    partitions=2,
    latency="lognormal:0.3:1",
    window=1_000,
    kills=10,
    patience_s=30.0,
    calm=True,
    pace=4.0,
    lease_s=120.0,
)
"""What the suite plays."""
