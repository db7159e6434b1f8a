"""What `workers doctor` makes of what it reads; the reading itself is in the integration tests."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common import secrecy
from workers.lives import process_start
from workers.node.doctor.judging_redis import (
    judge_answers,
    judge_clock,
    judge_info,
    judge_settings,
)
from workers.node.doctor.judging_server import (
    judge_identity,
    judge_launch,
    judge_likeness,
    judge_room,
    judge_version,
)
from workers.node.doctor.lines import Scribe, summary
from workers.node.doctor.machine_part import (
    judge_descriptors,
    judge_node,
    judge_records,
    judge_slots,
)
from workers.node.doctor.store_part import judge_store_clock
from workers.node.doctor.thinking import SOME_PARSER, parser_for
from workers.node.doctor.view import show
from workers.node.node_record import NodeRecord, Row
from workers.readings.facts import ServerFacts
from workers.readings.loads import ServerIdentity, ServerLoad
from workers.supervisor.records import Process, ServerRecord

WELL: dict[str, Any] = {
    "redis_version": "7.4.0",
    "role": "master",
    "maxmemory_policy": "noeviction",
    "aof_enabled": 1,
    "used_memory": 10_000_000,
    "maxmemory": 8_000_000_000,
    "total_system_memory": 64_000_000_000,
    "connected_clients": 10,
    "maxclients": 10_000,
}
FACTS = ServerFacts(
    version="0.5.23",
    strategy="no_buffer",
    recurrent=True,
    states=216,
    cap=72,
    kv_tokens=450_000,
    context_length=32_768,
    metrics=True,
)
IDENTITY = ServerIdentity(model="m", context_length=32_768, version="0.5.23", strategy="no_buffer")


PASSWORD = "p4ssw0rd"


def levels(say: Scribe) -> dict[str, str]:
    """Each check's level; the worst of several."""
    found: dict[str, str] = {}
    for line in say.lines:
        if found.get(line.check) != "fault":
            found[line.check] = line.level
    return found


def advice(say: Scribe, check: str) -> str:
    return next(line.advice or line.text for line in say.lines if line.check == check)


# --- Redis ---------------------------------------------------------------------------------------


def test_a_redis_that_is_fit_gets_no_warning() -> None:
    say = Scribe("redis")
    judge_info(say, WELL, "redis://h:6379/0")
    judge_settings(
        say,
        {"appendonly": "yes", "appendfsync": "everysec", "hash-max-listpack-value": "65536"},
    )
    judge_answers(say, [0.2] * 20)
    judge_clock(say, -0.4)

    assert set(levels(say).values()) == {"ok"}


@pytest.mark.parametrize(
    ("change", "check", "level", "says"),
    [
        ({"redis_version": "6.0.16"}, "version", "fault", "6.2 or newer"),
        ({"cluster_enabled": 1}, "role", "fault", "Cluster"),
        ({"role": "slave", "master_host": "h", "master_port": 1}, "role", "fault", "replica"),
        ({"maxmemory_policy": "allkeys-lru"}, "eviction", "fault", "noeviction"),
        ({"loading": 1, "loading_loaded_perc": "41.5"}, "loading", "warning", "wait"),
        ({"aof_enabled": 0}, "persistence", "warning", "appendonly yes"),
        ({"aof_last_write_status": "err"}, "persistence", "fault", "full disk"),
        ({"aof_last_bgrewrite_status": "err"}, "persistence", "fault", "full disk"),
        ({"maxmemory": 0}, "room", "warning", "set maxmemory"),
        ({"used_memory": 7_900_000_000}, "room", "fault", "sink"),
        ({"used_memory": 6_100_000_000}, "room", "warning", "sink"),
        ({"total_system_memory": 4_000_000_000}, "room", "warning", "lower maxmemory"),
        ({"connected_clients": 8_000}, "clients", "warning", "maxclients"),
    ],
)
def test_each_fault_of_redis_is_told_with_what_to_do(
    change: dict[str, Any], check: str, level: str, says: str
) -> None:
    say = Scribe("redis")
    judge_info(say, WELL | change, "redis://h:6379/0")

    assert levels(say)[check] == level
    assert says in advice(say, check)
    assert [name for name, found in levels(say).items() if found != "ok"] == [check]


