"""The records of approvals: questions about calls, and the answers of people. gate.py has the calls that wait for them.

A program outside of the sandbox asks without waiting (`ask`), and comes back for the answer. Its approval is bound to
the name that it gives the call.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from snapshotd.api.approvals import AskRequest
from snapshotd.engine.context import Context
from snapshotd.engine.journal.approval.policy import FILE_NAME, PolicyFile
from snapshotd.engine.journal.approval.webhook import Webhooks
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.sandbox.step import marker
from snapshotd.engine.storage import look
from snapshotd.errors import Conflict, SnapshotdError, UsageError
from snapshotd.failpoints import hit
from snapshotd.types import (
    Approval,
    ApprovalID,
    ApprovalStatus,
    CallID,
    SideEffect,
    Snapshot,
    SnapshotID,
    ToolCall,
    Trajectory,
    new_id,
    short,
)

MAX_WORDS = 4000
"""Characters of a reason, or of the decider's name."""
CALL_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""The name that a program outside of the sandbox gives its call."""
_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Asked:
    """A call's question to a person. `digest` binds the answer to it."""

    call: CallID
    tool: str
    arguments: Any
    side_effect: SideEffect
    question: str | None
    expires_s: float | None
    digest: str


@dataclass(frozen=True, slots=True)
class WaitingCaller:
    """The caller of a call that may have to wait. `step` takes a snapshot of its sandbox; `cancelled` is set when it is
    gone."""

    sandbox: Sandbox
    step: Callable[[ToolCall], Snapshot]
    cancelled: threading.Event


