"""A page that stays open while the daemon dies, trajectories go, and other tabs come: what it shows is so."""

from __future__ import annotations

from collections.abc import Iterator

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


def test_a_trajectory_that_is_removed_leaves_the_page(own_snap: Snap, person: Person, sandbox: str) -> None:
    own_snap("exec", sandbox, "--", "true")
    person.opens(sandbox)
    person.chooses(1)
    own_snap("rm", "--force", sandbox)
    person.page.locator(".trajectory", has_text=sandbox).wait_for(state="detached")
    person.sees("No such trajectory", ".ledger")
    assert person.page.locator(".away").count() == 0, "the daemon answers"
    person.problems.clear()  # that it is gone is an answer of 404


def test_a_page_of_many_tabs_answers(person: Person) -> None:
    assert person.page.evaluate(OPEN_STREAMS, TABS) == 200
