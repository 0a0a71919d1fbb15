"""What other users of the machine, other pages of the browser, and programs that speak no proper HTTP try on the page's
server: each gets nothing, and costs nothing."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import socket
from pathlib import Path

import pytest

from snapshotd.api.operations import OPERATIONS
from snapshotd.page.server import PAGE_KEY, PageServer
from tests.unit.page.browser import AWAY, Browser, serving

MIB = 1 << 20


@pytest.fixture
def person(browser: Browser) -> Browser:
    assert browser.sign_in().status == 200
    assert browser.ask("GET", "/v1/approvals").status == AWAY
    return browser


def _speak(browser: Browser, head: str, body: bytes = b"", *, leave: bool = False) -> tuple[int, bytes]:
    """The status and all that the server answers to these bytes; 0: it hangs up. `leave`: send no more."""
    answer = b""
    with socket.create_connection(("127.0.0.1", browser.port), timeout=60) as connection:
        with contextlib.suppress(ConnectionError):  # it does not read to the end what it refuses
            connection.sendall(head.replace("\n", "\r\n").encode("latin-1") + body)
            if leave:
                connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(1 << 16):
                answer += piece
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", answer)
    return (int(found[1]) if found else 0), answer


def _decision(browser: Browser, *lines: str, host: str | None = None) -> str:
    """The head of a request that approves a call, as the page sends it, and these lines."""
    known = {"Host": host or browser.host, "Origin": f"http://{browser.host}", "Cookie": browser.cookie}
    known |= {PAGE_KEY: browser.key, "Content-Type": "application/json", "Connection": "close"}
    return "\n".join(
        [
            "POST /v1/approvals/abcd/approve HTTP/1.1",
            *(f"{name}: {text}" for name, text in known.items()),
            *lines,
            "",
            "",
        ]
    )


@pytest.mark.parametrize(
    "lines",
    [
        ("Content-Length: 2", "Content-Length: 40"),
        ("Content-Length: 2, 40",),
        ("Content-Length: 2", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding: chunked, identity",),
        ("Content-Length: +2",),
        ("Content-Length: -2",),
        ("Content-Length: 0x2",),
        ("Content-Length : 2",),
        ("Content-Length: 2", "Host: evil.example"),
        ("Content-Length: 2", " folded: yes"),
        ("Content-Length: 2", "Na\x00me: x"),
    ],
)
def test_a_request_that_can_be_read_in_two_ways_gets_nothing(person: Browser, lines: tuple[str, ...]) -> None:
    assert _speak(person, _decision(person, "Content-Length: 2"), b"{}")[0] == AWAY
    status, answer = _speak(person, _decision(person, *lines), b"{}\r\n\r\nGET /v1/approvals HTTP/1.1\r\n\r\n")
    assert status in (0, 400, 403), answer
    assert answer.count(b"HTTP/1.1") <= 1, "the rest is no second request"


def test_a_request_behind_the_end_of_another_has_to_be_allowed_itself(person: Browser) -> None:
    second = f"GET /v1/approvals HTTP/1.1\r\nHost: {person.host}\r\nConnection: close\r\n\r\n".encode()
    head = _decision(person, "Content-Length: 2").replace("Connection: close\n", "")
    _, answer = _speak(person, head, b"{}" + second)
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [str(AWAY).encode(), b"403"]


@pytest.mark.parametrize("target", ["http://evil.example/v1/approvals", "//evil.example/v1/approvals", "*"])
def test_a_target_that_names_another_host_gets_nothing(person: Browser, target: str) -> None:
    status, answer = _speak(person, f"GET {target} HTTP/1.1\nHost: {person.host}\nConnection: close\n\n")
    assert status in (0, 400, 403, 404), answer


@pytest.mark.parametrize("version", ["HTTP/1.0", "HTTP/0.9", "HTTP/2", "ICY"])
def test_a_request_without_a_host_gets_nothing(person: Browser, version: str) -> None:
    status, answer = _speak(
        person, f"GET /v1/approvals {version}\nCookie: {person.cookie}\n{PAGE_KEY}: {person.key}\n\n"
    )
    assert status in (0, 400, 403), answer


@pytest.mark.parametrize("what", ["header", "headers", "name", "address"])
def test_a_huge_head_is_refused_and_not_kept(browser: Browser, what: str) -> None:
    before = _resident_bytes()
    huge = {
        "header": f"GET / HTTP/1.1\nHost: {browser.host}\nX: {'x' * 64 * MIB}\n\n",
        "headers": f"GET / HTTP/1.1\nHost: {browser.host}\n" + "X: x\n" * (8 * MIB) + "\n",
        "name": f"GET / HTTP/1.1\nHost: {browser.host}\n{'x' * 64 * MIB}: x\n\n",
        "address": f"GET /{'x' * 64 * MIB} HTTP/1.1\nHost: {browser.host}\n\n",
    }[what]
    status, _ = _speak(browser, huge)
    del huge
    assert status in (0, 400, 431)
    assert _resident_bytes() - before < 160 * MIB, "its own bytes, and not the server's too"
    assert browser.sign_in().status == 200


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("body", [b" " * 64 * MIB, b"[" * 1000, b"[" * MIB, b'{"token": "' + b"x" * MIB])
def test_a_sign_in_of_any_size_opens_nothing(browser: Browser, body: bytes) -> None:
    head = f"POST /session HTTP/1.1\nHost: {browser.host}\nOrigin: http://{browser.host}\nContent-Length: {len(body)}\n"
    status, answer = _speak(browser, f"{head}Connection: close\n\n", body)
    assert status in (0, 400), answer
    assert browser.sign_in().status == 200


def test_a_sign_in_that_breaks_off_opens_nothing(browser: Browser, capfd: pytest.CaptureFixture[str]) -> None:
    _speak(
        browser,
        f"POST /session HTTP/1.1\nHost: {browser.host}\nOrigin: http://{browser.host}\nContent-Length: 90\n\n",
        b"{",
        leave=True,
    )
    assert browser.sign_in().status == 200
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "media", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/json"]
)
def test_a_form_of_another_page_decides_nothing(person: Browser, media: str) -> None:
    """A browser sends these without asking first, with the cookie where a site is the same."""
    path = "/v1/approvals/abcd/approve"
    assert person.ask("POST", path, "{}", Content_Type=media).status == AWAY
    for origin, site in (
        ("http://evil.example", "cross-site"),
        ("http://127.0.0.1:1", "same-site"),
        ("null", "cross-site"),
    ):
        assert person.ask("POST", path, "{}", Content_Type=media, Origin=origin, Sec_Fetch_Site=site).status == 403
        assert person.ask("POST", path, "{}", Content_Type=media, Origin=origin, Sec_Fetch_Site="").status == 403


def test_a_server_on_another_port_has_the_cookie_and_no_key(person: Browser) -> None:
    """Cookies do not tell ports apart: each server that the person's browser goes to on this address is sent it."""
    for path in ("/v1/approvals", "/tree/abcd.tar"):
        assert person.ask("GET", path).status == AWAY
        assert person.ask("GET", path, x_snapshotd_page="").status == 403
        assert person.ask("GET", path, x_snapshotd_page=f"{person.key}x").status == 403
        assert person.ask("GET", f"{path}?page=x", x_snapshotd_page="").status == 403
        assert person.ask("GET", f"{path}?page={person.key}", x_snapshotd_page="").status == AWAY
        assert person.ask("GET", path, Cookie="").status == 403, "nor is the key enough"


