"""headrace.toml as it is used: one output for many runs, which proves nothing of one of them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from tests.support.producer_cli import Ended, producer
from tests.support.redis_server import RedisServer

Ask = Callable[..., Ended]


@pytest.fixture
def ask(valkey: RedisServer, redis_client: "redis.Redis", tmp_path: Path) -> Ask:
    del redis_client  # it leaves the server empty
    (tmp_path / "p.jsonl").write_text('{"id":"q1","prompt":"a"}\n')
    (tmp_path / "q.jsonl").write_text('{"id":"q2","prompt":"b"}\n')

    def call(*arguments: str) -> Ended:
        return producer(*arguments, cwd=tmp_path)

    settings = (
        f'redis = "{valkey.tcp_url}"\noutput = "out/{{run}}"\n[producer.enqueue]\nmax-tokens = 5\n'
    )
    (tmp_path / "headrace.toml").write_text(settings)
    return call


def test_one_file_of_settings_does_for_several_runs(ask: Ask, tmp_path: Path) -> None:
    for name in ("p", "q"):
        ended = ask("enqueue", f"{name}.jsonl")
        assert ended.code == 0, ended.err
        assert (tmp_path / "out" / name / "run.json").exists()

    assert ask("status").code == 0
    assert ask("status", "p", "--json").told["total"] == 1


def test_an_output_of_the_settings_yields_to_the_runs_own(ask: Ask) -> None:
    assert ask("enqueue", "p.jsonl", "--output", "mine").code == 0
    assert ask("enqueue", "q.jsonl", "--run", "other", "--output", "out/p").code == 0

    for command in ("status", "verify", "resume", "peek"):
        assert ask(command, "p").code < 2, command
    assert ask("verify", "p", "--output", "out/p").code == 5


def test_a_run_that_nobody_knows_is_found_by_the_settings(
    ask: Ask, redis_client: "redis.Redis"
) -> None:
    assert ask("enqueue", "p.jsonl").code == 0
    redis_client.flushall()

    assert ask("verify", "p", "--json").told["total"] == 1
    assert ask("status", "p", "--json").told["status"] == "state_lost"
    assert ask("resume", "p").code == 0
    assert ask("status", "p", "--json").told["queued"] == 1


def test_a_conflict_with_the_run_says_where_the_value_is_from(ask: Ask) -> None:
    assert ask("enqueue", "p.jsonl", "--max-tokens", "6").code == 0

    ended = ask("enqueue", "p.jsonl")

    assert ended.code == 5
    place = "(--max-tokens is from headrace.toml, [producer.enqueue] max_tokens"
    assert place in ended.err


# --- `config` ------------------------------------------------------------------------------------


def test_config_shows_what_is_set_and_where_without_secrets(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text(
        'redis = "redis://user:secret@h:1/0"\n[producer.enqueue]\nmax_tokens = 5\n'
    )

    ended = producer("config", cwd=tmp_path, env={"HEADRACE_SEED": "7", "HEADRACE_SEDE": "7"})

    assert ended.code == 0
    shown = {line.split()[0]: line.split(maxsplit=1)[1] for line in ended.out.splitlines()}
    assert list(shown) == ["--redis", "--max-tokens", "--seed"]
    assert shown["--redis"].startswith("redis://…@h:1/0")
    assert "headrace.toml, redis" in shown["--redis"]
    assert "headrace.toml, [producer.enqueue] max_tokens" in shown["--max-tokens"]
    assert shown["--seed"].split() == ["7", "HEADRACE_SEED", "enqueue"]
    assert "no flag of producer reads HEADRACE_SEDE" in ended.err
    assert "secret" not in ended.out + ended.err


def test_config_finds_what_is_wrong_in_any_table(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text("[producer.watch]\nevry = 5\n")

    ended = producer("config", cwd=tmp_path)

    assert ended.code == 2
    assert "[producer.watch] evry: there is no such flag; did you mean every?" in ended.err


def test_config_of_one_command_shows_its_defaults(tmp_path: Path) -> None:
    ended = producer("config", "watch", cwd=tmp_path)

    assert ["--every", "2.0", "default"] in [line.split() for line in ended.out.splitlines()]
