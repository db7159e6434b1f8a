"""Read a server's /metrics: all of its load but the cap, the mamba pool included. Pure.

The page exists with --enable-metrics only.
"""

import re

from workers.readings.loads import ServerLoad

_METRIC = re.compile(
    rb"^sglang[:_](num_running_reqs|num_queue_reqs|token_usage|full_token_usage|mamba_usage"
    rb"|gen_throughput|generation_tokens_total|prompt_tokens_total|realtime_tokens_total"
    rb"|cached_tokens_total|num_retracted_requests_total)(?:\{(.*)\})? (\S+)",
    re.MULTILINE,
)
_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')
_USAGES = (b"token_usage", b"full_token_usage", b"mamba_usage")


def load_of_metrics(page: bytes) -> ServerLoad:
    """Read /metrics, in one pass over a page of about 90 KB.

    Counts are summed over data-parallel ranks and usages are the highest; other ranks of one
    engine repeat the first one's figures.

    Raises:
        ValueError: If the page has none of SGLang's metrics.
    """
    found: dict[bytes, float] = {}
    for match in _METRIC.finditer(page):
        name, labels = match[1], dict(_LABEL.findall(match[2] or b""))
        if not _counts(labels):
            continue
        name = b"_".join((name, labels[b"mode"])) if b"mode" in labels else name
        value = float(match[3])
        found[name] = (
            max(found.get(name, 0.0), value) if name in _USAGES else (found.get(name, 0.0) + value)
        )
    if not found:
        raise ValueError("the server's /metrics holds none of SGLang's figures")
    return _metrics_load(found)


def _counts(labels: dict[bytes, bytes]) -> bool:
    """Whether a sample is an engine's own total: first rank, all priorities."""
    ranks = (b"tp_rank", b"pp_rank", b"moe_ep_rank")
    return not labels.get(b"priority") and all(labels.get(rank, b"0") == b"0" for rank in ranks)


def _metrics_load(found: dict[bytes, float]) -> ServerLoad:
    generated = found.get(b"realtime_tokens_total_decode", found.get(b"generation_tokens_total"))
    prefilled, cached = _prefilled(found)
    return ServerLoad(
        running=_int(found.get(b"num_running_reqs")),
        queued=_int(found.get(b"num_queue_reqs")),
        # `token_usage` is the highest of all pools, rounded; the KV pool's own came in 0.5.10.
        token_usage=found.get(b"full_token_usage", found.get(b"token_usage")),
        mamba_usage=found.get(b"mamba_usage"),
        gen_throughput=found.get(b"gen_throughput"),
        gen_tokens_total=generated,
        prompt_tokens_total=prefilled,
        cached_tokens_total=cached,
        retracted_total=found.get(b"num_retracted_requests_total"),
        counted_by="metrics" if generated is not None or prefilled is not None else "",
    )


def _prefilled(found: dict[bytes, float]) -> tuple[float | None, float | None]:
    """Give the tokens of prompts that were computed, and those that were found in the cache."""
    computed = found.get(b"realtime_tokens_total_prefill_compute")
    if computed is not None:
        # The page has no line for what has not happened yet.
        return computed, found.get(b"realtime_tokens_total_prefill_cache", 0.0)
    prompts, cached = found.get(b"prompt_tokens_total"), found.get(b"cached_tokens_total")
    if prompts is None or cached is None:
        return prompts, cached
    return max(prompts - cached, 0.0), cached


def _int(value: float | None) -> int | None:
    return None if value is None else int(value)