@pytest.mark.parametrize(
    ("settings", "check", "level"),
    [
        ({"hash-max-listpack-value": "64"}, "hashes", "warning"),
        ({"hash-max-ziplist-value": "64"}, "hashes", "warning"),
        ({"hash-max-ziplist-value": "65536"}, "hashes", "ok"),
        ({"appendonly": "yes", "appendfsync": "no"}, "appendfsync", "warning"),
        ({"appendonly": "yes", "appendfsync": "always"}, "appendfsync", "ok"),
        (None, "settings", "ok"),
    ],
)
def test_settings_that_cost_are_told(
    settings: dict[str, str] | None, check: str, level: str
) -> None:
    say = Scribe("redis")
    judge_settings(say, settings)

    assert levels(say) == {check: level}


@pytest.mark.parametrize(
    ("trips_ms", "level"),
    [([1.0] * 9 + [500.0], "ok"), ([25.0] * 10, "warning"), ([1_500.0] * 10, "fault")],
)
def test_a_slow_redis_is_judged_by_its_usual_answer(trips_ms: list[float], level: str) -> None:
    say = Scribe("redis")
    judge_answers(say, trips_ms)

    assert levels(say) == {"latency": level}


@pytest.mark.parametrize(("ahead_s", "word"), [(3.0, "ahead of"), (-3.0, "behind")])
def test_clocks_that_differ_are_told(ahead_s: float, word: str) -> None:
    say = Scribe("redis")
    judge_clock(say, ahead_s)

    assert levels(say) == {"clock": "warning"}
    assert f"3.0 s {word} this machine's" in say.lines[0].text


@pytest.mark.parametrize(
    ("ahead_s", "level"),
    [(0.4, "ok"), (-59.0, "ok"), (90.0, "warning"), (-900.0, "fault"), (900.0, "fault")],
)
def test_a_clock_that_s3_refuses_is_a_fault(ahead_s: float, level: str) -> None:
    say = Scribe("store")
    judge_store_clock(say, ahead_s)
    assert levels(say) == {"clock": level}

    silent = Scribe("store")
    judge_store_clock(silent, None)
    assert silent.lines == []


# --- Servers -------------------------------------------------------------------------------------


def test_a_server_that_is_fit_gets_no_warning() -> None:
    say = Scribe("gpu0@h")
    judge_version(say, "0.5.23")
    judge_identity(say, IDENTITY, None)
    judge_launch(say, FACTS)
    judge_room(say, FACTS, load=None, shape=None)

    assert set(levels(say).values()) == {"ok"}
    assert "72 requests at once: the mamba pool binds (216 states, 3 a request)" in str(say.lines)


@pytest.mark.parametrize(
    ("version", "level"),
    [("0.5.6.post2", "fault"), ("", "warning"), ("0.5.7", "ok"), ("0.9.0", "ok")],
)
def test_a_version_is_judged_by_what_is_known(version: str, level: str) -> None:
    say = Scribe("gpu0@h")
    judge_version(say, version)

    assert levels(say) == {"version": level}


@pytest.mark.parametrize(
    ("change", "parser", "check", "says"),
    [
        ({}, "qwen3", "reasoning", "--reasoning-parser qwen3"),
        ({"auto_truncate": True}, None, "truncation", "without --allow-auto-truncate"),
    ],
)
def test_a_server_that_spoils_answers_is_warned_of(
    change: dict[str, Any], parser: str | None, check: str, says: str
) -> None:
    say = Scribe("gpu0@h")
    judge_identity(say, msgspec.structs.replace(IDENTITY, **change), parser)

    assert levels(say)[check] == "warning"
    assert says in advice(say, check)


def test_a_parser_that_is_there_is_told_and_no_warning() -> None:
    say = Scribe("gpu0@h")
    identity = msgspec.structs.replace(IDENTITY, reasoning_parser="qwen3", tool_call_parser="qwen")
    judge_identity(say, identity, "qwen3")

    assert levels(say) == {"model": "ok", "reasoning": "ok", "tools": "ok"}


