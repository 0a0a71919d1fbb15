"""A person's answer lets one call go on, once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from snapshotd.api.approvals import AskRequest
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.context import Context
from snapshotd.engine.journal.approval.gate import Gate
from snapshotd.engine.journal.approval.records import ApprovalRecords, WaitingCaller
from snapshotd.engine.journal.approval.webhook import Webhooks
from snapshotd.engine.protocol.agent_handler import Question
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.errors import Conflict, Denied, UsageError
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
        self.approvals = ApprovalRecords(cast("Context", context), cast("Webhooks", None))
        self.gate = Gate(catalog, self.approvals)
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
                self.approvals.approve(event["id"], by="ann", reason=None, arguments=None)

    def _step(self, call: ToolCall) -> Snapshot:
        self.head = committed(self.catalog, self.head, call=call, stack=self.head.stack)
        self.sandbox.head = self.head.id
        return self.head

    def _caller(self, cancelled: bool) -> WaitingCaller:
        event = threading.Event()
        if cancelled:
            event.set()
        return WaitingCaller(cast("Sandbox", self.sandbox), self._step, event)

    def question(self, call: CallID, *, cancelled: bool = False) -> Approval:
        return self.gate.ask(self._caller(cancelled), Question(call, "Charge the card?", None))

    def outside(self, call: str, arguments: Any = None, **how: Any) -> Approval | None:
        """Another program asks."""
        given = {"n": 5} if arguments is None else arguments
        return self.approvals.ask(self.trajectory, AskRequest(self.trajectory.id, call, "charge", given, **how))

    def step_on(self) -> None:
        """The head moves, with other files."""
        self.head = committed(self.catalog, self.head)
        self.trajectory = self.catalog.trajectories.get(self.trajectory.id)

    def policy(self, text: str) -> None:
        self.approvals.policy.path.write_text(text)

    def admit(self, call: CallID, *, cancelled: bool = False) -> Approval | None:
        effect = SideEffect.IRREVERSIBLE
        return self.gate.admit(self._caller(cancelled), call, "charge", {"n": 5}, effect, asked=True)


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
    assert [rig.approvals.find(asked).status for asked in rig.asked] == [
        ApprovalStatus.APPROVED,
        ApprovalStatus.PENDING,
    ]
    assert rig.approvals.find(first.id).entry == first.entry


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
    rig.approvals.approve(rig.asked[0], by="ann", reason=None, arguments=None)
    assert rig.question(CallID(new_id())).id == rig.asked[0]  # in the same run, under another id
    assert len(rig.asked) == 1


def test_a_program_outside_asks_without_waiting_and_comes_back_for_the_answer(rig: Rig) -> None:
    rig.there = False
    asked = rig.outside("call-1", question="Charge the card?")
    assert asked is not None
    assert (asked.status, asked.snapshot, asked.question) == (ApprovalStatus.PENDING, rig.head.id, "Charge the card?")
    assert rig.outside("call-1", question="Charge the card?") == asked
    rig.step_on()
    rig.approvals.approve(asked.id, by="ann", reason=None, arguments=({"n": 4},))  # other files are no matter
    decided = rig.outside("call-1")
    assert decided is not None
    assert (decided.id, decided.status, decided.edited) == (asked.id, ApprovalStatus.APPROVED, ({"n": 4},))
    assert rig.asked == [asked.id]


def test_the_policy_decides_about_a_call_outside_that_asks_nothing(rig: Rig) -> None:
    rig.there = False
    assert rig.outside("call-1") is None
    rig.policy('[[rule]]\nname = "charge"\naction = "approve"\nreason = "it is money"\nexpires = "1h"\n')
    asked = rig.outside("call-1")
    assert asked is not None
    assert (asked.question, asked.expires_at_ns) == ("it is money", asked.created_at_ns + 3600 * 10**9)
    rig.policy('[[rule]]\nname = "charge"\naction = "deny"\nreason = "never, not once"\n')
    assert rig.outside("call-1") == asked  # what was asked stays asked
    with pytest.raises(Denied, match="the policy does not let charge run with these arguments: never, not once"):
        rig.outside("call-2")


def test_nobody_decided_in_time_about_a_call_outside(rig: Rig) -> None:
    rig.there = False
    first = rig.outside("call-1", question="Now?", expires_s=1e-9)
    assert first is not None
    assert first.status is ApprovalStatus.EXPIRED


def test_a_call_outside_has_a_name_of_its_own(rig: Rig) -> None:
    inside = rig.admit(CallID("call-0"))
    assert inside is not None
    rig.outside("call-1", question="Charge?")
    for call, arguments in (("call-0", {"n": 5}), ("call-1", {"n": 6}), ("call-0", ["call-0", {"n": 5}])):
        with pytest.raises(Conflict, match="another call of that name was"):
            rig.outside(call, arguments, question="Charge?")
    for call in ("", "a b", "a" * 65, "a\0"):
        with pytest.raises(UsageError, match="is malformed"):
            rig.outside(call, question="Charge?")
