"""A server's log, line by line: every shape there is, every recorded line, any bytes at all."""

import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.conftest import REPOSITORY
from tests.support.skips import skip_cannot_run
from workers.readings.log_lines import (
    MOST_BYTES,
    Batch,
    Capped,
    Event,
    LogLine,
    MambaPool,
    Retracted,
    Stamp,
    Started,
    parse_line,
)

RECORDED = sorted((REPOSITORY / "tests" / "data" / "sglang").glob("*/server.log"))
SAMPLES = REPOSITORY.parent / "shared" / "real_sglang" / "samples"

# Every shape of 0.5.4 to 0.5.23, by what is to be read of it.
SHAPES: dict[str, dict[str, object]] = {
    # 0.5.4: the number of the step always, and a comma at the end
    "[2025-10-24 10:00:00] Prefill batch [1201], #new-seq: 4, #new-token: 8192, #cached-token: 0, "
    "full token usage: 0.01, mamba usage: 0.05, #running-req: 3, #queue-req: 9, ": {
        "kind": "prefill", "new_seqs": 4, "new_tokens": 8192, "cached_tokens": 0,
        "token_usage": 0.01, "mamba_usage": 0.05, "running": 3, "queued": 9,
    },
    "[2025-10-24 10:00:01] Decode batch [1234], #running-req: 7, #full token: 3100, full token "
    "usage: 0.01, mamba num: 21, mamba usage: 0.05, cuda graph: True, gen throughput (token/s): "
    "210.10, #queue-req: 9, ": {
        "kind": "decode", "running": 7, "used_tokens": 3100, "token_usage": 0.01, "queued": 9,
        "mamba_states": 21, "mamba_usage": 0.05, "graph": True, "gen_tokens_per_s": 210.10,
    },
    # 0.5.6 to 0.5.8: no number of the step
    "[2026-01-01 10:00:00] Prefill batch, #new-seq: 2, #new-token: 8192, #cached-token: 0, "
    "full token usage: 0.00, mamba usage: 0.15, #running-req: 2, #queue-req: 4, ": {
        "kind": "prefill", "new_seqs": 2, "token_usage": 0.0, "mamba_usage": 0.15, "queued": 4,
        "prefill_tokens_per_s": None,
    },
    # 0.5.9: input throughput, then graph; no comma at the end
    "[2026-02-23 10:00:00 TP0] Prefill batch, #new-seq: 1, #new-token: 158, #cached-token: 0, "
    "full token usage: 0.08, mamba usage: 0.01, #running-req: 31, #queue-req: 0, "
    "input throughput (token/s): 559.53, cuda graph: False": {
        "kind": "prefill", "prefill_tokens_per_s": 559.53, "graph": False, "running": 31,
    },
    # 0.5.10: the two the other way round
    "[2026-04-08 10:00:00 TP0] Prefill batch, #new-seq: 1, #new-token: 290, #cached-token: 0, "
    "full token usage: 0.08, mamba usage: 0.01, #running-req: 31, #queue-req: 0, "
    "cuda graph: True, input throughput (token/s): 1670.03": {
        "kind": "prefill", "prefill_tokens_per_s": 1670.03, "graph": True,
    },
    # 0.5.12 to 0.5.23: pending tokens; another platform's graph
    "[2026-07-04 04:31:33 TP0] Prefill batch, #new-seq: 12, #new-token: 43904, #cached-token: 5, "
    "full token usage: 0.33, mamba usage: 0.50, #running-req: 37, #queue-req: 61, "
    "#pending-token: 255240, npu graph: False, input throughput (token/s): 15159.92": {
        "kind": "prefill", "new_tokens": 43904, "cached_tokens": 5, "pending_tokens": 255240,
        "graph": False, "prefill_tokens_per_s": 15159.92, "at_s": 1783139493.0,
    },
    "[2026-08-14 08:17:30] Decode batch, #running-req: 4, #full token: 1051, full token usage: "
    "0.20, mamba num: 16, mamba usage: 0.20, cuda graph: True, gen throughput (token/s): 453.12, "
    "#queue-req: 0": {
        "kind": "decode", "running": 4, "queued": 0, "gen_tokens_per_s": 453.12,
    },
    # speculative decoding
    "[2026-10-30 12:00:02] Decode batch, #running-req: 8, #full token: 21043, full token usage: "
    "0.10, mamba num: 32, mamba usage: 0.80, accept len: 2.71, accept rate: 0.57, cuda graph: "
    "True, gen throughput (token/s): 912.55, #queue-req: 3": {
        "accept_len": 2.71, "mamba_usage": 0.8, "gen_tokens_per_s": 912.55, "queued": 3,
    },
    "[2026-10-30 12:00:02] Decode batch, #running-req: 8, #token: 5, token usage: 0.10, accept "
    "len: 2.71, cap len: 4.00, block accept len: 2.50, accept rate: 0.57, cuda graph: True, gen "
    "throughput (token/s): 912.55, est. decode TFLOPS/s (per GPU): 1.20, est. read/write BW (GB/s "
    "per GPU): 800.1 / 3.2, fwd occupancy: 93.1%, fwd+idle occupancy: 99.0%, #queue-req: 3": {
        "accept_len": 2.71, "used_tokens": 5, "token_usage": 0.1, "queued": 3, "graph": True,
    },
    # a model without mamba states; a CPU; milliseconds
    "[2026-11-29 16:57:25.123] Decode batch, #running-req: 1, #token: 20, token usage: 0.00, "
    "cpu graph: False, gen throughput (token/s): 1.71, #queue-req: 0": {
        "used_tokens": 20, "token_usage": 0.0, "mamba_usage": None, "mamba_states": None,
        "graph": False, "at_s": 1795971445.123,
    },
    "[2026-01-01 10:00:00,250] Prefill batch, #new-seq: 1, #new-token: 3, #cached-token: 0, token "
    "usage: 0.25, #running-req: 0, #queue-req: 0, #replay-token: 7, #pending-token: 0, cpu graph: "
    "False, input throughput (token/s): 9.48, est. prefill TFLOPS/s (per GPU): 3.20": {
        "token_usage": 0.25, "at_s": 1767261600.25, "pending_tokens": 0,
    },
    # sliding window, alone and with mamba states
    "[2026-01-01 10:00:00] Decode batch, #running-req: 2, #full token: 900, full token usage: "
    "0.30, #swa token: 100, swa token usage: 0.60, musa graph: True, gen throughput (token/s): "
    "80.00, #queue-req: 0, ": {
        "used_tokens": 900, "token_usage": 0.3, "swa_usage": 0.6, "graph": True,
    },
    "[2026-01-01 10:00:00] Prefill batch, #new-seq: 2, #new-token: 9, #cached-token: 0, full "
    "token usage: 0.30, swa token usage: 0.60, mamba usage: 0.90, #running-req: 2": {
        "token_usage": 0.3, "swa_usage": 0.6, "mamba_usage": 0.9,
    },
    # two tiers of memory
    "[2026-01-01 10:00:00] Decode batch, #running-req: 2, #gpu token: 90, gpu token usage: 0.40, "
    "#cpu token: 7, cpu token usage: 0.10, cuda graph: True, gen throughput (token/s): 8.00, "
    "#queue-req: 0": {"used_tokens": 90, "token_usage": 0.4},
    # prefill and decode on two servers
    "[2026-01-01 10:00:00] Prefill batch, #new-seq: 2, #new-token: 9, #cached-token: 0, token "
    "usage: 0.30, #running-req: 2, #queue-req: 1, #bootstrap-req: 5, #inflight-req: 6, "
    "#optimistic-req: 0, cuda graph: False, input throughput (token/s): 5.00": {
        "running": 2, "queued": 1, "token_usage": 0.3,
    },
    "[2026-01-01 10:00:00] Decode batch, #running-req: 2, #token: 9, token usage: 0.30, "
    "pre-allocated usage: 0.90, #prealloc-req: 4, #transfer-req: 3, #retracted-req: 2, cuda "
    "graph: True, gen throughput (token/s): 5.00, #queue-req: 1": {"running": 2, "queued": 1},
    # whose blanks at the end somebody has taken away
    "[2025-10-24 10:00:00] Prefill batch [1201], #new-seq: 4, #new-token: 8192, #cached-token: 0, "
    "token usage: 0.01, #running-req: 3, #queue-req: 9,": {"queued": 9, "running": 3},
    # older still
    "[2025-06-01 10:00:00 TP0] Decode batch. #running-req: 2, #token: 9, token usage: 0.30, cuda "
    "graph: True, gen throughput (token/s): 5.00, #queue-req: 1": {"running": 2, "queued": 1},
}  # fmt: skip


