"""One machine over everything: producers, worker groups, sinks, reconcile, RQ's tools, Redis.

Hypothesis draws what happens (`rules_*`), each actor is the product's own code against a real
Valkey (`world`, `process`), and after every step Redis and the stores are compared with what may
be so (`checks`), given what was accepted and what was answered (`model`). At the end of each
example everything is healed and must come to its end, and be proven (`heal`).

    redis_state   keep, put back and age what a Redis holds: rewinds, restarts, time
    process       a process that dies or freezes at a crash point, or loses answers
    workers       a worker process as a user of the queue, and the server that it drives
    model         what was answered, what was tampered with
    play          plays it, for as long as one likes
"""
