"""Rows of several turns against what was accepted: only generated answers may differ."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.ids import fingerprint_of, key_of
from common.models import Choice, Claim, Params, Prompt, Turn, Usage
from producer.evidence import AFTER_FP, RowError, accepted_line, completion_line, failure_line
from producer.prompts.turns import all_turns
from workers.client.answers import Answer
from workers.client.faults import Kind, Verdict
from workers.client.requests import build_request, read_prompt
from workers.client.rows import Completion, Origin, completion_row
from workers.prompt.outcomes import failed
from workers.prompt.turns import Conversation

ORIGIN = Origin(server="http://s", model="m", server_version="0")
USAGE = Usage(prompt_tokens=1, completion_tokens=2)
ROLES = ("system", "user", "tool", "assistant")


def claim_of(messages: list[Any], turns: int) -> Claim:
    body = {"messages": messages}
    prompt = Prompt(id=msgspec.Raw(b'"x"'), line=1, endpoint="chat", body=body, turns=turns)
    return Claim(
        run="r",
        uid="u",
        key=key_of("r", b'"x"'),
        fingerprint=fingerprint_of("chat", body),
        try_=1,
        attempts=0,
        deaths=0,
        lost=0,
        prompt=msgspec.json.encode(prompt),
    )


def answer(text: str) -> Answer:
    return Answer(
        choices=[Choice(index=0, content=text, finish_reason="stop")],
        usage=USAGE,
        empty=False,
        truncated=False,
        reasoning_cut=False,
    )


def figures(talk: Conversation) -> Turn:
    return Turn(
        at=talk.at,
        finish_reason="stop",
        usage=USAGE,
        latency_s=0.5,
        attempts=1,
        server="http://s",
        completed_at="2026-01-01T00:00:00Z",
    )


def row_of(claim: Claim) -> bytes:
    prompt = read_prompt(claim.prompt)
    talk = Conversation(prompt)
    while not talk.is_last:
        talk.finish_turn(answer(f"new {talk.number}"), figures(talk))
    done = Completion(
        request=build_request(
            talk.prompt, Params(max_tokens=8), model="m", rid="r-1", context_length=None
        ),
        answer=answer("last"),
        origin=ORIGIN,
        flags=(),
        latency_s=0.5,
        completed_at="2026-01-01T00:00:00Z",
    )
    return completion_row(claim, prompt, talk.completed(done, figures(talk)))


def accepted(claim: Claim) -> bytes:
    """What an accepted prompt's line says of its content and id."""
    line = accepted_line(claim.key.hex().encode(), claim.fingerprint.hex().encode(), claim.prompt)
    return line[AFTER_FP + 1 :]


def answered(row: bytes) -> bytes:
    """The same of a row's line."""
    return b"\t".join(completion_line(row, 0).rsplit(b"\t", 2)[1:])


def changed(claim: Claim, change: Callable[[dict[str, Any]], None]) -> bytes:
    row = json.loads(row_of(claim))
    change(row)
    return msgspec.json.encode(row)


def messages_of(*roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"{role} {at}"} for at, role in enumerate(roles)]


def claim_for(*roles: str) -> Claim:
    asked, turns = all_turns(messages_of(*roles))
    return claim_of(asked, turns)


CHAT = claim_for("system", "user", "assistant", "user", "assistant", "tool", "assistant", "user")


@given(st.lists(st.sampled_from(ROLES), max_size=8))
def test_a_row_answers_its_own_prompt_whatever_the_roles(roles: list[str]) -> None:
    claim = claim_for("user", *roles, "user", "assistant", "user")

    assert answered(row_of(claim)) == accepted(claim)


def set_at(row: dict[str, Any], at: int) -> None:
    row["turns"][0]["at"] = at


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row["messages"][1].update(content="another question"),
        lambda row: row["messages"][4].update(content="another call"),
        lambda row: row["messages"].insert(3, {"role": "user", "content": "one more"}),
        lambda row: row["messages"].__delitem__(slice(2, 4)),
        lambda row: row.pop("turns"),
        lambda row: row["turns"].pop(0),
        lambda row: set_at(row, 4),
        lambda row: row["turns"].append({"at": 4}),
    ],
)
def test_what_was_not_generated_may_not_differ(change: Callable[[dict[str, Any]], None]) -> None:
    row = changed(CHAT, change)

    # Where it says no answer stands, the row is at fault by itself.
    with contextlib.suppress(RowError):
        assert answered(row) != accepted(CHAT)


@pytest.mark.parametrize("at", [-1, 1, 99])
def test_a_turn_that_is_no_answer_is_a_fault_of_the_row(at: int) -> None:
    with pytest.raises(RowError):
        answered(changed(CHAT, lambda row: set_at(row, at)))


def test_a_row_that_does_not_end_with_its_choice_is_a_fault() -> None:
    with pytest.raises(RowError):
        answered(changed(CHAT, lambda row: row["messages"][-1].update(content="another")))


def test_a_failure_holds_the_prompt_with_its_empty_places() -> None:
    verdict = Verdict(kind=Kind.PROMPT, reason="bad_request")
    row = failed(CHAT, verdict, attempts=1, server="http://s", turn=2).row

    assert b"\t".join(failure_line(row, 0).rsplit(b"\t", 2)[1:]) == accepted(CHAT)
