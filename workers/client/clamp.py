"""Make a request fit what the context leaves after its prompt. Pure.

Only a run with `--max-tokens context` asks for that. Its first request asks for one token less
than the context: for more, chat refuses without telling the prompt's length. The refusal tells
how long the prompt is, and one second request fits.
"""

import re

import msgspec

from workers.client.requests import Request, json_object, limit_member
from workers.client.tolerant import error_text

_TOTAL = re.compile(
    r"maximum context length of (\d+) tokens.*?(\d+) tokens from the input messages", re.DOTALL
)


def clamped_request(request: Request, status: int, body: bytes, *, rid: str) -> Request | None:
    """Make the one second request of a run that asked for what the context leaves.

    One token stays free: servers before 0.5.12 refuse a request that fills the context exactly,
    and some later ones crash on it.

    Args:
        request: The first one.
        status: HTTP status of its answer.
        body: Body of its answer.
        rid: A new one, since an old server keeps the ids of refused requests.

    Returns:
        None when this answer is no such refusal, or nothing is left for an answer.
    """
    if status != 400 or not request.fits_context or request.clamped:  # noqa: PLR2004 - HTTP
        return None
    told = _TOTAL.search(error_text(body))
    left = int(told[1]) - int(told[2]) - 1 if told else 0
    if left < 1:
        return None
    members = dict(request.members)
    limit = msgspec.Raw(b"%d" % left)
    if request.endpoint == "generate":
        sampling = json_object(members["sampling_params"])
        sampling["max_new_tokens"] = limit
        members["sampling_params"] = msgspec.Raw(msgspec.json.encode(sampling))
    else:
        members[limit_member(members)] = limit
    members["rid"] = msgspec.Raw(msgspec.json.encode(rid))
    return msgspec.structs.replace(
        request, members=members, rid=rid, max_tokens=left, clamped=True
    )
