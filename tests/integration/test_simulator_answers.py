"""The simulator's bodies and headers, beside those that real servers were recorded to send."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from tests.support.tls import TLS
from workers.simulator.launch import SimulatorProcess

# A connection for each request, so that none is a leftover of another test's server.
HTTP = httpx.Client(verify=TLS, timeout=30, limits=httpx.Limits(max_keepalive_connections=0))
SAMPLES = Path(__file__).parents[1] / "data" / "sglang"
VERSIONS = ("0.5.23", "0.5.12.post1")
MODELS = {"0.5.23": "tiny-qwen3", "0.5.12.post1": "tiny"}
KEY = "a made-up secret"

# One character is one token here, so that the counts in the recorded messages come out.
OPTIONS: dict[str, Any] = {"servers": 1, "latency": "0", "context_length": 2048,
                           "tokens_per_char": 1.0}  # fmt: skip


class Sample(NamedTuple):
    """A recorded reply.

    Attributes:
        status: HTTP status code.
        headers: By lower-case name.
        body: As text.
    """

    status: int
    headers: dict[str, str]
    body: str

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return msgspec.json.decode(self.body)


def sample(version: str, name: str) -> Sample:
    head = (SAMPLES / version / f"{name}.hdr").read_text()
    first, *lines = [line for line in head.splitlines() if line.strip()]
    headers = {key.lower(): value.strip() for key, value in (each.split(":", 1) for each in lines)}
    body = SAMPLES / version / name
    return Sample(int(first.split()[1]), headers, body.read_text() if body.exists() else "")


def wrapped(name: str) -> list[tuple[int, Any]]:
    """The replies of a sample that was recorded as (status, body) pairs in one file."""
    found = msgspec.json.decode((SAMPLES / "0.5.23" / name).read_bytes())
    if isinstance(found, dict):
        return [(found["status"], msgspec.json.decode(found["body"]))]
    pairs = found if isinstance(found[0], list) else [found]
    return [(status, msgspec.json.decode(body)) for status, body in pairs]


def shape(value: Any) -> Any:
    """A body with its values replaced by their types: what a decoder relies on."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value[:1]]
    return type(value).__name__


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def client(version: str) -> Iterator[httpx.Client]:
    """A client of a server of that version, with the model of the recordings."""
    options = {**OPTIONS, "sglang_version": version, "model": MODELS[version]}
    with SimulatorProcess(**options) as simulator, client_of(simulator) as client:
        yield client


@pytest.fixture(scope="module")
def newest() -> Iterator[httpx.Client]:
    """A client of a server of the newest version, as the dense model's recordings were made."""
    options = {**OPTIONS, "model": "tiny-qwen3"}
    with SimulatorProcess(**options) as simulator, client_of(simulator) as client:
        yield client


def client_of(simulator: SimulatorProcess) -> httpx.Client:
    return httpx.Client(verify=TLS, base_url=simulator.urls[0])


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


CHAT, GENERATE, COMPLETIONS = "/v1/chat/completions", "/generate", "/v1/completions"
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "err_chat_bad_temperature": (CHAT, {"messages": user("hi"), "temperature": -1}),
    "err_chat_empty_messages": (CHAT, {"messages": []}),
    "err_chat_maxtokens_over_context": (CHAT, {"messages": user("hi"), "max_tokens": 5000}),
    "err_chat_too_long": (CHAT, {"messages": user("x" * 10_511), "max_tokens": 8}),
    "err_generate_bad_temperature": (
        GENERATE,
        {"text": "hi", "sampling_params": {"temperature": -1}},
    ),
    "err_generate_bad_param_name": (GENERATE, {"text": "hi", "sampling_params": {"nonsense": 1}}),
    "err_generate_maxtokens_over_context": (
        GENERATE,
        {"text": "one", "sampling_params": {"max_new_tokens": 5000}},
    ),
    "err_generate_no_input": (GENERATE, {"sampling_params": {"max_new_tokens": 1}}),
    "err_generate_too_long": (GENERATE, {"text": "x" * 10_501}),
}
REFUSED_BY_NEWEST: dict[str, tuple[str, dict[str, Any]]] = {
    "err_chat_wrong_type": (CHAT, {"messages": user("hi"), "max_tokens": "abc"}),
    "err_completions_too_long": (COMPLETIONS, {"prompt": "x" * 10_501}),
}


