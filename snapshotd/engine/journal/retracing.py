"""The replay of a program that was started again.

Every call is answered from the journal and the root is switched to the recorded one, so that the program finds the same files. The recorded
files replace what it writes between two recorded calls. After the last one nothing does, so what it writes has to stay: the root is
switched to the newest files of the trajectory with the answer of that call (or before the program begins, if it has made none), not when
the program goes live with its next call, or ends. With the last recorded answer the sandbox has its network and services. A program that
leaves the recorded path is refused (a resume), or goes live right there, as a branch (a fork). replay.py matches the
recorded calls, retelling.py the recorded conversation.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from snapshotd.catalog.base import Catalog
from snapshotd.engine.context import Context
from snapshotd.engine.held import HeldMessages
from snapshotd.engine.journal import tasks
from snapshotd.engine.journal.agent_state import change_state
from snapshotd.engine.journal.answers import as_recorded, reveal_entry
from snapshotd.engine.journal.recorder import Recorder
from snapshotd.engine.journal.replay import DENIED, SAID, Elsewhere, Kept, Mismatch, Recorded, Replay, Resumption, clip
from snapshotd.engine.journal.retelling import OtherWords, Retelling, changes_by_people, edits, files_left_by, held_at
from snapshotd.engine.protocol.agent_handler import Answer, Intent
from snapshotd.engine.sandbox.places import Places
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.sandbox.step import marker
from snapshotd.errors import Denied, Diverged
from snapshotd.types import CallID, EntryKind, JournalEntry, Message, Snapshot, SnapshotID, new_id, short

_OTHERS_S = 60.0
"""How long a conversation that has met everything recorded waits for the next step of another one."""


class NoReplay:
    """The replay of a program that has nothing recorded to meet: it is live. Thread-safe."""

    replaying = False

    def __init__(self, sandbox: Sandbox, catalog: Catalog) -> None:
        self.sandbox, self._catalog = sandbox, catalog
        self.lock = threading.RLock()
        """Guards the replay; taken before the sandbox's lock."""
        self._held: HeldMessages | None = None

    @property
    def retraces(self) -> bool:
        """True if recorded calls are still to be met, each with another root. Not while the caller holds the sandbox's
        lock: it waits for the root of the last one."""
        return False

    @property
    def settled(self) -> bool:
        """True if the program is live and nothing of a replay is left: another daemon can go on with it."""
        return True

    def answer(self, intent: Intent) -> Answer | None:
        """The answer to a call that begins now, with the root switched to its recorded snapshot, or `later`: other
        threads of the program have to come further first. None: it has to run. Diverged; Denied, if it was then."""
        return None

    def meet_call(
        self, kind: EntryKind, name: str, arguments: Any, task: str | None = None, *, waits: bool = False
    ) -> Recorded | None:
        """Switch the root to the recorded snapshot of the call that begins now (in `task`), and return its outcome;
        None: it has to run. Diverged. With `waits`, Elsewhere: as `later` in `answer`."""
        return None

    def meet_on_wire(
        self,
        kind: EntryKind,
        name: str,
        arguments: Any,
        lane: int | None,
        *,
        called: bool,
        difference: Callable[[], str] = str,
    ) -> Recorded | None:
        """As `meet_call`, in a lane (replay.py, `match_on_wire`). A lane that has met all that is recorded of it waits
        until the others have, too. `difference`: asked how the request differs from the recorded one, for a person."""
        return None

    def has_left(self, lane: int | None) -> bool:
        """True if recorded entries of a lane are still to be met."""
        return False

    def comes_next(self, kind: EntryKind, name: str, arguments: Any, lane: int | None) -> bool:
        """True if such an entry may be met next in a lane."""
        return False

    def wait_for_calls(self, lane: int, call_ids: Sequence[str]) -> None:
        """Wait before a replayed reply that asks for these calls. Where nothing that follows from them is recorded, they run for real, so
        everything else has to be met before the program gets the reply. Diverged."""

    def call_when_met(self, call: Callable[[], object]) -> None:
        """Have `call` called when nothing recorded is left to be met and the last files are there, before the program gets
        the last recorded answer; the first one given is called first."""

    def call_when_live(self, call: Callable[[], None]) -> None:
        """Call now, and when the program has gone live."""
        call()

    def go_live_if_exhausted(self) -> bool:
        """Go live now, before the next call begins, if everything recorded has been met. Returns True if calls are live
        from here on."""
        return True

    def begin(self) -> None:
        """Give the sandbox the files on which the program begins. Called before it begins."""

    def finish(self) -> Diverged | None:
        """End the replay: the program has ended. Returns Diverged if it did not meet all recorded entries; then nothing of its
        end is recorded."""
        return None

    def take_fact(self, kind: str) -> tuple[Any] | None:
        """Take the recorded value that comes next, as a one-element tuple; None where none is."""
        return None

    def meet(self, message: Message) -> bool:
        """Take the recorded message that comes next; False if this is a new one, which is allowed only after everything
        recorded. Diverged."""
        return False

    def skip(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Take these messages as known to the program. Returns the ones that the conversation does not hold yet. The
        caller holds the sandbox's lock."""
        return messages

    def known_count(self) -> int:
        """Number of recorded messages that the program knows."""
        return self.sandbox.writer.messages

    def known_messages(self, start: int) -> Iterator[Message]:
        """The recorded messages that the program knows, from number `start`."""
        return self._catalog.conversations.read(self.sandbox.head, start)

    def messages_to_send(self, limit: int) -> list[Message]:
        """The first messages that a replayed program has to send, as the program knows them."""
        return []

    def place(self) -> SnapshotID:
        """The head, or the last replayed snapshot."""
        return self.sandbox.head

    def take_around(self, message: Message) -> tuple[Sequence[Message], Sequence[Message]]:
        """The messages of a person that come before and behind this new one of the program (held.py). Each is told once."""
        if self._held is None:
            began = self._catalog.trajectories.get(self.sandbox.trajectory.id).began
            head, pending = self._catalog.snapshots.get(self.sandbox.head), self.sandbox.mind.messages
            known = None if began is None else self._catalog.snapshots.get(began)
            self._held = HeldMessages() if known is None else held_at(self._catalog, known, head, pending)
        before, after, self._held = self._held.around(message)
        return before, after


class _Way:
    """The part of the recorded path that the program has replayed. `newest`: the snapshot with whose files it goes on live."""

    def __init__(self, resumption: Resumption, retelling: Retelling, newest: Snapshot) -> None:
        self.retelling, self.newest = retelling, newest
        self.has_newest = False
        """The sandbox was given the newest files of the trajectory: what is written now stays."""
        self.reached = resumption.began
        """The newest snapshot whose call has been replayed."""
        self.models: list[JournalEntry] = []
        """Model calls that were replayed since then."""
        self._places = {entry.id: number for number, entry in enumerate(resumption.entries)}
        self._place = -1
        self._stands_at, self._stands_since_s = -1, 0.0
        self.when_met: list[Callable[[], object]] = []

    def end(self) -> None:
        """Give the program its network and services: from now on it does what is not recorded."""
        while self.when_met:
            self.when_met[0]()
            self.when_met.pop(0)

    def stands_s(self, matched: int) -> float:
        """Seconds for which no entry was met: since the first request with this number of `matched` entries."""
        if self._stands_at != matched:
            self._stands_at, self._stands_since_s = matched, time.monotonic()
        return time.monotonic() - self._stands_since_s

    def leads_to(self, entry: JournalEntry) -> bool:
        """True if the entry comes after the one that was reached last, or is that one."""
        return self._places.get(entry.id, self._place) >= self._place

    def reach(self, entry: JournalEntry, snapshot: Snapshot) -> None:
        """Note that the call of this entry, with its snapshot, is replayed."""
        self.reached, self.models, self._place = snapshot, [], self._places.get(entry.id, self._place)


class Retracing(NoReplay):
    """See the module's text."""

    def __init__(self, context: Context, places: Places, recorder: Recorder, resumption: Resumption) -> None:
        super().__init__(recorder.sandbox, context.catalog)
        self._context, self._places, self._recorder = context, places, recorder
        self._funnel, self._resumption = recorder.funnel, resumption
        self.replaying = True
        self._moved = threading.Condition(self.lock)
        """Told when the replay has come further, or ends."""
        self._replay, self._kept = Replay(resumption.entries), Kept(resumption.entries)
        changes = edits(context.catalog, resumption.began, resumption.head)
        self._edited = {edit.source.id: edit.edited for edit in changes}
        """The edits on the way, by the snapshots that they were made of."""
        retelling = Retelling(context.catalog, resumption.began, resumption.head, changes, self._replay.has_met)
        self._way = _Way(resumption, retelling, places.newest(resumption.head))
        self._last = self._replay.last(lambda entry: files_left_by(self._catalog, entry) is not None)
        """The recorded call after which no other files come."""
        self._after_live: Callable[[], None] = lambda: None

    @property
    def retraces(self) -> bool:
        with self.lock:
            return self.replaying and not self._replay.exhausted

    @property
    def settled(self) -> bool:
        return not self.replaying and self._kept.empty and self._recorder.diverged is None

    def answer(self, intent: Intent) -> Answer | None:
        recorded = None
        if intent.kind is not EntryKind.TASK:
            try:
                recorded = self.meet_call(intent.kind, intent.name, intent.arguments, intent.task, waits=intent.waits)
            except Elsewhere:
                return {"later": True}
        elif intent.skippable:
            recorded = self._skip_task(self._funnel.conceal_text(intent.name))
        if recorded is None:
            return None
        if DENIED in recorded.entry.details:
            raise Denied(recorded.entry.error or f"{intent.name} was not let run")
        return as_recorded(self._context, self._funnel, recorded)

    def meet_call(
        self, kind: EntryKind, name: str, arguments: Any, task: str | None = None, *, waits: bool = False
    ) -> Recorded | None:
        with self.lock:
            self._recorder.check()
            if not self.replaying and self._kept.empty:
                return None  # every call of a program that is live: nothing to look for
            name, arguments = self._funnel.conceal_text(name), self._funnel.conceal(arguments)
            kept = self._kept.take(kind, name, arguments, self._funnel.conceal(task))
            if kept is not None:
                return self._meet_kept(kept)
            if not self.replaying:
                return None
            try:
                entry = self._replay.match(kind, name, arguments)
            except Mismatch as mismatch:
                self._leave_path(mismatch.recorded, f"{kind} {name} with {clip(arguments)}")
                return None
            except Elsewhere:
                if waits and self._way.stands_s(self._replay.matched) < _OTHERS_S:
                    raise
                self._leave_path(self._replay.next, f"{kind} {name} with {clip(arguments)}")
                return None
            if entry is None:
                self._go_live()
                return None
            return self._meet_entry(entry)

    def meet_on_wire(
        self,
        kind: EntryKind,
        name: str,
        arguments: Any,
        lane: int | None,
        *,
        called: bool,
        difference: Callable[[], str] = str,
    ) -> Recorded | None:
        with self.lock:
            self._recorder.check()
            name, arguments = self._funnel.conceal_text(name), self._funnel.conceal(arguments)
            actual = f"{kind} {name} with {clip(arguments)}"
            while self.replaying:
                try:
                    entry = self._replay.match_on_wire(kind, name, arguments, lane, called=called)
                except Mismatch as mismatch:
                    self._leave_path(mismatch.recorded, actual + self._funnel.conceal_text(difference()))
                    return None
                except Elsewhere:
                    self._wait_for_others(actual)
                    continue
                if entry is not None:
                    return self._meet_entry(entry)
                self._go_live()
            return None

    def has_left(self, lane: int | None) -> bool:
        with self.lock:
            return self.replaying and self._replay.has_left(lane)

    def comes_next(self, kind: EntryKind, name: str, arguments: Any, lane: int | None) -> bool:
        name, arguments = self._funnel.conceal_text(name), self._funnel.conceal(arguments)
        with self.lock:
            return self.replaying and self._replay.comes_next(kind, name, arguments, lane)

    def wait_for_calls(self, lane: int, call_ids: Sequence[str]) -> None:
        with self.lock:
            while self.replaying and not self._replay.exhausted and not self._replay.needs(lane, call_ids):
                self._wait_for_others("nothing")

    def _wait_for_others(self, actual: str) -> None:
        """Wait until the replay has come further. Diverged: it does not."""
        before = self._replay.matched
        came = self._moved.wait_for(
            lambda: self._recorder.diverged is not None or not self.replaying or self._replay.matched != before,
            _OTHERS_S,
        )
        self._recorder.check()
        if not came and self.replaying:
            self._leave_path(self._replay.next, actual)

    def _skip_task(self, name: str) -> Recorded | None:
        """The end of a task that has completed, with all that happened in it taken as met; None: it has to run."""
        with self.lock:
            self._recorder.check()
            task = self._replay.skip_task(name) if self.replaying else None
            if task is None:
                kept = self._kept.skip_task(name)
                return None if kept is None else self._meet_kept(kept)
            recorded = self._meet_entry(task)
            if recorded.snapshot is not None:
                self._way.retelling.reach(task.id, recorded.snapshot.messages)
            return recorded

    def begin(self) -> None:
        with self.lock:
            if self._last is None:
                self._go_to_newest()
                if self._replay.exhausted:
                    self._way.end()

    def _meet_entry(self, entry: JournalEntry) -> Recorded:
        reached = files_left_by(self._catalog, entry)
        own = reached if reached is not None and reached.call.id == entry.id else None
        if reached is not None:
            if self._way.leads_to(entry):  # calls that ran side by side come in any order: the files never go back
                reached = self._edited.get(reached.id, reached)
                if entry.id == self._last:
                    self._go_to_newest()
                else:
                    self._places.go_to(self.sandbox, reached)
                with self.sandbox.lock:
                    self.sandbox.mind.put(self._catalog.conversations.state(reached.id), changed=False)
                self._way.reach(entry, reached)
            self._way.retelling.skip(entry.details.get(SAID, 0))
        else:
            self._way.models.append(entry)
        if self._replay.exhausted and self._way.has_newest:
            self._way.end()
        self._moved.notify_all()
        self._tell({"event": "replayed", "call": entry.id, "tool": entry.name, "snapshot": entry.snapshot})
        return Recorded(reveal_entry(self._funnel, entry), own)

    def _meet_kept(self, entry: JournalEntry) -> Recorded:
        """The answer for a task that stayed completed when another task was retried: its files and values are in the
        sandbox already."""
        if entry.kind is EntryKind.TASK and entry.snapshot is not None:
            task = tasks.find(self._catalog.conversations.state(entry.snapshot), entry.name)
            change_state(self.sandbox, lambda state: tasks.keep(state, [task]))
        self._tell({"event": "replayed", "call": entry.id, "tool": entry.name, "snapshot": entry.snapshot})
        return Recorded(reveal_entry(self._funnel, entry), None)

    def _go_live(self) -> None:
        """End the replay: the program has met everything recorded. Its calls run from now on, on the newest files, and with what people
        changed in the state after that."""
        if not self._way.has_newest:
            self._go_to_newest()
        changes = changes_by_people(self._catalog, self._way.reached, self._resumption.head)
        with self.sandbox.lock:
            mind = self.sandbox.mind
            for old, new in changes:
                mind.put(tasks.carry(mind.state, old, new), changed=mind.changed)
        self._end_replay()

    def _go_to_newest(self) -> None:
        self._places.go_to(self.sandbox, self._way.newest)
        self._way.has_newest = True

    def _end_replay(self) -> None:
        self._way.end()
        with self.sandbox.lock:
            state = self.sandbox.mind.state
            self.sandbox.mind.put(state, changed=state != self._catalog.conversations.state(self.sandbox.head))
        self._tell({"event": "live", "snapshot": self.sandbox.head, "replayed": self._replay.matched})
        self.replaying = False
        self._moved.notify_all()
        self._after_live()

    def _leave_path(self, recorded: JournalEntry | None, actual: str) -> None:
        """Leave the recorded way: a fork goes live from the last snapshot that matched; a resume raises Diverged."""
        expected = "its end" if recorded is None else f"{recorded.kind} {recorded.name} with {clip(recorded.arguments)}"
        if self._resumption.branching:
            self._branch(expected, actual)
            return
        last = short(self._way.reached.id)
        diverged = Diverged(
            f"the program does something else than what is recorded, after snapshot {last}: recorded is {expected}, but now comes "
            f"{actual}; nothing was changed: resume with the program and inputs it had, or go another way from there: "
            f"`snapshotd fork --resume {last}`"
        )
        self._recorder.diverge(diverged)
        self._moved.notify_all()
        raise diverged

    def _branch(self, expected: str, actual: str) -> None:
        if self._way.reached.id != self.sandbox.head:
            kept = Retelling.count_same(self._catalog.conversations.read(self._way.reached.id), self.known_messages(0))
            met = self.known_messages(kept)
            models = [replace(entry, id=CallID(new_id()), snapshot=None) for entry in self._way.models]
            with self.sandbox.lock:
                self.sandbox.mind.messages[:0] = met
                call = marker("diverged", {"recorded": expected[:2000], "actual": actual[:2000]})
                self._recorder.step(call, follows=self._way.reached, keep_messages=kept, entries=models)
        self._end_replay()

    def finish(self) -> Diverged | None:
        with self.lock:
            if self._recorder.diverged is None and self.replaying:
                with contextlib.suppress(Diverged):  # the recorder keeps it
                    if self._replay.exhausted:
                        self._go_live()
                    else:
                        self._leave_path(self._replay.next, "its end")
            return self._recorder.diverged

    def go_live_if_exhausted(self) -> bool:
        with self.lock:
            if self.replaying and self._replay.exhausted:
                self._go_live()
            return not self.replaying

    def meet(self, message: Message) -> bool:
        if not self.replaying:
            return False
        try:
            self._way.retelling.meet(message)
            return True
        except OtherWords as other:
            if other.recorded is None and self._replay.loose:
                return False
            actual = f"the {message.role} message {clip(message.content)}"
            if other.recorded is not None:
                actual += f" where the {other.recorded.role} message {clip(other.recorded.content)} is recorded"
            self._leave_path(self._replay.next, actual)
            return False

    def call_when_met(self, call: Callable[[], object]) -> None:
        self._way.when_met.append(call)

    def call_when_live(self, call: Callable[[], None]) -> None:
        self._after_live = call
        call()

    def take_fact(self, kind: str) -> tuple[Any] | None:
        return self._replay.take_fact(kind)

    def skip(self, messages: Sequence[Message]) -> Sequence[Message]:
        known = max(0, self.sandbox.writer.messages - self._way.retelling.position)
        self._way.retelling.skip(len(messages))
        return messages[known:]

    def known_count(self) -> int:
        return self._way.retelling.position if self.replaying else super().known_count()

    def known_messages(self, start: int) -> Iterator[Message]:
        return self._way.retelling.known_messages(start) if self.replaying else super().known_messages(start)

    def messages_to_send(self, limit: int) -> list[Message]:
        began, head = self._resumption.began, self._resumption.head
        return [
            Message(message.role, self._funnel.reveal(message.content))
            for message in itertools.islice(self._catalog.conversations.read(head.id, began.messages), limit)
        ]

    def place(self) -> SnapshotID:
        return self._way.reached.id if self.replaying else super().place()

    def take_around(self, message: Message) -> tuple[Sequence[Message], Sequence[Message]]:
        return self._way.retelling.take_around(message)

    def _tell(self, event: dict[str, Any]) -> None:
        log = self._context.events.live(self.sandbox.trajectory.id)
        if log is not None:
            log.append(event)
