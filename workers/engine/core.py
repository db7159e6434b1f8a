"""What the parts of one worker group's process share: who it is, what it holds, its borders."""

import logging
from collections.abc import Callable

from common.descriptors import SPARE, most_requests
from common.queue import Groups, Jobs
from workers.capacity.capacity import bound_of
from workers.client.sglang import SGLangClient
from workers.engine.desk import RedisDesk
from workers.engine.draining import Draining
from workers.engine.eligible import Eligible
from workers.engine.holdings import Holdings
from workers.options import GroupOptions
from workers.rids import Rids
from workers.servers.watch import ServerWatch
from workers.stop_request import StopRequest

log = logging.getLogger(__name__)


class Core:
    """The shared part of one process.

    Args:
        options: Who this is and how it should behave.
        jobs, groups: The queue, from this process's side.
        eligible: Which runs this server may serve.
        on_change: Called when there may be something to open, or room for more.
        may_send: Asked at the last moment before a prompt's request goes out.

    Attributes:
        stop: What ends the process.
        holdings: All jobs that it leases.
        work, beat: Threads for calls to Redis: claims and finishes; renewals and figures.
        rids: Ids of its requests.
        client, watch: Its server.
        draining: Whether that server is being drained.
    """

    def __init__(
        self,
        options: GroupOptions,
        *,
        jobs: Jobs,
        groups: Groups,
        eligible: Eligible,
        on_change: Callable[[], None],
        may_send: Callable[[], bool],
    ) -> None:
        self.options = options
        self.timing = options.timing
        self.jobs = jobs
        self.groups = groups
        self.eligible = eligible
        self.on_change = on_change
        self.stop = StopRequest()
        self.holdings = Holdings()
        self.work = RedisDesk("queue")
        self.beat = RedisDesk("heartbeat")
        self.rids = Rids(jobs.epoch)
        self.client = SGLangClient(
            options.server,
            slots=options.most_connections,
            api_key=options.api_key,
            may_send=may_send,
        )
        self.draining = Draining()
        self._said_bound = 0
        self.watch = ServerWatch(
            self.client,
            on_change=on_change,
            timing=options.timing,
            start_limit_s=options.start_limit_s,
            may_be_away=lambda: self.draining.stands,
        )

    def bound(self) -> int:
        """How many requests may be open at the server, over all processes."""
        bound, most = bound_of(self.options.concurrency, self.cap), most_requests()
        if bound > most and bound != self._said_bound:
            self._said_bound = bound
            log.warning(
                "%d requests may be open at the server, and this process may open %d of them: "
                "raise its limit of open files (`ulimit -n`, LimitNOFILE) to %d",
                bound,
                most,
                bound + SPARE,
            )
        return min(bound, most)

    @property
    def cap(self) -> int | None:
        """How many requests the server runs at once, None while it has not told."""
        identity, load = self.watch.identity, self.watch.load
        told = (load and load.cap) or (identity and identity.cap)
        return told or self.watch.telemetry.log.cap

    def close(self) -> None:
        """End the threads; nobody waits for what they still do."""
        self.work.close()
        self.beat.close()
