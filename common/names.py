"""Build every name that Headrace uses in Redis and in the store. Nothing else spells one.

Redis, prefix `headrace:` (RQ's own keys keep RQ's prefix `rq:`):

    headrace:runs                zset   run -> claim order (priority, then age)
    headrace:tombstone:RUN       string uid of a forgotten run, 24 h
    headrace:forgetting:RUN      string JSON of what `producer forget` has still to remove
    headrace:worker_groups       hash   group id -> JSON of its last figures (`at_ms` says when)
    headrace:present             hash   worker group -> when it was last heard (ms), whether it has
                                        left since (0 or 1), JSON of what it was (`marks.events`)
    headrace:telemetry           zset   worker group -> when its last sample came, ms of Redis TIME
    headrace:telemetry:GROUP     stream its samples (`common.telemetry`), some hundred; 3 days
    headrace:renewed:EPOCH       string Redis TIME since when this process has renewed its leases
                                        without a gap, and of the last time; runs out by itself
    headrace:slots:SERVER        hash   epoch -> JSON {slots, deadline_ms, rid_prefix, group, drain
                                        (token of the drain that this process has heard of)}
    headrace:drain:SERVER        string JSON {token, owner, reason, deadline_ms}: nobody opens a
                                        request there; runs out unless its owner renews it
    headrace:run:RUN             hash   uid, record (run.json), params, partitions, bits, output,
                                        created_ms, priority, paused, cancelled, cancel_done (all
                                        has ended, for so many objects of `inputs/`), seal, pinned,
                                        reconciled (run_id/replid of Redis), inputs_seq,
                                        ended (the state that `_SUCCESS` was written
                                        for, or `pending`), suspect
                                        (jobs that are tried by themselves), faults (in a row),
                                        death_ms (when a server or worker process last died),
                                        last_active_ms, audited_ms, sink_error and
                                        sink_error_ms (why a sink stores nothing, and when it
                                        said so), rest (some prompts may
                                        stand in `inputs/` alone: Redis had no room for them),
                                        window (most requests in Redis), feed_from, feed_dirty and
                                        feed_by (where in `inputs/` prompts wait: `feed.lua`)
    headrace:run:RUN:counts      hash   the counters of `models.Counts`, and reason:WORD, how
                                        often a prompt failed for it
    headrace:run:RUN:open        hash   producers that have begun and not ended: source -> JSON
    headrace:run:RUN:l:BUCKET    hash   ledger bucket: rest of the key -> 9 bytes and up (below)
    headrace:run:RUN:leases      zset   job id -> deadline, ms of Redis TIME
    headrace:run:RUN:parked      zset   job id -> instant it was parked, less 10^13 ms for each of
                                        its deaths and lost leases: suspects of server deaths
    headrace:run:RUN:results:PP  stream one completion, failure or cancellation an entry
    headrace:run:RUN:sink:PP     hash   token, deadline_ms, seq (last closed), intent, tries,
                                        limit (most rows of a batch after one that failed) and
                                        until (the entry up to which that holds),
                                        error (why nothing is stored at present)
    headrace:run:RUN:sinks       zset   token of a sink that serves the run -> deadline, ms
    headrace:run:RUN:set_aside   hash   PP:ENTRY_ID -> entry that is nobody's result (cmsgpack)
    headrace:run:RUN:notified:H  string JSON of what the hook of hash H was told last; 30 days
    headrace:run:RUN:maintenance string token of the process that reconciles or ends the run
    headrace:run:RUN:feed        string token of the process that feeds requests from `inputs/`
    headrace:run:RUN:rate        hash   5-second bucket of Redis TIME -> completions;
                                        0 where somebody was at work and none ended
    headrace:run:RUN:history     hash   half-minute bucket of Redis TIME -> completions, their
                                        tokens, tokens that servers generated, ms of running
                                        requests, ms of ready worker groups; six hours of it
    headrace:run:RUN:marks       hash   m:ID -> JSON of a mark; a:ID: it is in the store; o:KEY:
                                        the mark that events of this kind join, until when (ms); n:
                                        how many marks have set themselves
    rq:job:KEY                   hash   RQ's lean job, and: request, attempts, deaths, lost, turns,
                                        holder (epoch of the lease's owner), alone (1 or few: how
                                        it was tried as a suspect), died_alone (deaths while it
                                        was tried alone); turns: the finished ones of a prompt
                                        with several, a JSON line each

Ledger: one field a key. Bucket = the key's first `bits` bits, as lower-case hex without padding;
field = the key without its first `bits // 8` bytes, so that bucket and field give the key back;
value = fingerprint (8 bytes) + state (1 byte: q queued, u queued and unfed: its request is in
`inputs/` alone, d done, f failed, c cancelled) + try (decimal digits, nothing for the first).
Buckets hold 32 to 64 keys at creation, and four times as many stay below
`hash-max-listpack-entries` (512), where a key costs about 35 bytes.

Store, below the run's output prefix (`NN-SEQ` = partition as 2 digits, sequence as 8; names that
hold a number or a hash are made and read by `common.object_names`):

    run.json
    inputs/SEQ-HASH.jsonl.zst        accepted prompts; inputs/SEQ-seal-HASH.json a producer's seal
    shards/PP-SEQ-HASH.jsonl.zst     failures/PP-SEQ-HASH.jsonl.zst     keys/PP-SEQ-HASH.tsv.zst
    manifest/PP-SEQ.json             or PP-SEQ-HASH.json where conditions are not honoured
    marks/ID.json                    ID = its instant in ms, `hand` or `self`, 12 hex digits
    telemetry/FROM-TO-HASH.jsonl.zst  samples of that time, UTC: `common.telemetry`
    progress.json _SUCCESS cancelled.json pinned.json
"""

