"""Launch lines, parsed with the arguments that each version's own parser takes."""

import argparse
import shlex
import subprocess
from typing import Any

import pytest

from common.errors import UsageError
from tests.sglang_flags import VERSIONS
from tests.sglang_flags.record import RefusedError, parser_of, recorded
from workers.capacity.capacity import states_per_request
from workers.supervisor.launch_line import (
    _BY_OUR_FLAG,
    _KEYS,
    _LEAST_PREFIX,
    STRATEGIES,
    Launch,
    Line,
    launch_line,
    shown,
    visible_devices,
)
from workers.supervisor.versions import named_here, release_to_launch, strategies

KNOWN = VERSIONS[1:]
RENAMED = KNOWN.index("0.5.14")
LAZY = KNOWN.index("0.5.13.post1")


def line(version: str = "0.5.23", *arguments: str, **told: Any) -> Line:
    asked: dict[str, Any] = {
        "python": "/venv/bin/python",
        "model": "/models/m",
        "gpus": (0,),
        "port": 30_000,
    }
    asked |= {"recurrent": True, "strategy": "no_buffer", **told}
    return launch_line(Launch(version=version, arguments=arguments, **asked))


def parsed(version: str, made: Line) -> argparse.Namespace:
    assert made.arguments[:3] == ("/venv/bin/python", "-m", "sglang.launch_server")
    return parser_of(version).parse_args(made.arguments[3:])


def strategy_in(version: str, args: argparse.Namespace) -> str | None:
    name = (
        "mamba_radix_cache_strategy"
        if KNOWN.index(version) >= RENAMED
        else "mamba_scheduler_strategy"
    )
    found: str | None = getattr(args, name)
    return found


@pytest.mark.parametrize("version", KNOWN)
@pytest.mark.parametrize("strategy", [each for each in STRATEGIES if each != "best"])
def test_each_version_takes_each_strategy_that_it_has(version: str, strategy: str) -> None:
    if strategy == "extra_buffer_lazy" and KNOWN.index(version) < LAZY:
        with pytest.raises(UsageError, match=r"0\.5\.13"):
            line(version, strategy=strategy)
        return
    args = parsed(version, line(version, strategy=strategy))
    named = strategy not in {"no_radix", "auto"}
    assert strategy_in(version, args) == (strategy if named else None)
    assert args.disable_radix_cache == (True if strategy == "no_radix" else None)
    assert (args.port, args.host, args.model_path) == (30_000, "127.0.0.1", "/models/m")
    assert args.enable_metrics


@pytest.mark.parametrize("version", KNOWN)
def test_no_buffer_brings_what_it_does_not_start_without(version: str) -> None:
    args = parsed(version, line(version))
    since = KNOWN.index(version) >= RENAMED
    assert args.disable_overlap_schedule == (True if since else None)
    assert args.page_size == (1 if since else None)
    other = parsed(version, line(version, strategy="extra_buffer"))
    assert (other.disable_overlap_schedule, other.page_size) == (None, None)


@pytest.mark.parametrize("version", KNOWN)
def test_what_is_said_of_strategies_is_what_the_parsers_say(version: str) -> None:
    options = {flag: each for each in recorded()[version] for flag in each["flags"]}
    release = release_to_launch(version)
    flag = named_here("--mamba-scheduler-strategy", release)
    assert set(options[flag]["choices"]) == {"auto", *strategies(release)}
    for name in ("--cuda-graph-max-bs", "--cuda-graph-bs"):
        assert options[named_here(name, release)]["kind"] == "store"


@pytest.mark.parametrize("version", KNOWN)
def test_several_gpus_are_one_server(version: str) -> None:
    (option,) = [each for each in recorded()[version] if "--tp-size" in each["flags"]]
    assert set(option["flags"]) <= _BY_OUR_FLAG.keys()
    dest = option["flags"][0].removeprefix("--").replace("-", "_")
    assert vars(parsed(version, line(version, gpus=(2, 3))))[dest] == 2


