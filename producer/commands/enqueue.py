"""`producer enqueue`: flags, then `producer.enqueue`, then what people and programs read."""

import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Literal

import click
import msgspec

from common.errors import UsageError
from common.flags import options_of, origin
from common.help import Sectioned
from common.last_words import tell
from common.options import REDIS
from producer.enqueue import enqueue
from producer.options import JSON, PRIORITY, for_run
from producer.prompts.rows import RowRules
from producer.prompts.turns import unfit
from producer.request import ROOM_WAIT_S, Asked, Request, run_name
from producer.summary import as_json, as_text, next_lines

_NOT_BY_PARAM = {
    "input_ids": "it is the prompt",
    "max_completion_tokens": "use --max-tokens",
    "max_new_tokens": "use --max-tokens",
    "max_tokens": "use --max-tokens",
    "messages": "it is the prompt",
    "model": "use --model",
    "prompt": "it is the prompt",
    "rid": "Headrace sets it",
    "stream": "answers come whole",
    "text": "it is the prompt",
}


def _tokens(value: str) -> int | Literal["context"]:
    """Read a number of tokens, or `context`."""
    if value == "context":
        return "context"
    number = int(value) if value.isascii() and value.isdigit() else 0
    if number < 1:
        raise click.BadParameter(f"{value!r} is neither a number of at least 1 nor `context`")
    return number


_SECTIONS = {
    "The run": "run output endpoint_url redis format keep_token_ids partitions priority window",
    "The rows": "id_field raw_prompt private_addresses turns samples limit skip_invalid",
    "The requests, kept by the run": "max_tokens model temperature top_p top_k min_p seed stop"
    " param request_timeout attempts",
    "Calling it again": "keep_open accept_changes retry_failed room_wait",
}


