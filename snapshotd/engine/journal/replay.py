"""The recorded entries of a journal, matched with the requests of a program that was started again from the top.

Pure: nothing here reads or writes anything. Entries are matched by kind, name and arguments in the order in which they
began, within each lane: conversations on the wire (wire/lanes.py) come in any order. Where calls ran side by side the order
in which they come again is left open, within each run of calls that overlapped: threads that take their work from one
queue take it otherwise when a recorded call takes no time. Cut-off entries (no outcome, or UNKNOWN) are passed over:
the program runs those again, once it has met everything that ran beside them.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from typing import Any

from snapshotd.types import CallID, CallStatus, EntryKind, JournalEntry, Snapshot

_OUTCOMES = (CallStatus.DONE, CallStatus.FAILED)


DENIED = "denied"
"""Detail of an entry of a call that was not let run: it is refused again where a program meets it again."""
OF_MODEL = "model"
"""Detail of a denied call behind the gateway: the entry of the model call whose reply asked for it, and which the agent
never received."""
REPLY_DENIED = "reply_denied"
"""Detail of such a model's entry while it is replayed: why the agent did not get the reply. It is not recorded."""
LANE = "lane"
"""Detail of an entry on the wire: the number of its conversation (wire/lanes.py)."""
CALLER = "caller"
"""Detail of a model's entry: the provider's id of the call that led to its conversation."""
SIDE = "side"
"""Detail of a model's entry whose conversation nobody waits for: the title of another one, for example."""
QUESTION = "question"
"""Part of the outline of a question on the side: what it asks, without what it asks it about. That holds what tools
said, as aider's question for the message of a commit does, so it may be another one when the program runs again."""
CALL = "call"
"""Detail of a tool's entry on the wire: the provider's id of the call."""
SUB_AGENT = "sub_agent"
"""Detail of a tool's entry that a sub-agent made: the number of its conversation on the wire, or the client's name of it."""
PARAMS = "params"
"""Detail of a model's entry on the wire: the parameters of its request, where they are others than those before in its
conversation."""
SILENT = "silent"
"""Detail of a tool's entry on the wire whose outcome is unknown, because the agent went on without telling the model a
result."""
TURN = "turn"
"""Name of the entry, and of the snapshot, that ends a turn of a model whose actions are in its words."""
CAPTURE = "capture"
"""Detail of a model's entry on the wire: the fields by which the gateway has asked for tokens, and those that the provider has refused."""
TOKENS = "tokens"
"""Detail of a model's entry on the wire: token ids and log probabilities, where the trajectory captures them."""
KEPT = "kept"
"""Detail of an entry of a task that stayed completed when another was retried: the id under which it was recorded
first."""
EDITED = "edited"
"""Detail of an entry whose result a person has changed: the id under which it was recorded."""
SAID = "said"
"""Detail of an entry: messages that were appended from within it."""
PROMOTED = "promoted"
"""Detail of an entry that came from a branch: the id under which the branch recorded it."""


def origin_of(entry: JournalEntry) -> CallID:
    """The id under which a call was recorded first."""
    return CallID(entry.details.get(KEPT, entry.details.get(PROMOTED, entry.id)))


@dataclass(frozen=True, slots=True)
class Recorded:
    """An entry that was answered from the journal. `snapshot`: its own, if it ended with one."""

    entry: JournalEntry
    snapshot: Snapshot | None


@dataclass(frozen=True, slots=True)
class Resumption:
    """The recorded past that a restarted program has to meet. `began`: its first snapshot; `head`: the trajectory's
    present head; `branching`: the program may leave the recorded path."""

    began: Snapshot
    head: Snapshot
    entries: tuple[JournalEntry, ...]
    branching: bool = False


class Mismatch(Exception):  # noqa: N818 - what happened, for `Retracing` to turn into an error or a new branch
    """The program asks for something else than the recorded entry that comes next."""

    def __init__(self, recorded: JournalEntry) -> None:
        super().__init__(recorded.name)
        self.recorded = recorded