def test_a_version_older_than_the_strategies_is_refused_and_told_why() -> None:
    options = [flag for each in recorded()["0.5.6.post2"] for flag in each["flags"]]
    assert not [flag for flag in options if flag.endswith("strategy") and "mamba" in flag]
    with pytest.raises(UsageError, match=r"older than 0\.5\.7"):
        line("0.5.6.post2")
    with pytest.raises(UsageError, match="which is none"):
        line("unknown")


def test_one_that_is_newer_than_known_is_taken_for_the_newest() -> None:
    newer = line("0.6.0")
    assert newer.arguments == line("0.5.23").arguments
    assert "newer" in newer.notes[0]


def test_a_build_without_a_tag_is_taken_for_the_newest_known() -> None:
    """A checkout without its history, as images are made from, says 0.0.0.dev0."""
    built = line("0.0.0.dev1+g1a2b3c4")
    assert built.arguments == line("0.5.23").arguments
    assert built.notes[0].endswith("does not tell its release; taken for 0.5.23")
    assert states_per_request("extra_buffer", version="0.0.0.dev0") == 5


@pytest.mark.parametrize("version", KNOWN)
@pytest.mark.parametrize("old", [True, False])
def test_a_renamed_flag_is_passed_on_by_its_name_here(version: str, *, old: bool) -> None:
    flag = "--cuda-graph-max-bs" if old else "--cuda-graph-max-bs-decode"
    made = line(version, flag, "72")
    args = parsed(version, made)
    since = KNOWN.index(version) >= RENAMED
    assert (args.cuda_graph_max_bs_decode if since else args.cuda_graph_max_bs) == 72
    assert bool(made.notes) == (since == old)
    parsed(version, line(version, f"{flag}=72"))


def test_the_newest_refuses_what_we_rename() -> None:
    """Else the renaming above would be for nothing."""
    for words in (["--cuda-graph-max-bs", "72"], ["--mamba-scheduler-strategy", "no_buffer"]):
        with pytest.raises(RefusedError, match=r"ambiguous|unrecognized"):
            parser_of("0.5.23").parse_args(["--model-path", "m", *words])


@pytest.mark.parametrize(
    "words",
    [
        ["--model-path", "x"],
        ["--model=x"],
        ["--port", "1"],
        ["--por", "1"],
        ["--tp", "2"],
        ["--tensor-parallel-size=2"],
        ["--mamba-radix-cache-strategy", "extra_buffer"],
        ["--mamba-scheduler-strategy", "extra_buffer"],
        ["--mamba-sch", "extra_buffer"],
        ["--disable-radix-cache"],
        ["--disable-radix"],
        ["--base-gpu-id", "1"],
    ],
)
def test_what_our_flags_say_is_not_said_again(words: list[str]) -> None:
    with pytest.raises(UsageError, match="after `--`: say --"):
        line("0.5.23", *words)


@pytest.mark.parametrize("words", [["--api-key", "k"], ["--api-k=k"], ["--admin-api-key", "k"]])
def test_a_key_has_no_place_in_the_list_of_processes(words: list[str]) -> None:
    with pytest.raises(UsageError, match="HEADRACE_API_KEY") as refused:
        line("0.5.23", *words)
    assert "k=k" not in str(refused.value)


@pytest.mark.parametrize("version", VERSIONS)
def test_no_flag_of_sglang_is_refused_for_the_beginning_of_ours(version: str) -> None:
    ours = {*_BY_OUR_FLAG, *_KEYS}
    theirs = {flag for each in recorded()[version] for flag in each["flags"]} - ours
    assert not {
        flag
        for flag in theirs
        if len(flag) >= _LEAST_PREFIX and any(each.startswith(flag) for each in ours)
    }


