"""How long each lease lasts: who is silent for so long loses what it held.

`HEADRACE_LEASES`, JSON of milliseconds by name, makes them shorter for tests that kill a thousand
processes; all processes of a deployment must be told the same. A job's own lease is a worker
group's (`workers.timing`).
"""

import os

import msgspec

ENVIRONMENT = "HEADRACE_LEASES"


class Leases(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The leases that have one length for everybody, in milliseconds of Redis TIME.

    Attributes:
        slots_ms: A process's slots; renewed every 5 s.
        sink_ms: A sink's partitions; renewed three times in it.
        turn_ms: The turn of the one process that reconciles or ends a run; renewed likewise.
        drain_ms: A server's drain, after which it is over unless its owner renews it.
    """

    slots_ms: int = 20_000
    sink_ms: int = 30_000
    turn_ms: int = 60_000
    drain_ms: int = 30_000


LEASES = msgspec.json.decode(os.environ.get(ENVIRONMENT) or "{}", type=Leases)
