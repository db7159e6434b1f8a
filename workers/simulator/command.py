"""The command `workers simulate`."""

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

import click
import msgspec

from common.help import Sectioned
from common.last_words import tell
from workers.simulator.compat import override
from workers.simulator.distributions import Distribution, parse_distribution
from workers.simulator.faults import Fault, parse_fault
from workers.simulator.settings import STATES, Settings
from workers.simulator.simulator import Simulator, run


class DistributionType(click.ParamType[Distribution]):
    """`N`, `fixed:N`, `exp:MEAN`, `lognormal:MEAN:SIGMA` or `max`."""

    name = "distribution"

    @override
    def convert(self, value: Any, param: Any, ctx: Any) -> Distribution:
        """See click."""
        try:
            return value if isinstance(value, Distribution) else parse_distribution(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class FaultType(click.ParamType[Fault]):
    """JSON, or `KIND[:NAME=VALUE,…]`."""

    name = "fault"

    @override
    def convert(self, value: Any, param: Any, ctx: Any) -> Fault:
        """See click."""
        try:
            return value if isinstance(value, Fault) else parse_fault(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class SlowType(click.ParamType[tuple[int, float]]):
    """`INDEX:FACTOR`."""

    name = "index:factor"

    @override
    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, float]:
        """See click."""
        try:
            index, factor = value.split(":")
            return int(index), float(factor)
        except ValueError:
            self.fail(f"{value!r} is not INDEX:FACTOR, such as 2:0.5", param, ctx)


class InfoType(click.ParamType[tuple[str, Any]]):
    """`MEMBER=JSON`."""

    name = "member=json"

    @override
    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, Any]:
        """See click."""
        name, equals, text = value.partition("=")
        try:
            return name, msgspec.json.decode(text if equals else "")
        except msgspec.DecodeError:
            self.fail(f"{value!r} is not MEMBER=JSON", param, ctx)


def _version(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"\d+\.\d+\.\d+(\..+)?", value):
        raise click.BadParameter(f"{value!r} is not a version such as 0.5.23 or 0.5.12.post1")
    return value


