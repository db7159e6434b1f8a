"""deploy/grafana shows what SGLang tells, by the names that its versions use."""

import json
import re
from itertools import combinations
from typing import Any

import pytest

from tests.support.deployed import DEPLOY, REPOSITORY

RECORDED = sorted((REPOSITORY / "tests" / "data" / "sglang").glob("*/metrics_hybrid.txt"))


def panels() -> list[dict[str, Any]]:
    read: dict[str, Any] = json.loads((DEPLOY / "grafana" / "sglang.json").read_text())
    found: list[dict[str, Any]] = read["panels"]
    return found


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda path: path.parent.name)
def test_each_panel_asks_for_what_a_server_tells(recorded: Any) -> None:
    kinds = re.findall(r"(?m)^# TYPE (sglang:\w+) (\w+)$", recorded.read_text())
    told = {f"{name}_bucket" if kind == "histogram" else name for name, kind in kinds}
    asked = {
        name
        for panel in panels()
        for target in panel["targets"]
        for name in re.findall(r"sglang:\w+", target["expr"])
    }

    assert len(asked) > 8
    assert asked - told == set()


def test_panels_stand_beside_each_other_and_ask_whole_questions() -> None:
    def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        return not (beside or below)

    found = panels()

    assert len({panel["id"] for panel in found}) == len(found)
    for one, other in combinations(found, 2):
        assert not overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])
    for panel in found:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        for target in panel["targets"]:
            expression = target["expr"]
            for opening, closing in ("()", "[]", "{}"):
                assert expression.count(opening) == expression.count(closing), expression
            assert '{instance=~"$instance"}' in expression
