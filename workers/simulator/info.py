"""What a server tells about itself: models, arguments, loads."""

import datetime as dt
import time
from typing import Any

from workers.simulator.engine import Engine
from workers.simulator.settings import Settings

# From these versions on: loads from shared memory, and the strategy's new name.
_LOADS_VERSION = (0, 5, 13)
_CAP_VERSION = (0, 5, 8)
_STRATEGY_VERSION = (0, 5, 14)

Json = dict[str, Any]

_DISAGGREGATION: Json = {
    "mode": "null",
    "prefill_bootstrap_queue_reqs": 0,
    "prefill_inflight_queue_reqs": 0,
    "decode_prealloc_queue_reqs": 0,
    "decode_transfer_queue_reqs": 0,
    "decode_retracted_queue_reqs": 0,
    "kv_transfer_speed_gb_s": 0.0,
    "kv_transfer_latency_ms": 0.0,
}


def models(settings: Settings) -> Json:
    """Give the body of /v1/models."""
    name = settings.model
    card = {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "sglang",
        "root": name,
        "parent": None,
        "max_model_len": settings.context_length,
    }
    return {"object": "list", "data": [card]}


def model_info(settings: Settings) -> Json:
    """Give the body of /model_info."""
    path = f"models/{settings.model}"
    new = settings.version >= _LOADS_VERSION
    info: Json = {"model_path": path}
    if new:
        info["served_model_name"] = settings.model
    info |= {
        "tokenizer_path": path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
    }
    if new:
        info |= {
            "load_format": "auto",
            "reasoning_parser": "qwen3" if settings.reasoning else None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
        }
    return info | {
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        **settings.info,
    }


def server_info(settings: Settings, engine: Engine, *, port: int, status: str) -> Json:
    """Give the body of /server_info: the arguments (the key included), then what came of them."""
    arguments = _arguments(settings, port)
    states = arguments | {
        "max_mamba_cache_size": engine.pool.states,
        "effective_max_running_requests_per_dp": engine.pool.cap,
        "last_gen_throughput": round(engine.tokens_per_s, 2),
        "memory_usage": {
            "weight": 35.1,
            "kvcache": 7.4,
            "token_capacity": settings.kv_tokens,
            "graph": {"decode": 1.2} if settings.version >= _LOADS_VERSION else 1.2,
        },
    }
    if settings.version < _CAP_VERSION:
        del states["effective_max_running_requests_per_dp"]
    return arguments | {
        "status": status,
        "max_total_num_tokens": settings.kv_tokens,
        "max_req_input_len": settings.max_input_tokens,
        "internal_states": [states],
        "version": settings.sglang_version,
        **settings.info,
    }


def _arguments(settings: Settings, port: int) -> Json:
    renamed = settings.version >= _STRATEGY_VERSION
    strategy = "mamba_radix_cache_strategy" if renamed else "mamba_scheduler_strategy"
    return {
        "model_path": f"models/{settings.model}",
        "tokenizer_path": f"models/{settings.model}",
        "served_model_name": settings.model,
        "context_length": settings.context_length,
        "host": "127.0.0.1",
        "port": port,
        "tp_size": 1,
        "dp_size": 1,
        "max_running_requests": settings.max_running_requests,
        "max_queued_requests": settings.max_queued_requests,
        "max_total_tokens": None,
        "max_prefill_tokens": 16384,
        "chunked_prefill_size": 8192,
        "schedule_policy": "fcfs",
        "schedule_conservativeness": 1.0,
        "page_size": 1,
        "max_mamba_cache_size": settings.mamba_states,
        "mamba_full_memory_ratio": 0.9,
        "mamba_ssm_dtype": None,
        "mamba_track_interval": 256,
        strategy: "auto" if settings.strategy == "no_radix" else settings.strategy,
        "disable_radix_cache": settings.strategy == "no_radix",
        "disable_overlap_schedule": settings.strategy == "no_buffer" or not settings.overlap,
        "chat_template": None,
        "reasoning_parser": "qwen3" if settings.reasoning else None,
        "tool_call_parser": None,
        "sampling_defaults": "model",
        "preferred_sampling_params": None,
        "enable_metrics": settings.metrics,
        "enable_cache_report": False,
        "enable_deterministic_inference": False,
        "decode_log_interval": 40,
        "watchdog_timeout": 300,
        "tokenizer_worker_num": 1,
        "api_key": settings.api_key,
        "admin_api_key": None,
        "weight_version": "default",
        **settings.arguments,
    }


def loads(settings: Settings, engine: Engine) -> Json:
    """Give the body of /v1/loads."""
    now = time.time()
    running, waiting = len(engine.running), len(engine.waiting)
    used = round(engine.kv_used)
    load: Json = {
        "timestamp": now,
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_used_tokens": used,
        "max_total_num_tokens": settings.kv_tokens,
        "max_running_requests": engine.pool.cap,
        "token_usage": round(used / settings.kv_tokens, 4),
        "gen_throughput": round(engine.tokens_per_s, 2) if settings.metrics else 0.0,
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
    }
    stamp = dt.datetime.fromtimestamp(now, dt.UTC).isoformat()
    capacity = settings.kv_tokens
    memory = {"weight_gb": 35.1, "kv_cache_gb": 7.4, "graph_gb": 1.2, "token_capacity": capacity}
    queues = {"waiting": waiting, "grammar": 0, "paused": 0, "retracted": 0}
    if settings.version < _LOADS_VERSION:
        load |= {"num_total_reqs": running + waiting, "memory": memory, "queues": queues}
        total = {"total_running_reqs": running, "total_waiting_reqs": waiting}
        return {
            "timestamp": stamp,
            "version": settings.sglang_version,
            "dp_rank_count": 1,
            "loads": [load],
            "aggregate": total | {"total_reqs": running + waiting},
        }
    load |= {
        "num_waiting_uncached_tokens": sum(each.prompt_tokens for each in engine.waiting),
        "num_total_tokens": used,
        "num_active_tokens": used,
        "num_prealloc_ready_tokens": 0,
        "total_prefill_uncached_tokens": engine.prompt_tokens,
        "total_prefill_busy_us": 0,
        "decode_moments": None,
        "memory": memory,
        "disaggregation": _DISAGGREGATION,
        "queues": queues | {"prealloc_ready": 0},
    }
    return {
        "timestamp": stamp,
        "version": settings.sglang_version,
        "accelerator": None,
        "num_accelerators": 1,
        "loads": [load],
    }


def old_load(engine: Engine) -> list[Json]:
    """Give the body of /get_load, which 0.5.22 no longer has."""
    waiting = len(engine.waiting)
    return [
        {
            "dp_rank": None,
            "num_reqs": len(engine.running) + waiting,
            "num_waiting_reqs": waiting,
            "num_tokens": round(engine.kv_used),
            "num_pending_tokens": 0,
            "ts_tic": time.monotonic(),
        }
    ]
