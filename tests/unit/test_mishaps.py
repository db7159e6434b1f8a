"""Errors that nobody foresaw: told by kind and place, and threads that others rely on go on."""

import logging
from pathlib import Path

import pytest

from common.mishaps import surviving
from tests.support.server_process import wait_until
from workers.node.redis_side import RedisSide


def test_an_unforeseen_error_is_told_without_its_words_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done, words = [], "of a prompt"
    for number in range(3):
        with surviving("the count"):
            if number == 1:
                raise KeyError(words)
            done.append(number)

    assert done == [0, 2]
    (record,) = caplog.records
    assert record.levelno == logging.CRITICAL
    assert "the count failed by an error of ours, KeyError, and goes on" in record.getMessage()
    assert Path(__file__).name in record.getMessage()
    assert words not in record.getMessage()


def test_an_embedded_redis_stays_watched_after_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[str] = []

    def look() -> None:
        looks.append(side.state)
        if len(looks) == 1:
            raise ValueError("what stands in Redis is anybody's")

    monkeypatch.setattr("workers.node.redis_side.LOOK_S", 0.01)
    side = RedisSide("redis://127.0.0.1:1/0", host="h")
    monkeypatch.setattr(side, "_look", look)
    side.start()
    try:
        wait_until(lambda: len(looks) > 2, "looks after the one that failed")
    finally:
        side.close()

    assert looks[:2] == ["starting", "away"]
    assert "the look at Redis failed by an error of ours, ValueError" in caplog.text
