"""A TCP proxy before Redis that can lose answers: what was asked is done, nobody hears of it."""

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
        losing: How many answers are still to be lost; each counts it down.
        lost: How many were.
    """

    def __init__(self, port: int, *, delay_s: float = 0.0) -> None:
        self._target = port
        self._delay_s = delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.losing = 0
        self.lost = 0
        self._spawn(self._accept)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def close(self) -> None:
        """Cut everything and wait for the threads."""
        self._cut(self._listener)
        for each in list(self._open):
            self._cut(each)
        for thread in self._threads:
            thread.join(5)

    def _spawn(self, target: Callable[..., None], *args: socket.socket) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._open |= {client, server}
                self._spawn(self._ask, client, server)
                self._spawn(self._answer, server, client)

    def _ask(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 20):
                time.sleep(self._delay_s)
                server.sendall(data)
        self._cut(client)
        self._cut(server)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                time.sleep(self._delay_s)
                if self.losing > 0:
                    self.losing -= 1
                    self.lost += 1
                    break
                client.sendall(data)
        self._cut(server)
        self._cut(client)

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
