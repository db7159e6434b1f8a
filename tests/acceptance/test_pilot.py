"""A pilot: the first prompts of a file, a look at their answers, then the rest of the same run."""

import json
import shlex
from collections import Counter
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, write_prompts
from tests.support.watching import QUICK_SINK

pytestmark = pytest.mark.timeout(400)

RUN = "job"


def test_a_pilot_is_looked_at_and_the_same_command_adds_the_rest(tmp_path: Path) -> None:
    with Fleet(tmp_path, latency="0.05", cap=8) as fleet:
        prompts = write_prompts(tmp_path / f"{RUN}.jsonl", 60)
        pilot = fleet.enqueue(prompts, "--limit", "20")
        fleet.start_group()
        fleet.wait(lambda: fleet.counts(RUN).completed == 20, "the pilot's answers")
        early = json.loads(fleet.producer("peek", RUN, "--json", "-n", "3").stdout)
        fleet.start_sink("sink", *QUICK_SINK)
        fleet.wait_done(RUN)
        [peek] = [line for line in pilot.stderr.splitlines() if "producer peek" in line]
        [rest] = [line for line in pilot.stderr.splitlines() if "nothing is asked twice" in line]
        looked = fleet.producer(*shlex.split(peek, comments=True)[1:])
        fleet.producer(*shlex.split(rest, comments=True)[1:])

        counts = fleet.wait_done(RUN)

        fleet.verify(RUN, "--input", str(prompts))
        asked = Counter(each.digest for each in fleet.served() if "probe" not in each.rid)
    assert [row["from"] for row in early["rows"]] == ["redis"] * 3
    assert "say " in looked.stdout
    assert (counts.total, counts.completed) == (60, 60)
    assert len(asked) == 60
    assert set(asked.values()) == {1}
