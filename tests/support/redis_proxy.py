"""A TCP proxy before Redis that can lose answers: what was asked is done, nobody hears of it.

Or the path itself, as a firewall that has forgotten its connections: nothing passes, nothing ends.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator


class RedisProxy:
    """Passes bytes on. With `losing` above 0, an answer is swallowed and its connection cut.

    Args:
        port: Of the Redis behind it, on loopback.
        delay_s: How long each piece takes, either way.

    Attributes:
        target: That port; may change while nobody is connected.
        delay_s: May be changed at any time.
        shut: Connections are cut as they come.
        holding: Nothing passes and no connection ends, see `hold`.
        held: Pieces that were swallowed by that, and connections that were taken meanwhile.
        losing: How many answers are still to be lost; each counts it down.
        lost: How many were.
        answers: Pieces of answers so far: at least one for each time that a client waited.
    """

    def __init__(self, port: int, *, delay_s: float = 0.0) -> None:
        self.target = port
        self.delay_s = delay_s
        self.shut = False
        self.holding = False
        self.held = 0
        self._dead: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.losing = 0
        self.lost = 0
        self.answers = 0
        self._spawn(self._accept)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def hold(self) -> None:
        """Let nothing pass and end nothing until `release`; then only new connections work.

        Those of before and of meanwhile stay open and pass nothing any more.
        """
        self.holding = True
        self._dead |= self._open

    def release(self) -> None:
        self.holding = False

    def cut(self) -> None:
        """Break every connection that is open."""
        for each in list(self._open):
            self._cut(each)

    def close(self) -> None:
        """Cut everything and wait for the threads."""
        self._cut(self._listener)
        self.cut()
        for thread in self._threads:
            thread.join(5)

    def _spawn(self, target: Callable[..., None], *args: socket.socket) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.holding:
                    self._bury(client)
                    continue
                server = None if self.shut else self._reach()
                if server is None:
                    self._cut(client)
                    continue
                self._open |= {client, server}
                self._spawn(self._ask, client, server)
                self._spawn(self._answer, server, client)

    def _reach(self) -> socket.socket | None:
        """Connect to the Redis behind; None where it is away, which is no reason to end."""
        try:
            return socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            return None

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 20):
                time.sleep(self.delay_s)
                if self._holds(client):
                    continue
                server.sendall(data)
        self._cut(client)
        self._cut(server)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                time.sleep(self.delay_s)
                if self._holds(client):
                    continue
                self.answers += 1
                if self.losing > 0:
                    self.losing -= 1
                    self.lost += 1
                    break
                client.sendall(data)
        self._cut(server)
        self._cut(client)

    def _holds(self, client: socket.socket) -> bool:
        """Say whether this connection passes nothing; one of meanwhile is dead as well."""
        if self.holding:
            self._dead.add(client)
        if client not in self._dead:
            return False
        self.held += 1
        return True

    def _bury(self, client: socket.socket) -> None:
        """Keep a connection that nothing is read from."""
        self._open.add(client)
        self._dead.add(client)
        self.held += 1

    def _cut(self, which: socket.socket) -> None:
        with contextlib.suppress(OSError):
            which.shutdown(socket.SHUT_RDWR)
        which.close()
        self._open.discard(which)


@contextlib.contextmanager
def redis_proxy(port: int, *, delay_s: float = 0.0) -> Iterator[RedisProxy]:
    """Run a proxy for a while."""
    proxy = RedisProxy(port, delay_s=delay_s)
    try:
        yield proxy
    finally:
        proxy.close()