def _ports(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        return tuple(int(port) for port in value.split(",") if port)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of ports such as 30000,30005") from None


POSITIVE = click.IntRange(min=1)
ABOVE_ZERO = click.FloatRange(min=0, min_open=True)


_SECTIONS = {
    "The servers": "servers port ports sglang_version model api_key info",
    "What they hold": "strategy cap max_running_requests mamba_states kv_tokens context_length"
    " max_queued_requests waiting_timeout running_timeout",
    "How fast they are": "speed rate_max rate_half latency slow",
    "What they answer": "answer_tokens answer_bytes tokens_per_char reasoning dirty",
    "Faults": "fault keep_alive disconnect_poll known_rids_only",
}


# Variables of its own: HEADRACE_MODEL is the model that is asked for, not the one pretended.
@click.command(
    cls=Sectioned, sections=_SECTIONS, context_settings={"auto_envvar_prefix": "HEADRACE_SIM"}
)
@click.option("--servers", type=POSITIVE, default=2, show_default=True, help="How many servers.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=30000,
    show_default=True,
    help="Port of the first; the others follow. 0 takes free ports.",
)
@click.option(
    "--ports",
    default="",
    callback=_ports,
    metavar="P,P",
    help="The ports one by one, instead of --servers and --port.",
)
@click.option(
    "--sglang-version",
    default="0.5.23",
    show_default=True,
    callback=_version,
    help="Answer in this version's shapes.",
)
@click.option("--model", default="tiny", show_default=True, help="Served model name.")
@click.option(
    "--strategy",
    type=click.Choice(list(STATES)),
    default="no_buffer",
    show_default=True,
    help="Mamba cache strategy; decides the pool and its cap.",
)
@click.option("--cap", type=POSITIVE, help="Requests that run at once, instead of the pool's.")
@click.option("--max-running-requests", type=POSITIVE, help="Lowers the pool's cap.")
@click.option("--mamba-states", type=POSITIVE, help="States in the mamba pool.")
@click.option(
    "--kv-tokens", type=POSITIVE, default=450_000, show_default=True, help="Tokens in the KV pool."
)
@click.option(
    "--context-length",
    type=POSITIVE,
    default=32_768,
    show_default=True,
    help="Tokens of prompt and answer together.",
)
@click.option(
    "--max-queued-requests",
    type=click.IntRange(min=0),
    help="Waiting requests beyond which a new one gets 503.  [default: no limit]",
)
@click.option(
    "--waiting-timeout",
    "waiting_timeout_s",
    type=ABOVE_ZERO,
    metavar="S",
    help="503 for what has waited so long.",
)
@click.option(
    "--running-timeout",
    "running_timeout_s",
    type=ABOVE_ZERO,
    metavar="S",
    help="503 for what has run so long.",
)
@click.option(
    "--rate-max",
    type=ABOVE_ZERO,
    default=3015.0,
    show_default=True,
    help="A batch of b generates RATE_MAX * b / (b + RATE_HALF) tokens/s.",
)
@click.option(
    "--rate-half",
    type=click.FloatRange(min=0),
    default=112.0,
    show_default=True,
    help="See --rate-max.",
)
@click.option(
    "--latency",
    type=DistributionType(),
    help="Seconds that a request runs, whatever the batch: 0, fixed:0.05, "
    "lognormal:MEAN:SIGMA. Replaces the throughput model.",
)
@click.option(
    "--answer-tokens",
    type=DistributionType(),
    help="Tokens of answers: fixed:N, exp:MEAN, lognormal:MEAN:SIGMA or max.  "
    "[default: lognormal:3150:0.8; with --latency 64]",
)
@click.option("--answer-bytes", type=POSITIVE, help="Size of texts.  [default: 4 a token]")
@click.option(
    "--speed",
    type=ABOVE_ZERO,
    default=1.0,
    show_default=True,
    help="How much faster than real time simulated durations pass.",
)
@click.option(
    "--slow",
    type=SlowType(),
    multiple=True,
    metavar="INDEX:FACTOR",
    help="Let one server run at a share of the pace, e.g. 2:0.5.",
)
@click.option(
    "--info",
    type=InfoType(),
    multiple=True,
    metavar="MEMBER=JSON",
    help="What /server_info says instead, e.g. reasoning_parser='\"qwen3\"'.",
)
@click.option(
    "--missing", multiple=True, metavar="PATH", help="Answer 404 there, e.g. /metrics; repeatable."
)
@click.option("--reasoning", is_flag=True, help="Answer with reasoning_content.")
@click.option(
    "--dirty",
    is_flag=True,
    help="Put NUL, U+FFFD and lone surrogates into answers, as random models do.",
)
@click.option(
    "--tokens-per-char",
    type=ABOVE_ZERO,
    default=0.25,
    show_default=True,
    help="Tokens of a prompt per character.",
)
@click.option("--api-key", help="Key that requests must carry.")
@click.option(
    "--keep-alive",
    "keep_alive_s",
    type=ABOVE_ZERO,
    default=5.0,
    show_default=True,
    metavar="S",
    help="Close idle connections after so long.",
)
@click.option(
    "--disconnect-poll",
    "disconnect_poll_s",
    type=click.FloatRange(min=0),
    default=4.0,
    show_default=True,
    metavar="S",
    help="Notice a client that has gone after so long.",
)
@click.option(
    "--known-rids-only",
    is_flag=True,
    help="Ignore an abort whose rid is not that of an open request.",
)
@click.option(
    "--log", type=click.Path(dir_okay=False), help="Append a line at each begin and end."
)
@click.option(
    "--sglang-log",
    type=click.Path(dir_okay=False),
    help="Write SGLang's own lines; {port} is replaced.",
)
@click.option(
    "--fault",
    "faults",
    type=FaultType(),
    multiple=True,
    metavar="KIND[:NAME=VALUE,…]",
    help="Arm a fault, e.g. queue_full:count=20 or die:server=1,after_s=5,for_s=3.",
)
@click.option("--until-eof", is_flag=True, help="End when standard input does.")
@click.option("--json", "as_json", is_flag=True, help="Print ports as one JSON object on stdout.")
def simulate(
    *,
    faults: tuple[Fault, ...],
    as_json: bool,
    slow: tuple[tuple[int, float], ...],
    info: tuple[tuple[str, Any], ...],
    until_eof: bool,
    **options: Any,
) -> None:
    """Stand in for SGLang servers, without a GPU or a model.

    \b
    Examples:
        workers simulate --servers 2
        workers simulate --servers 8 --latency lognormal:0.2:1 --cap 72 --log requests.jsonl
        workers simulate --speed 60 --strategy extra_buffer --slow 7:0.5

    Faults: POST /_sim/faults to a server, or to the control port that --json prints. Counts: GET
    /_sim/state. `python -m pydoc workers.simulator.faults` lists the faults.
    """
    settings = settings_from({**options, "slow": dict(slow), "info": dict(info)})

    def announce(simulator: Simulator) -> None:
        for server in simulator.servers:
            where = f"http://127.0.0.1:{server.record.port}"
            limits = f"(cap {settings.pool.cap}, {settings.strategy})"
            tell(f"simulating SGLang {settings.sglang_version} at {where} {limits}")
        if as_json:
            ports = [server.record.port for server in simulator.servers]
            click.echo(json.dumps(_summary(ports, simulator.control_port, settings.pool.cap)))
            sys.stdout.flush()
        tell("ready")

    try:
        stopped_by = run(settings, faults, announce, until_eof=until_eof)
    except OSError as error:
        raise click.ClickException(f"cannot listen or write the log: {error}") from error
    if stopped_by is not None:
        raise SystemExit(128 + stopped_by)


def settings_from(options: Mapping[str, Any]) -> Settings:
    """Check what the command's flags say together.

    Args:
        options: Their values by name, `slow` and `info` as mappings.

    Raises:
        click.UsageError: A value that no server can have.
    """
    said = dict(options)
    if said["answer_tokens"] is None:
        short = said["latency"] is not None
        said["answer_tokens"] = parse_distribution("64" if short else "lognormal:3150:0.8")
    try:
        return msgspec.convert(msgspec.to_builtins(said), Settings)
    except msgspec.ValidationError as error:
        raise click.UsageError(str(error)) from error


def _summary(ports: list[int], control_port: int, cap: int) -> dict[str, Any]:
    return {
        "servers": [
            {"url": f"http://127.0.0.1:{port}", "port": port, "cap": cap} for port in ports
        ],
        "control": f"http://127.0.0.1:{control_port}",
    }
