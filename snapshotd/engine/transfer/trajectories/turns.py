"""The turns of a trajectory's conversations, read once from the beginning.

The catalog holds messages and journal side by side. Each snapshot binds a part of both, and within such a part the
model's words and the model calls have the same order; so a turn of the agent is its message, the model call behind it,
the calls that it asks for and their results. A turn is handed on when the next one of its conversation begins, so the
memory that this takes does not grow with the trajectory.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from snapshotd.catalog.base import Catalog
from snapshotd.engine.context import Context
from snapshotd.engine.journal.replay import CALL, CALLER, LANE, PARAMS, SIDE, TOKENS
from snapshotd.engine.journal.wire import records
from snapshotd.engine.markers import MARKERS
from snapshotd.engine.transfer.trajectories.reading import Source, Spoken, SpokenResult, reply_text, spoken
from snapshotd.errors import SnapshotdError
from snapshotd.gateway.base import Api, RecordedReply
from snapshotd.kernel import turns
from snapshotd.types import CallStatus, EntryKind, JournalEntry, Message, Snapshot, SnapshotID, ToolCall, TrajectoryID

OUTPUT_LIMIT_BYTES = 1 << 20
"""The most of one recorded output that is exported. The snapshot has all of it."""

Replies = Callable[[str, RecordedReply], Sequence[Message]]
"""Reads the messages of a recorded reply in the words of an API (`gateway.base.Api`)."""


@dataclass(slots=True)
class TurnCall:
    """A call of a turn. `result` None: none is recorded. `told`: the result is what the model was told. `snapshot`: the
    one that was taken when it had ended."""

    id: str
    name: str
    arguments: Any
    result: str | None = None
    told: bool = False
    status: CallStatus | None = None
    snapshot: SnapshotID | None = None
    began_at_ns: int | None = None

    @property
    def failed(self) -> bool:
        return self.status not in (None, CallStatus.DONE)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model call behind a turn. `tokens`: as the gateway keeps them (`gateway/tokens.py`)."""

    name: str
    api: str | None
    usage: dict[str, Any]
    stop_reason: str | None
    tokens: dict[str, Any] | None
    ended_at_ns: int | None


@dataclass(slots=True)
class Turn:
    """One turn. `copied`: it belongs to the trajectory that this one was forked from. `snapshot`: the one that binds
    it."""

    source: Source
    text: str
    snapshot: SnapshotID
    copied: bool
    reasoning: str | None = None
    model: ModelFacts | None = None
    calls: list[TurnCall] = field(default_factory=list)
    loose: list[str] = field(default_factory=list)
    """Results that name no call."""

    @property
    def at_ns(self) -> int | None:
        """The time of the model's reply, or else of the first call; None: no time is recorded."""
        if self.model is not None and self.model.ended_at_ns is not None:
            return self.model.ended_at_ns
        return next((call.began_at_ns for call in self.calls if call.began_at_ns is not None), None)


