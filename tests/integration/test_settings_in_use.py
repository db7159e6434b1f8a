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
