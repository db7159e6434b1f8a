"""Cases of what servers answer: nonsense under code 200, nothing, cut, thinking, several choices.

One run of real processes has all the rows; each test looks at its own. Every row says in its text
how it is to be answered.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.answering import AnsweringServer, answering, generated, prompt_of
from tests.support.fleet import Fleet
from tests.support.scripted_server import Reply, answer
from tests.support.watching import QUICK_SINK

pytestmark = pytest.mark.timeout(400)

RUN = "job"
ATTEMPTS = 2
LIMIT = 64
SERVERS_OWN_LIMIT = 16

Row = dict[str, Any]


def completed_text(text: str, *, tokens: int = 1, finish: str = "stop") -> bytes:
    """The body of an answer of /v1/completions."""
    choice = {"index": 0, "text": text, "finish_reason": finish}
    usage = {"prompt_tokens": 3, "completion_tokens": tokens}
    return json.dumps({"choices": [choice], "usage": usage}).encode()


# B48: what comes with code 200 and is no answer, by route. B30: nothing was generated.
NONSENSE: dict[str, dict[str, bytes]] = {
    "chat": {
        "error": b'{"error":{"message":"x"}}',
        "error as text": b'{"error":"x"}',
        "error beside choices": b'{"error":{"message":"x"},' + answer("half")[1:],
        "old error": b'{"object":"error","message":"x","code":400}',
        "detail": b'{"detail":"Not Found"}',
        "object": b"{}",
        "list": b"[]",
        "null": b"null",
        "number": b"200",
        "nothing": b"",
        "blank": b" \n",
        "no choices": b'{"choices":[]}',
        "null choices": b'{"choices":null}',
        "choice null": b'{"choices":[null]}',
        "choices no list": b'{"choices":{"0":{"message":{"content":"x"}}}}',
        "no message": b'{"choices":[{"index":0,"finish_reason":"stop"}]}',
        "message null": b'{"choices":[{"index":0,"message":null}]}',
        "message text": b'{"choices":[{"index":0,"message":"x"}]}',
        "another route": completed_text("x"),
        "native": generated("x"),
        "web page": b"<!doctype html><html><title>Sign in</title></html>",
        "plain": b"Internal Server Error",
        "stream": b"data: " + answer("x") + b"\n\ndata: [DONE]\n\n",
        "cut": answer("a long answer")[:-20],
        "bytes": b"\xff\xfe\x00\x80",
    },
    "completions": {
        "no choices": b'{"choices":[]}',
        "no text": b'{"choices":[{"index":0}]}',
        "error": b'{"error":{"message":"x"}}',
        "web page": b"<html></html>",
    },
    "generate": {
        "object": b"{}",
        "list": b"[]",
        "error": b'{"error":{"message":"x"}}',
        "no account": b'{"text":"x"}',
        "no text": generated(None),
        "web page": b"<html></html>",
    },
}
EMPTY: dict[str, dict[str, bytes]] = {
    "chat": {
        "length": answer("", tokens=0, finish_reason="length"),
        "stop": answer("", tokens=0),
        "null": answer(None, tokens=0, finish_reason="length"),
        "no usage": answer("").replace(b'"completion_tokens": 1', b'"other": 1'),
    },
    "completions": {"length": completed_text("", tokens=0, finish="length")},
    "generate": {"length": generated("", tokens=0, finish="length")},
}
# B30, B36: answers that are kept, with what is said of them.
KEPT: dict[str, tuple[bytes, set[str]]] = {
    "ends at once": (answer("", tokens=1), {"empty"}),
    "ends at once, null": (answer(None, tokens=1), {"empty"}),
    "thinks, null": (
        answer(None, finish_reason="length", tokens=64, reasoning_content="so far"),
        {"truncated", "reasoning_cut"},
    ),
    "thinks, blank": (
        answer("", finish_reason="length", tokens=64, reasoning_content="so far"),
        {"truncated", "reasoning_cut"},
    ),
    "thinks aloud": (
        answer("<think>so far", finish_reason="length", tokens=64),
        {"truncated", "reasoning_cut", "unparsed_reasoning"},
    ),
    "thinks aloud, later": (
        answer("\n<think>\nso </think>far", finish_reason="length", tokens=64),
        {"truncated", "unparsed_reasoning"},
    ),
    "thinks and answers": (answer("42", tokens=9, reasoning_content="so"), set()),
    "cut": (answer("so f", finish_reason="length", tokens=64), {"truncated"}),
}
LIMITS: dict[str, Row] = {
    "none": {},
    "null": {"max_tokens": None},
    "its own": {"max_tokens": 40},
    "its own, newer": {"max_completion_tokens": 40},
}
ROUTES = ("chat", "completions", "generate")
# The newer name of the limit is one of chat alone.
LIMITED = [
    (route, name)
    for route in ROUTES
    for name in LIMITS
    if (route, name) != ("completions", "its own, newer")
]
SEEDS = (1, 2)
CHOICES = (1, 2, 3, 4)


def input_rows() -> Iterator[Row]:
    """All rows, with good ones between, so that no row of faults pauses the run."""
    for route, bodies in NONSENSE.items():
        for name in bodies:
            yield row(route, f"nonsense/{route}/{name}")
    for route, bodies in EMPTY.items():
        for name in bodies:
            yield row(route, f"nothing/{route}/{name}")
    for name in KEPT:
        yield row("chat", f"kept/chat/{name}")
    for route, name in LIMITED:
        yield row(route, f"limit/{route}/{name}", **LIMITS[name])
    for route in ROUTES:
        yield from (row(route, f"seed/{route}/{seed}", say="same", seed=seed) for seed in SEEDS)
        yield from (row(route, f"choices/{route}/{n}", n=n) for n in CHOICES)


PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


def row(route: str, name: str, *, say: str = "", **parameters: Any) -> Row:
    """An input row by the route it takes; its text is its id unless told otherwise."""
    text = say or name
    if route == "generate":
        return {"id": name, "text": text, **parameters}
    content: Row = {"prompt": text}
    if route == "chat":
        content = {"messages": [{"role": "user", "content": text}]}
    body = {**content, **parameters}
    return {"custom_id": name, "method": "POST", "url": PATHS[route], "body": body}


def respond(body: Row) -> Reply:
    """Answer as the row's text says; else well, with the choices that it asks for."""
    kind, _, rest = prompt_of(body).partition("/")
    route, _, name = rest.partition("/")
    if kind == "nonsense":
        return Reply(body=NONSENSE[route][name])
    if kind == "nothing":
        return Reply(body=EMPTY[route][name])
    if kind == "kept":
        return Reply(body=KEPT[name][0])
    return Reply(body=well(body, long=kind == "limit"))


