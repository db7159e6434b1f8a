"""One line becomes a request, or is rejected with its reason; only what was meant is sent."""

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from producer.prompts.rows import Row, RowChecker, RowRules
from producer.prompts.verdicts import MissingMaxTokensError, RowRejectedError

USER = {"role": "user", "content": "Hi"}
OLD = {"role": "assistant", "content": "old"}


def checker(**rules: Any) -> RowChecker:
    return RowChecker(RowRules(**{"max_tokens_given": True, "model": "m", **rules}))


def check(row: Any, **rules: Any) -> Row:
    return checker(**rules).check(json.dumps(row).encode())


def reason(line: bytes | dict[str, Any] | list[Any], **rules: Any) -> str:
    raw = line if isinstance(line, bytes) else json.dumps(line).encode()
    with pytest.raises(RowRejectedError) as caught:
        checker(**rules).check(raw)
    return caught.value.reason


def batch(body: Any, **members: Any) -> dict[str, Any]:
    return {
        "custom_id": "b",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
        **members,
    }


@pytest.mark.parametrize(
    ("row", "endpoint", "body"),
    [
        ({"prompt": "Hi"}, "chat", {"messages": [USER]}),
        ({"messages": [USER]}, "chat", {"messages": [USER]}),
        ({"prompt": [USER]}, "chat", {"messages": [USER]}),
        ({"conversations": [USER, OLD]}, "chat", {"messages": [USER]}),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "x"}]},
            "chat",
            {"messages": [USER]},
        ),
        ({"text": "Once"}, "generate", {"text": "Once"}),
        ({"input_ids": [1, 2]}, "generate", {"input_ids": [1, 2]}),
        (batch({"messages": [USER], "x": 1}), "chat", {"messages": [USER], "x": 1}),
        (
            batch({"prompt": "Once", "max_tokens": 8}, url="/v1/completions"),
            "completions",
            {"prompt": "Once", "max_tokens": 8},
        ),
        (batch({"text": "Once"}, url="/generate"), "generate", {"text": "Once"}),
        ({"body": {"messages": [USER]}}, "chat", {"messages": [USER]}),
    ],
)
def test_each_form_becomes_a_request_of_its_endpoint(
    row: dict[str, Any], endpoint: str, body: dict[str, Any]
) -> None:
    found = check(row)

    assert (found.endpoint, found.body, found.extra) == (endpoint, body, {})


def test_a_raw_prompt_is_completed_as_text() -> None:
    found = check({"prompt": "Once"}, raw_prompt=True)

    assert (found.endpoint, found.body) == ("completions", {"prompt": "Once"})


def test_other_members_come_back_and_are_never_sent() -> None:
    found = check({"id": 1, "prompt": "Hi", "meta": {"k": [1, 2]}, "status": None})

    assert found.body == {"messages": [USER]}
    assert found.extra == {"meta": {"k": [1, 2]}, "status": None}


def test_own_parameters_are_sent_zero_and_false_included_and_null_means_none() -> None:
    own = {"temperature": 0, "seed": 0, "n": 2, "logprobs": False, "tools": [], "stop": ["x"]}

    found = check({"prompt": "Hi", **own, "top_p": None, "stream": False})

    assert found.body == {"messages": [USER], **own}
    assert found.extra == {}


def test_own_parameters_of_a_generate_row_take_its_shape() -> None:
    found = check(
        {"text": "Hi", "max_tokens": 5, "seed": 0, "sampling_params": {"top_k": 3}, "note": 1}
    )

    assert found.body == {
        "text": "Hi",
        "sampling_params": {"max_new_tokens": 5, "sampling_seed": 0, "top_k": 3},
    }
    assert found.extra == {"note": 1}


def test_tools_of_a_generate_row_are_refused_since_they_would_be_lost() -> None:
    assert reason({"text": "Hi", "tools": [{}]}) == "endpoint"