@pytest.mark.parametrize("text", SHAPES, ids=range(len(SHAPES)))
def test_each_shape_of_a_batch_is_read_by_the_names_of_its_fields(text: str) -> None:
    found = parse_line(f"{text}\n".encode())

    assert isinstance(found, Batch)
    read = {"at_s": found.stamp.at_s} | msgspec.structs.asdict(found)
    assert {name: read[name] for name in SHAPES[text]} == SHAPES[text]
    assert found.stamp.first_rank


AT = Stamp(at_s=1767261600.0)
STAMP = "[2026-01-01 10:00:00] "
OTHERS: dict[str, LogLine] = {
    "max_total_num_tokens=399104, chunked_prefill_size=8192, max_prefill_tokens=16384, "
    "max_running_requests=9, context_len=262144, available_gpu_mem=9.80 GB": Started(
        stamp=AT, kv_tokens=399104, cap=9, context_length=262144
    ),
    "max_total_num_tokens=5, max_prefill_tokens=16384": Started(stamp=AT, kv_tokens=5),
    "Mamba Cache is allocated. max_mamba_cache_size: 47, conv_state size: 0.07GB, ssm_state size: "
    "3.30GB ": MambaPool(stamp=AT, states=47),
    "max_running_requests is capped to 9 by the mamba state cache (max_mamba_cache_size=47, 5 "
    "state slots per request). To raise it: ...": Capped(
        stamp=AT, cap=9, states=47, states_per_request=5
    ),
    "max_running_requests was reduced from the requested 32 to 9 (per dp worker) due to the "
    "available KV cache capacity.": Capped(stamp=AT, cap=9, asked=32),
    "KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_tokens_gained: 812, "
    "#mamba_num_gained: 1, #new_token_ratio: 0.9998 -> 1.0000": Retracted(stamp=AT, requests=3),
    "The server is fired up and ready to roll!": Event(stamp=AT, what="ready"),
    "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. "
    "tic start time: 05:49:14. last_heartbeat time: 05:42:53": Event(
        stamp=AT, what="health_failed"
    ),
    "Scheduler hit an exception: Traceback (most recent call last):": Event(
        stamp=AT, what="exception"
    ),
    "SIGQUIT received. signum=None, frame=None. It usually means one child failed.": Event(
        stamp=AT, what="sigquit"
    ),
    "Subprocess scheduler_0 (pid=123) crashed with exit code -6. Triggering SIGQUIT for "
    "cleanup...": Event(stamp=AT, what="child_died", exit_code=-6),
    "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)": Event(
        stamp=AT, what="watchdog"
    ),
    "pool memory leak detected! ...": Event(stamp=AT, what="leak"),
    "SIGTERM received. signum=None frame=None. Draining requests and shutting down...": Event(
        stamp=AT, what="sigterm"
    ),
    "Gracefully exiting... Remaining number of requests 6. Remaining requests "
    "remaining_rids=['0'].": Event(stamp=AT, what="draining"),
    "server_args=ServerArgs(model_path='m', max_running_requests=32, context_len=3)": Event(
        stamp=AT, what="launching"
    ),
    f"server_args=ServerArgs({'x=1, ' * 3000}mamba_scheduler_strategy='no_buffer', "
    "disable_radix_cache=False)": Event(stamp=AT, what="launching", strategy="no_buffer"),
    "server_args={'mamba_radix_cache_strategy': 'auto', 'x': 1}": Event(
        stamp=AT, what="launching", strategy="auto"
    ),
    "server_args={'mamba_radix_cache_strategy': 'auto', 'disable_radix_cache': True}": Event(
        stamp=AT, what="launching", strategy="no_radix"
    ),
}


