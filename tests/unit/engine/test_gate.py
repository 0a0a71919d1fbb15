"""A person's answer lets one call go on, once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.context import Context
from snapshotd.engine.mind.approvals import Gate
from snapshotd.engine.mind.webhook import Webhooks
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.errors import Conflict
from snapshotd.types import Approval, ApprovalStatus, CallID, SideEffect, Snapshot, ToolCall, Trajectory, new_id
from tests.records import committed, started


class Rig:
    """A gate with a person who approves whatever is asked, at once, while `there`."""

    def __init__(self, catalog: SqliteCatalog, state_dir: Path) -> None:
        self.catalog, self.there, self.asked = catalog, True, list[str]()
        self.trajectory: Trajectory
        self.head: Snapshot
        self.trajectory, self.head = started(catalog)
        context = SimpleNamespace(
            catalog=catalog,
            state_dir=state_dir,
            events=SimpleNamespace(tell=self._told),
            secrecy=SimpleNamespace(of=lambda _: SimpleNamespace(conceal=lambda value: value)),
        )
        self.gate = Gate(cast("Context", context), cast("Webhooks", None))
        self.run()

    def run(self) -> None:
        """The program runs (again)."""
        self.sandbox = SimpleNamespace(
            trajectory=self.trajectory,
            head=self.head.id,
            closed=False,
            lock=threading.RLock(),
            root=SimpleNamespace(changed=False),
        )

    def _told(self, _: str, event: dict[str, Any]) -> None:
        if event["status"] == "pending":
            self.asked.append(event["id"])
            if self.there:
                self.gate.approve(event["id"], by="ann", reason=None, arguments=None)

    def _step(self, call: ToolCall) -> Snapshot:
        self.head = committed(self.catalog, self.head, call=call, stack=self.head.stack)
        self.sandbox.head = self.head.id
        return self.head

    def _how(self, cancelled: bool) -> dict[str, Any]:
        event = threading.Event()
        if cancelled:
            event.set()
        return {"expires_s": None, "step": self._step, "cancelled": event}

    def question(self, call: CallID, *, cancelled: bool = False) -> Approval:
        return self.gate.question(cast("Sandbox", self.sandbox), call, "Charge the card?", None, **self._how(cancelled))

    def admit(self, call: CallID, *, cancelled: bool = False) -> Approval | None:
        sandbox, effect = cast("Sandbox", self.sandbox), SideEffect.IRREVERSIBLE
        return self.gate.admit(sandbox, call, "charge", {"n": 5}, effect, asked=True, **self._how(cancelled)).approval


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    catalog = SqliteCatalog(":memory:")
    yield Rig(catalog, tmp_path)
    catalog.close()


def test_a_question_from_inside_a_call_is_asked_every_time(rig: Rig) -> None:
    answers = [rig.question(CallID(new_id())) for _ in range(3)]  # nothing records it: it is answered with the call
    assert [answer.status for answer in answers] == [ApprovalStatus.APPROVED] * 3
    assert [answer.id for answer in answers] == rig.asked
    assert len(set(rig.asked)) == 3


def test_an_equal_call_does_not_take_what_another_is_about_to_run_with(rig: Rig) -> None:
    first = rig.admit(CallID(new_id()))
    rig.there = False
    with pytest.raises(Conflict, match="still waits"):
        rig.admit(CallID(new_id()), cancelled=True)  # the first has its answer and has not begun
    assert first is not None
    assert [rig.gate.find(asked).status for asked in rig.asked] == [ApprovalStatus.APPROVED, ApprovalStatus.PENDING]
    assert rig.gate.find(first.id).entry == first.entry


def test_who_asks_again_under_the_same_id_gets_the_same_answer(rig: Rig) -> None:
    call = CallID(new_id())
    assert rig.question(call).id == rig.question(call).id
    assert len(rig.asked) == 1


def test_a_program_that_runs_again_finds_the_answer_once(rig: Rig) -> None:
    answer = rig.question(CallID(new_id()))
    for _ in range(2):
        rig.sandbox.closed = True
        rig.run()
        assert rig.question(CallID(new_id())).id == answer.id
        assert len(rig.asked) == 1
    assert rig.question(CallID(new_id())).id == rig.asked[1] != answer.id


def test_an_answer_that_was_given_while_nobody_waited(rig: Rig) -> None:
    rig.there = False
    with pytest.raises(Conflict, match="still waits"):
        rig.question(CallID(new_id()), cancelled=True)
    rig.gate.approve(rig.asked[0], by="ann", reason=None, arguments=None)
    assert rig.question(CallID(new_id())).id == rig.asked[0]  # in the same run, under another id
    assert len(rig.asked) == 1
