"""Whoever can write to Redis runs nothing on our machines: nothing is unpickled, no name called.

In every place that RQ or we read a payload lies whose reading leaves a file behind.
"""

import json
import os
import pickle
from pathlib import Path

import pytest

from common import names
from tests.support.fleet import Fleet, write_prompts
from tests.support.watching import QUICK_SINK

pytestmark = pytest.mark.timeout(400)

RUN = "job"
PROMPTS = 40
FOREIGN = "f" * 32


def pickled(file: Path) -> bytes:
    """A pickle that makes the file when it is read."""
    # As text of protocol 0: a call of `open` with its arguments, by name.
    return b"cbuiltins\nopen\n(V" + os.fsencode(file) + b"\nVw\ntR."


def planted_everywhere(fleet: Fleet, mark: Path) -> None:
    redis, payload = fleet.client, pickled(mark)
    call = json.dumps(["os.mkdir", None, [str(mark)], {}]).encode()
    jobs = list(redis.scan_iter(f"{names.RQ_JOB_STEM}*"))
    for number, key in enumerate(jobs):
        data = payload if number % 2 else call
        redis.hset(key, mapping={"data": data, "meta": payload, "result": payload})
    for id_, data in ((FOREIGN, call), ("0" * 32, payload)):
        job = f"{names.RQ_JOB_STEM}{id_}"
        redis.hset(job, mapping={"data": data, "origin": RUN, "status": "queued", "timeout": 60})
        redis.lpush(f"rq:queue:{RUN}", id_)
        redis.xadd(f"rq:results:{id_}", {"type": "1", "return_value": payload})
    redis.sadd("rq:workers", "rq:worker:planted")
    redis.sadd(f"rq:workers:{RUN}", "rq:worker:planted")
    redis.hset("rq:worker:planted", mapping={"queues": payload, "birth": payload, "pid": payload})
    for registry in ("finished", "failed", "wip", "canceled", "deferred", "scheduled"):
        redis.zadd(f"rq:{registry}:{RUN}", {payload: 9e12, b"no id\x1b": 9e12})
    redis.hset(names.WORKER_GROUPS, "planted", payload)
    for number, name in enumerate(("../../outside", "other", "x y\x1b[2J")):
        redis.zadd(names.RUNS, {name: number})
        redis.hset(names.run(name), "record", payload if number else b'{"run":"../../outside"}')


@pytest.mark.parametrize("started_by", ["workers start", "rq worker"])
def test_nothing_that_lies_in_redis_is_unpickled_or_called(
    tmp_path: Path, started_by: str
) -> None:
    prompts = write_prompts(tmp_path / f"{RUN}.jsonl", PROMPTS)
    mark = tmp_path / "run"
    with Fleet(tmp_path, latency="0", cap=8) as fleet:
        fleet.enqueue(prompts)
        planted_everywhere(fleet, mark)
        if started_by == "workers start":
            fleet.start_group()
        else:
            fleet.env["HEADRACE_SERVER"] = fleet.simulator.urls[0]
            fleet.spawn(
                "gpu0", "rq.cli", "worker", "-w", "workers.group.SlotWorker",
                *("-u", fleet.redis.url, RUN),
            )  # fmt: skip
        fleet.start_sink("sink", *QUICK_SINK)

        counts = fleet.wait_done(RUN)
        asked = [["status", RUN], ["runs"], ["peek", RUN], ["retry", RUN], ["resume", RUN]]
        for command in asked if started_by == "workers start" else []:
            said = fleet.producer(*command, check=False)
            assert "Traceback" not in said.stderr, said.stderr

        assert not mark.exists()
        assert counts.completed == fleet.prompt_requests() == PROMPTS
        fleet.verify(RUN)


def test_the_payload_would_act(tmp_path: Path) -> None:
    """Else the test above would show nothing."""
    pickle.loads(pickled(tmp_path / "run")).close()  # noqa: S301 - our own

    assert (tmp_path / "run").exists()
