"""rq-dashboard lists queues, jobs and workers of a run, and shows nothing of the prompts."""

import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support.queue_world import QueueWorld
from tests.support.redis_server import RedisServer
from tests.support.server_process import ServerProcess, free_port
from workers.group import SlotWorker


class Dashboard:
    """A running rq-dashboard."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def page(self, path: str) -> str:
        with urllib.request.urlopen(self._base + path, timeout=20) as answer:  # noqa: S310
            text = answer.read()
            assert isinstance(text, bytes)
            return text.decode()

    def data(self, path: str) -> Any:
        return json.loads(self.page(f"/0/data/{path}.json"))

    def answers(self) -> bool:
        try:
            return bool(self.page("/"))
        except OSError:
            return False


@pytest.fixture
def dashboard(valkey: RedisServer, tmp_path: Path) -> Iterator[Dashboard]:
    port = free_port()
    options = ["--bind", "127.0.0.1", "--port", str(port), "--redis-url", valkey.url, "--json"]
    process = ServerProcess(
        [sys.executable, "-m", "rq_dashboard", *options, "--show-full-args"], log=tmp_path / "log"
    )
    dashboard = Dashboard(port)
    assert process.wait_ready(dashboard.answers), process.tail()
    yield dashboard
    process.kill()


@pytest.fixture
def world(redis_client: "redis.Redis") -> Iterator[QueueWorld]:
    """Two queued, one in flight, one failed, and a worker group."""
    world = QueueWorld(redis_client, prompts=4)
    jobs = world.jobs("e1")
    world.claim(jobs, 2)
    world.finish(jobs, [0], "failed")
    worker = SlotWorker(["demo"], name="gpu0@test-1", connection=redis_client)
    worker.register_birth()  # type: ignore[no-untyped-call]
    yield world
    worker.register_death()  # type: ignore[no-untyped-call]


def test_it_lists_queue_jobs_and_workers(world: QueueWorld, dashboard: Dashboard) -> None:
    [queue] = dashboard.data("queues")["queues"]
    [worker] = dashboard.data("workers")["workers"]
    listed = {
        registry: {job["id"] for job in dashboard.data(f"jobs/demo/{registry}/8/asc/1")["jobs"]}
        for registry in ("queued", "started", "failed")
    }

    assert (queue["name"], queue["count"]) == ("demo", 2)
    assert (queue["started_job_registry_count"], queue["failed_job_registry_count"]) == (1, 1)
    assert (worker["name"], worker["queues"]) == ("gpu0@test-1", ["demo"])
    assert listed == {
        "queued": {world.hex(2), world.hex(3)},
        "started": {world.hex(1)},
        "failed": {world.hex(0)},
    }


def test_a_job_is_shown_by_its_key_and_never_by_its_text(
    world: QueueWorld, dashboard: Dashboard
) -> None:
    jobs = [dashboard.data(f"job/{world.hex(number)}") for number in range(4)]
    pages = [
        dashboard.page(path)
        for path in (
            "/0/view/queues",
            "/0/view/workers",
            "/0/view/jobs/demo/queued/8/asc/1",
            f"/0/view/job/{world.hex(2)}",
            f"/0/data/job/{world.hex(2)}.json",
            "/0/data/jobs/demo/failed/8/asc/1.json",
        )
    ]

    assert [job["status"] for job in jobs] == ["failed", "started", "queued", "queued"]
    assert all(job["origin"] == "demo" and world.hex(n) in job["description"]
               for n, job in enumerate(jobs))  # fmt: skip
    assert "words" not in json.dumps(jobs) + "".join(pages)


def test_looking_at_everything_changes_nothing(
    world: QueueWorld, dashboard: Dashboard, redis_client: "redis.Redis"
) -> None:
    before = {key: redis_client.dump(key) for key in redis_client.keys("*")}

    for _ in range(10):
        dashboard.data("queues")
        dashboard.data("workers")
        dashboard.data("jobs/demo/started/8/asc/1")

    assert {key: redis_client.dump(key) for key in redis_client.keys("*")} == before
    world.check()
