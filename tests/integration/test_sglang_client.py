"""The client of one SGLang server, at the socket: after each fault the second call must work."""

import asyncio
import errno
import json
import os
from pathlib import Path

import msgspec
import pytest

from common.errors import ServerUnusableError, UsageError
from common.models import Params
from tests.support.scripted_server import Reply, Step, answer, scripted_server
from tests.support.server_process import free_port
from workers.client.faults import (
    AnswerTooLargeError,
    AttemptError,
    AttemptTimeoutError,
    Kind,
    LocalLimitError,
    NotSentError,
    ServerAnswer,
    ServerGoneError,
    classify,
)
from workers.client.probe import is_alive
from workers.client.requests import Request, build_request, read_prompt
from workers.client.sglang import SGLangClient
from workers.client.transport import MAX_ANSWER_BYTES

RECORDED = Path(__file__).parents[1] / "data" / "sglang_errors"
PAGES = json.loads((RECORDED / "pages.json").read_text())
QUEUE_FULL = next(
    each["body"].encode()
    for each in json.loads((RECORDED / "errors.json").read_text())
    if each["name"] == "queue_full_chat"
)


def request(serial: int = 1, *, content: str = "hello", max_tokens: int = 8) -> Request:
    body = {"messages": [{"role": "user", "content": content}]}
    prompt = json.dumps({"id": serial, "line": 1, "endpoint": "chat", "body": body})
    return build_request(
        read_prompt(prompt.encode()),
        Params(max_tokens=max_tokens),
        model="tiny",
        rid=f"test-epoch-{serial:08d}",
        context_length=None,
    )


def text_of(outcome: ServerAnswer) -> str | None:
    verdict = classify(request(), outcome)
    assert verdict.kind is Kind.COMPLETED
    assert verdict.answer is not None
    return verdict.answer.choices[0].content


async def attempt(client: SGLangClient, serial: int) -> ServerAnswer | AttemptError:
    try:
        return await client.generate(request(serial), 0.3)
    except AttemptError as error:
        return error


@pytest.mark.parametrize(
    ("step", "kind", "reason"),
    [
        (Reply(503, QUEUE_FULL), Kind.LOAD, "server_full"),
        (Reply(429, b"slow down"), Kind.LOAD, "rate_limited"),
        (Reply(400, b'{"error":{"message":"no"}}'), Kind.PROMPT, "bad_request"),
        (Reply(401, b'{"error":"Unauthorized"}'), Kind.CONFIG, "unauthorized"),
        (Reply(500, b"Internal Server Error"), Kind.PROBE, "server_error"),
        (
            Reply(302, headers="location: http://127.0.0.1:9/\r\n"),
            Kind.CONFIG,
            "unexpected_status",
        ),
        (Reply(body=b""), Kind.ANSWER, "bad_response"),
        (Reply(body=b"<html>proxy</html>"), Kind.ANSWER, "bad_response"),
        (Reply(body=b'{"error":{"message":"x"}}'), Kind.ANSWER, "bad_response"),
        (Reply(body=answer("part", finish_reason="abort")), Kind.ANSWER, "aborted"),
        (Reply(body=answer("late"), after_s=5), Kind.PROBE, "timeout"),
        (Reply(body=b"no gzip", headers="content-encoding: gzip\r\n"), Kind.PROBE, "bad_response"),
        (
            Reply(body=b"no zlib", headers="content-encoding: deflate\r\n"),
            Kind.PROBE,
            "bad_response",
        ),
        (
            Reply(body=b"?", headers="content-encoding: unheard-of\r\n"),
            Kind.ANSWER,
            "bad_response",
        ),
        ("stall", Kind.PROBE, "timeout"),
        ("stall in the body", Kind.PROBE, "timeout"),
        ("dribble", Kind.PROBE, "timeout"),
        ("reset", Kind.SERVER, "server_gone"),
        ("reset in the head", Kind.SERVER, "server_gone"),
        ("reset in the body", Kind.SERVER, "server_gone"),
        ("cut chunks", Kind.SERVER, "server_gone"),
        ("garbled chunks", Kind.SERVER, "server_gone"),
        ("drop", Kind.SERVER, "server_gone"),
        ("half", Kind.SERVER, "server_gone"),
        ("nonsense", Kind.SERVER, "server_gone"),
    ],
)
async def test_each_fault_has_its_verdict_and_the_client_works_afterwards(
    step: Step, kind: Kind, reason: str
) -> None:
    async with scripted_server(step, "ok") as server, SGLangClient(server.url, slots=1) as client:
        verdict = classify(request(), await attempt(client, 1))
        again = await client.generate(request(2), 5)

    assert (verdict.kind, verdict.reason) == (kind, reason)
    assert text_of(again) == "hi"
    assert len(server.requests) == 2


