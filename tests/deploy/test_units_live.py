"""The units of deploy/systemd run by a real systemd; in the place of our programs stands a script.

What these programs do by the units' command lines is in test_systemd.py.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.deployed import BIN, SYSTEMD
from tests.support.own_systemd import LIMIT_S, OwnSystemd
from tests.support.server_process import wait_until

pytestmark = pytest.mark.timeout(400)

SERVER, GROUP, SINK = "headrace-server@0", "headrace-group@0", "headrace-sink"
NODE, TARGET = "headrace-node", "headrace.target"

# A manager of a user has no rights for these, and no files of an operator.
BEYOND_A_USER = re.compile(
    r"(?m)^(User|Protect\w+|Private\w+|Restrict\w+|NoNewPrivileges|LockPersonality|OOMPolicy"
    r"|CapabilityBoundingSet|SystemCall\w+|Limit\w+|TasksMax|ExecStartPre|Environment\w*)=.*\n"
)

PROGRAM = """#!/bin/bash
say() { echo "$1 $name" >>JOURNAL; }
name=$1
say start
sleep 1000 &
child=$!
trap 'say told; kill "$child"; sleep 0.2; say end; exit 143' TERM
trap 'exit 2' USR1
trap 'exit 4' USR2
while :; do wait; done
"""


class Live:
    """A systemd with our units, and what happened to their programs."""

    def __init__(self, folder: Path, manager: OwnSystemd) -> None:
        self._journal = folder / "journal"
        self.manager = manager

    def events(self) -> list[str]:
        return self._journal.read_text().splitlines() if self._journal.exists() else []

    def wait_for(self, *events: str) -> None:
        """Wait until each of these has happened as often as it is named."""

        def happened() -> bool:
            seen = self.events()
            return all(seen.count(event) >= events.count(event) for event in events)

        wait_until(happened, f"{events}: {self.events()}", LIMIT_S)

    def wait_states(self, **wanted: str) -> None:
        """Wait for states of units, by SERVER … without a dash."""
        names = {"server": SERVER, "group": GROUP, "sink": SINK, "node": NODE}
        units = [names[name] for name in wanted]
        wait_until(
            lambda: self.manager.states(units) == list(wanted.values()),
            f"{wanted}: {self.manager.states(units)}",
            LIMIT_S,
        )


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    units = tmp_path / "units"
    units.mkdir()
    program = tmp_path / "program"
    program.write_text(PROGRAM.replace("JOURNAL", str(tmp_path / "journal")))
    program.chmod(0o755)
    for path in [*SYSTEMD.glob("*.service"), *SYSTEMD.glob("*.target")]:
        text = BEYOND_A_USER.sub("", path.read_text())
        text = re.sub(rf"{BIN}\w+", str(program), text)
        (units / path.name).write_text(re.sub(r"RestartSec=\d+", "RestartSec=0.2", text))
    with OwnSystemd(units) as manager:
        yield Live(tmp_path, manager)


def test_a_worker_group_brings_its_server_and_outlives_its_restart(live: Live) -> None:
    live.manager.ctl("start", GROUP)
    live.wait_for("start serve", "start start")

    live.manager.ctl("restart", SERVER)
    live.wait_for("start serve", "start serve")

    assert live.events().count("told serve") == 1
    assert "told start" not in live.events()
    live.wait_states(server="active", group="active")


def test_all_stop_together_and_worker_groups_before_their_servers(live: Live) -> None:
    live.manager.ctl("start", TARGET, GROUP, SINK)
    live.wait_for("start serve", "start start", "start sink")

    live.manager.ctl("stop", TARGET)
    live.wait_for("end serve", "end start", "end sink")

    seen = live.events()
    assert seen.index("end start") < seen.index("told serve")
    # 143 is a good end.
    live.wait_states(server="inactive", group="inactive", sink="inactive")


def test_wrong_settings_stay_down_and_what_was_away_is_tried_again(live: Live) -> None:
    live.manager.ctl("start", SINK)
    live.wait_for("start sink")

    for _ in range(6):  # more often than systemd's own limit allows
        before = live.events().count("start sink")
        live.manager.ctl("kill", "--signal=USR2", "--kill-whom=main", SINK)
        live.wait_for(*["start sink"] * (before + 1))
    live.wait_states(sink="active")

    before = live.events().count("start sink")
    live.manager.ctl("kill", "--signal=USR1", "--kill-whom=main", SINK)
    live.wait_states(sink="failed")
    assert live.events().count("start sink") == before


def test_a_supervisor_that_dies_leaves_its_server_at_work(live: Live) -> None:
    live.manager.ctl("start", SERVER)
    live.wait_for("start serve")
    tasks = live.manager.tasks(SERVER)
    assert len(tasks) == 2

    live.manager.ctl("kill", "--signal=KILL", "--kill-whom=main", SERVER)
    live.wait_for("start serve", "start serve")

    assert len(set(tasks) & set(live.manager.tasks(SERVER))) == 1


def test_a_node_begins_when_what_it_takes_the_place_of_has_ended(live: Live) -> None:
    live.manager.ctl("start", GROUP)
    live.wait_for("start serve", "start start")

    live.manager.ctl("start", NODE)
    live.wait_for("start up")

    seen = live.events()
    assert seen.index("end start") < seen.index("told serve")
    assert seen.index("end serve") < seen.index("start up")
    live.wait_states(node="active", group="inactive", server="inactive")

    live.manager.ctl("start", GROUP)
    live.wait_for("start start", "start start")
    seen = live.events()
    assert seen.index("end up") < len(seen) - 1 - seen[::-1].index("start start")
