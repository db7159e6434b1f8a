"""Every crash point stands in the code, and is killed at by a test that looks what stands then."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import crashpoints
from tests.conftest import REPOSITORY

_FILES = "tests/integration/test_crash_points_{}.py::{}"
_AT_WORK = _FILES.format(
    "group", "test_killed_at_work_it_leaves_what_was_durable_and_the_next_one_goes_on"
)
_TAKEOVER = _FILES.format("group", "test_killed_in_a_takeover_the_next_one_takes_over_both")
_BATCH = _FILES.format(
    "store", "test_a_sink_killed_at_a_point_leaves_what_was_durable_and_the_next_one_goes_on"
)
_GIVEN_UP = _FILES.format("store", "test_killed_while_a_sequence_is_given_up_it_is_given_up_once")
_FEED = _FILES.format("store", "test_a_feeder_killed_at_a_point_feeds_nothing_twice")
_REBUILD = _FILES.format("store", "test_a_rebuild_killed_at_a_point_is_begun_anew")
_END = _FILES.format("store", "test_killed_while_the_end_is_told_redis_says_that_it_may_be_untrue")
_FIGURES = _FILES.format(
    "store", "test_killed_while_figures_are_written_each_file_is_whole_or_not_there"
)
_CANCEL = _FILES.format("producer", "test_cancel_killed_at_a_point_is_ended_by_the_same_call")
_RETRY = _FILES.format("producer", "test_retry_killed_at_a_point_tries_each_prompt_once_more")
_FORGET = _FILES.format(
    "producer", "test_forget_killed_at_a_point_leaves_no_run_and_no_key_in_the_end"
)
_RESUME = _FILES.format("producer", "test_resume_killed_at_a_point_is_ended_by_the_same_call")
_SET = _FILES.format("producer", "test_what_one_call_sets_stands_though_it_was_killed")
_AUDIT = _FILES.format("producer", "test_an_audit_killed_at_a_point_lists_nothing_twice")
_ENQUEUE = (
    "tests/integration/test_enqueue_interrupted.py"
    "::test_a_kill_anywhere_costs_nothing_but_the_same_call_again"
)

KILLED_BY = {
    "server.launched": "tests/integration/test_serve.py"
    "::test_a_server_whose_process_was_never_written_down_is_found_and_ended",
    **dict.fromkeys(
        [
            *("enqueue.recorded", "enqueue.created", "enqueue.opened", "enqueue.revoked"),
            *("enqueue.inputs", "enqueue.queued", "enqueue.sealed", "enqueue.closed"),
        ],
        _ENQUEUE,
    ),
    "enqueue.remade": "tests/integration/test_output_emptied.py"
    "::test_killed_when_run_json_is_there_again_the_same_call_makes_the_rest_anew",
    **dict.fromkeys(["retry.revoked", "retry.queued"], _RETRY),
    **dict.fromkeys(["pause.set", "priority.set"], _SET),
    **dict.fromkeys(["resume.lifted", "resume.compared", "resume.audited"], _RESUME),
    "resume.sealed": _FILES.format(
        "producer", "test_resume_killed_before_a_dead_producer_is_closed_seals_once_more"
    ),
    **dict.fromkeys(
        ["cancel.marked", "cancel.revoked", "cancel.told", "cancel.ended", "cancel.closed"],
        _CANCEL,
    ),
    **dict.fromkeys(["forget.begun", "forget.swept", "forget.emptied", "forget.ended"], _FORGET),
    **dict.fromkeys(
        [
            *("run.pinned", "slots.taken", "claim.leased", "serve.answered"),
            *("finish.recorded", "lease.renewed"),
        ],
        _AT_WORK,
    ),
    **dict.fromkeys(["takeover.aborted", "takeover.reaped", "takeover.settled"], _TAKEOVER),
    "slots.aborted": _FILES.format(
        "group", "test_killed_before_expired_slots_are_settled_they_are_still_their_holders"
    ),
    "slots.released": _FILES.format(
        "group", "test_killed_when_its_slots_are_given_up_nothing_is_held"
    ),
    "charge.counted": _FILES.format("group", "test_killed_after_a_charge_the_attempt_counts"),
    "turn.kept": _FILES.format("group", "test_killed_after_a_turn_it_is_not_generated_again"),
    "return.turns": _FILES.format(
        "producer", "test_killed_between_turns_and_return_the_job_keeps_both"
    ),
    "return.given": _FILES.format(
        "group", "test_killed_in_a_stop_jobs_are_back_before_their_slots"
    ),
    "reap.ended": _FILES.format(
        "group", "test_killed_after_reaping_what_was_lost_is_listed_and_counted"
    ),
    "audit.cancelled": _FILES.format(
        "producer", "test_an_audit_killed_when_cancelled_jobs_have_ended_ends_each_once"
    ),
    **dict.fromkeys(["audit.listed", "audit.restored"], _AUDIT),
    **dict.fromkeys(
        ["drain.taken", "drain.lifted"],
        "tests/integration/test_queue_drains.py"
        "::test_an_owner_that_is_killed_leaves_a_drain_that_ends_by_itself_or_none",
    ),
    **dict.fromkeys(
        ["restart.drained", "restart.ordered", "restart.ready"],
        "tests/integration/test_restart.py::test_killed_between_two_steps_the_same_call_goes_on",
    ),
    **dict.fromkeys(["feed.begun", "feed.fed", "feed.advanced"], _FEED),
    **dict.fromkeys(
        [
            *("sink.took", "sink.pinned", "sink.read", "sink.intent", "sink.attempted"),
            *("sink.built", "sink.shards", "sink.failures", "sink.keys", "sink.manifest"),
            "sink.acknowledged",
        ],
        _BATCH,
    ),
    **dict.fromkeys(["sink.giving_up", "sink.void"], _GIVEN_UP),
    "sink.set_aside": _FILES.format(
        "store", "test_killed_when_a_poison_entry_is_aside_its_failure_stands_once"
    ),
    "archive.stored": "tests/integration/test_sink_telemetry.py"
    "::test_a_sink_killed_when_an_object_is_stored_leaves_the_next_one_nothing_to_double",
    "sample.kept": _FILES.format("group", "test_killed_when_a_sample_is_kept_nothing_hangs_on_it"),
    **dict.fromkeys(["progress.kept", "progress.stored"], _FIGURES),
    **dict.fromkeys(
        [
            *("adopt.made", "reconcile.begun", "reconcile.adopting", "reconcile.closed"),
            *("reconcile.taught", "reconcile.dropped", "reconcile.bodies", "reconcile.inputs"),
            *("reconcile.marks", "reconcile.marked"),
        ],
        _REBUILD,
    ),
    **dict.fromkeys(
        ["mark.noted", "mark.stored"],
        "tests/integration/test_marks.py"
        "::test_a_mark_whose_command_was_killed_is_stored_once_by_a_sink",
    ),
    "reconcile.forgotten": _FILES.format(
        "store", "test_killed_after_lost_records_were_forgotten_their_prompts_come_back"
    ),
    **dict.fromkeys(["end.pending", "end.written"], _END),
    "end.sealed": _FILES.format(
        "store", "test_killed_when_the_store_has_the_seal_of_redis_the_end_is_tested_anew"
    ),
    "end.untrue": _FILES.format(
        "store", "test_killed_when_an_untrue_success_is_gone_it_is_written_when_it_is_true"
    ),
    "end.revoked": _FILES.format(
        "store", "test_killed_when_a_success_is_revoked_redis_still_names_it"
    ),
}


def words(node: ast.AST) -> set[str]:
    """Every text in it."""
    return {
        each.value
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    }


def points_in(path: Path) -> Iterator[str]:
    """The points that a module reaches; a name stands for the module's table."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "reached"):
            continue
        [argument] = node.args
        if isinstance(argument, ast.Constant):
            yield str(argument.value)
            continue
        assert isinstance(argument, ast.Subscript), f"{path}:{node.lineno}: name the point"
        table = argument.value
        assert isinstance(table, ast.Name)
        [values] = [
            each.value
            for each in tree.body
            if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == table.id
        ]
        assert isinstance(values, ast.Dict)
        yield from (str(ast.literal_eval(value)) for value in values.values)


