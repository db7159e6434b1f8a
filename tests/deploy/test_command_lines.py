"""Every command line in deploy/ is read by the flags that the programs have today."""

from pathlib import Path
from typing import Any

import click
import pytest

import producer.cli
import workers.cli
from common.errors import UsageError
from common.settings import Settings
from tests.support import deployed
from tests.support.deployed import DEPLOY, Shown
from workers.commands.serve import KILL_S
from workers.node.processes import KILL_MARGIN_S

PROGRAMS: dict[str, click.Group] = {"producer": producer.cli.cli, "workers": workers.cli.cli}

ENDS_S = 20.0
"""What a worker group or sink takes beyond its grace: aborts, Redis, RQ's record."""


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of whoever runs the tests."""
    for name in ("HEADRACE_CONFIG", "HEADRACE_REDIS", "HEADRACE_GPU", "HEADRACE_SERVE_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def read(each: Shown) -> dict[str, Any]:
    """Let click read a line as the program would; gives what the command would get."""
    program = PROGRAMS[each.argv[0]]
    outer = click.Context(program, info_name=each.argv[0])
    _, command, rest = program.resolve_command(outer, list(each.argv[1:]))
    assert command is not None
    config = ["--config", str(each.config)] if each.config else []
    with command.make_context(each.argv[1], [*rest, *config]) as ctx:
        return dict(ctx.params)


def judged(lines: list[Shown]) -> list[str]:
    """What is wrong with each of the lines."""
    wrong = []
    for each in lines:
        try:
            read(each)
        except (click.ClickException, UsageError) as error:
            wrong.append(f"{each.where}: {' '.join(each.argv)}: {error}")
    return wrong


def test_the_command_lines_of_units_and_compose_are_read() -> None:
    lines = deployed.shown()

    assert {each.argv[:2] for each in lines} >= {
        ("workers", "serve"),
        ("workers", "start"),
        ("workers", "sink"),
        ("workers", "up"),
        ("workers", "simulate"),
    }
    assert judged(lines) == []


@pytest.mark.parametrize("folder", ["base", "autoscaling"])
def test_the_command_lines_of_the_manifests_are_read(folder: str, tmp_path: Path) -> None:
    lines = deployed.of_kubernetes(deployed.kustomized(folder, tmp_path))

    assert {each.argv[:2] for each in lines} == {
        ("workers", "serve"),
        ("workers", "start"),
        ("workers", "sink"),
    }
    assert judged(lines) == []


def needs_s(each: Shown) -> float:
    """How long a command may take to end, by what it is told."""
    told = read(each)
    if each.argv[1] == "serve":
        return float(told["drain_limit_s"]) + KILL_S
    if each.argv[1] == "up":
        # Worker groups first, then servers and sink; it kills what does not end.
        serve = read(Shown("", ("workers", "serve", "--gpu", "0"), config=each.config))
        servers_s = float(serve["drain_limit_s"]) + KILL_S
        return float(told["grace_s"]) + servers_s + 2 * KILL_MARGIN_S + ENDS_S
    return float(told.get("grace_s") or 0.0) + ENDS_S


def test_whoever_ends_us_waits_longer_than_we_take(tmp_path: Path) -> None:
    lines = deployed.shown() + deployed.of_kubernetes(deployed.kustomized("base", tmp_path))
    timed = [each for each in lines if each.grace_s is not None]

    assert len(timed) > 8
    assert [each.where for each in timed if needs_s(each) > (each.grace_s or 0.0)] == []


def test_a_pod_has_time_for_its_worker_group_and_then_for_its_server(tmp_path: Path) -> None:
    lines = deployed.of_kubernetes(deployed.kustomized("base", tmp_path))
    pod = [each for each in lines if "workers/" in each.where]

    assert len(pod) == 2
    assert sum(map(needs_s, pod)) <= (pod[0].grace_s or 0.0)


@pytest.mark.parametrize("path", [DEPLOY / "headrace.toml", *DEPLOY.glob("*/*/headrace.toml")])
@pytest.mark.parametrize("program", PROGRAMS)
def test_an_example_of_settings_holds_nothing_unknown(program: str, path: Path) -> None:
    group = PROGRAMS[program]
    known = group.list_commands(click.Context(group))
    for name in known:
        command = group.get_command(click.Context(group), name)
        assert command is not None
        Settings(path).values_for(command, program=program, name=name, known=known)
