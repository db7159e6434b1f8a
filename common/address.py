"""Turn what `--redis` says into the address of a running Redis."""

from common import connect
from common.errors import UsageError


def resolve_redis(given: str | None, *, create: bool = True) -> str:
    """Give the URL of the Redis to use; `embedded:DIR` starts or joins the one of that directory.

    Args:
        given: As `--redis` says, None for the default.
        create: Make a directory that is not there, with an empty Redis; else it is refused.

    Raises:
        UsageError: No address, `embedded:` without the package it needs, or no Redis was ever in
            the directory.
        RedisUnusableError: The embedded server does not start.
    """
    url = connect.redis_url(given)
    if not url.startswith("embedded:"):
        return url
    # Only who asks for it needs the package behind it.
    from common.embedded import embedded_redis, is_home  # noqa: PLC0415

    directory = url.removeprefix("embedded:")
    if not create and not is_home(directory):
        raise UsageError(
            f"--redis {url}: no Redis was ever started in this directory, so it has no runs; name "
            "the directory that `producer enqueue` was given"
        )
    return embedded_redis(directory)
