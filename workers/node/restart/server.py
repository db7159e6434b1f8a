"""Restart one server: empty it, have it launched anew, and see that it is at work again.

    drain        no request is opened at it; what is open ends, or goes back at the limit
    order        left for its supervisor, who launches it anew
    its token    what it got is compared with what was asked; a launch that does not start has been
                 taken back by the supervisor, who runs it as it was
    lift         its worker group claims again
    at work      it is full again, or has nothing to do

Between any two of them this process may die: the drain runs out, and the order stands.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from common.crashpoints import reached
from common.errors import BackendError, HeadraceError, RedisUnusableError
from common.group_figures import GroupFigures
from common.queue import Groups
from workers.node.restart.choice import Asked, Outcome, State, had, has_already, is_ordered
from workers.node.restart.emptied import Emptied, Interrupted
from workers.options import slots_server
from workers.supervisor.records import (
    ServerRecord,
    Wanted,
    ask,
    read_record,
    read_wanted,
    refuse_full_disk,
)

if TYPE_CHECKING:
    import redis

LOOK_S = 0.2
WATCHED_S = 60.0
"""How long a supervisor that died may take to be there again."""

REFILL_LOOK_S = 0.5
AT_WORK_S = 120.0
SETTLED_S = 10.0
FULL_SHARE = 0.9
INTERRUPTED = 130
AGAIN = "the same call again goes on"


# The machine's addresses are looked at for each name, and names are compared many times.
_named = functools.cache(slots_server)


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a restart is told beside what it asks for.

    Attributes:
        state_dir: Where the supervisors keep their records.
        host: This machine, as worker groups name it.
        drain_limit_s: What open requests get.
        start_limit_s: What a server gets until its token.
        api_key: Of the servers.
    """

    state_dir: Path
    host: str
    drain_limit_s: float
    start_limit_s: float
    api_key: str | None = None


