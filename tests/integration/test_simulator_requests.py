"""What the simulator does with requests: slots, queue, length, time, abort, disconnect, log."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.tls import TLS
from workers.simulator.hashing import request_hash
from workers.simulator.launch import SimulatorProcess
from workers.simulator.log import COMPLETED

# A connection for each request, so that none is a leftover of another test's server.
HTTP = httpx.Client(verify=TLS, timeout=30, limits=httpx.Limits(max_keepalive_connections=0))
CHAT = "/v1/chat/completions"
LONG = "1000"  # seconds that a request runs which the test ends


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 16, **fields}


@asynccontextmanager
async def client_of(simulator: SimulatorProcess) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2)
    url = simulator.urls[0]
    async with httpx.AsyncClient(verify=TLS, base_url=url, limits=limits, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def instant() -> Iterator[SimulatorProcess]:
    with SimulatorProcess(servers=1, latency="0") as simulator:
        yield simulator


@pytest.fixture
def slow() -> Iterator[SimulatorProcess]:
    """A server with two slots whose requests run until something ends them."""
    with SimulatorProcess(servers=1, latency=LONG, cap=2, disconnect_poll=0) as simulator:
        yield simulator


# --- answers -------------------------------------------------------------------------------------


def test_an_answer_holds_the_hash_of_its_request(instant: SimulatorProcess) -> None:
    body = chat("hello", temperature=0.7, seed=3)

    reply = HTTP.post(instant.urls[0] + CHAT, json={**body, "rid": "r-1", "model": "m"})

    content = reply.json()["choices"][0]["message"]["content"]
    assert content.startswith(f"sim:{request_hash(body)} ")
    assert reply.json()["id"] == "r-1"


def test_a_repeat_gives_the_same_text_and_length(instant: SimulatorProcess) -> None:
    url = instant.urls[0] + CHAT

    first, second = (
        HTTP.post(url, json=chat("again", rid=rid, max_tokens=2_000)).json() for rid in "ab"
    )

    assert first["choices"] == second["choices"]
    assert first["usage"] == second["usage"]


def test_usage_is_by_characters_and_length(instant: SimulatorProcess) -> None:
    usage = HTTP.post(instant.urls[0] + CHAT, json=chat("x" * 400)).json()["usage"]

    assert usage["prompt_tokens"] == 100
    assert usage["completion_tokens"] == 16
    assert usage["total_tokens"] == 116


def test_samples_are_choices(instant: SimulatorProcess) -> None:
    reply = HTTP.post(instant.urls[0] + CHAT, json=chat("two", n=2)).json()

    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert texts[0] != texts[1]
    assert texts[0].split(" ")[0] == texts[1].split(" ")[0]


@pytest.mark.parametrize(
    ("fields", "tokens", "reason"),
    [
        ({"max_tokens": 64}, 64, "stop"),  # --answer-tokens is 64 with a latency
        ({"max_tokens": 63}, 63, "length"),
        ({"max_tokens": 100, "ignore_eos": True}, 100, "length"),
        ({"max_tokens": 100, "min_tokens": 80}, 80, "stop"),
    ],
)
def test_length_and_finish_reason_agree(
    instant: SimulatorProcess, fields: dict[str, Any], tokens: int, reason: str
) -> None:
    reply = HTTP.post(instant.urls[0] + CHAT, json=chat("hi", **fields)).json()

    assert reply["usage"]["completion_tokens"] == tokens
    assert reply["choices"][0]["finish_reason"] == reason


def test_answer_bytes_fixes_the_size_of_texts() -> None:
    with SimulatorProcess(servers=1, latency="0", answer_bytes=5_000_000) as simulator:
        reply = HTTP.post(simulator.urls[0] + CHAT, json=chat("big"))

    assert len(reply.json()["choices"][0]["message"]["content"]) == 5_000_000


def test_a_dirty_answer_holds_what_random_models_give() -> None:
    with SimulatorProcess(servers=1, latency="0", dirty=True) as simulator:
        reply = HTTP.post(simulator.urls[0] + CHAT, json=chat("dirty"))

    content = reply.json()["choices"][0]["message"]["content"]
    assert rb"\ud83d" in reply.content
    assert all(piece in content for piece in ("\x00", "\ufffd", '"', "\n", "\ud83d"))


def test_a_reasoning_model_thinks_first() -> None:
    options: dict[str, Any] = {
        "servers": 1,
        "latency": "0",
        "reasoning": True,
        "answer_tokens": "100",
    }
    with SimulatorProcess(**options) as simulator:
        url = simulator.urls[0] + CHAT
        whole = HTTP.post(url, json=chat("a", max_tokens=200)).json()
        cut = HTTP.post(url, json=chat("a", max_tokens=30)).json()
        quick = chat("a", chat_template_kwargs={"enable_thinking": False})
        plain = HTTP.post(url, json=quick).json()

    message = whole["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["content"]
    assert whole["usage"]["reasoning_tokens"] == 60
    # Cut while thinking: an empty text, as the real parser gives.
    assert cut["choices"][0]["message"]["content"] == ""
    assert cut["choices"][0]["finish_reason"] == "length"
    assert plain["choices"][0]["message"]["reasoning_content"] is None


# --- slots ---------------------------------------------------------------------------------------


async def test_no_more_than_cap_run_and_the_rest_waits_in_order() -> None:
    with SimulatorProcess(servers=1, latency="0.02", cap=3) as simulator:
        async with client_of(simulator) as client, asyncio.TaskGroup() as group:
            for number in range(30):
                group.create_task(client.post(CHAT, json=chat(f"{number}")))
        account = simulator.account()
        state = simulator.state()

    ends = sorted(account.served, key=lambda each: each.end or 0)
    assert account.requests == state["served"] == 30
    assert state["cap"] == 3
    # Three at a time, 20 ms each: ten rounds, in order of arrival.
    assert (ends[-1].end or 0) - account.served[0].begin >= 10 * 0.02
    places = {id(each): place for place, each in enumerate(account.served)}
    assert all(abs(places[id(each)] - place) < 3 for place, each in enumerate(ends))


async def test_gauges_tell_who_runs_and_who_waits(slow: SimulatorProcess) -> None:
    async with client_of(slow) as client:
        tasks = [asyncio.ensure_future(client.post(CHAT, json=chat(f"{n}"))) for n in range(5)]
        await asyncio.to_thread(slow.wait_until, lambda states: states[0]["queued"] == 3)
        load = (await client.get("/v1/loads")).json()["loads"][0]
        metrics = (await client.get("/metrics")).text
        flushed = await client.post("/flush_cache")
        await client.post("/abort_request", json={"abort_all": True})
        replies = await asyncio.gather(*tasks)

    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (2, 3)
    assert 'pp_rank="0",tp_rank="0"} 2.0' in metrics
    assert (flushed.status_code, flushed.text) == (400, "Flush cache failed.\n")
    assert {reply.json()["choices"][0]["finish_reason"] for reply in replies} == {"abort"}


async def test_the_strategy_decides_the_cap_and_its_usage() -> None:
    options: dict[str, Any] = {"servers": 1, "strategy": "extra_buffer", "speed": 0.001}
    with SimulatorProcess(**options) as simulator:
        async with client_of(simulator) as client:
            tasks = [
                asyncio.ensure_future(client.post(CHAT, json=chat(f"{n}"))) for n in range(40)
            ]
            await asyncio.to_thread(simulator.wait_until, lambda s: s[0]["queued"] == 8)
            metrics = (await client.get("/metrics")).text
            await client.post("/abort_request", json={"abort_all": True})
            await asyncio.gather(*tasks)

    usage = next(line for line in metrics.splitlines() if line.startswith("sglang:mamba_usage{"))
    assert float(usage.split()[-1]) == pytest.approx(32 * 3 / 160)


async def test_a_full_queue_refuses_with_503() -> None:
    options: dict[str, Any] = {"servers": 1, "latency": LONG, "cap": 1, "max_queued_requests": 1}
    with SimulatorProcess(**options) as simulator:
        async with client_of(simulator) as client:
            tasks = [asyncio.ensure_future(client.post(CHAT, json=chat(f"{n}"))) for n in range(2)]
            await asyncio.to_thread(simulator.wait_until, lambda s: s[0]["open"] == 2)
            refused = [
                await client.post(CHAT, json=chat("third")),
                await client.post("/generate", json={"text": "third"}),
            ]
            await client.post("/abort_request", json={"abort_all": True})
            await asyncio.gather(*tasks)

    assert [reply.status_code for reply in refused] == [503, 503]
    assert {reply.json()["message"] for reply in refused} == {"The request queue is full."}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("waiting_timeout", "Request waiting timeout reached."),
        ("running_timeout", "Request running timeout reached."),
    ],
)
async def test_the_servers_own_deadlines_end_requests(option: str, message: str) -> None:
    options: dict[str, Any] = {"servers": 1, "latency": LONG, "cap": 1, option: 0.1}
    with SimulatorProcess(**options) as simulator:
        async with client_of(simulator) as client:
            tasks = [asyncio.ensure_future(client.post(CHAT, json=chat(f"{n}"))) for n in range(2)]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await client.post("/abort_request", json={"abort_all": True})
            await asyncio.gather(*tasks)

    reply = done.pop().result()
    assert (reply.status_code, reply.json()["message"]) == (503, message)


async def test_a_full_kv_pool_retracts_and_still_answers_all() -> None:
    options: dict[str, Any] = {
        "servers": 1,
        "speed": 2_000,
        "kv_tokens": 2_000,
        "answer_tokens": "400",
    }
    with SimulatorProcess(**options) as simulator:
        async with client_of(simulator) as client:
            bodies = [{"text": f"{n}", "sampling_params": {"max_new_tokens": 500}}
                      for n in range(20)]  # fmt: skip
            replies = await asyncio.gather(*(client.post("/generate", json=b) for b in bodies))
        state = simulator.state()

    infos = [reply.json()["meta_info"] for reply in replies]
    assert {info["completion_tokens"] for info in infos} == {400}
    assert sum(info["num_retractions"] for info in infos) == state["retractions"] > 0


# --- throughput ----------------------------------------------------------------------------------


async def test_whatever_runs_the_batch_generates_at_the_models_rate() -> None:
    options: dict[str, Any] = {"servers": 1, "speed": 100, "answer_tokens": "exp:1000"}
    with SimulatorProcess(**options) as simulator:
        async with client_of(simulator) as client:
            bodies = [chat(f"{number}", max_tokens=30_000) for number in range(60)]
            replies = await asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))
        account = simulator.account()

    generated = sum(reply.json()["usage"]["completion_tokens"] for reply in replies)
    # The rate that the model gives for those open, summed over the time between two events.
    begins = [(each.begin, 1) for each in account.served]
    ends = [(each.end or 0.0, -1) for each in account.served]
    events = sorted(begins + ends)
    expected, running = 0.0, 0
    for (at, change), (until, _) in pairwise(events):
        running += change
        expected += 3015 * running / (running + 112) * 100 * (until - at)
    # An end is noticed late by a moment, so that a little more time passes than is needed.
    assert generated == pytest.approx(expected, rel=0.15)
    assert generated <= expected * 1.01


async def test_a_slow_server_takes_longer() -> None:
    options: dict[str, Any] = {
        "servers": 2,
        "speed": 100,
        "answer_tokens": "1000",
        "slow": "1:0.25",
    }
    with SimulatorProcess(**options) as simulator:
        async with httpx.AsyncClient(verify=TLS, timeout=30) as client:
            seconds = []
            for url in simulator.urls:
                reply = await client.post(url + CHAT, json=chat("x", max_tokens=2_000))
                seconds.append(reply.elapsed.total_seconds())

    assert seconds[1] > 2 * seconds[0]


# --- abort and disconnect ------------------------------------------------------------------------


async def test_an_abort_by_prefix_ends_what_runs_and_what_waits(slow: SimulatorProcess) -> None:
    async with client_of(slow) as client:
        rids = ["a-1", "a-2", "a-3", "b-1"]
        tasks = {
            rid: asyncio.ensure_future(client.post(CHAT, json=chat(rid, rid=rid))) for rid in rids
        }
        await asyncio.to_thread(slow.wait_until, lambda states: states[0]["open"] == 4)
        aborted = await client.post("/abort_request", json={"rid": "a-"})
        replies = await asyncio.gather(*(tasks[rid] for rid in rids[:3]))
        still_open = slow.state()["open"]
        tasks["b-1"].cancel()

    assert (aborted.status_code, aborted.text) == (200, "")
    assert [reply.status_code for reply in replies] == [200, 200, 200]
    assert {reply.json()["choices"][0]["finish_reason"] for reply in replies} == {"abort"}
    assert still_open == 1


async def test_an_aborted_native_request_says_so(slow: SimulatorProcess) -> None:
    async with client_of(slow) as client:
        bodies = [{"text": f"{n}", "rid": f"r{n}"} for n in range(3)]
        tasks = [asyncio.ensure_future(client.post("/generate", json=body)) for body in bodies]
        await asyncio.to_thread(slow.wait_until, lambda states: states[0]["queued"] == 1)
        await client.post("/abort_request", json={"rid": "r"})
        replies = await asyncio.gather(*tasks)

    messages = [reply.json()["meta_info"]["finish_reason"]["message"] for reply in replies]
    assert sorted(messages) == ["Abort in waiting queue", "Aborted", "Aborted"]


async def test_a_prefix_that_is_no_open_rid_can_be_ignored() -> None:
    options: dict[str, Any] = {
        "servers": 1,
        "latency": LONG,
        "known_rids_only": True,
        "disconnect_poll": 0,
    }
    with SimulatorProcess(**options) as simulator:
        async with client_of(simulator) as client:
            task = asyncio.ensure_future(client.post(CHAT, json=chat("x", rid="a-1")))
            await asyncio.to_thread(simulator.wait_until, lambda s: s[0]["running"] == 1)
            await client.post("/abort_request", json={"rid": "a-"})
            running = simulator.state()["running"]
            await client.post("/abort_request", json={"rid": "a-1"})
            reply = await task

    assert running == 1
    assert reply.json()["choices"][0]["finish_reason"] == "abort"


async def test_a_rid_that_is_open_is_refused(slow: SimulatorProcess) -> None:
    async with client_of(slow) as client:
        task = asyncio.ensure_future(client.post(CHAT, json=chat("x", rid="dup")))
        await asyncio.to_thread(slow.wait_until, lambda states: states[0]["running"] == 1)
        native = await client.post("/generate", json={"text": "x", "rid": "dup"})
        flat = await client.post(CHAT, json=chat("y", rid="dup"))
        task.cancel()

    message = "Duplicate request ID detected: dup"
    assert native.json() == {"error": {"message": message}}
    assert (flat.status_code, flat.json()["message"]) == (400, message)


async def test_a_client_that_leaves_frees_its_slot_after_the_poll(slow: SimulatorProcess) -> None:
    async with client_of(slow) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(CHAT, json=chat("x", rid="gone"), timeout=0.2)
    await asyncio.to_thread(slow.wait_until, lambda states: states[0]["running"] == 0)

    account = slow.account()

    assert account.outcomes == {"disconnected": 1}
    assert slow.state()["aborted"] == 1


# --- the log -------------------------------------------------------------------------------------


async def test_a_kill_loses_neither_begins_nor_answered_ends() -> None:
    with SimulatorProcess(servers=1, latency=LONG, cap=64) as simulator:
        async with client_of(simulator) as client:
            tasks = [
                asyncio.ensure_future(client.post(CHAT, json=chat(f"{n}"))) for n in range(50)
            ]
            await asyncio.to_thread(simulator.wait_until, lambda s: s[0]["open"] == 50)
            simulator.kill()
            replies = await asyncio.gather(*tasks, return_exceptions=True)
        killed = simulator.account()
        simulator.restart()
        assert simulator.state()["state"] == "ready"
        restarted = simulator.account()

    assert all(isinstance(reply, httpx.TransportError) for reply in replies)
    assert killed.requests == restarted.requests == 50
    assert killed.max_open[simulator.ports[0]] == 50
    assert {each.end for each in killed.served} == {None}
    assert None not in {each.end for each in restarted.served}


async def test_what_was_answered_is_in_the_log_when_the_answer_is_there(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with SimulatorProcess(servers=1, latency="0", log=log) as simulator:
        async with client_of(simulator) as client:
            await client.post(CHAT, json=chat("same", rid="1"))
            await client.post(CHAT, json=chat("same", rid="2"))
            await client.post(CHAT, json={"messages": []})
            account = simulator.account()

    assert [each.outcome for each in account.served] == ["length", "length", "http_400"]
    digest = request_hash(chat("same"))
    assert account.by_hash[digest] == 2
    assert account.repeated == account.completed_again == [digest]
    assert log.exists()


async def test_the_most_open_is_what_the_client_held_open() -> None:
    with SimulatorProcess(servers=2, latency="0.05") as simulator:
        async with (
            httpx.AsyncClient(
                verify=TLS,
            ) as client,
            asyncio.TaskGroup() as group,
        ):
            for number in range(12):
                url = simulator.urls[number % 3 == 0]
                group.create_task(client.post(url + CHAT, json=chat(f"{number}")))
        account = simulator.account()

    assert account.max_open == dict(zip(simulator.ports, (8, 4), strict=True))
    assert {each.outcome for each in account.served} <= COMPLETED
    assert 0 < account.mean_open(port=simulator.ports[0]) <= 8