class ApprovalRecords:
    """One per engine. Thread-safe."""

    def __init__(self, context: Context, webhooks: Webhooks) -> None:
        self._context, self._webhooks = context, webhooks
        self._rows = context.catalog.approvals
        self.policy = PolicyFile(context.state_dir / FILE_NAME)
        self._asking = threading.Lock()
        self.changed = threading.Condition()
        """Told of every outcome; guards `waiting`."""
        self.waiting: dict[ApprovalID, WaitingCaller] = {}
        """The call that waits for each approval."""
        self.closed = False

    def close(self) -> None:
        """Let no call wait any longer; pending approvals stay pending. Idempotent."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    # -- questions -----------------------------------------------------------------------------------------------------

    def ask(self, trajectory: Trajectory, request: AskRequest) -> Approval | None:
        """See `ApprovalService.ask`."""
        call, tool, side_effect = CallID(request.call), request.tool, SideEffect(request.side_effect)
        if not CALL_PATTERN.fullmatch(call):
            raise UsageError(f"the call {call[:80]!r} is malformed: use 1 to 64 letters, digits, '.', '_' or '-'")
        conceal = self._context.secrecy.of(trajectory).conceal
        arguments = conceal(request.arguments)
        bound = _digest_outside(tool, call, arguments)
        with self._asking:
            known = self._rows.of_entry(trajectory.id, call)
            is_new = known is None
            if known is None:
                ruling = self.policy.read().judge(tool, arguments, side_effect)
                ruling.check(tool)
                if ruling.action == "allow" and not request.question:
                    return None
                limit_s = request.expires_s if request.expires_s is not None else ruling.expires_s
                why = conceal(request.question) or ruling.reason
                asked = Asked(call, tool, arguments, side_effect, why, limit_s, bound)
                known = self._record(ApprovalID(new_id()), trajectory, trajectory.head, asked)
        if is_new:
            self._announce(known)
        if known.digest != bound:
            raise Conflict(
                f"call {call} of {tool} cannot be asked about because another call of that name was: give it a name of its own"
            )
        return self._expire_late(known)

    def add(self, approval: ApprovalID, trajectory: Trajectory, snapshot: SnapshotID, asked: Asked) -> Approval:
        """Record a pending approval, and announce it. NotFound: the trajectory has no row."""
        added = self._record(approval, trajectory, snapshot, asked)
        self._announce(added)
        return added

    def _record(self, approval: ApprovalID, trajectory: Trajectory, snapshot: SnapshotID, asked: Asked) -> Approval:
        now = time.time_ns()
        added = Approval(
            id=approval,
            trajectory=trajectory.id,
            entry=asked.call,
            tool=asked.tool,
            arguments=asked.arguments,
            digest=asked.digest,
            snapshot=snapshot,
            side_effect=asked.side_effect,
            created_at_ns=now,
            question=asked.question,
            expires_at_ns=None if asked.expires_s is None else now + int(asked.expires_s * _NS),
        )
        self._rows.add(added)
        hit("engine.approval.recorded")
        return added

    # -- files ---------------------------------------------------------------------------------------------------------

    def has_same_files(self, approval: Approval, caller: WaitingCaller) -> bool:
        """True if the caller's sandbox holds the files that the approval is bound to. Takes a snapshot first if files
        have changed since the last one."""
        sandbox = caller.sandbox
        with sandbox.lock:
            if not sandbox.closed and sandbox.root.changed:
                caller.step(marker("approval", {"tool": approval.tool, "approval": approval.id}))
            head = sandbox.head
        return self._equal_files(approval.snapshot, head)

    def _equal_files(self, a: SnapshotID, b: SnapshotID) -> bool:
        catalog = self._context.catalog
        if a == b or catalog.snapshots.get(a).stack == catalog.snapshots.get(b).stack:
            return True
        return next(look.changes(self._context, a, b), None) is None

    def _still_holds(self, approval: Approval) -> bool:
        if approval.digest == _digest_outside(approval.tool, approval.entry, approval.arguments):
            return True
        with self.changed:
            caller = self.waiting.get(approval.id)
        if caller is not None and not caller.sandbox.closed:
            return self.has_same_files(approval, caller)
        return self._equal_files(approval.snapshot, self._context.catalog.trajectories.get(approval.trajectory).head)

    # -- people --------------------------------------------------------------------------------------------------------

    def list(self, status: ApprovalStatus | None) -> list[Approval]:
        """Oldest first. Pending approvals whose time is over become expired here."""
        for approval in self._rows.list(ApprovalStatus.PENDING):
            self._expire_late(approval)
        return self._rows.list(status)

    def find(self, ref: str) -> Approval:
        """The approval with this unique prefix of its id. NotFound, Ambiguous."""
        return self._rows.find(ref)

    def read(self, ref: str) -> Approval:
        """As `find`; it becomes expired here if its time is over."""
        return self._expire_late(self._rows.find(ref))

    def approve(self, ref: str, *, by: str, reason: str | None, arguments: tuple[Any] | None) -> Approval:
        """See `ApprovalService.approve`."""
        approval = self._open(ref, by, reason)
        if not self._still_holds(approval):
            self._decide(approval, ApprovalStatus.STALE, by, "the files had changed since it was asked")
            raise Conflict(
                f"approval {short(approval.id)} of {approval.tool} is stale: the files of {short(approval.trajectory)} have changed since "
                "it was asked for; the call asks anew (`snapshotd approvals`)"
            )
        conceal = self._concealer(approval)
        edited = None if arguments is None else (conceal(arguments[0]),)
        return self._decide(approval, ApprovalStatus.APPROVED, by, conceal(reason), edited)

    def deny(self, ref: str, *, by: str, reason: str | None) -> Approval:
        """See `ApprovalService.deny`."""
        approval = self._open(ref, by, reason)
        return self._decide(approval, ApprovalStatus.DENIED, by, self._concealer(approval)(reason))

    def _concealer(self, approval: Approval) -> Callable[[Any], Any]:
        """Conceals a person's words with the funnel of the approval's trajectory, as it conceals the agent's."""
        return self._context.secrecy.of(self._context.catalog.trajectories.get(approval.trajectory)).conceal

    def _open(self, ref: str, by: str, reason: str | None) -> Approval:
        if not by or not by.isprintable() or max(len(by), len(reason or "")) > MAX_WORDS:
            raise UsageError(
                f"the decider's name must be printable text, and the name and the reason have at most {MAX_WORDS} characters"
            )
        approval = self.read(ref)
        if approval.status is not ApprovalStatus.PENDING:
            who = f" by {approval.by}" if approval.by else ""
            raise Conflict(
                f"approval {short(approval.id)} of {approval.tool} is {approval.status}{who}; it cannot be decided again"
            )
        return approval

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def make_stale(self, approval: Approval) -> None:
        """Make a pending approval stale, because its call asks anew."""
        if approval.status is ApprovalStatus.PENDING:
            self._decide(approval, ApprovalStatus.STALE, None, "it was asked anew, at another snapshot")

    def _expire_late(self, approval: Approval) -> Approval:
        """The approval, which becomes expired if nobody has decided it and its time is over."""
        expires_at_ns = approval.expires_at_ns
        if approval.status is not ApprovalStatus.PENDING or expires_at_ns is None or expires_at_ns > time.time_ns():
            return approval
        return self._decide(approval, ApprovalStatus.EXPIRED, None, "nobody decided in time")

    def _decide(
        self,
        approval: Approval,
        status: ApprovalStatus,
        by: str | None,
        reason: str | None,
        edited: tuple[Any] | None = None,
    ) -> Approval:
        """Record an outcome; if another outcome came first, that one is returned when no person decides this one."""
        try:
            decided = self._rows.decide(approval.id, status, at_ns=time.time_ns(), by=by, reason=reason, edited=edited)
        except Conflict:
            if by is not None:
                raise
            return self._rows.find(approval.id)
        hit("engine.approval.decided")
        with self.changed:
            self.changed.notify_all()
        self._announce(decided)
        return decided

    def _announce(self, approval: Approval) -> None:
        told = {"event": "approval", "id": approval.id}
        status = str(approval.status)
        self._context.events.tell(approval.trajectory, {**told, "tool": approval.tool, "status": status})
        try:
            webhook = self.policy.read().webhook
        except SnapshotdError:
            return  # every gated call says so, louder
        if webhook is not None:
            more = {
                "name": approval.tool,
                "status": status,
                "trajectory": approval.trajectory,
                "snapshot": approval.snapshot,
                "question": approval.question,
                "side_effect": str(approval.side_effect),
                "by": approval.by,
            }
            self._webhooks.send(webhook, {**told, **more})


def digest(tool: str, arguments: Any) -> str:
    """Digest that binds an approval to a call: SHA-256 of the canonical JSON of [tool, arguments], hexadecimal."""
    text = json.dumps([tool, arguments], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _digest_outside(tool: str, call: CallID, arguments: Any) -> str:
    """The digest of a call from outside. No call of a sandbox has it, whatever that one's name and arguments are."""
    return digest(tool, [call, arguments])
