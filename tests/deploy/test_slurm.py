"""deploy/slurm: read by bash and shellcheck, and run by bash with the signals that Slurm sends."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from common import connect
from tests.support.deployed import DEPLOY, SLURM, call, tool
from tests.support.fleet import Fleet, write_prompts
from tests.support.redis_server import binary_of
from tests.support.server_process import ServerProcess, free_port, wait_until
from tests.support.up_node import environment
from tests.support.watching import exit_code, open_now
from workers.commands.serve import KILL_S
from workers.node.processes import KILL_MARGIN_S

pytestmark = pytest.mark.timeout(600)

LIMIT_S = 180.0

SCRIPTS = sorted(SLURM.glob("*.sbatch"))
NODE, QUEUE = SLURM / "node.sbatch", SLURM / "queue.sbatch"
LEAVES_S = 60.0 + KILL_S + 2 * KILL_MARGIN_S
"""What servers and a sink may take after open requests have ended; Slurm signals up to 60 s early,
never late."""

OPTIONS = {
    "job-name", "nodes", "ntasks", "exclusive", "gpus-per-node", "cpus-per-task", "mem", "time",
    "signal", "requeue", "open-mode", "output",
}  # fmt: skip
"""Those of sbatch that are used here, as its manual spells them."""

# What the commands do for these scripts: end when they are told, after a while; note it.
WORKERS = """#!/bin/sh
echo "workers $*" >>calls
echo "redis $HEADRACE_REDIS" >>calls
trap 'echo told >>calls; sleep 1; exit 143' TERM
echo up >>calls
while [ ! -e ended ]; do sleep 0.05; done
exit "$(cat ended)"
"""
REAL_WORKERS = f"""#!/bin/sh
exec {sys.executable} -m workers "$@"
"""
SCONTROL = """#!/bin/sh
echo "scontrol $*" >>calls
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_and_shellcheck_find_nothing(script: Path) -> None:
    call("bash", "-n", str(script))
    call(tool("shellcheck"), str(script))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_directives_are_sbatch_s_and_stand_before_any_command(script: Path) -> None:
    lines = script.read_text().splitlines()
    # sbatch reads none that comes after the first line which is no comment.
    first = next(at for at, line in enumerate(lines) if line and line[0] != "#")
    directives = [at for at, line in enumerate(lines) if line.startswith("#SBATCH")]
    found = {lines[at].split("--")[1].partition("=")[0] for at in directives}

    assert max(directives) < first
    assert found <= OPTIONS
    assert {"signal", "requeue", "time", "open-mode"} <= found


def test_the_signal_comes_early_enough_for_all_of_a_stop() -> None:
    text = NODE.read_text()
    early = re.search(r"(?m)^#SBATCH --signal=B:USR1@(\d+)$", text)
    grace = re.search(r"GRACE:-(\d+)", text)

    assert early is not None
    assert grace is not None
    assert int(early[1]) >= int(grace[1]) + LEAVES_S


# --- run -----------------------------------------------------------------------------------------


