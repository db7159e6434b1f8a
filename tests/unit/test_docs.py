"""What the documents show exists: commands, their flags, make's targets, files."""

import ast
import re
import shlex
from pathlib import Path

import click
import pytest

import producer.cli
import workers.cli
from common import flags
from common.help import Sectioned

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *REPOSITORY.glob("deploy/**/*.md")]
)
PROGRAMS: dict[str, click.Command] = {"producer": producer.cli.cli, "workers": workers.cli.cli}
SHOWN_COMMAND = re.compile(
    r"(?:`|^ *|\| )(producer|workers) ([a-z]+)(?=[ `\n]|$)(?! (?:that|is|are|of)\b)", re.MULTILINE
)
"""A command in backquotes, or in an example on a line of its own."""

MAKE_TARGET = re.compile(r"^([a-z]+):", re.MULTILINE)


def shown_commands() -> list[tuple[str, str]]:
    """Every command line of ours, in code blocks and in `code`: (document, line)."""
    found = []
    for path in DOCUMENTS:
        text = re.sub(r"\\\n\s*", " ", path.read_text(encoding="utf-8"))
        blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
        inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        lines = [line for block in blocks for line in block.splitlines()] + inline
        for line in lines:
            bare = line.split("  #")[0].strip()
            if re.match(r"(producer|workers|make) [a-z]", bare) and "►" not in bare:
                found.append((path.name, bare))
    return sorted(set(found))


def all_commands() -> list[tuple[str, click.Command]]:
    """Every command of both programs."""
    context = click.Context(click.Command("test"))
    return [
        (f"{name} {sub}", command)
        for name, group in PROGRAMS.items()
        if isinstance(group, click.Group)
        for sub in group.list_commands(context)
        if (command := group.get_command(context, sub)) is not None
    ]


@pytest.mark.parametrize(("document", "line"), shown_commands())
def test_a_shown_command_exists_with_its_flags(document: str, line: str) -> None:
    program, name, *rest = shlex.split(line)
    if program == "make":
        makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
        assert name in MAKE_TARGET.findall(makefile), f"{document} shows {line!r}"
        return
    command = dict(all_commands()).get(f"{program} {name}")
    assert command is not None, f"{document} shows {line!r}, and there is no such command"
    known = {option for parameter in command.params for option in parameter.opts}
    # What follows `--` is another program's.
    ours = rest[: rest.index("--")] if "--" in rest else rest
    given = {part.split("=")[0] for part in ours if part.startswith("--")}
    assert given <= known, f"{document} shows {line!r}; {name} has no {given - known}"


@pytest.mark.parametrize(("name", "command"), all_commands())
def test_every_command_has_help_with_an_example(name: str, command: click.Command) -> None:
    assert "Example" in (command.help or ""), f"{name} --help has no example"
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} says nothing of {parameter.opts}"


@pytest.mark.parametrize(("name", "command"), all_commands())
def test_help_shows_its_example_on_lines_of_its_own(name: str, command: click.Command) -> None:
    context = click.Context(command, info_name=name, terminal_width=80)

    lines = [line.strip() for line in command.get_help(context).splitlines()]

    assert not [line for line in lines if "\\b" in line]
    begins = [at for at, line in enumerate(lines) if re.fullmatch(r"Examples?:", line)]
    assert begins
    assert re.match(rf"(zcat .*)?({name}|producer|workers) ", lines[begins[0] + 1])


@pytest.mark.parametrize(("name", "command"), all_commands())
def test_help_says_what_holds_when_a_flag_is_not_given(name: str, command: click.Command) -> None:
    context = click.Context(command, info_name=name)

    silent = [
        parameter.opts
        for parameter in command.params
        if isinstance(parameter, click.Option)
        and isinstance(parameter.default, int | float | str | Path)
        and parameter.default not in (False, "")
        and "default" not in (parameter.get_help_record(context) or ("", ""))[1]
    ]

    assert silent == [], "show_default=True"


@pytest.mark.parametrize(("name", "command"), all_commands())
def test_sections_of_a_help_name_flags_that_exist(name: str, command: click.Command) -> None:
    if isinstance(command, Sectioned):
        known = set(flags.options_of(command))
        for heading, keys in command.sections.items():
            assert set(keys.split()) <= known, f"{name}: {heading}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_list_of_commands_is_whole(program: str) -> None:
    command = PROGRAMS[program]

    shown = command.get_help(click.Context(command, info_name=program, terminal_width=80))

    assert "..." not in shown.partition("Commands:")[2]
    assert "\\b" not in shown


def messages() -> list[tuple[str, str]]:
    """Every command of ours that a string of the programs names: (module, command)."""
    found = set()
    for package in ("common", "producer", "workers"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            parts = [
                node.value
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
            for part in parts:
                for program, name in SHOWN_COMMAND.findall(part):
                    found.add((str(path.relative_to(REPOSITORY)), f"{program} {name}"))
    return sorted(found)


def test_every_command_that_a_message_names_exists() -> None:
    named, known = messages(), dict(all_commands())

    assert len(named) > 20
    assert [each for each in named if each[1] not in known] == []


def test_the_documents_show_commands_at_all() -> None:
    assert len(shown_commands()) > 10