@pytest.mark.parametrize("step", ["1xx first", "http 1.0", "chunks", "gzip"])
async def test_http_as_gateways_speak_it_is_understood(step: Step) -> None:
    async with scripted_server(step, "ok") as server, SGLangClient(server.url, slots=1) as client:
        first = await client.generate(request(1), 5)
        again = await client.generate(request(2), 5)

    assert (text_of(first), text_of(again)) == ("hi", "hi")
    assert len(server.requests) == 2


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
async def test_no_redirect_is_followed_with_our_key_and_our_prompts(status: int) -> None:
    async with scripted_server() as thief:
        away = Reply(status, headers=f"location: {thief.url}/v1/chat/completions\r\n")
        async with (
            scripted_server(away, pages={"/v1/models": away}) as server,
            SGLangClient(server.url, slots=1, api_key="s3cret") as client,
        ):
            verdict = classify(request(), await attempt(client, 1))
            with pytest.raises(ServerGoneError):
                await client.probe_token(5)
            with pytest.raises((ServerGoneError, ServerUnusableError)):
                await client.identify()
            await client.abort("epoch-of-another-")

    assert verdict.kind is Kind.CONFIG
    assert thief.connections == 0


async def test_nothing_is_sent_when_the_slot_runs_out_while_it_connects() -> None:
    allowed = iter([True, False, False])
    async with (
        scripted_server("ok") as server,
        SGLangClient(server.url, slots=1, may_send=lambda: next(allowed)) as client,
    ):
        await client.generate(request(1), 5)
        with pytest.raises(NotSentError):
            await client.generate(request(2), 5)
        with pytest.raises(NotSentError):
            await client.generate(request(3), 5, fresh=True)
        await client.probe_token()

    assert [each["rid"] for each in server.requests][:-1] == ["test-epoch-00000001"]