class ServerRestart:
    """The restart of one server.

    Args:
        record: Of the server, as it is now.
        asked: What is asked.
        told: See there.
        client: Of Redis; None to drain nothing.
        say: Takes the step it is at, and what there is to say of it.
        stop: Set when whoever called is to end.
    """

    def __init__(
        self,
        record: ServerRecord,
        asked: Asked,
        told: Told,
        *,
        client: "redis.Redis | None",
        say: Callable[[str, str], None],
        stop: threading.Event,
    ) -> None:
        self._before = record
        self._asked = asked
        self._told = told
        self._client = client
        self._say = say
        self._stop = stop
        self._server = slots_server(record.url, told.host)
        self._emptied = Emptied(
            client,
            name=record.name,
            server=self._server,
            url=record.url,
            host=told.host,
            reason=asked.text,
            limit_s=told.drain_limit_s,
            say=say,
            stop=stop,
            api_key=told.api_key,
        )
        self._away_s: float | None = None

    def run(self) -> Outcome:
        """Restart it; whatever goes wrong is in what is given back."""
        name, before = self._before.name, had(self._before)
        try:
            standing = read_wanted(self._told.state_dir, name)
            if has_already(self._before, standing, self._asked):
                self._say("has it already", before.text)
                return Outcome(name=name, state="skipped", before=before, after=before)
            after = self._restart(standing)
        except Interrupted:
            self._emptied.lift()
            self._say("interrupted", AGAIN)
            return self._outcome(
                "stopped", detail=f"{name}: interrupted, {AGAIN}", code=INTERRUPTED
            )
        except HeadraceError as error:
            self._emptied.lift()
            self._say("failed", str(error))
            return self._outcome("failed", detail=str(error), code=error.exit_code)
        self._say("done", f"{before.text} -> {had(after).text}")
        return self._outcome("restarted", after=after)

    def _outcome(
        self, state: State, *, detail: str = "", code: int = 0, after: ServerRecord | None = None
    ) -> Outcome:
        if after is None:
            with contextlib.suppress(BackendError):
                after = self._read()
        return Outcome(
            name=self._before.name,
            state=state,
            before=had(self._before),
            after=had(after) if after is not None and after.state == "ready" else None,
            detail=detail,
            code=code,
            drained_s=self._emptied.took_s,
            away_s=self._away_s,
        )

    def _restart(self, standing: Wanted | None) -> ServerRecord:
        groups = self._figures()
        ordered = is_ordered(self._before, standing, self._asked)
        if not ordered:
            refuse_full_disk(self._told.state_dir, self._before.name)
        self._emptied.hold()
        reached("restart.drained")
        earlier = standing
        if not ordered:
            standing = self._order(self._asked.strategy, self._asked.arguments)
        assert standing is not None  # noqa: S101 - ordered now, or found ordered
        reached("restart.ordered")
        began_s = time.monotonic()
        record = self._until_ready(standing, earlier)
        self._away_s = round(time.monotonic() - began_s, 1)
        reached("restart.ready")
        self._emptied.lift()
        self._until_at_work(record, groups)
        return record

    # --- the order -------------------------------------------------------------------------------

    def _order(self, strategy: str | None, arguments: tuple[str, ...] | None) -> Wanted:
        if not self._emptied.stands:
            raise BackendError(f"{self._before.name}: the drain has ended before the order: again")
        return ask(self._told.state_dir, self._before.name, strategy=strategy, arguments=arguments)

    def _until_ready(self, order: Wanted, earlier: Wanted | None) -> ServerRecord:
        """Wait until the order is carried out and the server gives a token.

        Raises:
            BackendError: It does not start so, and is launched as it was; or nobody watches it.
        """
        until_s = time.monotonic() + self._told.start_limit_s
        watched_s = time.monotonic()
        while True:
            self._go_on()
            self._emptied.renew()
            record = self._read()
            if record.supervisor.alive:
                watched_s = time.monotonic()
            ended = record.state in {"failed", "stopped"}
            if record.serial >= order.serial and record.state == "ready":
                if record.refused:
                    raise BackendError(self._refused_text(record))
                return record
            if (ended and not record.supervisor.alive) or time.monotonic() - watched_s > WATCHED_S:
                raise BackendError(
                    f"{record.name} is {record.state} and has no supervisor any more: "
                    f"{record.detail or 'its log says why'} ({record.log})"
                )
            if time.monotonic() > until_s:
                self._take_back(earlier)
                raise BackendError(
                    f"{record.name} gave no token within {self._told.start_limit_s:g} s "
                    f"(--start-limit), so it is launched as it was: {record.detail}; its log is "
                    f"{record.log}"
                )
            doing = "rolling back" if record.refused else record.state
            # What the record says before it has looked at the order is of an earlier one.
            self._say(doing if record.serial >= order.serial else "relaunching", record.detail)
            self._stop.wait(LOOK_S)

    def _refused_text(self, record: ServerRecord) -> str:
        return (
            f"{record.name} does not run with {self._asked.text}: {record.refused}; it runs as it "
            f"did ({had(record).text}), and its log is {record.log}"
        )

    def _take_back(self, earlier: Wanted | None) -> None:
        """Order what the server had before."""
        before = self._before
        held = earlier if earlier and earlier.over == before.flags else None
        arguments = (held.arguments if held else None) or ()
        ask(
            self._told.state_dir,
            before.name,
            strategy=before.strategy or (held.strategy if held else None),
            arguments=arguments,
        )

    def _read(self) -> ServerRecord:
        found = read_record(self._told.state_dir, self._before.name)
        if found is None:
            raise BackendError(
                f"{self._before.name}: its record in {self._told.state_dir} is gone"
            )
        return found

    # --- its worker group ------------------------------------------------------------------------

    def _figures(self) -> dict[str, GroupFigures]:
        """The processes that drive this server, by what they last said; empty without Redis."""
        if self._client is None:
            return {}
        try:
            fresh = Groups(self._client).fresh()
        except RedisUnusableError:
            return {}
        return {
            each.epoch: each for each in fresh if _named(each.server, each.host) == self._server
        }

    def _until_at_work(self, record: ServerRecord, before: dict[str, GroupFigures]) -> None:
        """Wait until the worker group is as busy as it can be, if there is one.

        Raises:
            BackendError: It does not serve its runs with the server as it is now.
        """
        until_s = time.monotonic() + AT_WORK_S
        most, grown_s = -1, time.monotonic()
        while (now := self._figures()) and time.monotonic() < until_s:
            self._go_on()
            misfit = next((each for each in now.values() if each.state == "wrong_model"), None)
            if misfit and not any(each.state == "wrong_model" for each in before.values()):
                raise BackendError(
                    f"{record.name} runs as asked, and its worker group cannot serve with it: "
                    f"{misfit.detail}; `workers restart --gpu {record.gpus[0]}` with what it had "
                    "brings it back"
                )
            open_now = sum(each.in_flight for each in now.values())
            bound = max(each.bound for each in now.values())
            ready = any(
                each.state == "ready" and record.cap in {None, each.cap} for each in now.values()
            )
            if ready and bound and open_now >= FULL_SHARE * bound:
                return
            if open_now > most or not ready:
                most, grown_s = open_now, time.monotonic()
            if time.monotonic() - grown_s > SETTLED_S:
                return  # there is not more to do
            # Without a bound its worker group has not had a token from it yet.
            self._say("refilling", f"{open_now} of {bound} open" if bound else "no request yet")
            self._stop.wait(REFILL_LOOK_S)

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise Interrupted
