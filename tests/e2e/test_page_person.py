"""Somebody who clicks twice, makes mistakes, goes back, or has no mouse: nothing is done twice, lost, or out of sight."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.page_rig import Person
from tests.e2e.support import Snap

pytestmark = [pytest.mark.runc, pytest.mark.timeout(600)]
FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""What was clicked has been acted upon, and drawn."""
IN_FRONT = """one => {
    const { x, y, width, height } = one.getBoundingClientRect();
    return one.contains(document.elementFromPoint(x + width / 2, y + height / 2));
}"""
CONTRAST = """one => {
    const shine = text => {
        const [r, g, b] = text.match(/[\\d.]+/g).map(each => each / 255)
            .map(part => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
    };
    const { color, backgroundColor } = getComputedStyle(one), both = [shine(color), shine(backgroundColor)];
    return Math.max(...both) / Math.min(...both);
}"""
"""How text stands out, as WCAG 2.1 defines it: 1 is not at all."""
ASKS = """
from snapshotd.agent import tool

@tool(approve="may I send it?")
def send(amount):
    pass

send(1)
send(2)
"""


@pytest.fixture
def sandbox(own_snap: Snap, person: Person) -> Iterator[str]:
    """A sandbox that was rewound to its first call, and somebody who looks at that call."""
    own_snap.create("--name", "twice")
    own_snap("exec", "twice", "--", "sh", "-c", "echo one > a")
    own_snap("exec", "twice", "--", "sh", "-c", "echo two > a")
    person.opens("twice")
    person.chooses(1)
    yield "twice"
    for one in sorted(own_snap.json("ls"), key=lambda one: one["forked_from"] is None):
        own_snap("rm", "--force", one["id"])


@pytest.fixture
def asked(own_snap: Snap, person: Person, tmp_path: Path) -> Iterator[Person]:
    """Somebody in front of the inbox, where a call waits."""
    (tmp_path / "agent.py").write_text(ASKS)
    own_snap("run", "--detach", "--runtime", "runc", "--name", "asks", tmp_path / "agent.py")
    person.page.evaluate("location.hash = '#/approvals'")
    person.sees('"amount": 1', ".given")
    yield person
    own_snap("rm", "--force", "asks")


def _clicks_twice(page: Any, button: Any, path: str) -> None:
    """Twice before the first has an answer."""
    held: list[Any] = []
    page.route(path, lambda route: held.append(route))
    button.dblclick()
    while not held:
        page.wait_for_timeout(20)
    page.evaluate(FRAMES)
    assert button.is_disabled(), "it shows that it is at work"
    assert len(held) == 1
    held[0].continue_()
    page.unroute(path)


def _leaves(person: Person) -> None:
    person.presses("Escape")
    person.page.locator("dialog").wait_for(state="detached")


def test_an_act_that_is_clicked_twice_is_done_once(own_snap: Snap, person: Person, sandbox: str) -> None:
    main = person.page.locator("dialog button.main")
    person.presses("r")
    main.wait_for()
    _clicks_twice(person.page, main, "**/rewind")
    person.sees("is back at call 1")
    person.presses("u")  # right after it, the call is still looked at
    person.sees("Undo", "dialog h2")
    _clicks_twice(person.page, main, "**/undo")
    person.sees("is as it was before")
    assert own_snap("cat", f"{sandbox}:/workspace/a").stdout == "two\n"
    person.presses("f")
    main.wait_for()
    person.page.locator("dialog").get_by_label("Name", exact=True).fill("")
    _clicks_twice(person.page, main, "**/fork")
    person.sees("forked: ")
    assert len(own_snap.json("ls")) == 2


@pytest.mark.long  # other acts: the test before
def test_an_experiment_that_is_begun_twice_is_one(own_snap: Snap, person: Person, sandbox: str) -> None:
    person.presses("e")
    person.page.get_by_label("Command, run in").fill("true")
    begin = person.page.get_by_role("button", name="Begin")
    _clicks_twice(person.page, begin, "**/v1/experiments")
    person.sees("all branches have ended", "main")
    own_snap("experiment", "rm", "twice-experiment")


@pytest.mark.long  # other acts: the first test
def test_a_decision_that_is_clicked_twice_is_one(asked: Person) -> None:
    asked.clicks("Approve…")
    _clicks_twice(asked.page, asked.page.locator(".confirm button.main"), "**/approve")
    asked.sees("send runs", ".notice")
    asked.sees('"amount": 2', ".given")


