"""Turn what `--redis` says into the address of a running Redis."""

from common import connect


def resolve_redis(given: str | None) -> str:
    """Give the URL of the Redis to use; `embedded:DIR` starts or joins the one of that directory.

    Raises:
        UsageError: No address, or `embedded:` without the package it needs.
        RedisUnusableError: The embedded server does not start.
    """
    url = connect.redis_url(given)
    if not url.startswith("embedded:"):
        return url
    # Only who asks for it needs the package behind it.
    from common.embedded import embedded_redis  # noqa: PLC0415

    return embedded_redis(url.removeprefix("embedded:"))
