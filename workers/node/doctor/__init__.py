"""`workers doctor`: whether Redis, the store, the servers and this machine are fit for the work.

    lines      what is told: ok, warning or fault, and what to do    examine  all parts at once
    redis_part judging_redis       Redis: tried, and what its INFO and settings mean
    store_part                     the output: tried in the very prefix
    server_part judging_server     each server: asked, and what it says of itself
    machine_part                   descriptors, disks, clocks, records of `workers serve`
    view                           a table for people

Each part runs in a thread of its own and has so many seconds; what it has said by then is told,
and that it did not end is a fault. So one that hangs hides none of the others.
"""
