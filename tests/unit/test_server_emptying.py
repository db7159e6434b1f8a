"""A server is emptied before its supervisor ends it, also where somebody else drains it."""

import asyncio
from typing import Any, cast

import pytest

from common.queue.drains import Held
from workers.supervisor import emptying
from workers.supervisor.emptying import Emptying


class Drained:
    """A drain that another holds, until that one's time is over."""

    def __init__(self, *told: Held) -> None:
        self.told = list(told)

    def __call__(self, *_: Any, **__: Any) -> "Drained":
        return self

    def hold(self, *, quiet: bool = False) -> Held:
        del quiet
        return self.told.pop(0) if len(self.told) > 1 else self.told[0]


OTHERS = Held(refused="workers restart (pid 1)")


async def emptied(monkeypatch: pytest.MonkeyPatch, drain: Drained, *, quiet: bool) -> list[Held]:
    """Empty a server; gives what its drain would have told after that."""

    async def says_so() -> bool:
        await asyncio.sleep(0)
        return quiet

    monkeypatch.setattr(emptying, "Drain", drain)
    monkeypatch.setattr(emptying, "LOOK_S", 0.0)
    told = Emptying(cast("Any", object()), server="http://gpu.test:30000", name="gpu0@test")
    async with asyncio.timeout(30):
        await told.empty("why", limit_s=600, hurried=lambda: False, quiet=says_so)
    return drain.told


async def test_a_drain_whose_owner_has_died_is_taken_before_the_server_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it runs out while the server ends, and worker groups feed what was told to end."""
    empty = Held()
    drain = Drained(OTHERS, OTHERS, Held(open=3), empty)

    assert await emptied(monkeypatch, drain, quiet=False) == [empty]


async def test_a_server_that_another_has_emptied_is_ended_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drain = Drained(OTHERS, Held(open=3))

    assert await emptied(monkeypatch, drain, quiet=True) == [Held(open=3)]


async def test_a_living_owner_who_does_not_empty_it_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(emptying, "OTHERS_S", 0.0)

    assert await emptied(monkeypatch, Drained(OTHERS), quiet=False) == [OTHERS]
