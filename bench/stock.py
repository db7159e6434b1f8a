"""A peer: stock RQ workers, one prompt a job, one job a process, httpx for each."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from rq import Queue
from rq.serializers import JSONSerializer

from bench.stage import cpu_s, wait
from tests.support.redis_server import RedisServer

QUEUE = "stock"
_client = httpx.Client(trust_env=False)


def ask(url: str, number: int) -> str:
    """The job function."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"say {number} " * 20}],
        "max_tokens": 64,
    }
    answer = _client.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    return str(answer.json()["choices"][0]["message"]["content"])


def run(server: RedisServer, url: str, *, prompts: int, processes: int) -> tuple[float, float]:
    """Give prompts/s and CPU-ms a prompt over workers and Redis."""
    client = server.client()
    with _workers(server, processes) as pids:
        queue = Queue(QUEUE, connection=client, serializer=JSONSerializer)
        wait(lambda: client.scard(f"rq:workers:{QUEUE}") == processes, 120)
        before, began_s = cpu_s(*pids, server.pid), time.monotonic()
        queue.enqueue_many(
            [Queue.prepare_data(ask, (url, number), result_ttl=60) for number in range(prompts)]
        )
        wait(lambda: queue.finished_job_registry.count >= prompts, 300)
        passed_s = time.monotonic() - began_s
        used_s = cpu_s(*pids, server.pid) - before
    client.close()
    return prompts / passed_s, used_s * 1000 / prompts


@contextmanager
def _workers(server: RedisServer, processes: int) -> Iterator[list[int]]:
    command = [sys.executable, "-m", "rq.cli", "worker", "-q", "-u", server.url, QUEUE]
    command += ["-w", "rq.SimpleWorker", "-S", "rq.serializers.JSONSerializer"]
    started = [
        subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.getcwd()})  # noqa: PTH109
        for _ in range(processes)
    ]
    try:
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()
