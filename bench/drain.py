"""Claim and finish the prompts of one run as fast as Redis gives them, with no server between.

`python -m bench.drain RUN` stands in for worker groups where HTTP would take hours: the same claim
and finish scripts, the same rows. It ends when it is killed.
"""

import secrets
import sys
import time

from common.address import resolve_redis
from common.connect import connect
from common.models import Choice, Claim, Params, Result, Usage
from common.queue import Jobs
from common.utc import utc_now
from workers.client.answers import Answer
from workers.client.requests import build_request, read_prompt
from workers.client.rows import Completion, Origin, completion_row

SERVER = "http://bench"
ORIGIN = Origin(server=SERVER, model="none", server_version="0")
AT_ONCE = 500
PARAMS = Params(max_tokens=64)


def main(run: str) -> None:
    """Go on for ever."""
    client = connect(resolve_redis(None))
    jobs = Jobs(client, epoch=secrets.token_hex(6), group="gpu0@bench", server=SERVER)
    mark_bytes = int(client.info("memory")["maxmemory"]) // 4
    renew_s = float("-inf")
    while True:
        if time.monotonic() - renew_s > 1.0:
            renew_s = time.monotonic()
            about = {"host": "bench", "pid": 1, "started": 1.0}
            jobs.take_slots(AT_ONCE, bound=AT_ONCE, rid_prefix="bench-", about=about, quiet=True)
        claims = jobs.claim(AT_ONCE, runs=[run], stream_mark_bytes=mark_bytes).claims
        if not claims:
            time.sleep(0.05)
            continue
        jobs.finish([result(claim) for claim in claims])


def result(claim: Claim) -> Result:
    """Complete a prompt with a few words of its own."""
    prompt = read_prompt(claim.prompt)
    request = build_request(prompt, PARAMS, model="none", rid="bench", context_length=None)
    text = f"{claim.key.hex()} has been answered at some length, as if by a model."
    answer = Answer(
        choices=[Choice(index=0, content=text, finish_reason="stop")],
        usage=Usage(prompt_tokens=12, completion_tokens=24),
        empty=False,
        truncated=False,
        reasoning_cut=False,
    )
    done = Completion(
        request=request,
        answer=answer,
        origin=ORIGIN,
        flags=(),
        latency_s=0.05,
        completed_at=utc_now(),
    )
    return claim.ended("completed", completion_row(claim, prompt, done), tokens=(12, 24))


if __name__ == "__main__":
    main(sys.argv[1])
