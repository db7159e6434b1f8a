"""Which worker group is which, and which server is the same as another."""

import socket

import pytest

from common.errors import UsageError
from workers.options import group_name, parse_gpus, server_url, slots_server
from workers.timing import ENVIRONMENT, Timing, timing_from_environment


@pytest.mark.parametrize(
    ("text", "tp", "sets"),
    [
        ("3", 1, [(3,)]),
        ("0-3", 1, [(0,), (1,), (2,), (3,)]),
        ("0-3", 2, [(0, 1), (2, 3)]),
        ("0,2,5-6", 1, [(0,), (2,), (5,), (6,)]),
    ],
)
def test_gpus_are_read_into_worker_groups(text: str, tp: int, sets: list[tuple[int, ...]]) -> None:
    assert parse_gpus(text, tp) == sets


@pytest.mark.parametrize(("text", "tp"), [("", 1), ("a", 1), ("3-1", 1), ("0,0", 1), ("0-2", 2)])
def test_gpus_that_make_no_groups_are_refused(text: str, tp: int) -> None:
    with pytest.raises(UsageError, match="--gpu"):
        parse_gpus(text, tp)


def test_each_set_of_gpus_has_a_name_of_its_own() -> None:
    sets = [(0,), (0, 1), (0, 2), (0, 1, 2), (1,), (10,)]

    names = {group_name(gpus, "host") for gpus in sets}

    assert len(names) == len(sets)
    assert {"gpu0@host", "gpu0-1@host", "gpu0+2@host", "gpu0-2@host"} < names


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:30000",
        "http://localhost:30000",
        "http://LOCALHOST:30000/",
        "http://[::1]:30000",
        "http://0.0.0.0:30000",
        "http://127.3.2.1:30000",
        f"http://{socket.gethostname()}:30000",
    ],
)
def test_all_names_of_this_machine_name_one_server(url: str) -> None:
    assert slots_server(url, "node-a") == "http://node-a:30000"


def test_other_ports_paths_and_hosts_are_other_servers() -> None:
    urls = [
        "http://127.0.0.1:30000",
        "http://127.0.0.1:30001",
        "http://127.0.0.1:30000/gpu0",
        "http://127.0.0.1:30000/gpu1",
        "http://nowhere.invalid:30000",
        "https://nowhere.invalid",
    ]

    assert len({slots_server(url, "node-a") for url in urls}) == len(urls)


def test_a_server_pattern_gets_the_gpu_number() -> None:
    assert server_url(None, 3) == "http://127.0.0.1:30003"
    assert server_url("http://h:3000{gpu}/", 3) == "http://h:30003"


@pytest.mark.parametrize(
    "pattern", ["h:30000", "ftp://h", "http://h:x", "http://h:99999", "http:// h"]
)
def test_what_is_no_address_is_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match="--server"):
        server_url(pattern, 0)


def test_a_password_in_an_address_is_not_repeated() -> None:
    with pytest.raises(UsageError) as refused:
        server_url("http:// user:" + "hunter2" + "@h", 0)

    assert "hunter2" not in str(refused.value)


def test_the_clockwork_may_be_set_for_tests_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENVIRONMENT, '{"stall_s": 1}')
    assert timing_from_environment() == Timing(stall_s=1)
    monkeypatch.setenv(ENVIRONMENT, '{"no_such": 1}')
    with pytest.raises(UsageError, match="no_such"):
        timing_from_environment()


def test_a_hang_is_found_within_a_minute() -> None:
    timing = Timing()

    looks_s = 2 * (timing.load_every_s + timing.load_s)

    assert looks_s + timing.stall_s + timing.probe_s < 60
