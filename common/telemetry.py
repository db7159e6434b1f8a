"""Samples of a worker group and its server: how they stand in Redis and in `telemetry/`. Pure.

    Redis    one stream a worker group, `MOST_SAMPLES` entries, each an array of msgpack that no
             text can make larger than `MOST_SAMPLE_BYTES`; its instant is the entry's id. About
             110 KB a worker group, never more than half a megabyte: 45 MB for 400 GPUs. Gone
             three days after the last one
    store    `telemetry/FROM-TO-HASH.jsonl.zst`: a `TelemetryRow` a line, in the order of time, of
             the worker groups that held prompts of the run at the time; some minutes an object,
             cut at whole multiples of them, and one more when the run ends

Rows with equal `group`, `epoch` and `at_ms` are one row: where a sink froze in the midst of a
write and another took its place, an instant may stand in two objects.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from common import names
from common.group_figures import GroupFigures

MOST_SAMPLES = 720
"""An hour at one every five seconds: what a sink that is away may miss."""

MOST_SAMPLE_BYTES = 512
MOST_RUNS = 8
UID_CHARS = 12
KEPT_MS = 3 * 86_400_000

_MOST_TEXT = {"epoch": 16, "server": 120, "state": 20, "strategy": 24, "version": 24}
_SHARE = 10_000
_RATE = 10
_MOST_INT = 2**63 - 1


class Sample(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One worker group's process at one instant, as Redis holds it; new members come last.

    Attributes:
        epoch: Of the process.
        server: Its server's URL.
        state: The word of `GroupFigures`.
        runs: First digits of the uids of runs of which it held prompts since the last sample ->
            open requests now.
        in_flight, leased, bound, cap, completed, running, queued: As in `GroupFigures`.
        gen_tokens_per_10s, prefill_tokens_per_10s: Tokens in ten seconds.
        kv_usage_e4, mamba_usage_e4, cached_share_e4: Ten-thousandths.
        gen_tokens_total, prompt_tokens_total, cached_tokens_total, retracted_total: Counters of
            the server; compare only those of one `counted_by`, and take a smaller one for a
            restart.
        counted_by: metrics, loads, log, or empty.
        told_ms: How old the newest of the server's figures were.
        dropped: Samples of this process that Redis did not take.
    """

    epoch: str
    server: str
    state: str
    runs: dict[str, int]
    in_flight: int
    leased: int
    bound: int
    completed: int
    cap: int | None = None
    running: int | None = None
    queued: int | None = None
    gen_tokens_per_10s: int | None = None
    prefill_tokens_per_10s: int | None = None
    kv_usage_e4: int | None = None
    mamba_usage_e4: int | None = None
    cached_share_e4: int | None = None
    gen_tokens_total: int | None = None
    prompt_tokens_total: int | None = None
    cached_tokens_total: int | None = None
    retracted_total: int | None = None
    counted_by: str = ""
    strategy: str | None = None
    version: str | None = None
    told_ms: int | None = None
    dropped: int = 0


class ServerCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What of a sample `GroupFigures` does not hold; members as in `Sample`."""

    gen_tokens_total: float | None = None
    prompt_tokens_total: float | None = None
    cached_tokens_total: float | None = None
    retracted_total: float | None = None
    prefill_tokens_per_s: float | None = None
    counted_by: str = ""


class TelemetryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an object of `telemetry/`: a worker group and its server at one instant.

    Attributes:
        at: Instant by Redis' clock, ISO 8601 in UTC; `at_ms` the same in milliseconds.
        group: `gpu0@host`.
        epoch: Of its process; `completed` and `dropped` count from that one's start.
        of_run: Open requests of the run that the object belongs to; `in_flight` are all of them.
        in_flight, leased, bound, cap, running, queued, state, strategy, completed: As in status.
        gen_tokens_per_s, prefill_tokens_per_s: Over the last seconds.
        kv_usage, mamba_usage: Shares of the pools, 0 to 1.
        cached_share: Of the tokens of prompts over the last five minutes.
        *_total, counted_by: See `Sample`.
        told_s: How old the newest of the server's figures were.
        dropped: Samples of this process that Redis did not take.
    """

    at: str
    at_ms: int
    group: str
    epoch: str
    server: str
    state: str
    strategy: str | None
    version: str | None
    of_run: int
    in_flight: int
    leased: int
    bound: int
    cap: int | None
    completed: int
    running: int | None
    queued: int | None
    gen_tokens_per_s: float | None
    prefill_tokens_per_s: float | None
    kv_usage: float | None
    mamba_usage: float | None
    cached_share: float | None
    gen_tokens_total: int | None
    prompt_tokens_total: int | None
    cached_tokens_total: int | None
    retracted_total: int | None
    counted_by: str
    told_s: float | None
    dropped: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Sample)


