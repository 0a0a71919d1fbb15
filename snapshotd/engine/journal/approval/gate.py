"""The gate of calls: a call that policy or program wants a person's agreement for waits here.

A gated call takes a snapshot, records an approval (records.py) that is bound to (tool, digest of the arguments,
snapshot), and waits. The approval is a row: it survives the daemon, and a repeated call finds it again, under any id.
One approval lets one call run, once. It is spent when its call has been recorded as begun. Inside a run, only the call
that got the answer gets it again.

The approver has seen those arguments and those files. If the files have changed by then, the approval is stale: the
approver is told, and the call asks anew.
"""

from __future__ import annotations

from typing import Any

from snapshotd.catalog.base import Catalog
from snapshotd.engine.journal.approval.records import ApprovalRecords, Asked, WaitingCaller, digest
from snapshotd.engine.journal.replay import DENIED
from snapshotd.engine.markers import is_marker
from snapshotd.engine.protocol.agent_handler import Question
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.sandbox.step import marker
from snapshotd.errors import Conflict, Denied, NotFound
from snapshotd.types import (
    Approval,
    ApprovalID,
    ApprovalStatus,
    CallID,
    CallStatus,
    SideEffect,
    Snapshot,
    SnapshotID,
    new_id,
    short,
)

QUESTION = "question"
"""The tool's name of an approval that no call stands behind: the program asks a person something."""
_LOOK_S = 0.25
"""Seconds between two checks of a waiting call for its caller."""
_NOTHING = ("approval", "resume")
"""Snapshots after which a call that waits is where it was."""


