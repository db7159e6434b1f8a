"""`--turns all`: where answers are asked for, what stays, and which rows are refused."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.ids import fingerprint_of
from producer.prompts.rows import Row, RowChecker, RowRules
from producer.prompts.turns import all_turns
from producer.prompts.verdicts import RowRejectedError

U, A, S, T = "user", "assistant", "system", "tool"
ROLES = (U, A, S, T, "developer")


def turns(*roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"{role} {at}"} for at, role in enumerate(roles)]


def shape(asked: list[dict[str, Any] | None]) -> list[str | None]:
    return [None if message is None else message["role"] for message in asked]


def check(row: dict[str, Any], **rules: Any) -> Row:
    given_rules: dict[str, Any] = {"max_tokens_given": True, "turns": "all", **rules}
    return RowChecker(RowRules(**given_rules)).check(json.dumps(row).encode())


def reason(row: dict[str, Any]) -> str:
    with pytest.raises(RowRejectedError) as caught:
        check(row)
    return caught.value.reason


@pytest.mark.parametrize(
    ("roles", "asked"),
    [
        ((U, A, U, A), [U, None, U, None]),
        ((S, U, A, U, A), [S, U, None, U, None]),
        # A user turn at the end is answered too.
        ((U, A, U), [U, None, U, None]),
        # Assistant turns in a row are one answer.
        ((U, A, A, U, A, A, A), [U, None, U, None]),
        # Two user turns in a row are answered once.
        ((U, U, A, U, A), [U, U, None, U, None]),
        ((U, A, S, U, A), [U, None, S, U, None]),
        ((U, A, S), [U, None, S, None]),
        # A call of tools stays with its results, and the answer to them is asked for.
        ((U, A, T, A, U, A), [U, A, T, None, U, None]),
        ((U, A, T, T, A, T, A, U), [U, A, T, T, A, T, None, U, None]),
        ((U, A, U, A, T), [U, None, U, A, T, None]),
    ],
)
def test_an_answer_is_asked_for_where_one_stood(
    roles: tuple[str, ...], asked: list[str | None]
) -> None:
    assert shape(all_turns(turns(*roles))[0]) == asked


@pytest.mark.parametrize("roles", [(A, U, A), (S, A, U, A), (A, T, A, U), (T, A, U)])
def test_an_answer_before_any_question_is_rejected(roles: tuple[str, ...]) -> None:
    with pytest.raises(RowRejectedError) as caught:
        all_turns(turns(*roles))

    assert caught.value.reason == "first_turn"


@given(st.lists(st.sampled_from(ROLES), min_size=1, max_size=12))
def test_whatever_the_roles_all_but_answers_stays_in_its_order(roles: list[str]) -> None:
    stored = turns(*roles)
    try:
        asked, answers = all_turns(stored)
    except RowRejectedError:
        assert U not in roles or A in roles[: roles.index(U)]
        return

    kept = [message for message in asked if message is not None]
    dropped = [message for message in stored if message not in kept]
    assert [message for message in stored if message in kept] == kept
    assert {message["role"] for message in dropped} <= {A}
    assert asked.count(None) == answers >= 1
    assert asked[-1] is None
    # No answer stands behind another one, or before the first question.
    assert (None, None) not in itertools.pairwise(asked)
    assert U in shape(asked[: asked.index(None)])
    # What stays of the assistant is a call whose results follow.
    for at, message in enumerate(asked):
        if message is not None and message["role"] == A:
            rest = [after for after in shape(asked[at:]) if after != A]
            assert rest[0] == T


def test_both_spellings_of_a_conversation_and_messages_ask_the_same() -> None:
    shared = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x"}] * 2
    roles = [{"role": U, "content": "a"}, {"role": A, "content": "x"}] * 2

    rows = [check({"conversations": shared}), check({"conversations": roles})]
    rows += [check({"messages": roles}), check({"prompt": roles})]

    assert [row.turns for row in rows] == [2, 2, 2, 2]
    question = {"role": U, "content": "a"}
    assert all(row.body["messages"] == [question, None, question, None] for row in rows)


def test_a_system_text_beside_the_turns_goes_before_them_all() -> None:
    row = check({"conversations": turns(U, A, U, A), "system": "be kind"})

    assert shape(row.body["messages"]) == [S, U, None, U, None]
    assert row.turns == 2


def test_one_answer_is_the_same_prompt_as_the_last_one_asked_for_again() -> None:
    conversation = {"conversations": turns(S, U, A)}

    assert check(conversation) == check(conversation, turns="last")
    assert check(conversation).turns == 0


def test_all_turns_are_another_request_than_the_last() -> None:
    conversation = {"conversations": turns(U, A, U, A)}
    row, last = check(conversation), check(conversation, turns="last")

    assert fingerprint_of("chat", row.body) != fingerprint_of("chat", last.body)


def test_a_stored_answer_is_no_part_of_what_is_asked() -> None:
    other = turns(U, A, U, A)
    other[1]["content"] = other[3]["content"] = "another old answer"

    assert check({"conversations": other}) == check({"conversations": turns(U, A, U, A)})


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"conversations": turns(U, A, U, A), "n": 2}, "turns"),
        ({"messages": turns(U, A), "n": 2}, "turns"),
        ({"messages": turns(U, A), "continue_final_message": True}, "turns"),
        ({"messages": turns(A, U)}, "first_turn"),
        ({"conversations": turns(A, U)}, "first_turn"),
        ({"messages": [{"role": U, "content": " "}, *turns(A, U)]}, "empty_prompt"),
        ({"messages": [*turns(U, A), None]}, "bad_type"),
        ({"conversations": turns(S)}, "no_user"),
    ],
)
def test_what_cannot_be_answered_turn_by_turn_is_rejected(
    row: dict[str, Any], expected: str
) -> None:
    assert reason(row) == expected


def test_one_choice_may_be_said() -> None:
    assert check({"conversations": turns(U, A, U, A), "n": 1}).turns == 2


def test_rows_that_are_no_conversation_are_as_ever() -> None:
    assert check({"prompt": "Hi"}).turns == 0
    assert check({"text": "Hi", "n": 2}).body["sampling_params"] == {"n": 2}
