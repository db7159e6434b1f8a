"""Chaos: a run that must end complete and exact whatever is killed, frozen, cut or refused.

`python -m tests.chaos --seed S` plays rounds. In each, producers enqueue prompts file by file,
worker groups send them to simulated servers whose answers take heavy-tailed times, sinks store
what comes, all against one Redis with an append-only file. A schedule that depends on the seed
alone kills them at random moments and at named crash points. Then everything is left alone until
the run has ended, and the account is made:

    producer verify     proves the run from its store
    every answer        holds the hash of its own request
    every request       beyond one a prompt is explained by a death that its prompt was at risk in
    every server        never had more requests open by live processes than the bound

    schedule    what happens when: pure, from the seed
    points      the named crash points of each kind of process, read from the code
    kit         what a round consists of, how large and how quick
    world       the processes, proxies and stores of one round
    actors      one process that is killed and started again, and what it held
    producing   the producers, which are always at work on some file
    redisside   Redis, what it forgot when it died, and the proxy before it
    serverlog   what the servers saw, read while it is written
    playing     carries the schedule out, counts the kills
    judging     the account: pure
    report      the tables, and campaigns added up
    round       one round from its first process to its verdict

A kill is counted only when the process was seen to hold work while it was stopped: leased jobs,
open requests, a batch that is begun and not acknowledged, prompts that are accepted in part; or
when it died by itself at a crash point.
"""
