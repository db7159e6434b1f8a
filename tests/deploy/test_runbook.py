"""deploy/RUNBOOK.md has a row for every word that somebody may be told at night."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from common import cancelled_row, news
from common.figures import ENDED, Status
from common.quality import FLAGS
from tests.support.deployed import DEPLOY, REPOSITORY
from workers.client import answers, faults
from workers.sink import unstorable
from workers.supervisor.records import State

RUNBOOK = DEPLOY / "RUNBOOK.md"

NO_FAILURE = {
    *faults._CONFIG_STATUS.values(),
    *faults._LOAD_STATUS.values(),
    *("duplicate_rid", "local_limit", "refused", "server_gone", "unexpected_status"),
    "wrong_model",
} - {"server_timeout"}
"""Words for why a request is sent again uncharged: no prompt ends with one of them."""


def rows(heading: str) -> list[str]:
    """The words that the tables below a heading have a row for, in order."""
    text = RUNBOOK.read_text(encoding="utf-8")
    [section] = re.findall(
        rf"(?ms)^(?:## {heading}|\*\*{heading}.*?)$(.*?)(?=^## |^\*\*|\Z)", text
    )
    return re.findall(r"(?m)^\| `([a-z0-9_]+)` \|", section)


def expressions(path: Path, kind: type[ast.AST]) -> Iterator[ast.AST]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kind))


def words_in(node: ast.AST | None) -> set[str]:
    """The words that an expression may give."""
    found = (
        [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)] if node else []
    )
    return {word for word in found if isinstance(word, str) and re.fullmatch(r"[a-z0-9_]+", word)}


def test_every_status_word_has_a_row() -> None:
    assert rows("Status words") == list(get_args(Status))


def test_every_notification_has_a_row() -> None:
    told = news._TROUBLE | ENDED
    told |= {news.RECOVERED, news.SERVER_GONE, news.REDIS_GONE, "waiting_for_workers"}

    assert sorted(rows("Notifications")) == sorted(told)


def test_every_state_of_a_worker_group_has_a_row() -> None:
    watch = REPOSITORY / "workers" / "servers" / "watch.py"
    showing = REPOSITORY / "workers" / "engine" / "showing.py"
    figures = REPOSITORY / "common" / "figures.py"
    found: set[str] = {"waiting"}
    for node in expressions(watch, ast.Call):
        assert isinstance(node, ast.Call)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "_enter":
            found |= words_in(node.args[0])
    for node in expressions(showing, ast.Return):
        assert isinstance(node, ast.Return)
        if isinstance(node.value, ast.Tuple):
            found |= words_in(node.value.elts[0])
    for node in expressions(figures, ast.Assign):
        assert isinstance(node, ast.Assign)
        if "state" in {getattr(target, "id", "") for target in node.targets}:
            found |= words_in(node.value)

    assert len(found) > 6
    assert sorted(rows("Of a worker group")) == sorted(found)


def test_every_state_of_a_server_has_a_row() -> None:
    assert rows("Of a server") == list(get_args(State))


def test_every_flag_of_an_answer_has_a_row() -> None:
    assert rows("Answers that look odd") == list(FLAGS)


def test_every_reason_of_a_failure_has_a_row() -> None:
    found = {*get_args(answers.BadReason), *faults._PROMPT_STATUS.values()}
    found |= {cancelled_row.REASON, unstorable.REASON}
    for path in sorted((REPOSITORY / "workers").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "reason":
                found |= words_in(node.value)
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "reason":
                found |= words_in(node.value)

    assert sorted(rows("Why prompts fail")) == sorted(found - NO_FAILURE)
