"""Read what a server says of itself: who it is, and how loaded. Pure; by versions 0.5.7 to 0.5.23.

These pages tell the load, and any one suffices:

    /v1/loads      since 0.5.8: running, queued, effective cap, KV usage; later token counters too
    /metrics       only with --enable-metrics: all but the cap; the only page with the mamba pool
    /server_info   effective cap since 0.5.8 (`internal_states`), throughput; nothing on the queue
    /get_load      before 0.5.8: running and queued

Only the members that are used are read: /server_info holds the server's keys, and is never kept.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from common.ids import canonical_json, rows_sha256
from workers.readings.facts import ServerFacts, facts_of_info

CUT_WITHIN_TOKENS = 8
"""SGLang cuts a prompt to its context less the few tokens that it keeps for itself."""


class ServerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Who a server is: what a run pins when it begins. None is what the server does not tell.

    Attributes:
        model: Served model name.
        model_path: Where its weights came from.
        context_length: Tokens, prompt and answer together.
        version: SGLang's, empty when unknown.
        strategy: How the mamba states are kept: no_buffer, extra_buffer, auto …; `no_radix` where
            the radix cache is off.
        cap: Requests that it runs at once, effectively.
        template_hash: 16 hex digits of what decides the chat template: its argument, its name and
            its default keywords. A template that comes with the model is pinned by `model_path`.
        reasoning_parser, tool_call_parser: None when there is none.
        auto_truncate: It cuts prompts that are too long instead of refusing them.
        facts: How it was launched, and what came of it.
        sampling_defaults: Where a request's missing parameters come from, and the preferred ones.
    """

    model: str
    model_path: str | None = None
    context_length: int | None = None
    version: str = ""
    strategy: str | None = None
    cap: int | None = None
    template_hash: str | None = None
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    sampling_defaults: str | None = None
    auto_truncate: bool = False
    facts: ServerFacts | None = None

    def cuts(self, prompt_tokens: int) -> bool:
        """Whether it has cut a prompt of so many tokens to what fits."""
        if not self.auto_truncate or self.context_length is None:
            return False
        return prompt_tokens >= self.context_length - CUT_WITHIN_TOKENS


class ServerLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How loaded a server is; None is what no page told. Sums over data-parallel ranks.

    Attributes:
        running, queued: Requests in its batch, and waiting for it.
        cap: Requests that it runs at once, effectively.
        token_usage, mamba_usage: Shares of the KV pool and of the mamba pool, 0 to 1.
        gen_throughput: Generated tokens per second by its own account; stale when idle.
        gen_tokens_total, prompt_tokens_total: Tokens generated and prefilled since its start (from
            the log: since it is read); they move with every step. Compare only readings with equal
            `counted_by`.
        used_tokens: Tokens in the KV pool: with each decoded token one more.
        cached_tokens_total: Tokens of prompts that it found in its cache instead.
        retracted_total: Requests that it had to set back for want of room.
        counted_by: Where the totals come from: metrics, loads, log, or empty.
    """

    running: int | None = None
    queued: int | None = None
    cap: int | None = None
    token_usage: float | None = None
    mamba_usage: float | None = None
    gen_throughput: float | None = None
    gen_tokens_total: float | None = None
    prompt_tokens_total: float | None = None
    used_tokens: int | None = None
    cached_tokens_total: float | None = None
    retracted_total: float | None = None
    counted_by: str = ""

    def moved_since(self, earlier: "ServerLoad") -> bool:
        """Whether tokens were generated or prefilled between two readings: work goes on.

        Some versions count nothing, or prefilled tokens only, without --enable-metrics: there what
        the scheduler says of its batch must have changed, which a dead one does not bring up to
        date.
        """
        if self.counted_by != earlier.counted_by:
            return False
        if any(now > then for now, then in self._totals(earlier)):
            return True
        if self.gen_tokens_total is not None:
            return False
        now = (self.used_tokens, self.gen_throughput, self.token_usage)
        then = (earlier.used_tokens, earlier.gen_throughput, earlier.token_usage)
        return bool(self.running) and now != then

    @property
    def idle(self) -> bool:
        """Whether the server says that nothing runs or waits there."""
        return self.running == 0 and not self.queued

    def went_back(self, earlier: "ServerLoad") -> bool:
        """Whether the server counts from the beginning again: it has restarted."""
        same = self.counted_by == earlier.counted_by
        return same and any(now < then for now, then in self._totals(earlier))

    def _totals(self, earlier: "ServerLoad") -> list[tuple[float, float]]:
        pairs = (
            (self.gen_tokens_total, earlier.gen_tokens_total),
            (self.prompt_tokens_total, earlier.prompt_tokens_total),
        )
        return [(now, then) for now, then in pairs if now is not None and then is not None]


class _Model(msgspec.Struct):
    id: str = ""
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _Internal(msgspec.Struct):
    effective_max_running_requests_per_dp: int | None = None
    last_gen_throughput: float | None = None


class _ServerInfo(msgspec.Struct):
    model_path: str | None = None
    served_model_name: str | None = None
    version: str = ""
    context_length: int | None = None
    mamba_scheduler_strategy: str | None = None
    mamba_radix_cache_strategy: str | None = None
    disable_radix_cache: bool = False
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    sampling_defaults: str | None = None
    allow_auto_truncate: bool | None = None
    preferred_sampling_params: Any = None
    chat_template: str | None = None
    hf_chat_template_name: str | None = None
    default_chat_template_kwargs: Any = None
    internal_states: list[_Internal] = []


class _Load(msgspec.Struct):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    max_running_requests: int = 0
    num_used_tokens: int | None = None
    token_usage: float | None = None
    gen_throughput: float | None = None
    total_prefill_uncached_tokens: int | None = None
    decode_moments: list[float] | None = None


class _Loads(msgspec.Struct):
    loads: list[_Load]


class _OldLoad(msgspec.Struct):
    num_reqs: int = 0
    num_waiting_reqs: int = 0
    num_tokens: int | None = None


_models = msgspec.json.Decoder(_Models)
_info = msgspec.json.Decoder(_ServerInfo)
_loads = msgspec.json.Decoder(_Loads)
_old_loads = msgspec.json.Decoder(list[_OldLoad])

_TOTALS = frozenset(
    {"gen_tokens_total", "prompt_tokens_total", "cached_tokens_total", "counted_by"}
)


def read_identity(models: bytes, info: bytes | None) -> ServerIdentity:
    """Read who a server is.

    Args:
        models: Body of /v1/models.
        info: Body of /server_info, or of /model_info where that is missing, or None.

    Raises:
        ValueError: If /v1/models names no model, or a body is no such JSON.
    """
    listed = _models.decode(models).data
    if not listed:
        raise ValueError("the server's /v1/models names no model")
    found = _info.decode(info) if info is not None else _ServerInfo()
    return ServerIdentity(
        model=listed[0].id,
        model_path=found.model_path,
        context_length=listed[0].max_model_len or found.context_length,
        version=found.version,
        strategy=_strategy(found),
        cap=_info_cap(found),
        template_hash=_template_hash(found) if info is not None else None,
        reasoning_parser=found.reasoning_parser,
        tool_call_parser=found.tool_call_parser,
        sampling_defaults=_sampling_defaults(found),
        auto_truncate=bool(found.allow_auto_truncate),
        facts=_facts(info, listed[0].max_model_len),
    )


def load_of_loads(body: bytes) -> ServerLoad:
    """Read /v1/loads. Raises ValueError if it is no such page."""
    loads = _loads.decode(body).loads
    if not loads:
        raise ValueError("the server's /v1/loads is empty")
    # The second of the moments is the sum of all decode batches: a token for each request in each.
    moments = [each.decode_moments or [] for each in loads]
    decoded = [each[1] for each in moments if len(each) > 1]
    prefilled = [each.total_prefill_uncached_tokens for each in loads]
    counts = prefilled[0] is not None
    return ServerLoad(
        running=sum(each.num_running_reqs for each in loads),
        queued=sum(each.num_waiting_reqs for each in loads),
        cap=sum(each.max_running_requests for each in loads) or None,
        token_usage=max((each.token_usage or 0.0 for each in loads), default=None),
        used_tokens=_sum([each.num_used_tokens for each in loads]),
        gen_throughput=sum(each.gen_throughput or 0.0 for each in loads) or None,
        gen_tokens_total=sum(decoded) if counts and decoded else None,
        prompt_tokens_total=sum(each or 0 for each in prefilled) if counts else None,
        counted_by="loads" if counts else "",
    )


def load_of_info(body: bytes) -> ServerLoad:
    """Read /server_info. Raises ValueError if it is no such page."""
    found = _info.decode(body)
    speeds = [each.last_gen_throughput or 0.0 for each in found.internal_states]
    return ServerLoad(cap=_info_cap(found), gen_throughput=sum(speeds) if speeds else None)


def load_of_get_load(body: bytes) -> ServerLoad:
    """Read /get_load of old versions. Raises ValueError if it is no such page."""
    ranks = _old_loads.decode(body)
    queued = sum(each.num_waiting_reqs for each in ranks)
    return ServerLoad(
        running=sum(each.num_reqs for each in ranks) - queued,
        queued=queued,
        used_tokens=_sum([each.num_tokens for each in ranks]),
    )


def combined(pages: Sequence[ServerLoad]) -> ServerLoad:
    """Make one reading of several pages: each figure from the first page that has it.

    The token totals come together from one page: /metrics if it has them, since they count each
    token there, and else the first that has any.
    """
    known: dict[str, Any] = {}
    for page in reversed(pages):
        known |= {
            name: value
            for name in ServerLoad.__struct_fields__
            if (value := getattr(page, name)) is not None and name not in _TOTALS
        }
    counting = sorted(
        (page for page in pages if page.counted_by), key=lambda page: page.counted_by != "metrics"
    )
    for page in counting[:1]:
        known |= {name: getattr(page, name) for name in _TOTALS}
    return ServerLoad(**known)


def with_log(pages: ServerLoad, log: ServerLoad) -> ServerLoad:
    """Add to what a server's pages tell what only its log does.

    The log's token totals come in where no page counts generated tokens: then all of them, for
    those of two sources must not be compared.
    """
    if pages.gen_tokens_total is None and log.gen_tokens_total is not None:
        pages = msgspec.structs.replace(
            pages, **{name: getattr(log, name) for name in _TOTALS}, gen_throughput=None
        )
    return combined([pages, log])


def _sum(figures: Sequence[int | None]) -> int | None:
    told = [each for each in figures if each is not None]
    return sum(told) if told else None


def _info_cap(found: _ServerInfo) -> int | None:
    # Not the top-level max_running_requests, which is what was asked for.
    caps = [each.effective_max_running_requests_per_dp or 0 for each in found.internal_states]
    return sum(caps) or None


def _strategy(found: _ServerInfo) -> str | None:
    if found.disable_radix_cache:
        return "no_radix"
    return found.mamba_radix_cache_strategy or found.mamba_scheduler_strategy


def _facts(info: bytes | None, context_length: int | None) -> ServerFacts | None:
    try:
        return facts_of_info(info, context_length=context_length) if info is not None else None
    except ValueError:
        # Another version's shape of what nothing but advice hangs on.
        return None


def _template_hash(found: _ServerInfo) -> str:
    decides = [
        found.chat_template,
        found.hf_chat_template_name,
        found.default_chat_template_kwargs,
    ]
    return rows_sha256(canonical_json(decides))[:16]


def _sampling_defaults(found: _ServerInfo) -> str | None:
    if found.sampling_defaults is None and found.preferred_sampling_params is None:
        return None
    preferred = canonical_json(found.preferred_sampling_params).decode()
    return f"{found.sampling_defaults or 'model'} {preferred}"