def words_of_test(node_id: str) -> set[str]:
    """The texts of a test, of its marks, and of the tables of its module that it names."""
    file, _, name = node_id.partition("::")
    tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
    [test] = [each for each in tree.body if getattr(each, "name", "") == name]
    named = {each.id for each in ast.walk(test) if isinstance(each, ast.Name)}
    found = words(test)
    for each in tree.body:
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) in named:
            found |= words(each)
    return found


def test_the_code_reaches_each_point_that_is_named_and_no_other() -> None:
    modules = [
        path
        for package in ("common", "producer", "workers")
        for path in (REPOSITORY / package).rglob("*.py")
    ]
    reached = {point for path in modules for point in points_in(path)}

    assert reached == set(crashpoints.POINTS)


def test_each_point_is_killed_at_by_a_test() -> None:
    assert set(KILLED_BY) == set(crashpoints.POINTS)
    missing = {
        point: test for point, test in KILLED_BY.items() if point not in words_of_test(test)
    }
    assert missing == {}


def test_a_point_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no crash point 'sink\.typo'"):
        crashpoints.arm({crashpoints.VARIABLE: "sink.typo:2"})
    crashpoints.arm(os.environ)


def test_a_process_dies_at_its_point_the_nth_time() -> None:
    code = "from common.crashpoints import reached\nfor n in range(9): print(n, flush=True); reached('sink.read')"  # noqa: E501
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, crashpoints.VARIABLE: "sink.read:3", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.returncode, ended.stdout.split()) == (-9, ["0", "1", "2"])
