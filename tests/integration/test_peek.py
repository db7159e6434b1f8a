"""`producer peek` on a real Redis and real stores, as a user runs it."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import redis
from typing_extensions import override

from common.models import Choice, CompletionRow, Usage
from common.store import open_store
from common.store.directory import DirectoryStore
from producer.peek import MOST_OBJECTS, MOST_SPREAD, Source, Wanted, take
from tests.support.finished_run import FinishedRun
from tests.support.producer_cli import Ended, producer
from tests.support.redis_server import RedisServer
from tests.support.run_world import RUN, SERVER, World
from tests.support.s3 import S3Server
from tests.support.sinks import run_sink

Ask = Callable[..., Ended]

ESCAPES = "\x1b]0;evil\x07\x1b[2J\u202e\r"


@pytest.fixture
def world(redis_client: "redis.Redis", tmp_path: Path) -> World:
    return World(redis_client, DirectoryStore(tmp_path / "out"), prompts=12)


@pytest.fixture
def ask(valkey: RedisServer, tmp_path: Path) -> Ask:
    """Call `producer peek` with the address of the test's Redis."""

    def call(*arguments: str) -> Ended:
        return producer("peek", *arguments, cwd=tmp_path, env={"HEADRACE_REDIS": valkey.tcp_url})

    return call


def answer(
    world: World,
    number: int,
    content: str | None = "an answer",
    *,
    reasoning: str | None = None,
    asked: str | None = None,
    flags: tuple[str, ...] = (),
    finish_reason: str = "stop",
) -> None:
    """Complete one prompt as a worker group does."""
    plain = world.result(number)
    row = msgspec.json.decode(plain.row, type=CompletionRow)
    question = {"role": "user", "content": asked or f"prompt {number}"}
    row = msgspec.structs.replace(
        row,
        messages=[question, {"role": "assistant", "content": content}],
        choices=[
            Choice(
                index=0,
                content=content,
                finish_reason=finish_reason,
                reasoning_content=reasoning,
            )
        ],
        usage=Usage(prompt_tokens=134, completion_tokens=2019, reasoning_tokens=7),
        latency_s=92.06,
        flags=list(flags),
    )
    result = msgspec.structs.replace(plain, row=msgspec.json.encode(row), flags=flags)
    assert world.jobs.finish([result]) == ["ok"]


def store_all(world: World) -> None:
    sink = run_sink(world, rows=50)
    while world.waiting():
        sink.step(flush=True)
        sink.step()
    sink.release()


def ids(ended: Ended) -> list[object]:
    return [each["row"]["id"] for each in ended.told["rows"]]


def test_an_answer_is_shown_before_anything_is_stored(world: World, ask: Ask) -> None:
    answer(world, 3, "It is blue.", reasoning="hmm, light", asked="Why is the sky blue?")

    ended = ask(RUN)

    assert ended.code == 0, ended.err
    for part in (
        *("Why is the sky blue?", "It is blue.", "hmm, light", "end of its thinking"),
        *("3  prompts.jsonl line 4", "stop", "134 -> 2,019 tokens (7 of it thinking)"),
        *("92.1 s", SERVER, "not yet stored"),
    ):
        assert part in ended.out


def test_the_newest_come_first_from_redis_and_then_from_the_store(world: World, ask: Ask) -> None:
    for number in range(4):
        answer(world, number)
    store_all(world)
    for number in range(4, 6):
        answer(world, number)

    ended = ask(RUN, "-n", "4", "--json")

    assert ids(ended) == [5, 4, 3, 2]
    places = [each["from"] for each in ended.told["rows"]]
    assert places[:2] == ["redis", "redis"]
    assert all(place.startswith("shards/00-00000001-") for place in places[2:])


def test_nothing_in_an_answer_acts_on_the_terminal(world: World, ask: Ask) -> None:
    answer(world, 0, f"[red]x[/red] {ESCAPES}", asked=f"say {ESCAPES}", reasoning=ESCAPES)
    world.finish([1], "failed")

    for ended in (ask(RUN), ask(RUN, "--failed")):
        assert ended.code == 0
        assert not set(ended.out) & set("\x1b\x07\u202e\r")
    assert "[red]x[/red] \\x1b]0;evil\\x07\\x1b[2J\\u202e\\x0d" in ask(RUN, "--chars", "0").out


def test_long_text_is_cut_unless_all_is_asked_for(world: World, ask: Ask) -> None:
    answer(world, 0, "b" * 5_000 + "end", asked="first" + "q" * 5_000 + "last words")

    cut, whole = ask(RUN, "--chars", "100"), ask(RUN, "--chars", "0")

    assert "characters before]" in cut.out
    assert "last words" in cut.out
    assert "first" not in cut.out
    assert "[… 4,903 characters …]" in cut.out
    assert whole.out.count("b") >= 5_000
    assert whole.out.count("q") >= 5_000


def test_failures_are_shown_with_reason_and_prompt(world: World, ask: Ask) -> None:
    world.finish([1], "failed")
    answer(world, 2)
    store_all(world)
    world.finish([4], "failed")

    ended = ask(RUN, "--failed")

    assert ended.code == 0
    for part in ("failed: bad_request (HTTP 400)", "user: prompt 1", "user: prompt 4", "no"):
        assert part in ended.out
    assert "an answer" not in ended.out