class Dialog:
    """One conversation while it is read. `lane`: None for the trajectory's own."""

    def __init__(self, lane: int | None, emit: Callable[[Dialog, Turn], None]) -> None:
        self.lane, self._emit = lane, emit
        self.caller: str | None = None
        self.params: dict[str, Any] = {}
        """The parameters of its newest request, tools among them."""
        self.left_out = 0
        """Parts that are no text."""
        self._open: Turn | None = None
        self._behind: list[Turn] = []
        """The turns of others behind the open one, whose calls may still end."""

    def say(self, said: Spoken, at: Snapshot, copied: bool, model: ModelFacts | None) -> None:
        """A message joins the conversation."""
        self.left_out += len(said.left_out)
        if said.source == "agent":
            if not (model is None and self.goes_on and self._open is not None):
                self._begin(Turn("agent", "", at.id, copied, model=model))
            assert self._open is not None
            turn = self._open
            turn.text = "\n".join(filter(None, (turn.text, said.text)))
            turn.reasoning = "\n".join(filter(None, (turn.reasoning, said.reasoning))) or None
            turn.calls += [TurnCall(call.id, call.name, call.arguments) for call in said.calls]
            return
        for result in said.results:
            self._answer(result, at, copied)
        if said.texts or not said.results:
            self._add(Turn(said.source, said.text, at.id, copied))

    @property
    def goes_on(self) -> bool:
        """True where another message of the model is a part of the same reply: the Responses API says one item at a
        time."""
        turn = self._open
        return (
            turn is not None
            and turn.model is not None
            and turn.model.api == Api.RESPONSES
            and not self._behind
            and not any(call.result is not None for call in turn.calls)
        )

    def add_unsaid_reply(self, model: ModelFacts, text: str, at: Snapshot, copied: bool) -> None:
        """A model call whose reply is no message of the conversation."""
        self._begin(Turn("agent", text, at.id, copied, model=model))

    def end_call(
        self, call: ToolCall, wire_id: str | None, at: Snapshot, copied: bool, result: Callable[[], str]
    ) -> None:
        """A call has ended, and `at` is its snapshot. `result` reads what it returned, if no message says it."""
        found = self._find_call(call, wire_id)
        if found is None:
            found = TurnCall(wire_id or call.id, call.name, call.arguments)
            turn = self._open
            if turn is None or self._behind or not (turn.model is not None or turn.text):
                turn = Turn("agent", "", at.id, copied)
                self._begin(turn)
            turn.calls.append(found)
        found.status, found.snapshot, found.began_at_ns = call.status, at.id, call.started_at_ns
        if found.result is None:
            found.result = result()
        if self._open is not None and found in self._open.calls:
            self._open.snapshot = at.id

    def _find_call(self, call: ToolCall, wire_id: str | None) -> TurnCall | None:
        """Find the call of the open turn that has ended: by the provider's id, else by name and arguments."""
        waiting = [] if self._open is None else [one for one in self._open.calls if one.snapshot is None]
        if wire_id is not None:
            return next((one for one in waiting if one.id == wire_id), None)
        return next((one for one in waiting if (one.name, one.arguments) == (call.name, call.arguments)), None)

    def _answer(self, result: SpokenResult, at: Snapshot, copied: bool) -> None:
        calls = [] if self._open is None else self._open.calls
        for call in calls:
            if call.id == result.id and not call.told:
                call.result, call.told = result.text, True
                if result.failed and call.status is None:
                    call.status = CallStatus.FAILED
                return
        if self._open is not None and not self._behind:
            self._open.loose.append(result.text)
        else:
            self._add(Turn("user", result.text, at.id, copied))

    def _begin(self, turn: Turn) -> None:
        self.flush()
        self._open = turn

    def _add(self, turn: Turn) -> None:
        if self._open is None:
            self._emit(self, turn)
        else:
            self._behind.append(turn)

    def flush(self) -> None:
        """Hand on all turns so far."""
        for turn in ([] if self._open is None else [self._open]) + self._behind:
            self._emit(self, turn)
        self._open, self._behind = None, []


@dataclass(frozen=True, slots=True)
class _Link:
    """One snapshot of the history, and the range of messages that it added and that the conversation still has."""

    id: SnapshotID
    first: int
    end: int


