"""Take a Redis back to an earlier state, as an old snapshot or a replica that lagged would."""

import shutil
from pathlib import Path

from tests.support.redis_server import RedisServer


def save_point(server: RedisServer, name: str = "point") -> Path:
    """Keep what the server has answered so far. A wipe takes it too.

    The server must be append-only with `appendfsync always`: under `everysec` it may answer up to
    two seconds before it writes, while a sync is under way.
    """
    client = server.client()
    client.ping()  # what was answered before is in the file by now
    client.close()
    target = server.folder / "points" / name
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(exist_ok=True)
    shutil.copytree(server.folder / "appendonlydir", target)
    return target


def rewind(server: RedisServer, point: Path) -> None:
    """Kill the server and start it on the kept state."""
    if server.alive():
        server.kill()
    shutil.rmtree(server.folder / "appendonlydir")
    shutil.copytree(point, server.folder / "appendonlydir")
    server.start()
