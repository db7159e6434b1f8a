"""Text of unknown origin on a terminal."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.harmless import ends_of, harmless, one_line, tail_of


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("a\r\nb\rc", "a\nb\\x0dc"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
        ("nul \x00 del \x7f", "nul \\x00 del \\x7f"),
        ("\ud83d", "\\ud83d"),
        ("tab\tand\nline, é 漢字 🙂 [bold]x[/]", "tab\tand\nline, é 漢字 🙂 [bold]x[/]"),
    ],
)
def test_what_a_terminal_acts_on_is_shown_as_its_number(text: str, shown: str) -> None:
    assert harmless(text) == shown


@given(st.text(st.characters(exclude_categories=())))
def test_nothing_that_acts_is_left_of_any_text(text: str) -> None:
    for shown in (harmless(text), one_line(text), tail_of(text, 5), ends_of(text, 5)):
        left = {char for char in shown if unicodedata.category(char) in {"Cc", "Cs"}}
        assert left <= {"\n", "\t"}
        shown.encode()


def test_long_text_is_cut_and_says_how_much() -> None:
    text = "0123456789" * 10

    assert tail_of(text, 10) == "[… 90 characters before]\n0123456789"
    assert ends_of(text, 12) == "01234567\n[… 88 characters …]\n6789"
    assert tail_of(text, 100) == ends_of(text, 100) == text
    assert one_line("a\n b\t" * 200, 10) == "a b a b a …"
