"""Read how a server was launched and what came of it: what its capacity hangs on. Pure.

From /server_info, and from the log's lines of the start what that page does not tell. Only the
members that are used are read: the page holds the server's keys too. Versions 0.5.7 to 0.5.23;
before 0.5.8 the page does not tell what came of the launch. With data parallelism all figures are
of one rank, as SGLang's own.
"""

import re
from typing import Any

import msgspec

from workers.readings.log_lines import Capped, MambaPool, Started, parse_line
from workers.releases import Strategy, resolved

GIB = 1 << 30


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a server says of its launch and its memory; None is what it does not tell.

    Attributes:
        version: SGLang's, empty when unknown.
        strategy: How it keeps states; None without any word of it.
        recurrent: Whether it has a pool of states at all.
        overlap: Whether its overlap scheduler runs.
        speculative: Whether it decodes speculatively.
        asked: --max-running-requests.
        asked_states: --max-mamba-cache-size; up to 0.5.13 possibly what came of it instead.
        states: States in its pool.
        states_bytes: What they take, to 10 MB or so; its log alone tells.
        ratio: --mamba-full-memory-ratio.
        cap: Requests that it runs at once.
        kv_tokens: Tokens that its KV pool holds.
        kv_bytes: What that takes, to a megabyte or so.
        context_length: Tokens of prompt and answer together.
        graph_cap: Requests up to which it decodes with captured graphs; None also without any.
        most_queued: Requests that may wait, above which it answers 503; None: any number.
        policy: By which order it takes those that wait.
        logs_prompts: Whether it writes requests into its log.
        metrics: Whether it has a page of metrics.
        ranks: Data-parallel ones, each with pools of its own.
        tp: GPUs that it spans.
        model_path: Where its weights came from.
        ssm_dtype, kv_dtype: As launched; `auto` and None leave it to the model.
    """

    version: str = ""
    strategy: Strategy | None = None
    recurrent: bool | None = None
    overlap: bool = True
    speculative: bool = False
    asked: int | None = None
    asked_states: int | None = None
    states: int | None = None
    states_bytes: float | None = None
    ratio: float | None = None
    cap: int | None = None
    kv_tokens: int | None = None
    kv_bytes: float | None = None
    context_length: int | None = None
    graph_cap: int | None = None
    most_queued: int | None = None
    policy: str = ""
    logs_prompts: bool = False
    metrics: bool | None = None
    ranks: int = 1
    tp: int = 1
    model_path: str | None = None
    ssm_dtype: str | None = None
    kv_dtype: str | None = None


class _Memory(msgspec.Struct):
    kvcache: float | None = None
    token_capacity: int | None = None


class _Rank(msgspec.Struct):
    effective_max_running_requests_per_dp: int | None = None
    max_mamba_cache_size: int | None = None
    memory_usage: _Memory | None = None


class _Info(msgspec.Struct):
    version: str = ""
    model_path: str | None = None
    mamba_scheduler_strategy: str | None = None
    mamba_radix_cache_strategy: str | None = None
    uses_mamba_radix_cache: bool | None = None
    disable_radix_cache: bool = False
    disable_overlap_schedule: bool = False
    speculative_algorithm: str | None = None
    max_running_requests: int | None = None
    max_mamba_cache_size: int | None = None
    mamba_full_memory_ratio: float | None = None
    mamba_ssm_dtype: str | None = None
    kv_cache_dtype: str | None = None
    context_length: int | None = None
    max_total_num_tokens: int | None = None
    tp_size: int = 1
    dp_size: int = 1
    enable_dp_attention: bool | None = None
    cuda_graph_max_bs: int | None = None
    cuda_graph_max_bs_decode: int | None = None
    cuda_graph_config: Any = None
    disable_cuda_graph: bool | None = None
    max_queued_requests: int | None = None
    schedule_policy: str | None = None
    log_requests: bool | None = None
    enable_metrics: bool | None = None
    internal_states: list[_Rank] = []


_decoder = msgspec.json.Decoder(_Info)


def facts_of_info(body: bytes, *, context_length: int | None = None) -> ServerFacts:
    """Read /server_info.

    Args:
        body: As it came.
        context_length: What /v1/models says, which counts where the launch said nothing.

    Raises:
        ValueError: It is no such page.
    """
    told = _decoder.decode(body)
    rank = told.internal_states[0] if told.internal_states else _Rank()
    memory = rank.memory_usage or _Memory()
    overlap = not told.disable_overlap_schedule
    said = told.mamba_radix_cache_strategy or told.mamba_scheduler_strategy
    ranks = max(1, told.dp_size)
    return ServerFacts(
        version=told.version,
        strategy=(
            "no_radix"
            if told.disable_radix_cache
            else resolved(said, version=told.version, overlap=overlap)
        ),
        recurrent=_recurrent(told, rank),
        overlap=overlap,
        speculative=told.speculative_algorithm is not None,
        asked=_of_rank(told.max_running_requests, ranks),
        asked_states=told.max_mamba_cache_size,
        states=rank.max_mamba_cache_size,
        ratio=told.mamba_full_memory_ratio,
        cap=rank.effective_max_running_requests_per_dp,
        kv_tokens=told.max_total_num_tokens or memory.token_capacity,
        kv_bytes=memory.kvcache * GIB if memory.kvcache else None,
        context_length=told.context_length or context_length,
        graph_cap=_graph_cap(told),
        most_queued=told.max_queued_requests,
        policy=told.schedule_policy or "",
        logs_prompts=bool(told.log_requests),
        metrics=told.enable_metrics,
        ranks=ranks,
        tp=max(1, told.tp_size // (ranks if told.enable_dp_attention else 1)),
        model_path=told.model_path,
        ssm_dtype=told.mamba_ssm_dtype,
        kv_dtype=told.kv_cache_dtype,
    )


def _of_rank(asked: int | None, ranks: int) -> int | None:
    return None if asked is None else max(1, asked // ranks)


def _recurrent(told: _Info, rank: _Rank) -> bool | None:
    if rank.max_mamba_cache_size is not None or told.uses_mamba_radix_cache:
        return True
    # A rank that tells its cap has its arguments as they became: without a size, it has no pool.
    return False if rank.effective_max_running_requests_per_dp is not None else None


def _graph_cap(told: _Info) -> int | None:
    if told.disable_cuda_graph:
        return None
    config = told.cuda_graph_config
    decode = config.get("decode") if isinstance(config, dict) else None
    if isinstance(decode, dict):
        most = decode.get("max_bs")
        graphs = decode.get("backend") != "disabled"
        return most if graphs and isinstance(most, int) else None
    return told.cuda_graph_max_bs_decode or told.cuda_graph_max_bs


_POOL_SIZES = re.compile(
    r"Mamba Cache is allocated\..*?conv_state size: ([\d.]+)GB, ssm_state size: ([\d.]+)GB"
)


def with_log(facts: ServerFacts, log: str) -> ServerFacts:
    """Fill in from a server's log what it does not tell itself.

    Args:
        facts: What it tells; `ServerFacts()` where it tells nothing.
        log: Any part of its log with its start; the last start counts.
    """
    found: dict[str, Any] = {}
    for line in log.splitlines():
        found |= {name: value for name, value in _of_line(line).items() if value is not None}
    missing = {name: value for name, value in found.items() if getattr(facts, name) is None}
    return msgspec.structs.replace(facts, **missing)


def _of_line(line: str) -> dict[str, Any]:
    told = parse_line(line.encode())
    if isinstance(told, Started):
        return {
            "cap": told.cap,
            "kv_tokens": told.kv_tokens,
            "context_length": told.context_length,
        }
    if isinstance(told, Capped):
        # Before its start's own line, which has the same cap.
        recurrent = True if told.states else None
        return {
            "cap": told.cap,
            "asked": told.asked,
            "states": told.states,
            "recurrent": recurrent,
        }
    if isinstance(told, MambaPool):
        sizes = _POOL_SIZES.search(line)
        gib = float(sizes[1]) + float(sizes[2]) if sizes else 0.0
        return {"states": told.states, "states_bytes": gib * GIB or None, "recurrent": True}
    return {}
