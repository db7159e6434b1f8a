"""A store in memory with faults on request, for what only the protocol's logic decides.

What it does without a fault is what `tests/integration/test_store.py` asks of every store.
"""

from collections import Counter
from collections.abc import Callable, Iterator

from common.errors import StoreDeniedError, StoreUnusableError
from common.store import StoredObject
from common.store.identity import holds_same, identity_of

Fault = Callable[[str, str], str | None]
"""Asked with (operation, name) before each call: None, `away` (not carried out), `refused` (not
carried out, not retryable), `denied` (likewise, whatever is written), or `lost` (carried out, the
answer lost)."""


class MemoryStore:
    """Objects in a dict.

    Args:
        conditional: Whether `put_if_absent` refuses; else it overwrites, as some servers do.
        fault: See `Fault`.

    Attributes:
        unlisted: Names that a list lacks, as of a store that lists late.
    """

    def __init__(self, *, conditional: bool = True, fault: Fault | None = None) -> None:
        self.url = "memory:"
        self.conditional = conditional
        self.fault: Fault = fault or (lambda _operation, _name: None)
        self.objects: dict[str, bytes] = {}
        self.identities: dict[str, str] = {}
        self.writes: Counter[str] = Counter()
        self.denied: str | None = None
        self.unlisted: set[str] = set()

    def probe(self) -> None:
        if self.denied:
            raise StoreUnusableError(f"PutObject denied: {self.denied}")

    def put_if_absent(self, name: str, data: bytes, *, rows_sha256: str = "") -> bool:
        after = self._before("put_if_absent", name)
        if self.conditional and name in self.objects:
            same = self.identities.get(name) == identity_of(data, rows_sha256)
            result = same or holds_same(
                name, self.objects[name], data, identity_of(data, rows_sha256)
            )
        else:
            self.objects[name] = data
            self.identities[name] = identity_of(data, rows_sha256)
            self.writes[name] += 1
            result = True
        self._after(after, name)
        return result

    def put(self, name: str, data: bytes) -> None:
        after = self._before("put", name)
        self.objects[name] = data
        self._after(after, name)

    def get(self, name: str) -> bytes | None:
        self._after(self._before("get", name), name)
        return self.objects.get(name)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        self._after(self._before("list", prefix), prefix)
        names = sorted((n for n in self.objects if n.startswith(prefix)), key=str.encode)
        for name in names:
            if name in self.unlisted:
                continue
            yield StoredObject(name=name, size_bytes=len(self.objects[name]))

    def delete(self, name: str) -> None:
        after = self._before("delete", name)
        self.objects.pop(name, None)
        self.identities.pop(name, None)
        self._after(after, name)

    def _before(self, operation: str, name: str) -> str | None:
        fault = self.fault(operation, name)
        if fault == "away":
            raise StoreUnusableError(f"{operation} {name}: away", retryable=True)
        if fault == "denied":
            raise StoreDeniedError(f"{operation} {name}: denied")
        if fault == "refused":
            raise StoreUnusableError(f"{operation} {name}: refused", retryable=False)
        return fault

    def _after(self, fault: str | None, name: str) -> None:
        if fault == "lost":
            raise StoreUnusableError(f"{name}: the answer was lost", retryable=True)
