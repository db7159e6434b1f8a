"""A run: its parameters, its record, its counters."""

from typing import Annotated, Any, Literal

import msgspec

from common.models.kinds import NonNegativeInt, PositiveInt


class Params(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The request parameters of a run, fixed when it is created; a row's own value wins.

    Attributes:
        max_tokens: Tokens to generate at most; "context" sends what the context leaves after the
            prompt; None when every row has its own.
        model: Served model name to send; None takes the first server's.
        sampling: Other members to send, by their OpenAI names (temperature, top_p, seed, stop …);
            for /generate they are translated into `sampling_params`.
        request_timeout_s: Time limit of one attempt; None derives it from max_tokens (≥ 600).
        attempts: Attempts within a try before a prompt fails.
        format: What shards are written as.
        keep_token_ids: Every choice of a row holds the token ids of its prompt and of itself, and
            the loss mask.
    """

    max_tokens: PositiveInt | Literal["context"] | None = None
    model: str | None = None
    sampling: dict[str, Any] = {}
    request_timeout_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    attempts: PositiveInt = 3
    format: Literal["jsonl.zst", "parquet"] = "jsonl.zst"
    keep_token_ids: bool = False


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`, and the member `record` of the run's hash in Redis.

    Attributes:
        run: Name; its RQ queue bears it.
        uid: Random, 32 hex digits: tells this run from another of the same name.
        params: See `Params`.
        output: `s3://bucket/prefix` or an absolute directory.
        partitions: Result streams; a key's partition is int(key) mod this.
        bits: Ledger buckets are the key's first `bits` bits.
        endpoint_url: S3 endpoint, None for the configured default. No credential is kept.
    """

    run: str
    uid: str
    params: Params
    output: str
    created_at: str
    partitions: PositiveInt = 1
    bits: NonNegativeInt = 12
    endpoint_url: str | None = None
    headrace_version: str = ""
    schema: int = 1


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """A run's counters, all read by one script: completed + … + queued = total at every reading.

    Attributes:
        in_flight: Leased keys.
        queued: Every other unfinished key: waiting in RQ's queue, parked, or not yet fed.
        unfed: Of the queued ones, those whose requests wait in `inputs/` until Redis has room.
        duplicates_dropped: Results that came for a key that had one already.
        retries: Attempts that were charged and did not end their prompt.
        truncated: Completions whose finish reason is length.
        empty: Completions without any text.
        repeating … clamped: Completions with that flag, see `common.quality`.
        stream_bytes, stream_entries: What waits in the result streams for the sink.
        s3_uploaded, s3_bytes: Rows and bytes committed in the store.
        active_ms: Time over all sittings in which something was claimed or finished.
    """

    total: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    in_flight: int = 0
    queued: int = 0
    unfed: int = 0
    duplicates_dropped: int = 0
    retries: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    truncated: int = 0
    empty: int = 0
    repeating: int = 0
    same_answer: int = 0
    unparsed_reasoning: int = 0
    reasoning_cut: int = 0
    prompt_cut: int = 0
    clamped: int = 0
    stream_bytes: int = 0
    stream_entries: int = 0
    s3_uploaded: int = 0
    s3_bytes: int = 0
    active_ms: int = 0
