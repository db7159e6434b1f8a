"""What a worker group's process does not do: claim without right, keep what it cannot open."""

import asyncio
import os
import threading
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from common import connect
from common.models import Claim, Params, RunRecord
from common.queue import SlotReply
from common.queue.jobs import Holder
from workers.engine import keeper as keeper_module
from workers.engine.desk import RedisDesk
from workers.engine.draining import Draining
from workers.engine.eligible import Eligible
from workers.engine.endings import Endings
from workers.engine.engine import Engine
from workers.engine.holdings import Holdings
from workers.engine.keeper import Keeper
from workers.engine.returns import Returns
from workers.engine.showing import Showing
from workers.lives import process_start
from workers.prompt.job import Open, Ready
from workers.prompt.outcomes import Returned
from workers.rids import Rids
from workers.timing import Timing


def claim(key: bytes = b"k" * 16) -> Claim:
    return Claim(
        run="r",
        uid="u",
        key=key,
        fingerprint=b"f" * 8,
        try_=1,
        attempts=0,
        deaths=0,
        lost=0,
        prompt=b"{}",
    )


def engine(*, slots: int = 4, ready: bool = True, blocked: bool = False) -> Engine:
    """The part of an engine that decides, without its loops."""
    made = object.__new__(Engine)
    parts: dict[str, Any] = {
        "_holdings": Holdings(),
        "_keeper": SimpleNamespace(slots=slots),
        "_watch": SimpleNamespace(ready=ready, rest_s=lambda: 0.0),
        "_finisher": SimpleNamespace(blocked=blocked, full=False),
        "_opened": SimpleNamespace(per_s=lambda _now_s: 0.0),
        "_ramp": SimpleNamespace(restart=lambda _now_s: None),
    }
    for name, part in parts.items():
        setattr(made, name, part)
    made._returns = Returns(cast("Any", None), made._holdings, cast("Any", None))
    return made


def claiming_engine() -> tuple[Engine, list[Any]]:
    """One that takes claims over and opens them, and what it would have spawned."""
    made, spawned = engine(), []

    def spawn(work: Any, _name: str = "") -> None:
        work.close()
        spawned.append(work)

    core = SimpleNamespace(
        client=None,
        stop=None,
        draining=Draining(),
        holdings=made._holdings,
        eligible=None,
        rids=Rids("mine"),
    )
    parts: dict[str, Any] = {
        "_core": core,
        "_work_bell": SimpleNamespace(ring=lambda: None),
        "_ramp": SimpleNamespace(wait_s=lambda _now_s, **_: 0.0),
        "_opened": SimpleNamespace(note=lambda _now_s: None),
        "_spawn": spawn,
        "_endings": Endings(
            cast("Any", core),
            finisher=cast("Any", None),
            returns=made._returns,
            spawn=cast("Any", spawn),
        ),
    }
    for name, part in parts.items():
        setattr(made, name, part)
    return made, spawned


def test_a_process_with_slots_and_a_server_claims() -> None:
    assert engine()._claimable() > 0


def test_without_slots_nothing_is_claimed() -> None:
    assert engine(slots=0)._claimable() == 0


def test_nothing_is_claimed_while_the_server_gives_no_token() -> None:
    assert engine(ready=False)._claimable() == 0


def test_nothing_is_claimed_while_results_wait_for_an_unknown_run() -> None:
    assert engine(blocked=True)._claimable() == 0


def test_nothing_is_claimed_beside_a_suspect() -> None:
    one = engine(slots=100)
    one._holdings.add_ready(Ready(claim(), suspect=True))

    assert one._claimable() == 0


@pytest.mark.parametrize(("slots", "ready"), [(0, True), (4, False)])
def test_what_cannot_be_opened_goes_back_at_once(slots: int, *, ready: bool) -> None:
    one = engine(slots=slots, ready=ready)
    one._holdings.add_ready(Ready(claim()))

    one._open_what_fits()

    assert not one._holdings.ready
    assert [(key, going.died) for key, going in one._holdings.returning.items()] == [
        (("r", b"k" * 16), False)
    ]


async def test_the_answer_to_a_return_does_not_end_the_next_return_of_the_same_job() -> None:
    holdings = Holdings()
    loop = asyncio.get_running_loop()
    given: list[list[tuple[str, bytes]]] = []

    class Redis:
        def give_back(self, keys: list[tuple[str, bytes]], *, died: bool) -> None:
            assert not died
            given.append(keys)
            if len(given) == 1:
                loop.call_soon_threadsafe(claimed_again)

    def claimed_again() -> None:
        # Its claim's answer is read before the return's, and the process is stopping.
        holdings.add_ready(Ready(claim()))
        returns.add_ready()

    desk = RedisDesk("returns")
    returns = Returns(cast("Any", Redis()), holdings, desk)
    holdings.add_ready(Ready(claim()))
    returns.add_ready()

    assert await returns.flush(10.0)
    assert await returns.flush(10.0)
    desk.close()

    assert given == [[("r", b"k" * 16)]] * 2
    assert not len(holdings)


