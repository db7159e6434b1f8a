"""A simulated SGLang that is started as the real one is, and its ways to start, hang and end."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.server_process import ServerProcess, free_port, wait_until
from tests.support.tls import TLS
from workers.simulator.environment import simulated_python
from workers.simulator.log import read_log

NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")
CHAT = "/v1/chat/completions"
HTTP = httpx.Client(verify=TLS, limits=httpx.Limits(max_keepalive_connections=0))
QUICK = {"HEADRACE_SIM_LOAD": "0", "HEADRACE_SIM_SPEED": "50"}


class Launched:
    """One of them, and how to look at it."""

    def __init__(
        self, folder: Path, version: str, flags: tuple[str, ...], env: dict[str, str]
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.requests = folder / "requests.jsonl"
        python = simulated_python(folder / "sim", version)
        arguments = ["--model-path", "models/tiny", "--port", str(self.port), *flags]
        self.process = ServerProcess(
            [python, "-m", "sglang.launch_server", *arguments],
            log=folder / "server.log",
            env={**os.environ, "HEADRACE_SIM_LOG": str(self.requests), **QUICK, **env},
        )

    def get(self, path: str) -> httpx.Response | None:
        try:
            return HTTP.get(self.url + path, timeout=30)
        except httpx.TransportError:
            return None

    def ready(self) -> None:
        wait_until(lambda: (said := self.get("/health")) is not None and said.status_code == 200,
                   f"a server that is ready ({self.process.tail()})")  # fmt: skip

    def scheduler(self) -> psutil.Process:
        [child] = psutil.Process(self.process.pid).children()
        assert "sglang::scheduler" in child.cmdline()
        return child

    def says(self, text: str) -> None:
        wait_until(lambda: text in self.process.log.read_text(), f"the line {text!r}")

    def ask_later(self, max_tokens: int) -> list[Any]:
        """Send a request in a thread; its answer, or its error, comes into the list."""
        answers: list[Any] = []

        def ask() -> None:
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": max_tokens,
                    "ignore_eos": True}  # fmt: skip
            try:
                answers.append(HTTP.post(self.url + CHAT, json=body, timeout=100))
            except httpx.TransportError as error:
                answers.append(error)

        threading.Thread(target=ask, daemon=True).start()
        wait_until(lambda: len(read_log(self.requests).served) > 0, "its arrival")
        return answers


Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started: list[Launched] = []

    def start(*flags: str, version: str = "0.5.23", **env: str) -> Launched:
        started.append(Launched(tmp_path, version, flags, env))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()


def test_its_python_says_which_sglang_it_has(tmp_path: Path) -> None:
    python = simulated_python(tmp_path, "0.5.12.post1")
    asks = "import sglang; from importlib.metadata import version; print(version('sglang'))"
    said = subprocess.run(
        [python, "-c", asks + "; print(sglang.__version__)"], capture_output=True, check=True
    )
    assert said.stdout.split() == [b"0.5.12.post1", b"0.5.12.post1"]
    assert simulated_python(tmp_path, "0.5.12.post1") == python


def test_it_ends_with_2_at_an_unknown_flag(launch: Launch) -> None:
    server = launch("--mamba-scheduler-strategy", "no_buffer")
    wait_until(lambda: not server.process.alive(), "its end")
    assert "sglang serve: error: unrecognized arguments" in server.process.tail()


def test_it_serves_with_its_flags_and_tells_them(launch: Launch) -> None:
    server = launch(*NO_BUFFER, "--served-model-name", "q", "--context-length", "4096")
    server.ready()

    info = HTTP.get(server.url + "/server_info").json()
    [load] = HTTP.get(server.url + "/v1/loads").json()["loads"]
    assert load["max_running_requests"] == 72
    assert info["disable_overlap_schedule"] is True
    assert info["mamba_radix_cache_strategy"] == "no_buffer"
    assert info["context_length"] == 4096
    models = HTTP.get(server.url + "/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["q"]
    # Without --enable-metrics the route is not there.
    assert HTTP.get(server.url + "/metrics").status_code == 404
    server.says("max_running_requests=72")
    server.says("The server is fired up and ready to roll!")


def test_the_port_is_closed_while_it_loads(launch: Launch) -> None:
    server = launch(HEADRACE_SIM_LOAD="100000")
    server.says("Load weight begin")
    assert server.get("/health") is None
    server.process.send(signal.SIGTERM)
    wait_until(lambda: not server.process.alive(), "its end")


def test_sigterm_lets_open_requests_end_and_then_it_kills_itself(launch: Launch) -> None:
    server = launch(*NO_BUFFER, HEADRACE_SIM_SPEED="4")
    server.ready()
    answers = server.ask_later(300)

    server.process.send(signal.SIGTERM)
    server.says("SIGTERM received")
    wait_until(lambda: (said := server.get("/health")) is None or said.status_code == 503, "503")
    wait_until(lambda: not server.process.alive(), "its end")

    assert [answer.status_code for answer in answers] == [200]
    assert read_log(server.requests).outcomes == {"length": 1}


def test_versions_that_refused_a_request_never_end_by_themselves(launch: Launch) -> None:
    server = launch(version="0.5.12.post1")
    server.ready()
    assert HTTP.post(server.url + CHAT, json={"messages": []}).status_code == 400

    server.process.send(signal.SIGTERM)
    server.says("Gracefully exiting... Remaining number of requests 1")
    # Its looks come every 5 s of its own time; several have passed.
    wait_until(lambda: server.process.log.read_text().count("Gracefully exiting") > 5, "looks")
    assert server.process.alive()


def test_a_killed_scheduler_takes_the_server_with_it(launch: Launch) -> None:
    server = launch(HEADRACE_SIM_SPEED="5")
    server.ready()
    answers = server.ask_later(30_000)

    server.scheduler().kill()
    wait_until(lambda: not server.process.alive(), "its end")

    server.says("crashed with exit code -9. Triggering SIGQUIT")
    wait_until(lambda: len(answers) == 1, "the end of the request")
    assert isinstance(answers[0], httpx.TransportError)
    assert read_log(server.requests).outcomes == {"died": 1}


def test_before_the_watchdog_came_it_stays_as_a_zombie(launch: Launch) -> None:
    server = launch(version="0.5.9")
    server.ready()
    server.scheduler().kill()
    wait_until(lambda: (said := server.get("/health")) is not None and said.status_code == 503,
               "a server that is sick")  # fmt: skip
    assert server.process.alive()


def test_a_stopped_scheduler_hangs_the_server_and_goes_on(launch: Launch) -> None:
    server = launch("--enable-metrics")
    server.ready()
    server.scheduler().suspend()
    wait_until(lambda: (said := server.get("/health")) is not None and said.status_code == 503,
               "a server that hangs")  # fmt: skip
    assert HTTP.get(server.url + "/metrics").status_code == 200
    with pytest.raises(httpx.ReadTimeout):
        HTTP.get(server.url + "/v1/loads", timeout=0.5)

    server.scheduler().resume()
    server.ready()
    assert HTTP.get(server.url + "/v1/loads").status_code == 200


def test_its_scheduler_ends_with_it(launch: Launch) -> None:
    server = launch()
    server.ready()
    scheduler = server.scheduler()
    server.process.kill()
    wait_until(lambda: not scheduler.is_running(), "the end of its scheduler")


@pytest.mark.parametrize("boot", ["crash", "file"])
def test_a_start_can_go_wrong(launch: Launch, tmp_path: Path, boot: str) -> None:
    (tmp_path / "boot").write_text("crash\n")
    server = launch(HEADRACE_SIM_BOOT=str(tmp_path / "boot") if boot == "file" else boot)
    wait_until(lambda: not server.process.alive(), "its end")
    assert "Scheduler hit an exception" in server.process.log.read_text()


def test_a_taken_port_is_found_when_the_weights_are_there(launch: Launch) -> None:
    first = launch()
    first.ready()
    second = launch("--port", str(first.port))
    wait_until(lambda: not second.process.alive(), "its end")
    assert "address already in use" in second.process.log.read_text()
