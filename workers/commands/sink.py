"""`workers sink`: result streams to the store."""

import logging
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType

import click

from common.address import resolve_redis
from common.connect import address_of, connect, persistence_warning
from common.last_words import tell
from common.logs import set_up_logs
from common.options import LOG_LEVEL, NOTIFY, REDIS, grace, state_dir
from common.queue.rights import refuse_missing_rights
from common.stops import Stopped, on_stop, warn_of_shell
from common.store.frames import MOST_BATCH_BYTES
from workers.node.processes import watched_by
from workers.sink.batch import Limits
from workers.sink.sink import Sink, SinkOptions
from workers.stop_request import BY_PARENT, HURRY, StopRequest

log = logging.getLogger(__name__)

_DEFAULTS = Limits()
PARENT_LOOK_S = 0.5


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@REDIS
@click.option(
    "--batch-bytes",
    type=click.IntRange(1, MOST_BATCH_BYTES),
    default=_DEFAULTS.bytes,
    show_default=True,
    metavar="BYTES",
    help="Raw bytes of rows after which a shard is written.",
)
@click.option(
    "--batch-rows",
    type=click.IntRange(min=1),
    default=_DEFAULTS.rows,
    show_default=True,
    help="Rows after which a shard is written.",
)
@click.option(
    "--batch-seconds",
    type=click.FloatRange(min=0),
    default=_DEFAULTS.seconds,
    show_default=True,
    metavar="S",
    help="Age of the oldest row, in seconds, at which a shard is written.",
)
@click.option(
    "--first-batch-seconds",
    type=click.FloatRange(min=0),
    default=_DEFAULTS.first_seconds,
    show_default=True,
    metavar="S",
    help="The same for a run's first shard: its results show early.",
)
@grace(25.0, "storing what waits")
@state_dir("RUN/progress.json is written")
@click.option(
    "--poll",
    "poll_s",
    type=click.FloatRange(min=0.01),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds between two looks at the streams.",
)
@click.option(
    "--until-done",
    is_flag=True,
    help="End when all named runs have: with 0 when all is completed, with 1 after failures.",
)
@NOTIFY
@LOG_LEVEL
def sink(
    *,
    runs: tuple[str, ...],
    redis: str | None,
    batch_bytes: int,
    batch_rows: int,
    batch_seconds: float,
    first_batch_seconds: float,
    grace_s: float,
    state_dir: Path,
    poll_s: float,
    until_done: bool,
    notify: str | None,
    log_level: str,
) -> None:
    """Move results from Redis to the store, of RUNs or of all.

    Needs no output: each run knows its own. Several sinks share the partitions; one that dies is
    replaced within half a minute. SIGTERM or Ctrl-C stores what waits within --grace; what is not
    stored stays in Redis.

    \b
    Example:
        workers sink --redis redis://queue:6379/0
        workers sink prompts --until-done
        workers sink --notify 'mail -s "$HEADRACE_NOTIFY_TEXT" me@example.org'
    """
    if until_done and not runs:
        raise click.UsageError("--until-done needs runs: `workers sink RUN --until-done`")
    set_up_logs(log_level)
    warn_of_shell()
    client = connect(resolve_redis(redis))
    refuse_missing_rights(client, address_of(client))
    warning = persistence_warning(client)
    if warning:
        tell(f"workers sink: {warning}")
    options = SinkOptions(
        runs=runs,
        limits=Limits(
            bytes=batch_bytes,
            rows=batch_rows,
            seconds=batch_seconds,
            first_seconds=first_batch_seconds,
        ),
        grace_s=grace_s,
        state_dir=state_dir,
        poll_s=poll_s,
        until_done=until_done,
        notify=notify,
    )
    process = Sink(client, options)
    stop = _Stop(process, grace_s=grace_s)
    code = process.run()
    raise SystemExit(128 + stop.number if stop.number is not None else code)


class _Stop:
    """Stops a sink when it is told to.

    A sink that `workers up` watches is the last to end: what is in flight in its worker groups
    comes to the streams until they have ended. So a signal that reached it with all the others of
    its node waits for the word of who watches, as long as the grace; and when that one is gone it
    ends by itself, since nobody would start it again.
    """

    def __init__(self, sink: Sink, *, grace_s: float) -> None:
        self._sink = sink
        self._grace_s = grace_s
        self._request = StopRequest()
        self._parent = watched_by()
        on_stop(self._on_signal)
        if self._parent is not None:
            for number in (BY_PARENT, HURRY):
                signal.signal(number, self._on_signal)
            threading.Thread(target=self._watch_parent, name="parent", daemon=True).start()

    @property
    def number(self) -> int | None:
        """The signal that ended it; None while there was none."""
        return self._request.signal

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        passed_on = number in {BY_PARENT, HURRY}
        self._request.on_signal(number)
        if self._request.hurried.is_set():
            raise Stopped(signal.SIGTERM if passed_on else number)
        if passed_on or self._parent is None:
            self._sink.stop()
            return
        log.info("told to stop: for at most %.0f s more the worker groups here come first",
                 self._grace_s)  # fmt: skip
        later = threading.Timer(self._grace_s, self._sink.stop)
        later.daemon = True
        later.start()

    def _watch_parent(self) -> None:
        while os.getppid() == self._parent:
            time.sleep(PARENT_LOOK_S)
        log.warning("the process that watches this one is gone: ending, nothing is lost")
        self._request.ask(signal.SIGTERM, teller="the end of who watches")
        self._sink.stop()
