"""What is found odd about an answer's text, and what is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.models import Choice
from workers.client.oddities import (
    LOOP_CHARS,
    MOST_KNOWN,
    SAME_CHARS,
    WINDOW_CHARS,
    Lately,
    loops,
    repeating,
    unparsed_reasoning,
)

PROSE = " ".join(f"Sentence {i} of it says {i * i}, which is new." for i in range(400))
TABLE = "".join(f"| {i * 7 % 101} | {i * i % 997:.3f} |\n" for i in range(400))
CODE = "".join(f"    self.x{i} = config.get('x{i}', None)\n" for i in range(400))


@pytest.mark.parametrize("piece", ["!", "no ", "I am sorry. ", "é\n", "x" * 63 + ". ", "p" * 999])
def test_a_piece_that_comes_again_to_the_end_is_a_loop(piece: str) -> None:
    assert loops("It began well. " + piece * (WINDOW_CHARS // len(piece)))


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_loop_may_be_cut_within_its_piece(cut: int) -> None:
    assert loops(("I am sorry. " * 100)[:-cut])


@pytest.mark.parametrize("text", [PROSE, TABLE, CODE, "", "yes", "a" * (LOOP_CHARS - 1)])
def test_what_says_something_new_is_no_loop(text: str) -> None:
    assert not loops(text)


def test_what_came_three_times_or_stopped_coming_is_no_loop() -> None:
    assert not loops(PROSE[:900] * 3)
    assert not loops("again. " * 100 + "Now the answer is 42, and that is all there is to say.")


@given(st.text("ab", min_size=1, max_size=60), st.text("cd ", min_size=33, max_size=200))
def test_a_loop_is_one_whatever_stands_before_it_and_none_with_another_end(
    piece: str, other: str
) -> None:
    looped = other + piece * (1 + LOOP_CHARS // len(piece)) * 2

    assert loops(looped)
    assert not loops(looped + "The end is as long as what is searched for: 32 characters.")


def choice(content: str | None, reasoning: str | None = None) -> Choice:
    return Choice(index=0, content=content, finish_reason="stop", reasoning_content=reasoning)


def test_any_choice_may_loop_and_thinking_that_never_ends_too() -> None:
    assert repeating([choice("fine"), choice("no " * 200)])
    assert repeating([choice("", "wait, " * 200)])
    assert not repeating([choice("fine", "wait, " * 200)])


@pytest.mark.parametrize(
    ("content", "reasoning", "found"),
    [
        ("<think>\nso</think>\n42", None, True),
        # The chat template has opened it.
        ("so\n</think>\n\n42", None, True),
        ("\n <thinking>so", "", True),
        ("[THINK]so[/THINK]42", None, True),
        ("<|channel|>analysis<|message|>so", None, True),
        ("42", "so", False),
        ("what `</think>` means", "so", False),
        ("I think, therefore <b>I</b> am", None, False),
        (None, None, False),
        ("", None, False),
    ],
)
def test_thinking_in_the_content_is_a_missing_parser(
    content: str | None,
    reasoning: str | None,
    found: bool,  # noqa: FBT001
) -> None:
    assert unparsed_reasoning([choice("fine"), choice(content, reasoning)]) is found


def test_the_same_long_answer_to_another_prompt_is_found() -> None:
    lately, text = Lately(), "x" * SAME_CHARS

    assert not lately.same("r", b"one", text)
    assert not lately.same("r", b"one", text), "another sample of the prompt"
    assert not lately.same("other", b"two", text), "another run"
    assert lately.same("r", b"two", text)
    assert not lately.same("r", b"two", "yes")
    assert not lately.same("r", b"three", "yes"), "a label is shared by many"


def test_what_is_remembered_of_answers_is_bounded() -> None:
    lately = Lately()
    for number in range(2 * MOST_KNOWN):
        assert not lately.same("r", b"%d" % number, f"{number}" * SAME_CHARS)

    assert not lately.same("r", b"other", "0" * SAME_CHARS), "long forgotten"
    assert lately.same("r", b"another", f"{2 * MOST_KNOWN - 1}" * SAME_CHARS)
