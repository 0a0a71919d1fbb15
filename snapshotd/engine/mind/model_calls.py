"""The journal of an agent that does not use our library: the recording gateway reads its mind from the wire.

    a request with tool results   ends the tool calls of the turn before it, each with a snapshot, while the model already thinks
    the next request without      ends them, too: some agents hand results in as text. Where no tools were offered, the agent acts
                                  on the model's words alone: the request ends that turn, with a snapshot
    a request                     is a MODEL entry: its outline (the messages themselves are the conversation). Where nothing is
                                  answered from records, it is written while the provider has the request already
    a reply                       is that entry's result, as it came; what the model says joins the conversation, tools are intents

In a replay recorded replies are sent again. The agent runs its tools itself, and when it hands in their results its
files are made the recorded ones; where the journal ends with a reply, they go live before the agent has it. Requests
are compared by what the model and the user said first, not by what tools answered: times and paths differ.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from snapshotd.engine.context import Context
from snapshotd.engine.mind import wire_records
from snapshotd.engine.mind.approvals import Gate
from snapshotd.engine.mind.lanes import Lane, Lanes, Place, Words, texts
from snapshotd.engine.mind.pending import Open
from snapshotd.engine.mind.recorder import Recorder
from snapshotd.engine.mind.replay import (
    CALL,
    CALLER,
    CAPTURE,
    LANE,
    OF_MODEL,
    PARAMS,
    REPLY_DENIED,
    SIDE,
    SILENT,
    TOKENS,
    TURN,
)
from snapshotd.engine.mind.reuse import REUSED
from snapshotd.engine.protocol.agent_handler import Intent
from snapshotd.engine.sandbox import live
from snapshotd.engine.sandbox.live import LiveRecord
from snapshotd.engine.sandbox.step import marker
from snapshotd.errors import Denied, SnapshotdError, Unsupported
from snapshotd.failpoints import hit
from snapshotd.gateway.base import Api, ModelCall, RecordedReply, ReplyContent, ToolResult, TurnReply, TurnRequest
from snapshotd.types import BlobID, CallID, CallStatus, EntryKind, JournalEntry, Message, ToolCall, new_id

MAX_OPEN_TOOLS = 1000
_NOT_REPORTED = "not reported: the agent has gone on without telling the model a result of this call"
_LINES, _LINE_CHARS = 20, 200
"""The most of a difference that a person is shown."""
_TOLD = 2000
"""Messages at the end of a recorded conversation that are recognised when another program sends them."""


@dataclass(frozen=True, slots=True)
class _Tool:
    """A call that the model has asked for, in the reply at place `at` of lane number `lane`."""

    opened: Open
    lane: int
    at: int


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a call. `result`: None where the agent goes on and says nothing of it."""

    call_id: str
    name: str
    result: ToolResult | None


@dataclass(slots=True)
class _Turn:
    """A turn in the course of forwarding. `ends`, `words`: the calls, or the model's words, that the request ends.
    `opened`: its entry, once the provider has the request."""

    intent: Intent
    details: dict[str, Any]
    lane: Lane
    ends: list[_End]
    words: Words | None
    opened: Open | None = None
    step: threading.Thread | None = None
    failure: SnapshotdError | None = None