def assert_same(reply: httpx.Response, recorded: Sample) -> None:
    assert reply.status_code == recorded.status
    assert reply.text == recorded.body
    # The recorded lengths are those before paths in the messages were made anonymous.
    for name in ("content-type", "server", "vary", "allow"):
        assert reply.headers.get(name) == recorded.headers.get(name), name


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_word_for_word_the_recorded_one(
    client: httpx.Client, version: str, name: str
) -> None:
    path, body = REFUSED[name]

    reply = client.post(path, json=body)

    assert_same(reply, sample(version, f"{name}.json"))


@pytest.mark.parametrize("name", REFUSED_BY_NEWEST)
def test_a_refusal_recorded_of_the_newest_only(newest: httpx.Client, name: str) -> None:
    path, body = REFUSED_BY_NEWEST[name]

    reply = newest.post(path, json=body)

    assert_same(reply, sample("0.5.23", f"{name}.json"))


def test_missing_messages_are_refused_with_what_was_sent(
    client: httpx.Client, version: str
) -> None:
    reply = client.post(CHAT, json={"model": MODELS[version]})

    assert_same(reply, sample(version, "err_chat_missing_messages.json"))


def test_malformed_json_is_refused_with_its_place(client: httpx.Client, version: str) -> None:
    headers = {"content-type": "application/json"}

    reply = client.post(CHAT, content=b'{"model":', headers=headers)

    assert_same(reply, sample(version, "err_chat_malformed_json.json"))


def test_malformed_json_is_refused_by_the_native_api_in_the_same_shape(
    newest: httpx.Client,
) -> None:
    headers = {"content-type": "application/json"}

    reply = newest.post(GENERATE, content=b'{"text":', headers=headers)

    assert_same(reply, sample("0.5.23", "err_generate_malformed_json.json"))


def test_another_content_type_is_refused(newest: httpx.Client) -> None:
    headers = {"content-type": "text/plain"}

    reply = newest.post(CHAT, content=b"{}", headers=headers)

    assert_same(reply, sample("0.5.23", "err_chat_wrong_content_type.json"))


def test_what_is_not_there_is_404_and_a_wrong_method_405(newest: httpx.Client) -> None:
    assert_same(newest.get("/no/such"), sample("0.5.23", "err_unknown_route.json"))
    assert_same(newest.get(GENERATE), sample("0.5.23", "err_wrong_method.json"))
    unknown = sample("0.5.23", "err_retrieve_unknown_model.json")
    assert_same(newest.get("/v1/models/no-such"), unknown)


def test_a_prompt_over_the_pool_is_refused() -> None:
    with SimulatorProcess(**OPTIONS, kv_tokens=1500) as simulator:
        url = simulator.urls[0]
        chat = HTTP.post(url + CHAT, json={"messages": user("x" * 1811), "max_tokens": 8})
        native = HTTP.post(url + GENERATE, json={"text": "x" * 1801})

    assert_same(chat, sample("0.5.23", "err_chat_over_pool.json"))
    assert_same(native, sample("0.5.23", "err_generate_over_pool.json"))


def test_a_key_is_asked_for_except_by_health_and_metrics() -> None:
    refused = sample("0.5.23", "err_no_api_key.json")
    with SimulatorProcess(**OPTIONS, api_key=KEY) as simulator:
        url = simulator.urls[0]
        assert_same(HTTP.get(url + "/v1/models"), refused)
        wrong = {"authorization": "Bearer another made-up secret"}
        assert_same(HTTP.get(url + "/v1/models", headers=wrong), refused)
        right = {"authorization": f"Bearer {KEY}"}
        assert HTTP.get(url + "/v1/models", headers=right).status_code == 200
        assert HTTP.get(url + "/health").status_code == 200
        assert HTTP.get(url + "/metrics").status_code == 200


def without(body: Any, *names: str) -> Any:
    """A recorded meta_info without what the simulator does not make up."""
    return {key: value for key, value in body.items() if key not in names}


# Times of stages that the simulator has not; a client must do without them, as 0.5.12 lacks some.
NOT_SIMULATED = (
    "storage_prefetch_wait", "storage_staging_wait", "forward_entry_time", "queue_time",
    "prefill_finished_time", "first_token_latency", "api_server_dispatch_finish_ts",
    "request_finished_ts", "decode_throughput",
)  # fmt: skip


def test_a_chat_answer_has_the_recorded_shape(client: httpx.Client, version: str) -> None:
    recorded = sample(version, "chat_ok.json")

    reply = client.post(CHAT, json={"messages": user("hi"), "max_tokens": 8})

    assert reply.status_code == recorded.status
    assert shape(reply.json()) == shape(recorded.json)
    assert list(reply.json()) == list(recorded.json)
    assert {name.lower() for name in reply.headers} == set(recorded.headers)
    assert reply.json()["choices"][0]["finish_reason"] == "length"


