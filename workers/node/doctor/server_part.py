"""Ask each server: is it there, does it take our key, does it generate, what is it."""

import asyncio
import os
from collections.abc import Mapping, Sequence

import msgspec

from common.descriptors import raise_limit
from common.errors import HeadraceError, ServerDeniedError
from workers.capacity.capacity import bound_of
from workers.capacity.model_files import shape_at
from workers.client.faults import AttemptError
from workers.client.probe import is_alive
from workers.client.sglang import SGLangClient
from workers.node.doctor.judging_server import (
    judge_identity,
    judge_launch,
    judge_likeness,
    judge_room,
    judge_version,
)
from workers.node.doctor.lines import Scribe
from workers.node.doctor.machine_part import judge_slots
from workers.node.doctor.thinking import parser_for
from workers.readings.loads import ServerIdentity, ServerLoad

PAGE_S = 10.0
TOKEN_S = 15.0


class Target(msgspec.Struct, frozen=True):
    """A server to ask: the name of its worker group, and its URL."""

    name: str
    url: str


def examine_servers(says: Sequence[Scribe], targets: Sequence[Target]) -> None:
    """Tell of servers, all at once.

    Args:
        says: Get the lines, one a server.
        targets: In the same order.
    """
    asyncio.run(_examine(says, targets, os.environ))


async def _examine(
    says: Sequence[Scribe], targets: Sequence[Target], environment: Mapping[str, str]
) -> None:
    key = environment.get("HEADRACE_API_KEY")
    found = await asyncio.gather(
        *(_one(say, target, key) for say, target in zip(says, targets, strict=True))
    )
    alike = {
        target.name: identity
        for target, identity in zip(targets, found, strict=True)
        if identity is not None
    }
    for name, differs in judge_likeness(alike).items():
        say = next(each for each in says if each.part == name)
        say.warning(
            "alike",
            f"it differs from {next(iter(alike))}: {differs}",
            "start all servers of a run alike: one that differs gets no job of it",
        )


async def _one(say: Scribe, target: Target, key: str | None) -> ServerIdentity | None:
    async with SGLangClient(target.url, slots=2, api_key=key) as client:
        try:
            async with asyncio.timeout(PAGE_S):
                identity = await client.identify()
        except ServerDeniedError:
            _tell_refusal(say, key)
            return None
        except (AttemptError, HeadraceError) as error:
            say.fault("reachable", str(error), "is it started? `workers serve` starts one")
            return None
        except TimeoutError:
            say.fault("reachable", f"{target.url} does not answer within {PAGE_S:.0f} s")
            return None
        say.ok("reachable", target.url)
        load = await _load(client)
        await _judge(say, client, identity, load)
    return identity


def _tell_refusal(say: Scribe, key: str | None) -> None:
    if key:
        say.fault("key", "it refuses the key of HEADRACE_API_KEY", "set it to its --api-key")
    else:
        say.fault("key", "it asks for a key", "set HEADRACE_API_KEY to its --api-key")


async def _load(client: SGLangClient) -> ServerLoad | None:
    try:
        async with asyncio.timeout(PAGE_S):
            return await client.load()
    except (TimeoutError, AttemptError, HeadraceError):
        return None


async def _judge(
    say: Scribe, client: SGLangClient, identity: ServerIdentity, load: ServerLoad | None
) -> None:
    facts = identity.facts
    path = identity.model_path
    # Files may lie on a network's disk: in a thread that the whole part's time limits.
    parser = await asyncio.to_thread(parser_for, identity.model, path)
    judge_version(say, identity.version)
    if await is_alive(client, limit_s=TOKEN_S):
        say.ok("token", "it generates")
    else:
        say.fault(
            "token",
            f"no token within {TOKEN_S:.0f} s, and nothing moves in it",
            "its log says why; `workers serve` starts a server again that hangs",
        )
    judge_identity(say, identity, parser)
    if facts is None:
        say.warning(
            "capacity",
            "it has no /server_info: how it was launched is not known",
            "is a gateway before it? Headrace talks to servers themselves",
        )
        return
    judge_launch(say, facts)
    shape = await asyncio.to_thread(
        shape_at, path, tp=facts.tp, ssm_dtype=facts.ssm_dtype, kv_dtype=facts.kv_dtype
    )
    judge_room(say, facts, load=load, shape=shape)
    cap = (load.cap if load else None) or (facts.cap or 0) * facts.ranks
    judge_slots(say, raise_limit(), bound_of("auto", cap))
