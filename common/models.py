"""The records that cross a border: input row, run, result row, manifest, counters. Pure.

All are msgspec structs: decode at every border, since constraints hold at decoding and not at
construction. `schema` numbers grow only by adding members.
"""

from typing import Annotated, Any, Literal

import msgspec

Endpoint = Literal["chat", "completions", "generate"]
"""Which SGLang route a prompt asks for: /v1/chat/completions, /v1/completions, /generate."""

Outcome = Literal["completed", "failed", "cancelled"]
"""What a prompt ends as. A failure and a cancellation are rows of `failures/`."""

State = Literal["queued", "completed", "failed", "cancelled"]
"""What the ledger says of a key."""

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]


class Prompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An accepted prompt without its key: the bytes that ride in the RQ job's own hash.

    Attributes:
        id: The author's id as JSON text: a string or a number, spelled as given.
        line: Line of the source file, from 1.
        source: Base name of the source file, empty for stdin.
        sample: Which of the prompt's samples, from 0.
        endpoint: The SGLang route.
        body: The request as the row gives it: content and the row's own parameters, in the
            endpoint's own shape (`messages` for chat, `prompt` for completions, `text` or
            `input_ids` and `sampling_params` for generate). The flags' parameters are not in it.
        extra: Members of the row that are no part of the request; they come back in the result.
    """

    id: msgspec.Raw
    line: NonNegativeInt
    endpoint: Endpoint
    body: dict[str, Any]
    source: str = ""
    sample: NonNegativeInt = 0
    extra: dict[str, Any] = {}


class InputRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an `inputs/` object: `{"key":…,"fp":…,"prompt":{…}}`.

    Attributes:
        key: 32 hex digits.
        fp: Fingerprint, 16 hex digits.
        prompt: JSON of a `Prompt`, kept as bytes so that feeding it to Redis costs no encoding.
    """

    key: str
    fp: str
    prompt: msgspec.Raw


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """A producer's last word, the object `inputs/SEQ-seal-HASH.json`.

    The run is sealed when the object of `inputs/` with the highest sequence is a seal that says so
    and no producer is open.

    Attributes:
        sealed: False when the producer said that more files will come.
        source: What was enqueued, for people.
        rows: Prompts that this producer added.
    """

    sealed: bool
    source: str
    rows: NonNegativeInt
    ended_at: str


