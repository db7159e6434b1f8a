"""Errors of ours that nobody foresaw: told by their kind and their place, never by their words.

The text of such an error may quote a prompt or an answer; its type and its stack do not.
"""

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import HeadraceError

log = logging.getLogger(__name__)

MOST_FRAMES = 30


class InternalError(HeadraceError):
    """Headrace has an error in itself; starting the process again may help for a while."""


def mishap(what: str, error: BaseException) -> InternalError:
    """Log an unforeseen error, and make of it the one that ends the process.

    Args:
        what: The part in which it happened.
        error: As it was raised.
    """
    log.critical("%s failed by an error of ours, %s:\n%s", what, kinds(error), stack_of(error))
    return InternalError(
        f"{what} failed by an error of ours ({kinds(error)}), which the log places; this process "
        "ends and gives back what it holds"
    )


@contextmanager
def surviving(what: str) -> Iterator[None]:
    """Log an unforeseen error and go on: for each round of a thread that others rely on.

    Such a thread would end without a word that anybody reads, and leases, figures or a Redis would
    be looked after no more.

    Args:
        what: The part in which it happens.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - that is what it is for
        log.critical(
            "%s failed by an error of ours, %s, and goes on:\n%s",
            what,
            kinds(error),
            stack_of(error),
        )


def kinds(error: BaseException) -> str:
    """Name the types of an error and of those that it stands for."""
    return ", ".join(type(leaf).__name__ for leaf in leaves(error))


def stack_of(error: BaseException) -> str:
    """Give the frames of an error and of those that it stands for, without any text of theirs."""
    frames = [
        frame
        for leaf in leaves(error)
        for frame in traceback.format_tb(leaf.__traceback__)[-MOST_FRAMES:]
    ]
    return "".join(frames)


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Give the errors that an error stands for: those of a group, else itself."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from leaves(each)
    else:
        yield error
