"""What is known of a run besides numbers. Pure."""

from typing import Any

import msgspec

from common.flow import LONGEST_SILENCE_S


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run besides numbers.

    Attributes:
        run: Its name, for commands that people are told; empty writes RUN.
        model: The served model that it asks for, or began with; None for whatever comes.
        pinned: What its first server was (`common.pins`); None before any.
        waits_behind: The run that is claimed from first, for people; empty when there is none.
        reasons: Why prompts failed, and how often; earlier tries of a retry count too.
        priority: Higher runs are claimed from first.
        window: Most requests of it in Redis, None where nobody said.
        sealed: No more prompts will come.
        proven: `_SUCCESS` was written for the counters as they are now.
        paused: Why, None while it is not.
        suspects: Prompts that were open at servers that died, and wait to be tried by themselves.
        suspended: `rq suspend` stopped the claims of all runs.
        unreconciled: Redis restarted, and nobody has compared it with the store yet.
        lost: What the store has and Redis lacks, for people; empty when nothing is known to be.
        s3_error: Why nothing is stored at present.
        sinks: How many sinks serve the run; None where nobody knows.
        redis_full: Why claims stop for want of room.
        open_producers: How many producers have begun and not ended.
        request_timeout_s: Time limit of one attempt.
    """

    run: str = ""
    model: str | None = None
    pinned: dict[str, Any] | None = None
    waits_behind: str = ""
    reasons: dict[str, int] = {}
    priority: int = 0
    window: int | None = None
    sealed: bool = True
    proven: bool = False
    paused: str | None = None
    suspects: int = 0
    suspended: bool = False
    cancelled: bool = False
    unreconciled: bool = False
    lost: str = ""
    s3_error: str = ""
    sinks: int | None = None
    redis_full: str = ""
    open_producers: int = 0
    request_timeout_s: float = LONGEST_SILENCE_S
