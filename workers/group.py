"""The RQ worker of one GPU: a subclass of RQ's worker that drives many jobs at once.

`rq worker -w workers.group.SlotWorker RUN …` starts it for those runs, `workers start` for all;
`rq info`, `rq suspend`, `rq resume`, cancel and shutdown commands work on it as on any RQ worker.
It takes jobs by Headrace's own claim (`common.queue`), not by RQ's dequeue: RQ runs one job a
process.

`rq worker` passes no options of ours: it serves GPU 0, or what the flags of `workers start` say in
the environment (HEADRACE_GPU, HEADRACE_SERVER, HEADRACE_CONCURRENCY …) or in headrace.toml.
"""

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import threading
import time
from types import FrameType
from typing import Any

import msgspec
import redis
import uvloop
from rq import Worker, worker_registration
from rq.serializers import JSONSerializer
from rq.worker import WorkerStatus
from typing_extensions import override

from common import connect
from common.descriptors import raise_limit
from common.errors import HeadraceError, UsageError
from common.logs import set_up_logs
from common.program import values_of
from common.queue import Groups, Jobs
from common.queue.rights import refuse_missing_rights
from common.stops import end_on_stop, on_stop
from workers.engine.caretaker import Caretaker
from workers.engine.eligible import Eligible
from workers.engine.engine import Engine
from workers.options import (
    GroupOptions,
    group_name,
    parse_gpus,
    server_url,
    slots_server,
    this_host,
)
from workers.stop_request import BY_PARENT, HURRY
from workers.supervisor.log_place import log_finder
from workers.timing import timing_from_environment

log = logging.getLogger(__name__)

RQ_TTL_S = 60
PUBSUB_AGAIN_S = 2.0
RQ_DEFAULT_QUEUES = ("default",)
"""What `rq worker` passes on when it was given no names."""


def generate(key: str) -> None:
    """Stand for a prompt in RQ's eyes; a worker group never calls it.

    Raises:
        RuntimeError: Always: a stock RQ worker has no server to send the prompt to. RQ marks the
            job failed, and Headrace's audit puts it back.
    """
    raise RuntimeError(
        f"job {key} is a Headrace prompt: serve its queue with `workers start --gpu N` "
        "or `rq worker -w workers.group.SlotWorker`, not with a stock worker"
    )


