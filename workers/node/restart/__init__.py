"""Restart the servers of one machine one by one, under load: `workers restart`.

    choice     which of them, what is asked, and whether it makes sense
    emptied    a server that is empty, and stays so while it is held
    server     one of them: drain, order, wait for its token, lift, wait until it is at work
    rolling    one after the other, and none any more once one has gone wrong
    view       how far it is, for people

Only servers that a supervisor of ours watches here (`workers serve`) are touched, by the order
that is left for it on disk. So the order outlives whoever gave it, and an interrupted restart ends
by itself: the drain runs out, the supervisor carries the order out, and the same call again finds
what has been done.
"""