class Elsewhere(Exception):  # noqa: N818 - what happened, for `Retracing` to wait
    """All recorded entries of this lane, or of the thread that makes this call, have been met; other lanes or threads still
    have some to meet."""


class Replay:
    """Not thread-safe: `Retracing` holds its lock."""

    def __init__(self, entries: Iterable[JournalEntry]) -> None:
        everything = list(_with_denials(list(entries)))
        self._left = _without_repeated(
            entry for entry in everything if _has_ended(entry) and not _is_passed_over(entry)
        )
        self._cut_off = [entry for entry in everything if not _has_ended(entry)]
        self._facts = {entry.id: deque(entry.facts) for entry in self._left if entry.facts}
        self.matched = 0
        lanes: dict[Any, list[JournalEntry]] = {}
        for entry in self._left:
            lanes.setdefault(entry.details.get(LANE), []).append(entry)
        self._run_of = {call_id: run for entries in lanes.values() for call_id, run in _runs(entries).items()}
        self._apart = any(lane is not None for lane in lanes)
        """Lanes are recorded; older journals have none."""
        self._begun: set[Any] = set()
        """The lanes that the program has come to."""

    @property
    def exhausted(self) -> bool:
        """True if nothing is left that the program has to meet."""
        return all(entry.details.get(SIDE) for entry in self._left)

    @property
    def loose(self) -> bool:
        """True if all remaining entries ended after the last snapshot: no snapshot binds the messages between them, so
        they are lost."""
        return all(entry.snapshot is None for entry in self._left)

    @property
    def next(self) -> JournalEntry | None:
        """The recorded entry that comes next."""
        return self._left[0] if self._left else None

    def last(self, wanted: Callable[[JournalEntry], bool]) -> CallID | None:
        """The last entry that is left and `wanted`."""
        return next((entry.id for entry in reversed(self._left) if wanted(entry)), None)

    def has_met(self, entries: Set[CallID]) -> bool:
        """True if none of these entries is left that the program has to meet."""
        return not any(entry.id in entries and not entry.details.get(SIDE) for entry in self._left)

    def match(self, kind: EntryKind, name: str, arguments: Any) -> JournalEntry | None:
        """Take the recorded entry of this call; None when all have been met. Raises Mismatch; and Elsewhere for a call that was
        cut off while calls of other threads ran, which have not been met."""
        if not self._left:
            return None
        found = self._find(kind, name, arguments, None)
        if found is None:
            recorded = self._left[next(self._candidates(None), 0)]
            if self._ran_beside(recorded, kind, name, arguments):
                raise Elsewhere
            raise Mismatch(recorded)
        return self._take(found)

    def _ran_beside(self, recorded: JournalEntry, kind: EntryKind, name: str, arguments: Any) -> bool:
        """True if such a call was cut off that overlapped a recorded one."""
        wanted = comparison_key(kind, arguments)
        return any(
            (entry.kind, entry.name, comparison_key(kind, entry.arguments)) == (kind, name, wanted)
            and entry.began_at_ns < _end_ns(recorded)
            and (entry.ended_at_ns is None or recorded.began_at_ns < entry.ended_at_ns)
            for entry in self._cut_off
        )

    def match_on_wire(
        self, kind: EntryKind, name: str, arguments: Any, lane: int | None, *, called: bool = False
    ) -> JournalEntry | None:
        """Take the recorded entry of this call in its lane. `lane` None: a conversation that begins, `called` by another one
        or not. None when all have been met. Raises Mismatch, and Elsewhere where only other lanes are left."""
        if not self._left:
            return None
        if not self._apart:
            return self.match(kind, name, arguments)
        known = dict.fromkeys(entry.details.get(LANE) for entry in self._left)
        for number in [lane] if lane is not None else [each for each in known if each not in self._begun]:
            found = None if number is None else self._find(kind, name, arguments, number)
            if found is not None:
                self._begun.add(number)
                return self._take(found)
        question = self._find_question(kind, name, arguments) if lane is None else None
        if question is not None:
            self._begun.add(self._left[question].details.get(LANE))
            return self._take(question)
        if lane is not None and lane in known:
            raise Mismatch(self._left[next(self._candidates(lane))])
        if lane is None and not called and not self._begun:
            raise Mismatch(self._left[0])
        if all(entry.details.get(SIDE) for entry in self._left):
            self._left = []  # no lane waits for them: they are asked again, if at all
            return None
        raise Elsewhere

    def has_left(self, lane: int | None) -> bool:
        """True if entries of a lane are left."""
        return any(not self._apart or entry.details.get(LANE) == lane for entry in self._left)

    def comes_next(self, kind: EntryKind, name: str, arguments: Any, lane: int | None) -> bool:
        """True if such an entry is among those that may come next in a lane."""
        return self._find(kind, name, arguments, lane) is not None

    def needs(self, lane: int, call_ids: Iterable[str]) -> bool:
        """True if entries are left that follow from these calls of a lane: their ends, or what they led to."""
        wanted = set(call_ids)
        return not self._apart or any(
            entry.details.get(LANE) == lane or entry.details.get(CALLER) in wanted for entry in self._left
        )

    def _find(self, kind: EntryKind, name: str, arguments: Any, lane: int | None) -> int | None:
        wanted = comparison_key(kind, arguments)
        for index in self._candidates(lane):
            entry = self._left[index]
            if entry.kind is kind and entry.name == name and comparison_key(kind, entry.arguments) == wanted:
                return index
        return None

    def _find_question(self, kind: EntryKind, name: str, arguments: Any) -> int | None:
        """A question on the side that asks the same about something else."""
        wanted = _question(arguments)
        for index, entry in enumerate(self._left):
            same = (entry.kind, entry.name, _question(entry.arguments)) == (kind, name, wanted)
            if wanted is not None and same and entry.details.get(LANE) not in self._begun:
                return index
        return None

    def skip_task(self, name: str) -> JournalEntry | None:
        """Take the end of a task that begins now, with all that was recorded inside of it; None if it is not recorded
        that it completed."""
        found = (index for index, entry in enumerate(self._left) if entry.kind is EntryKind.TASK and entry.name == name)
        index = next(found, None)
        if index is None or self._left[index].status is not CallStatus.DONE:
            return None
        task = self._left[index]
        outer = [entry for entry in self._left[:index] if not _within(entry, task)]
        if any(_end_ns(entry) < task.began_at_ns for entry in outer):
            return None  # the program is not there yet
        self.matched += index + 1 - len(outer)
        self._left[: index + 1] = outer
        return task

    def take_fact(self, kind: str) -> tuple[Any] | None:
        """Take the value recorded here, as a one-element tuple; None where none is."""
        facts = self._facts.get(self._left[0].id) if self._left else None
        if not facts or facts[0].get("kind") != kind:
            return None
        return (facts.popleft().get("value"),)

    def _candidates(self, lane: int | None) -> Iterator[int]:
        run = None
        for index, entry in enumerate(self._left):
            if self._apart and entry.details.get(LANE) != lane:
                continue
            run = self._run_of[entry.id] if run is None else run
            if self._run_of[entry.id] != run:
                return
            yield index

    def _take(self, index: int) -> JournalEntry:
        self.matched += 1
        return self._left.pop(index)