async def test_a_request_is_not_sent_again_without_a_slot() -> None:
    allowed = iter([True, True, False])
    async with (
        scripted_server("ok", "drop", "ok") as server,
        SGLangClient(server.url, slots=1, may_send=lambda: next(allowed)) as client,
    ):
        await client.generate(request(1), 5)
        with pytest.raises(NotSentError):
            await client.generate(request(2), 5)

    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("number", "told"),
    [(errno.EMFILE, "ulimit -n"), (errno.ENFILE, "descriptor"), (errno.EADDRNOTAVAIL, "port")],
)
async def test_a_machine_without_room_for_a_connection_blames_itself(
    monkeypatch: pytest.MonkeyPatch, number: int, told: str
) -> None:
    def no_socket(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    async with scripted_server("ok") as server, SGLangClient(server.url, slots=1) as client:
        with monkeypatch.context() as patch:
            patch.setattr("workers.client.transport.socket.socket", no_socket)
            with pytest.raises(LocalLimitError, match=told) as limited:
                await client.generate(request(1), 5)
        again = await client.generate(request(2), 5)

    assert classify(request(), limited.value).kind is Kind.LOAD
    assert text_of(again) == "hi"
    assert len(server.requests) == 1


async def test_a_name_that_does_not_resolve_is_told_and_was_not_reached() -> None:
    async with SGLangClient("http://no-such-host.invalid:30000", slots=1) as client:
        with pytest.raises(ServerGoneError, match="does not resolve") as gone:
            await client.generate(request(), 30)

    assert not gone.value.reached


async def test_a_server_that_refuses_was_not_reached_and_is_found_when_it_comes() -> None:
    port = free_port()
    async with SGLangClient(f"http://127.0.0.1:{port}", slots=1) as client:
        with pytest.raises(ServerGoneError) as refused:
            await client.generate(request(), 5)
        async with scripted_server("ok", port=port):
            again = await client.generate(request(2), 5)

    assert not refused.value.reached
    assert classify(request(), refused.value).reason == "refused"
    assert text_of(again) == "hi"


async def test_a_server_killed_under_a_request_was_reached() -> None:
    async with scripted_server("reset") as server, SGLangClient(server.url, slots=1) as client:
        with pytest.raises(ServerGoneError) as gone:
            await client.generate(request(), 5)

    assert gone.value.reached


async def test_a_time_limit_aborts_by_id_before_it_closes_the_connection() -> None:
    async with scripted_server("stall") as server, SGLangClient(server.url, slots=1) as client:
        with pytest.raises(AttemptTimeoutError):
            await client.generate(request(7), 0.1)
        await server.seen("gone")

    assert server.aborts == ["test-epoch-00000007"]
    assert server.events == ["begin", "abort", "gone"]


async def test_a_time_limit_is_kept_when_the_abort_hangs_too() -> None:
    async with (
        scripted_server("stall", aborts_answered=False) as server,
        SGLangClient(server.url, slots=1) as client,
    ):
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(AttemptTimeoutError):
            await client.generate(request(), 0.1)

    assert loop.time() - began < 5


async def test_an_answer_that_the_abort_brings_about_is_a_time_limit_too() -> None:
    async def partial(_: dict[str, object]) -> Reply:
        await server.seen("abort")
        return Reply(body=answer("part", finish_reason="abort"))

    # The abort's own confirmation is slow, so that the answer overtakes it.
    async with (
        scripted_server(partial, aborts_answered=False) as server,
        SGLangClient(server.url, slots=1) as client,
    ):
        with pytest.raises(AttemptTimeoutError):
            await client.generate(request(), 0.1)


async def test_an_answered_request_is_not_aborted_when_its_limit_passes() -> None:
    async with (
        scripted_server("ok", Reply(body=answer("later"), after_s=0.5)) as server,
        SGLangClient(server.url, slots=1) as client,
    ):
        await client.generate(request(1), 0.2)
        await client.generate(request(2), 60)

    assert server.aborts == []


async def test_a_cancelled_request_closes_its_connection_and_the_next_one_works() -> None:
    async with (
        scripted_server("stall", "ok") as server,
        SGLangClient(server.url, slots=1) as client,
    ):
        task = asyncio.create_task(client.generate(request(), 60))
        await server.seen("begin")
        task.cancel()
        await server.seen("gone")
        again = await client.generate(request(2), 5)

    assert task.cancelled()
    assert text_of(again) == "hi"


async def test_a_connection_that_died_while_idle_costs_one_fresh_connection() -> None:
    async with (
        scripted_server("ok", "drop", "ok") as server,
        SGLangClient(server.url, slots=1) as client,
    ):
        await client.generate(request(1), 5)
        again = await client.generate(request(2), 5)

    assert text_of(again) == "hi"
    assert [each["rid"] for each in server.requests] == [
        "test-epoch-00000001",
        "test-epoch-00000002",
        "test-epoch-00000002",
    ]
    assert server.connections == 2


async def test_a_fresh_connection_that_dies_is_not_tried_again() -> None:
    async with (
        scripted_server("drop", "ok") as server,
        SGLangClient(server.url, slots=1) as client,
    ):
        with pytest.raises(ServerGoneError):
            await client.generate(request(), 5)

    assert len(server.requests) == 1


async def test_a_reused_connection_that_dies_late_is_not_tried_again() -> None:
    async with (
        scripted_server("ok", "late drop", "ok") as server,
        SGLangClient(server.url, slots=1) as client,
    ):
        await client.generate(request(1), 5)
        with pytest.raises(ServerGoneError):
            await client.generate(request(2), 5)

    assert len(server.requests) == 2


async def test_half_an_answer_on_a_reused_connection_is_not_asked_for_again() -> None:
    async with (
        scripted_server("ok", "half", "ok") as server,
        SGLangClient(server.url, slots=1) as client,
    ):
        await client.generate(request(1), 5)
        with pytest.raises(ServerGoneError):
            await client.generate(request(2), 5)

    assert len(server.requests) == 2


async def test_an_answer_of_two_mebibytes_comes_whole() -> None:
    long = "word " * (2 * 1024 * 1024 // 5)
    async with (
        scripted_server(Reply(body=answer(long))) as server,
        SGLangClient(server.url, slots=1) as client,
    ):
        outcome = await client.generate(request(), 30)

    assert text_of(outcome) == long


async def test_an_answer_that_no_row_could_hold_is_given_up_and_charged() -> None:
    body = b'"' + b"x" * (MAX_ANSWER_BYTES + 1) + b'"'
    async with (
        scripted_server(Reply(body=body), "ok") as server,
        SGLangClient(server.url, slots=1) as client,
    ):
        with pytest.raises(AnswerTooLargeError) as too_large:
            await client.generate(request(), 30)
        again = await client.generate(request(2), 30)

    verdict = classify(request(), too_large.value)
    assert (verdict.kind, verdict.reason) == (Kind.ANSWER, "too_large")
    assert text_of(again) == "hi"


async def test_an_answer_after_seven_seconds_is_one_request() -> None:
    async with (
        scripted_server(Reply(body=answer("late"), after_s=7)) as server,
        SGLangClient(server.url, slots=1) as client,
    ):
        outcome = await client.generate(request(), 600)

    assert text_of(outcome) == "late"
    assert len(server.requests) == 1


async def test_lone_surrogates_arrive_as_replacement_characters() -> None:
    body = answer("before PLACE after").replace(b"PLACE", b"\\ud83d")
    async with (
        scripted_server(Reply(body=body), "ok") as server,
        SGLangClient(server.url, slots=1) as client,
    ):
        outcome = await client.generate(request(), 5)
        again = await client.generate(request(2), 5)

    assert text_of(outcome) == "before \ufffd after"
    assert text_of(again) == "hi"


async def test_as_many_requests_are_open_as_are_asked_for() -> None:
    count = 300
    everyone = asyncio.Barrier(count)

    async def together(_: dict[str, object]) -> Reply:
        await everyone.wait()
        return Reply(body=answer("hi"))

    async with (
        scripted_server(together) as server,
        SGLangClient(server.url, slots=count) as client,
        asyncio.timeout(30),
        asyncio.TaskGroup() as tasks,
    ):
        for serial in range(count):
            tasks.create_task(client.generate(request(serial), 30))

    assert len(server.requests) == count


async def test_what_is_sent_is_the_request_and_the_key_and_nothing_odd() -> None:
    asked = request(content="Grüße 🌊 \x00")
    async with (
        scripted_server("ok") as server,
        SGLangClient(server.url, slots=1, api_key="s3cret") as client,
    ):
        await client.generate(asked, 5)

    assert server.requests == [msgspec.json.decode(asked.content)]
    head = server.heads[0].lower()
    assert head.startswith("post /v1/chat/completions http/1.1\r\n")
    assert "authorization: bearer s3cret" in head
    assert "content-type: application/json" in head
    assert head.count("content-length:") == 1
    assert "cookie" not in head


async def test_cookies_of_a_gateway_are_not_sent_back() -> None:
    cookie = Reply(body=answer("hi"), headers="set-cookie: a=b\r\n")
    # A jar of cookies leaves out addresses, so the server is called by a name.
    async with (
        scripted_server(cookie, "ok") as server,
        SGLangClient(server.url.replace("127.0.0.1", "localhost"), slots=1) as client,
    ):
        await client.generate(request(1), 5)
        await client.generate(request(2), 5)

    assert "cookie" not in server.heads[1].lower()


async def test_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    async with scripted_server("ok") as server, SGLangClient(server.url, slots=1) as client:
        assert text_of(await client.generate(request(), 5)) == "hi"


@pytest.mark.parametrize("url", ["ftp://host:1", "host:30000", "http://user:passw@host:1"])
def test_an_address_that_cannot_be_used_is_refused_without_quoting_it(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        SGLangClient(url, slots=1)

    assert "passw@" not in str(refused.value)


async def test_a_short_prefix_is_not_aborted_since_it_would_match_too_much() -> None:
    async with scripted_server() as server, SGLangClient(server.url, slots=1) as client:
        with pytest.raises(ValueError, match="aborts too much"):
            await client.abort("")

        assert await client.abort("epoch-of-another-")
    assert server.aborts == ["epoch-of-another-"]


async def test_a_probe_is_a_request_for_one_token() -> None:
    async with scripted_server("ok") as server, SGLangClient(server.url, slots=1) as client:
        await client.probe_token()

    assert server.requests[0]["sampling_params"]["max_new_tokens"] == 1
    assert server.heads[0].startswith("POST /generate ")


async def test_a_probe_asks_chat_where_there_is_no_generate() -> None:
    async with (
        scripted_server(Reply(404), "ok") as server,
        SGLangClient(server.url, slots=1) as client,
    ):
        await client.probe_token()

    assert server.requests[1]["max_tokens"] == 1
    assert server.heads[1].startswith("POST /v1/chat/completions ")


@pytest.mark.parametrize(
    "step",
    ["reset", "drop", "stall", Reply(503), Reply(500), Reply(body=b"{}"), Reply(body=b"<html>")],
)
async def test_a_probe_without_a_token_says_so(step: Step) -> None:
    async with scripted_server(step) as server, SGLangClient(server.url, slots=1) as client:
        with pytest.raises(ServerGoneError):
            await client.probe_token(0.2)


async def test_a_probe_that_waits_in_vain_is_aborted() -> None:
    async with scripted_server("stall") as server, SGLangClient(server.url, slots=1) as client:
        with pytest.raises(ServerGoneError):
            await client.probe_token(0.2)
        await server.seen("abort")

    assert server.aborts == [server.requests[0]["rid"]]


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refused_key_is_configuration(status: int) -> None:
    async with (
        scripted_server(Reply(status)) as server,
        SGLangClient(server.url, slots=1, api_key="s3cret") as client,
    ):
        with pytest.raises(ServerUnusableError, match="HEADRACE_API_KEY") as refused:
            await client.probe_token()

    assert "s3cret" not in str(refused.value)


async def test_a_full_server_lives_while_its_tokens_move() -> None:
    counted = iter(range(100, 10_000))

    def metrics() -> bytes:
        return b"sglang:generation_tokens_total %d\n" % next(counted)

    async with (
        scripted_server("stall", pages={"/metrics": metrics}) as server,
        SGLangClient(server.url, slots=1) as client,
    ):
        assert await is_alive(client, limit_s=10)


async def test_a_server_that_only_looks_healthy_is_not_alive() -> None:
    pages = {"/health": b"", "/metrics": b"sglang:generation_tokens_total 100\n"}
    async with (
        scripted_server("stall", pages=pages) as server,
        SGLangClient(server.url, slots=1) as client,
    ):
        assert not await is_alive(client, limit_s=2.5)


async def test_a_server_that_gives_a_token_is_alive_without_any_page() -> None:
    async with scripted_server("ok") as server, SGLangClient(server.url, slots=1) as client:
        assert await is_alive(client, limit_s=10)


@pytest.mark.parametrize("first", ["drop", Reply(503), Reply(500)], ids=["drop", "503", "500"])
async def test_a_probe_that_comes_to_nothing_is_put_again(first: Step) -> None:
    pages = {"/metrics": b"sglang:generation_tokens_total 100\n"}
    async with (
        scripted_server(first, "ok", pages=pages) as server,
        SGLangClient(server.url, slots=1) as client,
    ):
        async with asyncio.timeout(60):
            # Nothing moves by itself there: counters alone would be waited for in vain.
            assert await is_alive(client, limit_s=600)

    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("version", "model", "strategy"),
    [("0.5.23", "tiny-qwen3", "no_buffer"), ("0.5.12.post1", "tiny", "no_buffer")],
)
async def test_each_version_says_who_it_is(version: str, model: str, strategy: str) -> None:
    pages = {path: body.encode() for path, body in PAGES[version].items()}
    async with scripted_server(pages=pages) as server, SGLangClient(server.url, slots=1) as client:
        identity = await client.identify()

    assert (identity.model, identity.version) == (model, version)
    assert (identity.strategy, identity.cap, identity.context_length) == (strategy, 32, 2048)


async def test_a_server_without_any_info_page_is_known_by_its_model() -> None:
    pages = {"/v1/models": PAGES["0.5.23"]["/v1/models"].encode()}
    async with scripted_server(pages=pages) as server, SGLangClient(server.url, slots=1) as client:
        identity = await client.identify()

    assert (identity.model, identity.version, identity.cap) == ("tiny-qwen3", "", None)


@pytest.mark.parametrize(
    ("version", "paths", "running", "cap"),
    [
        ("0.5.23", ("/v1/loads", "/metrics", "/server_info"), 0, 32),
        ("0.5.23", ("/v1/loads",), 0, 32),
        ("0.5.23", ("/metrics",), 0, None),
        ("0.5.23", ("/server_info",), None, 32),
        ("0.5.12.post1", ("/metrics", "/server_info"), 29, 32),
        ("0.5.12.post1", ("/get_load",), 0, None),
    ],
)
async def test_any_page_suffices_for_the_load(
    version: str, paths: tuple[str, ...], running: int | None, cap: int | None
) -> None:
    pages = {path: PAGES[version][path].encode() for path in paths}
    async with scripted_server(pages=pages) as server, SGLangClient(server.url, slots=1) as client:
        load = await client.load()

    assert (load.running, load.cap) == (running, cap)


async def test_a_page_that_a_version_lacks_is_asked_for_once() -> None:
    pages = {"/metrics": PAGES["0.5.23"]["/metrics"].encode()}
    async with scripted_server(pages=pages) as server, SGLangClient(server.url, slots=1) as client:
        await client.load()
        await client.load()

    assert server.asked.count("/v1/loads") == 1
    assert server.asked.count("/metrics") == 2


async def test_a_server_without_pages_tells_no_load() -> None:
    async with scripted_server() as server, SGLangClient(server.url, slots=1) as client:
        with pytest.raises(ServerGoneError):
            await client.load()
