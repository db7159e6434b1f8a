"""Headrace's worker side: worker groups beside SGLang servers, sinks to the store, the simulator.

A worker group is one process with one event loop (`engine`). A job is in exactly one place: ready
(leased, no slot), open (a slot and a request), unsent (ended, Redis has not said so yet) or on its
way back. Its lease is renewed until it has left them all.

A package uses those below it, and none above (an import contract holds that).

    group                          the RQ worker: names, signals, RQ's own records
    node/                          the processes of one machine
      processes part_log           a child: started, started again, its log
      plan node rows table         all of a node (`workers up`): what it is, its life, how it is
      node_record redis_side       what it writes down, and that there is one; what it asks Redis
      restart/                     servers one by one under load (`workers restart`)
      doctor/                      whether Redis, the store, the servers, this machine are fit
    engine/                        claims, slots, requests, results in one loop (`engine`)
      eligible pace                what it serves; how fast to open, how much to hold
      core holdings desk           what its parts share: borders, jobs, calls to Redis
      endings returns              where a job goes that leaves its slot
      finisher turnkeeper          results, turns to Redis
      keeper aborts                slots, leases, reaping, takeover
      zombies                      what dead processes left at the server, ended and checked
      draining emptying            what it does while its server is drained
      showing telemeter            figures and samples to Redis
      marking sizing caretaker     what marks itself; room of the server; what idle ones do
      stopping                     the two stages of a stop
    supervisor/                    one server launched, watched, ended (`workers serve`)
      versions launch_line plan    what SGLang's versions call things; how one is started
      launching restarts           started and found again; when it is launched anew
      environment processes        what is installed; its processes, measured and ended whole
      emptying draining            its planned end
      log_writer server_log        its log, turned over by a process of its own
      log_place                    where that is, or the log of a server launched otherwise
      last_words got               why it ended, what a launch came to, in words
      records book orders          what is written down here, and is asked
    sink/                          from stream to store: `sink` all runs, `run_sink` one
      archive                      samples of its worker groups, to its telemetry/
    simulator/                     a stand-in for SGLang at the socket, and as a program
    prompt/                        one prompt: attempt after attempt, turn after turn (`serve`)
      job                          it is leased, ready for a slot, then holding one
      serving needs turns outcomes what that needs of others; what it asks next, ends as
      noticing                     who says that answers are nothing to train on
    servers/                       one server, now
      watch telling                is it there and working
      log_tail meter telemetry     what its log tells; rates; figures of now, or nothing
    client/                        the wire to SGLang (`sglang`), and whose fault it is (`faults`)
      oddities                     answers that are nothing to train on
    capacity/                      how many requests a server should hold (`capacity`)
      binding diagnosis strategies what binds its concurrency; in words; what others would give
      model_shape model_files      what a request costs, out of a model's config.json
    readings/                      what a server tells of itself, read
      facts loads metrics_page     what it was launched with; its figures, by its pages
      log_lines log_figures        and by its log: a line, and what lines come to
    options stop_request           what a worker group is told; that it shall stop
    lives rids                     which process it was; ids of requests
    releases timing                what differs between SGLang's releases; how often

When something fails:

    the server dies     open requests end with an error; their jobs go back with a server death,
                        the others
                        uncharged; claims stop until a real token comes
    the server hangs    no answer, no token counter moves, and a one-token request is not answered:
                        as above
    Redis away or full  open requests go on, results wait with their leases, nothing is claimed
    this process dies   its leases run out and others take its jobs; the next process of its name
                        aborts what is open at the server and takes over at once
    it stands still     past its slots' time it sends nothing, a request that is just connecting
                        included; what was aborted meanwhile by whoever took them costs no attempt
    an error of ours    while one prompt is served, that prompt is charged (`internal_error`);
                        anywhere else the whole process ends with 1 and gives back what it holds
    no descriptor, no   the slot waits as at a full server; the prompt and the server are not
    port left here      blamed
    its server is       no claim, no request opened; what is open ends, at a deadline it goes
    drained             back uncharged; that the server goes away is no death; then it goes on
                        with the first token. Its owner gone, the drain ends by itself
    SIGTERM             no claim, open requests get the grace, the rest goes back uncharged; SIGINT
                        and SIGHUP likewise, a second one does not wait; under `nohup` no SIGHUP

Decisions (2026-11-30):

* A server outlives a supervisor that is killed, and the next one takes it over if it would launch
  the same: loading a model takes minutes. Its processes are known by a mark in their environment
  and by their session, its log is written by a process that lives as long as they do, and a lock
  on the record keeps a second supervisor away, so that no GPU ever has two servers.
* What our flags say is not said again after `--`: two places for a port or a strategy make records
  untrue. Flags that SGLang has renamed are passed on by the name of the installed version.
* A supervisor asks an idle server for one token every half minute: a scheduler that stands still
  shows in no page.
* A restart that is asked for and does not start falls back to what ran before.
* Request ids come from a small set (epoch, slot, digit), because SGLang 0.5.23 ignores an abort by
  prefix: whoever takes over must be able to name each id (`rids`).
* What is held ready lasts a quarter of a second, not a whole slot set: a slow server with a full
  hand makes the tail of a run.
* New slots wait for one TTL after a change of Redis's run id. Only a Redis that never knew the
  server grants at once, and only while the server itself says that nothing is open there.
* A drain is of a server, in its slots' script: so it holds for every process of it, also for one
  that starts meanwhile. What is open keeps its slots: were they given on, a drain that ends early
  would break the bound. Whoever drains restarts nothing before each living process has said that
  it knows. Rejected: RQ's suspend (all servers), SIGTERM and a new process (the figures end, and a
  worker group that nobody watches does not come back).
* A status that reads as configuration (404 and such) while the server answers a one-token request
  is that prompt's own fault: charged, else one odd prompt would stop its group for ever.
* Suspects of server deaths are tried when nothing else waits, half of those that the same deaths
  cast suspicion on at a time, at last alone. Two deaths alone convict, and five in all: servers
  also die for reasons of their own, and one death alone convicted innocent prompts in simulations.
* Deaths of servers and worker processes are faults of the run too, one each: 20 with no success
  between them pause it, since then nothing tells a bad prompt from a bad server.
* A stop goes from the watching process to its children by a signal of its own, SIGUSR1:
  terminals, Slurm and systemd tell all of them at once, and the same signal twice means hurry.
  That they hurry it says by another, SIGUSR2: two equal ones in a row can come as one.
* `workers up` runs the same commands as people do, each a process with a log of its own, and gives
  them only what the whole node knows: whatever dies takes no other with it. It stops worker groups
  first; then nothing comes to servers and streams any more, and servers and sink end together. A
  sink that it watches waits for its word where a signal reaches all processes at once.
* What `workers up` knows of a node that runs lies in a file, not behind a socket: it can be read
  when that process hangs. Locks that end with their process say that there is only one.
* With `--turns all` a prompt stays one job in one slot; its turns follow each other at one server.
  Each is kept on the job before the next begins; without Redis the serving goes on while its slots
  hold, then the job goes back with its turns. A turn never begins when its process is to stop or
  its slots are gone. Redis keeps turns only where they continue what it has, so that two processes
  which both served a prompt leave one conversation. Attempts count for each turn; a new try begins
  with the first. `length` ends a turn, not the conversation: it goes on, and the flags tell.
* A server's log stands in for its pages and never counts as progress: whose log it is nobody can
  prove, and a stranger's would hide a hang. Its rate is tokens over time of the last lines, but
  for those that reach back into idle time; its counters are used where no page has any.
* Samples are an own stream a worker group, bounded by number, and of the store alone a sink learns
  how far they are archived: no state that a rewound Redis could tell wrongly. Rejected: one stream
  for all (a busy node would push the others' out), figures in `progress.json` (no history).
* 20 faults in a row pause a run; while k of its jobs are in flight, 20 + k are allowed, because
  quick refusals come before slow successes.
* An answer's text is looked at where it comes in: a loop at its end is found exactly, in 2 us for
  4 KB; near-loops would take compression at 150 times that. Equal answers are those of the last
  4,096 of the same process.
* What a request holds of a KV pool is measured while its server is full, and told once it has
  stopped growing: answers that have come say less, since short ones come first.
* Doing without the radix cache is advised where the server's own counters do not show that a fifth
  of the prompts' tokens come from it. `best` gives a model without states no strategy at all.
* `workers doctor` tries things rather than reading about them, each part in a thread with a limit:
  a part that hangs is a fault, and hides no other.
* Token ids are those that the server tells of its own request, whole answer by whole answer: a
  server too old for that gets no job of the run, and ids that do not fit `usage` cost an attempt.
  Tokenising anew, or asking /generate in place of chat, could give another sequence than the one
  that was generated.

`workers` is a name that other projects use too: give Headrace an environment of its own.
"""
