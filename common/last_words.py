"""Run a program, and let it end with one line and an exit code whatever happens.

    an error of ours             its text, its code (`common.errors`)
    a wrong flag                 as click tells it
    a signal that asks to stop   128 and its number, with what is to be done then
    stdout closed or full        4: what was to be read there is not there
    its reader has seen enough   141 as after SIGPIPE, quietly: `| head`
    the system refused           4: a full disk, a file that may not be read, no descriptors
    no memory                    4
    anything else                1, with a traceback: a bug

Nothing of it holds a secret. What people are told goes to stderr, and a stderr that is closed or
full ends nothing.
"""

import errno
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

import click
from typing_extensions import override

from common.descriptors import raise_limit
from common.errors import BackendError, HeadraceError
from common.harmless import harmless
from common.logs import bound_other_logs, bounded
from common.mishaps import leaves
from common.program import show
from common.secrecy import hide_environment, without_secrets
from common.stops import Stopped

STDIN, STDOUT, STDERR = 0, 1, 2
STDOUT_NAME = "stdout"
BUG = 1

_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room there, then call it again"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit, as in `ulimit -n 4096`"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "check who owns it and its mode"),
    errno.EROFS: "choose a place that can be written",
    # Python's own words where no temporary folder can be used.
    errno.ENOENT: "is it named right? Temporary files go where TMPDIR says",
}


def tell(text: str) -> None:
    """Write a line for people on stderr, where there is one."""
    with suppress(OSError, ValueError):
        click.echo(harmless(without_secrets(text)), err=True)


def run_program(program: str, call: Callable[[], Any], *, stopped: str = "") -> int:
    """Run a program's command line.

    Args:
        program: Its name, before what people are told.
        call: Runs the command; gives an exit code, or anything else for 0.
        stopped: What is told after Ctrl-C and other signals that ask to stop.

    Returns:
        The exit code.

    Raises:
        SystemExit: As the command raised it.
    """
    hide_environment(os.environ)
    raise_limit()
    _open_closed_streams()
    bound_other_logs()
    sys.excepthook = lambda _kind, error, _trace: _tell_bug(error)
    threading.excepthook = lambda raised: _tell_bug(raised.exc_value)
    try:
        result = call()
        _flush()
    except HeadraceError as error:
        tell(f"{program}: {error}")
        return error.exit_code
    except click.ClickException as error:
        with suppress(OSError):
            show(error)
        return error.exit_code
    except Stopped as told:
        if stopped:
            tell(f"{program}: {told.word}: {stopped}")
        return 128 + told.number
    except (click.Abort, KeyboardInterrupt):
        if stopped:
            tell(f"{program}: interrupted: {stopped}")
        return 128 + signal.SIGINT
    except Exception as error:  # noqa: BLE001 - told below, as what it is
        return _end(program, error)
    finally:
        _leave_streams()
    return result if isinstance(result, int) else 0


def _end(program: str, error: BaseException) -> int:
    """Tell an error that nobody raised on purpose."""
    errors = list(leaves(error))
    if any(isinstance(each, MemoryError) for each in errors):
        tell(f"{program}: no memory left: give it more, or smaller rows and batches")
        return BackendError.exit_code
    if isinstance(errors[0], BrokenPipeError) and errors[0].filename == STDOUT_NAME:
        return 128 + signal.SIGPIPE
    if all(isinstance(each, OSError) for each in errors):
        tell(f"{program}: {_of_system(errors[0])}")
        return BackendError.exit_code
    _tell_bug(error)
    return BUG


def _of_system(error: BaseException) -> str:
    number = getattr(error, "errno", None)
    why = getattr(error, "strerror", None) or type(error).__name__
    advice = _ADVICE.get(number or 0, "")
    where = getattr(error, "filename", None)
    if where == STDOUT_NAME:
        return f"stdout cannot be written ({why}): nothing that was printed there counts"
    said = f"{os.fsdecode(where)}: {why}" if isinstance(where, str | bytes) else f"{why}"
    return f"{said}: {advice}" if advice else said


def _tell_bug(error: BaseException | None) -> None:
    if error is None or isinstance(error, SystemExit | KeyboardInterrupt):
        return
    lines = without_secrets("".join(traceback.format_exception(error))).splitlines()
    with suppress(OSError, ValueError):
        click.echo("\n".join(bounded(harmless(line)) for line in lines), err=True)


def _open_closed_streams() -> None:
    """Fill what the caller closed: else the next file that is opened gets its number.

    Writing to a stdout that was closed is an error, as it would be on a full disk.
    """
    for number in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_WRONLY if number == STDERR else os.O_RDONLY)
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = _named_stdout(sys.stdout)
    if sys.stderr is None:
        sys.stderr = open(STDERR, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


class _Stdout(io.FileIO):
    """Stdout whose errors say that it is it."""

    @override
    def write(self, data: Any, /) -> int:
        """Write what the system takes of it."""
        try:
            return super().write(data)
        except OSError as error:
            error.filename = STDOUT_NAME
            raise


def _named_stdout(like: TextIO | None) -> TextIO:
    if like is not None:
        like.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Stdout(STDOUT, "w", closefd=False)),
        encoding=like.encoding if like else "utf-8",
        errors=like.errors if like else "strict",
        line_buffering=bool(like and like.isatty()),
    )


def _flush() -> None:
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def _leave_streams() -> None:
    """Let go of what a stream would not take: the interpreter tries once more, and says so."""
    for stream, number in ((sys.stdout, STDOUT), (sys.stderr, STDERR)):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
