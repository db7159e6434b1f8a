"""Load Headrace's Lua scripts: one file a script, with a prelude made from `common.names`.

The prelude gives each script the name builders, so that Lua spells no key of its own, and the
conversions between a key's 16 bytes, its job id in hex and its place in the ledger.

A script runs as the function `main`: Redis buries the code of a refused command in the text of an
error of its own (6.2 in the midst of it), and why a command was refused must be told by its code.
"""

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from common import names
from common.leases import LEASES

if TYPE_CHECKING:
    import redis
    from redis.commands.core import Script

_BUILDERS = {
    "run_key": names.run,
    "counts_key": names.counts,
    "ledger_stem": names.ledger_stem,
    "leases_key": names.leases,
    "parked_key": names.parked,
    "rate_key": names.rate,
    "history_key": names.history,
    "marks_key": names.marks,
    "tombstone_key": names.tombstone,
    "forgetting_key": names.forgetting,
    "maintenance_key": names.maintenance,
    "open_key": names.open_producers,
    "feed_key": names.feed,
    "sinks_key": names.sinks,
    "set_aside_key": names.set_aside,
    "slots_key": names.slots,
    "drain_key": names.drain,
    "renewed_key": names.renewed,
    "rq_queue": names.rq_queue,
    "rq_started": names.rq_started,
    "rq_failed": names.rq_failed,
    "rq_canceled": names.rq_canceled,
    "rq_job": names.rq_job,
    "rq_job_results": names.rq_job_results,
    "rq_job_executions": names.rq_job_executions,
}

_RUN_MAIN = """
local done, reply = pcall(main)
if done then return reply end
local text = type(reply) == 'table' and reply.err or tostring(reply)
if string.find(text, 'OOM command not allowed', 1, true) then
  return redis.error_reply('OOM a write was refused: Redis is full')
end
if string.find(text, 'executing the script can', 1, true)
  or string.find(text, 'ACL failure', 1, true) then
  return redis.error_reply('NOPERM ' .. string.gsub(text, '^ERR ', ''))
end
local code = string.match(text, '^%-?(%u+) ') or string.match(text, ': %-(%u+) ')
if code and code ~= 'ERR' then
  return redis.error_reply(code .. ' a command of a script was refused')
end
error(reply, 0)
"""


# Read when the process starts: an upgrade may take the files away under one that runs for days.
_LUA = {
    path.name.removesuffix(".lua"): path.read_text(encoding="utf-8")
    for path in (files("common.queue") / "lua").iterdir()
    if path.name.endswith(".lua")
}


@cache
def source(name: str) -> str:
    """Put the prelude before the text of `lua/NAME.lua`."""
    lines = [_builder(lua_name, build("\0")) for lua_name, build in _BUILDERS.items()]
    lines.append(f"local RUNS = {names.RUNS!r}")
    lines.append(f"local PRESENT = {names.PRESENT!r}")
    lines.append(f"local RQ_QUEUES = {names.RQ_QUEUES!r}")
    lines.append(f"local TURN_MS = {LEASES.turn_ms}")
    lines.append(f"local RQ_SUSPENDED = {names.RQ_SUSPENDED!r}")
    lines.append(_partition_builder("results_key", names.results("\0", 0)))
    lines.append(_partition_builder("sink_key", names.sink("\0", 0)))
    main = ["local function main()", _LUA[name], "end", _RUN_MAIN]
    return "\n".join([*lines, _LUA["prelude"], *main])


def script(client: "redis.Redis", name: str) -> "Script":
    """Give the callable script `name`; redis-py sends EVALSHA and loads it where it is missing."""
    return client.register_script(source(name))


def call(client: "redis.Redis", name: str, *args: Any) -> Any:
    """Run a script once; its keys follow from its arguments (Redis Cluster is not supported)."""
    return _prepared(client, name)(keys=[], args=args)


def _prepared(client: "redis.Redis", name: str) -> "Script":
    prepared: dict[str, Script] | None = getattr(client, "_headrace_scripts", None)
    if prepared is None:
        prepared = {}
        client._headrace_scripts = prepared  # type: ignore[attr-defined]  # noqa: SLF001
    if name not in prepared:
        prepared[name] = script(client, name)
    return prepared[name]


def _builder(lua_name: str, pattern: str) -> str:
    before, after = pattern.split("\0")
    ending = f" .. {after!r}" if after else ""
    return f"local function {lua_name}(run) return {before!r} .. run{ending} end"


def _partition_builder(lua_name: str, pattern: str) -> str:
    before, after = pattern.removesuffix("00").split("\0")
    number = "string.format('%02d', partition)"
    return (
        f"local function {lua_name}(run, partition) "
        f"return {before!r} .. run .. {after!r} .. {number} end"
    )
