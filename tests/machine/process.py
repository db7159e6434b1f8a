"""A process of the machine: its own connections, which die with it, and its view of the stores.

Whatever it does runs in the test's thread, or in one of its own where it is to freeze. Killed at a
crash point it can say nothing more, neither to Redis nor to a store: its clean-up is in vain, as
after SIGKILL.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from typing_extensions import override

from common import connect
from common.errors import HeadraceError, StoreUnusableError
from common.queue.sinklease import PartitionLostError
from common.store import ObjectStore, StoredObject
from tests.support.sinks import KilledError
from workers.sink.partition import BatchRefusedError

T = TypeVar("T")

LIMIT_S = 300.0
EXPECTED = (HeadraceError, PartitionLostError, BatchRefusedError)
"""What a process may end an action with; anything else is a fault of the product."""


class StuckError(BaseException):
    """Somebody interrupts a command that waits for another process."""


class Fate(msgspec.Struct, frozen=True):
    """What happens to one action.

    Attributes:
        kind: '' nothing, dies or freezes at the n-th crash point that it reaches.
        redis, store: Calls that fail, in order: '' none, away (not made), lost (made, and the
            answer lost), refused (of a store: not made, and waiting does not help).
    """

    kind: str = ""
    nth: int = 1
    redis: tuple[str, ...] = ()
    store: tuple[str, ...] = ()


GOOD = Fate()


class Process:
    """One process; `store(url)` gives its view of an output."""

    def __init__(self, name: str, socket: str, stores: dict[str, ObjectStore]) -> None:
        self.name = name
        self.dead = False
        self.redis_faults: list[str] = []
        self.store_faults: list[str] = []
        self._stores = stores
        timing = connect.timing(unix=True) | {"retry": Retry(NoBackoff(), 3)}
        pool = redis.ConnectionPool(
            connection_class=_Connection, process=self, path=socket, db=0, **timing
        )
        self.client = redis.Redis(connection_pool=pool)

    def store(self, url: str) -> "ProcessStore":
        """Its view of an output."""
        return ProcessStore(self, self._stores[url])

    def close(self) -> None:
        self.client.close()


class _Connection(redis.UnixDomainSocketConnection):
    """Breaks where its process is to lose a call or its answer."""

    def __init__(self, *, process: Process, **settings: Any) -> None:
        super().__init__(**settings)  # type: ignore[no-untyped-call]
        self._process = process
        self._ready = False
        self._loses = False

    @override
    def on_connect_check_health(self, check_health: bool = True) -> None:
        self._ready = False
        super().on_connect_check_health(check_health)
        self._ready = True

    @override
    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        if self._process.dead:
            raise redis.ConnectionError("its process is dead")
        fault = ""
        if self._ready and self._process.redis_faults:
            fault = self._process.redis_faults.pop(0)
        if fault == "away":
            self.disconnect()  # type: ignore[no-untyped-call]
            raise redis.ConnectionError("away")
        super().send_packed_command(command, check_health)  # type: ignore[no-untyped-call]
        self._loses = fault == "lost"

    @override
    def read_response(self, *args: Any, **named: Any) -> Any:
        reply = super().read_response(*args, **named)
        if self._loses:
            self._loses = False
            self.disconnect()  # type: ignore[no-untyped-call]
            raise redis.ConnectionError("the answer was lost")
        return reply


class ProcessStore:
    """An output as one process sees it."""

    def __init__(self, process: Process, inner: ObjectStore) -> None:
        self._process = process
        self._inner = inner
        self.url = inner.url
        self.conditional = inner.conditional

    def probe(self) -> None:
        self._call("probe", self._inner.probe)

    def put_if_absent(self, name: str, data: bytes, *, rows_sha256: str = "") -> bool:
        return self._call(
            name, lambda: self._inner.put_if_absent(name, data, rows_sha256=rows_sha256)
        )

    def put(self, name: str, data: bytes) -> None:
        self._call(name, lambda: self._inner.put(name, data))

    def get(self, name: str) -> bytes | None:
        return self._call(name, lambda: self._inner.get(name))

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        return iter(self._call(prefix, lambda: [*self._inner.list(prefix)]))

    def delete(self, name: str) -> None:
        self._call(name, lambda: self._inner.delete(name))

    def _call(self, what: str, call: Callable[[], T]) -> T:
        if self._process.dead:
            raise StoreUnusableError(f"{what}: its process is dead", retryable=True)
        faults = self._process.store_faults
        fault = faults.pop(0) if faults else ""
        if fault in {"away", "refused"}:
            raise StoreUnusableError(f"{what}: {fault}", retryable=fault == "away")
        result = call()
        if fault == "lost":
            raise StoreUnusableError(f"{what}: the answer was lost", retryable=True)
        return result


class Deed:
    """One action of a process, from its begin to its end or its thaw.

    Attributes:
        word: done, error, killed, interrupted, or frozen while it stands still.
        value: What it returned.
        error: What it ended with.
    """

    def __init__(self, process: Process, call: Callable[[], Any], fate: Fate) -> None:
        self.process = process
        self.word = ""
        self.value: Any = None
        self.error: BaseException | None = None
        self.at = ""
        self._call = call
        self._fate = fate
        self._left = fate.nth
        self._frozen, self._thaw = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def go(self) -> None:
        """Begin it; returns at its end, or where it freezes."""
        self.process.redis_faults = list(self._fate.redis)
        self.process.store_faults = list(self._fate.store)
        if self._fate.kind != "freezes":
            self._run()
            return
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        while self._thread.is_alive() and not self._frozen.wait(0.002):
            pass
        if self._frozen.is_set():
            self.word = "frozen"
        else:
            self._thread.join()

    def wake(self) -> None:
        """Let it go on, to its end."""
        assert self._thread is not None
        self._thaw.set()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), f"{self.process.name} does not end"

    def reached(self, point: str) -> None:
        """Called in its own thread at every crash point."""
        self._left -= 1
        if self._left or not self._fate.kind:
            return
        self.at = point
        if self._fate.kind == "dies":
            self.process.dead = True
            raise KilledError(point)
        self._frozen.set()
        if not self._thaw.wait(LIMIT_S):
            raise KilledError(point)

    def _run(self) -> None:
        CURRENT.deed = self
        try:
            self.value = self._call()
            self.word = "done"
        except KilledError as error:
            self.word, self.error = "killed", error
        except StuckError as error:
            self.word, self.error = "interrupted", error
        except EXPECTED as error:
            self.word, self.error = "error", error
        except BaseException as error:  # noqa: BLE001 - told by whoever looks at the deed
            self.word, self.error = "broken", error
        finally:
            CURRENT.deed = None
            self.process.redis_faults = []
            self.process.store_faults = []


class _Current(threading.local):
    deed: Deed | None = None


CURRENT = _Current()
"""The deed that this thread carries out."""


def reached(point: str) -> None:
    """Watch the crash points."""
    if CURRENT.deed is not None:
        CURRENT.deed.reached(point)
