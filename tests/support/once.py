"""Let a process read once what libraries read from disk again for each of their clients.

A program of ours makes one client for S3 and a few connections to Redis, and does not notice. The
suite makes thousands of both: for each, botocore parses the description of all of S3 and redis-py
looks for its own version among all that is installed, a tenth of a second of processor time.
"""

import functools
from typing import Any

import botocore.session
import redis.utils


def read_once() -> None:
    """Keep what was read for the rest of this process, and for those that are forked from it."""
    where: tuple[tuple[Any, str], ...] = (
        (botocore.session, "create_loader"),
        (redis.utils, "get_lib_version"),
    )
    for module, name in where:
        read = getattr(module, name)
        if not hasattr(read, "cache_info"):
            setattr(module, name, functools.cache(read))