async def test_a_job_that_is_claimed_while_it_is_open_is_not_opened_a_second_time() -> None:
    """Redis was rewound, or the process stood still until its jobs had been reaped."""
    one, spawned = claiming_engine()
    job = Open(Ready(claim()), slot=one._core.rids.take_slot(), since_s=0.0)
    one._holdings.open[job.key] = job

    for each in (claim(), claim(b"n" * 16), claim(b"n" * 16)):
        one._endings.admit(Ready(each))
    one._open_what_fits()

    # Nothing could end the first request any more, and its slot would be filled twice.
    assert one._holdings.open[job.key] is job
    assert one._holdings.in_slots == len(spawned) + 1 == 2


@pytest.mark.parametrize("change", [{"uid": "anew"}, {"try_": 2}], ids=["run", "try"])
async def test_a_job_claimed_for_another_try_takes_the_place_of_the_one_that_is_open(
    change: dict[str, Any],
) -> None:
    one, _ = claiming_engine()
    job = Open(Ready(claim()), slot=one._core.rids.take_slot(), since_s=0.0)
    one._holdings.open[job.key] = job

    one._endings.admit(Ready(msgspec.structs.replace(claim(), **change)))
    one._open_what_fits()

    assert one._holdings.open[job.key] is not job
    assert job in one._holdings.leaving


async def test_the_answer_to_a_renewal_does_not_end_what_was_claimed_after_it() -> None:
    holdings, desk = Holdings(), RedisDesk("test")
    loop = asyncio.get_running_loop()
    lost: list[tuple[str, bytes]] = []
    once = [["stolen"], ["gone"]]

    def renew(keys: list[Any], **_: Any) -> list[str]:
        assert keys == [("r", b"k" * 16)]
        if len(once) > 1:
            # Whoever had stolen it has given it back, and its claim's answer is read before ours.
            loop.call_soon_threadsafe(holdings.add_ready, Ready(claim()))
        return once.pop(0)

    parts = ("watch", "rids", "client")
    core = SimpleNamespace(
        **dict.fromkeys(parts),
        jobs=SimpleNamespace(renew=renew),
        holdings=holdings,
        beat=desk,
        timing=Timing(),
        draining=Draining(),
    )
    endings = SimpleNamespace(lose_strangers=lambda: None, lose=lost.append)
    keeper = Keeper(cast("Any", core), cast("Any", endings))
    job = Open(Ready(claim()), slot=0, since_s=0.0)
    holdings.open[job.key] = job

    await keeper._renew_leases()
    assert not lost
    await keeper._renew_leases()
    desk.close()
    assert lost == [job.key]


async def test_what_is_published_of_a_server_is_all_of_one_instant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restart that is counted before the figures tell what changed would be marked twice."""
    marked: list[Any] = []
    watch, told = SimpleNamespace(restarts=0), asyncio.Event()

    async def ask(call: Any) -> None:
        await asyncio.sleep(0)
        # The thread was busy with another call, and the server has restarted meanwhile.
        watch.restarts = 1
        call()
        told.set()

    def nothing(*_: Any) -> None:
        pass

    core = SimpleNamespace(
        beat=SimpleNamespace(ask=ask),
        watch=watch,
        groups=SimpleNamespace(publish=nothing),
        eligible=SimpleNamespace(refresh=nothing),
        holdings=Holdings(),
        options=SimpleNamespace(timing=Timing()),
    )
    showing = object.__new__(Showing)
    parts: dict[str, Any] = {
        "_core": core,
        "_keeper": SimpleNamespace(slots=1),
        "_finisher": SimpleNamespace(completed=0, failed=0),
        "_on_beat": nothing,
        "_marking": SimpleNamespace(look=lambda *seen: marked.append(seen), tell=nothing),
        "_occupied": [],
    }
    for name, part in parts.items():
        setattr(showing, name, part)
    figures = SimpleNamespace(in_flight=0)
    monkeypatch.setattr(showing, "figures", lambda: figures)

    publishing = asyncio.create_task(showing._publish())
    async with asyncio.timeout(30):
        await told.wait()
    publishing.cancel()

    assert marked == [(figures, 0)]


# --- Slots of others -----------------------------------------------------------------------------


class Told:
    """What a keeper asks of Redis and of its server, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.group = "gpu0@test"
        self.epoch = "mine"

    def take_slots(self, wanted: int, *, settled: str, **_: Any) -> SlotReply:
        self.said.append(f"take after {settled or 'nothing'}")
        if not settled:
            return SlotReply(what="settle", other="dead", rid_prefix="dead")
        return SlotReply(what="granted", slots=wanted)

    def holders(self) -> dict[str, Holder]:
        about = msgspec.json.encode({"most": 2}).decode()
        holder = {"slots": 2, "deadline_ms": 1, "rid_prefix": "dead", "group": "g", "about": about}
        return {"dead": msgspec.convert(holder, Holder)}

    async def abort(self, _rid: str) -> bool:
        await asyncio.sleep(0)
        self.said.append("abort")
        return True


