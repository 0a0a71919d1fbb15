"""Calls that wait for a person.

A gated call takes a snapshot, records an approval that is bound to (tool, digest of the arguments, snapshot), and
waits. The approval is a row: it survives the daemon, and a repeated call finds it again, under any id. One approval
lets one call run, once. It is spent when its call has been recorded as begun. Inside a run, only the call that got the
answer gets it again.

The approver has seen those arguments and those files. If the files have changed by then, the approval is stale: the
approver is told, and the call asks anew.

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

from snapshotd.engine.context import Context
from snapshotd.engine.mind.policy import FILE_NAME, PolicyFile, Ruling
from snapshotd.engine.mind.replay import DENIED
from snapshotd.engine.mind.webhook import Webhooks
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.sandbox.step import marker
from snapshotd.engine.storing import look
from snapshotd.errors import Conflict, Denied, NotFound, SnapshotdError, UsageError
from snapshotd.failpoints import hit
from snapshotd.types import (
    Approval,
    ApprovalID,
    ApprovalStatus,
    CallID,
    CallStatus,
    SideEffect,
    Snapshot,
    SnapshotID,
    ToolCall,
    Trajectory,
    new_id,
    short,
)

QUESTION = "question"
"""The tool's name of an approval that no call stands behind: the program asks a person something."""
MAX_WORDS = 4000
"""Characters of a reason, or of the decider's name."""
CALL_PATTERN = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""The name that a program outside of the sandbox gives its call."""
_LOOK_S = 0.25
"""Seconds between two checks of a waiting call for its caller."""
_NS = 1_000_000_000
_NOTHING = ("approval", "resume")
"""Snapshots after which a call that waits is where it was."""

Step = Callable[[ToolCall], Snapshot]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`approval` is the one that lets the call run; None: no person had to be asked. `arguments`: the ones to run it
    with."""

    approval: Approval | None
    arguments: Any


@dataclass(frozen=True, slots=True)
class _Asked:
    """A call's question to a person."""

    call: CallID
    tool: str
    arguments: Any
    side_effect: SideEffect
    question: str | None
    expires_s: float | None
    digest: str


@dataclass(frozen=True, slots=True)
class _Waiter:
    sandbox: Sandbox
    step: Step


