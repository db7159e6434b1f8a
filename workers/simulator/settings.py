"""Everything that the simulator is told at its start, checked once and passed as a value."""

import functools
from typing import Annotated, Any, Literal

import msgspec

from workers.simulator.distributions import Distribution

Positive = Annotated[float, msgspec.Meta(gt=0)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]

Strategy = Literal["no_buffer", "extra_buffer", "extra_buffer_lazy", "no_radix"]

# Mamba states in the pool, reserved by a running request, and really used by it: the first two
# fitted to the run of design.md §1 (caps 72 and 32; usage 0.61 at 32 requests).
STATES: dict[Strategy, tuple[int, int, int]] = {
    "no_buffer": (216, 3, 2),
    "extra_buffer": (160, 5, 3),
    "extra_buffer_lazy": (160, 4, 2),
    "no_radix": (216, 1, 1),
}
_RESERVED_WITHOUT_OVERLAP = 4


@functools.cache
def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all servers of one simulator share.

    Attributes:
        servers: How many, on consecutive ports.
        port: First port; 0 takes free ones.
        ports: The ports one by one, instead of `servers` and `port`.
        sglang_version: Whose shapes to answer in, e.g. `0.5.23` or `0.5.12.post1`.
        model: Served model name.
        strategy: Mamba radix cache strategy; decides the pool and so the cap. `no_radix` is none:
            the radix cache is off.
        overlap: Whether the scheduler overlaps with the GPU; extra_buffer reserves less without.
        cap: Requests that may run at once; None derives it from the pool.
        max_running_requests: What the operator asked for; lowers the cap, never raises it.
        mamba_states: States in the pool; None takes the strategy's.
        kv_tokens: Tokens that the KV pool holds.
        context_length: Tokens of prompt and answer together.
        max_queued_requests: Waiting requests beyond which a new one gets 503; None: no limit.
        waiting_timeout_s, running_timeout_s: The server's own deadlines; None: none.
        rate_max, rate_half: A batch of b generates rate_max * b / (b + rate_half) tokens/s.
        latency: Seconds that each request runs, instead of the throughput model.
        answer_tokens: Natural length of answers, before max_tokens cuts them.
        answer_bytes: Bytes of an answer's text; None: four a token.
        speed: How much faster than real time all simulated durations pass.
        slow: Relative speed of some servers, by their place from 0: `{2: 0.5}`.
        reasoning: Answer with reasoning_content, as with a reasoning parser.
        dirty: Append to every answer what random models give: NUL, U+FFFD, lone surrogates.
        tokens_per_char: Tokens of a prompt per character of it.
        metrics: Whether /metrics is there, as with --enable-metrics.
        missing: Paths that are answered 404, as by a gateway before the server.
        arguments: What else /server_info says of the server's arguments.
        api_key: Bearer key that requests must carry; None: open.
        keep_alive_s: Idle seconds after which a connection is closed (real time).
        disconnect_poll_s: Seconds until the server notices that a client has gone.
        known_rids_only: Ignore an abort whose rid is not that of an open request, as a server
            with one tokenizer worker does (the default there), before the prefix is looked at.
        info: Members of /server_info and /model_info that differ from what else is set.
        log: File that gets a line at each request's begin and end.
        sglang_log: File that gets SGLang's own lines; `{port}` in it is replaced.
    """

    servers: PositiveInt = 2
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 30000
    ports: tuple[PositiveInt, ...] = ()
    sglang_version: str = "0.5.23"
    model: str = "tiny"
    strategy: Strategy = "no_buffer"
    overlap: bool = True
    cap: PositiveInt | None = None
    max_running_requests: PositiveInt | None = None
    mamba_states: PositiveInt | None = None
    kv_tokens: PositiveInt = 450_000
    context_length: PositiveInt = 32_768
    max_queued_requests: int | None = None
    waiting_timeout_s: Positive | None = None
    running_timeout_s: Positive | None = None
    rate_max: Positive = 3015.0
    rate_half: NonNegative = 112.0
    latency: Distribution | None = None
    answer_tokens: Distribution = Distribution("lognormal", 3150.0, 0.8)
    answer_bytes: PositiveInt | None = None
    speed: Positive = 1.0
    slow: dict[int, Positive] = msgspec.field(default_factory=dict)
    reasoning: bool = False
    dirty: bool = False
    tokens_per_char: Positive = 0.25
    metrics: bool = True
    missing: tuple[str, ...] = ()
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    api_key: str | None = None
    keep_alive_s: Positive = 5.0
    disconnect_poll_s: NonNegative = 4.0
    known_rids_only: bool = False
    info: dict[str, Any] = msgspec.field(default_factory=dict)
    log: str | None = None
    sglang_log: str | None = None

    @property
    def all_ports(self) -> tuple[int, ...]:
        """The port of each server; zeros where a free one is to be taken."""
        if self.ports or not self.port:
            return self.ports or (0,) * self.servers
        return tuple(range(self.port, self.port + self.servers))

    @property
    def pool(self) -> "MambaPool":
        """The mamba pool that these settings give."""
        states, reserved, used = STATES[self.strategy]
        if self.strategy == "extra_buffer" and not self.overlap:
            reserved = _RESERVED_WITHOUT_OVERLAP
        if self.strategy == "no_radix":
            states = self.max_running_requests or states
        states = self.mamba_states or states
        if self.cap is not None:
            # A cap that was asked for outright is granted; the pool grows to hold it.
            return MambaPool(max(states, self.cap * reserved), reserved, used, self.cap)
        cap = max(states // reserved, 1)
        if self.max_running_requests is not None:
            cap = min(cap, self.max_running_requests)
        return MambaPool(states, reserved, used, cap)

    @property
    def version(self) -> tuple[int, ...]:
        """The version as numbers, without what follows: `0.5.12.post1` gives (0, 5, 12)."""
        return _numbers(self.sglang_version)

    @property
    def max_input_tokens(self) -> int:
        """Longest prompt that the server takes: six tokens less than its context or pool."""
        return max(min(self.context_length, self.kv_tokens) - 6, 1)


class MambaPool(msgspec.Struct, frozen=True):
    """The states of the recurrent layers, which bound how many requests run at once.

    Attributes:
        states: In the pool.
        reserved: By one running request, of which it fills `used`.
        used: See `reserved`.
        cap: Requests that run at once.
    """

    states: int
    reserved: int
    used: int
    cap: int

    def usage(self, running: int) -> float:
        """Share of the states in use while `running` requests run; stays below 1 at the cap."""
        return running * self.used / self.states
