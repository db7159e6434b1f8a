"""The supervisor of one server: launch, faults, orders, ends, and who comes after it."""

import asyncio
import errno
import os
import signal
import stat
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from common.errors import BackendError, ServerUnusableError, UsageError
from tests.support.supervised import (
    LIMIT_S,
    NAME,
    Supervised,
    marked,
    scheduler_of,
    supervised,
)
from tests.support.tls import TLS
from workers.supervisor import book, draining, supervisor
from workers.supervisor.plan import plan_launch
from workers.supervisor.processes import LogRoom
from workers.supervisor.records import ask
from workers.timing import Timing

pytestmark = pytest.mark.anyio

QUICK = Timing(ask_again_s=0.1, load_every_s=0.2, stall_s=1.0, probe_s=4.0)
"""Its probe is one that a slow machine answers in time."""


def pid_of(record: Any) -> int:
    assert record.server is not None
    return int(record.server.pid)


async def test_a_server_is_launched_watched_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with supervised(
        tmp_path, monkeypatch, arguments=("--max-running-requests", "40")
    ) as world:
        found = await world.ready()
        assert (found.version, found.strategy, found.cap) == ("0.5.23", "no_buffer", 40)
        assert (found.mamba_states, found.kv_tokens) == (216, 450_000)
        assert psutil.Process(pid_of(found)).environ()["CUDA_VISIBLE_DEVICES"] == "0"
        [line] = [text for text in caplog.messages if text.startswith(f"{NAME} is ready")]
        assert "SGLang 0.5.23, no_buffer, cap 40, 450,000 KV tokens, 216 mamba states" in line
        assert world.log.startswith("=== headrace launches SGLang 0.5.23 at ")
        assert "fired up" in world.log

        world.stop.ask(signal.SIGTERM)
        await world.ended()
        last = await world.until(lambda record: record.state == "stopped", "its end")
        assert last.server is None
        assert marked(tmp_path) == []


async def test_a_server_whose_scheduler_is_killed_is_launched_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervised(tmp_path, monkeypatch) as world:
        first = await world.ready()
        scheduler_of(pid_of(first)).send_signal(signal.SIGKILL)
        second = await world.ready(after=pid_of(first))
        assert second.restarts == 1
        assert any(
            record.state == "down" and "crashed with exit code -9" not in record.detail
            and "killed (SIGKILL)" in record.detail for record in world.seen
        )  # fmt: skip
        assert len(world.servers()) == 1


@pytest.mark.parametrize(
    ("version", "number"),
    [
        ("0.5.23", signal.SIGSTOP),
        # Before 0.5.10 a server outlives its scheduler, and answers nothing.
        ("0.5.9", signal.SIGKILL),
    ],
)
async def test_a_server_that_hangs_is_launched_anew_though_nobody_asks_it_for_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, number: signal.Signals
) -> None:
    async with supervised(tmp_path, monkeypatch, version, timing=QUICK) as world:
        first = await world.ready()
        scheduler_of(pid_of(first)).send_signal(number)
        second = await world.ready(after=pid_of(first))
        assert second.restarts >= 1
        assert any("no progress" in record.detail for record in world.seen)
        assert len(world.servers()) == 1


async def test_a_server_that_is_unwell_by_health_and_gives_tokens_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervised(tmp_path, monkeypatch, timing=QUICK) as world:
        first = await world.ready()
        async with httpx.AsyncClient(verify=TLS, base_url=world.url) as client:
            await client.post("/_sim/faults", json={"kind": "draining"})
            assert (await client.get("/health", timeout=60)).status_code == 503
            before = (await world.state())["served"]
            # Each is a look of the supervisor, after a stall of its own.
            await world.counts(lambda state: state["served"] >= before + 3)
        now = await world.ready()
        assert (pid_of(now), now.restarts) == (pid_of(first), 0)


# --- what cannot start ---------------------------------------------------------------------------


async def test_arguments_that_are_refused_are_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervised(tmp_path, monkeypatch, arguments=("--no-such-flag", "1")) as world:
        with pytest.raises(ServerUnusableError, match="unrecognized arguments: --no-such-flag"):
            await world.ended()
        assert world.log.count("=== headrace launches") == 1


async def test_a_start_that_fails_alike_three_times_is_given_up_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_SIM_BOOT", "crash")
    async with supervised(tmp_path, monkeypatch) as world:
        with pytest.raises(ServerUnusableError, match=r"3 times in a row: .*CUDA out of memory"):
            await world.ended()
        last = await world.until(lambda record: record.state == "failed", "the record of it")
        assert "nvidia-smi" in last.detail
        assert world.log.count("=== headrace launches") == 3
        assert marked(tmp_path) == []


