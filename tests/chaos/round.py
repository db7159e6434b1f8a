"""One round, from its first process to its verdict."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import redis

from common import names
from common.queue import Runs
from common.store.frames import decompress
from tests.chaos import judging
from tests.chaos.kit import RUN, Kit
from tests.chaos.playing import Player
from tests.chaos.report import Kill, Round
from tests.chaos.schedule import steps
from tests.chaos.world import World

END_LIMIT_S = 420.0
CALL_TRIES = 6
STOP_LIMIT_S = 120.0


class NotEndedError(Exception):
    """The round did not come to its end."""


def play_round(
    seed: int,
    kit: Kit,
    folder: Path,
    *,
    command: str,
    limit_s: float,
    show: Callable[[str], None] = lambda _: None,
) -> Round:
    """Play one round in a folder of its own and judge it.

    Args:
        seed: Of the schedule.
        kit: What the round consists of.
        folder: Made anew.
        command: That plays it again, for the verdict.
        limit_s: How long processes are killed at most.
        show: Takes a line of progress now and then.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began_s = time.monotonic()
    result = Round(
        seed=seed,
        command=command,
        fsync=kit.fsync,
        store=kit.store,
        prompts=kit.prompts,
        bound=kit.bound,
    )
    with World(kit, folder) as world:
        player = Player(world, show=lambda player: show(_line(player)))
        try:
            player.play(
                steps(seed, pace=kit.pace, kills_only=kit.calm), until_s=time.monotonic() + limit_s
            )
            if not player.toll.wrong:
                player.heal()
                result.failed = _finish(world, player)
                _judge(world, player, result)
        except NotEndedError as error:
            player.toll.wrong.append(str(error))
        result.kills = [Kill(*which, count) for which, count in sorted(player.toll.kills.items())]
        result.stood_still_s = round(player.stood_still_s, 1)
        result.missed, result.others = dict(player.toll.missed), dict(player.toll.others)
        losses = [loss for loss in world.redis.losses if loss.writes]
        result.forgot = len(losses)
        result.forgot_s = max((loss.span_s for loss in losses), default=0.0)
        result.wrong += player.toll.wrong
    result.seconds = time.monotonic() - began_s
    return result


def _line(player: Player) -> str:
    by_kind = {kind: 0 for kind, _, _ in player.toll.kills}
    for (kind, _, _), count in player.toll.kills.items():
        by_kind[kind] += count
    kills = " ".join(f"{kind} {count}" for kind, count in sorted(by_kind.items()))
    done, missed = player.completed, player.toll.missed.total()
    return (
        f"{done}/{player.world.kit.prompts} done, {player.toll.total} kills ({kills}), "
        f"missed {missed}"
    )


# --- to the end --------------------------------------------------------------------------------


def _finish(world: World, player: Player) -> int:
    """Let the run end; returns how many prompts had failed and were tried again."""
    for actor in world.producing.actors:
        if actor.process is not None:
            actor.kill()
            world.producing.note_end(actor, done=False)
            actor.process = None
    for number in world.producing.left():
        _call(world, world.producing.command_of(number))
        world.producing.finished(number)
    _call(world, world.producing.command_of(0, last=True))
    failed = 0
    for _ in range(3):
        _until(world, player, lambda: _ended(world), "the run to end")
        counts = Runs(world.redis.client).counts(RUN)
        if not counts.failed:
            return failed
        # Innocents that were alone with a server or a process that we killed are convicted.
        failed += counts.failed
        _call(world, ["producer", "retry", RUN])
    raise NotEndedError("prompts failed again and again while nothing was killed any more")


