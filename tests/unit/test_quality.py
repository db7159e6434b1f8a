"""When answers are said to be odd."""

import pytest

from common.models import Counts
from common.quality import FLAGS, LEAST_ANSWERS, oddities


def said(**counts: int) -> dict[str, str]:
    return dict(oddities(Counts(**{"queued": 10, **counts}), run="r"))


@pytest.mark.parametrize(
    ("flag", "above"),
    [
        ("truncated", 0.2),
        ("reasoning_cut", 0.1),
        ("unparsed_reasoning", 0.1),
        ("repeating", 0.05),
        ("same_answer", 0.05),
        ("empty", 0.05),
        ("prompt_cut", 0.0),
    ],
)
def test_a_share_is_told_from_its_threshold_on_with_what_to_do(flag: str, above: float) -> None:
    limit = round(above * 1_000)

    assert said(completed=1_000, **{flag: limit}) == {}
    [(found, text)] = said(completed=1_000, **{flag: limit + 1}).items()

    assert found == flag
    assert "% of the answers" in text
    assert f"`producer peek r --flag {flag}`" in text


def test_few_answers_say_nothing_unless_no_more_will_come() -> None:
    few = LEAST_ANSWERS - 1

    assert said(completed=few, truncated=few) == {}
    assert said(completed=few, truncated=few, queued=0, in_flight=1) == {}
    assert set(said(completed=LEAST_ANSWERS, truncated=LEAST_ANSWERS)) == {"truncated"}
    assert set(said(completed=few, truncated=few, queued=0)) == {"truncated"}
    assert said(completed=0, truncated=3, queued=0) == {}


def test_a_lowered_limit_was_asked_for() -> None:
    assert said(completed=100, clamped=100) == {}


def test_every_flag_is_a_counter_with_a_letter_of_its_own() -> None:
    assert set(FLAGS) <= set(Counts.__struct_fields__)
    assert len(set(FLAGS.values())) == len(FLAGS)
