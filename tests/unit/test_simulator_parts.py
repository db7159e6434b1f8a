"""The simulator's pure parts: hashes, distributions, faults, pools, text."""

import hashlib
import math
import statistics
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.simulator import text
from workers.simulator.distributions import Distribution, parse_distribution
from workers.simulator.faults import Fault, FaultBook, parse_fault
from workers.simulator.hashing import request_hash, share
from workers.simulator.settings import Settings, Strategy

# --- hashes --------------------------------------------------------------------------------------


def test_the_hash_is_that_of_the_canonical_body() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}

    canonical = b'{"max_tokens":5,"messages":[{"content":"hi","role":"user"}]}'
    assert request_hash(body) == hashlib.blake2b(canonical, digest_size=16).hexdigest()


def test_order_rid_and_model_do_not_matter_and_all_else_does() -> None:
    body: dict[str, Any] = {"prompt": "x", "seed": 1}

    assert request_hash({"seed": 1, "model": "m", "prompt": "x", "rid": "r"}) == request_hash(body)
    for other in ({**body, "seed": 2}, {**body, "n": 1}, {"prompt": "x"}, {**body, "seed": 1.5}):
        assert request_hash(other) != request_hash(body)


def test_shares_of_a_hash_are_spread_and_independent() -> None:
    digests = [request_hash({"prompt": str(number)}) for number in range(2_000)]

    for salt in range(3):
        shares = [share(digest, salt) for digest in digests]
        assert all(0 < each < 1 for each in shares)
        assert statistics.fmean(shares) == pytest.approx(0.5, abs=0.03)
    both = statistics.correlation(
        [share(digest, 0) for digest in digests], [share(digest, 1) for digest in digests]
    )
    assert abs(both) < 0.1


# --- distributions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "mean"),
    [("7", 7), ("fixed:0.05", 0.05), ("exp:3150", 3150), ("lognormal:0.2:1", 0.2)],
)
def test_a_distribution_has_the_mean_that_was_asked_for(written: str, mean: float) -> None:
    distribution = parse_distribution(written)

    drawn = [distribution.quantile((place + 0.5) / 100_000) for place in range(100_000)]

    assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.01)
    assert min(drawn) >= 0


def test_max_is_without_limit() -> None:
    assert parse_distribution("max").quantile(0.5) == math.inf


def test_zero_is_zero() -> None:
    assert parse_distribution("0") == Distribution("fixed", 0.0)
    assert parse_distribution("0").quantile(0.9) == 0


@pytest.mark.parametrize(
    "written", ["", "x", "exp", "exp:1:2", "lognormal:1", "fixed:-1", "exp:inf", "lognormal:0:1"]
)
def test_what_is_no_distribution_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse_distribution(written)


# --- pools ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "options", "cap", "usage"),
    [
        ("no_buffer", {}, 72, 2 / 3),
        ("extra_buffer", {}, 32, 0.6),
        ("no_buffer", {"mamba_states": 12}, 4, 2 / 3),
        ("no_buffer", {"max_running_requests": 10}, 10, 20 / 216),
        ("no_buffer", {"max_running_requests": 500}, 72, 2 / 3),
        ("no_buffer", {"cap": 256}, 256, 2 / 3),
    ],
)
def test_the_cap_follows_from_the_pool(
    strategy: Strategy, options: dict[str, int], cap: int, usage: float
) -> None:
    settings = msgspec.convert({"strategy": strategy, **options}, Settings)

    assert settings.pool.cap == cap
    assert settings.pool.usage(cap) == pytest.approx(usage)


def test_ports_follow_each_other_or_are_free_or_are_named() -> None:
    assert Settings(servers=3, port=30000).all_ports == (30000, 30001, 30002)
    assert Settings(servers=2, port=0).all_ports == (0, 0)
    assert Settings(ports=(5, 9)).all_ports == (5, 9)


# --- text ----------------------------------------------------------------------------------------


@given(digest=st.text("0123456789abcdef", min_size=32, max_size=32), size=st.integers(0, 200_000))
def test_a_text_has_its_size_and_needs_no_escapes(digest: str, size: int) -> None:
    written = text.answer_text(digest, size)

    assert written.startswith(f"sim:{digest} ")
    assert len(written) == max(size, len(f"sim:{digest} "))
    assert msgspec.json.encode(written) == f'"{written}"'.encode()


def test_a_text_larger_than_the_corpus_has_its_size_too() -> None:
    assert len(text.answer_text("f" * 32, 5_000_000)) == 5_000_000


@given(digest=st.text("0123456789abcdef", min_size=32, max_size=32), count=st.integers(0, 40_000))
def test_there_are_as_many_token_ids_as_tokens(digest: str, count: int) -> None:
    ids = msgspec.json.decode(f"[{text.token_ids(digest, count)}]")

    assert len(ids) == count
    assert all(1000 <= each <= 9999 for each in ids)


# --- faults --------------------------------------------------------------------------------------


def test_a_fault_is_written_short_or_as_json() -> None:
    short = parse_fault("die:server=1,after_s=2.5,exit=true")

    assert short == Fault(kind="die", server=1, after_s=2.5, exit=True)
    assert parse_fault('{"kind":"die","server":1,"after_s":2.5,"exit":true}') == short
    assert parse_fault("abort") == Fault(kind="abort")


@pytest.mark.parametrize(
    "written",
    ["", "no_such", "abort:count=x", "abort:nothing=1", "abort:count", "{", '{"kind":1}'],
)
def test_what_is_no_fault_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse_fault(written)


def test_faults_are_used_up_in_the_order_they_were_armed() -> None:
    book = FaultBook()
    for fault in ("nan:count=1,match=BAD", "abort:count=2", "half:rate=0.5"):
        book.arm(parse_fault(fault))

    def taken(raw: bytes, digest: str = "f" * 32) -> str | None:
        fault = book.take(raw, digest)
        return fault.kind if fault else None

    assert taken(b"GOOD") == "abort"
    assert taken(b"BAD") == "nan"
    assert taken(b"BAD") == "abort"
    assert taken(b"BAD", digest="0" * 32) == "half"
    assert taken(b"BAD", digest="f" * 32) is None
    assert [fault.kind for fault in book.armed()] == ["half"]
