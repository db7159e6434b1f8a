"""The text of answers: deterministic words behind the hash of the request."""

import functools
import random

# What random models give now and then; each piece has broken a client somewhere. The last one is
# a lone surrogate, which only exists as an escape in JSON: no Python string should hold it.
DIRTY = 'NUL \x00, replacement �, "quotes", back\\slash,\r\nlines  \t and ' + "x" * 2_000
LONE_SURROGATE = "\\ud83d"

_CORPUS_CHARS = 1 << 20
_IDS = 1 << 14
_ID_CHARS = 5  # four digits and a comma


@functools.cache
def _corpus() -> str:
    """About a megabyte of made-up words, frequent and rare ones as in a language."""
    rng = random.Random(7)  # noqa: S311 (filler, the same in every process)
    syllables = ["ba", "den", "ko", "li", "mar", "no", "per", "ra", "sil", "tu", "ver", "zo"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(4_000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    return " ".join(rng.choices(words, weights, k=_CORPUS_CHARS // 6))


@functools.cache
def _id_text() -> str:
    """Four-digit token ids with commas, twice over, so that any run of them is a slice."""
    rng = random.Random(11)  # noqa: S311 (filler, the same in every process)
    ids = ",".join(str(rng.randint(1000, 9999)) for _ in range(_IDS))
    return f"{ids},{ids},"


def answer_text(digest: str, size: int, *, choice: int = 0) -> str:
    """Write the answer to a request.

    Args:
        digest: The request's hash, which the text begins with: `sim:<hash> `.
        size: Characters (and bytes: it is ASCII) of the whole; the beginning is never cut.
        choice: Which of several answers to the same request.

    Returns:
        Text without quotes, backslashes or control characters: JSON needs no escapes for it.
    """
    head = f"sim:{digest} "
    left = size - len(head)
    if left <= 0:
        return head
    corpus = _corpus()
    start = (int(digest[:8], 16) + choice * 7_919) % len(corpus)
    body = corpus[start : start + left]
    while len(body) < left:
        body += corpus[: left - len(body)]
    return head + body


def token_ids(digest: str, count: int, *, choice: int = 0) -> str:
    """Write `count` token ids with commas between, each 1000..9999."""
    text = _id_text()
    start = (int(digest[:4], 16) + choice * 7_919) % _IDS * _ID_CHARS
    whole, rest = divmod(count, _IDS)
    ids = text[: _IDS * _ID_CHARS] * whole + text[start : start + rest * _ID_CHARS]
    return ids[:-1]


def warm() -> None:
    """Build the word lists now, so that the first request does not wait for them."""
    _corpus()
    _id_text()
