"""Find a run's output: by `--output`, by its record in Redis, or by what a sink left here.

Only Redis' client and the store's are slow to import, so both are imported when they are needed.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from common import names
from common.errors import BackendError, ConflictError, RedisUnusableError, StateLostError
from common.models import RunRecord
from common.store import ObjectStore, Patience, open_store
from common.store.retry import DEFAULT, READERS_CALL_S

if TYPE_CHECKING:
    import redis

STATE_DIR = Path(".headrace")
"""Where sinks write progress.json of each run, below its name."""


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """What a command was told of where to look.

    Attributes:
        run: Name of the run.
        output: As `--output` gives it; then Redis is not asked.
        endpoint_url: Another S3 than Amazon's, for `output`.
        redis: Address as given, None for the default.
        else_output: What the settings say of outputs, for a run that nobody knows.
        else_endpoint_url: The same for S3's endpoint.
    """

    run: str
    output: str | None = None
    endpoint_url: str | None = None
    redis: str | None = None
    else_output: str | None = None
    else_endpoint_url: str | None = None

    def elsewhere(self) -> tuple[str, str | None]:
        """Give the output and S3 endpoint of a run that Redis does not know; empty if nothing.

        As given; else what a sink noted here; else what the settings say.
        """
        if self.output is not None:
            return self.output, self.endpoint_url
        output, endpoint_url = _noted_here(self.run)
        if output:
            return output, endpoint_url
        return self.else_output or "", self.else_endpoint_url


class _LocalProgress(msgspec.Struct):
    """What of progress.json leads to the store."""

    output: str = ""
    endpoint_url: str | None = None


def locate(where: Where) -> tuple[RunRecord, ObjectStore]:
    """Find a run's output and read its run.json. Writes nothing, and does not probe.

    A store that is busy is waited for some minutes, and that is said.

    Raises:
        StateLostError: Neither Redis nor this directory knows the run, or its output is empty.
        ConflictError: The output is another run's.
        BackendError: Redis or the store cannot be reached.
    """
    if where.output is not None:
        return read_record(_open_to_read(where.output, where.endpoint_url), where.run)
    try:
        record = known_in_redis(where)
    except RedisUnusableError as error:
        if where.else_output is not None:
            return _elsewhere(where)
        raise RedisUnusableError(
            f"{error} Without Redis: name the output with --output URL"
        ) from error
    if record is None:
        return _elsewhere(where)
    return read_record(_open_to_read(record.output, record.endpoint_url), where.run, record)


def _elsewhere(where: Where) -> tuple[RunRecord, ObjectStore]:
    output, endpoint_url = where.elsewhere()
    if not output:
        raise StateLostError(unknown(where.run, reads_store=True))
    return read_record(_open_to_read(output, endpoint_url), where.run)


def _open_to_read(output: str, endpoint_url: str | None) -> ObjectStore:
    return open_output(output, endpoint_url, Patience(limit_s=READERS_CALL_S, say=_say))


def open_output(
    output: str, endpoint_url: str | None, patience: Patience = DEFAULT
) -> ObjectStore:
    """Open an output that must be there."""
    return open_store(output, endpoint_url, create=False, patience=patience)


def _say(text: str) -> None:
    click.echo(f"producer: {text}", err=True)


def read_record(
    store: ObjectStore, run: str, known: RunRecord | None = None
) -> tuple[RunRecord, ObjectStore]:
    """Read run.json and see that it is this run's.

    Args:
        store: The output.
        run: Name of the run that is asked for.
        known: The run as Redis has it.

    Raises:
        StateLostError: There is none.
        ConflictError: It is another run's.
    """
    data = store.get(names.RUN_JSON)
    if data is None:
        raise StateLostError(
            f"{store.url} holds no {names.RUN_JSON}: it is no run's output, or was emptied; the "
            "same `producer enqueue FILE` again makes a run's output anew"
        )
    try:
        record = msgspec.json.decode(data, type=RunRecord)
    except msgspec.MsgspecError as error:
        raise BackendError(f"{store.url}/{names.RUN_JSON} cannot be read: {error}") from error
    if record.run != run:
        raise ConflictError(f"{store.url} is the output of run {record.run!r}, not of {run!r}")
    if known is not None and known.uid != record.uid:
        raise ConflictError(
            f"{store.url} holds run {run!r} with uid {record.uid}, Redis has one with uid "
            f"{known.uid}: give --output to ask about the one in the store"
        )
    return record, store


def _noted_here(run: str) -> tuple[str, str | None]:
    """Read what a sink noted here of a run's output: address and S3 endpoint; empty if nothing."""
    if not names.RUN_NAME.fullmatch(run):
        return "", None
    try:
        data = (STATE_DIR / run / names.PROGRESS).read_bytes()
        noted = msgspec.json.decode(data, type=_LocalProgress)
    except (OSError, msgspec.MsgspecError):
        return "", None
    return noted.output, noted.endpoint_url


def unknown(
    run: str, address: str = "", *, known: Iterable[str] = (), reads_store: bool = False
) -> str:
    """Say that nobody knows the run, and what to do.

    Args:
        run: Its name.
        address: Of the Redis that was asked, for people.
        known: The runs that it has: one of nearly that name may be meant.
        reads_store: The command needs no more than the output.
    """
    at = f" at {address}" if address else ""
    near = difflib.get_close_matches(run, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    told = f"Redis{at} does not know run {run!r}: {hint}`producer runs` lists what it has; "
    if reads_store:
        return f"{told}where its results are in a store, name that with --output URL"
    return (
        f"{told}if it has lost the run, `producer resume {run} --output URL` brings it back from "
        "the store"
    )


def known_in_redis(where: Where) -> RunRecord | None:
    """Read a run's record from Redis; None where it does not know the run."""
    from common.connect import address_of  # noqa: PLC0415
    from common.queue import Runs  # noqa: PLC0415

    client = connected(where.redis)
    return Runs(client, where=address_of(client)).get(where.run)


def waits_of_run_at_work(record: RunRecord, redis: str | None) -> int | None:
    """Count the results that wait for a sink; None where the run does not go on, or nobody knows.

    Args:
        record: The run.
        redis: Address as given, None for the default.
    """
    from common.connect import address_of  # noqa: PLC0415
    from common.queue import Runs  # noqa: PLC0415

    try:
        client = connected(redis)
        runs = Runs(client, where=address_of(client))
        known, counts = runs.get(record.run), runs.counts(record.run)
    except BackendError:
        return None
    if known is None or known.uid != record.uid:
        return None
    goes_on = counts.queued + counts.in_flight + counts.stream_entries
    return counts.stream_entries if goes_on else None


def connected(given: str | None, *, writes: bool = False, create: bool = False) -> "redis.Redis":
    """Connect to the Redis that `--redis` or the environment names; it must be there.

    Args:
        given: Address as given, None for the default.
        writes: The call changes something: a user who may not is told before.
        create: An embedded one may be begun: what it lost is in the store that the call names.
    """
    from common.address import resolve_redis  # noqa: PLC0415
    from common.connect import address_of, connect  # noqa: PLC0415
    from common.queue.rights import refuse_missing_rights  # noqa: PLC0415

    client = connect(resolve_redis(given, create=create))
    if writes:
        refuse_missing_rights(client, address_of(client))
    return client