def sample_of(
    figures: GroupFigures,
    counters: ServerCounters,
    *,
    runs: Mapping[str, int],
    dropped: int,
) -> Sample:
    """Make a sample of what a process says of itself; texts that are too long are cut.

    Args:
        figures: As published.
        counters: What they do not hold.
        runs: uid -> open requests; beyond `MOST_RUNS` those with the fewest are left out.
        dropped: See `Sample`.
    """
    most = sorted(runs, key=lambda uid: (-runs[uid], uid))[:MOST_RUNS]
    return Sample(
        epoch=_text("epoch", figures.epoch),
        server=_text("server", figures.server),
        state=_text("state", figures.state),
        runs={_cut(uid, UID_CHARS): _int(runs[uid]) or 0 for uid in most},
        in_flight=figures.in_flight,
        leased=figures.leased,
        bound=figures.bound,
        completed=figures.completed,
        cap=_int(figures.cap),
        running=_int(figures.running),
        queued=_int(figures.queued),
        gen_tokens_per_10s=_int(figures.gen_tokens_per_s, _RATE),
        prefill_tokens_per_10s=_int(counters.prefill_tokens_per_s, _RATE),
        kv_usage_e4=_int(figures.kv_usage, _SHARE),
        mamba_usage_e4=_int(figures.mamba_usage, _SHARE),
        cached_share_e4=_int(figures.cached_share, _SHARE),
        gen_tokens_total=_int(counters.gen_tokens_total),
        prompt_tokens_total=_int(counters.prompt_tokens_total),
        cached_tokens_total=_int(counters.cached_tokens_total),
        retracted_total=_int(counters.retracted_total),
        counted_by=counters.counted_by,
        strategy=_text("strategy", figures.strategy) if figures.strategy else None,
        version=_text("version", figures.server_version) if figures.server_version else None,
        told_ms=_int(figures.told_s, 1000),
        dropped=dropped,
    )


def encode(sample: Sample) -> bytes:
    """Give a sample as Redis keeps it."""
    return _encoder.encode(sample)


def decode(data: bytes) -> Sample:
    """Read a sample; a later version's additions are passed over.

    Raises:
        msgspec.MsgspecError: It is none.
    """
    return _decoder.decode(data)


def row_of(sample: Sample, *, at_ms: int, group: str, uid: str) -> TelemetryRow | None:
    """Give a sample as a row of a run's `telemetry/`; None where it held none of its prompts."""
    of_run = sample.runs.get(uid[:UID_CHARS])
    if of_run is None:
        return None
    at = datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")
    return TelemetryRow(
        at=at.replace("+00:00", "Z"),
        at_ms=at_ms,
        group=group,
        epoch=sample.epoch,
        server=sample.server,
        state=sample.state,
        strategy=sample.strategy,
        version=sample.version,
        of_run=of_run,
        in_flight=sample.in_flight,
        leased=sample.leased,
        bound=sample.bound,
        cap=sample.cap,
        completed=sample.completed,
        running=sample.running,
        queued=sample.queued,
        gen_tokens_per_s=_unscaled(sample.gen_tokens_per_10s, _RATE),
        prefill_tokens_per_s=_unscaled(sample.prefill_tokens_per_10s, _RATE),
        kv_usage=_unscaled(sample.kv_usage_e4, _SHARE),
        mamba_usage=_unscaled(sample.mamba_usage_e4, _SHARE),
        cached_share=_unscaled(sample.cached_share_e4, _SHARE),
        gen_tokens_total=sample.gen_tokens_total,
        prompt_tokens_total=sample.prompt_tokens_total,
        cached_tokens_total=sample.cached_tokens_total,
        retracted_total=sample.retracted_total,
        counted_by=sample.counted_by,
        told_s=_unscaled(sample.told_ms, 1000),
        dropped=sample.dropped,
    )


# --- Objects -------------------------------------------------------------------------------------

_NAME = re.compile(
    r"telemetry/(?P<begin>\d{8}T\d{6}Z)-(?P<end>\d{8}T\d{6}Z)-[0-9a-f]{16}\.jsonl\.zst"
)
_INSTANT = "%Y%m%dT%H%M%SZ"


def object_name(begin_ms: int, end_ms: int, digest: str) -> str:
    """Name the object with the rows from one whole second of Redis' clock to before another."""
    return f"{names.TELEMETRY}{_instant(begin_ms)}-{_instant(end_ms)}-{digest}.jsonl.zst"


def end_of(name: str) -> int | None:
    """Read back up to when an object goes, in milliseconds; None for one that is not ours."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    try:
        return round(
            datetime.strptime(match["end"], _INSTANT).replace(tzinfo=UTC).timestamp() * 1000
        )
    except ValueError:
        return None


def _instant(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms // 1000, UTC).strftime(_INSTANT)


def _text(member: str, text: str) -> str:
    return _cut(text, _MOST_TEXT[member])


def _cut(text: str, most_bytes: int) -> str:
    """Cut a text to what it may take; what cannot be written as UTF-8 is left out."""
    return text.encode(errors="ignore")[:most_bytes].decode(errors="ignore")


def _int(value: float | None, scale: int = 1) -> int | None:
    """Give a figure as a whole number; nothing for one that is none."""
    if value is None or value != value:  # noqa: PLR0124 - not a number
        return None
    return min(round(min(max(value, 0), _MOST_INT // scale) * scale), _MOST_INT)


def _unscaled(value: int | None, scale: int) -> float | None:
    return None if value is None else value / scale
