"""What a run pins, and which server differs from it."""

from typing import Any

import msgspec
import pytest

from common.pins import PINNED, difference, identity_of
from workers.readings.loads import ServerIdentity, read_identity

MODELS = b'{"data":[{"id":"tiny","max_model_len":4096}]}'
INFO: dict[str, Any] = {
    "model_path": "models/tiny",
    "chat_template": None,
    "reasoning_parser": "qwen3",
    "sampling_defaults": "model",
    "version": "0.5.23",
}


def identity(models: bytes = MODELS, **info: Any) -> dict[str, Any]:
    return identity_of(read_identity(models, msgspec.json.encode({**INFO, **info})))


@pytest.mark.parametrize(
    ("member", "other"),
    [
        ("model", identity(MODELS.replace(b"tiny", b"huge"))),
        ("model_path", identity(model_path="models/tiny-v2")),
        ("context_length", identity(MODELS.replace(b"4096", b"2048"))),
        ("template_hash", identity(chat_template="other.jinja")),
        ("template_hash", identity(default_chat_template_kwargs={"enable_thinking": False})),
        ("reasoning_parser", identity(reasoning_parser=None)),
        ("sampling_defaults", identity(sampling_defaults="openai")),
        ("sampling_defaults", identity(preferred_sampling_params={"temperature": 0.6})),
    ],
)
def test_each_pinned_member_tells_another_server(member: str, other: dict[str, Any]) -> None:
    told = difference(identity(), other)

    assert told == f"{member} {other[member]} instead of {identity()[member]}"


def test_what_is_not_pinned_makes_no_difference() -> None:
    assert not difference(identity(), identity(version="0.5.24", tool_call_parser="x"))
    assert not difference({}, identity())
    assert not difference({"model": "tiny"}, identity())
    assert set(PINNED) <= set(ServerIdentity.__struct_fields__)