@pytest.mark.parametrize("text", OTHERS, ids=range(len(OTHERS)))
def test_what_else_a_server_says_of_itself_is_read(text: str) -> None:
    assert parse_line(f"{STAMP}{text}\n".encode()) == OTHERS[text]


@pytest.mark.parametrize(
    ("ranks", "dp_rank", "first"),
    [
        ("", 0, True),
        (" TP0", 0, True),
        (" TP1", 0, False),
        (" DP0 TP0", 0, True),
        # With data-parallel attention the number among the shards grows with the other.
        (" DP3 TP3 EP3", 3, True),
        (" DP1 PP0 TP0", 1, True),
        (" PP1 TP0", 0, False),
        (" DP1 PP1 ATTN_CP0 MOE_DP0 TP0 EP0", 1, False),
        (" ATTN_CP1 TP1", 0, False),
    ],
)
def test_ranks_tell_whose_word_a_line_is(ranks: str, dp_rank: int, first: object) -> None:
    found = parse_line(
        f"[2026-01-01 10:00:00{ranks}] Decode batch, #running-req: 7, #queue-req: 1".encode()
    )

    assert isinstance(found, Batch)
    assert found.running == 7
    assert (found.stamp.dp_rank, found.stamp.first_rank) == (dp_rank, first)