def test_flags_that_agree_with_the_strategy_pass() -> None:
    made = line("0.5.23", "--disable-radix-cache", strategy="no_radix")
    assert parsed("0.5.23", made).disable_radix_cache
    assert parsed("0.5.23", line("0.5.23", "--page-size", "1")).page_size == 1
    assert (
        parsed("0.5.23", line("0.5.23", "--page-size=64", strategy="extra_buffer")).page_size == 64
    )
    for words in (["--page-size", "64"], ["--page-size=64"], ["--page-s", "64"]):
        with pytest.raises(UsageError, match="no_buffer works on single tokens"):
            line("0.5.23", *words)


def test_the_later_one_of_two_values_wins_as_in_sglang() -> None:
    made = line("0.5.23", "--max-running-requests", "8", "--max-running-requests", "64")
    assert parsed("0.5.23", made).max_running_requests == 64


ALL = "0.0.0.0"  # noqa: S104 - given to a parser


def test_a_host_of_the_users_is_taken_and_said() -> None:
    assert line("0.5.23").host == "127.0.0.1"
    open_to_all = line("0.5.23", "--host", ALL)
    assert open_to_all.host == "127.0.0.1"
    assert parsed("0.5.23", open_to_all).host == ALL
    assert "others" in open_to_all.notes[-1]
    assert line("0.5.23", "--host=10.0.0.7").host == "10.0.0.7"


def test_a_model_without_states_gets_no_strategy() -> None:
    made = line("0.5.23", recurrent=False, strategy=None)
    args = parsed("0.5.23", made)
    assert (args.mamba_radix_cache_strategy, args.disable_overlap_schedule) == (None, None)
    assert (made.strategy, made.notes) == ("", ())
    asked = line("0.5.23", recurrent=False)
    assert asked.strategy == ""
    assert "left out" in asked.notes[0]
    assert line("0.5.23", recurrent=False, strategy="no_radix").strategy == "no_radix"


def test_a_model_that_is_not_known_is_left_to_sglang_unless_somebody_asked() -> None:
    made = line("0.5.23", recurrent=None, strategy=None)
    assert made.strategy == "auto"
    assert parsed("0.5.23", made).disable_overlap_schedule is None
    assert line("0.5.23", recurrent=None).strategy == "no_buffer"
    assert line("0.5.23", recurrent=True, strategy=None).strategy == "no_buffer"


def test_a_strategy_that_is_no_word_is_refused() -> None:
    for word in ("fast", "best", "off"):
        with pytest.raises(UsageError, match="give one of no_buffer"):
            line("0.5.23", strategy=word)


def test_devices_are_counted_among_those_that_we_see() -> None:
    assert visible_devices((2, 3), {}) == "2,3"
    assert visible_devices((1,), {"CUDA_VISIBLE_DEVICES": "4,5,6"}) == "5"
    assert visible_devices((0,), {"CUDA_VISIBLE_DEVICES": "GPU-7f3a, GPU-1"}) == "GPU-7f3a"
    assert visible_devices((0,), {"CUDA_VISIBLE_DEVICES": ""}) == ""
    with pytest.raises(UsageError, match="2 of the machine's GPUs"):
        visible_devices((2,), {"CUDA_VISIBLE_DEVICES": "4,5"})


def test_a_shown_line_is_what_a_shell_runs_without_the_key_in_it() -> None:
    made = line("0.5.23", "--served-model-name", 'it\'s "mine" $HOME')
    text = shown(made.arguments, {"CUDA_VISIBLE_DEVICES": "0"}, with_key=True)
    assert text.endswith('--api-key "$HEADRACE_API_KEY"')
    printed = subprocess.run(
        ["sh", "-c", "printf '%s\\n' " + text.partition(" ")[2]],
        capture_output=True, text=True, check=True, env={"HEADRACE_API_KEY": "not shown"},
    ).stdout  # fmt: skip
    assert printed.splitlines() == [*made.arguments, "--api-key", "not shown"]
    assert "not shown" not in text
    assert shlex.split(shown(made.arguments, {}, with_key=False)) == list(made.arguments)
