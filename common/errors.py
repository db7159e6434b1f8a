"""Every error that Headrace raises on purpose, and the exit code that each ends a command with.

HeadraceError                    exit 1
  UsageError                2    a flag, a path or a setting is wrong; fix it and call again
  InputError                3    the input holds rows that cannot be used; nothing was queued
  BackendError              4    something outside is unusable; the message names which and where
    RedisUnusableError           refused, unreachable, evicting, too old
      RedisFullError             no room; the flow pauses and goes on when there is
    StoreUnusableError           the bucket or directory refuses what a sink needs
      StoreFullError             no space left
      StoreDeniedError           rights, credentials, region or bucket: no object is to blame
      StoreDamagedError          an object's bytes are not what was written
      StoreEmptiedError          the output is not there any more; the same enqueue makes it anew
    ServerUnusableError          the SGLang server: not there, wrong model
      ServerDeniedError          it refuses our key
  ConflictError             5    the run exists with another value; both are named
  StateLostError            4    Redis does not know the run; enqueue or resume puts it back
  NotDoneError              1    a proof failed: keys missing, doubled or altered
"""


class HeadraceError(Exception):
    """Something ended a command on purpose; the text says what, where and what to do."""

    exit_code = 1


class UsageError(HeadraceError):
    """A flag, a path or a setting cannot be used."""

    exit_code = 2


class InputError(HeadraceError):
    """The input holds rows that cannot be used."""

    exit_code = 3


class BackendError(HeadraceError):
    """Redis, the store or a server cannot be used."""

    exit_code = 4


class RedisUnusableError(BackendError):
    """Redis refused, cannot be reached, or is set up so that it would lose data."""


class RedisFullError(RedisUnusableError):
    """Redis has no room for another write (maxmemory with noeviction)."""


class StoreUnusableError(BackendError):
    """The bucket or directory refuses something that a sink needs.

    Attributes:
        retryable: Whether the same call may succeed later without anybody changing anything.
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class StoreFullError(StoreUnusableError):
    """The disk or the quota is full; the batch is kept."""


class StoreDeniedError(StoreUnusableError):
    """Rights, credentials, region or bucket: it is so until somebody changes them.

    Never the fault of what is stored: a batch that meets it is kept as it is.
    """


class StoreDamagedError(StoreUnusableError):
    """An object's bytes are not what was written: cut off, or no frame of ours."""


class StoreEmptiedError(StoreUnusableError):
    """The output lacks what shows that it is the run's: what else it lacks proves nothing."""


class ServerUnusableError(BackendError):
    """The SGLang server is not there, or serves another model."""


class ServerDeniedError(ServerUnusableError):
    """The SGLang server asks for another key than ours, or for one at all."""


class ConflictError(HeadraceError):
    """What is asked differs from what the run has; the message names the field and both values."""

    exit_code = 5


class StateLostError(BackendError):
    """Redis lacks something that the store proves to exist."""


class NotDoneError(HeadraceError):
    """A proof failed; the message names the keys."""