def _question(arguments: Any) -> Any:
    return arguments.get(QUESTION) if isinstance(arguments, dict) else None


def _has_ended(entry: JournalEntry) -> bool:
    return entry.status in _OUTCOMES or SILENT in entry.details


def _with_denials(entries: list[JournalEntry]) -> Iterable[JournalEntry]:
    """The entries; a model's entry carries the denials of its reply."""
    why = {
        entry.details[OF_MODEL]: entry.error
        for entry in entries
        if DENIED in entry.details and OF_MODEL in entry.details
    }
    for entry in entries:
        denied = entry.id in why
        yield replace(entry, details={**entry.details, REPLY_DENIED: why[entry.id]}) if denied else entry


def _is_passed_over(entry: JournalEntry) -> bool:
    """True if the entry is matched by other means, or not at all: an agent behind the gateway never learns of a denied
    call."""
    return KEPT in entry.details or (DENIED in entry.details and "gateway" in entry.details)


def _without_repeated(entries: Iterable[JournalEntry]) -> list[JournalEntry]:
    """The entries without failed requests on the wire that their sender repeated until they were answered, and without
    failed requests at the end: a program that runs again asks once. A request that failed for good fails again, if the
    program went on after it."""
    left: list[JournalEntry] = []
    answered: set[tuple[str, str]] = set()
    for entry in reversed(list(entries)):
        if entry.kind is EntryKind.MODEL and entry.details.get("gateway"):
            request = entry.name, canonical(entry.arguments)
            if entry.status is CallStatus.FAILED and (not left or request in answered):
                continue
            if entry.status is CallStatus.DONE:
                answered.add(request)
        left.append(entry)
    return left[::-1]