def test_a_completion_has_the_recorded_shape(newest: httpx.Client) -> None:
    recorded = sample("0.5.23", "completions_ok.json").json

    reply = newest.post(COMPLETIONS, json={"prompt": "one", "max_tokens": 8})

    assert shape(reply.json()) == shape(recorded)
    assert list(reply.json()) == list(recorded)


def test_a_native_answer_has_the_recorded_shape(client: httpx.Client, version: str) -> None:
    recorded = sample(version, "generate_ok.json").json
    recorded["meta_info"] = without(recorded["meta_info"], *NOT_SIMULATED)

    reply = client.post(GENERATE, json={"text": "one", "sampling_params": {"max_new_tokens": 8}})

    assert shape(reply.json()) == shape(recorded)
    assert len(reply.json()["output_ids"]) == 8
    assert reply.json()["meta_info"]["finish_reason"] == {"type": "length", "length": 8}


TOKEN_IDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": user("hi"), "n": 2, "return_token_ids": True}),
    "completions": (COMPLETIONS, {"prompt": "one", "return_token_ids": True}),
    "generate": (
        GENERATE,
        {
            "text": "one",
            "sampling_params": {"max_new_tokens": 8},
            "return_prompt_token_ids": True,
        },
    ),
}


@pytest.mark.parametrize("name", TOKEN_IDS)
def test_token_ids_have_the_recorded_place_and_shape(newest: httpx.Client, name: str) -> None:
    recorded = sample("0.5.23", f"{name}_token_ids.json").json
    if name == "generate":
        recorded["meta_info"] = without(recorded["meta_info"], *NOT_SIMULATED)
    path, body = TOKEN_IDS[name]

    came = newest.post(path, json={"max_tokens": 8, **body}).json()

    if name == "chat":
        # The recorded server had a reasoning parser, and so this kind of usage.
        for choice in recorded["choices"]:
            choice["message"]["reasoning_content"] = None
        recorded["usage"]["completion_tokens_details"] = None
    assert shape(came) == shape(recorded)
    assert [list(each) for each in members(came)] == [list(each) for each in members(recorded)]


def members(answer: Any) -> list[Any]:
    choices: list[Any] = answer.get("choices") or [answer]
    return choices


@pytest.mark.parametrize(
    ("version", "chat", "completion", "native"),
    [
        ("0.5.12.post1", set(), set(), set()),
        ("0.5.13", {"prompt_token_ids"}, set(), {"prompt_token_ids"}),
        ("0.5.16", {"prompt_token_ids"}, set(), {"prompt_token_ids"}),
        ("0.5.17", {"prompt_token_ids", "token_ids"}, {"prompt_token_ids", "token_ids"},
         {"prompt_token_ids"}),
        ("0.5.18", {"prompt_token_ids", "response_token_ids"}, {"prompt_token_ids", "token_ids"},
         {"prompt_token_ids"}),
    ],
)  # fmt: skip
def test_each_version_tells_the_token_ids_that_it_has(
    version: str, chat: set[str], completion: set[str], native: set[str]
) -> None:
    ask = {"return_token_ids": True, "return_prompt_token_ids": True}
    with SimulatorProcess(**OPTIONS, sglang_version=version) as simulator:
        url = simulator.urls[0]
        one = HTTP.post(url + CHAT, json={"messages": user("hi"), "max_tokens": 4, **ask}).json()
        two = HTTP.post(url + COMPLETIONS, json={"prompt": "one", "max_tokens": 4, **ask}).json()
        three = HTTP.post(url + GENERATE, json={"text": "one", **ask}).json()

    found = [one["choices"][0], two["choices"][0], three]
    told = [{name for name in each if name.endswith("token_ids")} for each in found]
    assert told == [chat, completion, native]
    assert all(len(each.get("prompt_token_ids", "abc")) in {2, 3} for each in found)


def test_a_native_batch_is_answered_with_a_list(newest: httpx.Client) -> None:
    reply = newest.post(
        GENERATE,
        json={"text": ["one", "two"], "sampling_params": {"max_new_tokens": 4}, "rid": ["a", "b"]},
    )

    assert [item["meta_info"]["id"] for item in reply.json()] == ["a", "b"]