@click.command(cls=Sectioned, sections=_SECTIONS)
@click.argument("files", nargs=-1, required=True, metavar="FILES...")
@click.option(
    "--run", metavar="NAME", help="Of the run.  [default: the file's name without endings]"
)
@click.option(
    "--output",
    metavar="URL",
    help="s3://BUCKET/PREFIX or a directory; {run} stands for its name. Kept by the run.",
)
@REDIS
@click.option("--endpoint-url", metavar="URL", help="Another S3 than Amazon's; kept by the run.")
@click.option("--id-field", metavar="NAME", help="Member with the id.  [default: id, custom_id]")
@click.option("--raw-prompt", is_flag=True, help="`prompt` is text to complete, not a message.")
@click.option(
    "--private-addresses",
    is_flag=True,
    help="Let rows name pictures at private addresses, which your servers then fetch.",
)
@click.option(
    "--turns",
    type=click.Choice(["last", "all"]),
    help="Answers to generate anew; conversations: last if not said, messages: none.",
)
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="A pilot: the first N rows."
)
@click.option(
    "--samples",
    type=click.IntRange(1, 100_000),
    default=1,
    show_default=True,
    metavar="N",
    help="Ask each row N times, sample s with seed + s; a larger N later adds the further ones.",
)
@click.option(
    "--max-tokens",
    "--max-new-tokens",
    "max_tokens",
    type=_tokens,
    metavar="N|context",
    help="Tokens of an answer at most; context: what the context leaves after the prompt.",
)
@click.option(
    "--model",
    metavar="NAME",
    help="Served model; a row naming another is rejected.  [default: the first server's]",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    help="0 always draws the likeliest.  [default: the server's]",
)
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1),
    help="Share of probability to draw from.  [default: the server's]",
)
@click.option(
    "--top-k", type=int, help="How many tokens to draw from; -1 for all.  [default: the server's]"
)
@click.option(
    "--min-p",
    type=click.FloatRange(min=0, max=1),
    help="Least probability, as a share of the likeliest token's.  [default: the server's]",
)
@click.option("--seed", type=int, help="Sent with every request.  [default: none]")
@click.option(
    "--stop", multiple=True, metavar="TEXT", help="Text that ends an answer; may be repeated."
)
@click.option(
    "--param",
    multiple=True,
    metavar="KEY=JSON",
    help="Any other request parameter, as top_a=0.2; may be repeated.",
)
@click.option(
    "--request-timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Seconds of one attempt at most.  [default: from --max-tokens, at least 600]",
)
@click.option(
    "--attempts", type=click.IntRange(min=1), help="After so many a prompt fails.  [default: 3]"
)
@click.option(
    "--partitions",
    type=click.IntRange(1, 100),
    help="Result streams: as many sinks can share the run.  [default: 1]",
)
@click.option(
    "--format",
    "row_format",
    type=click.Choice(["jsonl.zst", "parquet"]),
    help="Of the results in the output.  [default: jsonl.zst]",
)
@click.option(
    "--keep-token-ids",
    is_flag=True,
    default=None,
    help="Results hold the token ids of prompt and answer and a loss mask; kept by the run.",
)
@click.option(
    "--priority",
    type=PRIORITY,
    metavar="N",
    help="From -9 to 9, higher runs go first; changes it for a run that is there.  [default: 0]",
)
@click.option(
    "--window",
    type=click.IntRange(min=1),
    metavar="N",
    help="Most requests of the run in Redis, the rest waits in the output.  [default: 1,000,000]",
)
@click.option(
    "--room-wait",
    type=click.FloatRange(min=0),
    default=ROOM_WAIT_S,
    show_default=True,
    metavar="S",
    help="How many seconds a full Redis is waited for; then the call ends, to be repeated.",
)
@click.option(
    "--skip-invalid",
    is_flag=True,
    help="Queue the good rows; the others go to FILE.rejected.jsonl with reasons.",
)
@click.option(
    "--accept-changes", is_flag=True, help="Replace the text of prompts that are not done yet."
)
@click.option("--retry-failed", is_flag=True, help="Try failed and cancelled prompts again.")
@click.option("--keep-open", is_flag=True, help="More files will come: the run does not end yet.")
@click.option("--dry-run", is_flag=True, help="Check the files; needs no Redis and no output.")
@JSON
def command(**flags: Any) -> int:
    """Queue the prompts in FILES for a run.

    FILES are JSON lines, plain, gzip or zstd, or Parquet, known by their content; - is stdin.
    Each row has `prompt`, `messages`, `conversations`, `text` or `input_ids`, or is a line of an
    OpenAI batch file. The same call again queues only what is missing, so a call that was
    interrupted is simply repeated. Nothing is queued from files with a bad row.

    A stored conversation that ends with an assistant turn is one request: its last answer is
    dropped and asked for again.

    --turns all drops every assistant turn of `conversations` and `messages` and generates them in
    order, each on those generated before it; --max-tokens and --attempts hold for each turn, and
    each finished turn is kept. Assistant turns in a row are one answer; a conversation that ends
    with another turn is answered; one that begins with an assistant turn is rejected. System and
    tool turns stay where they stand, and so does a call of tools, whose results belong to it. A
    turn that ends because of its length is kept, the next go on from it, and the row is flagged
    truncated. A turn has one answer, so an n above 1 is refused. A failed prompt that is tried
    again begins with its first turn.

    --keep-token-ids adds to each choice of the results `token_ids`, as the engine used them (the
    prompt's, then the generated ones), and `loss_mask`, 1 for each that was generated. Chat and
    completions need SGLang 0.5.17, /generate 0.5.13, `input_ids` none in particular; an older
    server gets no job.

    \b
    Example:
        producer enqueue prompts.jsonl --output s3://bucket/prefix --max-tokens 4096
        producer enqueue prompts.jsonl --output out --max-tokens 4096 --limit 200
        zcat *.jsonl.gz | producer enqueue - --run all --output out --max-tokens context
        producer enqueue chats.jsonl --output out --max-tokens 4096 --keep-token-ids
        producer enqueue chats.jsonl --output out --max-tokens 4096 --turns all
    """
    files: tuple[str, ...] = flags["files"]
    run = run_name(files, flags["run"])
    request = Request(
        files=files,
        run=run,
        rules=RowRules(
            id_field=flags["id_field"],
            raw_prompt=flags["raw_prompt"],
            private_addresses=flags["private_addresses"],
            turns=flags["turns"],
            model=flags["model"],
            max_tokens_given=flags["max_tokens"] is not None,
        ),
        asked=_asked(flags, run),
        redis=flags["redis"],
        limit=flags["limit"],
        samples=flags["samples"],
        skip_invalid=flags["skip_invalid"],
        accept_changes=flags["accept_changes"],
        retry_failed=flags["retry_failed"],
        keep_open=flags["keep_open"],
        priority=flags["priority"],
        window=flags["window"],
        room_wait_s=flags["room_wait"],
        dry_run=flags["dry_run"],
        version=_version(),
    )
    outcome = enqueue(request, say=lambda text: tell(f"producer: {text}"))
    for line in as_text(outcome):
        tell(line)
    if flags["json_"]:
        click.echo(as_json(outcome))
    if outcome.exit_code == 3:  # noqa: PLR2004 - common.errors.InputError
        problem = outcome.reading.no_prompts if request.skip_invalid else outcome.reading.problem
        tell(f"producer: {outcome.reading.refused or problem}")
    elif outcome.queued:
        tell("next:")
        pilot = sys.argv[1:] if request.limit else ()
        for line in next_lines(outcome, request.redis, pilot, limit_from=_limit_from()):
            tell(f"  {line}")
    return outcome.exit_code


