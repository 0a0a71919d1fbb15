"""The records of one sandbox's mind: every intent, outcome, message and state is written here, through the funnel.

Order of writing: the intent is durable before `begin` returns; a tool call's outcome, its files, the messages before it
and the state are one commit (step.py); a model's reply is durable when `end_model` returns.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from snapshotd.catalog.base import Catalog
from snapshotd.engine.journal.answers import reveal_entry
from snapshotd.engine.journal.idempotency import Keys
from snapshotd.engine.journal.pending import Open, Pending
from snapshotd.engine.journal.replay import DENIED, SAID
from snapshotd.engine.journal.reuse import BEYOND, CODE, REUSE
from snapshotd.engine.ownership import ALONE, Ownership
from snapshotd.engine.protocol.agent_handler import Intent
from snapshotd.engine.sandbox.live import LiveRecord
from snapshotd.engine.sandbox.root import Captured
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.sandbox.step import StepListener, commit_step
from snapshotd.errors import Diverged, SnapshotdError
from snapshotd.failpoints import hit
from snapshotd.secrets.redactor import Funnel
from snapshotd.types import CallID, CallStatus, Ended, EntryKind, JournalEntry, SideEffect, Snapshot, ToolCall

_log = logging.getLogger(__name__)
_NEWEST = 256
"""Number of the newest snapshots among which `find_snapshot` looks."""


class Recorder:
    """The recorder of one live sandbox, from `adopt` to its end. Thread-safe."""

    def __init__(
        self,
        catalog: Catalog,
        funnel: Funnel,
        sandbox: Sandbox,
        listener: StepListener,
        keys: Keys | None = None,
        ownership: Ownership = ALONE,
    ) -> None:
        """`funnel`: of the trajectory. `keys`: of calls that the program makes again."""
        self._ownership = ownership
        self.sandbox, self.funnel, self._catalog, self._listener = sandbox, funnel, catalog, listener
        self.pending = Pending(sandbox)
        self._keys = keys or Keys()
        self.diverged: Diverged | None = None
        """Set once a resumed program has done something else; nothing of it is recorded any more."""

    def diverge(self, error: Diverged) -> None:
        """Record nothing any more: every method that records raises `error` from now on."""
        self.diverged = error

    def check(self) -> None:
        """Raise Diverged if the program has."""
        if self.diverged is not None:
            raise self.diverged

    # -- intents and outcomes ------------------------------------------------------------------------------------------

    def begin(self, intent: Intent, details: dict[str, Any] | None = None) -> Open:
        """Record an intent. Conflict, LimitExceeded, OutOfSpace; for an irreversible call also Undecided, Unavailable."""
        conceal = self.funnel.conceal
        self.check()
        details = conceal(dict(details or {}))
        if intent.compensate is not None:
            details["compensate"] = {"argv": conceal(list(intent.compensate))}
        details |= self.details_of(intent)
        if not intent.reuse:
            details[REUSE] = False
        call_id, name, arguments = CallID(intent.call_id), conceal(intent.name), conceal(intent.arguments)
        entry = JournalEntry(
            id=call_id,
            kind=intent.kind,
            name=name,
            arguments=arguments,
            after=self.sandbox.head,
            began_at_ns=time.time_ns(),
            side_effect=intent.side_effect,
            key=self._key(intent, name, arguments),
            facts=tuple(conceal(list(intent.facts))),
            details=details,
        )
        if intent.side_effect is SideEffect.IRREVERSIBLE:
            self._ownership.record_intent(self.sandbox.trajectory.id, entry)
        opened = self.pending.begin(entry, self._write)
        if intent.side_effect is SideEffect.IRREVERSIBLE:
            self._confirm(call_id)
        if intent.kind is not EntryKind.TASK:
            hit("engine.journal.begun")
        return opened

    def _confirm(self, call_id: CallID) -> None:
        """Check once more that an irreversible call may run. If it may not, record that it did not, and raise the error."""
        try:
            self._ownership.confirm_intent(call_id)
        except SnapshotdError as exc:
            self.pending.lose([call_id])
            self._end(Ended(call_id, CallStatus.UNKNOWN, time.time_ns(), error=f"it did not run: {exc.message}"))
            raise

    def details_of(self, intent: Intent) -> dict[str, Any]:
        """The task and the code of an intent, as details of its entry."""
        details: dict[str, Any] = {} if intent.task is None else {"task": self.funnel.conceal(intent.task)}
        return details if intent.code is None else {**details, CODE: self.funnel.conceal(intent.code)}

    def _key(self, intent: Intent, name: str, arguments: Any) -> str:
        if intent.key is not None:
            return self.funnel.conceal_text(intent.key)
        again = None if intent.side_effect is SideEffect.LOCAL else self._keys.take(name, arguments)
        return intent.call_id if again is None else again

    def _write(self, entry: JournalEntry) -> None:
        self._catalog.journal.begin(self.sandbox.trajectory.id, entry, fence=self.sandbox.writer.fence)

    def _end(self, ended: Ended) -> None:
        self._catalog.journal.end(self.sandbox.trajectory.id, ended, fence=self.sandbox.writer.fence)

    def end_step(self, opened: Open, call: ToolCall, details: dict[str, Any] | None = None) -> Snapshot:
        """Record the outcome of a tool call, with its snapshot."""
        self.check()
        beyond = opened.beyond or self.sandbox.use.commands  # a person's command may have changed these files, too
        own = {**({SAID: opened.said} if opened.said else {}), **({BEYOND: True} if beyond else {})}
        ended = Ended(
            opened.entry.id, call.status, time.time_ns(), error=call.error, details={**own, **(details or {})}
        )
        try:
            return commit_step(self._catalog, self.sandbox, call, self._listener, ended=ended)
        except SnapshotdError:
            if opened.entry.side_effect is not SideEffect.LOCAL:
                self._keep_outcome(ended)
            raise

    def _keep_outcome(self, ended: Ended) -> None:
        """Record a call that had effects outside but has no snapshot (the disk is full?), so that it does not run
        again."""
        try:
            self._end(ended)
        except SnapshotdError as exc:
            _log.error(
                "the outcome of call %s of %s is not recorded: %s", ended.id, self.sandbox.trajectory.id, exc.message
            )

    def end_model(
        self, opened: Open, status: CallStatus, result: Any, error: str | None, details: dict[str, Any]
    ) -> None:
        """Record the outcome of a model call; the next snapshot binds it."""
        self.check()
        conceal = self.funnel.conceal
        self._end(Ended(opened.entry.id, status, time.time_ns(), conceal(result), conceal(error), conceal(details)))
        hit("engine.journal.ended")

    def complete(
        self,
        kind: EntryKind,
        name: str,
        arguments: Any,
        call: ToolCall,
        *,
        began_at_ns: int,
        details: dict[str, Any],
        side_effect: SideEffect = SideEffect.LOCAL,
        captured: Captured | None = None,
    ) -> Snapshot:
        """Record something that has ended and was not recorded before (a task, a named snapshot), with its snapshot.
        `call.id` becomes the entry's. `captured`: as in `commit_step`."""
        self.check()
        entry = JournalEntry(
            id=call.id,
            kind=kind,
            name=name,
            arguments=arguments,
            after=self.sandbox.head,
            began_at_ns=began_at_ns,
            status=call.status,
            ended_at_ns=time.time_ns(),
            side_effect=side_effect,
            error=call.error,
            details=details,
        )
        return self.pending.record(
            entry,
            lambda whole: commit_step(
                self._catalog, self.sandbox, call, self._listener, entries=[whole], captured=captured
            ),
        )

    def record_denial(self, intent: Intent, why: str, details: dict[str, Any] | None = None) -> None:
        """Record a call that was not let run as failed, with the reason. Repeated under its id, it is recorded once. Not
        an error where it cannot be recorded: it does not run all the same."""
        conceal, now, call_id = self.funnel.conceal, time.time_ns(), CallID(intent.call_id)
        if self.find(call_id) is not None:
            return
        name, arguments = conceal(intent.name), conceal(intent.arguments)
        call = ToolCall(call_id, name, arguments, CallStatus.FAILED, now, 0, error=conceal(why))
        task = {} if intent.task is None else {"task": conceal(intent.task)}
        more = {DENIED: True, **task, **(details or {})}
        try:
            self.complete(
                EntryKind.TOOL, name, arguments, call, began_at_ns=now, details=more, side_effect=intent.side_effect
            )
        except SnapshotdError as exc:
            _log.error("a denied call of %s is not recorded: %s", self.sandbox.trajectory.id, exc.message)

    def record_question(self, call_id: CallID, name: str, arguments: Any, answer: Any, *, began_at_ns: int) -> None:
        """Record a question that was asked and answered."""
        entry = JournalEntry(
            id=call_id,
            kind=EntryKind.QUESTION,
            name=name,
            arguments=self.funnel.conceal(arguments),
            after=self.sandbox.head,
            began_at_ns=began_at_ns,
            status=CallStatus.DONE,
            ended_at_ns=time.time_ns(),
            result=self.funnel.conceal(answer),
        )
        self.pending.record(entry, self._write)

    def step(
        self,
        call: ToolCall,
        *,
        follows: Snapshot | None = None,
        keep_messages: int | None = None,
        entries: Sequence[JournalEntry] = (),
    ) -> Snapshot:
        """Take a snapshot that ends no open call. Arguments: as `commit_step`."""
        self.check()
        return commit_step(
            self._catalog,
            self.sandbox,
            call,
            self._listener,
            follows=follows,
            keep_messages=keep_messages,
            entries=entries,
        )

    # -- records of before ---------------------------------------------------------------------------------------------

    def find(self, call_id: str) -> JournalEntry | None:
        """The trajectory's entry of this id; None if it has none."""
        try:
            trajectory, entry = self._catalog.journal.find(call_id)
        except SnapshotdError:
            return None
        return entry if trajectory == self.sandbox.trajectory.id and entry.id == call_id else None

    def find_reply(self, name: str, arguments: Any) -> JournalEntry | None:
        """The newest reply to such a model call that no snapshot binds yet; None if there is none. All is as
        the program knows it."""
        asked = (EntryKind.MODEL, self.funnel.conceal_text(name), self.funnel.conceal(arguments), CallStatus.DONE)
        for entry in reversed(self._catalog.journal.unbound(self.sandbox.trajectory.id)):
            if (entry.kind, entry.name, entry.arguments, entry.status) == asked:
                return reveal_entry(self.funnel, entry)
        return None

    def find_snapshot(self, call_id: str) -> Snapshot | None:
        """The snapshot that was taken a moment ago for a request that is sent again; None if there is none."""
        newest = reversed(self._catalog.snapshots.of_trajectory(self.sandbox.trajectory.id, _NEWEST))
        return next((snapshot for snapshot in newest if snapshot.call.id == call_id), None)

    def reopen(self, call_id: str) -> Open | None:
        """The open call, if it has begun and its end is not recorded; its process asks again."""
        opened = self.pending.find_open(call_id)
        if opened is not None:
            return opened
        entry = self.find(call_id)
        return None if entry is None or entry.status is not None else self.pending.reopen(entry)

    def past(self) -> Iterable[JournalEntry]:
        """The journal up to the head, with what belongs to no snapshot yet."""
        return itertools.chain(
            self._catalog.journal.read(self.sandbox.head), self._catalog.journal.unbound(self.sandbox.trajectory.id)
        )

    def restore(self, record: LiveRecord) -> None:
        """Take over the pending records of an earlier daemon, which was killed."""
        unbound = self._catalog.journal.unbound(self.sandbox.trajectory.id)
        known = {entry.id for entry in unbound}
        self.pending.restore(
            record, self.sandbox.head, [entry for entry in unbound if entry.status is None], known.__contains__
        )

    def record_cut_off(self, call_id: str) -> None:
        """Record that a call ended with its daemon: its caller asks again."""
        if self.pending.find_open(call_id) is not None:
            self.pending.lose([call_id])
            error = "the daemon was killed meanwhile; it was asked again"
            self._end(Ended(CallID(call_id), CallStatus.UNKNOWN, time.time_ns(), error=error))
