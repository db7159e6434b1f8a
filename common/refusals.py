"""Say in plain words why Redis refused a call or cannot be reached, and what to do. Pure.

By the type of redis-py's exception, or by the code that begins Redis' own words; Redis' text is
repeated only where it holds no address and nothing of what was sent.
"""

import ssl

import redis

_REPLICA = (
    "it is a replica and takes no writes: a failover may be under way; if it lasts, give the "
    "address of the master"
)
_CLUSTER = "it is a Redis Cluster, which Headrace does not support: give a Redis that is none"

BY_TYPE: dict[type[Exception], str] = {
    redis.exceptions.ReadOnlyError: _REPLICA,
    redis.exceptions.MasterDownError: (
        "it is a replica that has lost its master: a failover may be under way; if it lasts, give "
        "the address of the new master"
    ),
    redis.exceptions.BusyLoadingError: "it is loading its data",
    redis.exceptions.ClusterError: _CLUSTER,
    redis.exceptions.AuthenticationError: "it refused the user or password: check the address",
    redis.exceptions.OutOfMemoryError: "it is full (maxmemory)",
    redis.TimeoutError: "no answer in time",
}
"""Of two that fit, the first: subclasses stand before their bases."""

BY_CODE: dict[str, str] = {
    "NOREPLICAS": (
        "it has too few replicas to take writes (min-replicas-to-write): bring them back, or "
        "lower that setting"
    ),
    "MISCONF": (
        "it cannot write its data to its disk and refuses every change until it can: its log says "
        "why, a full disk as a rule"
    ),
    "BUSY": "somebody's script holds it up: SCRIPT KILL ends it",
    "UNKILLABLE": "somebody's script holds it up, and only a restart of Redis ends that",
    "NOQUORUM": "it has no quorum to take writes",
}


def reason(error: BaseException) -> str:
    """Say why, in one sentence without its full stop; no address, no password."""
    if isinstance(error, redis.exceptions.NoPermissionError):
        # Redis' own words name the command; before them a pipeline repeats what was sent.
        said = str(error).rpartition("caused error: ")[2]
        return f"the user may not do what is needed: {said} (deploy/README.md lists the rights)"
    told = next((text for kind, text in BY_TYPE.items() if isinstance(error, kind)), None)
    if told is not None:
        return told
    if isinstance(error, redis.ResponseError):
        code, _, _ = str(error).partition(" ")
        return BY_CODE.get(code) or (code if code.isupper() else type(error).__name__)
    if str(error) == "max number of clients reached":
        return "it has no connection left (maxclients): raise that, or end other clients"
    return _of_system(error)


def remedy(error: BaseException, where: str) -> str:
    """Say what to do about a Redis that was not reached at the start; `where` is its address."""
    cause = error.__context__
    if where.startswith("rediss:"):
        if isinstance(cause, FileNotFoundError):
            return "a file that ssl_ca_certs, ssl_certfile or ssl_keyfile names is not there"
        if isinstance(cause, ssl.SSLError | TimeoutError):
            return (
                "is this its port for TLS, and do ssl_ca_certs, ssl_certfile and ssl_keyfile in "
                "the address name the right files?"
            )
    elif isinstance(cause, ConnectionResetError | BrokenPipeError):
        return "where it speaks TLS, the address begins with rediss://"
    return (
        "is it running? Another address is given by --redis or HEADRACE_REDIS; --redis "
        "embedded:DIR starts one"
    )


def _of_system(error: BaseException) -> str:
    # The text of a connection error may hold the address with its password, so only its kind and
    # the system's own reason are told.
    cause = error.__cause__ or error.__context__ or error
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return type(error).__name__