@pytest.mark.parametrize(
    ("change", "check", "says"),
    [
        ({"metrics": False}, "metrics", "--enable-metrics"),
        ({"logs_prompts": True}, "log", "--log-requests"),
        ({"most_queued": 4}, "queue", "at least 7"),
        ({"policy": "lof"}, "order", "fcfs"),
    ],
)
def test_a_launch_that_holds_a_run_back_is_warned_of(
    change: dict[str, Any], check: str, says: str
) -> None:
    say = Scribe("gpu0@h")
    judge_launch(say, msgspec.structs.replace(FACTS, **change))

    assert levels(say)[check] == "warning"
    assert says in advice(say, check)


def test_room_is_judged_by_what_was_asked_and_what_there_is() -> None:
    for change, level, says in (
        ({"asked": 200}, "warning", "no_radix gives up to 216"),
        ({}, "ok", "no_radix gives up to 216"),
        ({"cap": None}, "warning", "first lines"),
        ({"graph_cap": 64}, "ok", "captured graphs"),
    ):
        say = Scribe("gpu0@h")
        judge_room(say, msgspec.structs.replace(FACTS, **change), load=None, shape=None)
        assert levels(say)["capacity"] == level, change
        assert says in str(say.lines), change
        assert ("graphs" in levels(say)) is ("graph_cap" in change)


def test_requests_that_do_not_fit_into_the_kv_pool_are_seen_at_a_full_server() -> None:
    say = Scribe("gpu0@h")
    facts = msgspec.structs.replace(FACTS, cap=72, kv_tokens=100_000)
    judge_room(say, facts, load=ServerLoad(running=72, cap=72, token_usage=0.9), shape=None)
    assert levels(say)["capacity"] == "ok"

    judge_room(say, facts, load=ServerLoad(running=66, cap=72, token_usage=0.99), shape=None)
    assert say.lines[-1].level == "warning"
    assert "KV pool" in say.lines[-1].text


def test_servers_that_are_not_alike_are_named_with_how_they_differ() -> None:
    other = msgspec.structs.replace(IDENTITY, reasoning_parser="qwen3")

    assert judge_likeness({}) == {}
    assert judge_likeness({"gpu0@h": IDENTITY, "gpu1@h": IDENTITY}) == {}
    assert judge_likeness({"gpu0@h": IDENTITY, "gpu1@h": other}) == {
        "gpu1@h": "reasoning_parser qwen3 instead of None"
    }