def test_a_batch_body_passes_as_it_is() -> None:
    body = {"messages": [USER], "stream": False, "unknown": None, "temperature": 0}

    found = check({**batch(body), "id": 7})

    assert found.body == body
    assert (found.id_json, found.extra) == (b'"b"', {"id": 7})


def test_text_inside_a_string_is_never_taken_for_structure() -> None:
    text = '{"id":"evil","prompt":"inner"}'

    found = check({"id": "j1", "prompt": text})

    assert found.id_json == b'"j1"'
    assert found.body["messages"][0]["content"] == text


# --- ids -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        (b'"a"', b'"a"'),
        (b'"caf\\u00e9"', '"café"'.encode()),
        (b"1", b"1"),
        (b"1.0", b"1.0"),
        (b"1.50", b"1.50"),
        (b"1e3", b"1e3"),
        (b"0", b"0"),
        (b"-0", b"-0"),
        (b"-0.0", b"-0.0"),
        (b"123456789012345678901234567890", b"123456789012345678901234567890"),
        (b'""', b'""'),
    ],
)
def test_an_id_keeps_its_type_and_its_text(written: bytes, kept: bytes) -> None:
    assert checker().check(b'{"id":%b,"prompt":"Hi"}' % written).id_json == kept


@pytest.mark.parametrize("row", [{"prompt": "Hi"}, {"prompt": "Hi", "id": None}])
def test_a_row_without_id_has_none_yet(row: dict[str, Any]) -> None:
    assert check(row).id_json is None


@pytest.mark.parametrize("value", [True, False, [1], {"a": 1}, []])
def test_an_id_that_is_no_text_or_number_is_refused(value: Any) -> None:
    assert reason({"id": value, "prompt": "Hi"}) == "bad_type"


def test_the_id_stands_where_the_flag_says() -> None:
    found = check({"id": 1, "uid": "x", "prompt": "Hi"}, id_field="uid")

    assert (found.id_json, found.extra) == (b'"x"', {"id": 1})


def test_a_plain_row_takes_id_before_custom_id() -> None:
    assert check({"custom_id": "c", "id": 1, "prompt": "Hi"}).id_json == b"1"
    assert check({"custom_id": "c", "prompt": "Hi"}).id_json == b'"c"'


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1], "not_object"),
        ({"id": 1}, "no_prompt"),
        ({"prompt": None}, "no_prompt"),
        ({"instruction": "x", "input": "y"}, "no_prompt"),
        ({"prompt": "A", "messages": [USER]}, "ambiguous"),
        ({"text": "A", "input_ids": [1]}, "ambiguous"),
        ({"prompt": 5}, "bad_type"),
        ({"prompt": ["a", "b"]}, "bad_type"),
        ({"prompt": " \n\t "}, "empty_prompt"),
        ({"prompt": []}, "empty_prompt"),
        ({"text": ""}, "empty_prompt"),
        ({"input_ids": []}, "empty_prompt"),
        ({"input_ids": ["a"]}, "bad_type"),
        ({"input_ids": [True]}, "bad_type"),
        ({"input_ids": "1 2"}, "bad_type"),
        ({"messages": USER}, "bad_type"),
        ({"messages": []}, "empty_prompt"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": 5}]}, "bad_type"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "bad_type"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no_user"),
        ({"messages": [{"role": "user", "content": []}]}, "empty_prompt"),
        ({"messages": [USER, OLD, {"role": "user", "content": None}]}, "empty_prompt"),
        ({"conversations": [OLD, USER]}, "first_turn"),
        ({"conversations": [{"from": "Human", "value": "x"}]}, "role"),
        ({"conversations": [{"from": "human", "value": 5}]}, "bad_type"),
        ({"conversations": [OLD]}, "first_turn"),
        ({"system": "a", "messages": [{"role": "system", "content": "b"}, USER]}, "ambiguous"),
        ({"prompt": "Hi", "stream": True}, "stream"),
        ({"prompt": "Hi", "model": "other"}, "model"),
        ({"prompt": "Hi", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "Hi", "max_tokens": True}, "max_tokens"),
        ({"prompt": "Hi", "max_tokens": "64"}, "max_tokens"),
        ({"prompt": "Hi", "max_completion_tokens": -1}, "max_tokens"),
        ({"text": "Hi", "sampling_params": {"max_new_tokens": 0}}, "max_tokens"),
        ({"text": "Hi", "image_data": "file:///etc/hostname"}, "url_scheme"),
        ({"text": "Hi", "image_data": ["/etc/secret.png"]}, "url_scheme"),
        (batch("text"), "bad_type"),
        (batch({}), "no_prompt"),
        (batch({"messages": [USER]}, url="/v1/embeddings"), "endpoint"),
        (batch({"messages": [USER]}, url="http://evil.example/v1"), "url"),
        (batch({"messages": [USER]}, url="//evil.example/v1"), "url"),
        (batch({"messages": [USER]}, method="GET"), "url"),
        (batch({"prompt": [""]}, url="/v1/completions"), "empty_prompt"),
    ],
)
def test_a_row_that_cannot_be_asked_is_refused_with_its_reason(row: Any, expected: str) -> None:
    assert reason(row) == expected


