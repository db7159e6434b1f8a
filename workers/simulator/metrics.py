"""The Prometheus page of one server: the series that a supervisor of a batch job reads."""

from typing import Literal, NamedTuple

from workers.simulator.checks import NEW_VERSION
from workers.simulator.engine import Engine
from workers.simulator.settings import Settings

_HELP = {
    "num_running_reqs": "The number of running requests.",
    "num_queue_reqs": "The number of requests in the waiting queue.",
    "num_grammar_queue_reqs": "The number of requests in the grammar waiting queue.",
    "gen_throughput": "The generation throughput (token/s).",
    "cache_hit_rate": "The prefix cache hit rate.",
    "token_usage": "The token usage.",
    "full_token_usage": "The token usage for full attention layers.",
    "swa_token_usage": "The token usage for SWA layers.",
    "mamba_usage": "The token usage for Mamba layers.",
    "num_used_tokens": "The number of used tokens.",
    "kv_available_tokens": "Number of free token slots in the KV cache pool.",
    "kv_evictable_tokens": "Number of evictable (radix-cached) token slots in the KV cache pool.",
    "kv_used_tokens": "Number of actively used token slots in the KV cache pool.",
    "mamba_available_tokens": (
        "Number of free state slots in the mamba SSM pool (hybrid-SSM only)."
    ),
    "mamba_evictable_tokens": (
        "Number of evictable (radix-cached) state slots in the mamba SSM pool."
    ),
    "mamba_used_tokens": "Number of actively used state slots in the mamba SSM pool.",
    "num_retracted_reqs": "The number of retracted requests.",
    "num_paused_reqs": "The number of paused requests by async weight sync.",
    "max_total_num_tokens": "Maximum total number of tokens in the KV cache pool.",
    "context_len": "Maximum context length.",
    "page_size": "KV cache page size in tokens.",
    "prompt_tokens_total": "Number of prefill tokens processed.",
    "generation_tokens_total": "Number of generation tokens processed.",
    "num_requests_total": "Number of requests processed.",
    "num_aborted_requests_total": "Number of requests aborted.",
    "num_retracted_requests_total": "Number of retracted requests.",
    "realtime_tokens_total": "Total number of tokens processed (updated on each log interval).",
    "e2e_request_latency_seconds": "Histogram of End-to-end request latency in seconds",
}
_Kind = Literal["gauge", "counter", "histogram"]


class _Labels(NamedTuple):
    """Label sets: of the scheduler, of the tokenizer manager, and of what both know."""

    scheduler: str
    tokenizer: str
    engine: str


def page(settings: Settings, engine: Engine, *, aborted: int) -> bytes:
    """Write /metrics."""
    name = settings.model
    streaming = 'is_streaming="false",' if settings.version >= NEW_VERSION else ""
    labels = _Labels(
        f'engine_type="unified",model_name="{name}",moe_ep_rank="0",pp_rank="0",tp_rank="0"',
        f'engine_type="unified",{streaming}model_name="{name}"',
        f'engine_type="unified",model_name="{name}"',
    )
    parts = [
        _series(series, "gauge", [(labels.scheduler, value)])
        for series, value in _gauges(settings, engine).items()
    ]
    parts += _counters(engine, labels, aborted)
    parts.append(_latencies(engine, labels.tokenizer))
    return "".join(parts).encode()


def _gauges(settings: Settings, engine: Engine) -> dict[str, float]:
    pool, running = engine.pool, len(engine.running)
    used = round(engine.kv_used)
    full, mamba = engine.kv_used / settings.kv_tokens, pool.usage(running)
    return {
        "num_running_reqs": running,
        "num_queue_reqs": len(engine.waiting),
        "num_grammar_queue_reqs": 0,
        "gen_throughput": engine.tokens_per_s,
        "cache_hit_rate": 0,
        # The fullest pool, rounded; /v1/loads and the log lines mean the KV pool by it.
        "token_usage": round(max(full, mamba), 2),
        "full_token_usage": full,
        "swa_token_usage": 0,
        "mamba_usage": mamba,
        "num_used_tokens": used,
        "kv_available_tokens": settings.kv_tokens - used,
        "kv_evictable_tokens": 0,
        "kv_used_tokens": used,
        "mamba_available_tokens": pool.states - running * pool.used,
        "mamba_evictable_tokens": 0,
        "mamba_used_tokens": running * pool.used,
        "num_retracted_reqs": 0,
        "num_paused_reqs": 0,
        "max_total_num_tokens": settings.kv_tokens,
        "context_len": settings.context_length,
        "page_size": 1,
    }


def _counters(engine: Engine, labels: _Labels, aborted: int) -> list[str]:
    scheduler, tokenizer = labels.scheduler, labels.tokenizer

    def of_mode(mode: str) -> str:
        return scheduler.replace(",model_name", f',mode="{mode}",model_name')

    modes = [
        (of_mode("prefill_compute"), float(engine.prefilled)),
        (of_mode("decode"), float(engine.generated)),
    ]
    return [
        _series("prompt_tokens_total", "counter", [(tokenizer, engine.prompt_tokens)]),
        # Moves when a request ends; realtime_tokens_total moves as it goes.
        _series("generation_tokens_total", "counter", [(tokenizer, engine.ended_tokens)]),
        _series("num_requests_total", "counter", [(tokenizer, engine.requests)]),
        _series("num_aborted_requests_total", "counter", [(labels.engine, aborted)]),
        _series("num_retracted_requests_total", "counter", [(scheduler, engine.retractions)]),
        _series("realtime_tokens_total", "counter", modes),
    ]


def _latencies(engine: Engine, labels: str) -> str:
    name, count = "sglang:e2e_request_latency_seconds", float(engine.requests)
    bucket = labels.replace(",", ',le="+Inf",', 1)
    return (
        _head("e2e_request_latency_seconds", "histogram")
        + f"{name}_sum{{{labels}}} {engine.latency_sum_s}\n"
        + f"{name}_bucket{{{bucket}}} {count}\n{name}_count{{{labels}}} {count}\n"
    )


def _series(name: str, kind: _Kind, values: list[tuple[str, float]]) -> str:
    rows = [f"sglang:{name}{{{labels}}} {float(value)}\n" for labels, value in values]
    return _head(name, kind) + "".join(rows)


def _head(name: str, kind: _Kind) -> str:
    return f"# HELP sglang:{name} {_HELP[name]}\n# TYPE sglang:{name} {kind}\n"
