"""Every flag of every command from the command line, the environment and headrace.toml."""

import json
import os
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.core import ParameterSource

import producer.cli
import workers.cli
from common import flags, settings
from common.errors import UsageError
from common.program import Program
from tests.conftest import REPOSITORY

PROGRAMS: dict[str, Program] = {"producer": producer.cli.cli, "workers": workers.cli.cli}
SAMPLES = ("7", "1", "0.5", "word", "0.5.23", "fixed:5", "1:0.5", "die:after_s=1", "redis://h:1/0")
"""One of these is right for any flag."""

NOT_FLAGS = {"HEADRACE_API_KEY", "HEADRACE_CRASH_AT", "HEADRACE_HOST", "HEADRACE_TIMING"}
"""Variables with a meaning of their own."""


def all_options() -> list[tuple[str, str, str]]:
    """Every flag that can be set: (program, command, key)."""
    return [
        (program, name, key)
        for program, group in PROGRAMS.items()
        for name in group.list_commands(click.Context(group))
        for key in flags.options_of(load(program, name))
    ]


def load(program: str, name: str) -> click.Command:
    """A command as its program loads it."""
    command = PROGRAMS[program].get_command(click.Context(PROGRAMS[program]), name)
    assert command is not None
    return command


def needed(command: click.Command, *, without: click.Option | None = None) -> list[str]:
    """The arguments that a command cannot be called without."""
    given: list[str] = []
    for parameter in command.params:
        if not parameter.required or parameter is without:
            continue
        if isinstance(parameter, click.Option):
            given += [flags.flag_of(parameter), "1"]
        else:
            choices = isinstance(parameter.type, click.Choice) and parameter.type.choices
            number = "1" if isinstance(parameter.type, click.IntRange) else "word"
            given.append(str(choices[0]) if choices else number)
    return given


def asked(program: str, name: str, arguments: list[str]) -> click.Context:
    """What a command would run with."""
    return load(program, name).make_context(name, list(arguments))


def a_sample(program: str, name: str, option: click.Option) -> tuple[str, Any]:
    """A text that the flag takes, and what it makes of it."""
    base = needed(load(program, name), without=option)
    if option.is_flag:
        ctx = asked(program, name, [*base, flags.flag_of(option)])
        return "1", ctx.params[str(option.name)]
    choices = option.type.choices if isinstance(option.type, click.Choice) else SAMPLES
    for text in choices:
        try:
            ctx = asked(program, name, [*base, flags.flag_of(option), str(text)])
        except (click.ClickException, UsageError):
            continue
        return str(text), ctx.params[str(option.name)]
    raise AssertionError(f"add a value to SAMPLES that {name} {flags.flag_of(option)} takes")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to call from, and none of the settings of who runs the tests."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("HEADRACE_", "RQ_")):
            monkeypatch.delenv(name)
    return tmp_path