@pytest.mark.parametrize("stored", [False, True])
def test_one_prompt_is_found_by_its_id(world: World, ask: Ask, stored: bool) -> None:  # noqa: FBT001
    for number in range(5):
        answer(world, number, f"answer {number}")
    world.finish([5], "failed")
    if stored:
        store_all(world)

    assert ids(ask(RUN, "--id", "3", "--json")) == [3]
    assert ids(ask(RUN, "--id", "5", "--json")) == [5]
    waiting, unknown = ask(RUN, "--id", "7"), ask(RUN, "--id", "q7")
    assert (waiting.code, unknown.code) == (1, 2)
    assert "has not ended yet" in waiting.err
    assert "no prompt with the id 'q7'" in unknown.err


def test_answers_may_be_picked_by_what_is_odd_about_them(world: World, ask: Ask) -> None:
    answer(world, 0, flags=("repeating", "truncated"))
    answer(world, 1)
    store_all(world)
    answer(world, 2, flags=("repeating",))
    answer(world, 3)

    assert ids(ask(RUN, "--flag", "repeating", "--json")) == [2, 0]
    none = ask(RUN, "--flag", "empty")
    assert none.code == 1
    assert "none of the answers that were looked at is empty" in none.err
    assert ask(RUN, "--flag", "odd").code == 2


def test_without_an_answer_it_ends_with_1_and_says_what_there_is(world: World, ask: Ask) -> None:
    world.jobs.take_slots(2, bound=2, rid_prefix="x", about={})

    ended = ask(RUN)

    assert (ended.code, ended.out) == (1, "")
    assert "has no answers yet: 0 requests in flight, 12 queued" in ended.err
    assert ask(RUN, "--failed").code == 1
    assert ask("nobody").code == 4


def test_a_store_that_cannot_be_read_here_leaves_what_redis_has(
    world: World, ask: Ask, tmp_path: Path
) -> None:
    answer(world, 0)
    (tmp_path / "out").rename(tmp_path / "elsewhere")

    ended = ask(RUN, "--json")

    assert ids(ended) == [0]
    assert "only what waits in Redis is shown" in ended.err


def test_a_wiped_redis_or_none_is_no_hindrance_where_the_output_is_named(
    world: World, ask: Ask, tmp_path: Path
) -> None:
    answer(world, 0)
    store_all(world)
    world.client.flushall()

    assert ids(ask(RUN, "--output", "out", "--json")) == [0]
    away = producer(
        *("peek", RUN, "--output", "out"),
        cwd=tmp_path,
        env={"HEADRACE_REDIS": "redis://127.0.0.1:1"},
    )
    assert away.code == 0
    assert "an answer" in away.out
    told = producer("peek", RUN, cwd=tmp_path, env={"HEADRACE_REDIS": "redis://127.0.0.1:1"})
    assert told.code == 4
    assert "--output URL" in told.err


def test_it_reads_s3(moto: S3Server, ask: Ask) -> None:
    output = f"s3://{moto.new_bucket()}/a"
    FinishedRun(open_store(output, moto.url), prompts=9, fails=[2])

    ended = ask(RUN, "--output", output, "--endpoint-url", moto.url, "--json")
    by_id = ask(
        *(RUN, "--output", output, "--endpoint-url", moto.url),
        *("--id", "row-3", "--json"),
    )

    assert len(ids(ended)) == 5
    assert ids(by_id) == ["row-3"]


class Counting(DirectoryStore):
    """Counts the objects of rows that are read."""

    read = 0

    @override
    def get(self, name: str) -> bytes | None:
        self.read += name.startswith(("shards/", "failures/"))
        return super().get(name)


def test_what_is_read_does_not_grow_with_the_run(tmp_path: Path) -> None:
    store = Counting(tmp_path / "out")
    run = FinishedRun(store, prompts=200, batch=2)
    source = Source(record=run.record, store=store)

    store.read = 0
    found = take(source, Wanted(count=5))
    assert (len(found), store.read) == (5, 3)

    store.read = 0
    assert take(source, Wanted(count=5, flag="repeating")) == []
    assert store.read == MOST_OBJECTS

    store.read = 0
    found = take(source, Wanted(count=8, spread=True))
    assert (len(found), store.read) == (8, MOST_SPREAD)
    shards = sorted(int(each.where.split("-")[1]) for each in found)
    assert shards[0] < 20
    assert shards[-1] > 80


def test_rows_of_all_shapes_are_shown(ask: Ask, tmp_path: Path) -> None:
    for endpoint in ("completions", "generate"):
        output = tmp_path / endpoint
        FinishedRun(DirectoryStore(output), prompts=4, fails=[1], endpoint=endpoint)

        shown, failed = (ask(RUN, "--output", str(output), *more) for more in ((), ("--failed",)))

        assert (shown.code, failed.code) == (0, 0), shown.err + failed.err
        assert "prompt 2" in shown.out
        assert "prompt 1" in failed.out
