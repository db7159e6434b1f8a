"""What deploy/ has people run: the command lines of units, manifests and images, as data."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from tests.support.skips import skip_cannot_run

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
SYSTEMD = DEPLOY / "systemd"
SLURM = DEPLOY / "slurm"
COMPOSE = DEPLOY / "compose"
KUBERNETES = DEPLOY / "kubernetes"
BIN = "/opt/headrace/venv/bin/"


class Shown(msgspec.Struct, frozen=True):
    """A command line of ours.

    Attributes:
        where: File and place in it, for a failing test's name.
        argv: `workers` or `producer`, then arguments.
        grace_s: What may pass between the first signal and the last; None where nobody says.
        config: The headrace.toml that it reads; None for none.
    """

    where: str
    argv: tuple[str, ...]
    grace_s: float | None = None
    config: Path | None = None


def tool(name: str) -> str:
    """A program of the pins (the test group); they are there wherever CI runs."""
    found = Path(sys.executable).parent / name
    if not found.exists():
        skip_cannot_run(f"{name} comes in no wheel for this machine")
    return str(found)


def call(*command: str, cwd: Path | None = None) -> str:
    """Run a program that must succeed; give its stdout."""
    done = subprocess.run(
        command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


# --- systemd -------------------------------------------------------------------------------------


class Unit(msgspec.Struct, frozen=True):
    """One unit file: its settings by name, each with all its values in order."""

    name: str
    settings: dict[str, list[str]]

    def one(self, name: str) -> str:
        """The value of a setting that stands there once."""
        [value] = self.settings[name]
        return value

    def codes(self, name: str) -> set[int]:
        """A setting that lists exit codes."""
        return set(map(int, self.one(name).split()))

    def command(self, instance: str) -> tuple[str, ...]:
        """What it starts, for one instance of a template."""
        return tuple(shlex.split(self.one("ExecStart").replace("%i", instance)))


def units() -> dict[str, Unit]:
    """All unit files, by name."""
    found = {}
    for path in sorted(SYSTEMD.glob("*.service")) + sorted(SYSTEMD.glob("*.target")):
        settings: dict[str, list[str]] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            if re.match(r"[A-Z]\w+=", line):
                name, _, value = line.partition("=")
                settings.setdefault(name, []).append(value)
        found[path.name] = Unit(path.name, settings)
    return found


def services() -> list[Unit]:
    return [unit for unit in units().values() if "ExecStart" in unit.settings]


def _of_systemd() -> list[Shown]:
    return [
        Shown(
            where=unit.name,
            argv=(unit.command("0")[0].removeprefix(BIN), *unit.command("0")[1:]),
            grace_s=float(unit.one("TimeoutStopSec")),
            config=DEPLOY / "headrace.toml",
        )
        for unit in services()
    ]


# --- compose -------------------------------------------------------------------------------------


def compose(*, env_file: Path | None = None) -> dict[str, Any]:
    """The compose file as Docker Compose itself reads it, all profiles."""
    env = ["--env-file", str(env_file)] if env_file else []
    docker = tool("docker-compose")
    text = call(docker, *env, "--profile", "*", "config", "--format", "json", cwd=COMPOSE)
    read: dict[str, Any] = msgspec.json.decode(text)
    return read


def seconds(text: str) -> float:
    """A duration as compose gives it: `2m30s`."""
    found = re.fullmatch(r"(?:(\d+)m)?(\d+)s", text)
    assert found, text
    return int(found[1] or 0) * 60.0 + int(found[2])


def _of_compose() -> list[Shown]:
    found = []
    for name, service in compose()["services"].items():
        argv = (service.get("entrypoint") or []) + service["command"]
        if argv[0] in {"producer", "workers"}:
            grace = service.get("stop_grace_period")
            where = f"compose.yaml: {name}"
            found.append(Shown(where, tuple(argv), seconds(grace) if grace else None))
    return found


# --- Kubernetes ----------------------------------------------------------------------------------


def kustomized(folder: str, scratch: Path) -> list[dict[str, Any]]:
    """The manifests as kubectl makes them, with the secrets of the example."""
    copy = scratch / f"kubernetes-{folder}"
    shutil.copytree(KUBERNETES, copy)
    secrets = copy / "base" / "secrets"
    shutil.copy(secrets / "headrace.env.example", secrets / "headrace.env")
    text = call(tool("kubectl"), "kustomize", str(copy / folder))
    return [msgspec.yaml.decode(part) for part in re.split(r"(?m)^---\n", text)]


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pods' specs by the name of what makes them."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in objects
        if "template" in each.get("spec", {})
    }


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """All containers of a pod, those that stay beside it too."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def of_kubernetes(objects: list[dict[str, Any]]) -> list[Shown]:
    return [
        Shown(
            where=f"kubernetes: {name}/{container['name']}",
            argv=tuple(container["command"]),
            grace_s=float(pod["terminationGracePeriodSeconds"]),
            config=KUBERNETES / "base" / "headrace.toml",
        )
        for name, pod in pods(objects).items()
        for container in containers(pod)
        if container["command"][0] in {"producer", "workers"}
    ]


# --- all of them ---------------------------------------------------------------------------------


def shown() -> list[Shown]:
    """Those of units and compose; the manifests need a folder: `of_kubernetes`."""
    return _of_systemd() + _of_compose()
