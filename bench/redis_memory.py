"""What a prompt costs in Redis: queued, beyond its request's own bytes; and completed.

`python -m bench.redis_memory [PROMPTS [FLAVOUR …]]` prints the figures of every Redis that this
machine has, with its default configuration and with `hash-max-listpack-value 65536`, under which a
job is one compact piece of memory however long its request is.
"""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import msgspec

from bench.stage import Row, verdict
from common import names
from common.ids import fingerprint_of, key_of
from common.models import Params, Prompt, Result, RunRecord
from common.queue import Jobs, Ledger, Runs
from tests.support.redis_server import RedisServer, flavours

if TYPE_CHECKING:
    import redis

RUN = "many"
STEP = 1_000
REST_S = 2.0
QUEUED_BYTES = 350
COMPLETED_BYTES = 40
COMPACT = {"hash-max-listpack-value": "65536"}
COMPACT_6 = {"hash-max-ziplist-value": "65536"}


def redis_memory(*, prompts: int = 100_000) -> list[Row]:
    """Measure the promised default, Valkey, in both configurations."""
    return [row for compact in (False, True) for row in _rows("valkey", prompts, compact=compact)]


def _rows(flavour: str, prompts: int, *, compact: bool) -> Iterator[Row]:
    settings = (COMPACT_6 if flavour == "redis6.2" else COMPACT) if compact else {}
    with RedisServer(flavour, settings=settings) as server, server.client() as client:
        queued_bytes, completed_bytes = _measure(client, prompts)
    about = f"{flavour}, {prompts:,} prompts, {'compact hashes' if compact else 'default'}"
    yield Row(
        f"Redis per queued prompt beyond its request ({about})",
        f"{queued_bytes:.0f} B",
        verdict(met=queued_bytes <= QUEUED_BYTES, asked=f"≤ {QUEUED_BYTES} B"),
    )
    yield Row(
        f"Redis per completed prompt ({about})",
        f"{completed_bytes:.1f} B",
        verdict(met=completed_bytes <= COMPLETED_BYTES, asked=f"≤ {COMPLETED_BYTES} B"),
    )


def _measure(client: "redis.Redis", prompts: int) -> tuple[float, float]:
    record = RunRecord(
        run=RUN,
        uid="0" * 32,
        params=Params(max_tokens=64),
        output="/nowhere",
        created_at="2026-01-01T00:00:00+00:00",
        bits=names.ledger_bits(prompts),
    )
    Runs(client).create(record)
    ledger = Ledger(client, record)
    jobs = Jobs(client, epoch="bench", group="gpu0@bench", server="http://bench")
    _turn(client, record, jobs, ledger, range(1))  # what the scripts and an empty stream cost

    before = _used_bytes(client)
    request_bytes = 0
    for first in range(1, prompts + 1, STEP):
        batch = [_item(number) for number in range(first, first + STEP)]
        request_bytes += sum(len(prompt) for _, _, prompt in batch)
        ledger.add(batch)
    queued = _used_bytes(client)
    for first in range(1, prompts + 1, STEP):
        _complete(client, record, jobs, range(first, first + STEP))
    completed = _used_bytes(client)
    return (queued - before - request_bytes) / prompts, (completed - before) / prompts


def _turn(
    client: "redis.Redis", record: RunRecord, jobs: Jobs, ledger: Ledger, numbers: range
) -> None:
    ledger.add([_item(number) for number in numbers])
    _complete(client, record, jobs, numbers)


def _complete(client: "redis.Redis", record: RunRecord, jobs: Jobs, numbers: range) -> None:
    """Claim and finish prompts, and drop their entries as a sink that has stored them does."""
    jobs.take_slots(STEP, bound=STEP, rid_prefix="b-", about={}, quiet=True)
    if len(jobs.claim(len(numbers), stream_mark_bytes=1 << 40).claims) != len(numbers):
        sys.exit("a claim gave fewer jobs than were queued")
    results = [
        Result(
            run=RUN,
            uid=record.uid,
            key=key,
            fingerprint=fingerprint,
            try_=1,
            outcome="completed",
            row=b"{}",
        )
        for key, fingerprint, _ in map(_item, numbers)
    ]
    if set(jobs.finish(results)) != {"ok"}:
        sys.exit("a finish was refused")
    client.delete(names.results(RUN, 0))


def _item(number: int) -> tuple[bytes, bytes, bytes]:
    body = {"messages": [{"role": "user", "content": f"count slowly and aloud to {number:07}"}]}
    prompt = Prompt(
        id=msgspec.Raw(b'"m%d"' % number),
        line=number,
        endpoint="chat",
        body=body,
        source="many.jsonl",
    )
    key = key_of(RUN, b'"m%d"' % number)
    return key, fingerprint_of("chat", body), msgspec.json.encode(prompt)


def _used_bytes(client: "redis.Redis") -> int:
    """Read the memory in use once it has come to rest.

    Jobs are freed in the background, and a table that has become too large shrinks by steps.
    """
    least, since_s = 1 << 62, time.monotonic()
    while time.monotonic() - since_s < REST_S:
        used = int(cast("dict[str, int]", client.info("memory"))["used_memory"])
        if used < least * 0.999:
            least, since_s = used, time.monotonic()
        time.sleep(0.1)
    return least


if __name__ == "__main__":
    asked = int(sys.argv[1]) if sys.argv[1:] else 100_000
    for name in sys.argv[2:] or flavours():
        for small in (False, True):
            for line in _rows(name, asked, compact=small):
                print(f"{line.what:90} {line.figure:>10}   {line.target}")
