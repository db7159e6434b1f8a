"""Marks on a real Redis and a real store: set by hand, set by themselves, kept, brought back."""

import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import redis

from common import names, object_names
from common.errors import RedisFullError
from common.marks import Event, archive
from common.marks.events import LONGEST_MS, ROLLING_MS, SILENT_S, START_MS, Present
from common.marks.mark import MOST, Mark, by_hand
from common.marks.noting import LOOK_S, Watchman, note, note_at_servers
from common.queue import Groups
from common.queue.marks import Marks, Presence
from common.reconcile import adopt_run, reconcile
from common.store.directory import DirectoryStore
from tests.support.finished_run import FinishedRun
from tests.support.producer_cli import Ended, producer
from tests.support.redis_contents import contents
from tests.support.redis_server import RedisServer
from tests.support.run_world import RUN, World
from tests.support.sinks import drain, killed_at, run_sink
from workers.sink.run_sink import Standing

Ask = Callable[..., Ended]

WAS = Present(epoch="e1", model="m", strategy="extra_buffer", version="0.5.23", cap=32)


@pytest.fixture
def world(redis_client: "redis.Redis", tmp_path: Path) -> Iterator[World]:
    made = World(redis_client, DirectoryStore(tmp_path / "out"), prompts=10)
    yield made
    made.close()


@pytest.fixture
def ask(valkey: RedisServer, tmp_path: Path) -> Ask:
    def call(*arguments: str, **env: str) -> Ended:
        return producer(*arguments, cwd=tmp_path, env={"HEADRACE_REDIS": valkey.tcp_url, **env})

    return call


def texts(world: World) -> list[str]:
    return [mark.text for mark in Marks(world.client, RUN).latest()]


def stored(world: World) -> list[str]:
    return [mark.text for mark in archive.all_of(world.store)]


def age_open(world: World, by_ms: int) -> None:
    """Let time pass for what stands open."""
    key = names.marks(RUN)
    fields = cast("dict[bytes, bytes]", world.client.hgetall(key))
    for field, value in fields.items():
        if field.startswith(b"o:"):
            mark_id, until_ms = value.split()
            world.client.hset(key, field, b"%b %d" % (mark_id, int(until_ms) - by_ms))


# --- By hand -------------------------------------------------------------------------------------


def test_a_mark_that_somebody_sets_is_in_redis_and_in_the_store_and_is_listed(
    world: World, ask: Ask
) -> None:
    set_ = ask("mark", RUN, "no_buffer", "on", "--json")
    earlier = ask("mark", RUN, "driver\x1b[31m updated", "--at", "10m", "--json")

    assert (set_.code, earlier.code) == (0, 0)
    assert (set_.told["text"], set_.told["by_hand"], set_.told["stored"]) == (
        "no_buffer on",
        True,
        True,
    )
    told = ask("mark", RUN, "--json").told
    # By their instants, whichever was set first.
    assert [each["text"] for each in told["marks"]] == ["driver\\x1b[31m updated", "no_buffer on"]
    assert stored(world) == [each["text"] for each in told["marks"]]
    assert told["marks"][1]["id"] == set_.told["id"]
    shown = ask("mark", RUN).out
    assert "no_buffer on" in shown
    assert "driver\\x1b[31m updated  (10 min ago)" in shown, "in one line: it has no figures"
    status = ask("status", RUN, "--json").told
    assert [each["text"] for each in status["marks"]] == [
        "no_buffer on",
        "driver\\x1b[31m updated",
    ]
    assert "no_buffer on" in ask("status", RUN).out


def test_what_cannot_be_marked_is_refused_and_nothing_is_left(world: World, ask: Ask) -> None:
    for arguments, code in [
        (("mark", RUN, "x", "--at", "tomorrow"), 2),
        (("mark", RUN, "--at", "14:02"), 2),
        (("mark", "nobody", "x"), 4),
    ]:
        assert ask(*arguments).code == code, arguments
    assert texts(world) == []
    assert "has no marks" in ask("mark", RUN).err


