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
    verify export status …     what a user asks; verify and export read the store alone
    formats/                   one module a file format of export, with its readers' rules

Samples (`--samples N`) are no parameter of the run: a row is read, checked and spooled once, and
becomes N prompts when it is given out. So a larger N later adds what is missing, and a smaller one
takes nothing away. A row's samples stand side by side, which a server's prefix cache likes.

`producer` and `workers` do not know each other; both know `common`.
"""