@pytest.mark.parametrize(
    "prefix",
    [
        f"2026-01-01T09:00:00.123456789Z stderr F {STAMP}",
        f"Jan 01 10:00:00 node7 sglang[4242]: {STAMP}",
        f"(SchedulerActor pid=71) {STAMP}",
        f"0: {STAMP}",
        f"\x1b[36mgpu0 |\x1b[0m {STAMP}",
        f"See https://somewhere.test/refleaks.html{STAMP}",
        "INFO:sglang.srt.managers.scheduler:",
        "2026-01-01 10:00:00 - INFO - ",
        "",
    ],
)
def test_what_others_put_before_a_line_is_passed_over(prefix: str) -> None:
    line = f"{prefix}Decode batch, #running-req: 7, #queue-req: 1\x1b[0m\r\n"
    found = parse_line(line.encode())

    assert isinstance(found, Batch)
    assert (found.running, found.queued) == (7, 1)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "\n",
        STAMP,
        'INFO:     127.0.0.1:1 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
        f"{STAMP}Receive: obj=GenerateReqInput(text='{STAMP}Decode batch, #running-req: 7')",
        f"{STAMP}Cache not flushed because requests are pending. #queue-req: 1, #running-req: 2",
        '    logger.info("The server is fired up and ready to roll!")',
        "please say: “Decode batchless, #running-req: 7”",
        f"{'x' * 300}{STAMP}Decode batch, #running-req: 7, #queue-req: 1",
        f"{STAMP}max_total_num_tokens={'9' * 40}, max_running_requests=9, context_len=1",
    ],
)
def test_whatever_else_stands_in_a_log_says_nothing(line: str) -> None:
    assert parse_line(line.encode()) is None


@pytest.mark.parametrize("absurd", ["nan", "NaN", "inf", "-1", "1e9", "1_0", "", "x", "9" * 30])
def test_a_figure_that_cannot_be_is_nothing_and_the_others_stand(absurd: str) -> None:
    found = parse_line(
        f"{STAMP}Decode batch, #running-req: {absurd}, full token usage: {absurd}, mamba usage: "
        f"{absurd}, gen throughput (token/s): {absurd}, #queue-req: 3".encode()
    )

    assert found == Batch(kind="decode", stamp=AT, queued=3)


def test_no_usage_is_above_one() -> None:
    def usage(text: str) -> float | None:
        found = parse_line(f"{STAMP}Prefill batch, token usage: {text}, #queue-req: 3".encode())
        assert isinstance(found, Batch)
        return found.token_usage

    assert [usage(text) for text in ("1.00", "1.004", "1.01", "97")] == [1.0, 1.0, None, None]


def test_a_stamp_that_no_calendar_has_leaves_the_figures() -> None:
    found = parse_line(b"[2026-02-31 10:00:00] Decode batch, #running-req: 7, #queue-req: 3")

    assert found == Batch(kind="decode", running=7, queued=3)


FIGURES = {"prefill": ("new_seqs", "new_tokens", "cached_tokens"), "decode": ("gen_tokens_per_s",)}


def read_whole(path: Path) -> int:
    """Parse each line; every one that speaks of a batch is read. Gives how many did."""
    batches = 0
    for line in path.read_bytes().splitlines():
        found = parse_line(line)
        speaks = b"] Prefill batch, " in line or b"] Decode batch, " in line
        assert isinstance(found, Batch) == speaks, line
        if isinstance(found, Batch):
            batches += 1
            wanted = ("running", "queued", "token_usage", "graph", *FIGURES[found.kind])
            assert None not in [getattr(found, name) for name in wanted], line
            assert found.stamp.at_s, line
            assert (found.mamba_usage is None) == (b"mamba usage" not in line), line
    return batches


