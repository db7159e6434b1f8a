"""`workers doctor` against real Redis, stores and servers, and each fault that it is to find."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from common.queue import GroupFigures, Groups
from common.queue.rights import acl_rights
from tests.support import programs, s3_proxy
from tests.support.producer_cli import Ended, environment
from tests.support.redis_server import RedisServer
from tests.support.s3 import S3Server
from tests.support.s3_proxy import FaultProxy
from tests.support.scripted_server import Page, Reply, answer, scripted_server
from tests.support.server_process import free_port
from workers.lives import process_start
from workers.node.doctor.examine import Asked, examine
from workers.node.doctor.lines import Line
from workers.node.doctor.server_part import Target
from workers.options import this_host
from workers.simulator.launch import SimulatorProcess
from workers.supervisor.records import Process, ServerRecord, write_record

RECORDED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "sglang" / "server_info.json").read_text()
)
HYBRID = RECORDED["0.5.23-hybrid"]
LIMIT_S = 100.0
OF_MACHINE = {"latency", "disk", "state", "descriptors"}
"""Checks whose warnings depend on how busy and how large the machine of the tests is."""
NOWHERE = "redis://127.0.0.1:1/0"
PASSWORD = "p4ssw0rd"
CLOSED = NOWHERE.replace("//", f"//someone:{PASSWORD}@")


def doctor(*arguments: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> Ended:
    """Run the command to its end, as a user does."""
    ended = programs.run(
        [sys.executable, "-m", "workers", "doctor", "--time-limit", "80", *map(str, arguments)],
        cwd=cwd,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout.decode(), ended.stderr.decode())


def found(lines: list[Line], part: str, check: str) -> Line:
    """The line of a check; the worst where there are several."""
    order = {"ok": 0, "warning": 1, "fault": 2}
    mine = [line for line in lines if (line.part, line.check) == (part, check)]
    assert mine, (part, check, lines)
    return max(mine, key=lambda line: order[line.level])


def look(
    tmp_path: Path,
    *,
    redis: str = NOWHERE,
    output: str | None = None,
    endpoint_url: str | None = None,
    servers: Mapping[str, str] | None = None,
    limit_s: float = 60.0,
) -> list[Line]:
    """Examine in this process."""
    return examine(
        Asked(
            redis=redis,
            output=str(tmp_path / "out") if output is None else output,
            endpoint_url=endpoint_url,
            targets=tuple(Target(name, url) for name, url in (servers or {}).items()),
            state_dir=tmp_path / "state",
            limit_s=limit_s,
        )
    )


# --- The command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simulator() -> Iterator[SimulatorProcess]:
    with SimulatorProcess(servers=2, latency="0", answer_tokens="1") as running:
        yield running


def test_where_all_is_well_it_says_so_and_leaves_nothing_behind(
    valkey: RedisServer, simulator: SimulatorProcess, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    with valkey.client() as client:
        client.config_set("maxmemory", "1gb")
        client.config_set("hash-max-listpack-value", "65536")
    call = ("--redis", valkey.url, "--output", output, "--server", simulator.urls[0])
    ended = doctor(*call, "--json", cwd=tmp_path)

    assert ended.code == 0, ended.out
    told = ended.told
    assert (told["ok"], told["faults"]) == (True, 0), ended.out
    assert {line["check"] for line in told["lines"] if line["level"] != "ok"} <= OF_MACHINE
    assert {line["part"] for line in told["lines"]} == {"redis", "store", "server", "machine"}
    capacity = next(line for line in told["lines"] if line["check"] == "capacity")
    assert (
        "72 requests at once: the mamba pool binds (216 states, 3 a request)" in capacity["text"]
    )
    with valkey.client() as client:
        assert client.dbsize() == 0
    assert [path.name for path in output.rglob("*") if path.is_file()] == []

    shown = doctor(*call, cwd=tmp_path)
    assert shown.code == 0
    assert " checks" in shown.out
    assert "\x1b" not in shown.out  # no colours where no terminal shows them


def test_where_all_is_away_each_part_says_so_and_the_others_are_looked_at(tmp_path: Path) -> None:
    port = free_port()
    env = {
        "AWS_ACCESS_KEY_ID": "example-access",
        "AWS_SECRET_ACCESS_KEY": "example-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    ended = doctor(
        *("--redis", CLOSED, "--gpu", "0-1"),
        *("--server", f"http://127.0.0.1:{port}", "--json"),
        cwd=tmp_path,
    )
    assert ended.code == 2
    assert "{gpu}" in ended.err

    ended = doctor(
        *("--redis", CLOSED, "--gpu", "0"),
        *("--server", f"http://127.0.0.1:{port}", "--json"),
        *("--output", "s3://bucket/x", "--endpoint-url", f"http://127.0.0.1:{port}"),
        cwd=tmp_path,
        env=env,
    )
    assert ended.code == 4
    faults = {
        (each["part"], each["check"]) for each in ended.told["lines"] if each["level"] == "fault"
    }
    server = f"gpu0@{this_host()}"
    assert faults == {("redis", "reachable"), ("store", "reachable"), (server, "reachable")}
    assert any(each["part"] == "machine" for each in ended.told["lines"])
    assert PASSWORD not in ended.out + ended.err


def test_what_hangs_is_a_fault_and_hides_nothing(valkey: RedisServer, tmp_path: Path) -> None:
    valkey.freeze()
    try:
        with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never answers
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            lines = look(tmp_path, redis=valkey.tcp_url, servers={"gpu0@h": url}, limit_s=5.0)
    finally:
        valkey.thaw()
    assert found(lines, "redis", "time").level == "fault"
    assert found(lines, "gpu0@h", "time").level == "fault"
    assert found(lines, "machine", "descriptors").level == "ok"
    assert found(lines, "store", "directory").level == "warning"


# --- Redis ---------------------------------------------------------------------------------------


def test_each_fault_of_a_real_redis_is_found(valkey: RedisServer, tmp_path: Path) -> None:
    with valkey.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        assert found(look(tmp_path, redis=valkey.url), "redis", "eviction").level == "fault"
        client.config_set("maxmemory-policy", "noeviction")

        client.config_set("maxmemory", "1mb")
        lines = look(tmp_path, redis=valkey.url)
        assert found(lines, "redis", "room").level == "fault"
        assert found(lines, "redis", "writes").level == "fault"
        client.config_set("maxmemory", "0")
        assert found(look(tmp_path, redis=valkey.url), "redis", "room").level == "warning"

        client.config_set("hash-max-listpack-value", "64")
        assert found(look(tmp_path, redis=valkey.url), "redis", "hashes").level == "warning"

        client.replicaof("127.0.0.1", "1")
        try:
            lines = look(tmp_path, redis=valkey.url)
        finally:
            client.replicaof("NO", "ONE")
    assert found(lines, "redis", "role").level == "fault"
    assert found(lines, "redis", "writes").level == "fault"


def test_a_redis_without_a_file_is_warned_of(tmp_path: Path) -> None:
    with RedisServer() as server:
        lines = look(tmp_path, redis=server.url)

    assert found(lines, "redis", "persistence").level == "warning"
    assert found(lines, "redis", "latency").level in {"ok", "warning"}
    assert found(lines, "redis", "clock").level == "ok"


def test_every_kind_of_redis_is_read(any_redis: RedisServer, tmp_path: Path) -> None:
    lines = look(tmp_path, redis=any_redis.tcp_url)

    assert found(lines, "redis", "writes").level == "ok"
    assert found(lines, "redis", "version").level == "ok"
    assert not [line for line in lines if line.part == "redis" and line.level == "fault"]


def test_users_are_told_what_they_lack(valkey: RedisServer, tmp_path: Path) -> None:
    with valkey.client() as admin:
        admin.execute_command(f"ACL SETUSER fit on >secret-of-fit {acl_rights()}")
        admin.execute_command(f"ACL SETUSER unfit on >secret-of-unfit {acl_rights()} -xadd")
    try:
        url = f"redis://{{}}:secret-of-{{}}@127.0.0.1:{valkey.port}/0"
        fit = look(tmp_path, redis=url.format("fit", "fit"))
        unfit = look(tmp_path, redis=url.format("unfit", "unfit"))
        wrong = look(tmp_path, redis=url.format("fit", "nobody"))
    finally:
        with valkey.client() as admin:
            admin.execute_command("ACL DELUSER fit unfit")

    assert found(fit, "redis", "rights").level == "ok"
    assert found(fit, "redis", "writes").level == "ok"
    assert found(fit, "redis", "settings").level == "ok"  # it may not read them, and need not
    assert found(unfit, "redis", "rights").level == "fault"
    assert "+xadd" in found(unfit, "redis", "rights").text
    assert "refused the user or password" in found(wrong, "redis", "reachable").text
    assert "secret-of" not in str([*fit, *unfit, *wrong])


# --- Stores --------------------------------------------------------------------------------------


@pytest.fixture
def bucket(moto: S3Server) -> str:
    return moto.new_bucket()


def look_at_store(tmp_path: Path, bucket: str, port: int) -> list[Line]:
    output, endpoint = f"s3://{bucket}/prefix", f"http://127.0.0.1:{port}"
    return look(tmp_path, output=output, endpoint_url=endpoint)


def test_a_bucket_is_tried_in_its_prefix_and_left_as_it_was(
    moto: S3Server, bucket: str, tmp_path: Path
) -> None:
    lines = look_at_store(tmp_path, bucket, moto.port)

    for check in ("reachable", "clock", "writes", "conditions", "deletes"):
        assert found(lines, "store", check).level == "ok"
    assert "us-east-1" in found(lines, "store", "reachable").text
    assert moto.client().list_objects_v2(Bucket=bucket)["KeyCount"] == 0


@pytest.mark.parametrize(
    ("plan", "check", "level", "says"),
    [
        (s3_proxy.always(s3_proxy.ACCESS_DENIED, method="PUT"), "writes", "fault", "s3:PutObject"),
        (s3_proxy.always(s3_proxy.NO_SUCH_BUCKET), "reachable", "fault", "bucket is missing"),
        (s3_proxy.always(s3_proxy.WRONG_REGION), "reachable", "fault", "region eu-west-1"),
        (s3_proxy.always(s3_proxy.ACCESS_DENIED), "reachable", "fault", "s3:ListBucket"),
        (
            s3_proxy.always(s3_proxy.ACCESS_DENIED, method="DELETE"),
            "deletes",
            "warning",
            "s3:DeleteObject",
        ),
        (
            s3_proxy.always(s3_proxy.CONDITION_IGNORED, method="PUT"),
            "conditions",
            "warning",
            "If-None-Match",
        ),
    ],
)
def test_each_fault_of_a_bucket_is_found(
    proxy: FaultProxy,
    bucket: str,
    tmp_path: Path,
    plan: s3_proxy.Plan,
    check: str,
    level: str,
    says: str,
) -> None:
    proxy.plan = plan
    line = found(look_at_store(tmp_path, bucket, proxy.port), "store", check)

    assert line.level == level
    assert says in line.text


def test_the_outputs_of_known_runs_are_tried_where_none_is_named(
    valkey: RedisServer, tmp_path: Path
) -> None:
    empty = doctor("--redis", valkey.url, "--json", cwd=tmp_path)
    assert [each["text"] for each in empty.told["lines"] if each["part"] == "store"] == [
        "not looked at: no run has one yet, and --output names none"
    ]

    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    subprocess.run(
        [
            *(sys.executable, "-m", "producer", "enqueue", "p.jsonl", "--output", "out"),
            *("--max-tokens", "8", "--redis", valkey.url),
        ],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        check=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    with valkey.client() as client:
        before = sorted(client.keys())
    known = doctor("--redis", valkey.url, "--json", cwd=tmp_path).told
    writes = next(
        each for each in known["lines"] if each["check"] == "writes" and each["part"] == "store"
    )
    assert str(tmp_path / "out") in writes["text"]
    with valkey.client() as client:
        assert sorted(client.keys()) == before


def test_a_directory_that_may_not_be_written_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = found(look(tmp_path, output=str(tmp_path / "file")), "store", "reachable")
    assert (line.level, "no directory" in line.text) == ("fault", True)

    line = found(look(tmp_path, output="s3:/typing/error"), "store", "address")
    assert line.level == "fault"


# --- Servers -------------------------------------------------------------------------------------


def ask_scripted(tmp_path: Path, pages: Mapping[str, Page], *steps: Any) -> list[Line]:
    async def ask() -> list[Line]:
        async with scripted_server(*steps, pages=pages) as server:
            return await asyncio.to_thread(look, tmp_path, servers={"gpu0@h": server.url})

    return asyncio.run(ask())


def pages(model: str = "m", **info: Any) -> dict[str, Page]:
    """The pages of a real server, with some members changed."""
    listed = {"data": [{"id": model, "max_model_len": 2_048}]}
    return {
        "/v1/models": json.dumps(listed).encode(),
        "/server_info": json.dumps(HYBRID | info).encode(),
    }


def limited(**info: Any) -> dict[str, Any]:
    """What a real server with twelve states says of itself."""
    state = HYBRID["internal_states"][0] | {
        "effective_max_running_requests_per_dp": 4,
        "max_mamba_cache_size": 12,
    }
    return {"internal_states": [state], "max_mamba_cache_size": 12, **info}


def test_a_server_limited_by_its_states_is_diagnosed_with_what_to_do(tmp_path: Path) -> None:
    line = found(ask_scripted(tmp_path, pages(**limited())), "gpu0@h", "capacity")

    assert line.level == "warning"
    assert line.text == (
        "no_buffer: 4 requests at once: the mamba pool binds (12 states, 3 a request), 32 were "
        "asked for"
    )
    assert line.advice.startswith("no_radix gives up to 12 on the same memory")


@pytest.mark.parametrize(
    ("model", "info", "check", "says"),
    [
        ("Qwen3-8B", {}, "reasoning", "--reasoning-parser qwen3"),
        ("m", {"allow_auto_truncate": True}, "truncation", "--allow-auto-truncate"),
        ("m", {"enable_metrics": False}, "metrics", "--enable-metrics"),
        ("m", {"log_requests": True}, "log", "--log-requests"),
        ("m", {"max_queued_requests": 1}, "queue", "at least 3"),
        ("m", {"schedule_policy": "lof"}, "order", "fcfs"),
    ],
)
def test_each_flag_that_harms_a_run_is_found(
    tmp_path: Path, model: str, info: dict[str, Any], check: str, says: str
) -> None:
    line = found(ask_scripted(tmp_path, pages(model, **info)), "gpu0@h", check)

    assert line.level == "warning"
    assert says in line.advice


def test_a_version_that_is_too_old_is_a_fault(tmp_path: Path) -> None:
    line = found(ask_scripted(tmp_path, pages(version="0.5.4")), "gpu0@h", "version")
    assert line.level == "fault"


def test_a_server_that_generates_nothing_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.node.doctor.server_part.TOKEN_S", 1.0)
    line = found(ask_scripted(tmp_path, pages(), "stall"), "gpu0@h", "token")
    assert line.level == "fault"


def test_a_gateway_that_tells_nothing_is_warned_of_and_what_is_no_server_is_a_fault(
    tmp_path: Path,
) -> None:
    models = {"/v1/models": pages()["/v1/models"]}
    lines = ask_scripted(tmp_path, models, Reply(body=answer("hi")))
    assert found(lines, "gpu0@h", "capacity").level == "warning"

    line = found(ask_scripted(tmp_path, {}), "gpu0@h", "reachable")
    assert (line.level, "is it an SGLang server?" in line.text) == ("fault", True)


def test_servers_that_are_not_alike_are_told(tmp_path: Path, simulator: SimulatorProcess) -> None:
    async def ask() -> list[Line]:
        async with scripted_server(pages=pages("tiny")) as other:
            urls = {"gpu0@h": simulator.urls[0], "gpu1@h": simulator.urls[1], "gpu2@h": other.url}
            return await asyncio.to_thread(look, tmp_path, servers=urls)

    lines = asyncio.run(ask())
    line = found(lines, "gpu2@h", "alike")
    assert (line.level, "model_path" in line.text) == ("warning", True)
    assert not [each for each in lines if each.part == "gpu1@h" and each.check == "alike"]


def test_a_key_that_is_needed_or_wrong_is_told_and_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SimulatorProcess(servers=1, latency="0", api_key="key-of-the-server") as closed:
        url = {"gpu0@h": closed.urls[0]}
        monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
        needed = look(tmp_path, servers=url)
        monkeypatch.setenv("HEADRACE_API_KEY", "key-of-another")
        wrong = look(tmp_path, servers=url)
        monkeypatch.setenv("HEADRACE_API_KEY", "key-of-the-server")
        right = look(tmp_path, servers=url)

    assert found(needed, "gpu0@h", "key").text == "it asks for a key"
    assert found(wrong, "gpu0@h", "key").text == "it refuses the key of HEADRACE_API_KEY"
    assert {found(needed, "gpu0@h", "key").level, found(wrong, "gpu0@h", "key").level} == {"fault"}
    assert found(right, "gpu0@h", "token").level == "ok"
    assert "key-of-" not in str([*needed, *wrong, *right])


# --- This machine --------------------------------------------------------------------------------


def test_servers_of_serve_are_found_by_their_records(
    tmp_path: Path, simulator: SimulatorProcess, valkey: RedisServer
) -> None:
    living = Process(pid=os.getpid(), started=process_start(os.getpid()))
    host = this_host()
    for number, state, detail in ((0, "ready", ""), (1, "failed", "no GPU"), (2, "stopped", "")):
        write_record(
            tmp_path / ".headrace",
            ServerRecord(
                name=f"gpu{number}@{host}",
                gpus=(number,),
                url=simulator.urls[0],
                port=1,
                supervisor=living,
                state=state,  # type: ignore[arg-type]
                detail=detail,
                log=f"gpu{number}.log",
            ),
        )
    told = doctor("--redis", valkey.url, "--json", cwd=tmp_path).told
    serve = {each["text"]: each["level"] for each in told["lines"] if each["check"] == "serve"}

    assert serve == {f"gpu0@{host}: ready": "ok", f"gpu1@{host}: failed, no GPU": "fault"}
    tried = {each["part"] for each in told["lines"] if each["check"] == "token"}
    assert tried == {f"gpu0@{host}", f"gpu1@{host}"}

    (tmp_path / ".headrace" / "servers" / f"gpu3@{host}.json").write_text("{")
    told = doctor("--redis", valkey.url, "--json", cwd=tmp_path).told
    assert any(
        each["check"] == "serve" and "no record" in each["text"] and each["level"] == "fault"
        for each in told["lines"]
    )


def test_servers_of_the_worker_groups_here_are_found_by_redis(
    tmp_path: Path,
    simulator: SimulatorProcess,
    valkey: RedisServer,
    redis_client: "redis.Redis",
) -> None:
    here = GroupFigures(
        group=f"gpu5@{this_host()}",
        epoch="e",
        host=this_host(),
        pid=1,
        server=simulator.urls[0],
        state="ready",
    )
    elsewhere = msgspec.structs.replace(here, group="gpu5@other", epoch="f", host="other")
    # One whose server was stopped on purpose.
    waits = msgspec.structs.replace(here, group=f"gpu6@{this_host()}", epoch="g", state="down")
    write_record(
        tmp_path / ".headrace",
        ServerRecord(
            name=waits.group,
            gpus=(6,),
            url=simulator.urls[0],
            port=1,
            supervisor=Process(pid=1, started="no more"),
            state="stopped",
            log="gpu6.log",
        ),
    )
    Groups(redis_client).publish(here)
    Groups(redis_client).publish(elsewhere)
    Groups(redis_client).publish(waits)

    told = doctor("--redis", valkey.url, "--json", cwd=tmp_path).told

    tried = {each["part"] for each in told["lines"] if each["check"] == "token"}
    assert tried == {f"gpu5@{this_host()}"}


def test_too_few_descriptors_for_a_servers_slots_are_found(
    tmp_path: Path, simulator: SimulatorProcess
) -> None:
    command = [sys.executable, "-m", "workers", "doctor", "--server", simulator.urls[0], "--json"]
    ended = subprocess.run(
        ["bash", "-c", 'ulimit -n 180; exec "$@"', "-", *command, "--redis", NOWHERE],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    lines = json.loads(ended.stdout)["lines"]
    (line,) = (
        each for each in lines if each["part"] == "server" and each["check"] == "descriptors"
    )
    assert (line["level"], "79 requests" in line["text"]) == ("fault", True)