async def test_a_start_that_hangs_is_cut_off_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = tmp_path / "boot"
    boot.write_text("hang")
    monkeypatch.setenv("HEADRACE_SIM_BOOT", str(boot))
    async with supervised(tmp_path, monkeypatch, start_limit_s=6.0) as world:
        await world.until(lambda record: "--start-limit" in record.detail, "the limit")
        boot.unlink()
        assert (await world.ready()).restarts >= 1


async def test_a_taken_port_is_refused_with_who_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with supervised(tmp_path, monkeypatch, port=port) as world:
            with pytest.raises(BackendError, match=rf"port {port} .*listens there"):
                await world.ended()


async def test_what_cannot_be_launched_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for changes, words in (
        ({"model": str(tmp_path / "models" / "none")}, "is not there"),
        ({"python": str(tmp_path / "python")}, "is not there"),
        ({"strategy": "extra_buffer_lazy", "python": "0.5.9"}, "does not have it yet"),
        ({"strategy": "best", "arguments": ("--mem-fraction-static", "most")}, "give a number"),
    ):
        world = Supervised(tmp_path, monkeypatch, "0.5.9")
        if changes.get("python") == "0.5.9":
            del changes["python"]
        world.begin(**changes)
        with pytest.raises(UsageError, match=words):
            await world.ended()
    assert marked(tmp_path) == []


def test_what_a_request_costs_follows_the_types_that_sglang_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Supervised(tmp_path, monkeypatch)
    types = ("--mamba-ssm-dtype", "bfloat16", "--kv-cache-dtype=fp8_e4m3")
    as_is = plan_launch(world.options()).shape
    told = plan_launch(world.options(arguments=types)).shape

    assert told.token_bytes is not None
    assert as_is.token_bytes == 2 * told.token_bytes
    assert told.state_bytes is not None
    assert as_is.state_bytes is not None
    assert 1.5 < as_is.state_bytes / told.state_bytes < 2


# --- orders --------------------------------------------------------------------------------------


async def test_an_order_is_carried_out_and_holds_for_the_next_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervised(tmp_path, monkeypatch) as world:
        first = await world.ready()
        order = ask(world.state_dir, NAME, strategy="no_radix")
        second = await world.ready(after=pid_of(first))
        assert (second.strategy, second.serial, second.refused) == ("no_radix", order.serial, "")
        assert "--disable-radix-cache" in psutil.Process(pid_of(second)).cmdline()

        world.stop.ask(signal.SIGTERM)
        await world.ended()
        world.begin()
        third = await world.ready(after=pid_of(second))
        assert third.strategy == "no_radix"
        world.stop.ask(signal.SIGTERM)
        await world.ended()
        world.begin(strategy="extra_buffer")
        fourth = await world.ready(after=pid_of(third))
        assert fourth.strategy == "extra_buffer"
        assert "other flags" in fourth.refused


async def test_an_order_that_does_not_start_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervised(tmp_path, monkeypatch) as world:
        first = await world.ready()
        good = ask(world.state_dir, NAME, strategy="extra_buffer")
        second = await world.ready(after=pid_of(first))
        assert second.serial == good.serial

        order = ask(world.state_dir, NAME, arguments=["--no-such-flag"])
        third = await world.ready(after=pid_of(second))
        assert (third.serial, third.strategy) == (order.serial, "extra_buffer")
        assert "unrecognized arguments" in third.refused

        late = ask(world.state_dir, NAME, strategy="fast", arguments=[])
        fourth = await world.ready(after=pid_of(third))
        assert fourth.serial == late.serial
        assert "--strategy fast" in fourth.refused


# --- its end -------------------------------------------------------------------------------------


async def generate(world: Supervised, tokens: int) -> httpx.Response:
    ask_for = {"input_ids": [1], "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
    async with httpx.AsyncClient(verify=TLS, timeout=90) as client:
        return await client.post(f"{world.url}/generate", json=ask_for)


async def test_open_requests_end_before_the_server_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervised(tmp_path, monkeypatch) as world:
        await world.ready()
        # Some seconds long.
        request = asyncio.create_task(generate(world, 2000))
        await world.counts(lambda state: state["running"] == 1)
        world.stop.ask(signal.SIGTERM)
        answer = await request
        assert answer.status_code == 200
        await world.ended()


@pytest.mark.parametrize("how", ["limit", "hurry"])
async def test_nobody_waits_for_an_open_request_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    limit_s = 1.0 if how == "limit" else 1000.0
    async with supervised(
        tmp_path, monkeypatch, drain_limit_s=limit_s, env={"HEADRACE_SIM_SPEED": "1"}
    ) as world:
        await world.ready()
        # Some minutes long.
        request = asyncio.create_task(generate(world, 5000))
        await world.counts(lambda state: state["running"] == 1)
        world.stop.ask(signal.SIGTERM)
        if how == "hurry":
            await world.until(lambda record: record.state == "draining", "its draining")
            world.stop.ask(signal.SIGTERM)
        await world.ended()
        with pytest.raises(httpx.TransportError):
            await request
        assert marked(tmp_path) == []


async def test_a_version_that_never_ends_by_itself_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "IDLE_S", 1.0)
    monkeypatch.setattr(draining, "LOAD_EVERY_S", 0.1)
    async with supervised(tmp_path, monkeypatch, "0.5.12.post1", drain_limit_s=1000.0) as world:
        await world.ready()
        async with httpx.AsyncClient(verify=TLS, timeout=60) as client:
            refused = {"input_ids": [1], "sampling_params": {"temperature": -1}}
            answer = await client.post(f"{world.url}/generate", json=refused)
        assert answer.status_code in {400, 500}
        world.stop.ask(signal.SIGTERM)
        await world.ended()
        assert marked(tmp_path) == []