def test_a_store_that_is_away_gets_the_mark_from_a_sink(
    world: World, tmp_path: Path, ask: Ask
) -> None:
    (tmp_path / "out").rename(tmp_path / "away")

    ended = ask("mark", RUN, "while it was away", "--json")

    assert ended.code == 0
    assert not ended.told["stored"]
    assert "a sink stores it later" in ended.err
    (tmp_path / "away").rename(tmp_path / "out")
    run_sink(world).step()
    assert stored(world) == ["while it was away"]


@pytest.mark.parametrize("point", ["mark.noted", "mark.stored"])
def test_a_mark_whose_command_was_killed_is_stored_once_by_a_sink(
    world: World, ask: Ask, point: str
) -> None:
    killed = ask("mark", RUN, "half", HEADRACE_CRASH_AT=point)

    assert killed.code == -signal.SIGKILL
    assert texts(world) == ["half"]
    assert stored(world) == (["half"] if point == "mark.stored" else [])
    with killed_at("mark.stored"):
        run_sink(world).step()
    run_sink(world).step()
    assert stored(world) == ["half"]
    assert Marks(world.client, RUN).settled() == []


def test_where_redis_has_lost_the_run_the_store_gets_the_mark_and_gives_it_back(
    world: World, ask: Ask
) -> None:
    ask("mark", RUN, "before")
    world.client.flushall()

    ended = ask("mark", RUN, "after", "--output", world.store.url)

    assert ended.code == 0
    assert f"producer resume {RUN}" in ended.err
    told = ask("mark", RUN, "--json", "--output", world.store.url).told
    assert [each["text"] for each in told["marks"]] == ["before", "after"]
    adopt_run(world.client, world.store)
    assert texts(world) == ["before", "after"]


def test_a_forgotten_run_is_not_brought_back_by_a_mark(world: World, ask: Ask) -> None:
    world.finish(range(10))
    assert drain(run_sink(world)) is Standing.COMPLETED
    ask("mark", RUN, "x")
    assert ask("forget", RUN, "--yes").code == 0

    note(world.client, [RUN], Event(kind="came", subject="gpu0@h"))
    assert Marks(world.client, RUN).add(by_hand("late", 1)) is None
    Presence(world.client).work("gpu0@h", WAS, tokens=1, running_ms=1, ready_ms=1, runs=[RUN])

    assert [key for key in contents(world.client, f"*:{RUN}*") if b"tombstone" not in key] == []


# --- By themselves -------------------------------------------------------------------------------