def test_a_wrong_token_does_not_close_the_page(browser: Browser) -> None:
    for token in ("", "x", browser.token[:-1], f"{browser.token} ", browser.token.lower()):
        assert browser.sign_in(token).status == 403
    assert browser.sign_in().status == 200


def test_a_session_ends_with_its_server(tmp_path: Path) -> None:
    with serving(PageServer(str(tmp_path / "a"))) as old:
        assert old.sign_in().status == 200
    with serving(PageServer(str(tmp_path / "a"), port=old.port)) as browser:
        browser.cookie, browser.key = old.cookie, old.key
        assert browser.ask("GET", "/v1/approvals").status == 403
        assert browser.sign_in(old.token).status == 403
        assert browser.sign_in().status == 200
        browser.cookie, browser.key = old.cookie, old.key
        assert browser.ask("GET", "/v1/approvals").status == 403


@pytest.mark.parametrize("name", ["", "/", "index.html", "page.js", "session", "v1/approvals", "tree/a.tar", "nothing"])
def test_nothing_is_shown_in_a_frame(person: Browser, name: str) -> None:
    """An approval that is drawn over by another page could be clicked unseen."""
    answer = person.ask("GET", f"/{name.lstrip('/')}")
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["access-control-allow-origin"] is None


@pytest.mark.parametrize("place", ["..", ".", "%2e%2e", "%2E."])
def test_a_name_leads_to_no_other_operation(person: Browser, place: str) -> None:
    for row in OPERATIONS.values():
        if "{" in row.path:
            path = "/v1" + re.sub(r"\{[\w:]+\}", place, row.path)
            assert person.ask(row.method, path, None if row.method == "GET" else "{}").status == 404, path


@pytest.mark.parametrize("ref", ["x%0d%0aSet-Cookie:%20a=b", "x%22;%20filename=evil.html;%20x=%22"])
def test_a_name_adds_no_header(person: Browser, ref: str) -> None:
    answer = person.ask("GET", f"/tree/{ref}.tar")
    assert answer.headers["set-cookie"] is None
    assert "evil" not in answer.headers.get("content-disposition", "")


HANDSHAKE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": base64.b64encode(b"x" * 16).decode(),
}


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({}, 101),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Cookie": ""}, 403),
        ({"page": "x"}, 403),
        ({"page": ""}, 403),
    ],
)
def test_a_terminal_is_the_pages_own(person: Browser, changed: dict[str, str], status: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", person.port, timeout=30)
    sent = {**person.page, **HANDSHAKE, "Cookie": person.cookie, "page": person.key, **changed}
    connection.putrequest("GET", f"/terminal/abcd?page={sent.pop('page')}", skip_host=True, skip_accept_encoding=True)
    for name, text in sent.items():
        if text:
            connection.putheader(name, text)
    connection.endheaders()
    assert connection.getresponse().status == status
    connection.close()


def test_a_body_of_json_is_no_sign_in_of_another_page(browser: Browser) -> None:
    """Another page that knew the token could open the session in place of the person: its origin is refused."""
    body = json.dumps({"token": browser.token})
    assert (
        browser.ask("POST", "/session", body, Origin="http://evil.example", Sec_Fetch_Site="cross-site").status == 403
    )
    assert browser.sign_in().status == 200
