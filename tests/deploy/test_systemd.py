"""The units of deploy/systemd: read by systemd, and their commands run as it would run them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.queue import Groups
from tests.support import deployed
from tests.support.deployed import BIN, SYSTEMD, Unit
from tests.support.fleet import Fleet, write_prompts
from tests.support.server_process import ServerProcess, free_port, wait_until
from tests.support.skips import skip_cannot_run
from tests.support.supervised import HYBRID, marked
from tests.support.up_node import environment
from tests.support.watching import exit_code, open_now
from workers.simulator.environment import simulated_python
from workers.supervisor.records import ServerRecord, read_record

pytestmark = pytest.mark.timeout(600)

LIMIT_S = 180.0
RUN = "job"


def test_systemd_reads_the_units_without_a_word(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        skip_cannot_run("systemd is not installed, and only root can do that")
    for path in SYSTEMD.iterdir():
        if path.suffix in {".service", ".target"}:
            # It looks for the programs too, and theirs is not installed here.
            text = re.sub(rf"{BIN}\w+", sys.executable, path.read_text())
            (tmp_path / path.name).write_text(text)

    done = subprocess.run(
        [analyze, "verify", "--man=no", *sorted(map(str, tmp_path.iterdir()))],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("unit", deployed.services(), ids=lambda unit: unit.name)
def test_a_unit_starts_again_what_may_pass_and_not_what_stays_wrong(unit: Unit) -> None:
    again = unit.codes("RestartPreventExitStatus")

    assert unit.one("Restart") == "always"
    # What cannot be used (4) may come back; wrong settings (2, 3) and conflicts (5) stay.
    assert again == {2, 3, 5}
    assert unit.codes("SuccessExitStatus") == {128 + n for n in (1, 2, 15)}
    assert unit.one("StartLimitIntervalSec") == "0"
    assert float(unit.one("RestartSec")) >= 5
    # One is told, and tells its children: SGLang's many processes end at once where all are told.
    # What runs servers leaves them at work when it dies, for its next life to take over.
    runs_servers = unit.command("0")[1] in {"serve", "up"}
    assert unit.one("KillMode") == ("process" if runs_servers else "mixed")
    assert "User" in unit.settings


def test_a_worker_group_outlives_its_server_and_stops_before_it() -> None:
    group = deployed.units()["headrace-group@.service"]
    server = "headrace-server@%i.service"

    assert server in group.one("After")
    assert server in group.one("Wants")
    for tie in ("PartOf", "Requires", "BindsTo", "Requisite"):
        assert server not in " ".join(group.settings.get(tie, []))


def test_units_that_reach_a_gpu_keep_its_devices() -> None:
    for unit in deployed.services():
        if unit.command("0")[1] in {"serve", "up"}:
            taken = {"PrivateDevices", "ProtectClock", "DevicePolicy", "MemoryDenyWriteExecute"}
            assert taken & unit.settings.keys() == set(), unit.name


# --- run as systemd would ------------------------------------------------------------------------


def settings(fleet: Fleet, folder: Path, toml: str) -> dict[str, str]:
    """What the EnvironmentFile= lines give, for this deployment."""
    (folder / "headrace.toml").write_text(toml)
    read = dict(
        line.split("=", 1)
        for line in (SYSTEMD / "headrace.env").read_text().splitlines()
        if line and line[0] != "#"
    )
    assert set(read) == {"HEADRACE_CONFIG", "HEADRACE_STATE_DIR"}
    return {
        **fleet.env,
        "HEADRACE_CONFIG": str(folder / "headrace.toml"),
        "HEADRACE_STATE_DIR": str(folder / "state"),
    }


def run_unit(unit: Unit, instance: str, folder: Path, env: dict[str, str]) -> ServerProcess:
    """Start what ExecStart= says, by this checkout's program."""
    program, *rest = unit.command(instance)
    words = [sys.executable, "-m", program.removeprefix(BIN), *rest]
    return ServerProcess(words, log=folder / f"{unit.name}.log", env=env)


