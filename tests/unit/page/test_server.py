"""The server of the page: it serves one browser, and refuses what does not come from the page."""

from __future__ import annotations

import socket
import threading
import urllib.parse
from pathlib import Path

import pytest

from snapshotd.api.operation import ADMIN
from snapshotd.api.operations import OPERATIONS
from snapshotd.errors import Conflict
from snapshotd.page.server import PageServer
from tests.unit.page.browser import AWAY, Browser


@pytest.fixture
def person(browser: Browser) -> Browser:
    assert browser.sign_in().status == 200
    return browser


def test_the_page_is_served_with_no_script_but_its_own(browser: Browser) -> None:
    answer = browser.ask("GET", "/", Origin="", Sec_Fetch_Site="none")
    assert answer.status == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert browser.ask("GET", "/page.js").headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize(
    "path", ["/server.py", "/../server.py", "/%2e%2e/server.py", "/vendor/../../server.py", "//etc/passwd", "/vendor"]
)
def test_no_other_file_is_served(browser: Browser, path: str) -> None:
    assert browser.ask("GET", path).status == 404


def test_the_token_opens_one_session(browser: Browser) -> None:
    assert browser.ask("GET", "/v1/trajectories").status == 403
    assert browser.sign_in("wrong").status == 403
    opened = browser.sign_in()
    assert opened.status == 200
    attributes = opened.headers["set-cookie"].lower()
    assert "httponly" in attributes
    assert "samesite=strict" in attributes
    assert browser.ask("GET", "/v1/trajectories").status == AWAY
    assert browser.sign_in().status == 403, "a second time"
    assert browser.ask("GET", "/v1/trajectories", Cookie="snapshotd-1=x").status == 403
    assert browser.ask("GET", "/v1/trajectories", Cookie=f"{browser.cookie}x").status == 403


@pytest.mark.parametrize("body", ["", "[]", "{}", "nonsense", '{"token": 1}', '{"token": "\\ud800"}'])
def test_a_malformed_sign_in_opens_nothing(browser: Browser, body: str) -> None:
    assert browser.ask("POST", "/session", body).status in (400, 403)
    assert browser.sign_in().status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "[::1]:{port}"])
@pytest.mark.parametrize("path", ["/", "/v1/trajectories"])
def test_another_name_of_the_host_gets_nothing(person: Browser, host: str, path: str) -> None:
    answer = person.ask("GET", path, Host=host.format(port=person.port))
    assert answer.status == 403
    assert "another host" in answer.text  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://127.0.0.1:1"},
    ],
)
def test_another_page_changes_nothing(person: Browser, headers: dict[str, str]) -> None:
    path = "/v1/approvals/abcd/approve"
    assert person.ask("POST", path, "{}").status == AWAY
    assert person.ask("POST", path, "{}", **headers).status == 403


def test_another_page_reads_nothing(person: Browser) -> None:
    assert person.ask("GET", "/v1/approvals").status == AWAY
    assert person.ask("GET", "/v1/approvals", Sec_Fetch_Site="cross-site").status == 403
    assert person.ask("GET", "/v1/approvals").headers["cross-origin-resource-policy"] == "same-origin"


def test_trees_and_terminals_need_the_session(browser: Browser) -> None:
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec_WebSocket_Version": "13",
        "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    assert browser.ask("GET", "/tree/abcd.tar").status == 403
    assert browser.ask("GET", "/terminal/abcd", **upgrade).status == 403
    browser.sign_in()
    assert browser.ask("GET", "/tree/abcd.tar").status == AWAY
    assert browser.ask("GET", "/tree/abcd.tar", Sec_Fetch_Site="cross-site").status == 403
    for headers in ({"Origin": "http://evil.example"}, {"Origin": ""}, {"Host": "evil.example"}):
        assert browser.ask("GET", "/terminal/abcd", **upgrade, **headers).status == 403, headers
    assert browser.ask("GET", "/terminal/abcd", **upgrade).status == 101


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_a_page_asks_for_nothing_of_an_administrator_and_sends_no_files(person: Browser, name: str) -> None:
    row = OPERATIONS[name]
    places = ("x" * 8,) * row.path.count("{")
    path = "/v1" + urllib.parse.quote(row.path.replace("{ref:path}", "{}").format(*places, **_names(row.path)))
    status = person.ask(row.method, path, None if row.method == "GET" else "{}").status
    assert status == (404 if row.scope == ADMIN or row.is_upload else AWAY)


def _names(path: str) -> dict[str, str]:
    return {part.strip("{}"): "x" * 8 for part in path.split("/") if part.startswith("{") and ":" not in part}


def test_a_taken_port_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(Conflict, match="choose another port"):
        PageServer(str(tmp_path / "s"), port=other.getsockname()[1])


def test_it_ends_when_no_page_is_open(tmp_path: Path) -> None:
    server = PageServer(str(tmp_path / "s"), idle_s=0.05)
    thread = threading.Thread(target=server.run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
