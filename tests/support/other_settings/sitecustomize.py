"""Other settings for a whole process: Python imports this where its folder is in PYTHONPATH.

HEADRACE_TEST_CLOCK_S       every reading of the wall clock is so many seconds off; the monotonic
                            clock is right
HEADRACE_TEST_REDIS_WAIT_S  how long an answer of Redis is waited for, instead of 20 s
"""

import datetime as dt
import os
import time
from typing import Any

_OFF_S = float(os.environ.get("HEADRACE_TEST_CLOCK_S", "0"))
_time, _time_ns = time.time, time.time_ns
_Real: Any = dt.datetime


class _AnyDatetime(type):
    """What C code makes is a datetime as well."""

    def __instancecheck__(cls, instance: object) -> bool:  # type: ignore[explicit-override]
        return isinstance(instance, _Real)


class _Shifted(_Real, metaclass=_AnyDatetime):  # type: ignore[misc]
    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> Any:
        return _Real.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls) -> Any:
        return _Real.fromtimestamp(time.time(), dt.UTC).replace(tzinfo=None)


if _OFF_S:
    time.time = lambda: _time() + _OFF_S
    time.time_ns = lambda: _time_ns() + int(_OFF_S * 1e9)
    dt.datetime = _Shifted  # type: ignore[misc]

if wait_s := os.environ.get("HEADRACE_TEST_REDIS_WAIT_S"):
    from common import connect

    connect.SOCKET_TIMEOUT_S = float(wait_s)