class Gate:
    """One per engine. Thread-safe; `admit` and `question` block, in the thread of the call that waits."""

    def __init__(self, context: Context, webhooks: Webhooks) -> None:
        self._context, self._webhooks = context, webhooks
        self._rows = context.catalog.approvals
        self.policy = PolicyFile(context.state_dir / FILE_NAME)
        self._asking = threading.Lock()
        self._changed = threading.Condition()
        self._waiting: dict[ApprovalID, _Waiter] = {}
        self._delivered: dict[ApprovalID, tuple[Sandbox, CallID]] = {}
        """The call of a run that got the approval's outcome. Its journal entry does not say so yet; a question from
        inside a call never gets an entry."""
        self._closed = False

    def close(self) -> None:
        """No call waits any longer; pending approvals stay pending. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- calls ---------------------------------------------------------------------------------------------------------

    def admit(
        self,
        sandbox: Sandbox,
        call_id: CallID,
        name: str,
        arguments: Any,
        side_effect: SideEffect,
        *,
        asked: bool | str,
        expires_s: float | None,
        step: Step,
        cancelled: threading.Event,
    ) -> Verdict:
        """Returns if the call may run. A person is asked first if the policy or the program says so (`asked`: True, or
        the question).

        `step` takes a snapshot of the sandbox; `cancelled`: the caller is gone. The call itself is not recorded yet.
        Denied (by the policy, by a person, or because no person decided in time); Conflict (cancelled, or the sandbox
        ended: the approval stays pending); UsageError (the policy cannot be understood).
        """
        ruling = self._judge(name, arguments, side_effect)
        if ruling.action == "allow" and not asked:
            return Verdict(None, arguments)
        question = asked if isinstance(asked, str) and asked else ruling.reason
        limit = expires_s if expires_s is not None else ruling.expires_s
        wanted = _Asked(call_id, name, arguments, side_effect, question, limit, digest(name, arguments))
        approval = self._ask(sandbox, wanted, step, cancelled)
        if approval.status is ApprovalStatus.APPROVED:
            return Verdict(approval, arguments if approval.edited is None else approval.edited[0])
        raise Denied(_refusal(approval))

    def question(
        self,
        sandbox: Sandbox,
        call_id: CallID,
        question: str,
        details: Any,
        *,
        expires_s: float | None,
        step: Step,
        cancelled: threading.Event,
    ) -> Approval:
        """Ask a person something; answered when it is decided: approved (`edited` is the answer, if one was given),
        denied or expired."""
        limit = expires_s if expires_s is not None else self.policy.read().expires_s
        wanted = _Asked(
            call_id, QUESTION, details, SideEffect.LOCAL, question, limit, digest(QUESTION, [question, details])
        )
        return self._ask(sandbox, wanted, step, cancelled)

    def ask(
        self,
        trajectory: Trajectory,
        call: CallID,
        tool: str,
        arguments: Any,
        side_effect: SideEffect,
        *,
        question: str | None,
        expires_s: float | None,
    ) -> Approval | None:
        """See `ApprovalService.ask`."""
        if not CALL_PATTERN.fullmatch(call):
            raise UsageError(f"the call {call[:80]!r} is malformed: use 1 to 64 letters, digits, '.', '_' or '-'")
        conceal = self._context.secrecy.of(trajectory).conceal
        arguments = conceal(arguments)
        with self._asking:
            known = self._rows.of_entry(call)
            is_new = known is None
            if known is None:
                limit = self._judge(tool, arguments, side_effect)
                if limit.action == "allow" and not question:
                    return None
                known = self._asked(
                    ApprovalID(new_id()),
                    trajectory,
                    trajectory.head,
                    _Asked(
                        call,
                        tool,
                        arguments,
                        side_effect,
                        conceal(question) or limit.reason,
                        expires_s if expires_s is not None else limit.expires_s,
                        _digest_outside(tool, call, arguments),
                    ),
                )
                self._rows.add(known)
                hit("engine.approval.recorded")
        if is_new:
            self._announce(known)
        if (known.trajectory, known.digest) != (trajectory.id, _digest_outside(tool, call, arguments)):
            raise Conflict(
                f"call {call} of {tool} cannot be asked about because another call of that name was: give it a name of its own"
            )
        return self._expire(known) if _waits_too_long(known) else known

    def _judge(self, tool: str, arguments: Any, side_effect: SideEffect) -> Ruling:
        """The policy's word. Denied."""
        ruling = self.policy.read().judge(tool, arguments, side_effect)
        if ruling.action == "deny":
            raise Denied(
                f"the policy does not let {tool} run with these arguments"
                + (f": {ruling.reason}" if ruling.reason else "")
            )
        return ruling

    def _ask(self, sandbox: Sandbox, wanted: _Asked, step: Step, cancelled: threading.Event) -> Approval:
        """The decided approval. A stale one is not returned: the call asks anew."""
        while True:
            approval = self._known(sandbox, wanted, step) or self._new(sandbox, wanted, step)
            decided = None
            try:
                decided = self._wait(approval, sandbox, cancelled)
            finally:
                with self._changed:
                    self._waiting.pop(approval.id, None)
                    if decided is not None:
                        self._deliver(approval, sandbox, wanted.call)
            if decided.status is not ApprovalStatus.STALE:
                return decided

    def _deliver(self, approval: Approval, sandbox: Sandbox, call: CallID) -> None:
        """Forgotten with the run: a program that runs again finds the answer."""
        self._delivered = {key: to for key, to in self._delivered.items() if not to[0].closed}
        self._delivered[approval.id] = (sandbox, call)

    def _has_another(self, approval: Approval, sandbox: Sandbox, call: CallID) -> bool:
        """True if another call of this run got the outcome."""
        run, to = self._delivered.get(approval.id, (None, call))
        return run is sandbox and to != call

    def _known(self, sandbox: Sandbox, wanted: _Asked, step: Step) -> Approval | None:
        """An earlier approval for the same call that still fits: this call takes it over. Other ones that no call waits
        for become stale."""
        for approval in reversed(self._rows.list(None, sandbox.trajectory.id)):
            if (approval.tool, approval.digest) != (wanted.tool, wanted.digest) or self._spent(approval, wanted.call):
                continue
            with self._changed:
                if approval.id in self._waiting or self._has_another(approval, sandbox, wanted.call):
                    continue  # another call that asks the same
                self._waiting[approval.id] = _Waiter(sandbox, step)
            if self._is_here(approval.snapshot, sandbox.head) and self._same_files(approval, sandbox, step):
                if approval.entry != wanted.call:
                    self._rows.move(approval.id, wanted.call)
                return approval
            with self._changed:
                del self._waiting[approval.id]
            if approval.status is ApprovalStatus.PENDING:
                self._decide(approval, ApprovalStatus.STALE, None, "it was asked anew, at another snapshot")
        return None

    def _is_here(self, snapshot: SnapshotID, head: SnapshotID) -> bool:
        """True if nothing has happened after the snapshot but other questions, denials, and resumptions of the
        program."""
        at = self._context.catalog.get_snapshot(head)
        while at.id != snapshot and (at.call.name in _NOTHING or self._was_denied(at)) and at.parent is not None:
            at = self._context.catalog.get_snapshot(at.parent)
        return at.id == snapshot

    def _was_denied(self, at: Snapshot) -> bool:
        if at.call.status is not CallStatus.FAILED:
            return False
        return any(
            entry.id == at.call.id and DENIED in entry.details for entry in self._context.catalog.own_entries(at.id)
        )

    def _spent(self, approval: Approval, call: CallID) -> bool:
        """True if the approval lets no call run any more."""
        if approval.status is ApprovalStatus.PENDING:
            return False
        if approval.status is not ApprovalStatus.APPROVED:
            return (
                approval.entry != call or approval.status is ApprovalStatus.STALE
            )  # the very call is answered as before
        try:
            self._context.catalog.entry(approval.entry)
        except NotFound:
            return False
        return True

    def _new(self, sandbox: Sandbox, wanted: _Asked, step: Step) -> Approval:
        approval_id = ApprovalID(new_id())
        snapshot = step(marker("approval", {"tool": wanted.tool, "approval": approval_id}))
        approval = self._asked(approval_id, sandbox.trajectory, snapshot.id, wanted)
        with self._changed:
            self._waiting[approval_id] = _Waiter(sandbox, step)
        try:
            self._rows.add(approval)
        except BaseException as exc:
            with self._changed:
                del self._waiting[approval_id]
            if isinstance(exc, NotFound):
                raise Denied(
                    f"{wanted.tool} needs an approval, which cannot be asked for in a throw-away sandbox"
                ) from exc
            raise
        hit("engine.approval.recorded")
        self._announce(approval)
        return approval

    def _asked(self, approval: ApprovalID, trajectory: Trajectory, snapshot: SnapshotID, wanted: _Asked) -> Approval:
        now = time.time_ns()
        return Approval(
            id=approval,
            trajectory=trajectory.id,
            entry=wanted.call,
            tool=wanted.tool,
            arguments=wanted.arguments,
            digest=wanted.digest,
            snapshot=snapshot,
            side_effect=wanted.side_effect,
            created_at_ns=now,
            question=wanted.question,
            expires_at_ns=None if wanted.expires_s is None else now + int(wanted.expires_s * _NS),
        )

    def _wait(self, approval: Approval, sandbox: Sandbox, cancelled: threading.Event) -> Approval:
        while True:
            current = self._rows.find(approval.id)
            if current.status is not ApprovalStatus.PENDING:
                return current
            if _waits_too_long(current):
                return self._expire(current)
            with self._changed:
                if cancelled.is_set() or sandbox.closed or self._closed:
                    raise Conflict(
                        f"{approval.tool} still waits for approval {short(approval.id)}: its caller is gone; resume the trajectory to go on"
                    )
                self._changed.wait(_LOOK_S)

    def _same_files(self, approval: Approval, sandbox: Sandbox, step: Step) -> bool:
        """True if the sandbox holds the files that the approval is bound to. Takes a snapshot first if files have
        changed since the last one."""
        with sandbox.lock:
            if not sandbox.closed and sandbox.root.changed:
                step(marker("approval", {"tool": approval.tool, "approval": approval.id}))
            head = sandbox.head
        return self._equal_files(approval.snapshot, head)

    def _equal_files(self, a: SnapshotID, b: SnapshotID) -> bool:
        catalog = self._context.catalog
        if a == b or catalog.get_snapshot(a).stack == catalog.get_snapshot(b).stack:
            return True
        return next(look.changes(self._context, a, b), None) is None

    # -- people --------------------------------------------------------------------------------------------------------

    def list(self, status: ApprovalStatus | None) -> list[Approval]:
        """Oldest first. Pending approvals whose time is over become expired here."""
        for approval in self._rows.list(ApprovalStatus.PENDING):
            if _waits_too_long(approval):
                self._expire(approval)
        return self._rows.list(status)

    def find(self, ref: str) -> Approval:
        """By unique id prefix. NotFound, Ambiguous."""
        return self._rows.find(ref)

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
        return self._context.secrecy.of(self._context.catalog.get_trajectory(approval.trajectory)).conceal

    def _open(self, ref: str, by: str, reason: str | None) -> Approval:
        if not by or not by.isprintable() or max(len(by), len(reason or "")) > MAX_WORDS:
            raise UsageError(
                f"the decider's name must be printable text, and the name and the reason have at most {MAX_WORDS} characters"
            )
        approval = self._rows.find(ref)
        if _waits_too_long(approval):
            approval = self._expire(approval)
        if approval.status is not ApprovalStatus.PENDING:
            who = f" by {approval.by}" if approval.by else ""
            raise Conflict(
                f"approval {short(approval.id)} of {approval.tool} is {approval.status}{who}; it cannot be decided again"
            )
        return approval

    def _still_holds(self, approval: Approval) -> bool:
        if approval.digest == _digest_outside(approval.tool, approval.entry, approval.arguments):
            return True
        with self._changed:
            waiter = self._waiting.get(approval.id)
        if waiter is not None and not waiter.sandbox.closed:
            return self._same_files(approval, waiter.sandbox, waiter.step)
        return self._equal_files(approval.snapshot, self._context.catalog.get_trajectory(approval.trajectory).head)

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def _expire(self, approval: Approval) -> Approval:
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
        with self._changed:
            self._changed.notify_all()
        self._announce(decided)
        return decided

    def _announce(self, approval: Approval) -> None:
        self._context.events.tell(
            approval.trajectory,
            {"event": "approval", "id": approval.id, "tool": approval.tool, "status": str(approval.status)},
        )
        try:
            webhook = self.policy.read().webhook
        except SnapshotdError:
            return  # every gated call says so, louder
        if webhook is not None:
            told = {
                "event": "approval",
                "id": approval.id,
                "name": approval.tool,
                "status": str(approval.status),
                "trajectory": approval.trajectory,
                "snapshot": approval.snapshot,
                "question": approval.question,
                "side_effect": str(approval.side_effect),
                "by": approval.by,
            }
            self._webhooks.send(webhook, told)


def digest(tool: str, arguments: Any) -> str:
    """Digest that binds an approval to a call: SHA-256 of the canonical JSON of [tool, arguments], hexadecimal."""
    text = json.dumps([tool, arguments], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _digest_outside(tool: str, call: CallID, arguments: Any) -> str:
    """The digest of a call from outside. No call of a sandbox has it, whatever that one's name and arguments are."""
    return digest(tool, [call, arguments])


def _waits_too_long(approval: Approval) -> bool:
    """True if nobody has decided it and its time is over."""
    return (
        approval.status is ApprovalStatus.PENDING
        and approval.expires_at_ns is not None
        and approval.expires_at_ns <= time.time_ns()
    )


def _refusal(approval: Approval) -> str:
    if approval.status is ApprovalStatus.EXPIRED:
        return f"{approval.tool} did not run: nobody decided approval {short(approval.id)} in time"
    return f"{approval.by} did not let {approval.tool} run" + (f": {approval.reason}" if approval.reason else "")
