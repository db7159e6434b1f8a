"""How often a worker group looks, says and renews, and how long it waits. All in seconds."""

import os

import msgspec

from common.errors import UsageError
from common.queue.jobs import LEASE_MS, SLOT_TTL_MS

ENVIRONMENT = "HEADRACE_TIMING"

MARGIN_SHARE = 0.1
"""How much sooner than Redis a process believes that its slots have run out."""


class Timing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The clockwork of one worker group; the defaults are what production runs on.

    A server that hangs is found within `load_every_s + load_s` (the last movement was seen so
    late) + `stall_s` + `load_every_s + load_s` + `probe_s`: 59 s.

    Attributes:
        ask_again_s: Between two questions to a server that is not there.
        faulty_again_s: Between two questions to a server that refuses us.
        say_again_s: At most so often a line says what is waited for.
        probe_s: A one-token request must be answered within this while others are open.
        first_token_s: The same while none is: a cold server may compile before its first token.
        load_every_s, load_s: Between two readings of the load; how long one may take.
        stall_s: Without any progress for so long, the server is asked for a token.
        slots_every_s, leases_every_s, reap_every_s: Between two renewals, renewals, reapings.
        slot_ttl_s: How long slots are held without a renewal.
        lease_s: How long a job may be silent.
        publish_every_s: Between two publications of our figures.
        sample_every_s: Between two samples for the run's telemetry.
        audit_every_s: Between two audits of the runs while there is nothing to claim.
        redis_limit_s: What a call to Redis gets once we have been told to stop.
    """

    ask_again_s: float = 1.0
    faulty_again_s: float = 30.0
    say_again_s: float = 10.0
    probe_s: float = 15.0
    first_token_s: float = 60.0
    load_every_s: float = 4.0
    load_s: float = 3.0
    stall_s: float = 30.0
    slots_every_s: float = 5.0
    slot_ttl_s: float = SLOT_TTL_MS / 1000
    leases_every_s: float = 10.0
    reap_every_s: float = 15.0
    lease_s: float = LEASE_MS / 1000
    publish_every_s: float = 3.0
    sample_every_s: float = 5.0
    audit_every_s: float = 30.0
    redis_limit_s: float = 2.0

    @property
    def lease_ms(self) -> int:
        """The lease as the scripts take it."""
        return round(self.lease_s * 1000)

    @property
    def slot_ttl_ms(self) -> int:
        """The slots' time as the scripts take it."""
        return round(self.slot_ttl_s * 1000)

    @property
    def slots_trusted_s(self) -> float:
        """For how long a process trusts its own clock that it holds its slots."""
        return self.slot_ttl_s * (1 - MARGIN_SHARE)


def timing_from_environment() -> Timing:
    """Read what tests set so that nobody waits: JSON in HEADRACE_TIMING; else the defaults.

    Raises:
        UsageError: It is no such JSON.
    """
    text = os.environ.get(ENVIRONMENT)
    if not text:
        return Timing()
    try:
        return msgspec.json.decode(text, type=Timing)
    except msgspec.DecodeError as error:
        raise UsageError(f"{ENVIRONMENT}: {error}") from None