class Walk:
    """Reads everything of a trajectory up to a snapshot. `emit` gets every turn, those of one conversation in their
    order."""

    def __init__(
        self,
        context: Context,
        replies: Replies,
        line: TrajectoryID,
        head: Snapshot,
        emit: Callable[[Dialog, Turn], None],
    ) -> None:
        self._context, self._catalog, self._replies = context, context.catalog, replies
        self._line, self._head, self._emit = line, head, emit
        self.main = Dialog(None, emit)
        self.lanes: dict[int, Dialog] = {}
        """The other conversations, by the number of their lane."""
        self.unread = 0
        """Replies whose bytes were not kept, so that nothing can be said about them."""
        self.failed_model_calls = 0

    def run(self) -> None:
        """NotFound: it is removed meanwhile. DataLoss."""
        for link in _list_links(self._catalog, self._head):
            turns.give_way()
            self._read_part(link)
        for conversation in (self.main, *self.lanes.values()):
            conversation.flush()

    def _read_part(self, link: _Link) -> None:
        """The messages and entries that one snapshot binds."""
        at = self._catalog.snapshots.get(link.id)
        copied = at.trajectory != self._line
        entries = _Entries(self._catalog.journal.read(at.id, at.continues), at.call.id)
        messages = itertools.islice(self._catalog.conversations.read(at.id, link.first), link.end - link.first)
        for message in messages:
            said = spoken(message)
            model = None
            if said.source == "agent" and not self.main.goes_on:
                model = self._model_behind(said, entries, at, copied)
            self.main.say(said, at, copied, model)
        for entry in entries:
            self._read_entry(entry, at, copied)
        if not (entries.seen or at.call.name in MARKERS):
            self._end_call(
                self.main, at.call, None, at, copied
            )  # a command from outside, or a call that a hook told of

    def _model_behind(self, said: Spoken, entries: _Entries, at: Snapshot, copied: bool) -> ModelFacts | None:
        """Find the model call whose reply a message is: the next one, unless a program has recorded another reply."""
        while (entry := entries.next_of(_speaks_here)) is not None:
            for earlier in entries.take_skipped():
                self._read_entry(earlier, at, copied)
            facts = _facts(entry)
            self._learn(self.main, entry)
            text = None if facts.api is not None else reply_text(entry.result)
            if text is None or text.strip() == said.text.strip():
                return facts
            self.main.add_unsaid_reply(facts, text, at, copied)
        return None

    def _read_entry(self, entry: JournalEntry, at: Snapshot, copied: bool) -> None:
        lane = self._find_lane(entry)
        if entry.kind is EntryKind.TOOL:
            self._read_tool(lane, entry, at, copied)
        elif entry.kind is EntryKind.MODEL:
            if entry.status is not CallStatus.DONE:
                self.failed_model_calls += 1
            self._learn(lane, entry)
            if lane is not self.main:
                self._read_side_call(lane, entry, at, copied)
            elif entry.status is CallStatus.DONE:
                text = None if _is_wire(entry) else reply_text(entry.result)
                self.main.add_unsaid_reply(_facts(entry), text or "", at, copied)

    def _read_tool(self, lane: Dialog, entry: JournalEntry, at: Snapshot, copied: bool) -> None:
        wire_id = entry.details.get(CALL)
        if entry.id == at.call.id:
            self._end_call(lane, at.call, wire_id, at, copied)
            return
        began, status = entry.began_at_ns, entry.status or CallStatus.UNKNOWN  # a promotion binds it, with its result
        spent = (entry.ended_at_ns or began) - began
        call = ToolCall(entry.id, entry.name, entry.arguments, status, began, spent, error=entry.error)
        lane.end_call(call, wire_id, at, copied, lambda: "\n".join(filter(None, (_to_text(entry.result), entry.error))))

    def _read_side_call(self, lane: Dialog, entry: JournalEntry, at: Snapshot, copied: bool) -> None:
        """Read a turn of another conversation, whose messages are in the model call and its reply."""
        for message in entry.details.get("messages", ()):
            lane.say(spoken(Message(message["role"], message["content"])), at, copied, None)
        if entry.status is not CallStatus.DONE or not isinstance(entry.result, dict):
            return
        try:
            said = self._replies(str(entry.arguments["api"]), records.reply_of(entry))
        except SnapshotdError:
            self.unread += 1
            return
        facts, calls = _facts(entry), iter(entry.result.get("calls", ()))
        for number, message in enumerate(said):
            words = spoken(message)
            words.calls = [replace(call, id=next(calls, {"id": call.id})["id"]) for call in words.calls]
            lane.say(words, at, copied, facts if number == 0 else None)

    def _find_lane(self, entry: JournalEntry) -> Dialog:
        """The conversation that an entry belongs to."""
        number = entry.details.get(LANE)
        if number in self.lanes:
            return self.lanes[number]
        caller = entry.details.get(CALLER)
        if number is None or (caller is None and not entry.details.get(SIDE)):
            return self.main
        lane = self.lanes[number] = Dialog(number, self._emit)
        lane.caller = caller
        return lane

    @staticmethod
    def _learn(conversation: Dialog, entry: JournalEntry) -> None:
        conversation.params = entry.details.get(PARAMS) or conversation.params

    def _end_call(self, lane: Dialog, call: ToolCall, wire_id: str | None, at: Snapshot, copied: bool) -> None:
        lane.end_call(call, wire_id, at, copied, lambda: self._output(call))

    def _output(self, call: ToolCall) -> str:
        """A call's recorded output as text."""
        parts = [self._text(call, "output")]
        if not parts[0]:
            parts = [self._text(call, "stdout"), self._text(call, "stderr")]
        return "\n".join(filter(None, (*parts, call.error)))

    def _text(self, call: ToolCall, which: str) -> str:
        blob = getattr(call, which)
        if blob is None:
            return ""
        found = bytearray()
        size = 0
        for piece in self._context.output(blob):
            size += len(piece)
            found += piece[: max(0, OUTPUT_LIMIT_BYTES - len(found))]
        if size > OUTPUT_LIMIT_BYTES:
            return found.decode(errors="replace") + f"\n[cut: {size} bytes in all]"
        text = found.decode(errors="replace")
        if which != "output":
            return text
        try:
            return _to_text(json.loads(text))
        except (ValueError, RecursionError):
            return text