def test_a_hundred_worker_groups_that_start_together_are_one_mark(world: World) -> None:
    def start(first: int) -> None:
        for number in range(first, first + 25):
            note(world.client, [RUN], Event(kind="came", subject=f"gpu{number}@h"))

    threads = [threading.Thread(target=start, args=[first]) for first in range(0, 100, 25)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert texts(world) == ["100 worker groups came (gpu0@h … gpu99@h)"]


def test_another_burst_is_another_mark(world: World) -> None:
    came = Event(kind="came", subject="gpu0@h")
    note(world.client, [RUN], came)
    age_open(world, START_MS + 1_000)

    note(world.client, [RUN], msgspec.structs.replace(came, subject="gpu1@h"))

    assert texts(world) == ["worker group gpu0@h came", "worker group gpu1@h came"]


def test_a_mark_that_goes_on_and_on_ends_at_last(world: World) -> None:
    died = Event(kind="server_restarted", subject="gpu0@h")
    note(world.client, [RUN], msgspec.structs.replace(died, ago_s=LONGEST_MS / 1000 - 5.0))
    note(world.client, [RUN], died)
    (before,) = Marks(world.client, RUN).latest()
    assert (before.times, before.until_ms - before.at_ms >= LONGEST_MS - 5_000) == (2, True)
    # It stands open for what is left of its hour, and not for as long as others follow.
    open_ms = int(world.client.hget(names.marks(RUN), f"o:{died.burst}").split()[1])  # type: ignore[union-attr]
    assert open_ms == before.at_ms + LONGEST_MS < before.until_ms + ROLLING_MS


def test_servers_that_restart_one_by_one_with_a_change_are_one_mark(world: World) -> None:
    for number, cap in enumerate((72, 71, 72)):
        event = Event(
            kind="server_restarted",
            subject=f"gpu{number}@h",
            detail="strategy extra_buffer -> no_buffer",
            cap=(32, cap),
        )
        note(world.client, [RUN], event)

    assert texts(world) == [
        (
            "3 servers restarted (gpu0@h, gpu1@h, gpu2@h): strategy extra_buffer -> no_buffer, "
            "cap 32 -> 71 to 72"
        )
    ]


def test_a_worker_group_that_is_back_within_seconds_has_not_left(world: World) -> None:
    for number in range(2):
        note(world.client, [RUN], Event(kind="went", subject=f"gpu{number}@h"))

    note(world.client, [RUN], Event(kind="restarted", subject="gpu0@h", takes_back="went"))
    assert texts(world) == ["worker group gpu1@h went", "worker group gpu0@h restarted"]
    note(world.client, [RUN], Event(kind="restarted", subject="gpu1@h", takes_back="went"))

    assert texts(world) == ["2 worker groups restarted (gpu0@h, gpu1@h)"]


def test_marks_are_bounded_and_what_somebody_set_stays_longest(world: World) -> None:
    marks = Marks(world.client, RUN)
    for number in range(30):
        marks.add(by_hand(f"hand {number}", 1_000_000_000_000 + number))
    for number in range(MOST + 20):
        note(world.client, [RUN], Event(kind="server_changed", subject="g", detail=f"d{number}"))

    told = texts(world)
    assert len(told) == MOST
    assert sum(text.startswith("hand") for text in told) == 30
    assert told[-1].endswith(f"d{MOST + 19}")
    for number in range(MOST):
        marks.add(by_hand(f"more {number}", 1_100_000_000_000 + number))
    assert len(texts(world)) == MOST
    assert all(text.startswith("more") for text in texts(world))
    assert world.client.hlen(names.marks(RUN)) <= 3 * MOST


def test_of_what_is_over_nothing_more_is_marked_by_worker_groups(world: World) -> None:
    world.finish(range(10))

    note(world.client, [RUN], Event(kind="came", subject="gpu0@h"))
    note_at_servers(world.client, Event(kind="servers", detail="--strategy no_buffer"))

    assert texts(world) == []


def test_what_commands_do_to_a_run_is_marked(world: World, ask: Ask) -> None:
    world.finish([0, 1], "failed")
    for arguments in (("pause", RUN, "--reason", "lunch"), ("resume", RUN)):
        assert ask(*arguments).code == 0
        # Once more is no news.
        assert ask(*arguments).code == 0
    assert ask("retry", RUN).code == 0
    assert ask("cancel", RUN, "--yes").code == 0

    assert texts(world) == [
        "paused: lunch",
        "goes on",
        "failed prompts tried again: 2 prompts",
        "cancelled",
    ]


def test_a_run_that_pauses_by_itself_is_marked(world: World) -> None:
    accepted = world.accepted
    world.accept(20)
    for number in range(accepted, accepted + 20):
        bad = msgspec.structs.replace(world.result(number, "failed"), reason="bad_request")
        world.jobs.finish([bad])

    (text,) = texts(world)
    assert text == "paused: 20 faults in a row and no success, the last one: bad_request"


# --- The store -----------------------------------------------------------------------------------


def test_several_sinks_store_each_mark_once_and_only_when_it_changes_no_more(
    world: World,
) -> None:
    marks = Marks(world.client, RUN)
    marks.add(by_hand("by hand", 1_000_000_000_000))
    note(world.client, [RUN], Event(kind="went", subject="gpu0@h"))
    one, other = run_sink(world), run_sink(world)

    one.step()
    other.step()
    assert stored(world) == ["by hand"]
    note(world.client, [RUN], Event(kind="went", subject="gpu1@h"))
    age_open(world, START_MS + 1_000)
    written = {each.name: world.store.get(each.name) for each in world.store.list(names.MARKS)}
    assert archive.archive(world.client, world.store, world.record) == 1
    assert archive.archive(world.client, world.store, world.record) == 0

    assert stored(world) == ["by hand", "2 worker groups went (gpu0@h, gpu1@h)"]
    for name, data in written.items():
        assert world.store.get(name) == data


def test_what_stands_open_when_a_run_ends_or_its_sink_stops_is_stored(world: World) -> None:
    note(world.client, [RUN], Event(kind="came", subject="gpu0@h"))
    run_sink(world).step(flush=True)
    assert stored(world) == ["worker group gpu0@h came"]
    note(world.client, [RUN], Event(kind="came", subject="gpu1@h"))
    world.finish(range(10))

    assert drain(run_sink(world)) is Standing.COMPLETED

    assert stored(world) == ["worker group gpu0@h came", "worker group gpu1@h came"]


def test_marks_that_cannot_be_stored_stand_in_nobodys_way(world: World, tmp_path: Path) -> None:
    Marks(world.client, RUN).add(by_hand("x", 1_000_000_000_000))
    (tmp_path / "out" / "marks").write_text("no folder")
    world.finish(range(10))

    assert drain(run_sink(world)) is Standing.COMPLETED

    (tmp_path / "out" / "marks").unlink()
    run_sink(world).step()
    assert stored(world) == ["x"]


def test_a_wiped_redis_gets_its_marks_back_and_sets_no_second_ones(world: World) -> None:
    marks = Marks(world.client, RUN)
    for number in range(5):
        marks.add(by_hand(f"hand {number}", 1_000_000_000_000 + number))
    note(world.client, [RUN], Event(kind="came", subject="gpu0@h"))
    archive.archive(world.client, world.store, world.record, close=True)
    world.store.put_if_absent(object_names.mark_object(f"{10**12}-hand-{'f' * 12}"), b"garbage")
    before = Marks(world.client, RUN).latest()
    assert len(before) == 6
    world.client.flushall()

    adopt_run(world.client, world.store)

    assert Marks(world.client, RUN).latest() == before
    assert archive.archive(world.client, world.store, world.record) == 0
    reconcile(world.client, world.store, world.record, deep=True)
    assert Marks(world.client, RUN).latest() == before


def test_of_more_than_redis_keeps_the_newest_come_back_and_those_by_hand(world: World) -> None:
    for number in range(MOST):
        archive.put(
            world.store,
            Mark(
                id=f"{10**12 + number}-self-{'0' * 12}",
                kind="came",
                at_ms=10**12 + number,
                until_ms=10**12 + number,
                subjects=["g"],
            ),
        )
    for number in range(3):
        archive.put(world.store, by_hand(f"hand {number}", 10**12 - 10 + number))
    world.client.flushall()

    adopt_run(world.client, world.store)

    every = Marks(world.client, RUN).latest()
    assert len(every) == MOST
    assert sum(mark.by_hand for mark in every) == 3
    assert every[-1].at_ms == 10**12 + MOST - 1


def test_what_reads_the_store_does_not_stumble_over_marks(
    redis_client: "redis.Redis", tmp_path: Path, ask: Ask
) -> None:
    store = DirectoryStore(tmp_path / "finished")
    FinishedRun(store, prompts=10)
    ask("mark", RUN, "one", "--output", store.url)
    (tmp_path / "finished" / "marks" / "notes.txt").write_text("not ours")

    assert ask("verify", RUN, "--output", store.url).code == 0
    told = ask("verify", RUN, "--json", "--output", store.url).told
    assert (told["total"], told["findings"]) == (10, [])
    assert ask("export", RUN, "--to", "-", "--output", store.url).out.count("\n") == 10
    assert ask("resume", RUN, "--output", store.url).code == 0
    ask("mark", RUN, "late, after the end")
    assert "late, after the end" in ask("status", RUN).out
    assert redis_client.hlen(names.marks(RUN)) == 4


# --- Worker groups that are killed ---------------------------------------------------------------


def test_a_worker_group_that_falls_silent_is_marked_once_by_whoever_looks(world: World) -> None:
    presence = Presence(world.client)
    for group in ("gpu0@h", "gpu1@h"):
        presence.arrive(group, WAS)
    presence.arrive("gpu2@h", msgspec.structs.replace(WAS, only=("another",)))
    watchmen = [Watchman(world.client), Watchman(world.client)]
    looks = range(int(SILENT_S / LOOK_S) + 2)

    for look in looks:
        for watchman in watchmen:
            watchman.look(look * LOOK_S)
        presence.work("gpu1@h", WAS, tokens=0, running_ms=0, ready_ms=0, runs=[])

    # Another run's worker group is no business of this one's.
    assert texts(world) == ["worker group gpu0@h went"]
    assert [mark.times for mark in Marks(world.client, RUN).latest()] == [1]
    _, before = presence.arrive("gpu0@h", WAS)
    assert before is not None
    assert before.left


def test_of_several_that_find_a_silent_one_one_makes_it_leave_and_who_speaks_again_stays(
    world: World,
) -> None:
    presence = Presence(world.client)
    presence.arrive("gpu0@h", WAS)
    heard_ms = presence.all()["gpu0@h"].heard_ms

    assert [presence.leave("gpu0@h", heard_ms=heard_ms) for _ in range(2)] == [True, False]
    assert presence.all()["gpu0@h"].heard_ms == heard_ms
    presence.work("gpu0@h", WAS, tokens=0, running_ms=0, ready_ms=0, runs=[])
    assert not presence.leave("gpu0@h", heard_ms=heard_ms - 1)
    assert not presence.all()["gpu0@h"].left
    assert not presence.leave("nobody@h")


def test_a_full_redis_leaves_nobody_marked_as_gone(world: World) -> None:
    presence, watchman = Presence(world.client), Watchman(world.client)
    presence.arrive("gpu0@h", WAS)
    looks = int(SILENT_S / LOOK_S) + 2
    world.client.config_set("maxmemory", "1")
    try:
        for look in range(looks):
            with suppress(RedisFullError):
                watchman.look(look * LOOK_S)
    finally:
        world.client.config_set("maxmemory", "0")

    assert watchman.look(looks * LOOK_S) == []
    assert texts(world) == []


def test_names_that_come_and_go_do_not_pile_up(world: World) -> None:
    presence = Presence(world.client)
    old: Mapping[Any, Any] = {
        f"gpu0@pod-{number}": f"1 1 {json.dumps({'epoch': 'e'})}" for number in range(1_100)
    }
    world.client.hset(names.PRESENT, mapping=old)

    presence.arrive("gpu0@h", WAS)

    assert set(presence.all()) == {"gpu0@h"}


def test_what_servers_bring_is_added_up_by_half_minutes_and_kept_for_hours(world: World) -> None:
    presence, marks = Presence(world.client), Marks(world.client, RUN)
    now_ms = world.runs.completions_per_bucket(RUN)[0]
    bucket = now_ms // 30_000
    old: Mapping[Any, Any] = {str(bucket - back): "1,1,1,1,1" for back in range(1, 800)}
    world.client.hset(names.history(RUN), mapping=old)

    for _ in range(2):
        presence.work("g", WAS, tokens=500.4, running_ms=1e6, ready_ms=3_000, runs=[RUN, "no"])
    world.finish(range(4))

    found = marks.history([bucket, bucket + 1])
    sums = [
        sum(getattr(each, name) for each in found.values())
        for name in ("completions", "output_tokens", "tokens", "running_ms", "ready_ms")
    ]
    assert sums == [4, 4 * len("answer"), 1_000, 2_000_000, 6_000]
    assert 700 <= world.client.hlen(names.history(RUN)) <= 790
    assert not world.client.exists(names.history("no"))


def test_marks_of_another_version_are_left_out_and_the_others_told(world: World, ask: Ask) -> None:
    Marks(world.client, RUN).add(by_hand("ours", 1_000_000_000_000))
    odd: Mapping[Any, Any] = {"m:9-self-x": "{", "m:8-self-x": '{"id":3}', "o:x": "y", "a:z": "1"}
    world.client.hset(names.marks(RUN), mapping=odd)

    assert ask("status", RUN, "--json").code == 0
    assert texts(world) == ["ours"]
    note(world.client, [RUN], Event(kind="x", subject="g"))
    archive.archive(world.client, world.store, world.record, close=True)


def test_who_has_spoken_lately_is_read_in_the_order_in_which_they_spoke(world: World) -> None:
    assert Groups(world.client).spoke() == []
