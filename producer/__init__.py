"""Headrace's producer side: prompts into Redis, and all that a user asks about a run.

`enqueue` reads everything before it changes anything: pass 1 checks every row, spools what is
accepted to disk and compares every fingerprint with the ledger; pass 2 writes `inputs/` to the
store and then queues. Interrupted anywhere, the same command again gives the same result, because
a prompt is its key.

    prompts/                   rows of every form to one request, or a verdict with file, line and
                               reason
    spool repeats              the accepted prompts on disk; repeats and conflicts in bounded
                               memory
    enqueue joining queueing   the two passes, the run's creation, inputs/ then queue
    commands/                  one module a command; they parse, call, print
    peek harmless              a few results to look at, in bounded reads; nothing acts on a screen
    cancel forget retry        end a run for good; take it out of Redis; try its failures again
    verify export status …     what a user asks; verify and export read the store alone
    formats/                   one module a file format of export, with its readers' rules

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
