"""deploy/compose: read by Docker Compose itself, and deploy/Dockerfile by hadolint."""

import re
from pathlib import Path

import pytest

from tests.support import deployed
from tests.support.deployed import COMPOSE, DEPLOY, REPOSITORY, call, compose, tool

DOCKERFILE = DEPLOY / "Dockerfile"


@pytest.mark.parametrize(
    ("profile", "services"),
    [
        ("gpu", {"redis", "sink", "servers", "groups"}),
        ("trial", {"redis", "sink", "simulated", "simulated-groups"}),
        ("tools", {"redis", "sink", "producer"}),
    ],
)
def test_compose_starts_what_a_profile_is_for(profile: str, services: set[str]) -> None:
    docker = tool("docker-compose")

    listed = call(docker, "--profile", profile, "config", "--services", cwd=COMPOSE)

    assert set(listed.split()) == services


def test_compose_reads_the_example_of_settings() -> None:
    example = COMPOSE / ".env.example"
    names = re.findall(r"(?m)^#?(\w+)=", example.read_text())
    asked = set(re.findall(r"\$\{(\w+)", (COMPOSE / "compose.yaml").read_text()))

    service = compose(env_file=example)["services"]["servers"]

    assert service["image"] == "headrace-sglang"
    assert "/models/MODEL" in service["command"]
    # Redis' address is for those who have another one.
    assert asked - set(names) == {"HEADRACE_REDIS"}


def test_worker_groups_are_stopped_before_their_servers_and_both_reach_the_gpus() -> None:
    services = compose()["services"]
    [device] = services["servers"]["deploy"]["resources"]["reservations"]["devices"]

    assert {"redis", "servers"} <= services["groups"]["depends_on"].keys()
    assert device["capabilities"] == ["gpu"]
    # Their names hold the machine's, which a container's own network would hide.
    assert {services[name]["network_mode"] for name in ("servers", "groups")} == {"host"}
    assert services["servers"]["init"], "who takes in what SGLang leaves of its processes"


def test_redis_is_for_this_machine_and_has_our_conf() -> None:
    redis = compose()["services"]["redis"]

    assert [port["host_ip"] for port in redis["ports"]] == ["127.0.0.1"]
    sources = {volume["source"] for volume in redis["volumes"]}
    assert str(DEPLOY / "redis.conf") in sources


def test_no_log_grows_without_a_limit() -> None:
    for name, service in compose()["services"].items():
        assert {"max-size", "max-file"} <= service["logging"]["options"].keys(), name


# --- the image -----------------------------------------------------------------------------------


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    assert call(tool("hadolint"), str(DOCKERFILE)) == ""


def test_the_image_is_made_of_what_is_there_and_of_no_secrets() -> None:
    lines = re.sub(r"\\\n\s*", " ", DOCKERFILE.read_text()).splitlines()
    copied = {
        source
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    let_in = {line[1:] for line in ignored if line.startswith("!")}

    assert copied == let_in
    assert all((REPOSITORY / name).exists() for name in copied)
    assert "**" in ignored
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001:10001"]


def test_images_run_without_a_shell_between(tmp_path: Path) -> None:
    # As PID 1 it would keep SIGTERM to itself.
    lines = deployed.shown() + deployed.of_kubernetes(deployed.kustomized("base", tmp_path))

    assert {each.argv[0] for each in lines} <= {"producer", "workers"}
    assert 'CMD ["workers", "--help"]' in DOCKERFILE.read_text()
