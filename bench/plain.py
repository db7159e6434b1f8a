"""The same loop without queue and durability: our client, requests and rows, kept nowhere."""

import asyncio
import secrets
import sys
import time

import msgspec
import uvloop

from common import ids
from common.models import Claim, KeptTurns, Params, Prompt
from workers.client.faults import ServerAnswer
from workers.client.requests import Request
from workers.client.rows import Origin
from workers.client.sglang import SGLangClient
from workers.prompt.job import Open, Ready
from workers.prompt.serve import Prompter
from workers.rids import Rids


class Server:
    """The server without its watch."""

    context_length = None

    def __init__(self, client: SGLangClient) -> None:
        self._client = client
        self.origin = Origin(server=client.url, model="tiny", server_version="")

    async def generate(
        self, request: Request, deadline_s: float, *, fresh: bool = False
    ) -> ServerAnswer:
        """Send it."""
        return await self._client.generate(request, deadline_s, fresh=fresh)

    async def alive(self) -> bool:
        """Not asked here."""
        return True

    def cuts(self, prompt_tokens: int) -> bool:
        """It cuts none."""
        del prompt_tokens
        return False

    def ask_for_rest(self, rest_s: float) -> None:
        """It never asks."""

    def rest_s(self) -> float:
        """Nothing."""
        return 0.0

    def say_limit(self, what: str) -> None:
        """Say nothing."""


class Nobody:
    """Charges nothing."""

    async def charge(self, claim: Claim, reason: str, *, before: int | None) -> int:
        """Count nothing."""
        del claim, reason
        return (before or 0) + 1

    async def keep(self, kept: KeptTurns) -> str:
        """Keep nothing."""
        del kept
        return "ok"

    def may_go_on(self) -> bool:
        """Let every turn follow."""
        return True

    def held_since(self, instant_s: float) -> bool:
        """Hold a slot for ever."""
        del instant_s
        return True


async def main(url: str, prompts: int, slots: int) -> None:
    """Serve every prompt with `slots` tasks over one iterator."""
    numbers = iter(range(prompts))
    rids = Rids(secrets.token_hex(6))
    params = Params(max_tokens=64)
    async with SGLangClient(url, slots=slots) as client:
        nobody = Nobody()
        prompter = Prompter(Server(client), nobody, rids, turns=nobody, slots=nobody)

        async def work() -> None:
            slot = rids.take_slot()
            for number in numbers:
                job = Open(Ready(claim(number)), slot=slot, since_s=0.0)
                await prompter.serve(job, params, 60.0)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(slots):
                tasks.create_task(work())


def claim(number: int) -> Claim:
    """Make what the queue would hand out."""
    body = {"messages": [{"role": "user", "content": f"say {number} " * 20}]}
    id_json = ids.typed_id(f"p{number}")
    prompt = Prompt(id=msgspec.Raw(id_json), line=number + 1, endpoint="chat", body=body)
    return Claim(
        run="bench",
        uid="0" * 32,
        key=ids.key_of("bench", id_json),
        fingerprint=ids.fingerprint_of("chat", body),
        try_=1,
        attempts=0,
        deaths=0,
        lost=0,
        prompt=msgspec.json.encode(prompt),
    )


if __name__ == "__main__":
    began_s, cpu_s = time.perf_counter(), time.process_time()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    count = int(sys.argv[2])
    passed_s = time.perf_counter() - began_s
    print(count / passed_s, (time.process_time() - cpu_s) * 1000 / count)
