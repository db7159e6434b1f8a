"""Wall time as records keep it."""

from datetime import UTC, datetime


def utc_now() -> str:
    """Give the wall time as ISO 8601 in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
