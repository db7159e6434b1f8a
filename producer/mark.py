"""`producer mark`: name an instant of a run, or list those that are named.

Redis first, then the store: a call that dies between leaves a mark that any sink stores. Where
Redis has lost the run the store alone has it, and gives it back with the run.
"""

import re
import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from common import connect, snapshot
from common.crashpoints import reached
from common.errors import HeadraceError, StateLostError, UsageError
from common.harmless import one_line
from common.marks import Mark, archive
from common.marks.effect import with_effects
from common.marks.mark import TEXT_CHARS, by_hand, told
from common.models import RunRecord
from common.queue import Runs
from common.queue.marks import Marks
from common.store import ObjectStore
from producer.locate import Where, open_output, read_record, unknown

if TYPE_CHECKING:
    import redis

FUTURE_S = 60.0
"""So far ahead an instant may be: clocks differ."""

_AGO = re.compile(r"-?(\d+(?:\.\d+)?)\s*(s|m|min|h|d)(?:\s+ago)?")
_UNITS_S = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400}
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d))?")


class Marked(msgspec.Struct, frozen=True, kw_only=True):
    """What a call did.

    Attributes:
        why: Why the store does not have it yet; empty where it has.
        lost: Redis does not know the run: only the store has it.
    """

    run: str
    mark: Mark
    why: str = ""
    lost: bool = False


def checked_text(words: str) -> str:
    """Give the text of a mark as it is kept: on one line, and nothing in it acts on a terminal.

    Raises:
        UsageError: It is empty or too long.
    """
    text = one_line(words, 2 * TEXT_CHARS)
    if not text or len(text) > TEXT_CHARS:
        raise UsageError(
            f"a mark needs a text of 1 to {TEXT_CHARS} characters, this one has {len(words):,}"
        )
    return text


def instant_ms(text: str | None, now: datetime) -> int:
    """Read `--at`: an instant as ISO 8601 has it, a time of today or yesterday, or how long ago.

    Args:
        text: None for now.
        now: With its time zone, which is what an instant without one is read in.

    Raises:
        UsageError: It is none of them, or has not come yet.
    """
    if text is None:
        return round(now.timestamp() * 1000)
    at = _read_instant(text.strip(), now)
    if at is None:
        raise UsageError(
            f"--at {text!r} is no instant: give 14:02, 2026-11-30T14:02:05+01:00 or 10m (ago)"
        )
    if (at - now).total_seconds() > FUTURE_S:
        raise UsageError(f"--at {text!r} has not come yet: it is {now:%H:%M:%S} now")
    return max(round(at.timestamp() * 1000), 0)


def _read_instant(text: str, now: datetime) -> datetime | None:
    if ago := _AGO.fullmatch(text):
        try:
            return now - timedelta(seconds=float(ago[1]) * _UNITS_S[ago[2]])
        except OverflowError:
            return None
    try:
        if clock := _CLOCK.fullmatch(text):
            hour, minute, second = (int(part or 0) for part in clock.groups())
            at = now.replace(hour=hour, minute=minute, second=second, microsecond=0)
            # Just after midnight somebody marks what was before.
            return at - timedelta(days=1) if (at - now).total_seconds() > FUTURE_S else at
        at = datetime.fromisoformat(text)
        return at if at.tzinfo else at.replace(tzinfo=now.tzinfo)
    except (ValueError, OverflowError):
        return None


def mark(client: "redis.Redis", where: Where, text: str, *, at: str | None) -> Marked:
    """Set a mark.

    Args:
        client: From `common.connect`.
        where: The run.
        text: What it says.
        at: As `--at` gives it.

    Raises:
        StateLostError: Nobody knows the run.
        UsageError: The text or the instant is none.
    """
    text = checked_text(text)
    made = by_hand(text, instant_ms(at, datetime.fromtimestamp(_now_s(client)).astimezone()))
    record = Runs(client, where=connect.address_of(client)).get(where.run)
    if record is None or Marks(client, where.run).add(made) is None:
        _, store = _in_store(client, where)
        archive.put(store, made)
        return Marked(run=where.run, mark=made, lost=True)
    reached("mark.noted")
    try:
        archive.put(open_output(record.output, record.endpoint_url), made)
        reached("mark.stored")
        Marks(client, where.run).archived([made.id])
    except HeadraceError as error:
        return Marked(run=where.run, mark=made, why=str(error))
    return Marked(run=where.run, mark=made)


def listed(client: "redis.Redis", where: Where) -> list[dict[str, Any]]:
    """List the marks of a run, the oldest first; the newest with figures before and after.

    Raises:
        StateLostError: Nobody knows the run.
    """
    read = snapshot.read(client, where.run)
    if read is None:
        _, store = _in_store(client, where)
        return [told(each) for each in archive.all_of(store)]
    compared = {each["id"]: each for each in read.figures()["marks"]}
    every = Marks(client, where.run).latest()
    plain = with_effects(every, history={}, now_ms=read.now_ms, answer_s=None, shown=None)
    return [compared.get(each["id"], each) for each in reversed(plain)]


def _in_store(client: "redis.Redis", where: Where) -> tuple[RunRecord, ObjectStore]:
    output, endpoint_url = where.elsewhere()
    if not output:
        address = connect.address_of(client)
        raise StateLostError(unknown(where.run, address, known=Runs(client).names()))
    return read_record(open_output(output, endpoint_url), where.run)


def _now_s(client: "redis.Redis") -> float:
    """Read Redis TIME, as whatever it is compared with has it; else this machine's."""
    try:
        seconds, micros = client.time()
    except connect.REDIS_ERRORS:
        return time.time()
    return float(seconds) + float(micros) / 1e6
