"""The manifests of deploy/kubernetes: made by kubectl, held against the published schemas."""

import importlib
import os
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import redis

from common import connect, names
from tests.integration.test_deploy_redis import settings_of
from tests.support.deployed import DEPLOY, KUBERNETES, containers, kustomized, pods
from tests.support.redis_server import RedisServer
from workers.supervisor.records import Process, ServerRecord, State, write_record

Objects = list[dict[str, Any]]

OLDEST = "1.29"
"""From here on a sidecar is there unless somebody turned it off."""

KEDA = {"ScaledObject", "TriggerAuthentication"}
STATE_DIR = "/var/lib/headrace"
AUTH = "/run/headrace/auth.conf"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    """All objects, with a fixed number of worker pods."""
    return kustomized("base", tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    """All objects, with as many worker pods as the queue wants."""
    return kustomized("autoscaling", tmp_path_factory.mktemp("scaled"))


def of_kind(objects: Objects, kind: str) -> dict[str, dict[str, Any]]:
    """The objects of a kind by name."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def container(objects: Objects, pod: str, name: str) -> dict[str, Any]:
    """One container."""
    [found] = [each for each in containers(pods(objects)[pod]) if each["name"] == name]
    return found


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
def test_kubernetes_takes_the_manifests(plain: Objects, scaled: Objects, version: str) -> None:
    assert {"Deployment", "StatefulSet", "PodDisruptionBudget"} <= {each["kind"] for each in plain}
    for each in plain + scaled:
        if each["kind"] not in KEDA:
            kubernetes_validate.validate(each, version, strict=True)


def test_keda_takes_its_own(scaled: Objects) -> None:
    # Imported here: it takes seconds, and every process that runs tests reads all of this file.
    keda = importlib.import_module("cloudcoil.models.keda.v1alpha1")
    own = [each for each in scaled if each["kind"] in KEDA]

    assert {each["kind"] for each in own} == KEDA
    for each in own:
        read = getattr(keda, each["kind"]).model_validate(each)
        # What it does not know it leaves out without a word.
        assert read.model_dump(mode="json", by_alias=True, exclude_unset=True) == each


def test_the_queue_says_how_many_worker_pods_there_are(scaled: Objects) -> None:
    [trigger] = of_kind(scaled, "ScaledObject")["workers"]["spec"]["triggers"]
    keda = of_kind(scaled, "TriggerAuthentication")[trigger["authenticationRef"]["name"]]
    [secret] = of_kind(scaled, "Secret")

    assert trigger["metadata"]["listName"] == names.rq_queue("prompts")
    assert "replicas" not in of_kind(scaled, "Deployment")["workers"]["spec"]
    assert {each["name"] for each in keda["spec"]["secretTargetRef"]} == {secret}
    # Else it could not read the length.
    policy = of_kind(scaled, "NetworkPolicy")["redis"]
    assert "keda" in str(policy["spec"]["ingress"][0]["from"])


def test_a_worker_group_drains_before_its_server_is_told(plain: Objects) -> None:
    # Sidecars are told to stop when the containers proper have ended.
    pod = pods(plain)["workers"]

    assert [(each["name"], each.get("restartPolicy")) for each in pod["initContainers"]] == [
        ("server", "Always")
    ]
    assert [each["name"] for each in pod["containers"]] == ["group"]
    assert of_kind(plain, "Deployment")["workers"]["spec"]["strategy"]["rollingUpdate"] == {
        "maxSurge": 0,
        "maxUnavailable": 1,
    }


@pytest.mark.parametrize(
    ("state", "ready"), [("starting", False), ("ready", True), ("down", False), (None, False)]
)
def test_a_pod_is_ready_when_the_supervisor_says_so(
    plain: Objects, tmp_path: Path, *, state: State | None, ready: bool
) -> None:
    probes = container(plain, "workers", "server")
    assert "livenessProbe" not in probes, "the supervisor is who starts a server again"
    command = probes["readinessProbe"]["exec"]["command"]
    assert probes["startupProbe"]["exec"]["command"] == command
    if state is not None:
        itself = Process(pid=1, started="1")
        record = ServerRecord(
            name="gpu0@pod", gpus=(0,), url="http://h:1", port=1, supervisor=itself, state=state
        )
        write_record(tmp_path, record)
    (tmp_path / "servers").mkdir(exist_ok=True)

    assert STATE_DIR in command[-1]
    here = [word.replace(STATE_DIR, str(tmp_path)) for word in command]
    done = subprocess.run(here, capture_output=True, check=False)

    assert (done.returncode == 0) is ready


def test_probes_wait_longer_than_a_server_under_load_takes(plain: Objects) -> None:
    found = [
        probe
        for pod in pods(plain).values()
        for each in containers(pod)
        for name, probe in each.items()
        if name.endswith("Probe")
    ]

    assert len(found) == 5
    assert all(probe["timeoutSeconds"] > 20 for probe in found)


def test_every_container_is_closed_and_bounded(plain: Objects) -> None:
    for name, pod in pods(plain).items():
        assert pod["securityContext"]["runAsNonRoot"], name
        for each in containers(pod):
            where = f"{name}/{each['name']}"
            assert each["resources"]["limits"]["memory"], where
            assert each["resources"]["requests"], where
            assert not each["securityContext"]["allowPrivilegeEscalation"], where
            assert ":" in each["image"], where
            assert not each["image"].endswith(":latest"), where


def test_what_pods_read_from_secrets_is_in_the_example(plain: Objects) -> None:
    [secret] = of_kind(plain, "Secret").values()
    wanted = {
        env["valueFrom"]["secretKeyRef"]["key"]
        for pod in pods(plain).values()
        for each in containers(pod)
        for env in each.get("env", [])
        if "valueFrom" in env
    }

    assert wanted == {"REDIS_PASSWORD", "HEADRACE_API_KEY"}
    assert wanted <= secret["data"].keys()


# --- Redis ---------------------------------------------------------------------------------------

_UNITS = {"gb": 1 << 30, "Gi": 1 << 30}


def in_bytes(text: str) -> int:
    return int(text[:-2]) * _UNITS[text[-2:]]


def test_redis_has_the_settings_of_our_conf_and_room_for_a_rewrite(plain: Objects) -> None:
    ours, there = (
        settings_of(path) for path in (DEPLOY / "redis.conf", KUBERNETES / "base" / "redis.conf")
    )
    redis = container(plain, "redis", "redis")

    differ = {name for name in ours | there if ours.get(name) != there.get(name)}
    assert differ == {"bind", "dir", "include"}
    limit = in_bytes(redis["resources"]["limits"]["memory"])
    assert limit >= 1.5 * in_bytes(there["maxmemory"])


def test_redis_starts_by_its_pod_and_lets_nobody_in_without_the_password(
    plain: Objects, tmp_path: Path
) -> None:
    prepare = container(plain, "redis", "password")["command"]
    auth = tmp_path / "auth.conf"
    assert AUTH in prepare[-1]
    here = [word.replace(AUTH, str(auth)) for word in prepare]
    subprocess.run(here, env={"REDIS_PASSWORD": "passw0rd", "PATH": os.defpath}, check=True)
    assert auth.stat().st_mode & 0o077 == 0
    [config] = [each for name, each in of_kind(plain, "ConfigMap").items() if "redis" in name]
    conf = tmp_path / "redis.conf"
    text = config["data"]["redis.conf"].replace(AUTH, str(auth))
    conf.write_text(text.replace("dir /data", f"dir {tmp_path}"))

    own = {"bind": "127.0.0.1"}
    with RedisServer("valkey", conf=conf, settings=own, password="passw0rd") as server:
        client = connect.connect(server.tcp_url)
        stranger = redis.Redis(port=server.port)
        assert connect.persistence_warning(client) is None
        with pytest.raises(redis.AuthenticationError):
            stranger.ping()
        client.close()
        stranger.close()
