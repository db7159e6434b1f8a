"""The command: its options, what it prints, how it ends, and the log lines in SGLang's shape."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.tls import TLS
from workers.simulator.launch import SimulatorProcess

COMMAND = [sys.executable, "-m", "workers.simulator"]
# A connection for each request, so that none is a leftover of another test's server.
HTTP = httpx.Client(verify=TLS, timeout=30, limits=httpx.Limits(max_keepalive_connections=0))
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4_000}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=30, check=False
    )


def test_it_says_where_it_listens_and_that_it_is_ready() -> None:
    with SimulatorProcess(servers=2, strategy="extra_buffer") as simulator:
        simulator.terminate()
        said = simulator.messages().splitlines()
        lines = [f"simulating SGLang 0.5.23 at {url} (cap 32, extra_buffer)"
                 for url in simulator.urls]  # fmt: skip

    assert said == [*lines, "ready"]


def test_sigterm_ends_it_at_once_and_well() -> None:
    with SimulatorProcess(servers=1, latency="1000") as simulator:
        with pytest.raises(httpx.ReadTimeout):
            HTTP.post(simulator.urls[0] + CHAT, json=BODY, timeout=0.1)

        assert simulator.terminate() == 128 + signal.SIGTERM


def test_it_ends_with_whoever_started_it() -> None:
    with SimulatorProcess(servers=1) as simulator:
        process = simulator.process
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()

        assert process.wait(10) == 0


def test_it_listens_on_the_loopback_only() -> None:
    with SimulatorProcess(servers=1) as simulator, socket.socket() as other:
        # Another address of this machine is still free at that port.
        other.bind(("127.0.0.2", simulator.ports[0]))


def test_a_port_that_is_taken_is_named_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        ended = run("--ports", str(taken.getsockname()[1]))

    assert ended.returncode == 1
    assert "cannot listen" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--latency", "often"], "is not a distribution"),
        (["--answer-tokens", "lognormal:5"], "lognormal takes 2"),
        (["--fault", "no_such"], "unknown fault kind"),
        (["--slow", "2"], "INDEX:FACTOR"),
        (["--sglang-version", "new"], "is not a version"),
        (["--ports", "x"], "is not a list of ports"),
        (["--cap", "0"], "is not in the range"),
    ],
)
def test_a_wrong_option_is_explained(arguments: list[str], says: str) -> None:
    ended = run(*arguments)

    assert ended.returncode == 2
    assert says in " ".join(ended.stderr.split())


# --- SGLang's own log ----------------------------------------------------------------------------

RECORDED = Path(__file__).parents[1] / "data" / "sglang" / "0.5.23" / "mamba_limited_lines.txt"


def fields(line: str) -> list[str]:
    """The names in a log line, in order, without its time."""
    text = line.split("] ", 1)[1]
    return re.findall(r"(?:^|, )([^,:=]+?)(?:: |=|,|$)", text)


def lines_of(text: str, kind: str) -> list[str]:
    return [line for line in text.splitlines() if f"] {kind}" in line]


def test_log_lines_have_the_recorded_fields(tmp_path: Path) -> None:
    log = tmp_path / "sglang-{port}.log"
    options = {"speed": "100", "answer_tokens": "2000", "sglang_log": str(log)}
    with SimulatorProcess(log=None, faults=(), servers=2, **options) as simulator:
        HTTP.post(simulator.urls[1] + CHAT, json=BODY, timeout=30)
        written = (tmp_path / f"sglang-{simulator.ports[1]}.log").read_text()
        idle = (tmp_path / f"sglang-{simulator.ports[0]}.log").read_text()

    # A GPU says `cuda graph` where the recording on a CPU says `cpu graph`.
    recorded = RECORDED.read_text().replace("cpu graph", "cuda graph")
    for kind in ("Prefill batch", "Decode batch"):
        assert fields(lines_of(written, kind)[0]) == fields(lines_of(recorded, kind)[0])
    assert "max_running_requests=72, context_len=32768" in written
    assert "The server is fired up and ready to roll!" in idle
    assert not lines_of(idle, "Decode batch")


def test_a_cap_below_what_was_asked_is_warned_of_as_recorded(tmp_path: Path) -> None:
    log = tmp_path / "sglang.log"
    options = {"mamba_states": "12", "max_running_requests": "32", "sglang_log": str(log)}
    with SimulatorProcess(log=None, faults=(), servers=1, **options) as simulator:
        info = HTTP.get(simulator.urls[0] + "/server_info").json()

    warning = RECORDED.read_text().splitlines()[0].split("] ", 1)[1]
    assert warning in log.read_text()
    assert info["max_running_requests"] == 32
    assert info["internal_states"][0]["effective_max_running_requests_per_dp"] == 4
