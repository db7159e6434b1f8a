"""Headrace's producer side: prompts into Redis, and all that a user asks about a run.

`enqueue` reads everything before it changes anything: pass 1 checks every row, spools what is
accepted to disk and compares every fingerprint with the ledger; pass 2 writes `inputs/` to the
store and then queues. Interrupted anywhere, the same command again gives the same result, because
a prompt is its key.

    prompts/                   rows of every form to one request, or a verdict with file, line and
                               reason
    spool repeats              the accepted prompts on disk; repeats and conflicts in bounded
                               memory
    enqueue intake reading     pass 1: read, check, spool; the whole call is told in `enqueue`
    joining mending            the run's creation; an output that has lost what Redis knows of
    queueing adding accepted   pass 2: compare with the ledger, inputs/ then queue
    request summary            what a call asks for, what came of it, and how it is told
    commands/                  one module a command; they parse, call, print
    locate options             where a run's output is; flags that several commands have
    status view screen         how a run stands, and its figures for people
    peek peek_view             a few results to look at, in bounded reads; nothing acts on a screen
    verify proof evidence      the proof, from the store alone: the one pass, lines to compare, the
      judging findings         judgement over them, what was found wrong
    export ordering outfile    one file of results, in an order, whole or not there
      objects formats/         rows read one ahead; one module a format, with its readers' rules
    retry failures resume      prompts that failed again; what Redis lost put back
    cancel forget confirm      end a run for good; take it out of Redis; the question before
    meter                      how far something long has come

Samples (`--samples N`) are no parameter of the run: a row is read, checked and spooled once, and
becomes N prompts when it is given out. So a larger N later adds what is missing, and a smaller one
takes nothing away. A row's samples stand side by side, which a server's prefix cache likes.

Control of runs (decided 2026-11-30):

* Cancel is for good, and marked in the store before Redis. What is left ends by whoever comes by
  (the command, every sink), each prompt by the finish script, so a completion that comes first
  stays. Records are written up to half of what the result streams may hold: other runs go on.
* `producer priority` is a command of its own, and `enqueue --priority` of a run that is there does
  the same: `resume --priority` was rejected, since it would lift a pause. progress.json keeps it
  for a rebuild.
* Retry goes by the rows of failures, in streams and store, not by RQ's registry: only they say
  why, and a wiped Redis has no registry. Any of several `--reason` will do.
* Forget refuses while leases live, while a producer may live, and while results wait for a sink
  (`--lose-results`). It finds what to remove by the ledger and `names.keys_of`, and never by a
  search through Redis' keys. Half forgotten, the name can be neither made nor brought back.
* Before cancel and forget a person is asked; a program says `--yes`.

`producer` and `workers` do not know each other; both know `common`.
"""