def said(path: Path) -> set[str]:
    found = [parse_line(line) for line in path.read_bytes().splitlines()]
    words = {each.what for each in found if isinstance(each, Event)}
    return words | {type(each).__name__ for each in found if each and not isinstance(each, Event)}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.parent.name)
def test_each_recorded_line_of_a_batch_is_read_whole(path: Path) -> None:
    assert read_whole(path) > 10


def test_what_servers_were_recorded_to_say_is_all_read() -> None:
    assert {word for path in RECORDED for word in said(path)} == {
        *("Batch", "Started", "MambaPool", "Capped", "Retracted"),
        *("ready", "health_failed", "sigquit", "child_died", "sigterm", "draining"),
    }


def test_every_line_of_the_whole_recordings_is_read() -> None:
    paths = sorted(SAMPLES.glob("*/*.log"))
    if not paths:
        skip_cannot_run("the whole recordings lie beside the repository only where it is made")

    assert sum(map(read_whole, paths)) > 2000
    found = [parse_line(line) for path in paths for line in path.read_bytes().splitlines()]
    strategies = [each.strategy for each in found if isinstance(each, Event)]
    assert {each for each in strategies if each} == {"auto", "no_buffer"}


@given(line=st.binary(max_size=3 * MOST_BYTES))
@example(line=b"[2026-01-01 10:00:00 DP99999999999] Decode batch, : , : \n")
def test_no_line_makes_it_raise(line: bytes) -> None:
    parse_line(line)


@given(
    head=st.sampled_from([STAMP, "", f"x {STAMP}", "[2026-99-99 10:00:00 DP1] "]),
    kind=st.sampled_from(["Prefill batch, ", "Decode batch [7], ", *OTHERS]),
    parts=st.lists(
        st.tuples(
            st.sampled_from(["#running-req", "#queue-req", "token usage", "mamba usage", "x"]),
            st.text(max_size=9) | st.floats().map(str) | st.integers().map(str),
        )
    ),
)
def test_no_figure_that_is_read_is_one_that_cannot_be(
    head: str, kind: str, parts: list[tuple[str, str]]
) -> None:
    text = head + kind + ", ".join(f"{name}: {value}" for name, value in parts)
    found = parse_line(text.encode(errors="surrogatepass"))

    if isinstance(found, Batch):
        counts = [found.running, found.queued]
        usages = [found.token_usage, found.mamba_usage]
        assert all(count >= 0 for count in counts if count is not None)
        assert all(0 <= usage <= 1 for usage in usages if usage is not None)


def test_of_a_line_of_any_length_only_its_beginning_is_looked_at() -> None:
    head, field = f"{STAMP}Decode batch, #running-req: 7, ", "x: 1, "
    most = (MOST_BYTES - len(head)) // len(field) - 10

    def queued(fields: int) -> int | None:
        found = parse_line(f"{head}{field * fields}#queue-req: 3, y: 1".encode())
        assert isinstance(found, Batch)
        assert found.running == 7
        return found.queued

    assert (queued(most), queued(most + 20), queued(1_000_000)) == (3, None, None)


@pytest.mark.parametrize(
    "piece",
    [
        b"[2026-01-01 10:00:00",
        b"[2026-01-01 10:00:00 DP1 TP1",
        b"\x1b[0",
        b"Decode batch",
        b"max_running_requests=1",
        b"Subprocess ",
        b", ",
        b": ",
    ],
)
def test_a_hostile_line_of_any_length_takes_no_longer_than_a_short_one(piece: bytes) -> None:
    # Of each, only the first `MOST_BYTES` are looked at: both are the same work, but for noise.
    short, long = piece * (MOST_BYTES // len(piece)), piece * (8_000_000 // len(piece))

    def spent_s(line: bytes) -> float:
        began_s = time.process_time()
        for _ in range(20):
            parse_line(line)
            parse_line(STAMP.encode() + line)
        return time.process_time() - began_s

    assert parse_line(long) == parse_line(long[:MOST_BYTES])
    assert spent_s(long) < 5.0 + 100 * spent_s(short)
