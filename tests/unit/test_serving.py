"""Servers on TCP whose port anybody on the machine can connect to: nobody keeps the others out by connections that stay open."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from snapshotd.serving import HttpServer, listen_on
from tests.unit.connections import is_open

LIMIT, ROOM = 64, 48
ASK = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
Connect = Callable[[bytes], socket.socket]


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers `/` at once, and all else when the body has come."""
    if scope["path"] != "/":
        await Request(scope, receive).body()
    await PlainTextResponse("yes")(scope, receive, send)


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes a connection that sends something and stays open."""
    with listen_on(0) as listener, contextlib.ExitStack() as opened:
        server = HttpServer(_app, limit_concurrency=LIMIT, lifespan="off", log_config=None)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()

        def make(sent: bytes) -> socket.socket:
            one = opened.enter_context(socket.create_connection(listener.getsockname(), timeout=30))
            one.sendall(sent)
            return one

        yield make
        server.stop_soon()
        thread.join()


def _answer(one: socket.socket) -> bytes:
    said = b""
    with contextlib.suppress(ConnectionError):
        while not said.endswith(b"yes") and (piece := one.recv(4096)):
            said += piece
    return said


@pytest.mark.parametrize(
    ("sent", "is_answered"),
    [
        (b"", False),
        (b"GET / HTTP/1.1\r\nX-Slow: ", False),
        (ASK, True),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1", True),  # the rest of the body never comes
    ],
)
def test_those_who_stay_without_a_request_make_room(connect: Connect, sent: bytes, is_answered: bool) -> None:
    with_request = connect(b"POST /whole HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n12")
    held = []
    for _ in range(3 * LIMIT):
        held.append(connect(sent))
        assert not is_answered or b"200 OK" in _answer(held[-1])
    assert b"200 OK" in _answer(connect(ASK))
    assert sum(map(is_open, held)) <= ROOM
    assert is_open(held[-1])
    with_request.settimeout(30)
    with_request.sendall(b"34")
    assert b"200 OK" in _answer(with_request)


def test_a_body_behind_its_answer_is_not_waited_for(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotd.serving.HEAD_S", 0.2)
    one = connect(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n1")
    assert b"200 OK" in _answer(one)
    one.settimeout(0.05)
    with contextlib.suppress(ConnectionError):
        for _ in range(400):
            one.sendall(b"1")
            with contextlib.suppress(TimeoutError):
                assert one.recv(100) == b""
                break
        else:
            pytest.fail("the connection is still open")


def test_a_server_ends_when_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at its next look nor after a pause: uvicorn sleeps for a tenth of a second each time."""
    sleep, slept = asyncio.sleep, []

    async def sleeping(seconds: float) -> None:
        slept.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleeping)
    with listen_on(0) as listener:
        server = HttpServer(_app, lifespan="off", log_config=None)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        with socket.create_connection(listener.getsockname(), timeout=30) as one:
            one.sendall(ASK)
            assert b"200 OK" in _answer(one)
            server.stop_soon()
            thread.join()
            assert one.recv(1) == b""
    assert max(slept, default=0) < 0.1
    server.stop_soon()  # it has ended