@pytest.mark.parametrize(("program", "name", "key"), all_options())
def test_every_flag_can_come_from_environment_and_file(
    program: str, name: str, key: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = load(program, name)
    option = flags.options_of(command)[key]
    base, at = needed(command, without=option), str(option.name)
    text, expected = a_sample(program, name, option)

    value: Any = True if option.is_flag else text
    listed = [value] if option.multiple else value
    text_of_file = f"[{program}.{name}]\n{key} = {json.dumps(listed)}\n"
    (folder / "headrace.toml").write_text(text_of_file)
    by_file = asked(program, name, base)
    for variable in flags.variables_of(option):
        monkeypatch.setenv(variable, text)
        by_environment = asked(program, name, base)
        assert by_environment.get_parameter_source(at) is ParameterSource.ENVIRONMENT
        assert by_environment.params[at] == expected
        assert flags.origin(by_environment, option) == variable
        monkeypatch.delenv(variable)

    prefixes = ("HEADRACE_", "HEADRACE_SIM_", f"HEADRACE_{name.upper()}_")
    assert flags.variables_of(option)[0] in {prefix + key.upper() for prefix in prefixes}
    assert flags.flag_of(option) == f"--{key.replace('_', '-')}"
    assert by_file.get_parameter_source(at) is ParameterSource.DEFAULT_MAP
    assert by_file.params[at] == expected
    assert flags.origin(by_file, option) == f"headrace.toml, [{program}.{name}] {key}"


def test_the_nearest_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert producer.cli.run(["statsu"]) == 2
    assert "No such command 'statsu'. Did you mean status?" in capsys.readouterr().err


def test_a_variable_means_one_thing() -> None:
    kinds: dict[str, dict[str, str]] = {}
    for program, name, key in all_options():
        option = flags.options_of(load(program, name))[key]
        kind = repr(option.type.to_info_dict())
        for variable in flags.variables_of(option):
            kinds.setdefault(variable, {}).setdefault(kind, f"{program} {name}")

    several = {name: list(found.values()) for name, found in kinds.items() if len(found) > 1}
    assert several == {}, "name a variable for one of them: @click.option(…, envvar=…)"
    assert not NOT_FLAGS & set(kinds)


def test_what_may_stand_at_the_top_is_a_flag() -> None:
    known = {key for _, _, key in all_options()}

    # The others may come with commands that are not there yet.
    assert set(settings.SHARED) - known <= {"notify"}


def test_the_command_line_wins_then_the_environment_then_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen(*arguments: str) -> Any:
        return asked("workers", "sink", list(arguments)).params["batch_rows"]

    assert seen() == 20_000
    (folder / "headrace.toml").write_text("[workers.sink]\nbatch_rows = 1\n")
    assert seen() == 1
    monkeypatch.setenv("HEADRACE_BATCH_ROWS", "2")
    assert seen() == 2
    assert seen("--batch-rows", "3") == 3


def test_the_table_of_a_command_wins_over_the_top(folder: Path) -> None:
    text = 'redis = "redis://a/0"\n[workers.sink]\nredis = "redis://b/0"\n'
    (folder / "headrace.toml").write_text(text)

    assert asked("workers", "sink", []).params["redis"] == "redis://b/0"
    assert asked("producer", "runs", []).params["redis"] == "redis://a/0"


def test_redis_may_be_named_for_rqs_tools_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "headrace.toml").write_text('redis = "redis://a/0"\n')
    monkeypatch.setenv("RQ_REDIS_URL", "redis://b/0")
    assert asked("producer", "runs", []).params["redis"] == "redis://b/0"
    monkeypatch.setenv("HEADRACE_REDIS", "redis://c/0")
    assert asked("producer", "runs", []).params["redis"] == "redis://c/0"


@pytest.mark.parametrize("way", ["flag", "variable"])
def test_the_file_may_lie_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    (folder / "headrace.toml").write_text("[workers.sink]\nbatch_rows = 1\n")
    (folder / "other.toml").write_text("[workers.sink]\nbatch-rows = 2\n")
    arguments = ["--config", "other.toml"] if way == "flag" else []
    if way == "variable":
        monkeypatch.setenv("HEADRACE_CONFIG", "other.toml")

    assert asked("workers", "sink", arguments).params["batch_rows"] == 2