import re

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""What a run may be called: it becomes part of Redis keys, paths and RQ's queue name."""

RUNS = "headrace:runs"
WORKER_GROUPS = "headrace:worker_groups"
PRESENT = "headrace:present"
TELEMETRY_GROUPS = "headrace:telemetry"
RIGHTS_TRIED = "headrace:rights"
DOCTOR = "headrace:doctor:"
"""Before what `workers doctor` writes, reads and removes."""
"""Stem of the keys on which a user's rights are tried; gone when that has been done."""

KEY_BYTES = 16
LEAST_LEDGER_BITS = 12
KEYS_PER_BUCKET = 64


def run(name: str) -> str:
    """Name the run's hash, the stem of all its keys."""
    return f"headrace:run:{name}"


REASON = b"reason:"
"""Begins the members of `counts` that say how often prompts failed for one reason."""


def counts(name: str) -> str:
    """Name the hash of the run's counters."""
    return f"headrace:run:{name}:counts"


def open_producers(name: str) -> str:
    """Name the hash of producers that have begun and not ended."""
    return f"headrace:run:{name}:open"


def ledger_stem(name: str) -> str:
    """Name what a ledger bucket's hex number is appended to."""
    return f"headrace:run:{name}:l:"


def ledger_bucket(name: str, key: bytes, bits: int) -> str:
    """Name the ledger bucket that holds `key` (16 bytes)."""
    return f"{ledger_stem(name)}{int.from_bytes(key[:4]) >> (32 - bits):x}"


