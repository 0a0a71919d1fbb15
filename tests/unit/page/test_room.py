"""Room for the person who has the page open, whatever other users of the machine do with its port."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import socket
import time
from collections.abc import Iterator

import pytest

import snapshotd.serving
from snapshotd.page import server
from snapshotd.page.owner import find_owner
from snapshotd.page.room import OTHER_MAX, OTHERS_MAX, OWN_MAX
from tests.capabilities import require
from tests.unit.connections import is_open
from tests.unit.page.browser import AWAY, Browser

_STRANGER = 54321


@contextlib.contextmanager
def _acting_as(uid: int) -> Iterator[None]:
    """Sockets that this thread makes are this user's: setfsuid(2)."""
    require("root")
    libc = ctypes.CDLL(None)
    libc.setfsuid(uid)
    try:
        yield
    finally:
        libc.setfsuid(os.geteuid())


def _hold(browser: Browser, count: int, sent: bytes = b"") -> list[socket.socket]:
    """So many connections that ask for nothing, or begin to. They are closed when the list goes."""
    held = []
    for _ in range(count):
        held.append(socket.create_connection(("127.0.0.1", browser.port), timeout=30))
        with contextlib.suppress(ConnectionError):
            held[-1].sendall(sent)
    return held


def _waits_until_closed(connection: socket.socket) -> None:
    connection.settimeout(30)
    with contextlib.suppress(ConnectionError):
        assert connection.recv(1) == b""


def test_the_kernel_tells_who_opened_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for uid in (_STRANGER, os.geteuid()):
            with _acting_as(uid):
                other = socket.create_connection(listener.getsockname())
            accepted, _ = listener.accept()
            with other, accepted:
                assert find_owner(accepted) == uid
    assert find_owner(accepted) is None, "nothing is told of a closed one"


HALF_SIGN_IN = (
    b"POST /session HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nOrigin: http://127.0.0.1:%d\r\nContent-Length: 90\r\n\r\n{"
)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n", HALF_SIGN_IN])
def test_connections_of_another_user_leave_room(browser: Browser, sent: bytes) -> None:
    with _acting_as(_STRANGER):
        held = _hold(browser, 300, sent % ((browser.port,) * sent.count(b"%d")))
    assert browser.sign_in().status == 200
    assert browser.ask("GET", "/v1/approvals").status == AWAY
    with contextlib.ExitStack() as own:
        for _ in range(OWN_MAX - 2):
            own.enter_context(contextlib.closing(http.client.HTTPConnection("127.0.0.1", browser.port))).connect()
        assert browser.ask("GET", "/v1/approvals").status == AWAY
    assert sum(map(is_open, held)) == OTHER_MAX


def test_many_users_have_little_room_together(browser: Browser) -> None:
    held = []
    for uid in range(_STRANGER, _STRANGER + 12):
        with _acting_as(uid):
            held += _hold(browser, OTHER_MAX)
    assert browser.sign_in().status == 200
    assert sum(map(is_open, held)) == OTHERS_MAX


def test_room_comes_back_when_a_connection_ends(browser: Browser) -> None:
    for _ in range(3):
        with _acting_as(_STRANGER):
            held = _hold(browser, OTHER_MAX)
        assert browser.ask("GET", "/").status == 200
        assert all(map(is_open, held))
        for one in held:
            one.shutdown(socket.SHUT_WR)
            _waits_until_closed(one)


def test_the_page_belongs_to_whoever_signs_in(browser: Browser) -> None:
    with _acting_as(_STRANGER):
        assert browser.sign_in().status == 200
        held = _hold(browser, 2 * OTHER_MAX)
        assert browser.ask("GET", "/v1/approvals").status == AWAY
    assert all(map(is_open, held))


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nX"])
def test_a_head_that_does_not_come_is_not_waited_for(
    browser: Browser, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(snapshotd.serving, "HEAD_S", 0.1)
    (held,) = _hold(browser, 1, sent)
    _waits_until_closed(held)


def test_a_head_behind_an_answer_is_not_waited_for(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshotd.serving, "HEAD_S", 0.3)
    (held,) = _hold(browser, 1)
    with held:
        until = time.monotonic() + 3 * snapshotd.serving.HEAD_S
        while time.monotonic() < until:  # each request in time
            held.sendall(f"GET /nothing HTTP/1.1\r\nHost: {browser.host}\r\n\r\n".encode())
            answer = b""
            while not answer.endswith(b"}}"):
                answer += held.recv(1 << 16)
        held.sendall(b"G")
        _waits_until_closed(held)


def test_a_connection_waits_for_the_next_request(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshotd.serving, "IDLE_S", 0.1)
    (held,) = _hold(browser, 1, f"GET /nothing HTTP/1.1\r\nHost: {browser.host}\r\n\r\n".encode())
    with held:
        while not held.recv(1 << 16).endswith(b"}}"):
            pass
        _waits_until_closed(held)


def test_a_sign_in_that_does_not_come_is_not_waited_for(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_S", 0.1)
    (held,) = _hold(browser, 1, HALF_SIGN_IN % (browser.port, browser.port))
    with held:
        assert held.recv(1 << 16).startswith(b"HTTP/1.1 400")
    assert browser.sign_in().status == 200


def test_a_file_is_kept_by_a_browser_under_an_address_that_names_its_content(browser: Browser) -> None:
    page = browser.ask("GET", "/").text  # type: ignore[attr-defined]
    script = next(part for part in page.split('"') if part.startswith("page.js"))
    kept = browser.ask("GET", f"/{script}")
    assert "immutable" in kept.headers["cache-control"]
    assert kept.headers["x-content-type-options"] == "nosniff"
    for path in ("/", "/page.js", f"/{script}x", f"/style.css?{script.partition('?')[2]}"):
        assert browser.ask("GET", path).headers.get_all("cache-control") == ["no-store"]
    assert json.loads(browser.ask("GET", "/nothing?v=x").text)["error"]["code"] == "NotFound"  # type: ignore[attr-defined]