def test_max_tokens_zero_gives_an_empty_text(newest: httpx.Client) -> None:
    recorded = sample("0.5.23", "err_chat_max_tokens_zero.json").json

    reply = newest.post(CHAT, json={"messages": user("hi"), "max_tokens": 0})

    choice = reply.json()["choices"][0]
    assert choice["message"]["content"] == recorded["choices"][0]["message"]["content"] == ""
    assert choice["finish_reason"] == "length"
    assert reply.json()["usage"]["completion_tokens"] == 0


def test_an_unknown_model_is_served_and_echoed(newest: httpx.Client) -> None:
    reply = newest.post(CHAT, json={"messages": user("hi"), "model": "no-such", "max_tokens": 1})

    assert reply.status_code == 200
    assert reply.json()["model"] == "no-such"


def test_models_have_the_recorded_shape(client: httpx.Client, version: str) -> None:
    recorded = sample(version, "v1_models.json").json
    recorded["data"][0]["created"] = 0

    found = client.get("/v1/models").json()

    found["data"][0]["created"] = 0
    assert found == recorded


def test_loads_have_the_recorded_shape(newest: httpx.Client) -> None:
    recorded = sample("0.5.23", "v1_loads.json").json

    found = newest.get("/v1/loads").json()

    assert shape(found) == shape(recorded)
    assert found["loads"][0]["max_running_requests"] == 72


def test_older_loads_have_totals() -> None:
    with SimulatorProcess(**OPTIONS, sglang_version="0.5.12.post1") as simulator:
        found = HTTP.get(simulator.urls[0] + "/v1/loads").json()

    assert found["dp_rank_count"] == 1
    assert found["loads"][0]["num_total_reqs"] == found["aggregate"]["total_reqs"] == 0


def test_routes_come_and_go_with_versions(client: httpx.Client, version: str) -> None:
    old = version == "0.5.12.post1"

    load = client.get("/get_load")

    if old:
        recorded = sample(version, "get_load.json")
        assert shape(load.json()) == shape(recorded.json)
    assert load.status_code == (200 if old else 404)
    assert client.get("/ready").status_code == (404 if old else 200)


def test_old_model_info_has_the_recorded_keys(client: httpx.Client, version: str) -> None:
    if version == "0.5.12.post1":
        recorded = sample(version, "get_model_info.json").json
    else:
        recorded = sample(version, "model_info.json").json
        del recorded["embedding"]

    found = client.get("/get_model_info").json()

    assert list(found) == list(recorded)


def test_server_info_tells_the_cap_and_the_strategy(client: httpx.Client, version: str) -> None:
    found = client.get("/get_server_info").json()

    strategy = "mamba_radix_cache_strategy"
    if version == "0.5.12.post1":
        strategy = "mamba_scheduler_strategy"
    state = found["internal_states"][0]
    assert found["version"] == version
    assert found[strategy] == state[strategy] == "no_buffer"
    assert state["effective_max_running_requests_per_dp"] == 72
    assert found["max_req_input_len"] == 2042
    assert found == client.get("/server_info").json()


def series(page: str) -> dict[str, set[str]]:
    """The label names of every series of a metrics page."""
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(sglang:\w+)\{(.*)\} ", page, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r"(\w+)=", labels))
    return found


def test_metrics_have_recorded_names_and_labels(client: httpx.Client, version: str) -> None:
    recorded = series((SAMPLES / version / "metrics_hybrid.txt").read_text())

    found = series(client.get("/metrics").text)

    # Recorded pages lack what had not happened yet, and were stripped of their buckets.
    not_recorded = {"sglang:num_aborted_requests_total", "sglang:num_retracted_requests_total",
                    "sglang:e2e_request_latency_seconds_bucket"}  # fmt: skip
    assert found.keys() - recorded.keys() <= not_recorded
    for name in found.keys() & recorded.keys():
        assert found[name] == recorded[name] - {"pid"}, name
    assert {"sglang:num_running_reqs", "sglang:mamba_usage"} <= found.keys()


def test_small_routes_answer_as_recorded(newest: httpx.Client) -> None:
    flushed = sample("0.5.23", "flush_cache.txt")
    assert_same(newest.post("/flush_cache"), flushed)
    reply = newest.post("/abort_request", json={"rid": "no such"})
    assert (reply.status_code, reply.text) == (200, "")
    tokens = newest.post("/v1/tokenize", json={"prompt": "12345"}).json()
    recorded = sample("0.5.23", "tokenize.json").json
    assert shape(tokens) == shape(recorded)
    assert tokens["count"] == recorded["count"]
    assert tokens["max_model_len"] == recorded["max_model_len"]
