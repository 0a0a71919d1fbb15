"""The calls that models ask for on the wire, from the reply that asks for them to the request that ends them: it hands in
their results, or goes on without, as agents do that tell results as text.

Where a model is offered no tools, its words take the place of calls: the agent may do what they say, and its next request
ends the turn, with a snapshot of its own.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from snapshotd.engine.context import Context
from snapshotd.engine.journal.pending import Open
from snapshotd.engine.journal.pipeline import Journal
from snapshotd.engine.journal.replay import CALL, LANE, OF_MODEL, SILENT, SUB_AGENT, TURN
from snapshotd.engine.journal.wire.conversations import Conversations
from snapshotd.engine.journal.wire.lanes import Lane, LanePlace, Words
from snapshotd.engine.protocol.agent_handler import Intent
from snapshotd.engine.sandbox.step import marker
from snapshotd.errors import SnapshotdError
from snapshotd.gateway.base import ModelCall, ToolResult, TurnRequest
from snapshotd.types import BlobID, CallID, CallStatus, EntryKind, JournalEntry, new_id

MAX_OPEN_TOOLS = 1000
_NOT_REPORTED = "not reported: the agent went on without telling the model a result of this call"


@dataclass(frozen=True, slots=True)
class _Tool:
    """A call that the model has asked for, in the reply at place `at` of lane number `lane`."""

    opened: Open
    lane: int
    at: int


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a call. `result`: None where the agent says nothing of it."""

    call_id: str
    name: str
    result: ToolResult | None


@dataclass(frozen=True, slots=True)
class Ends:
    """The calls that a request ends in its lane, or the turn of words that asked for none."""

    lane: Lane
    calls: list[_End]
    words: Words | None

    def __bool__(self) -> bool:
        return bool(self.calls) or self.words is not None