class Params(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The request parameters of a run, fixed when it is created; a row's own value wins.

    Attributes:
        max_tokens: Tokens to generate at most; "context" sends what the context leaves after the
            prompt; None when every row has its own.
        model: Served model name to send; None takes the first server's.
        sampling: Other members to send, by their OpenAI names (temperature, top_p, seed, stop …);
            for /generate they are translated into `sampling_params`.
        request_timeout_s: Time limit of one attempt; None derives it from max_tokens, at least 600.
        attempts: Attempts within a try before a prompt fails.
        format: What shards are written as.
    """

    max_tokens: PositiveInt | Literal["context"] | None = None
    model: str | None = None
    sampling: dict[str, Any] = {}
    request_timeout_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    attempts: PositiveInt = 3
    format: Literal["jsonl.zst", "parquet"] = "jsonl.zst"


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


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request; completion tokens cover all its choices, reasoning included."""

    prompt_tokens: NonNegativeInt
    completion_tokens: NonNegativeInt
    reasoning_tokens: NonNegativeInt = 0
    cached_tokens: NonNegativeInt = 0


class Choice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of the answer's choices, in the server's order.

    Attributes:
        index: From 0.
        content: Text; None where the server gave none (tool calls, cut thinking).
        finish_reason: stop, length, tool_calls … as the server says.
        logprobs, token_ids, prompt_token_ids: Only when the row asked for them.
    """

    index: NonNegativeInt
    content: str | None
    finish_reason: str | None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None
    matched_stop: Any = None
    logprobs: Any = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a shard: what was asked, what came, and how.

    Attributes:
        id: As the author gave it, type and text.
        key, fingerprint: 32 and 16 hex digits; the fingerprint is the hash of the request that this
            row answers, so two swapped answers are found.
        messages: The conversation with the answer in its place, ready to train on; None for
            completions and generate, which have `prompt` instead.
        prompt: Text or token ids as given, None for chat.
        choices: Every choice.
        params: What was sent besides content: model, max_tokens, temperature, seed …
        tools: As given; in the row only when the prompt had them.
        params_hash: 16 hex digits of their canonical JSON.
        flags: Any of empty, truncated, clamped, reasoning_cut.
        latency_s: From sending the request to the last byte of its answer.
    """

    id: msgspec.Raw
    sample: NonNegativeInt
    key: str
    fingerprint: str
    line: NonNegativeInt
    source: str
    endpoint: Endpoint
    messages: list[Any] | None
    prompt: str | list[Any] | None
    choices: list[Choice]
    usage: Usage
    params: dict[str, Any]
    params_hash: str
    model: str
    server_version: str
    server: str
    try_: PositiveInt = msgspec.field(name="try")
    attempts: PositiveInt
    latency_s: float
    completed_at: str
    flags: list[str]
    extra: dict[str, Any]
    tools: list[Any] | None = None


class FailureRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `failures/`: the prompt's whole request, and why it has no completion.

    Attributes:
        outcome: failed or cancelled.
        reason: One word of `workers.faults`, for example bad_request, timeout, poison, cancelled.
        status: HTTP status of the last attempt, None when there was none.
        message: The server's text, at most 2,000 characters.
        request: The `Prompt` as it was accepted.
    """

    id: msgspec.Raw
    sample: NonNegativeInt
    key: str
    fingerprint: str
    line: NonNegativeInt
    source: str
    outcome: Literal["failed", "cancelled"]
    reason: str
    status: int | None
    message: str
    server: str
    try_: PositiveInt = msgspec.field(name="try")
    attempts: NonNegativeInt
    failed_at: str
    request: msgspec.Raw


class PartFile(msgspec.Struct, frozen=True, kw_only=True):
    """One object of a batch, as its manifest names it; `sha256` is of the uncompressed rows."""

    name: str
    rows: NonNegativeInt
    bytes: NonNegativeInt
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The commit record of one sequence of one partition; with `void` it commits nothing.

    Attributes:
        shard, failures: None where the batch has no such rows.
        keys: The list of every record in the batch: `key TAB fp TAB try TAB outcome TAB
            prompt_tokens TAB completion_tokens`, a line each, in the rows' order.
        first, last: Stream entry ids, empty for an adoption or a void.
        input_tokens, output_tokens: Sums over the batch's completions.
    """

    uid: str
    partition: NonNegativeInt
    seq: PositiveInt
    void: bool = False
    shard: PartFile | None = None
    failures: PartFile | None = None
    keys: PartFile | None = None
    first: str = ""
    last: str = ""
    completed: NonNegativeInt = 0
    failed: NonNegativeInt = 0
    cancelled: NonNegativeInt = 0
    input_tokens: NonNegativeInt = 0
    output_tokens: NonNegativeInt = 0
    written_at: str = ""
    schema: int = 1


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One terminal record as `keys/` lists it: what the reader function chooses among.

    Attributes:
        key, fingerprint: 16 and 8 bytes.
    """

    key: bytes
    fingerprint: bytes
    try_: PositiveInt
    outcome: Outcome
    input_tokens: NonNegativeInt = 0
    output_tokens: NonNegativeInt = 0


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """A run's counters, all read by one script: completed + … + queued = total at every reading.

    Attributes:
        in_flight: Leased keys.
        queued: Every other unfinished key: waiting in RQ's queue, parked, or not yet fed.
        duplicates_dropped: Results that came for a key that had one already.
        retries: Attempts that were charged and did not end their prompt.
        truncated: Completions whose finish reason is length.
        empty: Completions without any text.
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
    duplicates_dropped: int = 0
    retries: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    truncated: int = 0
    empty: int = 0
    stream_bytes: int = 0
    stream_entries: int = 0
    s3_uploaded: int = 0
    s3_bytes: int = 0
    active_ms: int = 0


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One leased job, as the claim script hands it out.

    Attributes:
        run, uid: Whose prompt it is.
        key, fingerprint: 16 and 8 bytes; the job id is the key in hex.
        try_: Which try this is, from 1.
        attempts, deaths, lost: Charged attempts, server deaths and lost leases so far in this try.
        prompt: JSON of a `Prompt`.
    """

    run: str
    uid: str
    key: bytes
    fingerprint: bytes
    try_: int
    attempts: int
    deaths: int
    lost: int
    prompt: bytes


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker group reports of a prompt that has ended; one entry of a result stream.

    Attributes:
        run, uid, key, fingerprint, try_: Copied from the claim.
        row: A finished line, `CompletionRow` or `FailureRow` as JSON, without newline.
        flags: truncated, empty: counted.
        reason: Why it failed, one word; empty for a completion.
        repeat: This call repeats one whose answer was lost: a drop is not counted as a duplicate.
    """

    run: str
    uid: str
    key: bytes
    fingerprint: bytes
    try_: int
    outcome: Outcome
    row: bytes
    input_tokens: int = 0
    output_tokens: int = 0
    flags: tuple[str, ...] = ()
    reason: str = ""
    repeat: bool = False


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A `Result` as the sink reads it back from a result stream.

    Attributes:
        entry_id: Redis stream id.
    """

    entry_id: str
    key: bytes
    fingerprint: bytes
    try_: int
    outcome: Outcome
    row: bytes
    input_tokens: int
    output_tokens: int
