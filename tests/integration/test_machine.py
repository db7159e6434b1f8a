"""Everything at once, at random: nothing is lost and nothing is there twice (`tests.machine`).

A short piece, always the same; `make soak` goes on with other ones for as long as it is told.
"""

import pytest

from tests.machine.play import KINDS, play


@pytest.mark.timeout(600)  # a machine may be slow; what is judged does not hang on time
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_happens_each_prompt_ends_once(kind: str) -> None:
    play(kind, number=None, examples=5, steps=40)
