"""The inbox of approvals: what is decided is what was shown, to the last digit, and no more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.page_rig import Person
from tests.e2e.support import Snap

pytestmark = [pytest.mark.runc, pytest.mark.timeout(600)]
LARGE = 9007199254740993
"""One above the whole numbers that JavaScript tells apart."""
PROGRAM = f"""
from snapshotd.agent import Denied, tool

@tool(side_effect="irreversible", approve="may I send it?")
def send(amount):
    with open("sent", "a") as sent:
        sent.write("%d\\n" % amount)

for amount in ({LARGE}, 1, 2):
    try:
        send(amount)
    except Denied:
        pass
"""


@pytest.fixture
def asked(own_snap: Snap, person: Person, tmp_path: Path) -> Iterator[Person]:
    """Somebody in front of the inbox, where the first call of a trajectory `asks` waits."""
    (tmp_path / "agent.py").write_text(PROGRAM)
    own_snap("run", "--detach", "--runtime", "runc", "--name", "asks", tmp_path / "agent.py")
    person.page.evaluate("location.hash = '#/approvals'")
    person.sees(str(LARGE), ".given")
    yield person
    for one in own_snap.json("ls"):
        own_snap("rm", "--force", one["id"])


def _decides(person: Person, verb: str, reason: str = "") -> None:
    person.clicks(f"{verb}…")
    if reason:
        person.page.locator(".confirm input").fill(reason)
    person.clicks(verb, ".confirm")


def test_a_large_number_is_shown_and_sent_as_it_is(own_snap: Snap, asked: Person) -> None:
    asked.clicks("Edit")
    fields = asked.page.get_by_label("Arguments")
    assert str(LARGE) in fields.input_value()
    fields.fill(f'{{"amount": {LARGE}}}')
    _decides(asked, "Approve")
    asked.sees('"amount": 1', ".given")
    assert own_snap("cat", "asks:/workspace/sent").stdout.split() == [str(LARGE)]
    asked.page.evaluate("location.hash = '#/t/asks'")
    asked.sees(str(LARGE), ".calls")


@pytest.mark.long  # a detail of the page, in the long set alone
def test_a_reason_is_given_once(own_snap: Snap, asked: Person) -> None:
    _decides(asked, "Deny", "not this one")
    asked.sees('"amount": 1', ".given")
    _decides(asked, "Deny")
    asked.sees('"amount": 2', ".given")
    decided = [one for one in own_snap.json("approvals", "--all") if one["status"] == "denied"]
    assert [one["reason"] for one in decided if one["reason"]] == ["not this one"]


@pytest.mark.long  # one that somebody else has made: test_page_races.py
def test_a_decision_whose_end_is_late_leaves_the_next_one_alone(asked: Person) -> None:
    page, held = asked.page, []
    page.route("**/overview", lambda route: held.append(route))
    _decides(asked, "Approve")
    asked.sees('"amount": 1', ".given")
    asked.clicks("Approve…")
    page.locator(".confirm").wait_for()
    while not held:
        page.wait_for_timeout(20)
    with page.expect_response("**/approvals"):
        for route in held:
            route.continue_()
    page.unroute("**/overview")
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.locator(".confirm").is_visible()


@pytest.mark.long  # large numbers are: the first test
def test_arguments_of_any_length_are_shown(own_snap: Snap, person: Person, tmp_path: Path) -> None:
    (tmp_path / "many.py").write_text(
        "from snapshotd.agent import tool\n"
        '@tool(approve="may I send them?")\n'
        "def send(amounts):\n"
        "    pass\n"
        "send([7] * 20_000 + [8])\n"
    )
    own_snap("run", "--detach", "--runtime", "runc", "--name", "many", tmp_path / "many.py")
    person.page.evaluate("location.hash = '#/approvals'")
    given = person.page.locator(".given")
    given.wait_for()
    assert " 8\n" not in given.inner_text()
    whole = len(json.dumps(own_snap.json("approvals")[0]["arguments"], indent=2))
    person.sees(f"{whole - 100_000:,} more characters", ".inbox section")
    person.clicks("Show all", ".inbox section")
    assert given.inner_text().endswith(" 8\n  ]\n}")
    assert person.page.get_by_text("more characters").count() == 0
    own_snap("rm", "--force", "many")


@pytest.mark.long  # others are edited in the first test
def test_arguments_that_are_no_json_can_be_mended(asked: Person) -> None:
    asked.clicks("Edit")
    fields = asked.page.get_by_label("Arguments")
    fields.fill('{"amount": 7,}')
    asked.clicks("Approve…")
    asked.sees("JSON", ".notice")
    assert fields.input_value() == '{"amount": 7,}'
    fields.fill('{"amount": "seven"}')
    _decides(asked, "Approve")
    asked.page.locator(".confirm").wait_for(state="detached")
