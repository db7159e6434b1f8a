"""Where a server's log is looked for: what was told, what its supervisor wrote down, the usual."""

from pathlib import Path

import pytest

from workers.supervisor.log_place import log_finder
from workers.supervisor.records import Process, ServerRecord, record_path, write_record

GROUP = "gpu3@node"


def record(log: str) -> ServerRecord:
    return ServerRecord(
        name=GROUP, gpus=(3,), url="u", port=1, supervisor=Process(1, "x"), log=log
    )


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def found(pattern: str | None = None) -> Path | None:
    return log_finder(pattern, group=GROUP, gpu=3, state_dir=Path("state"))()


def test_a_pattern_gets_the_gpu_number_and_stands_before_all_else() -> None:
    write_record(Path("state"), record("/var/log/other.log"))

    assert found("/var/log/sglang-{gpu}.log") == Path("/var/log/sglang-3.log")


def test_what_the_supervisor_writes_is_found_as_soon_as_it_does() -> None:
    find = log_finder(None, group=GROUP, gpu=3, state_dir=Path("state"))
    assert find() is None
    write_record(Path("state"), record("/var/log/one.log"))
    assert find() == Path("/var/log/one.log")
    write_record(Path("state"), record("/var/log/two.log"))
    assert find() == Path("/var/log/two.log")


def test_without_a_supervisor_the_usual_place_is_looked_at() -> None:
    Path("sglang_logs").mkdir()
    Path("sglang_logs/sglang_gpu2.log").touch()
    assert found() is None
    Path("sglang_logs/sglang_gpu3.log").touch()

    assert found() == Path("sglang_logs/sglang_gpu3.log")


def test_a_record_that_is_none_is_no_record() -> None:
    path = record_path(Path("state"), GROUP)
    path.parent.mkdir(parents=True)
    path.write_text("{")

    assert found() is None
