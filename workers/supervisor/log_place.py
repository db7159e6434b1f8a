"""Where the log of a worker group's server is: what it was told, or what is found."""

from collections.abc import Callable
from pathlib import Path

from common.errors import BackendError
from workers.supervisor.records import read_record

USUAL = "sglang_logs/sglang_gpu{gpu}.log"
"""Where launchers of many servers write, one file a GPU."""


def log_finder(
    pattern: str | None, *, group: str, gpu: int, state_dir: Path
) -> Callable[[], Path | None]:
    """Give what finds the log, asked each time that it is looked at.

    Args:
        pattern: What `--server-log` says, perhaps with `{gpu}`; None: what the supervisor of that
            server recorded, else the usual place, if there is anything.
        group: `gpu0@host`, by which a supervisor keeps its record.
        gpu: Its first GPU.
        state_dir: Where those records lie.
    """
    if pattern is not None:
        told = Path(pattern.replace("{gpu}", str(gpu)))
        return lambda: told
    usual = Path(USUAL.replace("{gpu}", str(gpu)))

    def find() -> Path | None:
        try:
            record = read_record(state_dir, group)
        except BackendError:
            record = None
        if record is not None and record.log:
            return Path(record.log)
        return usual if usual.is_file() else None

    return find