@pytest.mark.parametrize(
    ("address", "sent"),
    [
        ("https://example.org/a.png", True),
        ("HTTP://example.org/a.png", True),
        ("data:image/png;base64,AA==", True),
        ("file:///etc/hostname", False),
        ("/etc/hostname", False),
        ("ftp://example.org/a", False),
    ],
)
@pytest.mark.parametrize("kind", ["image_url", "video_url"])
def test_only_addresses_that_a_server_may_fetch_are_sent(
    kind: str, address: str, *, sent: bool
) -> None:
    part = {"type": kind, kind: {"url": address}}
    row = {"messages": [{"role": "user", "content": [part]}]}

    if sent:
        assert check(row).body["messages"][0]["content"] == [part]
    else:
        assert reason(row) == "url_scheme"


def test_a_message_of_a_reject_holds_no_text_of_the_prompt() -> None:
    secret = "my secret prompt"
    row = {"prompt": secret, "messages": [{"role": "user", "content": secret}], "id": [secret]}

    with pytest.raises(RowRejectedError) as caught:
        check(row)

    assert secret not in caught.value.message


# --- the run's limit and model -------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "max_tokens": 1},
        {"prompt": "Hi", "max_completion_tokens": 1},
        {"prompt": "Hi", "max_new_tokens": 1},
        {"text": "Hi", "max_tokens": 1},
        {"text": "Hi", "sampling_params": {"max_new_tokens": 1}},
        batch({"messages": [USER], "max_tokens": 1}),
    ],
)
def test_a_row_with_its_own_limit_needs_none_from_the_run(row: dict[str, Any]) -> None:
    check(row, max_tokens_given=False)


def test_without_any_limit_the_flags_are_wrong_and_not_the_row() -> None:
    with pytest.raises(MissingMaxTokensError):
        check({"prompt": "Hi"}, max_tokens_given=False)


def test_without_a_model_flag_the_first_row_that_names_one_decides() -> None:
    rows = checker(model=None)
    rows.check(b'{"prompt":"a"}')
    rows.check(b'{"prompt":"a","model":"x"}')

    with pytest.raises(RowRejectedError, match="'y'"):
        rows.check(b'{"prompt":"a","model":"y"}')


# --- conversations -------------------------------------------------------------------------------


def test_every_turn_of_a_conversation_is_sent_in_order() -> None:
    turns = [("system", "S"), ("human", "Q1"), ("gpt", "A1"), ("human", "Q2")]

    found = check({"conversations": [{"from": who, "value": text} for who, text in turns]})

    assert [(m["role"], m["content"]) for m in found.body["messages"]] == [
        ("system", "S"),
        ("user", "Q1"),
        ("assistant", "A1"),
        ("user", "Q2"),
    ]


def test_only_the_last_answer_of_a_conversation_is_asked_for_again() -> None:
    found = check({"conversations": [USER, OLD, USER, OLD, OLD]})

    assert found.body["messages"] == [USER, OLD, USER]


