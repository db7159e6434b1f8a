"""What is asked of a supervisor, and whether it holds.

An order holds over deaths of the server and of the supervisor, until the supervisor is called with
other flags, and unless what it asked for has been tried and does not start.
"""

import logging
from pathlib import Path

from common.errors import BackendError
from workers.supervisor.records import ServerRecord, Wanted, read_wanted

log = logging.getLogger(__name__)


class Orders:
    """The orders to one server.

    Args:
        state_dir: Where they are left.
        name: The server's.
        flags: What its supervisor is called with: `ServeOptions.flags`.
        earlier: The record of the supervisor before.

    Attributes:
        serial: Of the last order that was looked at.
        refused: Why that one is not carried out; empty when it is.
    """

    def __init__(
        self, state_dir: Path, name: str, flags: str, earlier: ServerRecord | None
    ) -> None:
        self._state_dir = state_dir
        self._name = name
        self._flags = flags
        self._standing: Wanted | None = None
        self._said = ""
        self.serial = earlier.serial if earlier else 0
        self.refused = earlier.refused if earlier else ""
        found = self._read()
        if found is None:
            return
        tried = found.serial == self.serial and bool(self.refused)
        if found.serial >= self.serial and not tried:
            self.take(found)

    @property
    def standing(self) -> Wanted | None:
        """The order that holds; None when the flags alone count."""
        return self._standing

    def next(self) -> Wanted | None:
        """Give an order that was not looked at yet."""
        found = self._read()
        return found if found is not None and found.serial > self.serial else None

    def take(self, order: Wanted) -> bool:
        """Let an order hold; say whether it does."""
        self.serial = order.serial
        if order.over != self._flags:
            self._standing = None
            self.refused = "it was given over other flags than this supervisor is called with"
            return False
        self._standing, self.refused = order, ""
        return True

    def refuse(self, why: str, instead: Wanted | None) -> None:
        """Take the order back that holds, for what held before it."""
        self._standing, self.refused = instead, why

    def _read(self) -> Wanted | None:
        try:
            return read_wanted(self._state_dir, self._name)
        except BackendError as error:
            if str(error) != self._said:
                self._said = str(error)
                log.warning("%s", error)
            return None