class WireCalls:
    """Thread-safe."""

    def __init__(self, context: Context, journal: Journal, conversations: Conversations) -> None:
        self._context, self._journal, self._conversations = context, journal, conversations
        self._recorder, self._replay = journal.recorder, journal.replay
        self._tools: dict[str, _Tool] = {}
        """Calls that the model has asked for and no request has ended, by the provider's id."""
        self._finished = conversations.finished
        self._unclosed: set[str] = set()
        """The calls that an earlier daemon opened: the agent may have sent it their results."""
        self._lock = threading.Lock()

    @property
    def open(self) -> dict[str, Any]:
        """The arguments of the calls that have not ended, by the provider's id."""
        with self._lock:
            return {call_id: tool.opened.entry.arguments for call_id, tool in self._tools.items()}

    def restore(self, line: dict[str, Any]) -> Any:
        """Go on with a call that an earlier daemon noted. Returns its arguments; None if it is open no more."""
        opened = self._recorder.pending.find_open(line["entry"])
        if opened is None:
            return None
        self._tools[line["tool"]] = _Tool(opened, line.get("lane", -1), line.get("at", 0))
        self._unclosed.add(line["tool"])
        return opened.entry.arguments

    # -- from the reply that asks --------------------------------------------------------------------------------------

    def open_calls(
        self, lane: Lane, request: TurnRequest, calls: list[ModelCall], model: JournalEntry | None, at: int
    ) -> None:
        """Open the calls that the reply to `request` asks for, or the turn of its words if it asks for none. The reply stands
        at place `at` of the lane, and the agent has not got it yet. `model`: its entry; None in a replay, where the ends of
        the calls may be recorded. Denied."""
        for call in calls:
            if model is not None:
                self._open(call, model, lane, at)
            else:
                with self._lock:
                    self._tools[call.id] = _Tool(self._replayed_call(call), lane.number, at)
        if calls or request.offers_tools or (lane.side and lane.caller is None):
            return
        lane.words = Words(at, CallID(new_id()), time.time_ns())
        self._conversations.note(
            {"words": lane.number, "at": at, "call": lane.words.call_id, "said": lane.words.said_at_ns}
        )

    def _replayed_call(self, call: ModelCall) -> Open:
        """A call that a replayed program makes by itself; its end is recorded already."""
        head = self._journal.sandbox.head
        entry = JournalEntry(CallID(new_id()), EntryKind.TOOL, call.name, call.arguments, head, time.time_ns())
        return Open(entry, time.perf_counter_ns())

    def _open(self, call: ModelCall, model: JournalEntry, lane: Lane, at: int) -> None:
        """Open a call that the model asks for, once policy and people let it run. Denied."""
        with self._lock:
            if call.id in self._tools:
                return
            self._finished.discard(call.id)
            while len(self._tools) >= MAX_OPEN_TOOLS:
                self._recorder.pending.lose([self._tools.pop(next(iter(self._tools))).opened.entry.id])
        intent = Intent(new_id(), call.name[:200] or "tool", call.arguments)
        details = {"gateway": True, OF_MODEL: model.id, LANE: lane.number, CALL: call.id}
        self._journal.admit(intent, threading.Event(), details)  # the gate notices the sandbox's end
        opened = self._recorder.begin(intent, _details(call.id, lane))
        self._conversations.note({"tool": call.id, "entry": opened.entry.id, "lane": lane.number, "at": at})
        with self._lock:
            self._tools[call.id] = _Tool(opened, lane.number, at)

    # -- to the request that ends --------------------------------------------------------------------------------------

    def meet_ends(self, request: TurnRequest, place: LanePlace) -> Ends:
        """The calls, or the turn, that a request ends and whose ends are not recorded. Recorded ends are met here, before the
        others, since the results of one turn come in any order. Diverged."""
        lane, calls = place.lane, self._find_ends(request, place)
        calls = sorted(calls, key=lambda end: not self._is_recorded(lane, end))
        left = [end for end in calls if not self._meet_end(lane, end)]
        return Ends(lane, left, self._take_words(lane, place.end(request)))

    def _find_ends(self, request: TurnRequest, place: LanePlace) -> list[_End]:
        """The calls that a request ends. By their results: those of calls that are open, and of calls that nobody knows
        in a lane that goes on; results that an earlier daemon received and did not process are among them, and those of
        the past are not. By going on from the reply that asked for them: the open ones without a result."""
        with self._lock:
            since = 0 if self._unclosed else place.known
            self._unclosed.clear()
            ends = [
                _End(result.id, result.name or "tool", result)
                for result in request.results_since(since)
                if result.id in self._tools
                or (result.message >= place.known and place.at > 0 and result.id not in self._finished)
            ]
            told, end = {one.call_id for one in ends}, place.end(request)
            silent = [
                _End(call_id, tool.opened.entry.name, None)
                for call_id, tool in self._tools.items()
                if tool.lane == place.lane.number and tool.at < end and call_id not in told
            ]
        return ends + silent

    def _is_recorded(self, lane: Lane, end: _End) -> bool:
        with self._lock:
            tool = self._tools.get(end.call_id)
        number = lane.number if lane.recorded else None
        return tool is not None and self._replay.comes_next(
            EntryKind.TOOL, tool.opened.entry.name, tool.opened.entry.arguments, number
        )

    def _meet_end(self, lane: Lane, end: _End) -> bool:
        """Meet the call's end if the journal records it, and return True: the files are then as they were. Diverged."""
        with self._lock:
            tool = self._tools.get(end.call_id)
        number, replay = lane.number if lane.recorded else None, self._replay
        if tool is None or not replay.has_left(number):
            return False
        name, arguments = tool.opened.entry.name, tool.opened.entry.arguments
        met = end.result is None and not self._is_recorded(lane, end)  # older journals have no end of a silent call
        if not met and replay.meet_on_wire(EntryKind.TOOL, name, arguments, number, called=False) is None:
            return False
        with self._lock:
            self._tools.pop(end.call_id, None)
            self._finished.add(end.call_id)
        return True

    def _take_words(self, lane: Lane, end: int) -> Words | None:
        """Take the words of the lane's newest turn, if the request goes on from them. None if the journal records the turn's
        end: it is met, and the files are then as they were."""
        with self._lock:
            words = lane.words
            if words is None or words.at >= end:
                return None
            lane.words = None
        number, replay = lane.number if lane.recorded else None, self._replay
        if not replay.has_left(number):
            return words
        if replay.comes_next(EntryKind.CHECKPOINT, TURN, {}, number):  # older journals have none
            replay.meet_on_wire(EntryKind.CHECKPOINT, TURN, {}, number, called=False)
        return None

    def try_to_close(self, ends: Ends) -> SnapshotdError | None:
        """Record the ends, each with a snapshot. Returns the error if a snapshot cannot be taken."""
        try:
            self._close_all(ends)
        except SnapshotdError as exc:
            return exc
        return None

    def _close_all(self, ends: Ends) -> None:
        for end in ends.calls:
            self._close(end)
        words = ends.words
        if words is None or self._recorder.find(words.call_id) is not None:
            return  # an earlier daemon was killed before the agent had the reply to the request that ends them
        call = replace(marker(TURN, {}, started_at_ns=words.said_at_ns), id=words.call_id)
        details = {LANE: ends.lane.number}
        self._recorder.complete(EntryKind.CHECKPOINT, TURN, {}, call, began_at_ns=words.said_at_ns, details=details)

    def _close(self, end: _End) -> None:
        with self._lock:
            tool = self._tools.pop(end.call_id, None)
            self._finished.add(end.call_id)
        lane = self._conversations.lane_of(end.call_id)
        details = _details(end.call_id, lane)
        if tool is None:
            opened = self._recorder.begin(Intent(new_id(), end.name[:200], None), details)
        elif self._recorder.pending.find_open(tool.opened.entry.id) is None:  # asked for in the replay, ended after it
            entry = tool.opened.entry
            opened = self._recorder.begin(Intent(new_id(), entry.name, entry.arguments), details)
        else:
            opened = tool.opened
        self._recorder.pending.close(opened.entry.id)
        if end.result is None:
            call = opened.outcome(CallStatus.UNKNOWN, error=_NOT_REPORTED)
        else:
            status = CallStatus.FAILED if end.result.is_error else CallStatus.DONE
            call = opened.outcome(status, output=self._save(end.result.content))
        self._recorder.end_step(opened, call, {SILENT: True} if end.result is None else None)

    def _save(self, content: Any) -> BlobID:
        writer = self._context.spool.writer()
        try:
            writer.write(
                json.dumps(self._recorder.funnel.conceal(content), ensure_ascii=False).encode("utf-8", "replace")
            )
            return writer.save()
        finally:
            writer.discard()


def _details(call_id: str, lane: Lane | None) -> dict[str, Any]:
    if lane is None:
        return {CALL: call_id}
    called = {} if lane.caller is None else {SUB_AGENT: str(lane.number)}
    return {CALL: call_id, LANE: lane.number, **called}
