"""Headrace's contract: what producers and workers share.

Flow. An accepted prompt is written to `inputs/` in the store, then added to the ledger and to RQ's
queue in one step (`queue.Ledger.add`). A worker group leases it (`queue.Jobs.claim`), and ends it
in one atomic step that writes the result stream's entry, the ledger and the counters and removes
the job (`queue.Jobs.finish`). A sink moves entries to the store: intent, shard, keys, manifest,
then acknowledge. What is in the store is what has happened; Redis can be rebuilt from it
(`reconcile`).

Where things are:

    names object_names models ids  pure: every name, record, identity and error there is
      errors
    figures flow                   pure: rates, time left, the one status word; made from
      standing group_figures       pure: what is known of a run, and of a worker group
      snapshot                     which reads both from Redis
    marks/                         named instants of a run, what was before and after
    telemetry                      pure: a sample of a worker group, in Redis and in the store
    advice quality                 pure: what somebody should do; when answers are odd
    pins                           pure: what the first server of a run pins
    news notify hooks              what is told of a run, once for all; to a command or an address
    connect address embedded logs  Redis and logs, set up in one place
    refusals                       pure: why Redis refused, in words, and what to do
    queue/                         RQ's keys, ledger, leases, slots, and all Lua
    streams                        result streams, read and acknowledged by one sink a partition
    store/                         S3 or a directory behind five calls
    catalog manifests reader       what the store holds, and the one function that says what counts
    reconcile reconcile_steps      bring Redis and the store together:
      sequences overlap missing    close what is open, drop what is stored, add what is missing
    restore feeder                 requests from `inputs/`: of lost jobs; beyond the window
    ending emptied                 the end test and _SUCCESS; whether an output is the run's own
    cancelling cancelled_row       end a run for good, and the record of each prompt that it ends
    program flags settings options the frame of both programs: commands loaded when called, flags
      help completion              from the environment and headrace.toml; `config` says which
      config_command               setting holds
    utc leases                     wall time as records keep it; how long leases last
    harmless secrecy logs          no text of others acts on a terminal; no secret leaves a process
    last_words                     how a program ends: one line, an exit code
    mishaps                        errors of ours that nobody foresaw: told by kind and place
    replacing                      a file is whole at every instant
    descriptors                    how many files may be open
    crashpoints                    where tests kill a process

Decisions (2026-11-30):

* No consumer group on result streams. One sink a partition holds a lease with a random token and
  reads the stream itself from its start; an entry leaves it only by the acknowledging script.
  There is no list of pending entries to strand, claim or trim, which is where the reports about
  lost results come from.
* The ledger's field is the key without the whole bytes that its bucket tells, not a fixed suffix:
  so every key can be read back from the ledger, and the audit needs no second index.
* A job's request rides in RQ's own job hash, which stays small in memory only when
  `hash-max-listpack-value` allows it (deploy/redis.conf): 350 instead of 530 bytes a queued
  prompt.
* The window is of requests, not of the ledger: every accepted prompt has its entry at once (`u`,
  unfed), so conflicts, counts and the end of a run need no second source, and enqueue need not
  stay to feed. 10^7 prompts cost 0.4 GB of ledger. Failed prompts do not count against the window,
  though Redis keeps their requests.
* What Redis is reconciled for is its run_id and its replication id: data that came from another
  master (a replica that lagged, a master that was one for a while) changes only the second.
* Every right of Redis' user is tried before a command changes anything: a script that lacks one
  would find out in its midst, and half a finish would stay.
* `_SUCCESS` counts the manifests that commit something: a reconcile after the end closes a number
  with `void`, which makes nothing untrue.
* What a killed Redis forgets under `appendfsync everysec` while its disk is slow (milliseconds of
  answered writes) is treated like any older state: it changes run_id, is reconciled and redone.
* Sequences of `inputs/` come from Redis and go on above what the store has after a rebuild.
* A producer registers by what it reads (host and paths), so the same command again takes the place
  of one that was killed; a run that waits for a producer that never returns is sealed by `producer
  resume --seal`.
* A hook is told by whoever sees the figures (a sink's progress, `producer watch`); what it was
  told stands in Redis, and who sets it tells it. So restarts and more sinks repeat nothing, and a
  death between the two loses one notification at most.
* A run's first server is pinned in Redis by its worker group and in the store by a sink; where a
  rewound Redis has pinned another, the store's word counts.
* A flag's variable and key are its own name, made when its command is loaded; no table lists them,
  so a new flag has both at once. A program checks the tables of its own commands in headrace.toml;
  the other's are checked by the other, since neither imports the other. Rejected: a variable for
  each command and flag (HEADRACE_SINK_REDIS), since nearly every flag means one thing.
* An output of the settings yields to the one that a run has: a setting holds for many runs.
* headrace.toml may hold an address of Redis with a password (a warning asks for chmod 600), and no
  key of S3 or of the servers: those have places of their own.

This package imports neither `producer` nor `workers`. If this text is not what you expected of
`common`: Headrace wants an environment of its own, since other projects use that name too.
"""