def well(body: Row, *, long: bool) -> bytes:
    """A good answer: to a long one the limit counts, and the server has one of its own."""
    sampling = body.get("sampling_params", body)
    limit = next(
        (sampling[name] for name in LIMIT_NAMES if sampling.get(name) is not None),
        SERVERS_OWN_LIMIT,
    )
    tokens, finish = (limit, "length") if long else (2, "stop")
    n = sampling.get("n") or 1
    texts = [f"answer {i}" for i in range(n)]
    if "messages" not in body and "prompt" not in body:
        each = [generated(text, tokens=tokens, finish=finish).decode() for text in texts]
        return (f"[{','.join(each)}]" if n > 1 else each[0]).encode()
    choices = [
        {"index": i, "finish_reason": finish, **content}
        for i, text in enumerate(texts)
        for content in [
            {"message": {"role": "assistant", "content": text}}
            if "messages" in body
            else {"text": text}
        ]
    ]
    usage = {"prompt_tokens": 3, "completion_tokens": tokens * n}
    return json.dumps({"choices": choices, "usage": usage}).encode()


LIMIT_NAMES = ("max_completion_tokens", "max_tokens", "max_new_tokens")


class Answered:
    """The run when it has ended: rows by id, requests by text, figures."""

    def __init__(self, fleet: Fleet, server: AnsweringServer) -> None:
        self.rows = {str(each["id"]): each for each in fleet.rows()}
        self.failures = {str(each["id"]): each for each in fleet.rows("failures")}
        self.requests = server.requests
        done = fleet.producer("status", RUN, "--json", check=False)
        self.code, self.figures = done.returncode, json.loads(done.stdout)

    def asked(self, text: str) -> list[Row]:
        return [body for body in self.requests if prompt_of(body) == text]

    def row(self, name: str) -> Any:
        return self.rows[name]

    def failure(self, name: str) -> Any:
        return self.failures[name]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Answered:
    folder = tmp_path_factory.mktemp("answered")
    lines: list[Row] = []
    for number, each in enumerate(input_rows()):
        lines += [each, *(row("chat", f"good/{number}/{i}") for i in range(3))]
    (folder / f"{RUN}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with answering(respond) as server, Fleet(folder) as fleet:
        flags = ("--attempts", str(ATTEMPTS), "--temperature", "0.7", "--top-p", "0.9")
        fleet.enqueue(folder / f"{RUN}.jsonl", "--max-tokens", str(LIMIT), *flags)
        command = ("workers", "start", "--gpu", "0", "--server", server.url)
        fleet.spawn("gpu0", *command, "--concurrency", "4", "--ramp", "10000")
        fleet.start_sink("sink", *QUICK_SINK)
        counts = fleet.wait_done(RUN)
        assert counts.completed + counts.failed == len(lines)
        return Answered(fleet, server)


def named(kinds: dict[str, dict[str, bytes]]) -> list[tuple[str, str]]:
    return [(route, name) for route, bodies in kinds.items() for name in bodies]


@pytest.mark.parametrize(("route", "name"), named(NONSENSE))
def test_b48_what_is_no_answer_fails_after_its_attempts(
    answered: Answered, route: str, name: str
) -> None:
    found = answered.failure(f"nonsense/{route}/{name}")

    assert (found["reason"], found["status"]) == ("bad_response", 200)
    assert found["attempts"] == len(answered.asked(f"nonsense/{route}/{name}")) == ATTEMPTS
    assert f"nonsense/{route}/{name}" not in answered.rows


def test_b48_nothing_else_fails_and_it_shows(answered: Answered) -> None:
    bad = len(named(NONSENSE)) + len(named(EMPTY))

    assert len(answered.failures) == answered.figures["failed"] == bad
    assert answered.figures["completed"] == len(answered.rows)
    assert (answered.code, answered.figures["status"]) == (1, "completed_with_failures")


@pytest.mark.parametrize(("route", "name"), named(EMPTY))
def test_b30_an_answer_without_a_token_is_no_completion(
    answered: Answered, route: str, name: str
) -> None:
    found = answered.failure(f"nothing/{route}/{name}")

    assert found["reason"] == "empty_output"
    assert found["attempts"] == ATTEMPTS


@pytest.mark.parametrize("name", KEPT)
def test_b30_b36_what_is_odd_about_an_answer_stands_in_its_row(
    answered: Answered, name: str
) -> None:
    body, flags = KEPT[name]
    [given] = json.loads(body)["choices"]
    found = answered.row(f"kept/chat/{name}")

    [choice] = found["choices"]
    assert set(found["flags"]) == flags
    assert choice["content"] == given["message"]["content"]
    assert choice.get("reasoning_content") == given["message"].get("reasoning_content")
    assert choice["finish_reason"] == given["finish_reason"]
    assert len(answered.asked(f"kept/chat/{name}")) == 1, "asked again with the same budget"


def test_b30_b31_b36_odd_answers_are_counted(answered: Answered) -> None:
    flags = [flag for each in answered.rows.values() for flag in each["flags"]]  # type: ignore[attr-defined]
    figures = answered.figures

    assert figures["empty"] == flags.count("empty") == 2
    assert figures["truncated"] == flags.count("truncated") > 12
    share = figures["truncated"] / figures["completed"]
    assert figures["truncated_share"] == pytest.approx(share, abs=1e-4)


@pytest.mark.parametrize(("route", "name"), LIMITED)
def test_b31_every_request_says_its_limit(answered: Answered, route: str, name: str) -> None:
    [body] = answered.asked(f"limit/{route}/{name}")
    found = answered.row(f"limit/{route}/{name}")
    limit = 40 if name.startswith("its own") else LIMIT

    sampling = body.get("sampling_params", body)
    assert [sampling[each] for each in LIMIT_NAMES if sampling.get(each) is not None] == [limit]
    assert found["usage"]["completion_tokens"] == limit
    assert "truncated" in found["flags"]


@pytest.mark.parametrize("route", ROUTES)
def test_b38_a_row_says_what_was_sent(answered: Answered, route: str) -> None:
    sent = []
    for seed in SEEDS:
        params = answered.row(f"seed/{route}/{seed}")["params"]
        own = params.get("sampling_params", params)
        sent.append(own.get("sampling_seed", own.get("seed")))
        assert (own["temperature"], own["top_p"]) == (0.7, 0.9)
        assert own.get("max_new_tokens", own.get("max_tokens")) == LIMIT
        assert answered.row(f"seed/{route}/{seed}")["model"] == "tiny"
        [asked] = [
            body
            for body in answered.asked("same")
            if all(body.get(name) == value for name, value in params.items())
            and ROUTE_MEMBERS[route] in body
        ]
        assert asked["stream"] is False

    assert sent == list(SEEDS)
    first, second = (answered.row(f"seed/{route}/{seed}") for seed in SEEDS)
    assert first["params_hash"] != second["params_hash"]
    assert first["fingerprint"] != second["fingerprint"]


ROUTE_MEMBERS = {"chat": "messages", "completions": "prompt", "generate": "text"}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("n", CHOICES)
def test_b49_every_choice_is_kept_and_tokens_count_once(
    answered: Answered, route: str, n: int
) -> None:
    found = answered.row(f"choices/{route}/{n}")

    assert [each["index"] for each in found["choices"]] == list(range(n))
    assert [each["content"] for each in found["choices"]] == [f"answer {i}" for i in range(n)]
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (3, 2 * n)


def test_b49_the_runs_tokens_are_the_sum_of_its_rows(answered: Answered) -> None:
    usages: list[Any] = [each["usage"] for each in answered.rows.values()]
    figures = answered.figures

    assert figures["total_output_tokens"] == sum(each["completion_tokens"] for each in usages)
    assert figures["total_input_tokens"] == sum(each["prompt_tokens"] for each in usages)
