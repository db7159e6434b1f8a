"""The one real server that the tests share; another set of flags takes its place."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.real.pipeline import say
from tests.real.server import Place, RealServer
from tests.support.skips import skip_cannot_run

ServerWith = Callable[..., RealServer]


def found_place() -> Place:
    """Where SGLang is set up; the test is left out where it is not."""
    place = Place.found()
    if place is None:
        skip_cannot_run("no SGLang is set up; `make real` does that, once")
    return place


@pytest.fixture(scope="session")
def server_with(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerWith]:
    """Give a running server with these flags; it is started where the last one had others."""
    place = found_place()
    running: list[RealServer] = []

    def give(*flags: str) -> RealServer:
        if running and running[-1].flags != flags:
            running.pop().stop()
        if not running:
            folder = _folder(tmp_path_factory)
            running.append(RealServer(place, folder, flags))
        if not running[-1].alive():
            say(" ".join(("SGLang", *flags)), a_token_after=f"{running[-1].start():.0f} s")
        return running[-1]

    yield give
    for server in running:
        server.stop()


def _folder(factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("HEADRACE_REAL_LOGS")
    if kept is None:
        return factory.mktemp("sglang")
    number = len(list(Path(kept).glob("sglang-*"))) if Path(kept).exists() else 0
    folder = Path(kept) / f"sglang-{number}"
    folder.mkdir(parents=True)
    return folder
