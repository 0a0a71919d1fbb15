"""An approval that several decide at the same moment: one wins, and each of the others is told who has."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from snapshotd.client import Snapshotd
from snapshotd.engine.journal.approval.policy import FILE_NAME
from snapshotd.errors import Conflict
from tests.e2e.listening import listening
from tests.e2e.page_rig import Person
from tests.e2e.support import Snap, wait_until
from tests.long import SEED, size

pytestmark = [pytest.mark.runc, pytest.mark.timeout(600)]
PROGRAM = """
import sys
from snapshotd.agent import Denied, message, tool

@tool(side_effect="irreversible", approve="may I send it?")
def send(number):
    with open("sent", "a") as sent:
        sent.write("%d\\n" % number)

for number in range(int(sys.argv[1])):
    try:
        send(number)
    except Denied as denied:
        message("assistant", "%d: %s" % (number, denied))
"""
ROUNDS = size(12, 40)
SKEW_S = 0.03
"""The deciders begin within so long of each other, so that each of them is the first at times."""


@pytest.fixture(autouse=True)
def alone(own_snap: Snap) -> Iterator[None]:
    """No other call waits."""
    yield
    (own_snap.state_dir / FILE_NAME).unlink(missing_ok=True)
    for one in own_snap.json("ls"):
        own_snap("rm", "--force", one["id"])


@pytest.mark.long  # the page after a command: the next test
def test_one_of_the_page_a_command_and_a_webhooks_receiver_decides(
    own_snap: Snap, person: Person, tmp_path: Path
) -> None:
    snap, page = own_snap, person.page
    chance, winners = random.Random(SEED), Counter[str]()
    approved: list[int] = []
    (tmp_path / "agent.py").write_text(PROGRAM)
    told: list[str] = []

    def take(_headers: Message, body: bytes) -> int:
        event = json.loads(body)
        if event["status"] == "pending":
            told.append(event["id"])
        return 204

    with listening(take) as url, ThreadPoolExecutor(2) as pool:
        client = Snapshotd(state_dir=snap.state_dir)
        (snap.state_dir / FILE_NAME).write_text(f'[webhook]\nurl = "{url}"\n')
        snap("run", "--detach", "--runtime", "runc", "--name", "race", tmp_path / "agent.py", str(ROUNDS))
        page.evaluate("location.hash = '#/approvals'")
        for number in range(ROUNDS):
            wait_until(lambda count=number + 1: len(told) == count, "the receiver is told", pause_s=0.01)  # type: ignore[misc]
            asked = told[-1]
            wait_until(lambda number=number: _shows(page, number), "the page shows it", pause_s=0.01)  # type: ignore[misc]
            page.get_by_role("button", name="Approve…").click()
            page.locator(".confirm").wait_for()
            start = threading.Barrier(3)

            def by_command(asked: str = asked, start: threading.Barrier = start) -> str:
                start.wait()
                _skew(chance)
                done = snap("deny", asked, "--by", "command", code=None)
                return "" if done.returncode == 0 else f"{done.returncode} {done.stderr}"

            def by_chat(asked: str = asked, start: threading.Barrier = start) -> str:
                start.wait()
                _skew(chance)
                try:
                    client.approve(asked, by="chat")
                except Conflict as exc:
                    return f"6 {exc.message}"
                return ""

            command, chat = pool.submit(by_command), pool.submit(by_chat)
            start.wait()
            _skew(chance)
            page.evaluate("document.querySelector('.confirm .main')?.click()")  # it is gone if the page knows already
            answers = {"command": command.result(60), "chat": chat.result(60)}
            (decided,) = [one for one in snap.json("approvals", "--all") if one["id"] == asked]
            winner = decided["by"] if decided["by"] in answers else "page"
            winners[winner] += 1
            assert [who for who, answer in answers.items() if answer == ""] == ([] if winner == "page" else [winner])
            verdict = f"is {decided['status']} by {decided['by']}; it cannot be decided again"
            for who, answer in answers.items():
                if who != winner:
                    assert answer.startswith("6 "), answer
                    assert verdict in answer
            person.sees(f"{decided['status']} by {decided['by']}", ".inbox .list")
            if decided["status"] == "approved":
                approved.append(number)
        snap("attach", "--quiet", "race", code=None)
    assert snap("cat", "race:/workspace/sent").stdout.split() == [str(number) for number in approved]
    assert len(winners) > 1, f"the race was none: {winners}"
    person.problems.clear()  # a browser logs each refused request


def _shows(page: Any, number: int) -> bool:
    """True once the call that waits is chosen on the page."""
    page.evaluate("document.querySelector('.inbox .list .interrupted')?.closest('button').click()")
    return f'"number": {number}\n' in page.locator("main").inner_text()


def _skew(chance: random.Random) -> None:
    threading.Event().wait(chance.random() * SKEW_S)


def test_a_decision_holds_for_the_call_that_was_shown(own_snap: Snap, person: Person, tmp_path: Path) -> None:
    """Two calls wait. While a person confirms the first it is decided elsewhere: the click does not decide the second."""
    snap, page = own_snap, person.page
    (tmp_path / "agent.py").write_text(PROGRAM)
    for name in ("left", "right"):
        snap("run", "--detach", "--runtime", "runc", "--name", name, tmp_path / "agent.py", "1")
    wait_until(lambda: len(snap.json("approvals")) == 2, "both ask")
    page.evaluate("location.hash = '#/approvals'")
    page.get_by_role("button", name="Approve…").click()
    digest = page.locator(".confirm .digest").inner_text()
    shown, other = sorted(snap.json("approvals"), key=lambda one: one["digest"] != digest)
    snap("deny", shown["id"], "--by", "somebody")
    person.sees("denied by somebody", ".inbox .list")
    page.evaluate("document.querySelector('.confirm .main')?.click()")
    page.locator(".confirm").wait_for(state="detached")
    status = {one["id"]: one["status"] for one in snap.json("approvals", "--all")}
    assert (status[shown["id"]], status[other["id"]]) == ("denied", "pending")
    person.problems.clear()