@pytest.mark.long  # a detail of the page, in the long set alone
def test_a_dialog_that_was_opened_meanwhile_stays(person: Person, sandbox: str) -> None:
    page, held = person.page, []
    page.route("**/fork", lambda route: held.append(route))
    person.presses("f")
    person.clicks("Fork", "dialog")
    while not held:
        page.wait_for_timeout(20)
    _leaves(person)
    person.presses("t")
    name = page.locator("dialog").get_by_label("Name", exact=True)
    name.fill("half-written")
    held[0].continue_()
    person.sees("forked: twice-fork", "dialog")
    assert name.input_value() == "half-written"


@pytest.mark.long  # a detail of the page, in the long set alone
@pytest.mark.parametrize("width", [1400, 360])
def test_a_mistake_is_told_in_front_of_the_dialog(person: Person, sandbox: str, width: int) -> None:
    person.page.set_viewport_size({"width": width, "height": 640})
    person.presses("t")
    name = person.page.locator("dialog").get_by_label("Name", exact=True)
    for wrong in ("", "..", "a/../b", "two words"):
        name.fill(wrong)
        person.clicks("Tag", "dialog")
        told = person.sees("up to 64 letters, digits and ._-", "dialog .notice")
        assert told.evaluate(IN_FRONT)
        assert name.input_value() == wrong
    _leaves(person)
    assert person.page.locator(".notice").count() == 0, "the mistake is gone with it"
    person.presses("f")
    person.page.locator("dialog").get_by_label("Environment").fill("none")
    person.clicks("Fork", "dialog")
    assert person.sees("is no NAME=VALUE", "dialog .notice").evaluate(IN_FRONT)


@pytest.mark.long  # a detail of the page, in the long set alone
def test_the_name_of_a_fork_is_one_that_is_free(own_snap: Snap, person: Person, sandbox: str) -> None:
    for name in ("twice-fork", "twice-fork-2", "twice-fork-3"):
        person.page.evaluate("location.hash = '#/t/twice'")
        person.chooses(1)
        person.presses("f")
        person.clicks("Fork", "dialog")
        person.sees(f"forked: {name}")


@pytest.mark.long  # a detail of the page, in the long set alone
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_button_is_readable_under_the_mouse(person: Person, sandbox: str, scheme: str) -> None:
    person.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    main = person.page.get_by_role("button", name="Fork from here")
    main.hover()
    assert main.evaluate(CONTRAST) > 4.5


@pytest.mark.long  # a detail of the page, in the long set alone
def test_a_menu_closes_and_the_call_stays(person: Person, sandbox: str) -> None:
    page, menu = person.page, person.page.locator(".menu")
    more = page.get_by_role("button", name="More acts")
    for closes in ("Escape", "Tab Escape"):
        more.focus()
        person.presses("Enter")
        menu.wait_for()
        person.presses(closes)
        menu.wait_for(state="detached")
        person.sees("call 1", ".inspector header")
        assert more.evaluate("one => one === document.activeElement")
    more.click()
    menu.wait_for()
    page.locator(".inspector h1").click()
    menu.wait_for(state="detached")


@pytest.mark.long  # a detail of the page, in the long set alone
def test_an_age_grows_where_nothing_happens(person: Person, sandbox: str) -> None:
    page, row = person.page, person.page.locator(".trajectory", has_text="twice")
    page.clock.install()
    page.reload()
    person.sees("call 1", ".inspector header")
    page.route("**/v1/**", lambda route: route.abort())  # no answer draws the page again
    page.clock.fast_forward("05:00")
    row.get_by_text("5 min").wait_for()
    person.sees("5 min ago", ".inspector header")
    page.unroute_all(behavior="ignoreErrors")
    person.problems.clear()


@pytest.mark.long  # a detail of the page, in the long set alone
def test_arguments_that_were_typed_wait_for_the_person(asked: Person) -> None:
    page, fields = asked.page, asked.page.get_by_label("Arguments")
    asked.clicks("Edit")
    fields.fill('{"amount": 7}')
    asked.clicks("Approve…")
    page.locator(".confirm").wait_for()
    page.locator(".inbox p a").click()
    page.locator(".calls").wait_for()
    page.go_back()
    fields.wait_for()
    assert fields.input_value() == '{"amount": 7}'
    assert page.locator(".confirm").count() == 0, "the second step is taken anew"


@pytest.mark.long  # a detail of the page, in the long set alone
def test_the_keyboard_is_at_the_second_step(asked: Person) -> None:
    asked.page.get_by_role("button", name="Approve…").focus()
    asked.presses("Enter")
    asked.page.wait_for_function("document.activeElement.matches('.confirm')")
    asked.presses("Enter Tab")  # this Enter decides nothing
    asked.page.keyboard.insert_text("seen")
    assert asked.page.locator(".confirm input").input_value() == "seen"
