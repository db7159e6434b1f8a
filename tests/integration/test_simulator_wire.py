"""The simulator's HTTP, byte by byte: what clients may send, and how connections end."""

import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from workers.simulator.launch import SimulatorProcess

BODY = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":4}'
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
KEEP_ALIVE_S = 0.5


@pytest.fixture(scope="module")
def simulator() -> Iterator[SimulatorProcess]:
    with SimulatorProcess(servers=1, latency="0", keep_alive=KEEP_ALIVE_S) as simulator:
        yield simulator


@pytest.fixture
def client(simulator: SimulatorProcess) -> Iterator[socket.socket]:
    with closing(socket.create_connection(("127.0.0.1", simulator.ports[0]), 10)) as client:
        yield client


def whole(body: bytes = BODY) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


def read_reply(client: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of the next reply."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.recv(1)
    head = data[:-4]
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    body = b""
    while len(body) < length:
        body += client.recv(length - len(body))
    return head, body


def test_a_connection_serves_many_requests(client: socket.socket) -> None:
    for _ in range(3):
        client.sendall(whole())
        head, body = read_reply(client)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b'"content":"sim:' in body


def test_a_request_may_come_in_pieces(client: socket.socket) -> None:
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for place in range(0, len(whole()), 7):
        client.sendall(whole()[place : place + 7])

    assert read_reply(client)[0].startswith(b"HTTP/1.1 200")


def test_requests_sent_ahead_are_answered_in_order(client: socket.socket) -> None:
    client.sendall(whole() + HEALTH + whole())

    lengths = [len(read_reply(client)[1]) for _ in range(3)]

    assert lengths[0] == lengths[2] > 0 == lengths[1]


def test_a_chunked_body_is_joined(client: socket.socket) -> None:
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:10], BODY[10:])]
    client.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks[0])
    client.sendall(chunks[1] + b"0\r\n\r\n")

    assert read_reply(client)[0].startswith(b"HTTP/1.1 200")


def test_a_client_that_expects_to_be_asked_is_asked(client: socket.socket) -> None:
    head = b"content-length: %d\r\nexpect: 100-continue\r\n\r\n" % len(BODY)
    client.sendall(HEAD + head)
    asked = client.recv(100)
    client.sendall(BODY)

    assert asked == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert read_reply(client)[0].startswith(b"HTTP/1.1 200")


def test_a_large_body_is_taken(client: socket.socket) -> None:
    body = b'{"prompt":"%s"}' % (b"x" * 3_000_000)
    client.sendall(whole(body).replace(b"chat/completions", b"completions"))

    head, answer = read_reply(client)

    assert head.startswith(b"HTTP/1.1 400")
    assert b"is longer than the model's context length" in answer


def test_close_is_honoured(client: socket.socket) -> None:
    client.sendall(HEALTH.replace(b"host: x\r\n", b"host: x\r\nConnection: close\r\n"))

    head, _ = read_reply(client)

    assert b"\r\nconnection: close" in head
    assert client.recv(1) == b""


@pytest.mark.parametrize(
    "junk",
    [b"hello\r\n\r\n", HEAD + b"content-length: many\r\n\r\n", b"x" * 70_000],
    ids=["no request line", "no length", "no end"],
)
def test_what_is_not_http_is_refused_and_closed(client: socket.socket, junk: bytes) -> None:
    client.sendall(junk)

    head, _ = read_reply(client)

    assert head.startswith(b"HTTP/1.1 400")
    assert client.recv(1) == b""


def test_an_idle_connection_is_closed_after_its_time(client: socket.socket) -> None:
    client.sendall(HEALTH)
    read_reply(client)
    began = time.monotonic()

    assert client.recv(1) == b""
    assert time.monotonic() - began >= KEEP_ALIVE_S


def test_a_request_that_runs_is_not_idle() -> None:
    latency = 3 * KEEP_ALIVE_S
    options = {"latency": str(latency), "keep_alive": str(KEEP_ALIVE_S)}
    with SimulatorProcess(log=None, faults=(), servers=1, **options) as simulator:
        address = ("127.0.0.1", simulator.ports[0])
        with closing(socket.create_connection(address, 10)) as client:
            client.sendall(whole())
            assert read_reply(client)[0].startswith(b"HTTP/1.1 200")
