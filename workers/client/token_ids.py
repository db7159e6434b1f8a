"""Put the token ids of a prompt and of its answer together, and the mask that tells them apart.

For runs with `--keep-token-ids`. Pure. What SGLang gives, by version (read in its wheels 0.5.7 to
0.5.23, and seen at a real 0.5.23):

    route              since    asked for by              prompt's ids       generated ids
    -----------------  -------  ------------------------  -----------------  ---------------------
    chat               0.5.17   return_token_ids          prompt_token_ids   response_token_ids,
                                                                             0.5.17: token_ids
    completions        0.5.17   return_token_ids          prompt_token_ids   token_ids
    /generate          0.5.13   return_prompt_token_ids   prompt_token_ids   output_ids, always

A prompt for /generate that is token ids itself needs no more than `output_ids`, which every
version gives. What an older server lacks is not made up: tokenising there first and asking
/generate gives another answer than chat does (thinking and tool calls not taken apart, other
defaults), so such a server gets no job of the run.

Ids that do not fit the counts of `usage` are refused with the whole answer: a mask that is wrong
by one token would never be noticed later.
"""

from collections.abc import Mapping, Sequence

import msgspec

from common.models import Choice, Endpoint
from workers.client.answers import Answer, BadAnswerError
from workers.client.requests import Request
from workers.releases import Release, dotted, release_or_newest

_SINCE: Mapping[Endpoint, Release] = {
    "chat": (0, 5, 17),
    "completions": (0, 5, 17),
    "generate": (0, 5, 13),
}
_PROMPT_MEMBERS = ("prompt", "text", "input_ids")


def lacking(request: Request, version: str) -> str:
    """Say why a server cannot give the token ids that a request asks for.

    Args:
        request: What would be sent.
        version: SGLang's; one that cannot be read is tried, and judged by its answers.

    Returns:
        For people; empty when nothing is in the way.
    """
    if not request.keeps_token_ids or _own_ids(request) is not None:
        return ""
    since = _SINCE[request.endpoint]
    if release_or_newest(version) >= since:
        return ""
    return (
        f"it keeps token ids, and SGLang {version} gives none at {request.path}: "
        f"{dotted(since)} and later do; upgrade the server, or enqueue without "
        "--keep-token-ids under another --run"
    )


def with_token_ids(answer: Answer, request: Request) -> Answer:
    """Give an answer whose choices hold `token_ids` and `loss_mask`, and no other ids.

    Raises:
        BadAnswerError: Ids are missing, or there are more or fewer than `usage` says.
    """
    own = _own_ids(request)
    asked = [own if each.prompt_token_ids is None else each.prompt_token_ids
             for each in answer.choices]  # fmt: skip
    came = [each.output_token_ids for each in answer.choices]
    choices = [
        _whole(choice, prompt, output)
        for choice, prompt, output in zip(answer.choices, asked, came, strict=True)
    ]
    counts = [len(prompt or ()) for prompt in asked]
    _compare("prompt", _prompt_tokens(request, counts), answer.usage.prompt_tokens)
    generated = sum(len(output or ()) for output in came)
    _compare("generated", generated, answer.usage.completion_tokens)
    return msgspec.structs.replace(answer, choices=choices)


def _whole(choice: Choice, prompt: list[int] | None, output: list[int] | None) -> Choice:
    if prompt is None or output is None:
        which = "prompt" if prompt is None else "answer"
        raise BadAnswerError("token_ids", f"choice {choice.index} has no token ids of its {which}")
    return msgspec.structs.replace(
        choice,
        prompt_token_ids=None,
        output_token_ids=None,
        token_ids=prompt + output,
        loss_mask=[0] * len(prompt) + [1] * len(output),
    )


def _compare(what: str, found: int, said: int) -> None:
    if found != said:
        raise BadAnswerError(
            "token_ids", f"the answer has {found} {what} token ids, and its usage says {said}"
        )


def _prompt_tokens(request: Request, counts: Sequence[int]) -> int:
    """Count the prompt's ids as `usage` does: once for all choices of one prompt.

    A batch line may hold several prompts; /generate's usage is then that of the longest.
    """
    each = max(len(counts) // _prompts(request), 1)
    if any(count != counts[at - at % each] for at, count in enumerate(counts)):
        raise BadAnswerError("token_ids", "choices of one prompt have different prompt token ids")
    return max(counts) if request.endpoint == "generate" else sum(counts[::each])


def _prompts(request: Request) -> int:
    """How many prompts a request holds: one, but for a list of texts or of lists of ids."""
    value = _content(request)
    if value is None or bytes(value).lstrip()[:1] != b"[":
        return 1
    items = msgspec.json.decode(value)
    return 1 if not items or isinstance(items[0], int) else len(items)


def _content(request: Request) -> msgspec.Raw | None:
    if request.endpoint == "chat":
        return None
    return next((request.members[n] for n in _PROMPT_MEMBERS if n in request.members), None)


def _own_ids(request: Request) -> list[int] | None:
    """Give the token ids that a prompt for /generate is, if it is nothing else."""
    raw = request.members.get("input_ids") if request.endpoint == "generate" else None
    if raw is None:
        return None
    ids = msgspec.json.decode(raw)
    return ids if isinstance(ids, list) and all(isinstance(one, int) for one in ids) else None
