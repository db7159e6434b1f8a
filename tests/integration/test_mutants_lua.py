"""Mutants of scripts are scripts: one that Redis cannot compile would prove nothing."""

import pytest
import redis

from common.queue import scripts
from tests.mutants.table import REPOSITORY, mutants

LUA = sorted({mutant.file for mutant in mutants() if mutant.file.endswith(".lua")})


@pytest.mark.parametrize("file", LUA)
def test_each_mutant_of_a_script_compiles(
    redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    name = file.rpartition("/")[2].removesuffix(".lua")
    text = (REPOSITORY / file).read_text(encoding="utf-8")
    for mutant in mutants():
        if mutant.file != file:
            continue
        monkeypatch.setitem(scripts._LUA, name, mutant.applied(text))
        made = scripts.source.__wrapped__("finish" if name == "prelude" else name)
        assert len(str(redis_client.script_load(made))) == 40, mutant.name