class SlotWorker(Worker):
    """One worker group as an RQ worker; its name is `gpuN@host` and a suffix of the process.

    Args:
        queues: Runs to serve; none means all, and so does RQ's own default, the name `default`.
        options: Given by `workers start`; else read from the settings.

    Attributes:
        stopped_by: Number of the signal that ended `work`, None when there was none.

    Raises:
        RedisUnusableError: From `workers start`: Redis went away since it was checked.
    """

    def __init__(
        self,
        queues: Any = (),
        name: str | None = None,
        *args: Any,
        options: GroupOptions | None = None,
        **kwargs: Any,
    ) -> None:
        self.options = options
        self.stopped_by: int | None = None
        # RQ's default unpickles what it reads: who can write to Redis could run code here.
        kwargs["serializer"] = JSONSerializer
        try:
            super().__init__(queues, name or _worker_name(options), *args, **kwargs)
        except connect.REDIS_ERRORS as error:
            # RQ asks Redis who it is; its own command has its own words for a Redis that is away.
            if options is None:
                raise
            raise connect.mapped(error, connect.address_of(kwargs["connection"])) from error
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._counted = (0, 0)

    @override
    def work(self, *args: Any, **kwargs: Any) -> bool:
        """Serve until a signal asks to stop, or RQ's shutdown command.

        RQ's arguments are taken and, but for the log level, ignored: there is no burst mode, no
        scheduler and no other order than the claim's.

        Raises:
            HeadraceError: It cannot be served. Where `rq worker` called, SystemExit with its code.
        """
        if self.options is not None:
            return self._work(self.options, logging_level="WARNING")
        level = str(kwargs.get("logging_level") or "INFO")
        set_up_logs(level)
        try:
            options = options_from_settings(tuple(queue.name for queue in self.queues))
            return self._work(options, logging_level=level)
        except HeadraceError as error:
            log.error("%s", error)  # noqa: TRY400 - for people, without the stack
            raise SystemExit(error.exit_code) from None

    def _work(self, options: GroupOptions, *, logging_level: str) -> bool:
        # RQ has given its own connection a time-out of minutes, for blocking reads of its own.
        client = own_client(self.connection)
        self.connection = client
        connect.check(client, connect.address_of(client))
        refuse_missing_rights(client, connect.address_of(client), listens=True)
        options = with_name(options, self.name)
        raise_limit()
        with connect.mapping_errors(client):
            self.bootstrap(logging_level)
        try:
            return _run(self._serve(client, options))
        finally:
            # The loop has taken its handlers with it, and nothing is held any more.
            end_on_stop()
            # Redis may be frozen: then RQ's record of this worker runs out by itself.
            ending = threading.Thread(target=self._end, name="teardown", daemon=True)
            ending.start()
            ending.join(options.timing.redis_limit_s / 2)

    def _end(self) -> None:
        with contextlib.suppress(*connect.REDIS_ERRORS):
            self.teardown()  # type: ignore[no-untyped-call]

    async def _serve(self, client: "redis.Redis", options: GroupOptions) -> bool:
        eligible = Eligible(client, only=options.runs)
        jobs = Jobs(
            client,
            epoch=secrets.token_hex(6),
            group=options.group,
            server=slots_server(options.server, options.host),
            where=connect.address_of(client),
        )
        self._loop = asyncio.get_running_loop()
        self._engine = engine = Engine(
            options,
            jobs=jobs,
            groups=Groups(client),
            eligible=eligible,
            caretaker=Caretaker(client, eligible, options.timing),
            on_beat=lambda busy, done, failed: self._beat(eligible, busy, (done, failed)),
        )
        self._listen_for_stops(self._loop, engine)
        await engine.run()
        self.stopped_by = engine.stop.signal
        return True

    @staticmethod
    def _listen_for_stops(loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
        """Let signals stop the engine.

        Not by the loop's own handlers: when two signals come at once, uvloop may hand one of them
        on twice, and twice means hurry.
        """

        def on_signal(number: int, _frame: FrameType | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nothing is left to stop
                loop.call_soon_threadsafe(engine.stop.on_signal, number)

        on_stop(on_signal)
        for number in (BY_PARENT, HURRY):
            signal.signal(number, on_signal)

    def _beat(self, eligible: Eligible, busy: bool, counted: tuple[int, int]) -> None:  # noqa: FBT001
        """Keep RQ's own record of this worker fresh, and its queues those that it serves."""
        done, failed = counted[0] - self._counted[0], counted[1] - self._counted[1]
        with connect.mapping_errors(self.connection), self.connection.pipeline() as pipeline:
            self._note_queues(eligible.all_names, pipeline)
            # Written anew each time: after an outage of Redis the record may have run out.
            pipeline.hset(self.key, mapping=self.serialize())
            self.heartbeat(RQ_TTL_S, pipeline=pipeline)
            self.set_state(WorkerStatus.BUSY if busy else WorkerStatus.IDLE, pipeline=pipeline)
            if done:
                pipeline.hincrby(self.key, "successful_job_count", done)
            if failed:
                pipeline.hincrby(self.key, "failed_job_count", failed)
            pipeline.execute()
        self._counted = counted

    def _note_queues(self, names: list[str], pipeline: Any) -> None:
        if [queue.name for queue in self.queues] != names:
            worker_registration.unregister(self, pipeline)
            self.queues = [
                self.queue_class(name, connection=self.connection, serializer=self.serializer)
                for name in names
            ]
        worker_registration.register(self, pipeline)

    @override
    def request_stop(self, signum: Any, frame: Any) -> None:
        """Drain, as on a signal; RQ calls this from threads of its own."""
        if self._engine is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._engine.stop.ask)

    @override
    def _pubsub_exception_handler(self, exc: Exception, pubsub: Any, pubsub_thread: Any) -> None:
        """Listen again when Redis does; RQ's own handler gives up on a time-out."""
        if not isinstance(exc, connect.REDIS_ERRORS):
            raise exc
        time.sleep(PUBSUB_AGAIN_S)


def _run(main: Any) -> bool:
    # What is imported lives for ever, and a request makes many small objects: collecting less
    # often and never looking at the imports again saves a fifth of the CPU a request.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return bool(runner.run(main))


def options_from_settings(runs: tuple[str, ...]) -> GroupOptions:
    """Read the options of a worker group that `rq worker` started: those of `workers start`.

    Args:
        runs: The names that it was given.

    Raises:
        UsageError: A variable or headrace.toml does not say what it should.
    """
    # It imports this module; whoever was started by `rq worker` has not imported it yet.
    from workers.cli import cli  # noqa: PLC0415

    said, host = values_of(cli, "start", defaults={"gpu": "0"}), this_host()
    gpus = parse_gpus(said["gpu"], said["tp"])
    if len(gpus) != 1:
        raise UsageError(
            f"HEADRACE_GPU {said['gpu']!r} makes {len(gpus)} worker groups, and `rq worker` is "
            "one: give it one GPU, or use `workers start`"
        )
    group = group_name(gpus[0], host)
    return GroupOptions(
        group=group,
        server=server_url(said["server"], gpus[0][0]),
        host=host,
        concurrency=said["concurrency"],
        ramp=said["ramp"],
        grace_s=said["grace_s"],
        start_limit_s=said["start_limit_s"],
        runs=said["runs"] if runs == RQ_DEFAULT_QUEUES else runs,
        api_key=os.environ.get("HEADRACE_API_KEY"),
        find_log=log_finder(
            said["server_log"], group=group, gpu=gpus[0][0], state_dir=said["state_dir"]
        ),
        timing=timing_from_environment(),
    )


def with_name(options: GroupOptions, name: str) -> GroupOptions:
    """Fill in what only the running process knows."""
    return msgspec.structs.replace(options, worker_name=name, pid=os.getpid())


def own_client(connection: "redis.Redis") -> "redis.Redis":
    """Make our client for the same Redis as RQ's connection, with our time-outs and retries."""
    pool = connection.connection_pool
    kwargs = {
        key: value
        for key, value in pool.connection_kwargs.items()
        if key not in {"socket_timeout", "socket_connect_timeout", "retry", "decode_responses"}
    }
    kwargs |= connect.timing(unix="path" in kwargs)
    return redis.Redis(
        connection_pool=redis.ConnectionPool(connection_class=pool.connection_class, **kwargs)
    )


def _worker_name(options: GroupOptions | None) -> str:
    return f"{options.group if options else _group_by_settings()}-{secrets.token_hex(3)}"


def _group_by_settings() -> str:
    try:
        return options_from_settings(()).group
    except UsageError:
        # RQ asks for the name first; `work` says what is wrong.
        return f"gpu@{this_host()}"
