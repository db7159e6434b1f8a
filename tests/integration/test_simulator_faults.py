"""Each fault of the simulator, as a client meets it."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.support.tls import TLS
from workers.simulator.faults import REQUEST_KINDS
from workers.simulator.launch import SimulatorProcess

# A connection for each request, so that none is a leftover of another test's server.
HTTP = httpx.Client(verify=TLS, timeout=30, limits=httpx.Limits(max_keepalive_connections=0))
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 16}
SOON = 0.2


@pytest.fixture(scope="module")
def _shared() -> Iterator[SimulatorProcess]:
    with SimulatorProcess(servers=2, latency="0") as simulator:
        yield simulator


@pytest.fixture
def simulator(_shared: SimulatorProcess) -> Iterator[SimulatorProcess]:
    """Two servers without faults, shared by the tests that kill no process."""
    yield _shared
    _shared.clear()
    _shared.wait_until(lambda states: all(state["state"] == "ready" for state in states))


def post(simulator: SimulatorProcess, path: str = CHAT, **fields: Any) -> httpx.Response:
    return HTTP.post(simulator.urls[0] + path, json={**BODY, **fields})


def choice(reply: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = reply.json()["choices"][0]
    return found


# --- faults of one request -----------------------------------------------------------------------

REPLIES: dict[str, tuple[int, Callable[[httpx.Response], bool]]] = {
    "queue_full": (503, lambda r: r.json()["message"] == "The request queue is full."),
    "waited": (503, lambda r: r.json()["message"] == "Request waiting timeout reached."),
    "ran": (503, lambda r: r.json()["message"] == "Request running timeout reached."),
    "oom": (500, lambda r: r.json()["message"].startswith("Out of memory even after")),
    "error_500": (500, lambda r: r.json()["type"] == "InternalServerError"),
    "internal": (500, lambda r: r.text == "Internal Server Error"),
    "bad_params": (400, lambda r: r.json()["type"] == "BadRequestError"),
    "duplicate_rid": (400, lambda r: "Duplicate request ID" in r.json()["message"]),
    "unauthorized": (401, lambda r: r.json() == {"error": "Unauthorized"}),
    "not_found": (404, lambda r: r.json() == {"detail": "Not Found"}),
    "status": (429, lambda r: r.headers["content-type"] == "application/json"),
    "abort": (200, lambda r: choice(r)["finish_reason"] == "abort"),
    "nan": (200, lambda r: choice(r)["matched_stop"] == "NaN happened"),
    "empty_choices": (200, lambda r: r.json()["choices"] == []),
    "error_200": (200, lambda r: r.json()["object"] == "error"),
    "html_200": (200, lambda r: r.text.startswith("<html>")),
    "empty_200": (200, lambda r: r.content == b""),
}
BROKEN = {"half", "reset", "no_answer", "poison"}


def test_every_fault_of_a_request_has_a_test() -> None:
    assert REPLIES.keys() | BROKEN == REQUEST_KINDS.keys()


@pytest.mark.parametrize("kind", REPLIES)
def test_a_fault_hits_as_many_requests_as_it_was_armed_for(
    simulator: SimulatorProcess, kind: str
) -> None:
    status, holds = REPLIES[kind]
    simulator.control(kind, 0, count=2)

    hit = [post(simulator) for _ in range(2)]
    after = post(simulator)

    assert [reply.status_code for reply in hit] == [status, status]
    assert all(holds(reply) for reply in hit)
    assert after.status_code == 200
    assert choice(after)["finish_reason"] == "length"


def test_a_fault_of_one_server_spares_the_other(simulator: SimulatorProcess) -> None:
    simulator.control("internal", 1)

    replies = [HTTP.post(url + CHAT, json=BODY) for url in simulator.urls]

    assert [reply.status_code for reply in replies] == [200, 500]


def test_an_abort_leaves_half_the_text(simulator: SimulatorProcess) -> None:
    simulator.control("abort", 0, count=1)

    reply = post(simulator)

    assert reply.json()["usage"]["completion_tokens"] == 8
    assert choice(reply)["message"]["content"].startswith("sim:")


def test_an_aborted_native_request_has_the_recorded_reason(simulator: SimulatorProcess) -> None:
    simulator.control("abort", 0, count=1)

    reply = post(simulator, "/generate", text="hi")

    reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert reply.json()["meta_info"]["finish_reason"] == reason


def test_retry_after_is_sent_when_it_was_asked_for(simulator: SimulatorProcess) -> None:
    simulator.control("queue_full", 0, count=1, retry_after="7")

    assert post(simulator).headers["retry-after"] == "7"


def test_a_fault_may_be_bound_to_a_text(simulator: SimulatorProcess) -> None:
    simulator.control("bad_params", 0, match="MARKER")

    marked: dict[str, Any] = {"messages": [{"role": "user", "content": "with the MARKER"}]}
    assert post(simulator).status_code == 200
    assert [post(simulator, **marked).status_code for _ in range(3)] == [400, 400, 400]


def test_a_fault_may_hit_a_share_of_requests(simulator: SimulatorProcess) -> None:
    simulator.control("internal", 0, rate=0.5)

    with httpx.Client(verify=TLS, base_url=simulator.urls[0]) as client:
        bodies = [{**BODY, "seed": seed} for seed in range(100)]
        statuses = [client.post(CHAT, json=body).status_code for body in bodies]
        again = [client.post(CHAT, json=body).status_code for body in bodies]

    assert 20 < statuses.count(500) < 80
    assert statuses == again


def test_a_fault_may_last_for_a_time(simulator: SimulatorProcess) -> None:
    simulator.control("internal", 0, for_s=SOON)

    first = post(simulator).status_code
    deadline = time.monotonic() + 10
    while post(simulator).status_code == 500 and time.monotonic() < deadline:
        time.sleep(0.01)

    assert first == 500
    assert post(simulator).status_code == 200


def test_half_an_answer_is_a_broken_connection(simulator: SimulatorProcess) -> None:
    simulator.control("half", 0, count=1)

    with pytest.raises(httpx.RemoteProtocolError, match="peer closed"):
        post(simulator)


def test_a_reset_is_a_reset(simulator: SimulatorProcess) -> None:
    simulator.control("reset", 0, count=1)

    with pytest.raises(httpx.ReadError):
        post(simulator)


def test_no_answer_keeps_the_connection_open(simulator: SimulatorProcess) -> None:
    simulator.control("no_answer", 0, count=1)

    with pytest.raises(httpx.ReadTimeout):
        HTTP.post(simulator.urls[0] + CHAT, json=BODY, timeout=SOON)


def test_a_poisoned_request_kills_its_server_and_what_runs_there() -> None:
    with SimulatorProcess(servers=2, latency="1000") as simulator:
        simulator.control("poison", 0, match="POISON")

        async def both() -> tuple[httpx.Response | BaseException, ...]:
            async with httpx.AsyncClient(verify=TLS, base_url=simulator.urls[0]) as client:
                bystander = asyncio.ensure_future(client.post(CHAT, json=BODY))
                await asyncio.to_thread(simulator.wait_until, lambda s: s[0]["running"] == 1)
                bad = {"messages": [{"role": "user", "content": "POISON"}]}
                poisoned = client.post(CHAT, json=bad)
                return await asyncio.gather(bystander, poisoned, return_exceptions=True)

        replies = asyncio.run(both())
        states = simulator.states()
        with pytest.raises(httpx.ConnectError):
            post(simulator)
        other = HTTP.get(simulator.urls[1] + "/health").status_code
        simulator.control("revive", 0)
        simulator.wait_until(lambda s: s[0]["state"] == "ready")
        back = HTTP.get(simulator.urls[0] + "/health").status_code
        account = simulator.account()

    assert all(isinstance(reply, httpx.TransportError) for reply in replies)
    assert [state["state"] for state in states] == ["dead", "ready"]
    assert (other, back) == (200, 200)
    assert account.outcomes == {"died": 2}


# --- faults of the server ------------------------------------------------------------------------


def test_a_dead_server_refuses_until_it_is_revived(simulator: SimulatorProcess) -> None:
    with httpx.Client(verify=TLS, base_url=simulator.urls[0]) as kept:
        kept.post(CHAT, json=BODY)
        simulator.control("die", 0)
        with pytest.raises(httpx.TransportError):
            kept.post(CHAT, json=BODY)
        with pytest.raises(httpx.ConnectError):
            kept.get("/health")
        simulator.control("revive", 0, starting_s=SOON)
        simulator.wait_until(lambda states: states[0]["state"] == "starting")
        starting = kept.get("/health").status_code
        served = kept.post(CHAT, json=BODY).status_code  # waits for the start

    assert (starting, served) == (503, 200)


def test_a_death_may_be_short_and_late(simulator: SimulatorProcess) -> None:
    simulator.control("die", 0, after_s=SOON, for_s=SOON)

    assert post(simulator).status_code == 200
    simulator.wait_until(lambda states: states[0]["state"] == "dead")
    simulator.wait_until(lambda states: states[0]["state"] == "ready")
    assert post(simulator).status_code == 200


def test_a_death_may_take_the_process_along() -> None:
    with SimulatorProcess(servers=1, latency="0") as simulator:
        assert simulator.process is not None
        simulator.control("die", after_s=0.01, exit=True)

        assert simulator.process.wait(10) == -9


def test_a_dying_server_may_hold_its_connections_for_a_while(simulator: SimulatorProcess) -> None:
    began = time.monotonic()
    simulator.control("no_answer", 0, count=1)
    simulator.control("die", 0, after_s=SOON, linger_s=SOON)

    with pytest.raises(httpx.TransportError):
        post(simulator)

    assert time.monotonic() - began >= 2 * SOON


def test_a_hung_server_is_healthy_and_answers_nothing(simulator: SimulatorProcess) -> None:
    simulator.control("hang", 0)

    with pytest.raises(httpx.ReadTimeout):
        HTTP.post(simulator.urls[0] + CHAT, json=BODY, timeout=SOON)
    health = HTTP.get(simulator.urls[0] + "/health").status_code
    loads = HTTP.get(simulator.urls[0] + "/v1/loads").json()["loads"][0]
    simulator.control("revive", 0)

    assert health == 200
    assert loads["num_waiting_reqs"] == 1
    assert post(simulator).status_code == 200


def test_a_stalled_server_answers_as_recorded() -> None:
    # stalled_scheduler_client_view.txt: /health 503 after 20 s, /server_info and the like never,
    # /metrics and /v1/models at once.
    with SimulatorProcess(servers=1, latency="0", speed=100) as simulator:
        simulator.control("stall")
        url = simulator.urls[0]
        health = HTTP.get(url + "/health")
        for path in ("/server_info", "/v1/loads", "/model_info"):
            with pytest.raises(httpx.ReadTimeout):
                HTTP.get(url + path, timeout=SOON)
        at_once = [HTTP.get(url + path).status_code for path in ("/metrics", "/v1/models")]

    assert health.status_code == 503
    assert health.elapsed.total_seconds() >= 20 / 100
    assert at_once == [200, 200]


async def test_a_hang_stops_progress_and_its_end_lets_it_go_on() -> None:
    options: dict[str, Any] = {"servers": 1, "answer_tokens": "2000", "speed": 100}
    with SimulatorProcess(**options) as simulator:
        async with httpx.AsyncClient(verify=TLS, base_url=simulator.urls[0]) as client:
            task = asyncio.ensure_future(client.post(CHAT, json={**BODY, "max_tokens": 4_000}))
            await asyncio.to_thread(simulator.wait_until, lambda s: s[0]["generated_tokens"] > 50)
            simulator.control("hang")
            first = simulator.state()["generated_tokens"]
            load = (await client.get("/v1/loads")).json()["loads"][0]
            second = simulator.state()["generated_tokens"]
            simulator.control("revive")
            reply = await task

    assert first == second < 2_000
    assert (load["num_running_reqs"], load["gen_throughput"]) == (1, 0.0)
    assert reply.json()["usage"]["completion_tokens"] == 2_000


def test_a_refusing_server_takes_no_new_connection(simulator: SimulatorProcess) -> None:
    simulator.control("refuse", 0)

    with pytest.raises(httpx.ConnectError):
        post(simulator)
    simulator.control("revive", 0)
    simulator.wait_until(lambda states: states[0]["state"] == "ready")

    assert post(simulator).status_code == 200


def test_a_draining_server_is_unhealthy_and_serves(simulator: SimulatorProcess) -> None:
    simulator.control("draining", 0)

    assert HTTP.get(simulator.urls[0] + "/health").status_code == 503
    assert post(simulator).status_code == 200


def test_a_slow_server_generates_at_a_share_of_its_pace() -> None:
    with SimulatorProcess(servers=1, latency="0.05") as slow:
        fast = post(slow).elapsed.total_seconds()
        slow.control("slow", factor=0.1)
        held = post(slow).elapsed.total_seconds()

    assert fast >= 0.05
    assert held >= 0.5


def test_faults_may_be_armed_at_the_start() -> None:
    faults = ("queue_full:count=1,retry_after=2", '{"kind": "starting", "server": 1}')
    with SimulatorProcess(servers=2, latency="0", faults=faults) as simulator:
        replies = [post(simulator).status_code for _ in range(2)]
        health = [HTTP.get(url + "/health").status_code for url in simulator.urls]

    assert replies == [503, 200]
    assert health == [200, 503]


# --- the control endpoint ------------------------------------------------------------------------


def test_every_server_takes_faults_and_tells_its_state(simulator: SimulatorProcess) -> None:
    url = simulator.urls[1]

    armed = HTTP.post(url + "/_sim/faults", json=[{"kind": "nan", "count": 2}]).json()
    state = HTTP.get(url + "/_sim/state").json()
    cleared = HTTP.delete(url + "/_sim/faults").json()

    assert armed == {"1": [{"kind": "nan", "count": 2}]}
    assert (state["server"], state["port"]) == (1, simulator.ports[1])
    assert cleared == {"1": []}


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"kind": "no_such"}, "unknown fault kind 'no_such'"),
        ({"kind": "abort", "cuont": 1}, "unknown field `cuont`"),
        ({"kind": "abort", "server": 9}, "no server 9"),
        ({"kind": "abort", "count": 0}, ">= 1"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(
    simulator: SimulatorProcess, fault: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        simulator.control(**fault)
