"""Slots by a process's own word: what it may open when Redis' answer is lost."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.errors import RedisUnusableError
from common.queue import SlotReply
from workers.engine.core import Core
from workers.engine.draining import Draining
from workers.engine.endings import Endings
from workers.engine.holdings import Holdings
from workers.engine.keeper import Keeper
from workers.timing import Timing


class Desk:
    async def ask(self, call: Callable[[], Any]) -> Any:
        return call()


class Slots:
    """Stands for the queue: grants what is wanted, or loses the answer."""

    def __init__(self) -> None:
        self.loses = False

    def take_slots(self, wanted: int, **_: Any) -> SlotReply:
        if self.loses:
            raise RedisUnusableError("the answer was lost")
        return SlotReply(what="granted", slots=wanted)


class Bound:
    now = 3

    def __call__(self) -> int:
        return self.now


@pytest.mark.anyio
async def test_slots_that_were_given_up_without_an_answer_are_not_used_again() -> None:
    slots, bound = Slots(), Bound()
    core = SimpleNamespace(
        jobs=slots,
        holdings=Holdings(),
        beat=Desk(),
        watch=SimpleNamespace(ready=True),
        rids=SimpleNamespace(prefix="e1-", most=1),
        timing=Timing(),
        options=SimpleNamespace(host="here"),
        bound=bound,
        draining=Draining(),
        on_change=lambda: None,
    )
    keeper = Keeper(cast("Core", core), cast("Endings", None))
    await keeper._renew_slots()
    assert keeper.slots == 3

    bound.now, slots.loses = 2, True
    with pytest.raises(RedisUnusableError):
        await keeper._renew_slots()
    bound.now = 3

    # Redis has taken note of two, and the third may be another process's by now.
    assert keeper.slots == 2