def _limit_from() -> str:
    """Say where --limit was set; "" where it was typed, and is left out by not typing it."""
    ctx = click.get_current_context()
    return origin(ctx, options_of(ctx.command).get("limit"))


def _asked(flags: dict[str, Any], run: str) -> Asked:
    if flags["row_format"] == "parquet" and not flags["dry_run"]:
        _refuse_parquet()
    sampling = _sampling(flags)
    problem = unfit(sampling) if flags["turns"] == "all" else ""
    if problem:
        raise UsageError(f"--param: {problem}")
    return Asked(
        output=for_run(flags["output"], run),
        endpoint_url=flags["endpoint_url"],
        partitions=flags["partitions"],
        max_tokens=flags["max_tokens"],
        model=flags["model"],
        sampling=sampling,
        request_timeout_s=flags["request_timeout"],
        attempts=flags["attempts"],
        format=flags["row_format"],
        keep_token_ids=flags["keep_token_ids"],
    )


def _refuse_parquet() -> None:
    # Looked for, not imported: that takes a second.
    if find_spec("pyarrow") is None:
        raise UsageError(
            "--format parquet needs pyarrow, here and where sinks run: pip install pyarrow; "
            "without it there is jsonl.zst, the default, which `producer export` turns into JSONL"
        )


def _sampling(flags: dict[str, Any]) -> dict[str, Any]:
    named = ("temperature", "top_p", "top_k", "min_p", "seed")
    sampling = {name: flags[name] for name in named if flags[name] is not None}
    if flags["stop"]:
        sampling["stop"] = list(flags["stop"])
    for text in flags["param"]:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise UsageError(f"--param {text!r}: give KEY=JSON, for example top_a=0.2")
        if name in _NOT_BY_PARAM:
            raise UsageError(f"--param {name}: not here, {_NOT_BY_PARAM[name]}")
        if name in sampling:
            raise UsageError(f"--param {name}: given twice")
        try:
            sampling[name] = msgspec.json.decode(value.encode())
        except (msgspec.DecodeError, UnicodeEncodeError):
            raise UsageError(
                f"--param {name}: the value is not JSON; text needs quotes of its own: "
                f"--param '{name}=\"…\"'"
            ) from None
    return sampling


def _version() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return ""
