"""Worker group, Redis and sink together: CPU a prompt, in flight, occupancy, beside peers.

Peers in the same run: a bare aiohttp loop that keeps nothing, and a pool of stock RQ workers, one
prompt a job, one job a process.
"""

import sys
import time

from bench.stage import Row, cpu_s, fleet, run_python, verdict, wait
from tests.support.fleet import Fleet, write_prompts

RUN = "bench"
ANSWER_BYTES = 1_600


def flow(*, prompts: int = 20_000, slots: int = 256) -> list[Row]:
    """50 ms mock, 256 in flight, 1.6 KB answers, durability on."""
    with fleet(latency="fixed:0.05", cap=slots, answer_bytes=ANSWER_BYTES) as made:
        figures = Measured(made, prompts=prompts, slots=slots)
        bare = bare_loop(made.simulator.urls[0], prompts=prompts, slots=slots)
        rq = stock_rq(made, prompts=400)
    return [
        Row(
            "CPU a prompt, worker + Redis + sink, 50 ms mock, 256 in flight, 1.6 KB",
            f"{figures.cpu_ms:.2f} ms "
            f"(worker {figures.worker_ms:.2f}, Redis {figures.redis_ms:.2f}, "
            f"sink {figures.sink_ms:.2f})",
            verdict(met=figures.cpu_ms <= 0.5, asked="≤ 0.5 ms"),
        ),
        Row(
            "  peer: bare aiohttp loop, nothing kept", f"{bare[1]:.2f} ms, {bare[0]:.0f} prompts/s"
        ),
        Row("  peer: 8 stock RQ workers", f"{rq[1]:.2f} ms, {rq[0]:.0f} prompts/s"),
        Row("prompts/s there", f"{figures.per_s:.0f} of {slots / 0.05:.0f} possible"),
        Row(
            "most requests open at the server, by its log",
            f"{figures.most_open} of {slots}",
            verdict(met=figures.most_open == slots, asked="the bound, never more"),
        ),
    ]


def zero(*, prompts: int = 20_000, slots: int = 64) -> list[Row]:
    """0 ms mock: prompts/s against the same client loop without queue and durability."""
    with fleet(latency="0", cap=slots, answer_bytes=ANSWER_BYTES) as made:
        figures = Measured(made, prompts=prompts, slots=slots)
        plain = same_loop(made.simulator.urls[0], prompts=prompts, slots=slots)
    ratio = figures.per_s / plain
    return [
        Row(
            "prompts/s on a 0 ms mock, against the same loop without queue and durability",
            f"{figures.per_s:.0f} / {plain:.0f} = {ratio:.2f}",
            verdict(met=ratio >= 0.5, asked="≥ 0.5"),
        )
    ]


def occupancy(*, prompts: int = 8_000, slots: int = 72) -> list[Row]:
    """Slots in use at 72, lognormal latency of mean 200 ms, sigma 1, until the queue is empty."""
    with fleet(latency="lognormal:0.2:1", cap=slots, answer_bytes=ANSWER_BYTES) as made:
        figures = Measured(made, prompts=prompts, slots=slots)
    return [
        Row(
            "slot occupancy at 72, lognormal latency (200 ms, sigma 1), by the server's log",
            f"{figures.mean_open / slots:.3f}",
            verdict(met=figures.mean_open / slots >= 0.97, asked="≥ 0.97"),
        )
    ]


class Measured:
    """One run of the real path, and what it cost.

    Attributes:
        per_s: Completions a second between the first reading and the last.
        most_open, mean_open: Requests open at the server by its own log; the mean from when it was
            full first until the last request began.
        worker_ms, redis_ms, sink_ms, cpu_ms: CPU milliseconds a prompt.
    """

    def __init__(self, made: Fleet, *, prompts: int, slots: int) -> None:
        made.enqueue(write_prompts(made.folder / f"{RUN}.jsonl", prompts, text="say {i} " * 20))
        sink = made.start_sink("sink", "--batch-seconds", "2", "--first-batch-seconds", "2")
        group = made.start_group(0, "--concurrency", str(slots), "--log-level", "WARNING")
        wait(lambda: made.counts(RUN).completed > prompts // 20, 60)
        pids = (group.pid, made.redis.pid, sink.pid)
        first, cpu, began_s = (
            made.counts(RUN).completed,
            [cpu_s(pid) for pid in pids],
            time.monotonic(),
        )
        wait(lambda: made.counts(RUN).completed == prompts, 300)
        self.per_s = (prompts - first) / (time.monotonic() - began_s)
        made.wait(lambda: made.has_ended(RUN), "the sink to end", 60)
        used = [cpu_s(pid) - before for pid, before in zip(pids, cpu, strict=True)]
        self.worker_ms, self.redis_ms, self.sink_ms = (u * 1000 / (prompts - first) for u in used)
        self.cpu_ms = self.worker_ms + self.redis_ms + self.sink_ms
        self._read_log(made, slots)
        made.processes["gpu0"].stop()
        made.processes["sink"].stop()

    def _read_log(self, made: Fleet, slots: int) -> None:
        account = made.simulator.account()
        ours = [served for served in account.served if not served.rid.startswith("headrace-probe")]
        begins = sorted(served.begin for served in ours)
        full_at, last = begins[min(slots, len(begins) - 1)], begins[-1]
        edges = sorted(
            [(served.begin, 1) for served in ours]
            + [(served.end, -1) for served in ours if served.end is not None]
        )
        self.most_open, area, now_open, at = 0, 0.0, 0, full_at
        for moment, change in edges:
            if full_at < moment <= last:
                area += now_open * (moment - at)
                at = moment
            now_open += change
            self.most_open = max(self.most_open, now_open)
        self.mean_open = area / (last - full_at)


def bare_loop(url: str, *, prompts: int, slots: int) -> tuple[float, float]:
    """Run the bare aiohttp loop; prompts/s and CPU-ms a prompt."""
    return _peer("bench.bare", url, str(prompts), str(slots))


def same_loop(url: str, *, prompts: int, slots: int) -> float:
    """Run our own client loop without queue and durability; prompts/s."""
    return _peer("bench.plain", url, str(prompts), str(slots))[0]


def stock_rq(made: Fleet, *, prompts: int, processes: int = 8) -> tuple[float, float]:
    """Run stock RQ workers; prompts/s and CPU-ms a prompt (workers and Redis)."""
    from bench.stock import run  # noqa: PLC0415 - imports RQ, which the others do not need

    return run(made.redis, made.simulator.urls[0], prompts=prompts, processes=processes)


def _peer(module: str, *args: str) -> tuple[float, float]:
    done = run_python(module, *args)
    out = done.communicate(timeout=300)[0].split()
    if done.returncode:
        sys.exit(f"the peer {module} ended with {done.returncode}")
    return float(out[0]), float(out[1])
