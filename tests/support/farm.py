"""A few worker groups in one process on a real queue, with servers that die when a test says so.

The queue is real, and so is the verdict (`workers.prompt.outcomes.convicts`); what is played are
servers and time: a prompt takes one to three ticks, and a group whose server died is back one
tick later.
"""

from collections.abc import Callable

from common.models import Claim
from common.queue import Jobs
from tests.support.queue_world import QueueWorld
from workers.prompt.job import Open, Ready
from workers.prompt.outcomes import convicts

Dies = Callable[[set[int], bool], bool]
"""Whether a server dies with these prompts open; the flag says that it is one tried alone."""


class FarmGroup:
    """One worker group and its server."""

    def __init__(self, world: QueueWorld, number: int, *, slots: int) -> None:
        self.epoch = f"e{number}"
        self.slots = slots
        self.held: dict[int, Open] = {}
        self.left: dict[int, int] = {}
        self.down = 0
        self.alive = True
        self.jobs: Jobs = world.jobs(
            self.epoch, group=f"gpu{number}@test", server=f"http://gpu.test:{30000 + number}"
        )


class Farm:
    """Worker groups that serve one run until nothing of it is left.

    Attributes:
        restarts: How often a server died.
        convicted: Prompts that were found guilty.
        finished: Prompts in the order in which they were completed.
    """

    def __init__(self, world: QueueWorld, dies: Dies, *, groups: int = 1, slots: int = 8) -> None:
        self.world = world
        self.dies = dies
        self.groups = [FarmGroup(world, number, slots=slots) for number in range(groups)]
        self.restarts = 0
        self.convicted: list[int] = []
        self.finished: list[int] = []
        self.tried_at_once = 0
        self.ticks = 0

    def run(self, most_ticks: int = 3000) -> None:
        while not self.is_over():
            self.tick()
            assert self.ticks < most_ticks, "it goes on for ever"
        self.world.check()

    def is_over(self) -> bool:
        counts = self.world.counts()
        return counts.queued == counts.in_flight == 0

    def tick(self) -> None:
        self.ticks += 1
        for group in self.groups:
            if not group.alive:
                continue
            if group.down:
                group.down -= 1
                continue
            self._claim(group)
            suspects = any(job.suspect for job in group.held.values())
            alone = any(job.alone for job in group.held.values())
            if group.held and self.dies(set(group.held), alone):
                self._die(group)
            else:
                self._work(group)
            assert not suspects or len({job.suspect for job in group.held.values()}) <= 1
        trying = [each for each in self.groups if any(job.suspect for job in each.held.values())]
        self.tried_at_once = max(self.tried_at_once, len(trying))

    def _claim(self, group: FarmGroup) -> None:
        free = group.slots - len(group.held)
        if not free or any(job.suspect for job in group.held.values()):
            return
        reply = self.world.claim(group.jobs, free, alone=not group.held)
        for claim in reply.claims:
            number = self.world.number(claim.key)
            ready = Ready(claim, reply.suspects, reply.alone)
            group.held[number] = Open(ready, slot=0, since_s=0.0)
            group.left[number] = 1 + number % 3

    def _work(self, group: FarmGroup) -> None:
        done = []
        for number in list(group.held):
            group.left[number] -= 1
            if group.left[number] <= 0:
                done.append(number)
                assert charged(group.held[number].claim) == 0
                del group.held[number]
        if done:
            assert set(self.world.finish(group.jobs, done)) == {"ok"}
            self.finished += done

    def _die(self, group: FarmGroup) -> None:
        self.restarts += 1
        group.down = 1
        guilty = [number for number, job in group.held.items() if convicts(job)]
        others = [number for number in group.held if number not in guilty]
        if guilty:
            assert self.world.finish(group.jobs, guilty, "failed") == ["ok"]
            self.convicted += guilty
        group.jobs.give_back(self.world.held(others), died=True)
        group.held.clear()


def charged(claim: Claim) -> int:
    """Attempts that were charged to a prompt so far."""
    return claim.attempts
