"""A page that stays open while the daemon dies, trajectories go, and other tabs come: what it shows is so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.page_rig import Person
from tests.e2e.support import Snap

pytestmark = [pytest.mark.runc, pytest.mark.timeout(600)]
TABS = 120
OPEN_STREAMS = """async count => {
    const open = () => new Promise((done, failed) => {
        const socket = new WebSocket(`ws://${location.host}/events/watch?page=${localStorage.page}`);
        Object.assign(socket, { onmessage: () => done(socket), onclose: failed });
        setTimeout(() => failed("a stream of events does not begin"), 20_000);
    });
    const streams = await Promise.all(Array.from({ length: count }, open));
    const asked = await fetch("/v1/version", {
        headers: { "x-snapshotd-page": localStorage.page }, signal: AbortSignal.timeout(20_000),
    });
    for (const one of streams) one.close();
    return asked.status;
}"""


@pytest.fixture
def sandbox(own_snap: Snap) -> Iterator[str]:
    own_snap.create("--name", "kept")
    yield "kept"
    own_snap("rm", "--force", "kept", code=None)


@pytest.mark.long  # with rows that were not read: test_rows_that_could_not_be_read_are_read_later
def test_a_page_goes_on_with_the_daemon_that_follows(own_snap: Snap, person: Person, sandbox: str) -> None:
    own_snap("exec", sandbox, "--", "echo", "before")
    person.opens(sandbox)
    person.sees("echo before", ".calls")
    own_snap.kill_daemon()
    person.page.locator(".away").wait_for()
    for number in range(3):
        own_snap("exec", sandbox, "--", "echo", f"after {number}")
    person.page.locator(".away").wait_for(state="detached")
    for number in range(3):
        person.sees(f"echo after {number}", ".calls")
    own_snap("exec", sandbox, "--", "echo", "live")
    person.sees("echo live", ".calls")
    person.problems.clear()  # a browser logs each request that nobody answers


@pytest.mark.long  # a detail of the page, in the long set alone
def test_a_list_that_lags_behind_hides_no_call(own_snap: Snap, person: Person, sandbox: str) -> None:
    page, held = person.page, []
    page.route("**/overview?trajectory=*", lambda route: held.append((route, route.fetch())))
    own_snap("exec", sandbox, "--", "echo", "early")
    while not held:
        page.wait_for_timeout(50)
    own_snap("exec", sandbox, "--", "echo", "late")
    page.locator(".trajectory", has_text=sandbox).get_by_text("3 snapshots").wait_for()
    route, answer = held.pop(0)
    route.fulfill(response=answer)
    page.locator(".trajectory", has_text=sandbox).get_by_text("2 snapshots").wait_for()
    person.opens(sandbox)
    person.sees("echo late", ".calls")
    page.unroute_all(behavior="ignoreErrors")


@pytest.mark.long  # a detail of the page, in the long set alone
def test_calls_that_come_before_the_list_hide_no_other(own_snap: Snap, person: Person) -> None:
    page, held = person.page, []
    page.route("**/overview?trajectory=*", lambda route: held.append((route, route.fetch())))

    def hold(count: int) -> None:
        while len(held) < count:
            page.wait_for_timeout(20)

    own_snap.create("--name", "kept")
    hold(1)
    own_snap("exec", "kept", "--", "echo", "early")
    route, answer = held[0]
    route.fulfill(response=answer)
    hold(2)
    own_snap("exec", "kept", "--", "echo", "late")
    person.opens("kept")
    person.sees("echo late", ".calls")
    person.sees("echo early", ".calls")
    person.sees("start", ".calls")
    for route, answer in held[1:]:
        route.fulfill(response=answer)
    page.unroute_all(behavior="ignoreErrors")
    own_snap("rm", "--force", "kept")


def test_rows_that_could_not_be_read_are_read_later(own_snap: Snap, person: Person, sandbox: str) -> None:
    for number in range(2):
        own_snap("exec", sandbox, "--", "echo", str(number))
    person.page.route("**/log?*", lambda route: route.abort())
    person.page.locator(".trajectory", has_text=sandbox).first.click()
    person.page.locator(".row").first.wait_for()
    person.sees("does not answer", ".notice")
    person.page.unroute("**/log?*")
    own_snap.kill_daemon()
    own_snap("ls")
    person.sees("echo 1", ".calls")
    person.problems.clear()


@pytest.mark.long  # a detail of the page, in the long set alone
def test_a_trajectory_that_is_removed_leaves_the_page(own_snap: Snap, person: Person, sandbox: str) -> None:
    own_snap("exec", sandbox, "--", "true")
    person.opens(sandbox)
    person.chooses(1)
    own_snap("rm", "--force", sandbox)
    person.page.locator(".trajectory", has_text=sandbox).wait_for(state="detached")
    person.sees("No such trajectory", ".ledger")
    assert person.page.locator(".away").count() == 0, "the daemon answers"
    person.problems.clear()  # that it is gone is an answer of 404


@pytest.mark.long  # rows: test_rows_that_could_not_be_read_are_read_later
def test_what_could_not_be_read_is_read_again(own_snap: Snap, person: Person, sandbox: str) -> None:
    person.opens(sandbox)
    person.page.route("**/overview*", lambda route: route.abort(), times=1)
    own_snap("stop", sandbox)  # no event comes after this
    person.page.locator(".away").wait_for()
    person.page.locator(".away").wait_for(state="detached")
    person.page.locator(".trajectory", has_text=sandbox).get_by_text("stopped").wait_for()
    person.problems.clear()


@pytest.mark.long  # a detail of the page, in the long set alone
def test_a_page_that_knows_nothing_yet_does_not_say_that_there_is_nothing(person: Person, sandbox: str) -> None:
    page = person.page
    page.route(re.compile("/v1/(overview|approvals)"), lambda route: None)  # no answer
    for place, untrue in (("", "No trajectories yet"), (f"t/{sandbox}", "No such"), ("approvals", "Nothing waits")):
        page.evaluate(f"location.hash = '#/{place}'")
        page.reload()
        page.locator(".panes").wait_for()
        assert page.get_by_text(untrue).count() == 0, place
    page.unroute_all(behavior="ignoreErrors")
    page.reload()
    person.sees("Nothing waits")
    person.sees(sandbox, "nav")


@pytest.mark.long  # it gets nothing: unit/page/test_server.py
def test_a_page_without_a_session_says_so_and_no_more(chromium: Any, person: Person) -> None:
    context = chromium.new_context()
    page = context.new_page()
    page.goto(f"{person.page.url.split('#')[0]}#token=old")
    page.locator(".away").get_by_text("no session").wait_for()
    page.locator(".notice").get_by_text("this address has been used").wait_for()
    assert page.get_by_text("No trajectories yet").count() == 0
    context.close()


@pytest.mark.long  # one that is hostile: test_page_hostile.py
@pytest.mark.parametrize("place", ["t/kept/{gone}", "t/kept/{gone}/files", "experiments/{gone}", "tree/{gone}"])
def test_an_address_of_something_that_is_gone_says_so(person: Person, sandbox: str, place: str) -> None:
    gone, asked = "deadbeef", []
    person.page.on("request", lambda one: asked.append(one.url) if one.url.endswith(gone) else None)
    person.page.evaluate(f"location.hash = '#/{place.format(gone=gone)}'")
    if place.startswith("tree"):
        person.sees("0 trajectories", ".tree")
        assert person.page.locator(".tree .branch input").count() == 0
        return
    person.sees(f"there is no {'snapshot' if place.startswith('t/') else 'experiment'}", ".inspector, main")
    person.page.evaluate("location.hash += '/'")  # the same place, drawn again
    person.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert len(asked) == 1
    person.problems.clear()


@pytest.mark.long  # five hundred followers of one daemon: unit/daemon/test_watching.py
def test_a_page_of_many_tabs_answers(person: Person) -> None:
    assert person.page.evaluate(OPEN_STREAMS, TABS) == 200