class Kept:
    """The entries of tasks that stayed completed when another was retried: met whenever the program comes to them, also
    after the end of the journal. Not thread-safe."""

    def __init__(self, entries: Iterable[JournalEntry]) -> None:
        self._of: dict[str, list[JournalEntry]] = {}
        for entry in entries:
            if entry.status in _OUTCOMES and KEPT in entry.details:
                task = entry.name if entry.kind is EntryKind.TASK else entry.details.get("task")
                self._of.setdefault(str(task), []).append(entry)

    @property
    def empty(self) -> bool:
        """True if nothing is left to be met."""
        return not any(self._of.values())

    def take(self, kind: EntryKind, name: str, arguments: Any, task: str | None) -> JournalEntry | None:
        """Take the recorded entry of a call in this task; for the end of a task, the entry of that name."""
        left = self._of.get(name if kind is EntryKind.TASK else task or "", [])
        wanted = canonical(arguments)
        for index, entry in enumerate(left):
            if entry.kind is kind and entry.name == name and canonical(entry.arguments) == wanted:
                return left.pop(index)
        return None

    def skip_task(self, name: str) -> JournalEntry | None:
        """Take the end of a task with all that happened in it."""
        found = [entry for entry in self._of.get(name, ()) if entry.kind is EntryKind.TASK]
        if found:
            del self._of[name]
        return found[0] if found else None


def _runs(entries: Iterable[JournalEntry]) -> dict[CallID, int]:
    """Numbers of the runs of calls that overlapped, one after the other. A task counts as its end: its inside has an
    order of its own."""
    runs: dict[CallID, int] = {}
    number, horizon = 0, None
    for entry in entries:
        began = _end_ns(entry) if entry.kind is EntryKind.TASK else entry.began_at_ns
        if horizon is not None and began > horizon:
            number += 1
        horizon = _end_ns(entry) if horizon is None else max(horizon, _end_ns(entry))
        runs[entry.id] = number
    return runs


def _end_ns(entry: JournalEntry) -> int:
    return entry.began_at_ns if entry.ended_at_ns is None else entry.ended_at_ns


def _within(entry: JournalEntry, task: JournalEntry) -> bool:
    named = entry.details.get("task")
    if named is not None:
        return bool(named == task.name)
    return task.began_at_ns <= entry.began_at_ns and _end_ns(entry) <= _end_ns(task)


def comparison_key(kind: EntryKind, arguments: Any) -> str:
    """The text that is equal for calls with equal arguments. A request's outline counts by its digest; the prompt in it is
    for people."""
    if kind is EntryKind.MODEL and isinstance(arguments, dict) and "digest" in arguments:
        arguments = {name: value for name, value in arguments.items() if name not in ("prompt", "messages", QUESTION)}
    return canonical(arguments)


def canonical(value: Any) -> str:
    """One text for equal JSON values: 1, 1.0 and true are different ones."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def clip(value: Any, limit: int = 300) -> str:
    """A JSON value for a message, cut to `limit` characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[:limit] + "..."
