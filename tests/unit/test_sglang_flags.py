"""The command line of each SGLang, as the simulator takes it."""

import pytest

from workers.simulator.launched import read
from workers.simulator.settings import Settings
from workers.simulator.sglang_flags import parser, version_key

OLD, NEW = "--mamba-scheduler-strategy", "--mamba-radix-cache-strategy"


def settings(monkeypatch: pytest.MonkeyPatch, version: str, *flags: str) -> Settings:
    monkeypatch.setenv("HEADRACE_SIM_SGLANG_VERSION", version)
    return read(["--model-path", "m", "--port", "30003", *flags])[0]


@pytest.mark.parametrize(
    ("version", "flag", "takes"),
    [
        ("0.5.7", OLD, True),
        ("0.5.13.post1", OLD, True),
        ("0.5.13.post1", NEW, False),
        ("0.5.14", NEW, True),
        ("0.5.19", OLD, True),
        ("0.5.20", OLD, False),
        ("0.5.23", OLD, False),
        ("0.5.99", NEW, True),
        ("0.5.1", OLD, True),
    ],
)
def test_a_flag_exists_in_its_versions_only(
    version: str, flag: str, *, takes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model-path", "m", flag, "no_buffer"]
    if takes:
        assert "no_buffer" in vars(parser(version).parse_args(arguments)).values()
        return
    with pytest.raises(SystemExit) as ended:
        parser(version).parse_args(arguments)
    assert ended.value.code == 2
    assert f"unrecognized arguments: {flag} no_buffer" in capsys.readouterr().err


def test_half_a_flag_that_could_be_two_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser("0.5.23").parse_args(["--cuda-graph-max-bs", "64"])
    assert ended.value.code == 2
    assert "ambiguous option: --cuda-graph-max-bs" in capsys.readouterr().err


def test_versions_compare_by_their_numbers() -> None:
    ordered = ["0.5.7", "0.5.8.post1", "0.5.10.post1", "0.5.12.post1", "0.5.14", "0.5.23"]
    assert sorted(ordered, key=version_key) == ordered


@pytest.mark.parametrize(
    ("version", "flags", "strategy", "cap"),
    [
        ("0.5.12.post1", (OLD, "no_buffer"), "no_buffer", 72),
        ("0.5.12.post1", (OLD, "extra_buffer"), "extra_buffer", 32),
        ("0.5.12.post1", (), "no_buffer", 72),
        ("0.5.23", (), "extra_buffer", 32),
        ("0.5.23", ("--disable-overlap-schedule",), "no_buffer", 72),
        ("0.5.23", (NEW, "no_buffer", "--disable-overlap-schedule"), "no_buffer", 72),
        ("0.5.23", (NEW, "extra_buffer"), "extra_buffer", 32),
        ("0.5.23", (NEW, "extra_buffer", "--disable-overlap-schedule"), "extra_buffer", 40),
        ("0.5.23", (NEW, "extra_buffer_lazy"), "extra_buffer_lazy", 40),
        ("0.5.23", ("--disable-radix-cache", "--max-running-requests", "150"), "no_radix", 150),
        ("0.5.23", (NEW, "extra_buffer", "--max-mamba-cache-size", "50"), "extra_buffer", 10),
        ("0.5.23", (NEW, "extra_buffer", "--max-running-requests", "9"), "extra_buffer", 9),
    ],
)
def test_flags_decide_strategy_and_cap(
    version: str,
    flags: tuple[str, ...],
    strategy: str,
    cap: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = settings(monkeypatch, version, *flags)
    assert (made.strategy, made.pool.cap) == (strategy, cap)


def test_no_buffer_with_overlap_is_an_assertion_from_0_5_14_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        settings(monkeypatch, "0.5.14", NEW, "no_buffer")
    assert ended.value.code == 1
    assert "AssertionError" in capsys.readouterr().err
    assert settings(monkeypatch, "0.5.13", OLD, "no_buffer").strategy == "no_buffer"


def test_a_server_has_the_faults_and_the_pace_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_SIM_SLOW", "3:0.5 4:0.25")
    monkeypatch.setenv("HEADRACE_SIM_FAULT", "hang:server=3 stall:server=4 queue_full:count=2")

    by_port, faults, place = read(["--model-path", "m", "--port", "30003"])
    assert (by_port.slow, [fault.kind for fault in faults], place) == (
        {0: 0.5},
        ["hang", "queue_full"],
        3,
    )

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    by_gpu, faults, place = read(["--model-path", "m", "--port", "30003"])
    assert (by_gpu.slow, [fault.kind for fault in faults], place) == (
        {0: 0.25},
        ["stall", "queue_full"],
        4,
    )
