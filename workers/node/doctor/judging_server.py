"""Say what a server's launch and state mean for a run. Pure."""

import msgspec

from common.errors import UsageError
from common.pins import difference, identity_of
from workers.capacity.binding import measured_tokens
from workers.capacity.capacity import backlog_of
from workers.capacity.diagnosis import diagnose
from workers.capacity.model_shape import ModelShape
from workers.capacity.strategies import Prompts
from workers.node.doctor.lines import Scribe
from workers.readings.facts import ServerFacts
from workers.readings.loads import ServerIdentity, ServerLoad
from workers.releases import is_untagged
from workers.supervisor.versions import is_newer_than_known, release_to_launch


def judge_version(say: Scribe, version: str) -> None:
    """Judge SGLang's version."""
    if not version:
        say.warning(
            "version", "it does not tell its version", "Headrace is tried with SGLang 0.5.7 on"
        )
        return
    try:
        release = release_to_launch(version)
    except UsageError as error:
        say.fault("version", str(error))
        return
    about = " (newer than what is known here)" if is_newer_than_known(release) else ""
    about = " (a build that does not tell its release)" if is_untagged(version) else about
    say.ok("version", f"SGLang {version}{about}")


def judge_identity(say: Scribe, identity: ServerIdentity, parser: str | None) -> None:
    """Judge model, context, parsers and truncation.

    Args:
        say: Gets the lines.
        identity: What the server says of itself.
        parser: The reasoning parser that its model needs, as far as known.
    """
    context = identity.context_length
    told = f", {context:,} tokens of context" if context else ""
    say.ok("model", f"{identity.model}{told}")
    if identity.reasoning_parser:
        say.ok("reasoning", f"parser {identity.reasoning_parser}")
    elif parser:
        say.warning(
            "reasoning",
            "its model thinks aloud and there is no parser: thoughts stand in the answers",
            f"start it with --reasoning-parser {parser}, unless the run sends enable_thinking "
            "false or wants them so",
        )
    if identity.tool_call_parser:
        say.ok("tools", f"parser {identity.tool_call_parser}")
    if identity.auto_truncate:
        say.warning(
            "truncation",
            "it cuts prompts that are too long, and answers what is left",
            "start it without --allow-auto-truncate: such prompts then fail and say why",
        )


def judge_launch(say: Scribe, facts: ServerFacts) -> None:
    """Judge flags that hold a run back, or betray it."""
    if facts.metrics is False:
        say.warning(
            "metrics",
            "no page of metrics: the mamba pool's use and tokens are not seen",
            "start it with --enable-metrics",
        )
    elif facts.metrics:
        say.ok("metrics", "on")
    if facts.logs_prompts:
        say.warning(
            "log",
            "it writes requests into its log",
            "start it without --log-requests: prompts stand there",
        )
    if facts.most_queued is not None and facts.most_queued < backlog_of(facts.cap or 1):
        say.warning(
            "queue",
            f"--max-queued-requests {facts.most_queued}: it refuses what Headrace sends ahead",
            f"leave the flag out, or give at least {backlog_of(facts.cap or 1)}",
        )
    if facts.policy not in {"", "fcfs", "lpm"}:
        say.warning(
            "order",
            f"--schedule-policy {facts.policy}: prompts may wait for ever behind others",
            "start it without the flag (fcfs)",
        )


def judge_room(
    say: Scribe, facts: ServerFacts, *, load: ServerLoad | None, shape: ModelShape | None
) -> None:
    """Judge how many requests it runs at once, and what would give more."""
    if load is not None and load.cap:
        facts = msgspec.structs.replace(facts, cap=load.cap // facts.ranks)
    tokens = measured_tokens(facts, load) if load is not None else None
    found = diagnose(facts, shape=shape, prompts=Prompts(tokens=tokens))
    short = facts.asked is not None and facts.cap is not None and facts.cap < facts.asked
    strategy = f"{found.strategy}: " if found.strategy else ""
    ranks = f", each of {facts.ranks} ranks" if facts.ranks > 1 else ""
    text = f"{strategy}{found.words}{ranks}"
    if facts.cap is None or short or found.binds == "KV pool":
        say.warning("capacity", text, found.advice or "its log's first lines tell why")
    elif found.advice:
        # It works as it was told to; more is an offer, not a complaint.
        say.ok("capacity", f"{text}; {found.advice}")
    else:
        say.ok("capacity", text)
    if facts.graph_cap is not None and facts.cap is not None and facts.cap > facts.graph_cap:
        say.warning(
            "graphs",
            f"above {facts.graph_cap:,} of its {facts.cap:,} requests it decodes without captured "
            "graphs, much slower",
            f"start it with --cuda-graph-max-bs {facts.cap} (--cuda-graph-max-bs-decode from "
            "0.5.14 on)",
        )


def judge_likeness(servers: dict[str, ServerIdentity]) -> dict[str, str]:
    """Say how servers differ from the first one: a run serves only those that are alike.

    Args:
        servers: Name -> what it says of itself.

    Returns:
        Name -> how it differs, of those that do.
    """
    if not servers:
        return {}
    first = identity_of(next(iter(servers.values())))
    told = {name: difference(first, identity_of(each)) for name, each in servers.items()}
    return {name: differs for name, differs in told.items() if differs}
