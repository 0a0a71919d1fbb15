"""The page, before an agent that attacks it: all that the agent wrote is text, and the page stays usable."""

from __future__ import annotations

import base64
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests import long
from tests.e2e.hostile_agent import CALLS, PROGRAM, TEXT
from tests.e2e.support import Snap, wait_until
from tests.long import size

pytestmark = [pytest.mark.runc, pytest.mark.timeout(600)]
MANY = size(3000, 100_000)
SEEN = TEXT[:60]
"""As much of the hostile text as every view has room for."""
TABS = ("patch", "output", "arguments", "files", "conversation", "effects", "tasks")

LAG = """new Promise(done => {
    const began = performance.now();
    requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)));
})"""
"""Milliseconds until the page has drawn a frame."""
READ = """async url => {
    const found = await fetch(url, { headers: { "x-snapshotd-page": localStorage.page } });
    return [found.status, Object.fromEntries(found.headers)];
}"""


class Victim:
    """A page that is watched: a script of the agent that ran, a dialog, a page or a request that it made, and words that
    left the screen are all seen."""

    def __init__(self, context: Any, address: str) -> None:
        self.page = context.new_page()
        self.origin = "{0.scheme}://{0.netloc}".format(urlsplit(address))
        self.crimes: list[str] = []
        self.page.on("dialog", lambda dialog: (self.crimes.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("pageerror", lambda error: self.crimes.append(f"an error: {error}"))
        self.page.on("request", self._see_request)
        self.page.on("console", self._see_log)
        context.on("page", lambda page: self.crimes.append(f"another page: {page.url}"))
        self.page.goto(address)
        self.page.locator("nav").wait_for()

    def _see_log(self, said: Any) -> None:
        if said.type == "error" and not said.text.startswith("Failed to load resource"):  # an answer that is an error
            self.crimes.append(f"logged: {said.text}")

    def _see_request(self, request: Any) -> None:
        if not request.url.startswith((f"{self.origin}/", "blob:", "data:")):
            self.crimes.append(f"a request to {request.url}")

    def goes(self, *place: str) -> None:
        """To a view, and waits until it has drawn what it loads."""
        self.page.evaluate("location.hash = '#/machine'")  # what a view remembers is gone then
        self.page.get_by_role("heading", name="This machine").wait_for()
        self.page.evaluate("parts => { location.hash = '#/' + parts.map(encodeURIComponent).join('/') }", list(place))
        self.page.locator(".pad[role=status]").first.wait_for(state="detached", timeout=60_000)

    def sees(self, text: str, within: str) -> Any:
        found = self.page.locator(within).get_by_text(text).first
        found.wait_for(timeout=60_000)
        return found

    def is_safe(self) -> None:
        """Nothing of the agent runs, is an element of its own, or pushes the page out of its window."""
        assert self.page.evaluate("window.hacked") is None
        assert self.crimes == []
        found = self.page.evaluate(
            "[...document.body.querySelectorAll('script, iframe, img, object, embed, style, link, [onload], [onerror],"
            ' [onfocus], [href^="javascript:"], [href^="http"]\')].map(one => one.outerHTML.slice(0, 100))'
        )
        assert found == []
        width, room = self.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width <= room, "the page scrolls sideways"
        unseen = self.page.evaluate(
            r"document.body.innerText.match(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u202a-\u202e"
            r"\u2060-\u2069\u3164\ufeff\u{e0000}-\u{e007f}]/gu)"
        )
        assert unseen is None, "characters that nobody sees"


@pytest.fixture(scope="module")
def attacked(own_snap: Snap, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The ids of the snapshots of the hostile run, by number; its last call waits for a person."""
    agent = tmp_path_factory.mktemp("hostile") / "<img src=x onerror=hacked=1>.py"
    agent.write_text(PROGRAM)
    own_snap("run", "--detach", "--runtime", "runc", "--name", "hostile", agent, str(MANY))
    wait_until(lambda: own_snap.json("approvals") or own_snap.json("ls")[0]["status"] != "running", "it asks", 240)
    found = [one["id"] for one in own_snap.json("log", "hostile")]
    assert len(found) == len(CALLS) + 1, own_snap("log", "hostile").stdout
    own_snap("tag", found[1], "tag<img src=x onerror=hacked=1>", code=None)
    yield found
    own_snap("rm", "--force", "hostile")


@pytest.fixture(scope="module")
def address(own_snap: Snap, attacked: list[str]) -> Iterator[str]:
    """Of a page that nobody has opened yet."""
    server = own_snap.follow("ui", "--print")
    assert server.stdout is not None
    yield server.stdout.readline().strip()
    server.send_signal(signal.SIGTERM)
    server.communicate(timeout=60)


@pytest.fixture(scope="module")
def victim(chromium: Any, address: str) -> Iterator[Victim]:
    context = chromium.new_context(viewport={"width": 1200, "height": 800}, accept_downloads=True)
    yield Victim(context, address)
    context.close()


@pytest.fixture(autouse=True)
def safe(victim: Victim) -> Iterator[None]:
    """After each test, and at two widths: nothing has happened."""
    victim.crimes.clear()
    yield
    for width in (360, 1200):
        victim.page.set_viewport_size({"width": width, "height": 800})
        victim.is_safe()


@pytest.mark.parametrize(
    ("number", "tab"),
    [
        pytest.param(
            number,
            tab,
            id=f"{call}-{tab}",
            marks=() if tab == TABS[number % len(TABS)] and number % 2 else pytest.mark.long,
        )
        for number, call in enumerate(CALLS, 1)
        for tab in TABS
    ],
)
def test_each_tab_of_each_call_shows_text(victim: Victim, attacked: list[str], number: int, tab: str) -> None:
    victim.goes("t", "hostile", attacked[number], tab)
    victim.sees(f"call {number}", ".inspector header")
    victim.is_safe()


@pytest.mark.long  # the same texts in each tab: the test before
def test_what_was_said_and_done_is_shown_as_it_was_written(victim: Victim, attacked: list[str]) -> None:
    victim.goes("t", "hostile", attacked[1], "conversation")
    assert TEXT in victim.page.locator(".conversation").inner_text().replace("\n", "")
    assert "<202E>gnp.exe<202C>" in victim.page.locator(".conversation").inner_text()
    looks = victim.page.locator(".conversation article").evaluate_all("all => all.map(one => one.className)")
    assert set(looks) <= {"", "tool"}, "no message looks like a part of the page"
    assert SEEN in victim.page.locator(".calls").inner_text()
    victim.goes("t", "hostile", attacked[2])
    victim.sees("<1B>]8;;http://evil.example/<07>link", ".inspector header")
    victim.goes("t", "hostile", attacked[3], "output")
    output = victim.page.locator(".lines").inner_text()
    assert SEEN in output
    assert "<202E>gnp.exe" in output
    assert "title" not in output, "a terminal would not show it either"
    assert victim.page.locator(".lines a").count() == 0
    assert victim.page.title().endswith("snapshotd")


@pytest.mark.long  # what a terminal may do: test_a_terminal_on_a_throw_away_fork in test_page.py
def test_the_clipboard_stays_as_it_was(victim: Victim, attacked: list[str], address: str) -> None:
    context = victim.page.context
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=victim.origin)
    victim.page.bring_to_front()
    victim.page.evaluate("navigator.clipboard.writeText('mine')")
    victim.goes("t", "hostile", attacked[3], "output")
    victim.goes("terminal", attacked[3])
    rows = victim.page.locator(".xterm-rows")
    rows.get_by_text("#").first.wait_for(timeout=60_000)
    victim.page.keyboard.type(
        r"printf '\033]52;c;aGFja2Vk\007\033]0;hacked\007\033]8;;http://evil.example/\007a link\033]8;;\007 s''een'"
        "\n"
    )
    rows.get_by_text("a link seen").last.wait_for()
    assert victim.page.evaluate("navigator.clipboard.readText()") == "mine"
    assert victim.page.title().endswith("snapshotd")
    link = rows.get_by_text("a link seen").last.bounding_box()
    victim.page.mouse.move(link["x"] + 10, link["y"] + 5)
    victim.page.mouse.click(link["x"] + 10, link["y"] + 5)
    assert victim.page.url.startswith(victim.origin)
    victim.page.keyboard.type("exit\n")
    victim.sees("the shell has ended", ".tty")


@pytest.mark.long  # one that is cut: test_page.py, as a file
def test_a_megabyte_is_cut_and_the_page_goes_on(victim: Victim, attacked: list[str]) -> None:
    for tab in ("output", "arguments", "conversation"):
        began = time.monotonic()
        victim.goes("t", "hostile", attacked[4], tab)
        assert time.monotonic() - began < 10
        assert len(victim.page.locator(".inspector").inner_text()) < 100_000
        assert tab != "output" or victim.sees("more characters", ".lines")
        lag = victim.page.evaluate(LAG)
        assert lag < 2000, "a frame comes soon"


def test_hostile_files_are_listed_shown_and_stored_and_never_opened(
    victim: Victim, attacked: list[str], own_snap: Snap
) -> None:
    victim.goes("t", "hostile", attacked[5], "files")
    listed = victim.sees("page.html", ".files").locator("xpath=ancestor::table").inner_text()
    for name in ("<script>window.hacked", "bytes-", "<202E>gnp.exe", "name of two lines", "bomb.zip", "loop-a", "fifo"):
        assert name in listed, name
    for name in ("page.html", "page.svg", "page.xhtml", "script.js"):
        victim.page.locator(".files").get_by_role("button", name=name).click()
        victim.sees(SEEN, ".lines")
        with victim.page.expect_download() as download:
            victim.page.get_by_role("button", name="Download").click()
        assert download.value.url.startswith(victim.origin), "the browser stores it, and no page holds it"
        assert download.value.suggested_filename.startswith(name.partition(".")[0])
        assert TEXT in Path(download.value.path()).read_text()
        victim.page.locator(".crumbs").get_by_role("button", name="workspace").click()
    victim.page.locator(".files").get_by_role("button", name="bomb.zip").click()
    victim.sees("that are no text", ".inspector")
    victim.page.locator(".crumbs").get_by_role("button", name="workspace").click()
    for name in ("loop-a", "round", "out", "fifo"):
        assert victim.page.locator(".files").get_by_role("button", name=name).is_disabled()


def test_a_file_whose_name_is_no_text_is_shown(victim: Victim, attacked: list[str]) -> None:
    victim.goes("t", "hostile", attacked[5], "files")
    victim.page.locator(".files").get_by_role("button", name="bytes-").click()
    victim.sees("invalid", ".lines")
    with victim.page.expect_download() as download:
        victim.page.get_by_role("button", name="Download").click()
    assert Path(download.value.path()).read_bytes().startswith(b"invalid \xff\xfe\xc0\x80 text\n")


def test_a_download_has_no_name_that_misleads(victim: Victim, attacked: list[str]) -> None:
    victim.goes("t", "hostile", attacked[5], "files")
    victim.page.locator(".files").get_by_role("button", name="controls-").click()
    with victim.page.expect_download() as download:
        victim.page.get_by_role("button", name="Download").click()
    assert "\u202e" not in download.value.suggested_filename


@pytest.mark.long  # hostile ones are, too: two tests before
def test_a_folder_of_many_files_is_listed(victim: Victim, attacked: list[str]) -> None:
    victim.goes("t", "hostile", attacked[6], "files")
    victim.page.locator(".files").get_by_role("button", name="many/").click()
    victim.sees("000000", ".files")
    victim.sees(f"and {MANY - 2000} more", ".inspector")


@pytest.mark.parametrize("name", long.some(["page.html", "page.svg", "page.xhtml", "script.js"], 2))
def test_a_file_that_is_opened_by_its_address_is_a_download(victim: Victim, attacked: list[str], name: str) -> None:
    """A person may open what the page reads, in a tab of its own: nothing of it runs there."""
    for path in (f"/v1/files/{attacked[5]}/content", f"/v1/snapshots/{attacked[5]}/file"):
        encoded = base64.urlsafe_b64encode(f"workspace/{name}".encode()).decode()
        status, headers = victim.page.evaluate(READ, f"{path}?path_b64={encoded}")
        assert status == 200
        assert headers["content-disposition"].startswith("attachment")
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "sandbox" in headers["content-security-policy"]
        assert "html" not in headers["content-type"]


@pytest.mark.long  # the digest: test_page.py; text: the tabs of a call
def test_the_inbox_shows_text_and_the_digest(victim: Victim, own_snap: Snap) -> None:
    victim.goes("approvals")
    victim.sees(SEEN, ".inbox section")
    victim.sees("<202E>gnp.exe", ".inbox section")
    victim.page.get_by_role("button", name="Approve…").click()
    (asked,) = own_snap.json("approvals")
    victim.sees(asked["digest"], ".confirm")
    victim.is_safe()
    victim.page.get_by_role("button", name="Back").click()


@pytest.mark.parametrize(
    "place",
    long.some(
        [(), ("t", "hostile"), ("tree", "hostile"), ("experiments",), ("machine",), ("compare", "hostile", "hostile")],
        3,
    ),
)
def test_other_views_show_text(victim: Victim, place: tuple[str, ...]) -> None:
    victim.goes(*place)


@pytest.mark.parametrize(
    "place",
    long.some(
        [
            "t/%3Cimg src=x onerror=hacked=1%3E",
            "t/%E0%A4%A",
            "experiments/<svg onload=hacked=1>",
            "s/../../evil",
            "terminal/x%22y",
            "t/__proto__/constructor",
        ],
        2,
    ),
)
def test_an_address_that_somebody_sends_does_nothing(victim: Victim, place: str) -> None:
    victim.page.evaluate("place => { location.hash = '#/' + place }", place)
    victim.page.locator(".panes").wait_for()
    victim.goes("t", "hostile")
    victim.sees("hostile", ".trajectory.on")
