"""Write times and sizes so that their magnitude is seen."""

_UNITS = ("bytes", "kB", "MB", "GB", "TB")

WHOLE_FROM = 10
"""A time of so many units is told without a fraction."""


def duration(hours: float) -> str:
    """Write a time: 12 s, 34 min, 5.6 h, 107 h, 5.3 days."""
    seconds = hours * 3600
    for limit, unit_s, unit in ((90, 1, "s"), (5_400, 60, "min"), (360_000, 3_600, "h")):
        if seconds < limit:
            value = seconds / unit_s
            digits = 0 if unit == "s" or round(value) >= WHOLE_FROM else 1
            return f"{value:.{digits}f} {unit}"
    return f"{seconds / 86_400:.1f} days"


def size(number: float) -> str:
    """Write a number of bytes: 512 bytes, 1.2 GB."""
    power = min(max(len(str(int(number))) - 1, 0) // 3, len(_UNITS) - 1)
    return f"{number / 1_000**power:,.{1 if power else 0}f} {_UNITS[power]}"