class ModelCalls:
    """Implements `gateway.base.GatewayHandler` for one sandbox. Thread-safe."""

    def __init__(self, context: Context, recorder: Recorder, gate: Gate) -> None:
        self._context, self._recorder, self._gate = context, recorder, gate
        self._lanes, self._finished = _past(recorder)
        self._tools: dict[str, _Tool] = {}
        """Tool calls that the model has asked for and the agent not answered, by the provider's id."""
        self._heard_before: dict[Api, frozenset[bytes]] = {}
        self._unclosed: set[str] = set()
        """The calls among them that an earlier daemon opened: the agent may have sent it their results."""
        self._resumed: set[int] = set()
        """Conversations of an earlier daemon that no request has continued yet."""
        self._turns: dict[int, _Turn] = {}
        self._lock = threading.Lock()

    def turn(self, request: TurnRequest) -> RecordedReply | None:
        """See `GatewayHandler.turn`. Where no recorded reply can answer it, the request is read once the provider has
        it."""
        if self._recorder.is_answered or self._resumed:
            return self._met(request)
        self._recorder.replay.check()
        return None

    def _met(self, request: TurnRequest) -> RecordedReply | None:
        """A recorded reply. None: the request is a turn that is forwarded."""
        place = self._place(request)
        lane, known = place.lane, place.known
        replaying = self._recorder.replay.replaying
        ends = self._unrecorded_ends(lane, self._ends(request, place))
        words = self._unrecorded_words(lane, place.end(request))
        outline = wire_records.outline(request, place.opening)
        replayed = self._recorder.replay.replayed_on_wire(
            EntryKind.MODEL,
            request.model[:200],
            outline,
            lane.number if lane.recorded else None,
            called=lane.caller is not None,
            difference=lambda: self._difference(request, lane),
        )
        if replayed is not None:
            return self._again(request, place, replayed.entry)
        if lane.number in self._resumed:
            unheard = self._unheard(request, place, outline)
            if unheard is not None:
                return unheard
        told = request.new_messages(known)
        if lane.side:
            pass  # its messages are in its entries
        elif replaying:  # it has just gone live: the tools' results, for one, may be in the conversation already
            self._recorder.met(told)
        else:
            for number, message in enumerate(told):
                self._recorder.message(message, rid=_rid(lane, place.at, number, message))
        lane.recorded = True
        self._heard(lane, place.at, request.digests[known:])
        reply = self._reused_reply(request, outline, lane)
        more: dict[str, Any] = {SIDE: True} if lane.side and lane.caller is None else {}
        params = wire_records.params(request, lane.params)
        if params != lane.params:
            more[PARAMS] = lane.params = params
        if lane.side:
            more["messages"] = [{"role": message.role, "content": message.content} for message in told]
        if reply is not None:
            more[REUSED] = reply.id
        intent = Intent(new_id(), request.model[:200], outline, EntryKind.MODEL)
        turn = _Turn(intent, {**lane.details, **more}, lane, ends, words)
        if reply is not None:
            return self._reuse(request, turn, self._begin(turn), reply)
        with self._lock:
            lane.asking += 1
            self._turns[id(request)] = turn
        return None

    def sent(self, request: TurnRequest) -> None:
        """See `GatewayHandler.sent`. A crash before this leaves a request that the agent repeats, as one before the
        reply is recorded does."""
        hit("engine.journal.sent")
        if id(request) not in self._turns:
            recorded = self._met(request)
            assert recorded is None, "nothing is answered from records any more"
        turn = self._turns[id(request)]
        try:
            turn.opened = self._begin(turn)
        except BaseException:
            self._forwarded(request)
            raise
        if turn.ends or turn.words is not None:
            turn.step = threading.Thread(target=self._take_steps, args=(turn,), name="gateway-step")
            turn.step.start()

    def _begin(self, turn: _Turn) -> Open:
        opened = self._recorder.begin(turn.intent, turn.details)
        self._note({"turn": opened.entry.id})
        return opened

    def _forwarded(self, request: TurnRequest) -> _Turn:
        """The request is not on its way any more."""
        with self._lock:
            turn = self._turns.pop(id(request))
            turn.lane.asking -= 1
        return turn

    def replied(self, request: TurnRequest, reply: TurnReply) -> None:
        """See `GatewayHandler.replied`."""
        turn = self._forwarded(request)
        if turn.step is not None:
            turn.step.join()
        opened = turn.opened
        assert opened is not None, "`sent` comes first"
        self._recorder.pending.take(opened.entry.id)
        content = reply.content
        calls = [] if reply.failed else list(content.calls)
        details = {"gateway": True, "usage": wire_records.usage(reply), "stop_reason": content.stop_reason}
        if request.sent_as is not None:
            details["sent_as"] = request.sent_as
        details |= self._captured(request, reply)
        result = wire_records.result(reply, calls)
        status = CallStatus.FAILED if reply.failed or turn.failure is not None else CallStatus.DONE
        error = reply.error or content.error or (f"the provider answered {reply.status}" if reply.failed else None)
        if turn.failure is not None:  # its snapshot is missing, so the agent must not go on from it: it gets the error
            error = turn.failure.message
        self._recorder.end_model(opened, status, result, error, details)
        if turn.failure is not None:
            raise turn.failure
        if reply.failed:
            return
        self._said(turn.lane, request, content, calls, opened.entry)

    def _captured(self, request: TurnRequest, reply: TurnReply) -> dict[str, Any]:
        """The tokens of a reply, as details of its entry. Token ids spell a secret that stands in the text, and no
        marker can take its place among them; so there are none of a conversation with a secret."""
        if reply.capture is None:
            return {}
        said = "" if reply.body is None else reply.body.decode(errors="replace")
        everything = [list(request.items), dict(request.params), said]
        if reply.tokens is not None and self._recorder.funnel.conceal(everything) != everything:
            return {CAPTURE: {**reply.capture, "left_out": "secrets"}}
        return {CAPTURE: dict(reply.capture), **({} if reply.tokens is None else {TOKENS: dict(reply.tokens)})}

    def _reused_reply(self, request: TurnRequest, outline: dict[str, Any], lane: Lane) -> JournalEntry | None:
        """An earlier run's reply to this request; None: it is forwarded."""
        reply = self._recorder.reused_reply(request.model[:200], outline, lane.number)
        try:
            return None if reply is None or wire_records.recorded(reply) is None else reply
        except Unsupported:
            return None  # it was too large to be kept

    def _reuse(self, request: TurnRequest, turn: _Turn, opened: Open, reply: JournalEntry) -> RecordedReply:
        """An earlier run's reply is recorded as this one's, after the results that the request brings, and goes to the agent."""
        self._take_steps(turn)
        recorded = wire_records.recorded(reply)
        content = request.reader.read_again(request, recorded)
        self._recorder.pending.take(opened.entry.id)
        failure = turn.failure
        status, error = (CallStatus.DONE, None) if failure is None else (CallStatus.FAILED, failure.message)
        details = {"gateway": True, "usage": {}, "stop_reason": content.stop_reason}
        self._recorder.end_model(opened, status, reply.result, error, details)
        if failure is not None:
            raise failure
        self._said(turn.lane, request, content, _calls(reply), opened.entry)
        return recorded

    # -- tools ---------------------------------------------------------------------------------------------------------

    def _open_tool(self, call: ModelCall, model: JournalEntry, lane: Lane, at: int) -> None:
        """The model asks for a tool in its reply at place `at` of the lane, and the agent has not heard of it yet: the
        moment to ask a person. Denied."""
        with self._lock:
            if call.id in self._tools:
                return
            self._finished.discard(call.id)
            while len(self._tools) >= MAX_OPEN_TOOLS:
                self._recorder.pending.lost([self._tools.pop(next(iter(self._tools))).opened.entry.id])
        intent = Intent(new_id(), call.name[:200] or "tool", call.arguments)
        try:
            self._gate.admit(
                self._recorder.sandbox,
                CallID(intent.call_id),
                intent.name,
                self._recorder.funnel.conceal(call.arguments),
                intent.side_effect,
                asked=False,
                expires_s=None,
                step=self._recorder.step,
                cancelled=threading.Event(),  # the gate notices the sandbox's end
            )
        except Denied as denied:
            self._recorder.refused(
                intent, denied.message, {"gateway": True, OF_MODEL: model.id, LANE: lane.number, CALL: call.id}
            )
            raise
        opened = self._recorder.begin(intent, {LANE: lane.number, CALL: call.id})
        self._note({"tool": call.id, "entry": opened.entry.id, "lane": lane.number, "at": at})
        with self._lock:
            self._tools[call.id] = _Tool(opened, lane.number, at)

    def _ends(self, request: TurnRequest, place: Place) -> list[_End]:
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

    def _take_steps(self, turn: _Turn) -> None:
        """Take the snapshots of what a request ends."""
        try:
            for end in turn.ends:
                self._close_tool(end)
            if turn.words is not None:
                self._close_words(turn.lane, turn.words)
        except SnapshotdError as exc:
            turn.failure = exc

    def _close_words(self, lane: Lane, words: Words) -> None:
        if self._recorder.known(words.call_id) is not None:
            return  # an earlier daemon was killed before the agent had the reply to the request that ends them
        call = replace(marker(TURN, {}, started_at_ns=words.said_at_ns), id=words.call_id)
        self._recorder.complete(
            EntryKind.CHECKPOINT, TURN, {}, call, began_at_ns=words.said_at_ns, details={LANE: lane.number}
        )

    def _close_tool(self, end: _End) -> None:
        with self._lock:
            tool = self._tools.pop(end.call_id, None)
            self._finished.add(end.call_id)
        lane = self._lanes.lane_of(end.call_id)
        details: dict[str, Any] = {CALL: end.call_id, **({} if lane is None else {LANE: lane.number})}
        if tool is None:
            opened = self._recorder.begin(Intent(new_id(), end.name[:200], None), details)
        elif self._recorder.pending.opened(tool.opened.entry.id) is None:  # asked for in the replay, ended after it
            entry = tool.opened.entry
            opened = self._recorder.begin(Intent(new_id(), entry.name, entry.arguments), details)
        else:
            opened = tool.opened
        self._recorder.pending.take(opened.entry.id)
        call = ToolCall(
            id=opened.entry.id,
            name=opened.entry.name,
            arguments=opened.entry.arguments,
            status=CallStatus.UNKNOWN,
            started_at_ns=opened.entry.began_at_ns,
            duration_ns=time.perf_counter_ns() - opened.clock_ns,
            error=_NOT_REPORTED,
        )
        if end.result is not None:
            status = CallStatus.FAILED if end.result.is_error else CallStatus.DONE
            call = replace(call, status=status, error=None, output=self._save(end.result.content))
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

    # -- replay --------------------------------------------------------------------------------------------------------

    def _unrecorded_ends(self, lane: Lane, ends: list[_End]) -> list[_End]:
        """The ends that the journal does not record. The files are as they were after the others, which come first:
        results of one turn come in any order."""
        return [
            end
            for end in sorted(ends, key=lambda end: not self._is_recorded(lane, end))
            if not self._replayed_end(lane, end)
        ]

    def _is_recorded(self, lane: Lane, end: _End) -> bool:
        with self._lock:
            tool = self._tools.get(end.call_id)
        number = lane.number if lane.recorded else None
        return tool is not None and self._recorder.replay.comes_next(
            EntryKind.TOOL, tool.opened.entry.name, tool.opened.entry.arguments, number
        )

    def _replayed_end(self, lane: Lane, end: _End) -> bool:
        """True if the journal records the call's end. The files are then as they were."""
        with self._lock:
            tool = self._tools.get(end.call_id)
        number = lane.number if lane.recorded else None
        if not self._recorder.replay.has_left(number) or tool is None:
            return False
        recorded = end.result is not None or self._is_recorded(lane, end)  # older journals do not end a silent call
        name, arguments = tool.opened.entry.name, tool.opened.entry.arguments
        if (
            recorded
            and self._recorder.replay.replayed_on_wire(EntryKind.TOOL, name, arguments, number, called=False) is None
        ):
            return False
        with self._lock:
            self._tools.pop(end.call_id, None)
            self._finished.add(end.call_id)
        return True

    def _unrecorded_words(self, lane: Lane, end: int) -> Words | None:
        """The model's newest words, if the request goes on from them, and the journal does not record the turn's end. The
        files are as they were after it if it does."""
        words = lane.words
        if words is None or words.at >= end:
            return None
        lane.words = None
        number = lane.number if lane.recorded else None
        if not self._recorder.replay.has_left(number):
            return words
        if self._recorder.replay.comes_next(EntryKind.CHECKPOINT, TURN, {}, number):
            self._recorder.replay.replayed_on_wire(EntryKind.CHECKPOINT, TURN, {}, number, called=False)
        return None

    def _again(self, request: TurnRequest, place: Place, entry: JournalEntry) -> RecordedReply:
        """A recorded reply, with the tools that it asks for: the agent runs them again, and a tool whose end is not
        recorded runs for real."""
        lane = place.lane
        if not lane.recorded:
            lane.recorded, lane.number = True, entry.details.get(LANE, lane.number)
            lane.caller, lane.side = entry.details.get(CALLER, lane.caller), _is_side(entry.details)
            self._lanes.add(lane)
        recorded = wire_records.recorded(entry)
        content = request.reader.read_again(request, recorded) if entry.status is CallStatus.DONE else ReplyContent()
        at = place.end(request)
        self._heard(lane, place.at, [*request.digests[place.known :], *content.digests])
        self._replied(lane, request, content.response_id)
        if not lane.side:
            self._recorder.met([*request.new_messages(place.known), *content.messages])
        if REPLY_DENIED in entry.details:
            return replace(recorded, status=Denied.http_status, error=entry.details[REPLY_DENIED])
        asked = {call["id"]: call["arguments"] for call in entry.result["calls"]}
        self._lanes.called(lane, asked)
        if asked:
            self._recorder.replay.meets_calls(lane.number, list(asked))
        else:
            self._expect_words(lane, request, at)
        live = self._recorder.replay.live_if_exhausted()
        for call in _calls(entry):
            if live:
                self._open_tool(call, entry, lane, at)
            else:
                with self._lock:
                    self._tools[call.id] = _Tool(self._recorder.unrecorded(call.name, call.arguments), lane.number, at)
        return recorded

    # -- conversations -------------------------------------------------------------------------------------------------

    def _said(
        self, lane: Lane, request: TurnRequest, content: ReplyContent, calls: list[ModelCall], entry: JournalEntry
    ) -> None:
        """The model's words join the conversation; it asks for calls. Denied."""
        at = len(lane.digests)
        if not lane.side:
            for number, message in enumerate(content.messages):
                self._recorder.message(message, rid=_rid(lane, at, number, message))
        self._heard(lane, at, content.digests)
        self._replied(lane, request, content.response_id)
        self._asked(lane, request, calls, entry, at)

    def _asked(self, lane: Lane, request: TurnRequest, calls: list[ModelCall], entry: JournalEntry, at: int) -> None:
        """A reply at place `at` of the lane asks for calls, or for none. Denied."""
        self._lanes.called(lane, {call.id: call.arguments for call in calls})
        for call in calls:
            self._open_tool(call, entry, lane, at)
        if not calls:
            self._expect_words(lane, request, at)

    def _expect_words(self, lane: Lane, request: TurnRequest, at: int) -> None:
        """A reply at place `at` asks for no calls. Where no tools are offered, the agent may do what the words say."""
        if request.offers_tools or (lane.side and lane.caller is None):
            return
        lane.words = Words(at, CallID(new_id()), time.time_ns())
        self._note({"words": lane.number, "at": at, "call": lane.words.call_id, "said": lane.words.said_at_ns})

    def _replied(self, lane: Lane, request: TurnRequest, reply_id: str | None) -> None:
        """The lane ends with a reply of this id now, which a later request may name."""
        conversation = self._lanes.replied(lane, request, reply_id)
        if reply_id is not None and request.store:
            self._note({"reply": reply_id, "of": lane.number, "at": len(lane.digests), "conversation": conversation})

    def _unheard(self, request: TurnRequest, place: Place, outline: dict[str, Any]) -> RecordedReply | None:
        """Returns a recorded reply that the agent never received: the daemon was killed in between, and the agent
        repeats its request. The rest of the reply's recording is completed here, as far as it is missing."""
        lane = place.lane
        self._resumed.discard(lane.number)
        entry = self._recorder.reply(request.model[:200], outline) if place.known == len(request.digests) else None
        if entry is None:
            return None
        recorded = wire_records.recorded(entry)
        if len(lane.digests) == place.at:
            self._said(lane, request, request.reader.read_again(request, recorded), _calls(entry), entry)
        else:
            self._asked(lane, request, _calls(entry), entry, place.at)
        return recorded

    def _heard(self, lane: Lane, at: int, digests: Sequence[bytes]) -> None:
        """A conversation goes on, from message number `at`."""
        lane.digests[at:] = digests
        self._note(
            {
                "dialog": lane.number,
                "at": at,
                "digests": [digest.hex() for digest in digests],
                "caller": lane.caller,
                "side": lane.side,
                "begun": lane.begun,
            }
        )

    def _note(self, fields: dict[str, Any]) -> None:
        """Something that the gateway of another daemon has to know."""
        self._recorder.sandbox.survival.wire(fields)

    def restore(self, record: LiveRecord) -> None:
        """Go on where the gateway of an earlier daemon was killed. A request that was being forwarded is repeated by
        its client."""
        lanes: dict[int, Lane] = {}
        for line in live.wire(record.directory):
            if "dialog" in line:
                lane = lanes.pop(line["dialog"], None) or Lane(line["dialog"], recorded=True)
                lane.digests[line["at"] :] = map(bytes.fromhex, line["digests"])
                lane.caller, lane.side, lane.begun = (
                    line.get("caller"),
                    line.get("side", False),
                    line.get("begun", False),
                )
                lanes[lane.number] = lane  # the one used last comes last
            elif "turn" in line:
                self._recorder.cut_off(line["turn"])
            elif "words" in line:
                lanes[line["words"]].words = Words(line["at"], CallID(line["call"]), line["said"])
            elif "reply" in line:
                self._lanes.remember(lanes[line["of"]], line["at"], line["reply"], line["conversation"])
            else:
                opened = self._recorder.pending.opened(line["entry"])
                if opened is not None:
                    self._tools[line["tool"]] = _Tool(opened, line.get("lane", -1), line.get("at", 0))
                    self._unclosed.add(line["tool"])
                owner = lanes.get(line.get("lane", -1))
                if owner is not None:
                    self._lanes.called(owner, {line["tool"]: None if opened is None else opened.entry.arguments})
        for lane in lanes.values():
            self._lanes.add(lane)
        self._resumed = set(lanes)

    def _place(self, request: TurnRequest) -> Place:
        """The place of a request in its lane."""
        with self._lock:
            open_calls = {call_id: tool.opened.entry.arguments for call_id, tool in self._tools.items()}
        place = self._lanes.of(request, open_calls)
        if not place.known and request.aside:
            place.lane.side = True
        if self._finished and not place.lane.digests:
            told = place.known
            while told < len(request.items) and request.digests[told] in self._told(request):
                told += 1
            if place.known or told > place.opening:
                place = replace(place, known=told, at=told)
        return place

    def _difference(self, request: TurnRequest, lane: Lane) -> str:
        """The first message of a request that is not the recorded one, line by line. The answers of tools may
        differ."""
        if lane.side or request.previous is not None:  # its messages are not the first ones
            return ""
        reader, recorded = request.reader, self._recorder.replay.to_be_told(len(request.items))
        for number, (item, old) in enumerate(zip(request.items, recorded, strict=False)):
            digest = request.memo.of(request.api.value, reader.item(old), reader.normal)
            if digest != request.digests[number] and not any(True for _ in reader.results(item)):
                before, after = ("\n".join(texts(message.content)) for message in (old, reader.message(item)))
                lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
                changed = [line[:_LINE_CHARS] for line in lines if not line.startswith(("---", "+++", "@@"))]
                return "\n".join([f"; message {number} ({old.role}) differs:", *changed[:_LINES]]) + "\n"
        return ""

    def _told(self, request: TurnRequest) -> frozenset[bytes]:
        """Digests of the recorded conversation, for a program that goes on with it without a replay."""
        if request.api not in self._heard_before:
            self._heard_before[request.api] = frozenset(
                request.memo.of(request.api.value, request.reader.item(message), request.reader.normal)
                for message in self._recorder.told(_TOLD)
            )
        return self._heard_before[request.api]


