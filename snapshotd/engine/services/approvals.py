"""Calls that a person decides about, as people and outside programs see them. The gate of the agents' own calls is
`journal/approval/gate.py`."""

from __future__ import annotations

from itertools import islice
from typing import Any

from snapshotd.api.approvals import AskRequest
from snapshotd.api.wire import check_ref
from snapshotd.engine.base import ApprovalView
from snapshotd.engine.context import Context
from snapshotd.engine.journal.approval.records import ApprovalRecords
from snapshotd.engine.storage import look
from snapshotd.trees.base import Change
from snapshotd.types import Approval, ApprovalStatus, SnapshotID, SnapshotState, Trajectory


class ApprovalService:
    """Every method may raise NotFound or Ambiguous for a `ref`."""

    def __init__(self, context: Context, approvals: ApprovalRecords) -> None:
        self._context, self._catalog, self._approvals = context, context.catalog, approvals

    def ask(self, request: AskRequest) -> Approval | None:
        """Ask a person about a call of a program outside of the sandbox, named `call` by it. Returns at once, and again with
        the same call what has been decided by now. Without a question the policy decides; None: it lets the call run.

        The approval is bound to the call's name and arguments, not to files: the program that asked sees to those.
        Denied: the policy does not let it run; Conflict: another call of it has the name; UsageError: the name is malformed."""
        ref = check_ref(request.trajectory, "trajectory")
        return self._approvals.ask(self._catalog.refs.find_trajectory(ref), request)

    def list(self, status: ApprovalStatus | None = None) -> list[Approval]:
        """Oldest first; without `status` all."""
        return self._approvals.list(status)

    def approve(self, ref: str, *, by: str, reason: str | None = None, arguments: tuple[Any] | None = None) -> Approval:
        """Let the call run, with other `arguments` if given. Conflict: decided already, or its trajectory has moved on
        from the snapshot that the approval is bound to (it is stale then)."""
        return self._approvals.approve(ref, by=by, reason=reason, arguments=arguments)

    def deny(self, ref: str, *, by: str, reason: str | None = None) -> Approval:
        return self._approvals.deny(ref, by=by, reason=reason)

    def view(self, ref: str, *, max_files: int = 1000) -> ApprovalView:
        """Returns what a person needs for a decision. No files are listed if the snapshot to compare with has given up its own."""
        approval = self._approvals.find(ref)
        trajectory = self._catalog.trajectories.get(approval.trajectory)
        since = self._comparison_base(approval, trajectory)
        files: tuple[Change, ...] = ()
        if since is not None:
            files = tuple(islice(look.changes(self._context, since, approval.snapshot), max_files))
        return ApprovalView(approval, trajectory, files, since)

    def _comparison_base(self, approval: Approval, trajectory: Trajectory) -> SnapshotID | None:
        catalog = self._catalog
        decided = [
            other
            for other in catalog.approvals.list(None, trajectory.id)
            if other.status in (ApprovalStatus.APPROVED, ApprovalStatus.DENIED)
            and other.created_at_ns < approval.created_at_ns
        ]
        since = decided[-1].snapshot if decided else trajectory.began or trajectory.forked_from
        if since is None:
            first = catalog.snapshots.get(approval.snapshot)
            while first.parent is not None:
                first = catalog.snapshots.get(first.parent)
            since = first.id
        kept = catalog.snapshots.get(since).state in (SnapshotState.CAPTURED, SnapshotState.STORED)
        return since if kept else None
