"""The mind of one sandbox as it is recorded: journal, conversation and state, and their replay when a program was
started again.

The speakers for the agent (calls.py: the in-sandbox library; gateways.py: the wire to a model) report here each begin,
each end and each message, and learn if it happened before. Order of writing: the intent is durable before `begin`
returns; a tool call's outcome, its files, the messages before it and the state are one commit (step.py); a model's
reply is durable when `end` returns.

In a replay every call is answered from the journal and the root is switched to the recorded one, so that the program
finds the same files. Where the journal ends, the program goes live on the newest files of the trajectory. A program
that leaves the recorded path is refused (a resume), or goes live right there, as a branch (a fork).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from snapshotd.engine.context import Context
from snapshotd.engine.mind import tasks
from snapshotd.engine.mind.agent_state import AgentState
from snapshotd.engine.mind.idempotency import Keys
from snapshotd.engine.mind.pending import Open, Pending
from snapshotd.engine.mind.replay import DENIED, Elsewhere, Kept, Mismatch, Recorded, Replay, Resumption, shown
from snapshotd.engine.mind.retelling import OtherWords, Retelling
from snapshotd.engine.protocol.agent_handler import Intent
from snapshotd.engine.sandbox.live import LiveRecord
from snapshotd.engine.sandbox.places import Places
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.sandbox.step import StepListener, commit_step, marker
from snapshotd.errors import Diverged, SnapshotdError
from snapshotd.failpoints import hit
from snapshotd.types import (
    CallID,
    CallStatus,
    Ended,
    EntryKind,
    JournalEntry,
    Message,
    SideEffect,
    Snapshot,
    SnapshotID,
    ToolCall,
    new_id,
    short,
)

_log = logging.getLogger(__name__)
_SAID = "said"
"""Detail of an entry: messages that were appended from within it."""
_OTHERS_S = 60.0
"""How long a conversation that has met everything recorded waits for the next step of another one."""
_NEWEST = 256
"""Snapshots among which one is looked for that was just taken."""
_CHANGED_BY_PEOPLE = ("edit", "retry")
"""Markers with a state that no program has made."""


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
    ) -> None:
        self._context, self.sandbox, self._listener, self._places = context, sandbox, listener, places
        self._catalog = context.catalog
        self.funnel = context.secrecy.of(sandbox.trajectory)
        """All records go in through it; answers to the program are revealed."""
        self.state = AgentState(sandbox, self.funnel)
        self._lock = threading.RLock()
        """Guards the replay; taken before the sandbox's lock."""
        self._moved = threading.Condition(self._lock)
        """Told when the replay has come further, or ends."""
        self.pending = Pending(sandbox)
        self._resumption, self._keys = resumption, keys
        self._replay = None if resumption is None else Replay(resumption.entries)
        self._kept = Kept(() if resumption is None else resumption.entries)
        self._retelling = None if resumption is None else Retelling(context.catalog, resumption.began, resumption.head)
        self._reached = None if resumption is None else resumption.began
        """The newest snapshot whose call has been replayed."""
        self._places_of = {} if resumption is None else {e.id: n for n, e in enumerate(resumption.entries)}
        self._place = -1
        """The place of the call of `_reached` in the journal."""
        self._replayed_models: list[JournalEntry] = []
        """Model calls that were replayed since then."""
        self._went_live = False
        """The next answer has to say so."""
        self._before_live: Callable[[], None] = lambda: None
        self._after_live: Callable[[], None] = lambda: None
        self.diverged: Diverged | None = None
        """Set once a resumed program has done something else; nothing of it is recorded any more."""

    # -- replay --------------------------------------------------------------------------------------------------------

    @property
    def replaying(self) -> bool:
        return self._replay is not None

    @property
    def retraces(self) -> bool:
        """True if recorded calls are still to be met, each with another root."""
        replay = self._replay
        return replay is not None and not replay.exhausted

    def replayed(self, kind: EntryKind, name: str, arguments: Any, task: str | None = None) -> Recorded | None:
        """The recorded outcome of the call that begins now (in `task`), with the root switched to it; None: it has to
        be run. Diverged."""
        with self._lock:
            self._check_diverged()
            if self._replay is None and self._kept.empty:
                return None  # every call of a program that is live: nothing to look for
            name, arguments = self.funnel.conceal_text(name), self.funnel.conceal(arguments)
            kept = self._kept.take(kind, name, arguments, self.funnel.conceal(task))
            if kept is not None:
                return self._met_kept(kept)
            if self._replay is None:
                return None
            try:
                entry = self._replay.match(kind, name, arguments)
            except Mismatch as mismatch:
                self._other_than(mismatch.recorded, f"{kind} {name} with {shown(arguments)}")
                return None
            if entry is None:
                self._go_live()
                return None
            return self._met(entry)

    def replayed_on_wire(
        self,
        kind: EntryKind,
        name: str,
        arguments: Any,
        lane: int | None,
        *,
        called: bool,
        difference: Callable[[], str] = str,
    ) -> Recorded | None:
        """As `replayed`, in a lane (replay.py, `match_on_wire`). A lane that has met all that is recorded of it waits
        until the others have, too. `difference`: asked how the request differs from the recorded one, for a person."""
        with self._lock:
            self._check_diverged()
            name, arguments = self.funnel.conceal_text(name), self.funnel.conceal(arguments)
            actual = f"{kind} {name} with {shown(arguments)}"
            while self._replay is not None:
                try:
                    entry = self._replay.match_on_wire(kind, name, arguments, lane, called=called)
                except Mismatch as mismatch:
                    self._other_than(mismatch.recorded, actual + self.funnel.conceal_text(difference()))
                    return None
                except Elsewhere:
                    self._wait_for_others(actual)
                    continue
                if entry is not None:
                    return self._met(entry)
                self._go_live()
            return None

    def has_left(self, lane: int | None) -> bool:
        """True if recorded entries of a lane are still to be met."""
        with self._lock:
            return self._replay is not None and self._replay.has_left(lane)

    def meets_calls(self, lane: int, call_ids: Sequence[str]) -> None:
        """A replayed reply asks for calls. Where nothing that follows from them is recorded, they run for real, so
        everything else has to be met before the program gets the reply. Diverged."""
        with self._lock:
            while self._replay is not None and not self._replay.exhausted and not self._replay.needs(lane, call_ids):
                self._wait_for_others("nothing")

    def _wait_for_others(self, actual: str) -> None:
        """Wait until the replay has come further. Diverged: it does not."""
        assert self._replay is not None
        before = self._replay.matched
        came = self._moved.wait_for(
            lambda: self.diverged is not None or self._replay is None or self._replay.matched != before, _OTHERS_S
        )
        self._check_diverged()
        if not came and self._replay is not None:
            self._other_than(self._replay.next, actual)

    def skipped_task(self, name: str) -> Recorded | None:
        """The end of a task that has completed, with all that happened in it taken as met; None: it has to be run."""
        with self._lock:
            self._check_diverged()
            task = None if self._replay is None else self._replay.skip_task(name)
            if task is None:
                kept = self._kept.skip_task(name)
                return None if kept is None else self._met_kept(kept)
            recorded = self._met(task)
            if recorded.snapshot is not None:
                assert self._retelling is not None
                self._retelling.reach(recorded.snapshot.messages)
            return recorded

    def _met(self, entry: JournalEntry) -> Recorded:
        own = None
        if entry.snapshot is not None:
            snapshot = self._catalog.get_snapshot(entry.snapshot)
            own = snapshot if snapshot.call.id == entry.id else None
        if own is not None:
            place = self._places_of.get(entry.id, self._place)
            if place >= self._place:  # calls that ran side by side come in any order: the files never go back
                self._places.go_to(self.sandbox, own)
                with self.sandbox.lock:
                    self.sandbox.mind.put(self._catalog.state(own.id), changed=False)
                self._reached, self._replayed_models, self._place = own, [], place
            self.said(entry.details.get(_SAID, 0))
        else:
            self._replayed_models.append(entry)
        self._moved.notify_all()
        self._tell({"event": "replayed", "call": entry.id, "tool": entry.name, "snapshot": entry.snapshot})
        return Recorded(self._revealed(entry), own)

    def _met_kept(self, entry: JournalEntry) -> Recorded:
        """The answer for a task that stayed completed when another task was retried: its files and values are in the
        sandbox already."""
        if entry.kind is EntryKind.TASK and entry.snapshot is not None:
            task = tasks.find(self._catalog.state(entry.snapshot), entry.name)
            self.state.change(lambda state: tasks.keep(state, [task]))
        self._tell({"event": "replayed", "call": entry.id, "tool": entry.name, "snapshot": entry.snapshot})
        return Recorded(self._revealed(entry), None)

    def _revealed(self, entry: JournalEntry) -> JournalEntry:
        """An entry as the program knows it."""
        error = None if entry.error is None else self.funnel.reveal_text(entry.error)
        return replace(entry, result=self.funnel.reveal(entry.result), error=error)

    def _go_live(self) -> None:
        """Everything recorded has been met: from here on, on the newest files, things happen."""
        assert self._replay is not None
        assert self._resumption is not None
        self._places.go_to(self.sandbox, self._places.newest(self._resumption.head))
        self._carry_over(self._resumption.head)
        self._live()

    def _carry_over(self, head: Snapshot) -> None:
        """Apply to the state the changes that people made after everything that the program has met."""
        changes, reached = [], self._reached
        while reached is not None and head.id != reached.id and head.continues is not None:
            before = self._catalog.get_snapshot(head.continues)
            if head.call.name in _CHANGED_BY_PEOPLE:
                changes.append((self._catalog.state(before.id), self._catalog.state(head.id)))
            head = before
        with self.sandbox.lock:
            mind = self.sandbox.mind
            for old, new in reversed(changes):
                mind.put(tasks.carry(mind.state, old, new), changed=mind.changed)

    def _live(self) -> None:
        assert self._replay is not None
        self._before_live()
        with self.sandbox.lock:
            state = self.sandbox.mind.state
            self.sandbox.mind.put(state, changed=state != self._catalog.state(self.sandbox.head))
        self._tell({"event": "live", "snapshot": self.sandbox.head, "replayed": self._replay.matched})
        self._replay, self._went_live = None, True
        self._moved.notify_all()
        self._after_live()

    def before_live(self, call: Callable[[], None]) -> None:
        """Have `call` called when the replay ends, before the program goes live."""
        self._before_live = call

    def when_live(self, call: Callable[[], None]) -> None:
        """Call now, and when the program has gone live."""
        self._after_live = call
        call()

    def take_live(self) -> bool:
        """True if the answer in the making is the first one after a replay."""
        with self._lock:
            went_live, self._went_live = self._went_live, False
            return went_live

    def _check_diverged(self) -> None:
        if self.diverged is not None:
            raise self.diverged

    def _other_than(self, recorded: JournalEntry | None, actual: str) -> None:
        """A fork goes live from the last snapshot that matched; a resume is refused."""
        assert self._resumption is not None
        assert self._reached is not None
        expected = (
            "its end" if recorded is None else f"{recorded.kind} {recorded.name} with {shown(recorded.arguments)}"
        )
        if self._resumption.branching:
            self._branch(expected, actual)
            return
        last = short(self._reached.id)
        self.diverged = Diverged(
            f"the program does something else than what is recorded, after snapshot {last}: recorded is {expected}, but now comes "
            f"{actual}; nothing was changed: resume with the program and inputs it had, or go another way from there: "
            f"`snapshotd fork --resume {last}`"
        )
        self._moved.notify_all()
        raise self.diverged

    def _branch(self, expected: str, actual: str) -> None:
        assert self._resumption is not None
        assert self._reached is not None
        if self._reached.id != self.sandbox.head:
            assert self._retelling is not None
            said = self._retelling.position
            kept = min(said, self._reached.messages)
            met = itertools.islice(self._catalog.conversation(self._resumption.head.id, kept), said - kept)
            models = [replace(entry, id=CallID(new_id()), snapshot=None) for entry in self._replayed_models]
            with self.sandbox.lock:
                self.sandbox.mind.messages[:0] = met
                commit_step(
                    self._catalog,
                    self.sandbox,
                    marker("diverged", {"recorded": expected[:2000], "actual": actual[:2000]}),
                    self._listener,
                    follows=self._reached,
                    keep_messages=kept,
                    entries=models,
                )
        self._live()

    def finish(self) -> Diverged | None:
        """The program has ended. Returns Diverged if recorded entries are left that it did not meet; the caller must
        then record nothing of its end."""
        with self._lock:
            if self.diverged is None and self._replay is not None:
                try:
                    if self._replay.exhausted:
                        self._go_live()
                    else:
                        self._other_than(self._replay.next, "its end")
                except Diverged:
                    pass  # kept in `diverged`
            return self.diverged

    # -- entries -------------------------------------------------------------------------------------------------------

    def begin(self, intent: Intent, details: dict[str, Any] | None = None) -> Open:
        """Record an intent. Conflict, LimitExceeded, OutOfSpace."""
        conceal = self.funnel.conceal
        self._check_diverged()
        details = conceal(dict(details or {}))
        if intent.compensate is not None:
            details["compensate"] = {"argv": conceal(list(intent.compensate))}
        if intent.task is not None:
            details["task"] = conceal(intent.task)
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
                return self._revealed(entry)
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

    @property
    def settled(self) -> bool:
        """True if the program is live and nothing of a replay is left: another daemon can go on with it."""
        return self._replay is None and self._kept.empty and self.diverged is None

    def _key(self, intent: Intent, call_id: CallID) -> str:
        if intent.key is not None:
            return self.funnel.conceal_text(intent.key)
        if self._keys is not None and intent.side_effect is not SideEffect.LOCAL:
            cut_off = self._keys.take(self.funnel.conceal_text(intent.name), self.funnel.conceal(intent.arguments))
            if cut_off is not None:
                return cut_off
        return call_id

    def end_step(self, opened: Open, call: ToolCall) -> Snapshot:
        """The outcome of a tool call, with its snapshot."""
        self._check_diverged()
        ended = Ended(
            opened.entry.id,
            call.status,
            time.time_ns(),
            error=call.error,
            details={_SAID: opened.said} if opened.said else {},
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
        self._check_diverged()
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
    ) -> Snapshot:
        """Something that is recorded when it has ended (a task, a named snapshot), with its snapshot. `call.id` becomes
        the entry's."""
        self._check_diverged()
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
            entry, lambda whole: commit_step(self._catalog, self.sandbox, call, self._listener, entries=[whole])
        )

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
        self._check_diverged()
        return commit_step(self._catalog, self.sandbox, call, self._listener)

    def past(self) -> Iterable[JournalEntry]:
        """The journal up to the head, with what belongs to no snapshot yet."""
        return itertools.chain(
            self._catalog.journal(self.sandbox.head), self._catalog.unbound(self.sandbox.trajectory.id)
        )

    def to_be_told(self, limit: int) -> list[Message]:
        """The first messages that a program which is replayed has to send, as it knows them."""
        if self._resumption is None:
            return []
        began, head = self._resumption.began, self._resumption.head
        return [
            Message(message.role, self.funnel.reveal(message.content))
            for message in itertools.islice(self._catalog.conversation(head.id, began.messages), limit)
        ]

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

    def live_if_exhausted(self) -> bool:
        """Go live now, before the next call begins, if everything recorded has been met. Returns True if calls are live
        from here on."""
        with self._lock:
            if self._replay is not None and self._replay.exhausted:
                self._go_live()
            return self._replay is None

    def said(self, count: int) -> None:
        """A replayed program knows `count` more messages."""
        with self._lock:
            if self._retelling is not None:
                self._retelling.skip(count)

    def met(self, messages: Sequence[Message]) -> None:
        """Messages of a replayed program, read from the wire. They are appended where the conversation does not hold
        them yet: no snapshot had bound them at the end, or the program has just gone live."""
        with self._lock, self.sandbox.lock:
            known = 0 if self._retelling is None else max(0, self.sandbox.writer.messages - self._retelling.position)
            self.said(len(messages))
            for message in messages[known:]:
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
        with self._lock:
            known = self.pending.answered(rid) if self._replay is None else self._replay.fact(kind)
        return None if known is None else (self.funnel.reveal(known[0]),)

    def message(self, message: Message, within: str | None = None, rid: str | None = None) -> None:
        """Append to the conversation; in a replay, match the recorded message. `within`: the running call that sends
        it. A replay does not run that call again, so the call counts its messages."""
        message = self._concealed(message)
        with self._lock:
            self._check_diverged()
            if self._replay is not None and self._meets(message):
                return
        self.pending.message(message, within, rid)

    def _concealed(self, message: Message) -> Message:
        return Message(self.funnel.conceal_text(message.role), self.funnel.conceal(message.content))

    def _meets(self, message: Message) -> bool:
        """True if this message is the recorded one that comes next. A new message is allowed only after everything
        recorded."""
        assert self._replay is not None
        assert self._retelling is not None
        try:
            self._retelling.meet(message)
            return True
        except OtherWords as other:
            if other.recorded is None and self._replay.loose:
                return False
            actual = f"the {message.role} message {shown(message.content)}"
            if other.recorded is not None:
                actual += f" where the {other.recorded.role} message {shown(other.recorded.content)} is recorded"
            self._other_than(self._replay.next, actual)
            return False

    def messages(self, offset: int, limit: int) -> list[Message]:
        """A part of the conversation as the program knows it."""
        with self._lock, self.sandbox.lock:
            recorded: Iterable[Message] = ()
            known = self.sandbox.writer.messages
            if self._replay is not None and self._retelling is not None:
                known = self._retelling.position
            if offset < known:
                recorded = itertools.islice(self._catalog.conversation(self.sandbox.head, offset), known - offset)
            pending = tuple(self.sandbox.mind.messages)[max(0, offset - known) :]
            found = list(itertools.islice(itertools.chain(recorded, pending), limit))
        return [Message(message.role, self.funnel.reveal(message.content)) for message in found]

    def set_value(self, key: str, value: tuple[Any] | None) -> None:
        """See `AgentHandler.state_set`. LimitExceeded."""
        self._check_diverged()
        self.state.set_value(key, value)

    def set_task(self, name: str, status: str, depends: tuple[str, ...], note: str | None) -> dict[str, Any]:
        """Declare or change a subtask, and return it."""
        self._check_diverged()
        return self.state.set_task(name, status, depends, note, self._at())

    def _at(self) -> SnapshotID:
        """The program's place: the head, or the last replayed snapshot."""
        if self._replay is not None and self._reached is not None:
            return self._reached.id
        return self.sandbox.head

    def _tell(self, event: dict[str, Any]) -> None:
        log = self._context.events.live(self.sandbox.trajectory.id)
        if log is not None:
            log.append(event)