def test_worker_group_and_sink_run_by_their_units_and_end_as_told(tmp_path: Path) -> None:
    units = deployed.units()
    prompts = write_prompts(tmp_path / "job.jsonl", 60)
    with Fleet(tmp_path, latency="fixed:0.5", cap=4) as fleet:
        toml = (
            f'[workers.start]\nserver = "{fleet.simulator.urls[0]}"\nramp = 1000\n'
            "[workers.sink]\nfirst_batch_seconds = 1\nbatch_seconds = 1\n"
        )
        env = settings(fleet, tmp_path, toml)
        fleet.enqueue(prompts)
        group = run_unit(units["headrace-group@.service"], "0", tmp_path, env)
        sink = run_unit(units["headrace-sink.service"], "", tmp_path, env)
        fleet.processes |= {"group": group, "sink": sink}
        fleet.wait(lambda: open_now(fleet) >= 4, "open requests", LIMIT_S)

        assert [each.group.split("@")[0] for each in Groups(fleet.client).fresh()] == ["gpu0"]

        # KillMode=mixed tells the first process alone.
        group.send(signal.SIGTERM)
        wait_until(lambda: not group.alive(), "the end of the worker group", LIMIT_S)
        del fleet.processes["group"]
        ended = fleet.counts(RUN)
        fleet.wait(lambda: fleet.counts(RUN).stream_entries == 0, "results in the store", LIMIT_S)
        sink.send(signal.SIGTERM)
        wait_until(lambda: not sink.alive(), "the end of the sink", LIMIT_S)
        del fleet.processes["sink"]

        assert (ended.in_flight, ended.failed) == (0, 0)
        assert ended.completed == fleet.prompt_requests() == len(fleet.rows())
        assert (tmp_path / "state" / RUN / "progress.json").exists()
        for name, process in (("headrace-group@", group), ("headrace-sink", sink)):
            code = exit_code(process)
            assert code in units[f"{name}.service"].codes("SuccessExitStatus"), name


def test_a_server_runs_by_its_unit_and_is_taken_over_by_its_next_life(tmp_path: Path) -> None:
    unit = deployed.units()["headrace-server@.service"]
    python, model = simulated_python(tmp_path / "sim"), tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(HYBRID))
    toml = f'[workers.serve]\nmodel = "{model}"\npython = "{python}"\nport = {free_port()}\n'
    with Fleet(tmp_path) as fleet:
        env = {**settings(fleet, tmp_path, toml), **environment(fleet)}
        env |= {"HEADRACE_SIM_LOAD": "0", "HEADRACE_SIM_SPEED": "50"}
        env |= {"HEADRACE_SIM_LOG": str(tmp_path / "requests")}

        def ready(by: ServerProcess) -> ServerRecord | None:
            assert by.alive(), by.tail()
            found = read_record(tmp_path / "state", f"gpu0@{env['HEADRACE_HOST']}")
            good = found and found.supervisor.pid == by.pid and found.state == "ready"
            return found if good else None

        try:
            first = run_unit(unit, "0", tmp_path, env)
            wait_until(lambda: ready(first) is not None, "a server", LIMIT_S)
            before = ready(first)
            # KillMode=process: the server is left.
            first.kill()
            again = run_unit(unit, "0", tmp_path, env)
            wait_until(lambda: ready(again) is not None, "the server again", LIMIT_S)
            after = ready(again)
            assert before is not None
            assert after is not None
            assert before.server == after.server

            again.send(signal.SIGTERM)
            wait_until(lambda: not again.alive(), "its end", LIMIT_S)

            assert exit_code(again) in unit.codes("SuccessExitStatus")
            assert marked(tmp_path) == []
        finally:
            for process in marked(tmp_path):
                process.kill()


def test_a_node_runs_by_its_unit(tmp_path: Path) -> None:
    unit = deployed.units()["headrace-node.service"]
    prompts = write_prompts(tmp_path / "job.jsonl", 30)
    with Fleet(tmp_path, latency="fixed:0.05", cap=4) as fleet:
        toml = f'[workers.up]\nattach = "{fleet.simulator.ports[0]}"\ngpu = "0"\n'
        env = {**settings(fleet, tmp_path, toml), **environment(fleet)}
        fleet.enqueue(prompts)

        node = run_unit(unit, "", tmp_path, env)
        fleet.processes["node"] = node
        fleet.wait_done(RUN)
        node.send(signal.SIGTERM)
        wait_until(lambda: not node.alive(), "its end", LIMIT_S)
        del fleet.processes["node"]

        assert exit_code(node) in unit.codes("SuccessExitStatus")
        assert (fleet.counts(RUN).completed, len(fleet.rows())) == (30, 30)


def test_headrace_do_calls_a_command_with_the_settings_of_the_units(tmp_path: Path) -> None:
    for name, text in (("headrace.env", "HEADRACE_STATE_DIR=state\n"), ("secrets.env", "A=b c\n")):
        (tmp_path / name).write_text(text.replace("b c", "'b c'"))
    (tmp_path / "state").mkdir()
    # `id` says who calls; here nobody is called headrace.
    (tmp_path / "id").write_text("#!/bin/sh\necho headrace\n")
    (tmp_path / "id").chmod(0o755)

    done = subprocess.run(
        [SYSTEMD / "headrace-do", "sh", "-c", 'echo "$A in $PWD"'],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "HEADRACE_ETC": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == f"b c in {tmp_path / 'state'}\n"