WRONG = {
    "redis = redis": "headrace.toml is not TOML: .*line 1",
    "redsi = 'redis://a/0'": "unknown key redsi at the top: did you mean redis",
    "batch_rows = 1": r"batch_rows at the top: it belongs into .*\[workers.sink\]",
    "api_key = 'x'": "set HEADRACE_API_KEY",
    "[worker.sink]": r"unknown table \[worker\].*\[workers",
    "[workers]\nbatch_rows = 1": r"\[workers\] batch_rows: flags stand in the table of a command",
    "workers = 1": "workers is no value but tables",
    "[workers.sinck]": r"unknown table \[workers.sinck\]: did you mean sink",
    "[workers.sink]\nbatch_row = 1": r"\[workers.sink\] batch_row: .*did you mean batch_rows",
    "[workers.sink]\nurl = 'redis://a/0'": r"\[workers.sink\] url: write redis",
    "[workers.sink]\nconfig = 'x'": r"\[workers.sink\] config: there is no such flag",
    "[workers.sink]\nbatch_rows = true": "batch_rows: must be text or a number, not true or false",
    "[workers.sink]\nbatch_rows = [1]": "batch_rows: must be text or a number, not a list",
    "[workers.sink]\nbatch_rows = 2026-01-01": "batch_rows: .*not a date",
    "[workers.sink]\nuntil_done = 1": "until_done: must be true or false",
    "[workers.sink]\nbatch_rows = 1\nbatch-rows = 1": "batch_rows stands there twice",
    "[workers.sink]\nredis = {}": r"\[workers.sink\] redis: must be .* not a table",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_file_that_cannot_be_meant_is_refused(folder: Path, text: str) -> None:
    (folder / "headrace.toml").write_text(text)

    with pytest.raises(UsageError, match=WRONG[text]) as refused:
        asked("workers", "sink", [])

    assert str(refused.value).startswith("headrace.toml")


def test_a_list_is_asked_for_where_a_flag_may_be_repeated(folder: Path) -> None:
    (folder / "headrace.toml").write_text("[workers.start]\nrun = 'abc'\n")

    with pytest.raises(UsageError, match="must be a list"):
        asked("workers", "start", ["--gpu", "0"])


def test_a_value_out_of_range_names_its_place(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "headrace.toml").write_text("[producer.enqueue]\nmax_tokens = 0\n")
    (folder / "p.jsonl").write_text('{"prompt":"a"}\n')

    assert producer.cli.run(["enqueue", "p.jsonl", "--dry-run"]) == 2
    place = "--max-tokens is from headrace.toml, [producer.enqueue] max_tokens"
    assert place in capsys.readouterr().err

    monkeypatch.setenv("HEADRACE_MAX_TOKENS", "x")
    assert producer.cli.run(["enqueue", "p.jsonl", "--dry-run"]) == 2
    assert "--max-tokens is from HEADRACE_MAX_TOKENS" in capsys.readouterr().err


def test_an_error_that_names_a_flag_says_where_it_was_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_GPU", "x")

    monkeypatch.setattr("sys.argv", ["workers", "start"])

    with pytest.raises(SystemExit) as ended:
        workers.cli.main()

    assert ended.value.code == 2
    assert "(--gpu is from HEADRACE_GPU)" in capsys.readouterr().err


def test_a_file_that_is_named_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CONFIG", "not/here.toml")

    with pytest.raises(UsageError, match=re.escape("not/here.toml: there is no such file")):
        asked("producer", "runs", [])


@pytest.mark.parametrize(("mode", "warned"), [(0o644, True), (0o640, True), (0o600, False)])
def test_a_password_that_others_can_read_is_warned_of_and_not_shown(
    folder: Path, capsys: pytest.CaptureFixture[str], mode: int, *, warned: bool
) -> None:
    path = folder / "headrace.toml"
    path.write_text('redis = "redis://user:secret@h:1/0"\n')
    path.chmod(mode)

    asked("producer", "runs", [])

    said = capsys.readouterr().err
    assert ("chmod 600 headrace.toml" in said) is warned
    assert "secret" not in said


def test_help_needs_no_file_that_can_be_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "headrace.toml").write_text("nonsense")

    assert producer.cli.run(["enqueue", "--help"]) == 0
    assert "--config FILE" in capsys.readouterr().out


def test_a_worker_group_under_rq_is_told_by_the_same_settings(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.group import options_from_settings

    assert options_from_settings(("default",)).group.startswith("gpu0@")
    (folder / "headrace.toml").write_text('[workers.start]\ngpu = "3"\nramp = 2\nrun = ["a"]\n')
    monkeypatch.setenv("HEADRACE_CONCURRENCY", "5")

    options = options_from_settings(("default",))

    assert options.group.startswith("gpu3@")
    assert (options.ramp, options.concurrency, options.runs) == (2.0, 5, ("a",))
    assert options_from_settings(("b",)).runs == ("b",)
    monkeypatch.setenv("HEADRACE_RAMP", "0")
    with pytest.raises(UsageError, match="--ramp is from HEADRACE_RAMP"):
        options_from_settings(())


def test_the_example_is_right_and_shows_no_password(folder: Path) -> None:
    text = (REPOSITORY / "deploy" / "headrace.toml").read_text(encoding="utf-8")
    # What is commented out is right too.
    whole = re.sub(r"(?m)^# (?=[a-z_]+ = |\[)", "", text)
    assert whole != text
    for each in (text, whole):
        (folder / "headrace.toml").write_text(each)
        for program, group in PROGRAMS.items():
            for name in group.list_commands(click.Context(group)):
                asked(program, name, needed(load(program, name)))
