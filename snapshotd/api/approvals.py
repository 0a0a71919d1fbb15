"""Calls that wait for a person."""

from __future__ import annotations

from typing import Annotated, Any

from snapshotd.api.history import NAME_MAX
from snapshotd.api.operation import APPROVE, READ, RUN, Operation
from snapshotd.api.record import ApiRecord, Bounds, OneOf, Request, record, unset
from snapshotd.api.snapshots import ChangeInfo
from snapshotd.api.trajectories import TrajectoryInfo
from snapshotd.api.wire import LINES, TTL_MAX_S

SideEffect = Annotated[str, OneOf("local", "idempotent", "irreversible")]


@record(frozen=True)
class ApprovalInfo(ApiRecord):
    """A question that a person has to decide."""

    id: str
    trajectory: str
    call: str
    """The journal entry that waits."""
    name: str
    """The tool's."""
    arguments: Any
    digest: str
    """SHA-256 of the canonical JSON of [tool, arguments], hexadecimal; of [tool, [call, arguments]] for a call from
    outside of the sandbox."""
    snapshot: str
    """It holds for these files only; for a call from outside, the head when it was asked."""
    side_effect: SideEffect
    """The effect of running the tool a second time. `local`: only files, which are rolled back with it; `idempotent`: none,
    under the same key; `irreversible`: it happens twice."""
    created_at: str
    question: str | None
    """The question that a person is asked."""
    status: Annotated[str, OneOf("pending", "approved", "denied", "expired", "stale")]
    """`stale`: it no longer fits the call or the files."""
    expires_at: str | None
    decided_at: str | None
    """Time of the decision."""
    by: str | None
    """The person who decided."""
    reason: str | None
    edited: tuple[Any, ...] | None
    """The arguments that the approver put in their place, as a list of one; null: as asked."""


@record(frozen=True)
class ApprovalView(ApiRecord):
    """An approval, with the facts that a person needs for a decision."""

    approval: ApprovalInfo
    trajectory: TrajectoryInfo
    changes: tuple[ChangeInfo, ...]
    """Changes as in /diff, since the trajectory's last approval; at most as many as were asked for."""
    more: bool
    """There are more changes than are listed."""
    since: str | None
    """The snapshot that changes are counted from."""


@record(frozen=True)
class AskRequest(Request):
    trajectory: Annotated[str, Bounds(max_length=NAME_MAX)]
    """The trajectory that the call belongs to."""
    call: Annotated[str, Bounds(min_length=1, max_length=64)]
    """The program's name for it: letters, digits, '.', '_' and '-'."""
    tool: Annotated[str, Bounds(min_length=1, max_length=NAME_MAX)]
    arguments: Any = None
    side_effect: SideEffect = "local"
    """The effect of running the tool a second time. `local`: only files, which are rolled back with it; `idempotent`: none,
    under the same key; `irreversible`: it happens twice."""
    question: Annotated[str, Bounds(max_length=10_000)] | None = None
    """Left out, the policy decides if a person is asked."""
    expires_s: Annotated[float, Bounds(gt=0, le=TTL_MAX_S, allow_inf_nan=False)] | None = None


@record(frozen=True)
class DenyRequest(Request):
    by: Annotated[str, Bounds(min_length=1, max_length=200)] | None = None
    """Name of the decider; default: the requesting user."""
    reason: Annotated[str, Bounds(max_length=10_000)] | None = None
    """The agent is told, if it is denied."""


@record(frozen=True)
class ApproveRequest(DenyRequest):
    arguments: Any = unset()
    """Run it with these instead; leave them out to run it as asked."""


APPROVALS = Operation("GET", "/approvals", list[ApprovalInfo], READ, "approvals", by="approvals.list", own=True)
ASK = Operation[ApprovalInfo | None](
    "POST",
    "/approvals",
    ApprovalInfo | None,  # type: ignore[arg-type]  # a union is no class
    RUN,
    "approvals",
    body=AskRequest,
    once=True,  # the call's name makes it the same question
)
APPROVAL = Operation("GET", "/approvals/{approval}", ApprovalView, READ, "approvals")
APPROVE_CALL = Operation(
    "POST", "/approvals/{approval}/approve", ApprovalInfo, APPROVE, "approvals", body=ApproveRequest
)
DENY_CALL = Operation("POST", "/approvals/{approval}/deny", ApprovalInfo, APPROVE, "approvals", body=DenyRequest)
WATCH = Operation[Any]("GET", "/watch", LINES, READ, "approvals")