@pytest.mark.parametrize(
    ("model", "parser"),
    [
        ("Qwen/Qwen3-8B", "qwen3"),
        ("Qwen/Qwen3-Next-80B-A3B-Thinking", "qwen3"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", None),
        ("Qwen/Qwen3-8B-Base", None),
        ("deepseek-ai/DeepSeek-R1", "deepseek-r1"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "deepseek-r1"),
        ("openai/gpt-oss-120b", "gpt-oss"),
        ("zai-org/GLM-4.5", "glm45"),
        ("somebody/Odd-Thinking-7B", SOME_PARSER),
        ("meta-llama/Llama-3.1-8B-Instruct", None),
        ("meta-llama/Llama-3.1-8B", None),
    ],
)
def test_a_model_that_thinks_is_known_by_its_name(
    model: str, parser: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert parser_for("served", model) == parser


def test_a_models_own_template_says_more_than_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert parser_for("m", str(folder)) is None

    (folder / "chat_template.jinja").write_text("{% if enable_thinking %}<think>{% endif %}")
    assert parser_for("m", str(folder)) == "qwen3"
    odd = folder.rename(tmp_path / "odd")
    assert parser_for("m", str(odd)) == SOME_PARSER


# --- This machine --------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "level"), [(256, "warning"), (65_536, "ok")])
def test_few_descriptors_are_warned_of(limit: int, level: str) -> None:
    say = Scribe("machine")
    judge_descriptors(say, limit, limit)

    assert levels(say) == {"descriptors": level}


def test_too_few_descriptors_for_a_servers_slots_are_a_fault() -> None:
    say = Scribe("gpu0@h")
    judge_slots(say, 1_024, 896)
    assert say.lines == []

    judge_slots(say, 1_024, 897)
    assert levels(say) == {"descriptors": "fault"}
    assert "1,025" in say.lines[0].advice


def test_the_servers_that_serve_has_launched_are_judged_by_their_records() -> None:
    gone = Process(pid=1, started="never")
    record = ServerRecord(
        name="gpu0@h", gpus=(0,), url="http://127.0.0.1:30000", port=30000, supervisor=gone,
        state="ready",
    )  # fmt: skip
    say = Scribe("machine")
    judge_records(say, [record, msgspec.structs.replace(record, state="stopped")])

    (line,) = say.lines
    assert (line.level, "nobody starts it again" in line.text) == ("warning", True)
    assert "workers serve --gpu 0" in line.advice

    with_up = Scribe("machine")
    judge_records(with_up, [record], of_up=True)
    assert [each.advice for each in with_up.lines] == ["`workers up`, called again, takes it over"]

    failed = Scribe("machine")
    judge_records(failed, [msgspec.structs.replace(record, state="failed", detail="no GPU")])
    assert [(each.level, "no GPU" in each.text) for each in failed.lines] == [("fault", True)]


def test_the_parts_of_up_are_judged_by_its_record() -> None:
    me = {"pid": os.getpid(), "started": process_start(os.getpid()), "host": "h", "since": 0.0}
    rows = [Row(name=name, state="running") for name in ("redis", "server gpu1", "sink")]
    node = NodeRecord(**me, at=0.0, state="running", redis="", rows=rows)  # type: ignore[arg-type]
    failed = msgspec.structs.replace(
        node, rows=[*rows, Row(name="server gpu0", state="failed", says="no GPU", log="x.log")]
    )
    killed = msgspec.structs.replace(node, started="never")
    for record, expected in (
        (None, []),
        (node, [("ok", "2 parts of workers up")]),
        (failed, [("fault", "server gpu0 has failed: no GPU; x.log says more")]),
        (killed, [("warning", "workers up ended without a clean stop")]),
        (msgspec.structs.replace(killed, state="stopping"), []),
    ):
        say = Scribe("machine")
        judge_node(say, record)
        assert [(line.level, line.text) for line in say.lines] == expected


# --- What is told --------------------------------------------------------------------------------


def test_secrets_and_what_acts_on_a_terminal_stay_out() -> None:
    secrecy.hide("a-long-secret")
    say = Scribe("redis")
    say.fault(
        "x", f"redis://u:{PASSWORD}@h/0 said a-long-secret\x1b[31m\n twice", "use a-long-secret"
    )

    (line,) = say.lines
    assert PASSWORD not in line.text
    assert "a-long-secret" not in line.text + line.advice
    assert "\x1b" not in line.text
    assert "\n" not in line.text


def test_the_account_counts_faults_and_warnings() -> None:
    say = Scribe("redis")
    say.ok("a", "well")
    say.warning("b", "slow", "do")
    assert (summary(say.lines)["ok"], summary(say.lines)["warnings"]) == (True, 1)

    say.fault("c", "broken")
    told = summary(say.lines)
    assert (told["ok"], told["faults"], told["warnings"]) == (False, 1, 1)
    assert told["lines"][0] == {
        "part": "redis", "check": "a", "level": "ok", "text": "well", "advice": "",
    }  # fmt: skip


def test_servers_of_which_the_same_is_said_are_shown_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = []
    for number in range(8):
        say = Scribe(f"gpu{number}@h")
        say.ok("reachable", f"http://127.0.0.1:{30000 + number}")
        if number == 5:
            say.fault("token", "no token within 15 s")
        else:
            say.ok("token", "it generates")
        lines += say.lines
    show(lines)

    shown = capsys.readouterr().out
    assert shown.count("it generates") == 1
    assert "and 6 alike" in shown
    assert "gpu5@h" in shown
    assert "1 fault in 16 checks" in shown
