"""What every catalog must do: approvals and compensations. See catalog.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from snapshotd.catalog.base import Catalog
from snapshotd.errors import Ambiguous, Conflict, InternalError, NotFound, UsageError
from snapshotd.types import (
    ApprovalID,
    ApprovalStatus,
    CallID,
    CallStatus,
    Compensation,
    SnapshotID,
    TrajectoryID,
    new_id,
)
from tests.contracts.refusal import refuses
from tests.records import committed, fork, make_approval, make_entry, started


def an_approval_waits_and_is_decided_once(catalog: Catalog) -> None:
    _, first = started(catalog)
    text = "\ud800 \x00\x1b[31m"
    asked = make_approval(first, question=text, tool=text, arguments={text: [1.5, None]}, expires_at_ns=7)
    approvals = catalog.approvals
    approvals.add(asked)
    assert approvals.find(asked.id) == asked
    assert approvals.list(ApprovalStatus.PENDING) == [asked]
    refuses(Conflict, approvals.add, asked, says=(asked.id,))
    decided = approvals.decide(asked.id, ApprovalStatus.APPROVED, at_ns=5, by=text, reason=text, edited=(None,))
    assert decided == replace(
        asked, status=ApprovalStatus.APPROVED, decided_at_ns=5, by=text, reason=text, edited=(None,)
    ), "edited to null is not the same as not edited"
    assert approvals.find(asked.id[:8]) == decided
    assert approvals.list(ApprovalStatus.PENDING) == []
    for status in (ApprovalStatus.DENIED, ApprovalStatus.APPROVED):
        refuses(
            Conflict,
            lambda status=status: approvals.decide(asked.id, status, at_ns=6, by="b", reason=None),
            says=("approved", "\\ud800"),
        )
    assert approvals.find(asked.id) == decided
    refuses(InternalError, lambda: approvals.decide(asked.id, ApprovalStatus.PENDING, at_ns=6, by=None, reason=None))
    unknown = ApprovalID(new_id())
    refuses(NotFound, lambda: approvals.decide(unknown, ApprovalStatus.DENIED, at_ns=6, by=None, reason=None))
    waiting = make_approval(first)
    approvals.add(waiting)
    refuses(
        UsageError,
        lambda: approvals.decide(waiting.id, ApprovalStatus.APPROVED, at_ns=6, by=None, reason=None, edited=({1},)),
    )
    assert approvals.find(waiting.id) == waiting


def approvals_are_listed_and_found(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    other, elsewhere = started(catalog)
    one, two, three = (make_approval(snapshot) for snapshot in (first, elsewhere, first))
    for approval in (one, two, three):
        catalog.approvals.add(approval)
    denied = catalog.approvals.decide(three.id, ApprovalStatus.DENIED, at_ns=1, by=None, reason="no")
    assert catalog.approvals.list() == [one, two, denied]
    assert catalog.approvals.list(trajectory_id=trajectory.id) == [one, denied]
    assert catalog.approvals.list(ApprovalStatus.PENDING, trajectory.id) == [one]
    assert catalog.approvals.list(ApprovalStatus.EXPIRED) == []
    catalog.approvals.add(replace(one, id=ApprovalID("abcd" + "0" * 28)))
    catalog.approvals.add(replace(one, id=ApprovalID("abcd" + "1" * 28), trajectory=other.id))
    refuses(Ambiguous, catalog.approvals.find, "abcd")
    assert catalog.approvals.find("abcd1").trajectory == other.id
    refuses(Ambiguous, catalog.approvals.find, "abc", says=("too short",))
    for ref in ("", "ab%%", "\ud800" * 4, new_id()):
        refuses(NotFound, catalog.approvals.find, ref)
    refuses(NotFound, catalog.approvals.add, make_approval(first, trajectory=TrajectoryID(new_id())))
    refuses(NotFound, catalog.approvals.add, replace(make_approval(first), snapshot=SnapshotID(new_id())))


def a_question_asked_again_is_the_same_one(catalog: Catalog) -> None:
    _, first = started(catalog)
    call, mine = CallID(new_id()), first.trajectory
    older, newer = make_approval(first, entry=call), make_approval(first, entry=call)
    assert catalog.approvals.of_entry(mine, call) is None
    catalog.approvals.add(older)
    catalog.approvals.add(newer)
    assert catalog.approvals.of_entry(mine, call) == newer
    assert catalog.approvals.of_entry(TrajectoryID(new_id()), call) is None, "a name is one of its trajectory"
    moved = CallID(new_id())
    catalog.approvals.move(newer.id, moved)
    assert catalog.approvals.of_entry(mine, moved) == replace(newer, entry=moved)
    assert catalog.approvals.of_entry(mine, call) == older
    assert catalog.approvals.of_entry(mine, CallID("\ud800")) is None
    refuses(NotFound, catalog.approvals.move, ApprovalID(new_id()), moved)


def a_call_is_compensated_at_most_once(catalog: Catalog) -> None:
    trajectory, _ = started(catalog)
    call = CallID(new_id())
    begun = Compensation(call, trajectory.id, None, 5)
    assert catalog.compensations.get(call) is None
    catalog.compensations.begin(begun)
    assert catalog.compensations.get(call) == begun
    refuses(Conflict, catalog.compensations.begin, begun, says=(call[:12],))
    catalog.compensations.forget(call)
    assert catalog.compensations.get(call) is None
    catalog.compensations.begin(begun)
    catalog.compensations.end(call, CallStatus.FAILED, at_ns=9, exit_code=3, error="\ud800")
    assert catalog.compensations.get(call) == Compensation(call, trajectory.id, CallStatus.FAILED, 5, 9, 3, "\ud800")
    refuses(Conflict, catalog.compensations.begin, begun)
    for wrong in (call, CallID(new_id()), CallID("\ud800")):
        refuses(
            NotFound,
            lambda wrong=wrong: catalog.compensations.end(wrong, CallStatus.DONE, at_ns=9, exit_code=0, error=None),
        )
        refuses(NotFound, catalog.compensations.forget, wrong)
    refuses(NotFound, catalog.compensations.begin, Compensation(CallID(new_id()), TrajectoryID(new_id()), None, 5))


def they_go_with_their_trajectory(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    second = committed(catalog, first)
    child = fork(second, trajectory)
    catalog.trajectories.add([(child, None)])
    call = CallID(new_id())
    asked = make_approval(second, trajectory=child.id)
    catalog.approvals.add(asked)
    inherited = make_entry(first)
    catalog.journal.begin(trajectory.id, inherited)
    for made_up_for in (call, inherited.id):
        catalog.compensations.begin(Compensation(made_up_for, child.id, None, 5))
    kept = make_approval(second)
    catalog.approvals.add(kept)
    catalog.trajectories.remove(child.id)
    assert catalog.approvals.list() == [kept]
    assert catalog.compensations.get(call) is None
    assert catalog.compensations.get(inherited.id) == Compensation(inherited.id, trajectory.id, None, 5)
    catalog.trajectories.remove(trajectory.id)
    assert catalog.compensations.get(inherited.id) is None
    assert catalog.approvals.list() == []


CHECKS: tuple[Callable[[Catalog], None], ...] = (
    an_approval_waits_and_is_decided_once,
    approvals_are_listed_and_found,
    a_question_asked_again_is_the_same_one,
    a_call_is_compensated_at_most_once,
    they_go_with_their_trajectory,
)
