"""Write a file so that a reader sees the old one or the new one, never half of either."""

import secrets
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Put `data` in the place of a file at one instant; its folder is made where it is missing.

    Args:
        path: Of the file.
        data: All of its bytes.
        mode: Who may read it, less the process's umask.

    Raises:
        OSError: It cannot be written; the old one stands.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own that nobody can foresee: it leads nowhere else, and is no other writer's.
    beside = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        beside.touch(mode=mode, exist_ok=False)
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