def test_a_turns_own_figures_are_not_sent() -> None:
    found = check({"conversations": [{**USER, "weight": 0, "loss": 1.5}]})

    assert found.body["messages"] == [USER]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi"},
        {"messages": [USER]},
        {"conversations": [USER, OLD]},
        {"messages": [{"role": "system", "content": "Be kind."}, USER]},
    ],
)
def test_a_system_text_beside_the_turns_is_sent_before_them(row: dict[str, Any]) -> None:
    found = check({**row, "system": "Be kind."})

    assert found.body["messages"] == [{"role": "system", "content": "Be kind."}, USER]
    assert found.extra == {}


def test_messages_that_end_with_an_answer_are_sent_whole_and_counted() -> None:
    rows = checker()

    found = rows.check(json.dumps({"messages": [USER, OLD]}).encode())

    assert found.body["messages"] == [USER, OLD]
    assert rows.answered == 1


def test_messages_lose_their_last_answer_when_the_flag_says_so() -> None:
    assert check({"messages": [USER, OLD]}, turns="last").body["messages"] == [USER]


# --- lines that are no JSON ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"", "blank"),
        (b" \t\r", "blank"),
        (b"\xef\xbb\xbf", "blank"),
        (b'{"id":"t1","prompt":"a"},', "bad_json"),
        (b'{"prompt":"a"}{"prompt":"b"}', "bad_json"),
        (b"{'prompt': 'a'}", "bad_json"),
        (b'{"prompt":"a', "bad_json"),
        (b'{"prompt":"a","x":NaN}', "bad_json"),
        (b'{"prompt":"a","x":1e999}', "bad_json"),
        (b'{"prompt":"a","x":' + b"1" * 5000 + b"}", "bad_json"),
        (b"[" * 100_000, "bad_json"),
        (b"\0\0", "bad_json"),
        (b'{"prompt":"\xe9"}', "bad_utf8"),
        (b'{"prompt":"a\x01b"}', "control_char"),
        (b'{"prompt":"a\tb"}', "control_char"),
        (b'{"prompt":"\\ud83d"}', "lone_surrogate"),
        (b'{"prompt":"\\ude00 x"}', "lone_surrogate"),
        (b'{"a\\ud83d":1,"prompt":"x"}', "lone_surrogate"),
        (b'{"prompt":"\xed\xa0\xbd"}', "lone_surrogate"),
        (b'{"prompt":"a"}\r{"prompt":"b"}\r', "line_ends"),
    ],
)
def test_a_line_that_is_no_json_object_gets_the_kind_of_its_fault(
    line: bytes, expected: str
) -> None:
    assert reason(line) == expected


def test_bad_utf8_is_told_with_its_place() -> None:
    with pytest.raises(RowRejectedError, match=r"byte 12 of the line \(0xe9\)"):
        checker().check(b'{"prompt":"a\xe9"}')


@given(st.text(st.characters(codec="utf-8"), min_size=1))
@example("\0")
@example("\u2028\x7f\ufeff")
@example("😀")
def test_any_text_that_json_can_hold_arrives_unchanged(text: str) -> None:
    for ascii_only in (True, False):
        line = json.dumps({"id": text, "prompt": text + "."}, ensure_ascii=ascii_only).encode()

        found = checker().check(b"\xef\xbb\xbf" + line + b"\r")

        assert msgspec.json.decode(found.id_json or b"") == text
        assert found.body["messages"][0]["content"] == text + "."


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(
            ["id", "prompt", "messages", "conversations", "text", "input_ids", "body", "url",
             "custom_id", "method", "model", "stream", "max_tokens", "system", "sampling_params"]
        ),
        json_values,
    )
)  # fmt: skip
def test_any_object_is_accepted_or_rejected_and_nothing_else(row: dict[str, Any]) -> None:
    try:
        line = json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        line = json.dumps(row).encode()

    with contextlib.suppress(RowRejectedError):
        assert checker().check(line).body
