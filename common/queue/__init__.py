"""The queue: RQ's keys, the ledger, leases and slots, and every Lua script that touches them.

This is the only package that knows RQ's own keys. A prompt is one lean RQ job, so RQ's tools see
depth, executing and failed as they are, but what is done is decided by the ledger alone, and a
lease is our own key: RQ's started registry is only filled for RQ's tools, scored so that no reader
of it ever finds anything expired.

    Runs      what runs there are: create, state, counters, producers, pause
    Ledger    one run from the producer's side: lookup, add, audit
    Groups    what worker groups say of themselves
    drains    empty one server for whoever restarts it
    Jobs      one process of a worker group: claim, finish, renew, give back, reap, slots

Every script is atomic and recognises its own repetition, so a caller whose answer was lost calls
again. Scripts that must work when Redis is full begin with a DEL (protocol.md §3).
"""

from common.group_figures import GroupFigures
from common.queue.groups import Groups
from common.queue.jobs import Jobs
from common.queue.ledger import Ledger
from common.queue.records import AddReply, ClaimReply, LedgerEntry, RunState, SlotReply
from common.queue.runs import Runs

__all__ = [
    "AddReply",
    "ClaimReply",
    "GroupFigures",
    "Groups",
    "Jobs",
    "Ledger",
    "LedgerEntry",
    "RunState",
    "Runs",
    "SlotReply",
]
