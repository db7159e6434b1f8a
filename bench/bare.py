"""A peer: an aiohttp loop over made-up prompts that keeps nothing. Prints prompts/s and CPU-ms."""

import asyncio
import sys
import time

import aiohttp
import msgspec


async def main(url: str, prompts: int, slots: int) -> None:
    """Ask for every prompt with `slots` tasks over one iterator."""
    numbers = iter(range(prompts))
    connector = aiohttp.TCPConnector(limit=slots)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def work() -> None:
            for number in numbers:
                text = f"say {number} " * 20
                body = {
                    "model": "tiny",
                    "messages": [{"role": "user", "content": text}],
                    "max_tokens": 64,
                }
                async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                    msgspec.json.decode(await answer.read())

        async with asyncio.TaskGroup() as tasks:
            for _ in range(slots):
                tasks.create_task(work())


if __name__ == "__main__":
    began_s, cpu_s = time.perf_counter(), time.process_time()
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    count = int(sys.argv[2])
    passed_s = time.perf_counter() - began_s
    print(count / passed_s, (time.process_time() - cpu_s) * 1000 / count)
