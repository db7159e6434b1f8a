"""SGLang's own log lines of a server with a hybrid model, as 0.5.4 to 0.5.23 write them.

One line for each batch of requests that are admitted together, one for every 40 decode steps,
and those of the start that tell the cap. The throughput of a decode line is what was generated
since the last one over the time since then, so that the first after an idle stretch is far too
low, as in the real log.
"""

import asyncio
import os
import sys
import time

from workers.simulator.engine import Engine
from workers.simulator.open_request import OpenRequest
from workers.simulator.server import SimulatedServer
from workers.simulator.settings import Settings

_DECODE_INTERVAL_STEPS = 40
_SHORTEST_S = 0.01
_LARGEST_GRAPH = 256
_WARNING_VERSION = (0, 5, 18)
_UNNUMBERED_VERSION = (0, 5, 6)
_SPEED_VERSION = (0, 5, 9)
_PENDING_VERSION = (0, 5, 12)
TO_STDERR = "-"
"""Stands for stderr in the place of a file's name."""


class SglangLog:
    """Writes the log of one server, through its deaths."""

    def __init__(self, settings: Settings, pattern: str) -> None:
        self._settings = settings
        self._pattern = pattern
        self._file = -1
        self._engine: Engine | None = None
        self._batch: list[OpenRequest] = []
        self._generated = 0
        self._written_s = time.monotonic()
        self._prefilled_s = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._retractions = self._lines = 0

    def attach(self, server: SimulatedServer, *, fired_up: bool = True) -> None:
        """Write the lines of a start, and from now on those of this server's new engine.

        Args:
            server: Whose.
            fired_up: Whether it is ready, and so says it.
        """
        if server.serving is None:
            return
        if self._file < 0:
            self._file = self._opened(server)
        self._engine = server.serving.engine
        self._engine.on_admitted = self._admitted
        self._generated = self._retractions = 0
        pool, settings = self._engine.pool, self._settings
        asked = settings.max_running_requests
        if asked is not None and asked > pool.cap and settings.version >= _WARNING_VERSION:
            self._write(
                f"max_running_requests is capped to {pool.cap} by the mamba state cache "
                f"(max_mamba_cache_size={pool.states}, {pool.reserved} state slots per request). "
                "To raise it: increase --mamba-full-memory-ratio or --max-mamba-cache-size, or "
                "halve the state size with --mamba-ssm-dtype bfloat16."
            )
        self._write(
            f"Mamba Cache is allocated. max_mamba_cache_size: {pool.states}, "
            "conv_state size: 0.07GB, ssm_state size: 3.30GB "
        )
        self._write(
            f"max_total_num_tokens={settings.kv_tokens}, chunked_prefill_size=8192, "
            f"max_prefill_tokens=16384, max_running_requests={pool.cap}, "
            f"context_len={settings.context_length}, available_gpu_mem=9.80 GB"
        )
        if fired_up:
            self._write("The server is fired up and ready to roll!")

    def _opened(self, server: SimulatedServer) -> int:
        if self._pattern == TO_STDERR:
            return sys.stderr.fileno()
        path = log_path(self._pattern, server, servers=len(self._settings.all_ports))
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _write(self, line: str) -> None:
        os.write(self._file, stamped(line))

    # --- prefill ---------------------------------------------------------------------------------

    def _admitted(self, request: OpenRequest) -> None:
        loop = asyncio.get_running_loop()
        if not self._batch:
            loop.call_soon(self._prefill)
        self._batch.append(request)
        if self._timer is None:
            self._timer = loop.call_later(_SHORTEST_S, self._decode)

    def _prefill(self) -> None:
        engine, batch = self._engine, self._batch
        self._batch = []
        if engine is None or not batch:
            return
        now = time.monotonic()
        tokens = sum(request.prompt_tokens for request in batch)
        pending = sum(request.prompt_tokens for request in engine.waiting)
        rate = tokens / max(now - self._prefilled_s, _SHORTEST_S)
        self._prefilled_s = now
        speed, graph = f"input throughput (token/s): {rate:.2f}", "cuda graph: False"
        version = self._settings.version
        self._write_batch(
            "Prefill",
            f"#new-seq: {len(batch)}",
            f"#new-token: {tokens}",
            "#cached-token: 0",
            f"full token usage: {engine.kv_used / engine.kv_tokens:.2f}",
            f"mamba usage: {engine.pool.usage(len(engine.running)):.2f}",
            f"#running-req: {max(len(engine.running) - len(batch), 0)}",
            f"#queue-req: {len(engine.waiting)}",
            *([f"#pending-token: {pending}"] if version >= _PENDING_VERSION else []),
            *([] if version < _SPEED_VERSION else [graph, speed]),
        )

    # --- decode ----------------------------------------------------------------------------------

    def _decode(self) -> None:
        self._timer = None
        engine = self._engine
        if engine is None or not engine.running:
            return
        steps_per_s = engine.steps_per_s
        if steps_per_s > 0:
            self._decode_line(engine)
        delay = max(_DECODE_INTERVAL_STEPS / steps_per_s if steps_per_s else 1.0, _SHORTEST_S)
        self._timer = asyncio.get_running_loop().call_later(delay, self._decode)

    def _decode_line(self, engine: Engine) -> None:
        if engine.retractions > self._retractions:
            count = engine.retractions - self._retractions
            self._retractions = engine.retractions
            self._write(
                f"KV cache pool is full. Retract requests. #retracted_reqs: {count}, "
                "#new_tokens_gained: 812, #mamba_num_gained: 1, #new_token_ratio: 0.9998 -> 1.0000"
            )
        now, generated, running = time.monotonic(), engine.generated, len(engine.running)
        rate = (generated - self._generated) / max(now - self._written_s, 1e-9)
        self._written_s, self._generated = now, generated
        self._write_batch(
            "Decode",
            f"#running-req: {running}",
            f"#full token: {round(engine.kv_used)}",
            f"full token usage: {engine.kv_used / engine.kv_tokens:.2f}",
            f"mamba num: {running * engine.pool.used}",
            f"mamba usage: {engine.pool.usage(running):.2f}",
            f"cuda graph: {running <= _LARGEST_GRAPH}",
            f"gen throughput (token/s): {rate:.2f}",
            f"#queue-req: {len(engine.waiting)}",
        )

    def _write_batch(self, kind: str, *fields: str) -> None:
        """Write a batch's line; older versions number it, and end it with a comma."""
        self._lines += 1
        version = self._settings.version
        number = f" [{self._lines}]" if version < _UNNUMBERED_VERSION else ""
        end = ", " if version < _SPEED_VERSION else ""
        self._write(f"{kind} batch{number}, {', '.join(fields)}{end}")


def stamped(line: str) -> bytes:
    """Write a line as SGLang's log has it, with its time."""
    return f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {line}\n".encode()


def log_path(pattern: str, server: SimulatedServer, *, servers: int) -> str:
    """Name a server's log: `{port}` is replaced, or the port appended where there are several."""
    port = str(server.record.port)
    if "{port}" in pattern:
        return pattern.replace("{port}", port)
    return pattern if servers == 1 else f"{pattern}.{port}"
