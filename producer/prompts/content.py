"""Check content without messages, and the envelope of a batch line. Pure."""

from typing import Any

from common.models import Endpoint
from producer.prompts.verdicts import RowRejectedError

ROUTES: dict[str, Endpoint] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/generate": "generate",
}


def route_of(row: dict[str, Any]) -> Endpoint:
    """Tell which route a batch line asks for; without `url` its body tells."""
    method = row.get("method")
    url = row.get("url")
    if url is None:
        body = row["body"]
        if "messages" in body:
            return "chat"
        return "completions" if "prompt" in body else "generate"
    if type(url) is not str or not url.startswith("/") or url.startswith("//"):
        raise RowRejectedError(
            "url", "url names a host: it must be a path such as /v1/chat/completions"
        )
    if method is not None and method != "POST":
        raise RowRejectedError("url", "method is not POST")
    endpoint = ROUTES.get(url)
    if endpoint is None:
        raise RowRejectedError("endpoint", f"url is none of {', '.join(ROUTES)}")
    return endpoint


def check_text(value: Any, name: str, *, several: bool = False) -> None:
    """Check text or token ids for a route without messages; a batch line may hold several."""
    if value is None:
        raise RowRejectedError("no_prompt", f"there is no {name}")
    if type(value) is str and name != "input_ids":
        if not value or value.isspace():
            raise RowRejectedError("empty_prompt", f"{name} is empty")
        return
    if type(value) is not list:
        raise RowRejectedError("bad_type", f"{name} is neither text nor token ids")
    if not value:
        raise RowRejectedError("empty_prompt", f"{name} is empty")
    if name != "text" and all(type(item) is int and item >= 0 for item in value):
        return
    if not several:
        raise RowRejectedError("bad_type", f"{name} is a list of something else than token ids")
    for item in value:
        check_text(item, name)
