"""The mind of one sandbox as it is recorded: journal, conversation and state.

The speakers for the agent (calls.py: the in-sandbox library; gateways.py: the wire to a model) report here each begin,
each end and each message, and learn if it happened before. Order of writing: the intent is durable before `begin`
returns; a tool call's outcome, its files, the messages before it and the state are one commit (step.py); a model's
reply is durable when `end` returns.

The replay of a program that was started again is in retracing.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from snapshotd.engine.context import Context
from snapshotd.engine.mind.agent_state import AgentState
from snapshotd.engine.mind.answers import as_recorded
from snapshotd.engine.mind.idempotency import Keys
from snapshotd.engine.mind.pending import Open, Pending
from snapshotd.engine.mind.replay import DENIED, SAID, Recorded, Resumption
from snapshotd.engine.mind.retracing import Live, Retracing, revealed
from snapshotd.engine.mind.reuse import BEYOND, CODE, REUSE, REUSED, EarlierCall, Reuse
from snapshotd.engine.protocol.agent_handler import Answer, Intent
from snapshotd.engine.sandbox.live import LiveRecord
from snapshotd.engine.sandbox.places import Places
from snapshotd.engine.sandbox.root import Captured
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.sandbox.step import StepListener, commit_step
from snapshotd.errors import DataLoss, LimitExceeded, NotFound, SnapshotdError
from snapshotd.failpoints import hit
from snapshotd.secrets.base import MARKER, MARKER_BYTES
from snapshotd.types import (
    CallID,
    CallStatus,
    Ended,
    EntryKind,
    JournalEntry,
    Message,
    SideEffect,
    Snapshot,
    ToolCall,
    new_id,
)

_log = logging.getLogger(__name__)
_NEWEST = 256
"""Snapshots among which one is looked for that was just taken."""


class Recorder:
    """The recorder of one live sandbox, from `adopt` to its end. Thread-safe."""

    def __init__(
        self,
        context: Context,
        sandbox: Sandbox,
        listener: StepListener,
        places: Places,
        resumption: Resumption | None = None,
        keys: Keys | None = None,
        reuse: Reuse | None = None,
    ) -> None:
        self.sandbox, self._listener, self._places, self._reuse = sandbox, listener, places, reuse
        self._context, self._catalog = context, context.catalog
        self.funnel = context.secrecy.of(sandbox.trajectory)
        """All records go in through it; answers to the program are revealed."""
        self.state = AgentState(sandbox, self.funnel)
        self.pending = Pending(sandbox)
        self._keys = keys
        self.replay = (
            Live(sandbox, context.catalog)
            if resumption is None
            else Retracing(context, sandbox, listener, places, self.funnel, self.state, resumption)
        )
        """The recorded past that the program still has to meet."""
        self._was_answered = self.is_answered
        """The program has been told so."""

    @property
    def is_answered(self) -> bool:
        """True if the program's next calls may be answered from records: its own, or those of earlier runs."""
        return self.replay.replaying or (self._reuse is not None and self._reuse.active)

    def take_live(self) -> bool:
        """True if the answer in the making is the first one after which nothing is answered from records."""
        with self.replay.lock:
            before, self._was_answered = self._was_answered, self.is_answered
            return before and not self._was_answered

    # -- entries -------------------------------------------------------------------------------------------------------

    def begin(self, intent: Intent, details: dict[str, Any] | None = None) -> Open:
        """Record an intent. Conflict, LimitExceeded, OutOfSpace."""
        conceal = self.funnel.conceal
        self.replay.check()
        details = conceal(dict(details or {}))
        if intent.compensate is not None:
            details["compensate"] = {"argv": conceal(list(intent.compensate))}
        if intent.task is not None:
            details["task"] = conceal(intent.task)
        if intent.code is not None:
            details[CODE] = conceal(intent.code)
        if not intent.reuse:
            details[REUSE] = False
        call_id = CallID(intent.call_id)
        entry = JournalEntry(
            id=call_id,
            kind=intent.kind,
            name=conceal(intent.name),
            arguments=conceal(intent.arguments),
            after=self.sandbox.head,
            began_at_ns=time.time_ns(),
            side_effect=intent.side_effect,
            key=self._key(intent, call_id),
            facts=tuple(conceal(list(intent.facts))),
            details=details,
        )
        opened = self.pending.begin(entry, self._record)
        if intent.kind is not EntryKind.TASK:
            hit("engine.journal.begun")
        return opened

    def _record(self, entry: JournalEntry) -> None:
        self._catalog.begin_entry(self.sandbox.trajectory.id, entry, fence=self.sandbox.writer.fence)

    def restore(self, record: LiveRecord) -> None:
        """Go on where an earlier daemon was killed."""
        unbound = self._catalog.unbound(self.sandbox.trajectory.id)
        known = {entry.id for entry in unbound}
        self.pending.restore(
            record, self.sandbox.head, [entry for entry in unbound if entry.status is None], known.__contains__
        )

    def cut_off(self, call_id: str) -> None:
        """A daemon was killed while it carried out this call: its caller asks again."""
        if self.pending.opened(call_id) is not None:
            self.pending.lost([call_id])
            ended = Ended(
                CallID(call_id),
                CallStatus.UNKNOWN,
                time.time_ns(),
                error="the daemon was killed meanwhile; it was asked again",
            )
            self._catalog.end_entry(self.sandbox.trajectory.id, ended, fence=self.sandbox.writer.fence)

    def known(self, call_id: str) -> JournalEntry | None:
        """The trajectory's entry of this id; None if it has none."""
        try:
            trajectory, entry = self._catalog.find_entry(call_id)
        except SnapshotdError:
            return None
        return entry if trajectory == self.sandbox.trajectory.id and entry.id == call_id else None

    def reply(self, name: str, arguments: Any) -> JournalEntry | None:
        """The newest reply to such a model call that no snapshot binds yet; None if there is none."""
        asked = (EntryKind.MODEL, self.funnel.conceal_text(name), self.funnel.conceal(arguments), CallStatus.DONE)
        for entry in reversed(self._catalog.unbound(self.sandbox.trajectory.id)):
            if (entry.kind, entry.name, entry.arguments, entry.status) == asked:
                return revealed(self.funnel, entry)
        return None

    def reopened(self, call_id: str) -> Open | None:
        """The open call, if it has begun and its end is not recorded; its process asks again."""
        opened = self.pending.opened(call_id)
        if opened is not None:
            return opened
        entry = self.known(call_id)
        return None if entry is None or entry.status is not None else self.pending.reopen(entry)

    def taken(self, call_id: str) -> Snapshot | None:
        """The snapshot that a request took which is sent again."""
        newest = reversed(self._catalog.snapshots(self.sandbox.trajectory.id, _NEWEST))
        return next((snapshot for snapshot in newest if snapshot.call.id == call_id), None)

    def _key(self, intent: Intent, call_id: CallID) -> str:
        if intent.key is not None:
            return self.funnel.conceal_text(intent.key)
        if self._keys is not None and intent.side_effect is not SideEffect.LOCAL:
            cut_off = self._keys.take(self.funnel.conceal_text(intent.name), self.funnel.conceal(intent.arguments))
            if cut_off is not None:
                return cut_off
        return call_id

    def end_step(self, opened: Open, call: ToolCall, details: dict[str, Any] | None = None) -> Snapshot:
        """The outcome of a tool call, with its snapshot."""
        self.replay.check()
        ended = Ended(
            opened.entry.id,
            call.status,
            time.time_ns(),
            error=call.error,
            details={
                **({SAID: opened.said} if opened.said else {}),
                **({BEYOND: True} if opened.beyond else {}),
                **(details or {}),
            },
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
            self._catalog.end_entry(self.sandbox.trajectory.id, ended, fence=self.sandbox.writer.fence)
        except SnapshotdError as exc:
            _log.error(
                "the outcome of call %s of %s is not recorded: %s", ended.id, self.sandbox.trajectory.id, exc.message
            )

    def end_model(
        self, opened: Open, status: CallStatus, result: Any, error: str | None, details: dict[str, Any]
    ) -> None:
        """The outcome of a model call; the next snapshot binds it."""
        self.replay.check()
        conceal = self.funnel.conceal
        ended = Ended(opened.entry.id, status, time.time_ns(), conceal(result), conceal(error), conceal(details))
        self._catalog.end_entry(self.sandbox.trajectory.id, ended, fence=self.sandbox.writer.fence)
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
        """Something that is recorded when it has ended (a task, a named snapshot), with its snapshot. `call.id` becomes
        the entry's. `captured`: as in `commit_step`."""
        self.replay.check()
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
        return self.pending.taking(
            entry,
            lambda whole: commit_step(
                self._catalog, self.sandbox, call, self._listener, entries=[whole], captured=captured
            ),
        )

    # -- calls of earlier runs -----------------------------------------------------------------------------------------

    def reused(self, intent: Intent) -> Answer | None:
        """The answer to a tool's call from an earlier run: recorded, with the sandbox's files switched to those after
        it. None: it has to run, and so has everything after it. Errors as `end_step`."""
        if self._reuse is None:
            return None
        if intent.kind is EntryKind.MODEL:
            return self._replied_before(intent)
        if intent.kind is not EntryKind.TOOL:
            return None
        with self.replay.lock:
            if self.replay.replaying or not self._reuse.active:
                return None
            conceal = self.funnel.conceal
            asked = replace(intent, name=conceal(intent.name), arguments=conceal(intent.arguments))
            for step in self._reuse.steps(asked):
                answer = self._known_answer(step)
                taken = None if answer is None else self._take_over(asked, step)
                if answer is not None and taken is not None:
                    self._reuse.took(step, taken)
                    answer["replayed"]["snapshot"] = taken.id
                    return answer
            self._reuse.end()
            return None

    def reused_reply(self, name: str, arguments: Any, lane: int | None) -> JournalEntry | None:
        """The entry of an earlier run's reply to this model request, in a conversation; None: the model has to be
        asked."""
        if self._reuse is None:
            return None
        with self.replay.lock:
            if self.replay.replaying:
                return None
            entry = self._reuse.reply(self.funnel.conceal_text(name), self.funnel.conceal(arguments), lane)
        if entry is None:
            return None
        entry = revealed(self.funnel, entry)
        return None if MARKER.search(json.dumps(entry.result)) else entry

    def _replied_before(self, intent: Intent) -> Answer | None:
        entry = self.reused_reply(intent.name, intent.arguments, None)
        if entry is None:
            return None
        opened = self.begin(intent, {REUSED: entry.id})
        self.pending.take(opened.entry.id)
        self.end_model(opened, CallStatus.DONE, entry.result, None, {})
        return as_recorded(self._context, self.funnel, Recorded(entry, None))

    def _known_answer(self, step: EarlierCall) -> Answer | None:
        """A step as the program is answered. None: its result is gone, too large, or holds a secret that this run does
        not know."""
        try:
            answer = as_recorded(self._context, self.funnel, Recorded(revealed(self.funnel, step.entry), step.snapshot))
        except (NotFound, DataLoss, LimitExceeded):
            return None
        return None if MARKER_BYTES.search(answer.get("body", b"")) else answer

    def _take_over(self, intent: Intent, step: EarlierCall) -> Snapshot | None:
        """A step of an earlier run becomes this run's next one. None: its files are gone."""
        began_at_ns, clock_ns = time.time_ns(), time.perf_counter_ns()
        details: dict[str, Any] = {REUSED: step.snapshot.id}
        if intent.code is not None:
            details[CODE] = intent.code
        if intent.task is not None:
            details["task"] = self.funnel.conceal(intent.task)
        with contextlib.ExitStack() as held:
            held.enter_context(self.sandbox.lock)
            try:
                source = held.enter_context(self._context.pins.pinned(step.snapshot.id))
            except NotFound:
                return None
            captured = self._places.take_over(self.sandbox, source)
            if captured is None:
                return None
            hit("engine.reuse.moved")
            call = replace(
                source.call,
                id=CallID(intent.call_id),
                started_at_ns=began_at_ns,
                duration_ns=time.perf_counter_ns() - clock_ns,
            )
            return self.complete(
                EntryKind.TOOL,
                call.name,
                call.arguments,
                call,
                began_at_ns=began_at_ns,
                details=details,
                captured=captured,
            )

    def reused_before(self, call_id: str) -> Recorded | None:
        """A call that was answered from an earlier run, and asks again because it did not hear that."""
        entry = self.known(call_id)
        if entry is None or entry.status is None or REUSED not in entry.details:
            return None
        if entry.kind is EntryKind.MODEL or entry.snapshot is None:
            return Recorded(revealed(self.funnel, entry), None)
        return Recorded(revealed(self.funnel, entry), self._catalog.get_snapshot(entry.snapshot))

    # -- others --------------------------------------------------------------------------------------------------------

    def refused(self, intent: Intent, why: str, details: dict[str, Any] | None = None) -> None:
        """A call that was not let run: it has failed, with the reason. Repeated under its id, it is recorded once. Not
        an error where it cannot be recorded: it does not run all the same."""
        conceal, now = self.funnel.conceal, time.time_ns()
        task = {} if intent.task is None else {"task": conceal(intent.task)}
        arguments = conceal(intent.arguments)
        call = ToolCall(
            CallID(intent.call_id), conceal(intent.name), arguments, CallStatus.FAILED, now, 0, error=conceal(why)
        )
        if self.known(call.id) is not None:
            return
        try:
            self.complete(
                EntryKind.TOOL,
                call.name,
                arguments,
                call,
                began_at_ns=now,
                details={DENIED: True, **task, **(details or {})},
                side_effect=intent.side_effect,
            )
        except SnapshotdError as exc:
            _log.error("a denied call of %s is not recorded: %s", self.sandbox.trajectory.id, exc.message)

    def answered(self, call_id: CallID, name: str, arguments: Any, result: Any, *, began_at_ns: int) -> None:
        """A question that was asked and answered."""
        entry = JournalEntry(
            id=call_id,
            kind=EntryKind.QUESTION,
            name=name,
            arguments=self.funnel.conceal(arguments),
            after=self.sandbox.head,
            began_at_ns=began_at_ns,
            status=CallStatus.DONE,
            ended_at_ns=time.time_ns(),
            result=self.funnel.conceal(result),
        )
        self.pending.taking(entry, self._record)

    def step(self, call: ToolCall) -> Snapshot:
        """A snapshot that ends no entry."""
        self.replay.check()
        return commit_step(self._catalog, self.sandbox, call, self._listener)

    def past(self) -> Iterable[JournalEntry]:
        """The journal up to the head, with what belongs to no snapshot yet."""
        return itertools.chain(
            self._catalog.journal(self.sandbox.head), self._catalog.unbound(self.sandbox.trajectory.id)
        )

    def told(self, limit: int) -> list[Message]:
        """The last messages of the conversation up to the head, as the program knows them."""
        with self.sandbox.lock:
            first = max(0, self.sandbox.writer.messages - limit)
        return [
            Message(message.role, self.funnel.reveal(message.content))
            for message in self._catalog.conversation(self.sandbox.head, first)
        ]

    def unrecorded(self, name: str, arguments: Any) -> Open:
        """A call that a replayed program makes by itself; its end is recorded already."""
        entry = JournalEntry(CallID(new_id()), EntryKind.TOOL, name, arguments, self.sandbox.head, time.time_ns())
        return Open(entry, time.perf_counter_ns())

    def met(self, messages: Sequence[Message]) -> None:
        """Messages of a replayed program, read from the wire. They are appended where the conversation does not hold
        them yet: no snapshot had bound them at the end, or the program has just gone live."""
        with self.replay.lock, self.sandbox.lock:
            for message in self.replay.untold(messages):
                self.pending.message(self._concealed(message))

    # -- recorded values, conversation, state --------------------------------------------------------------------------

    def fact(self, kind: str, value: Any, rid: str | None = None) -> Any:
        """See `AgentHandler.fact`."""
        known = self.recorded_fact(kind)
        if known is not None:
            return known[0]
        return self.funnel.reveal(self.pending.fact(kind, self.funnel.conceal(value), rid))

    def recorded_fact(self, kind: str, rid: str | None = None) -> tuple[Any] | None:
        """A value that is recorded here, or was for this very request, as a one-element tuple; None where none is."""
        with self.replay.lock:
            known = self.replay.fact(kind) if self.replay.replaying else self.pending.answered(rid)
        return None if known is None else (self.funnel.reveal(known[0]),)

    def message(self, message: Message, within: str | None = None, rid: str | None = None) -> None:
        """Append to the conversation; in a replay, match the recorded message. `within`: the running call that sends
        it. A replay does not run that call again, so the call counts its messages."""
        message = self._concealed(message)
        with self.replay.lock:
            self.replay.check()
            if self.replay.meets(message):
                return
        self.pending.message(message, within, rid)

    def _concealed(self, message: Message) -> Message:
        return Message(self.funnel.conceal_text(message.role), self.funnel.conceal(message.content))

    def messages(self, offset: int, limit: int) -> list[Message]:
        """A part of the conversation as the program knows it."""
        with self.replay.lock, self.sandbox.lock:
            recorded: Iterable[Message] = ()
            known = self.replay.known()
            if offset < known:
                recorded = self.replay.told(offset)
            pending = tuple(self.sandbox.mind.messages)[max(0, offset - known) :]
            found = list(itertools.islice(itertools.chain(recorded, pending), limit))
        return [Message(message.role, self.funnel.reveal(message.content)) for message in found]

    def set_value(self, key: str, value: tuple[Any] | None, within: str | None = None) -> None:
        """See `AgentHandler.state_set`. LimitExceeded."""
        self.replay.check()
        self.pending.beyond(within)
        self.state.set_value(key, value)

    def set_task(self, name: str, status: str, depends: tuple[str, ...], note: str | None) -> dict[str, Any]:
        """Declare or change a subtask, and return it."""
        self.replay.check()
        return self.state.set_task(name, status, depends, note, self.replay.at())