def ledger_field(key: bytes, bits: int) -> bytes:
    """Give the field of `key` (16 bytes) within its bucket."""
    return key[bits // 8 :]


def ledger_bits(prompts: int) -> int:
    """Choose how many bits of a key name its bucket, for a run that begins with so many."""
    wanted = (max(prompts, 1) - 1) // KEYS_PER_BUCKET
    return min(max(LEAST_LEDGER_BITS, wanted.bit_length()), 28)


def leases(name: str) -> str:
    """Name the zset of leased jobs."""
    return f"headrace:run:{name}:leases"


def parked(name: str) -> str:
    """Name the zset of jobs that were in flight at server deaths."""
    return f"headrace:run:{name}:parked"


def results(name: str, partition: int) -> str:
    """Name the result stream of one partition."""
    return f"headrace:run:{name}:results:{partition:02d}"


def sink(name: str, partition: int) -> str:
    """Name the hash with one partition's sink lease, sequence and intent."""
    return f"headrace:run:{name}:sink:{partition:02d}"


def sinks(name: str) -> str:
    """Name the zset of sinks that serve the run: how many share its partitions."""
    return f"headrace:run:{name}:sinks"


def set_aside(name: str) -> str:
    """Name the hash of stream entries that no prompt can be found for."""
    return f"headrace:run:{name}:set_aside"


def notified(name: str, hook: str) -> str:
    """Name the string that says what a hook was told of the run last."""
    return f"headrace:run:{name}:notified:{hook}"


def maintenance(name: str) -> str:
    """Name the run-wide lease of reconcile and end test."""
    return f"headrace:run:{name}:maintenance"


def feed(name: str) -> str:
    """Name the run-wide lease of feeding."""
    return f"headrace:run:{name}:feed"


def rate(name: str) -> str:
    """Name the hash of completions per 5 seconds."""
    return f"headrace:run:{name}:rate"


def history(name: str) -> str:
    """Name the hash of what was done and generated in each half minute."""
    return f"headrace:run:{name}:history"


def marks(name: str) -> str:
    """Name the hash of the run's marks."""
    return f"headrace:run:{name}:marks"


def tombstone(name: str) -> str:
    """Name the string that says a run was forgotten on purpose."""
    return f"headrace:tombstone:{name}"


def forgetting(name: str) -> str:
    """Name the string that says what of a run is still to be removed."""
    return f"headrace:forgetting:{name}"


def keys_of(name: str, partitions: int) -> list[str]:
    """Name every key of a run but its ledger's buckets and its jobs, which the ledger names.

    What runs out by itself is not among them, nor what says that the run was forgotten.
    """
    lanes = range(partitions)
    return [
        run(name),
        counts(name),
        open_producers(name),
        leases(name),
        parked(name),
        *(results(name, lane) for lane in lanes),
        *(sink(name, lane) for lane in lanes),
        sinks(name),
        set_aside(name),
        maintenance(name),
        feed(name),
        rate(name),
        history(name),
        marks(name),
        rq_queue(name),
        rq_started(name),
        rq_failed(name),
        rq_canceled(name),
        *(f"rq:{registry}:{name}" for registry in _RQ_REGISTRIES),
    ]


def slots(server: str) -> str:
    """Name the hash of a server's slot holders; `server` is its canonical URL."""
    return f"headrace:slots:{server}"


def drain(server: str) -> str:
    """Name the string that says that nobody opens requests at a server, by its canonical URL."""
    return f"headrace:drain:{server}"


def telemetry(group: str) -> str:
    """Name the stream of a worker group's samples."""
    return f"{TELEMETRY_GROUPS}:{group}"


def renewed(epoch: str) -> str:
    """Name the string that says how long a process has renewed its leases without a gap."""
    return f"headrace:renewed:{epoch}"


# --- RQ's keys -----------------------------------------------------------------------------------

RQ_QUEUES = "rq:queues"
RQ_SUSPENDED = "rq:suspended"
RQ_JOB_STEM = "rq:job:"
RQ_RIGHTS_TRIED = "rq:headrace_rights"
RQ_CHANNEL_TRIED = "rq:pubsub:headrace_rights"
_RQ_REGISTRIES = ("finished", "deferred", "scheduled", "ready", "clean_registries")
"""What RQ's own workers and tools may leave of a queue besides what Headrace uses."""


def rq_queue(name: str) -> str:
    """Name RQ's list of queued job ids."""
    return f"rq:queue:{name}"


def rq_started(name: str) -> str:
    """Name RQ's zset of started jobs, which `rq info` counts as executing."""
    return f"rq:wip:{name}"


def rq_failed(name: str) -> str:
    """Name RQ's failed-job registry."""
    return f"rq:failed:{name}"


def rq_canceled(name: str) -> str:
    """Name RQ's canceled-job registry."""
    return f"rq:canceled:{name}"


def rq_job(job_id: str) -> str:
    """Name RQ's hash of one job."""
    return f"{RQ_JOB_STEM}{job_id}"


def rq_job_results(job_id: str) -> str:
    """Name what RQ's own worker leaves of a job that it ran."""
    return f"rq:results:{job_id}"


def rq_job_executions(job_id: str) -> str:
    """Name RQ's zset of a job's runs by its own workers."""
    return f"rq:executions:{job_id}"


# --- The store -----------------------------------------------------------------------------------

RUN_JSON = "run.json"
SUCCESS = "_SUCCESS"
PROGRESS = "progress.json"
CANCELLED = "cancelled.json"
PINNED = "pinned.json"
INPUTS = "inputs/"
SHARDS = "shards/"
FAILURES = "failures/"
KEYS = "keys/"
MANIFEST = "manifest/"
MARKS = "marks/"
TELEMETRY = "telemetry/"