def _past(recorder: Recorder) -> tuple[Lanes, set[str]]:
    """The lanes of the journal, for a program that goes on with their conversations without a replay, and the calls in
    it that have ended. In a replay they are met one by one."""
    lanes = Lanes()
    finished: set[str] = set()
    for entry in recorder.past():
        if entry.kind is not EntryKind.MODEL or LANE not in entry.details:
            continue
        number = entry.details[LANE]
        lane = lanes.numbered(number) or Lane(
            number, caller=entry.details.get(CALLER), side=_is_side(entry.details), recorded=True
        )
        lanes.add(lane)
        if not recorder.replay.replaying and isinstance(entry.result, dict):
            asked = {call["id"]: call["arguments"] for call in entry.result.get("calls", ())}
            lanes.called(lane, asked)
            finished.update(asked)
    return (Lanes(lanes.next_number), finished) if recorder.replay.replaying else (lanes, finished)


def _calls(entry: JournalEntry) -> list[ModelCall]:
    """The calls that a recorded reply asks for."""
    return [ModelCall(call["id"], call["name"], call["arguments"]) for call in entry.result["calls"]]


def _is_side(details: dict[str, Any]) -> bool:
    return CALLER in details or bool(details.get(SIDE))


def _rid(lane: Lane, at: int, number: int, message: Message) -> str:
    """Name under which a message is recognised if it comes again: its place and a hash of its content, since an agent
    may take back its last messages."""
    text = json.dumps([message.role, message.content], sort_keys=True)
    return f"{lane.number}:{at}:{number}:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