class _Entries:
    """The entries of a part, in order, from which single ones can be taken before their turn. `seen`: the one of the
    snapshot's own call (`call_id`) was among them."""

    def __init__(self, entries: Iterator[JournalEntry], call_id: str) -> None:
        self._rest, self._waiting, self._call_id = entries, deque[JournalEntry](), call_id
        self.seen = False

    def __iter__(self) -> Iterator[JournalEntry]:
        yield from self.take_skipped()
        for entry in self._rest:
            self.seen |= entry.id == self._call_id
            yield entry

    def next_of(self, wanted: Callable[[JournalEntry], bool]) -> JournalEntry | None:
        """The next entry that is wanted; those before it wait for `take_skipped`. None, and all of them wait, if there is
        none."""
        for entry in self._rest:
            if wanted(entry):
                return entry
            self._waiting.append(entry)
        return None

    def take_skipped(self) -> Iterator[JournalEntry]:
        """The entries that wait, in order."""
        while self._waiting:
            entry = self._waiting.popleft()
            self.seen |= entry.id == self._call_id
            yield entry


def _list_links(catalog: Catalog, head: Snapshot) -> Iterable[_Link]:
    """The snapshots up to `head`, oldest first, across forks, rewinds and edits."""
    links: list[_Link] = []
    at, end = head, head.messages
    while True:
        before = None if at.continues is None else catalog.snapshots.get(at.continues)
        if before is None:
            first = 0
        elif at.follows is None and before.trajectory == at.trajectory:
            first = before.messages
        else:
            first = at.messages - len(catalog.conversations.own(at.id))
        links.append(_Link(at.id, min(first, end), min(at.messages, end)))
        if before is None:
            return reversed(links)
        at, end = before, min(first, end)


def _to_text(value: Any) -> str:
    """A recorded result as text."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _speaks_here(entry: JournalEntry) -> bool:
    """True for a model call of the trajectory's own conversation that got a reply."""
    own = CALLER not in entry.details and not entry.details.get(SIDE)
    return entry.kind is EntryKind.MODEL and entry.status is CallStatus.DONE and own


def _is_wire(entry: JournalEntry) -> bool:
    return bool(entry.details.get("gateway"))


def _facts(entry: JournalEntry) -> ModelFacts:
    usage = entry.details.get("usage")
    api = entry.arguments.get("api") if _is_wire(entry) and isinstance(entry.arguments, dict) else None
    return ModelFacts(
        entry.name,
        api,
        usage if isinstance(usage, dict) else {},
        entry.details.get("stop_reason"),
        entry.details.get(TOKENS),
        entry.ended_at_ns,
    )


def family(catalog: Catalog, root: TrajectoryID) -> list[TrajectoryID]:
    """A trajectory and all that were forked from it, and from those, parents first."""
    children: dict[TrajectoryID, list[TrajectoryID]] = {}
    for line in catalog.trajectories.list():
        if line.forked_from is not None:
            children.setdefault(catalog.snapshots.get(line.forked_from).trajectory, []).append(line.id)
    found = [root]
    for one in found:
        found += children.get(one, [])
    return found