async def test_a_server_over_its_memory_is_drained_and_launched_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "SELDOM_S", 0.2)
    async with supervised(tmp_path, monkeypatch, rss_limit_bytes=1_000_000) as world:
        first = await world.ready()
        await world.ready(after=pid_of(first))
        assert any("memory" in record.detail for record in world.seen)
        assert len(world.servers()) == 1


# --- who comes after it --------------------------------------------------------------------------


async def test_the_next_supervisor_takes_a_server_over_that_it_would_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervised(tmp_path, monkeypatch) as world:
        first = await world.ready()
        await world.leave()
        world.begin()
        await world.until(lambda record: record.restarts == 0 and record.state == "starting", "it")
        second = await world.ready()
        assert second.server == first.server
        assert second.started_at == first.started_at
        world.stop.ask(signal.SIGTERM)
        await world.ended()
        assert marked(tmp_path) == []


async def test_the_next_supervisor_ends_a_server_that_it_would_launch_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervised(tmp_path, monkeypatch) as world:
        first = await world.ready()
        await world.leave()
        world.begin(strategy="no_radix")
        second = await world.ready(after=pid_of(first))
        assert second.strategy == "no_radix"
        assert [each.pid for each in world.servers()] == [pid_of(second)]


async def test_the_next_supervisor_ends_what_is_left_of_a_server_that_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervised(tmp_path, monkeypatch) as world:
        first = await world.ready()
        await world.leave()
        orphan = scheduler_of(pid_of(first))
        # It ends with its parent otherwise: a pipe is closed then.
        orphan.suspend()
        psutil.Process(pid_of(first)).kill()
        world.begin()
        second = await world.ready(after=pid_of(first))
        assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
        assert [each.pid for each in world.servers()] == [pid_of(second)]


# --- its log and its key -------------------------------------------------------------------------


async def test_the_next_supervisor_ends_a_server_of_which_a_full_disk_took_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with supervised(tmp_path, monkeypatch) as world:
        first = await world.ready()
        with monkeypatch.context() as disk:
            disk.setattr(book, "write_record", full)
            psutil.Process(pid_of(first)).kill()
            async with asyncio.timeout(LIMIT_S):
                while len(world.launched) < 2:  # noqa: ASYNC110 - no record tells
                    await asyncio.sleep(0.02)
            await world.leave()
        unknown = world.launched[1].first.pid

        world.begin()
        third = await world.ready(after=pid_of(first))

        # It had the port, and the GPU.
        assert pid_of(third) != unknown
        assert [each.pid for each in world.servers()] == [pid_of(third)]
        assert f"(pid {unknown}) of which there is no record" in caplog.text


async def test_the_log_goes_on_when_who_writes_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "SELDOM_S", 0.2)
    async with supervised(tmp_path, monkeypatch) as world:
        first = await world.ready()
        await world.leave()
        assert first.log_writer is not None
        psutil.Process(first.log_writer.pid).kill()
        world.begin()
        second = await world.until(
            lambda record: record.state == "ready" and record.log_writer != first.log_writer,
            "another writer",
        )
        assert second.server == first.server
        # Written by the server now, and once more by no other.
        world.stop.ask(signal.SIGTERM)
        await world.ended()
        assert world.log.count("SIGTERM received") == 1


async def test_the_key_is_in_no_list_of_processes_and_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = 'made up "key" \\ for tests'
    async with supervised(tmp_path, monkeypatch, api_key=key) as world:
        await world.until(lambda record: record.server is not None, "its process")
        files = list((world.state_dir / "servers").glob("*.yaml"))
        assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
        found = await world.ready()
        assert (await generate(world, 1)).status_code == 401
        server = psutil.Process(pid_of(found))
        assert key not in " ".join(server.cmdline())
        assert not list((world.state_dir / "servers").glob("*.yaml"))
        assert holding(tmp_path, key) == []


def holding(folder: Path, text: str) -> list[Path]:
    """All files below a folder that hold a text, sockets and simulated pythons left out."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if text.encode() in path.read_bytes()]


def test_there_is_room_for_days_of_a_servers_log() -> None:
    room = LogRoom()
    assert 100e6 < room.most_bytes * (1 + room.files) < 1e9
