"""A shell completes commands, flags, choices, files, and the names of runs."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from common.store.directory import DirectoryStore
from tests.support.producer_cli import environment
from tests.support.redis_server import RedisServer
from tests.support.run_world import RUN, World

BIN = Path(sys.executable).parent


def complete(
    folder: Path, typed: str, shell: str = "bash", env: dict[str, str] | None = None
) -> list[str]:
    """What the shell is told to offer for a line: its protocol, as its script speaks it."""
    program = typed.split(maxsplit=1)[0]
    words = typed.split(" ")
    last = len(words) - 1
    told = {
        f"_{program.upper()}_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": typed,
        "COMP_CWORD": words[-1] if shell == "fish" else str(last),
    }
    done = subprocess.run(
        [BIN / program],
        cwd=folder,
        env=environment({**told, **(env or {})}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("producer sta", ["plain,status"]),
        ("producer enqueue --max-t", ["plain,--max-tokens"]),
        ("producer enqueue p.jsonl --format ", ["plain,jsonl.zst", "plain,parquet"]),
        ("producer enqueue p", ["file,p"]),
        ("producer export prompts --to a", ["file,a"]),
        ("producer enqueue p.jsonl --output o", ["dir,o"]),
        ("producer status --conf", ["plain,--config"]),
        ("workers st", ["plain,start"]),
        ("workers sink --batch-r", ["plain,--batch-rows"]),
        ("workers completion ", ["plain,bash", "plain,zsh", "plain,fish"]),
    ],
)
def test_what_is_typed_is_completed(tmp_path: Path, typed: str, offered: list[str]) -> None:
    assert complete(tmp_path, typed) == offered


@pytest.mark.parametrize(
    ("shell", "offered"), [("zsh", ["plain", "status", "_"]), ("fish", ["plain,status"])]
)
def test_other_shells_are_answered_in_their_own_form(
    tmp_path: Path, shell: str, offered: list[str]
) -> None:
    assert complete(tmp_path, "producer sta", shell) == offered


@pytest.mark.parametrize("program", ["producer", "workers"])
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_printed(tmp_path: Path, program: str, shell: str) -> None:
    done = subprocess.run(
        [BIN / program, "completion", shell],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert f"_{program.upper()}_COMPLETE={shell}_complete" in done.stdout


def test_bash_itself_completes_by_the_script(tmp_path: Path) -> None:
    lines = [
        'eval "$(producer completion bash)"',
        "COMP_WORDS=(producer ex) COMP_CWORD=1",
        "_producer_completion producer",
        'echo "${COMPREPLY[@]}"',
        "complete -p producer",
    ]

    done = subprocess.run(
        ["bash", "--norc", "-c", "\n".join(lines)],
        cwd=tmp_path,
        env=environment({"PATH": f"{BIN}:/usr/bin:/bin"}),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stderr == ""
    assert done.stdout.splitlines()[0] == "export"
    assert "-F _producer_completion producer" in done.stdout


@pytest.mark.parametrize("way", ["flag", "variable", "file"])
def test_names_of_runs_are_completed(
    valkey: RedisServer, redis_client: "redis.Redis", tmp_path: Path, way: str
) -> None:
    World(redis_client, DirectoryStore(tmp_path / "out"), prompts=1)
    flag, env = "", {}
    if way == "flag":
        flag = f"--redis {valkey.tcp_url} "
    elif way == "variable":
        env = {"HEADRACE_REDIS": valkey.tcp_url}
    else:
        (tmp_path / "headrace.toml").write_text(f'redis = "{valkey.tcp_url}"\n')

    offered = complete(tmp_path, f"producer status {flag}", env=env)

    assert [line for line in offered if not line.startswith("plain,-")] == [f"plain,{RUN}"]


@pytest.mark.parametrize("address", ["redis://127.0.0.1:1/0", "embedded:nothere", "nonsense"])
def test_a_redis_that_cannot_be_asked_offers_nothing_and_says_nothing(
    tmp_path: Path, address: str
) -> None:
    began_s = time.monotonic()

    assert complete(tmp_path, f"producer status --redis {address} ") == []

    assert time.monotonic() - began_s < 20
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_wrong_does_not_disturb_who_types(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text("nonsense")

    assert complete(tmp_path, "producer enqueue --max-t") == ["plain,--max-tokens"]