def _call(world: World, command: list[str]) -> str:
    """Run a command to its end; it may find Redis' connections just cut."""
    said = ""
    for _ in range(CALL_TRIES):
        done = subprocess.run(
            [sys.executable, "-m", *command],
            env=world.env,
            cwd=world.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode == 0:
            return done.stdout
        said = f"{done.returncode}: {done.stderr[-1500:]}"
        time.sleep(0.5)
    raise NotEndedError(f"{command[:3]} ended with {said}")


def _until(world: World, player: Player, holds: Callable[[], bool], what: str) -> None:
    limit_s = time.monotonic() + END_LIMIT_S
    look_s = 0.0
    while time.monotonic() < limit_s:
        player.tick()
        if player.toll.wrong:
            raise NotEndedError("it was stopped there")
        if time.monotonic() >= look_s:
            look_s = time.monotonic() + 0.2
            if holds():
                return
    state = Runs(world.redis.client).counts(RUN)
    raise NotEndedError(f"not within {END_LIMIT_S:.0f} s: {what}; {state}")


def _ended(world: World) -> bool:
    try:
        counts = Runs(world.redis.client).counts(RUN)
        mark = world.redis.client.hget(names.run(RUN), "ended")
    except redis.RedisError:
        return False
    if counts.queued or counts.in_flight or counts.stream_entries:
        return False
    return mark not in {None, b"", b"pending"} and world.store().get(names.SUCCESS) is not None


# --- the verdict -------------------------------------------------------------------------------


def _judge(world: World, player: Player, result: Round) -> None:
    _stop(world, player)
    verdict = msgspec.json.decode(_verify(world))
    result.verified = bool(verdict["proven"])
    if not result.verified:
        player.toll.wrong.append(f"verify: {msgspec.json.encode(verdict)[:600].decode()}")
    rows = _completions(world)
    kit = world.kit
    ids = {f"f{file}-{i}" for file in range(kit.files) for i in range(kit.prompts // kit.files)}
    player.toll.wrong += judging.wrong_rows(rows, ids)[:20]
    served = []
    for server in world.servers:
        server.log.read()
        served += server.log.served
        most = judging.most_open(server.log.served, player.toll.deaths)
        result.most_open = max(result.most_open, most)
        if most > kit.bound:
            player.toll.wrong.append(f"{server.name} had {most} open requests, of {kit.bound}")
        player.toll.wrong += server.failed
    digests = {str(row["key"]): judging.digest_of(row) for row in rows}
    redone = judging.count_redone(
        served, [(risk.jobs, risk.digests) for risk in player.toll.risks], digests
    )
    result.redone, result.at_risk = redone.requests, redone.at_risk
    by_digest = {digest: key for key, digest in digests.items()}
    for digest, more in list(redone.unexplained.items())[:10]:
        seen = [
            f"{each.begin:.3f}-{each.end or 0:.3f} {each.rid} {each.outcome}"
            for each in served
            if each.digest == digest
        ]
        player.toll.wrong.append(
            f"{more} requests too many of key {by_digest.get(digest, digest)}: {seen}; "
            f"the machine stood still for up to {player.stood_still_s:.1f} s, a lease lasts "
            f"{kit.lease_s:.0f} s"
        )
    player.toll.wrong += _tracebacks(world)


def _verify(world: World) -> str:
    inputs = [part for path in world.producing.files for part in ("--input", str(path))]
    where = ["--output", world.output]
    if world.s3 is not None:
        where += ["--endpoint-url", world.s3.url]
    done = subprocess.run(
        [sys.executable, "-m", "producer", "verify", RUN, *where, "--json", *inputs],
        env=world.env,
        cwd=world.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if not done.stdout:
        raise NotEndedError(f"verify ended with {done.returncode}: {done.stderr[-1500:]}")
    return done.stdout


def _completions(world: World) -> list[dict[str, Any]]:
    """Read every row of the shards that a manifest names: no other shard exists for a reader."""
    store = world.store()
    manifests = b"".join(store.get(item.name) or b"" for item in store.list(names.MANIFEST))
    return [
        msgspec.json.decode(line)
        for item in store.list(names.SHARDS)
        if f'"{item.name}"'.encode() in manifests
        for line in decompress(store.get(item.name) or b"").splitlines()
    ]


def _stop(world: World, player: Player) -> None:
    """End everything as an operator would; each must do as it is told."""
    running = [actor for actor in world.actors if actor.alive]
    for actor in running:
        actor.tell_to_end()
    limit_s = time.monotonic() + STOP_LIMIT_S
    while any(actor.alive for actor in running) and time.monotonic() < limit_s:
        time.sleep(0.05)
    for actor in running:
        if actor.alive or actor.exit_code != 128 + 15:
            player.toll.wrong.append(
                f"{actor.name} was told to end: {actor.exit_code}, {actor.said()}"
            )


def _tracebacks(world: World) -> list[str]:
    found = []
    for path in sorted(world.folder.glob("*.log")):
        text = path.read_text(errors="replace")
        if "Traceback (most recent" in text:
            found.append(f"{path.name}: {text[text.index('Traceback') :][:1500]}")
    return found[:5]