class Gate:
    """One per engine. Thread-safe; `admit` and `ask` block, in the thread of the call that waits."""

    def __init__(self, catalog: Catalog, approvals: ApprovalRecords) -> None:
        self._catalog, self._approvals, self._rows = catalog, approvals, catalog.approvals
        self._delivered: dict[ApprovalID, tuple[Sandbox, CallID]] = {}
        """The call of a run that got the approval's outcome. Its journal entry does not say so yet; a question from
        inside a call never gets an entry."""

    def admit(
        self,
        caller: WaitingCaller,
        call_id: CallID,
        name: str,
        arguments: Any,
        side_effect: SideEffect,
        *,
        asked: bool | str = False,
    ) -> Approval | None:
        """Return if the call may run. A person is asked first if the policy or the program says so (`asked`: True, or
        the question); then the approval is returned, which may have other arguments.

        The call itself is not recorded yet. Denied (by the policy, by a person, or because no person decided in time);
        Conflict (cancelled, or the sandbox ended: the approval stays pending); UsageError (the policy cannot be
        understood).
        """
        ruling = self._approvals.policy.read().judge(name, arguments, side_effect)
        ruling.check(name)
        if ruling.action == "allow" and not asked:
            return None
        question = asked if isinstance(asked, str) and asked else ruling.reason
        approval = self._await_decision(
            caller, Asked(call_id, name, arguments, side_effect, question, ruling.expires_s, digest(name, arguments))
        )
        if approval.status is ApprovalStatus.APPROVED:
            return approval
        raise Denied(_refusal(approval))

    def ask(self, caller: WaitingCaller, question: Question) -> Approval:
        """Ask a person something, and return the answer: approved (`edited` is the answer, if one was given), denied or
        expired. Conflict: as `admit`."""
        call, words, details = CallID(question.call_id), question.question, question.details
        limit_s = question.expires_s if question.expires_s is not None else self._approvals.policy.read().expires_s
        bound = digest(QUESTION, [words, details])
        return self._await_decision(caller, Asked(call, QUESTION, details, SideEffect.LOCAL, words, limit_s, bound))

    def _await_decision(self, caller: WaitingCaller, asked: Asked) -> Approval:
        """Wait for a decision, and return the approval. One that became stale is not returned: the call asks anew."""
        changed, waiting = self._approvals.changed, self._approvals.waiting
        while True:
            approval = self._find(caller, asked) or self._add(caller, asked)
            decided = None
            try:
                decided = self._wait(approval, caller)
            finally:
                with changed:
                    waiting.pop(approval.id, None)
                    if decided is not None:
                        self._deliver(approval, caller.sandbox, asked.call)
            if decided.status is not ApprovalStatus.STALE:
                return decided

    def _deliver(self, approval: Approval, sandbox: Sandbox, call: CallID) -> None:
        """Remember the call that got the outcome, as long as the run lasts: a program that runs again gets the answer too."""
        self._delivered = {key: to for key, to in self._delivered.items() if not to[0].closed}
        self._delivered[approval.id] = (sandbox, call)

    def _has_another(self, approval: Approval, sandbox: Sandbox, call: CallID) -> bool:
        """True if another call of this run got the outcome."""
        run, to = self._delivered.get(approval.id, (None, call))
        return run is sandbox and to != call

    def _find(self, caller: WaitingCaller, asked: Asked) -> Approval | None:
        """Take over an earlier approval for the same call that still fits. Other ones that no call waits for become
        stale."""
        changed, waiting, sandbox = self._approvals.changed, self._approvals.waiting, caller.sandbox
        for approval in reversed(self._rows.list(None, sandbox.trajectory.id)):
            if (approval.tool, approval.digest) != (asked.tool, asked.digest) or self._is_spent(approval, asked.call):
                continue
            with changed:
                if approval.id in waiting or self._has_another(approval, sandbox, asked.call):
                    continue  # another call that asks the same
                waiting[approval.id] = caller
            if self._is_here(approval.snapshot, sandbox.head) and self._approvals.has_same_files(approval, caller):
                if approval.entry != asked.call:
                    self._rows.move(approval.id, asked.call)
                return approval
            with changed:
                del waiting[approval.id]
            self._approvals.make_stale(approval)
        return None

    def _is_here(self, snapshot: SnapshotID, head: SnapshotID) -> bool:
        """True if nothing has happened after the snapshot but other questions, denials, and resumptions of the
        program."""
        at = self._catalog.snapshots.get(head)
        while (
            at.id != snapshot
            and (is_marker(self._catalog, at, _NOTHING) or self._was_denied(at))
            and at.parent is not None
        ):
            at = self._catalog.snapshots.get(at.parent)
        return at.id == snapshot

    def _was_denied(self, at: Snapshot) -> bool:
        if at.call.status is not CallStatus.FAILED:
            return False
        return any(entry.id == at.call.id and DENIED in entry.details for entry in self._catalog.journal.own(at.id))

    def _is_spent(self, approval: Approval, call: CallID) -> bool:
        """True if the approval lets no call run any more."""
        if approval.status is ApprovalStatus.PENDING:
            return False
        if approval.status is not ApprovalStatus.APPROVED:  # the very call is answered as before
            return approval.entry != call or approval.status is ApprovalStatus.STALE
        try:
            self._catalog.journal.get(approval.entry)
        except NotFound:
            return False
        return True

    def _add(self, caller: WaitingCaller, asked: Asked) -> Approval:
        """Record a new approval at a new snapshot."""
        approval_id = ApprovalID(new_id())
        snapshot = caller.step(marker("approval", {"tool": asked.tool, "approval": approval_id}))
        with self._approvals.changed:
            self._approvals.waiting[approval_id] = caller
        try:
            return self._approvals.add(approval_id, caller.sandbox.trajectory, snapshot.id, asked)
        except BaseException as exc:
            with self._approvals.changed:
                del self._approvals.waiting[approval_id]
            if isinstance(exc, NotFound):
                raise Denied(
                    f"{asked.tool} needs an approval, which cannot be asked for in a throw-away sandbox"
                ) from exc
            raise

    def _wait(self, approval: Approval, caller: WaitingCaller) -> Approval:
        while True:
            current = self._approvals.read(approval.id)
            if current.status is not ApprovalStatus.PENDING:
                return current
            with self._approvals.changed:
                if caller.cancelled.is_set() or caller.sandbox.closed or self._approvals.closed:
                    raise Conflict(
                        f"{approval.tool} still waits for approval {short(approval.id)}: its caller is gone; resume the trajectory to go on"
                    )
                self._approvals.changed.wait(_LOOK_S)


def _refusal(approval: Approval) -> str:
    if approval.status is ApprovalStatus.EXPIRED:
        return f"{approval.tool} did not run: nobody decided approval {short(approval.id)} in time"
    return f"{approval.by} did not let {approval.tool} run" + (f": {approval.reason}" if approval.reason else "")