class Job:
    """A batch script as slurmd runs it: bash, in the folder where sbatch was called."""

    def __init__(self, folder: Path, script: Path, **env: str) -> None:
        self.folder = folder
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        clean = {name: value for name, value in os.environ.items() if "HEADRACE" not in name}
        # Slurm runs a copy, which lies elsewhere.
        copy = folder / "spooled"
        copy.write_bytes(script.read_bytes())
        self.process = ServerProcess(
            ["bash", copy],
            log=folder / "job.log",
            env={**clean, "PATH": path, "VENV": "none", "SLURM_JOB_ID": "77", **env},
        )

    def calls(self) -> list[str]:
        """What was called, in order."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, call: str) -> None:
        wait_until(lambda: call in self.calls(), f"{call} ({self.process.tail()})", LIMIT_S)

    def wait_end(self) -> int | None:
        wait_until(lambda: not self.process.alive(), "the end of the job", LIMIT_S)
        return exit_code(self.process)


Run = Callable[..., Job]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a job is called, with stand-ins for the commands."""
    (tmp_path / "bin").mkdir()
    for name, text in (("workers", WORKERS), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Iterator[Run]:
    """Starts jobs, and leaves none behind."""
    jobs: list[Job] = []

    def start(script: Path, **env: str) -> Job:
        jobs.append(Job(folder, script, **env))
        return jobs[-1]

    yield start
    for job in jobs:
        job.process.stop()


@pytest.mark.parametrize(
    ("ids", "job"),
    [({}, "77"), ({"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}, "70_3")],
)
def test_a_job_whose_time_is_up_drains_and_is_queued_again(
    folder: Path, run: Run, ids: dict[str, str], job: str
) -> None:
    (folder / "redis.address").write_text("redis://:passw0rd@cpu01:6399/0\n")
    # Its GPUs are the second half of a node's, which are 0 and 1 to whoever sees these alone.
    node = run(NODE, CUDA_VISIBLE_DEVICES="4,5", **ids)
    node.wait_for("up")

    # `--signal=B:` tells the batch shell alone.
    node.process.send(signal.SIGUSR1)

    assert node.wait_end() == 143
    assert node.calls() == [
        "workers up --gpu 0-1 --grace 240",
        "redis redis://:passw0rd@cpu01:6399/0",
        "up",
        "told",
        f"scontrol requeue {job}",
    ]


def test_a_job_that_is_told_to_stop_drains_and_is_not_queued_again(folder: Path, run: Run) -> None:
    node = run(NODE, GRACE="1000")
    node.wait_for("up")

    node.process.send(signal.SIGTERM)
    node.wait_for("told")
    node.process.send(signal.SIGTERM)

    assert node.wait_end() == 143
    assert node.calls() == [
        "workers up --gpu 0-7 --grace 1000",
        f"redis embedded:{folder}/redis",
        "up",
        *["told"] * node.calls().count("told"),
    ]


@pytest.mark.parametrize("code", [0, 1])
def test_a_job_ends_with_its_run(folder: Path, run: Run, code: int) -> None:
    node = run(NODE, RUN="prompts", MODEL="/models/a b")
    node.wait_for("up")

    (folder / "ended").write_text(str(code))

    assert node.wait_end() == code
    asked = "workers up --gpu 0-7 --model /models/a b --run prompts --until-done --grace 240"
    assert node.calls() == [asked, f"redis embedded:{folder}/redis", "up"]


def test_several_nodes_do_not_share_a_redis_of_one(run: Run) -> None:
    node = run(NODE, SLURM_ARRAY_TASK_ID="1", SLURM_ARRAY_JOB_ID="70")

    assert node.wait_end() == 2
    assert node.calls() == []
    assert "queue.sbatch" in node.process.log.read_text()


def test_a_job_serves_a_run_by_workers_up_until_it_is_told_and_then_to_its_end(
    tmp_path: Path,
) -> None:
    prompts = write_prompts(tmp_path / "job.jsonl", 24)
    with Fleet(tmp_path, latency="fixed:0.5", cap=4) as fleet:
        (tmp_path / "bin").mkdir()
        for name, text in (("workers", REAL_WORKERS), ("scontrol", SCONTROL)):
            (tmp_path / "bin" / name).write_text(text)
            (tmp_path / "bin" / name).chmod(0o755)
        (tmp_path / "headrace.toml").write_text(
            f'[workers.up]\nattach = "{fleet.simulator.ports[0]}"\n'
        )
        given = environment(fleet)
        settings = {name: given[name] for name in given if name.startswith(("HEADRACE", "PYTHON"))}
        fleet.enqueue(prompts)

        first = Job(tmp_path, NODE, RUN="job", CUDA_VISIBLE_DEVICES="0", **settings)
        fleet.processes["job"] = first.process
        fleet.wait(lambda: open_now(fleet) >= 4, "open requests", LIMIT_S)
        first.process.send(signal.SIGUSR1)
        wait_until(lambda: not first.process.alive(), "its end", LIMIT_S)
        stopped = fleet.counts("job")
        assert exit_code(first.process) == 143
        assert first.calls() == ["scontrol requeue 77"]
        assert (stopped.in_flight, stopped.failed) == (0, 0)
        assert stopped.completed == fleet.prompt_requests(), "what was open came to its end"
        assert stopped.completed < 24

        again = Job(tmp_path, NODE, RUN="job", CUDA_VISIBLE_DEVICES="0", **settings)
        fleet.processes["job"] = again.process
        wait_until(lambda: not again.process.alive(), "the end of the run", LIMIT_S)
        del fleet.processes["job"]

        assert exit_code(again.process) == 0
        assert (fleet.counts("job").completed, fleet.prompt_requests()) == (24, 24)
        assert again.calls() == ["scontrol requeue 77"]
        fleet.verify("job")


# --- Redis as a job ------------------------------------------------------------------------------


@pytest.fixture
def start_queue(folder: Path, run: Run) -> Callable[[], Job]:
    """Starts the job that has Redis, on a free port, by the pins' own Valkey."""
    binary = binary_of("valkey")
    assert binary is not None
    (folder / "bin" / "valkey-server").symlink_to(binary)
    return lambda: run(QUEUE, CONF=str(DEPLOY / "redis.conf"), PORT=str(free_port()))


def client_of(job: Job) -> "redis.Redis":
    """A client by the address that the job wrote down."""
    address = job.folder / "redis.address"
    wait_until(address.exists, f"an address ({job.process.tail()})", LIMIT_S)
    text = address.read_text().strip()
    # Its own name may lead nowhere here.
    url = re.sub(r"@[^:]+:", "@127.0.0.1:", text)

    def answers() -> bool:
        client = redis.Redis.from_url(url)
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()

    wait_until(answers, f"Redis ({job.process.tail()})", LIMIT_S)
    return connect.connect(url)


def test_redis_as_a_job_keeps_its_data_and_its_password_over_a_requeue(
    folder: Path, start_queue: Callable[[], Job]
) -> None:
    queue = start_queue()
    client = client_of(queue)
    client.set("key", "value")
    client.close()
    address = folder / "redis.address"
    assert address.stat().st_mode & 0o077 == 0
    password = address.read_text().split("@")[0]

    queue.process.send(signal.SIGUSR1)
    assert queue.wait_end() == 0
    assert queue.calls() == ["scontrol requeue 77"]
    assert list((folder / "redis").glob("appendonlydir/*.aof"))
    address.unlink()
    again = start_queue()

    client = client_of(again)
    assert client.get("key") == b"value"
    assert address.read_text().split("@")[0] == password
    client.close()
    again.process.send(signal.SIGTERM)
    assert again.wait_end() == 0
    assert queue.calls() == ["scontrol requeue 77"]


def test_slurm_scripts_are_what_the_readme_shows() -> None:
    shown = (DEPLOY / "slurm" / "README.md").read_text()

    assert all(script.name in shown for script in SCRIPTS)