async def test_expired_slots_are_settled_after_their_requests_were_aborted() -> None:
    told, desk = Told(), RedisDesk("test")

    async def quiet(_limit_s: float | None = None) -> bool:
        await asyncio.sleep(0)
        return False

    core = SimpleNamespace(
        jobs=told,
        holdings=Holdings(),
        beat=desk,
        watch=SimpleNamespace(ready=True, quiet=quiet),
        rids=Rids("mine"),
        timing=Timing(),
        client=told,
        options=SimpleNamespace(host="here"),
        bound=lambda: 4,
        on_change=lambda: None,
        draining=Draining(),
    )
    keeper = Keeper(cast("Any", core), cast("Any", None))

    await keeper._renew_slots()

    desk.close()
    assert keeper.slots == 4
    assert told.said[0] == "take after nothing"
    assert told.said[-1] == "take after dead"
    assert set(told.said[1:-1]) == {"abort"}


@pytest.mark.parametrize(
    ("host", "started", "dead"),
    [
        ("here", "", False),
        ("here", "1", True),
        ("elsewhere", "1", False),
    ],
)
def test_a_pid_that_belongs_to_another_process_now_is_a_dead_holder(
    host: str, started: str, *, dead: bool
) -> None:
    parts = ("jobs", "holdings", "beat", "watch", "rids", "timing")
    core = SimpleNamespace(
        **dict.fromkeys(parts), options=SimpleNamespace(host="here"), draining=Draining()
    )
    keeper = Keeper(cast("Any", core), cast("Any", None))
    started = started or process_start(os.getpid())
    about = msgspec.json.encode({"host": host, "pid": os.getpid(), "started": started}).decode()
    holder = Holder(slots=1, deadline_ms=1, rid_prefix="p", group="g", about=about)

    assert keeper._is_dead(holder) is dead


async def test_slots_are_trusted_from_before_the_call_that_granted_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer may have come late: Redis counts from when it was asked, about."""
    now_s, desk, timing = [100.0], RedisDesk("test"), Timing()
    monkeypatch.setattr(keeper_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def take_slots(wanted: int, **_: Any) -> SlotReply:
        now_s[0] += 7
        return SlotReply(what="granted", slots=wanted)

    core = SimpleNamespace(
        jobs=SimpleNamespace(take_slots=take_slots, group="gpu0@test", epoch="mine"),
        holdings=Holdings(),
        beat=desk,
        watch=SimpleNamespace(ready=True),
        rids=Rids("mine"),
        timing=timing,
        options=SimpleNamespace(host="here"),
        bound=lambda: 4,
        on_change=lambda: None,
        draining=Draining(),
    )
    keeper = Keeper(cast("Any", core), cast("Any", None))

    await keeper._renew_slots()

    desk.close()
    now_s[0] = 100 + timing.slots_trusted_s - 1
    assert keeper.slots == 4
    now_s[0] = 100 + timing.slots_trusted_s
    assert keeper.slots == 0


# --- Runs of one name ----------------------------------------------------------------------------


@pytest.mark.parametrize(("uid", "opened"), [("u", 1), ("another", 0)])
async def test_a_job_of_an_older_run_of_this_name_opens_no_request(uid: str, opened: int) -> None:
    one, served, settled = engine(), [], []
    params = Params(max_tokens=1)

    async def serve(job: Open, *_: Any) -> Returned:
        await asyncio.sleep(0)
        served.append(job.key)
        return Returned()

    record = RunRecord(run="r", uid=uid, params=params, output="", created_at="")
    parts: dict[str, Any] = {
        "_core": SimpleNamespace(
            eligible=SimpleNamespace(record=lambda _run: record),
            rids=SimpleNamespace(free_slot=lambda _slot: None),
        ),
        "_prompter": SimpleNamespace(serve=serve),
        "_work_bell": SimpleNamespace(ring=lambda: None),
        "_endings": SimpleNamespace(settle=lambda job, ended: settled.append((job.key, ended))),
    }
    for name, part in parts.items():
        setattr(one, name, part)
    job = Open(Ready(claim()), slot=0, since_s=0.0)
    one._holdings.open[job.key] = job

    await one._serve(job)

    assert len(served) == opened
    assert settled == [(("r", b"k" * 16), Returned())]


def test_what_one_thread_read_late_does_not_replace_what_another_has_read_since() -> None:
    uids, seen = ["old"], []

    def info(_section: str) -> dict[str, int]:
        if uids == ["old"]:
            # This thread waits for its answer; the run is made anew, and another thread looks.
            uids.append("new")
            other = threading.Thread(target=eligible.refresh)
            other.start()
            other.join()
            seen.append(eligible.record("r"))
        return {}

    def read() -> dict[str, Any]:
        record = SimpleNamespace(uid=uids[-1])
        return {"r": SimpleNamespace(record=record, pinned=None, over=False)}

    eligible = Eligible(cast("Any", SimpleNamespace(info=info)))
    eligible._runs = cast("Any", SimpleNamespace(known=read))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(connect, "address_of", lambda _client: "test")
        eligible.refresh()
        seen.append(eligible.record("r"))
        eligible.refresh()
        seen.append(eligible.record("r"))

    known = [cast("Any", each).uid for each in seen if each is not None]
    assert known == sorted(known, reverse=True)
    assert known[-1] == "new"
