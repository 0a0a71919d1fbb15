"""The journal of an agent that does not use our library: the recording gateway reads its mind from the wire.

    a request with tool results   ends the tool calls of the turn before it, each with a snapshot, while the model already thinks
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
from snapshotd.engine.mind.lanes import Lane, Lanes, opening_count, texts
from snapshotd.engine.mind.pending import Open
from snapshotd.engine.mind.recorder import Recorder
from snapshotd.engine.mind.replay import CALL, CALLER, CAPTURE, LANE, OF_MODEL, PARAMS, REPLY_DENIED, SIDE, TOKENS
from snapshotd.engine.mind.reuse import REUSED
from snapshotd.engine.protocol.agent_handler import Intent
from snapshotd.engine.sandbox import live
from snapshotd.engine.sandbox.live import LiveRecord
from snapshotd.errors import Denied, SnapshotdError, Unsupported
from snapshotd.failpoints import hit
from snapshotd.gateway.base import Api, ModelCall, RecordedReply, ReplyContent, ToolResult, TurnReply, TurnRequest
from snapshotd.types import CallID, CallStatus, EntryKind, JournalEntry, Message, ToolCall, new_id

MAX_OPEN_TOOLS = 1000
_LINES, _LINE_CHARS = 20, 200
"""The most of a difference that a person is shown."""
_TOLD = 2000
"""Messages at the end of a recorded conversation that are recognised when another program sends them."""


@dataclass(slots=True)
class _Turn:
    """A turn in the course of forwarding. `opened`: its entry, once the provider has the request."""

    intent: Intent
    details: dict[str, Any]
    lane: Lane
    results: list[ToolResult]
    opened: Open | None = None
    step: threading.Thread | None = None
    failure: SnapshotdError | None = None


class ModelCalls:
    """Implements `gateway.base.GatewayHandler` for one sandbox. Thread-safe."""

    def __init__(self, context: Context, recorder: Recorder, gate: Gate) -> None:
        self._context, self._recorder, self._gate = context, recorder, gate
        self._lanes, self._finished = _past(recorder)
        self._tools: dict[str, Open] = {}
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
        lane, known = self._lane(request)
        replaying = self._recorder.replay.replaying
        results = [result for result in self._results(request, lane, known) if not self._replayed_result(lane, result)]
        outline = wire_records.outline(request)
        replayed = self._recorder.replay.replayed_on_wire(
            EntryKind.MODEL,
            request.model[:200],
            outline,
            lane.number if lane.recorded else None,
            called=lane.caller is not None,
            difference=lambda: self._difference(request, lane),
        )
        if replayed is not None:
            return self._again(request, lane, known, replayed.entry)
        if lane.number in self._resumed:
            unheard = self._unheard(request, lane, known, outline)
            if unheard is not None:
                return unheard
        told = request.new_messages(known)
        if lane.side:
            pass  # its messages are in its entries
        elif replaying:  # it has just gone live: the tools' results, for one, may be in the conversation already
            self._recorder.met(told)
        else:
            for number, message in enumerate(told):
                self._recorder.message(message, rid=_rid(lane, known, number, message))
        lane.recorded = True
        self._heard(lane, known, request.digests[known:])
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
        turn = _Turn(intent, {**lane.details, **more}, lane, results)
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
        if turn.results:
            turn.step = threading.Thread(target=self._close_tools, args=(turn,), name="gateway-step")
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
        self._said(turn.lane, content)
        self._lanes.called(turn.lane, {call.id: call.arguments for call in calls})
        for call in calls:
            self._open_tool(call, opened.entry, turn.lane)

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
        self._close_tools(turn)
        recorded = wire_records.recorded(reply)
        content = request.reader.read_again(request, recorded)
        self._recorder.pending.take(opened.entry.id)
        failure = turn.failure
        status, error = (CallStatus.DONE, None) if failure is None else (CallStatus.FAILED, failure.message)
        details = {"gateway": True, "usage": {}, "stop_reason": content.stop_reason}
        self._recorder.end_model(opened, status, reply.result, error, details)
        if failure is not None:
            raise failure
        self._said(turn.lane, content)
        calls = [ModelCall(call["id"], call["name"], call["arguments"]) for call in reply.result["calls"]]
        self._lanes.called(turn.lane, {call.id: call.arguments for call in calls})
        for call in calls:
            self._open_tool(call, opened.entry, turn.lane)
        return recorded

    # -- tools ---------------------------------------------------------------------------------------------------------

    def _open_tool(self, call: ModelCall, model: JournalEntry, lane: Lane) -> None:
        """The model asks for a tool, and the agent has not heard of it yet: the moment to ask a person. Denied."""
        with self._lock:
            if call.id in self._tools:
                return
            self._finished.discard(call.id)
            while len(self._tools) >= MAX_OPEN_TOOLS:
                self._recorder.pending.lost([self._tools.pop(next(iter(self._tools))).entry.id])
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
        self._note({"tool": call.id, "entry": opened.entry.id, "lane": lane.number})
        with self._lock:
            self._tools[call.id] = opened

    def _results(self, request: TurnRequest, lane: Lane, known: int) -> list[ToolResult]:
        """The tool results that a request brings: of calls that are open, and of calls that nobody knows in a lane that
        goes on. Results that an earlier daemon received and did not process are among them; those of the past are
        not."""
        with self._lock:
            since = 0 if self._unclosed else known
            self._unclosed.clear()
            return [
                result
                for result in request.results_since(since)
                if result.id in self._tools or (result.message >= known > 0 and result.id not in self._finished)
            ]

    def _close_tools(self, turn: _Turn) -> None:
        try:
            for result in turn.results:
                self._close_tool(result)
        except SnapshotdError as exc:
            turn.failure = exc

    def _close_tool(self, result: ToolResult) -> None:
        with self._lock:
            opened = self._tools.pop(result.id, None)
            self._finished.add(result.id)
        lane = self._lanes.lane_of(result.id)
        details: dict[str, Any] = {CALL: result.id, **({} if lane is None else {LANE: lane.number})}
        if opened is None:
            opened = self._recorder.begin(Intent(new_id(), (result.name or "tool")[:200], None), details)
        elif self._recorder.pending.opened(opened.entry.id) is None:  # asked for in the replay, ended after it
            opened = self._recorder.begin(Intent(new_id(), opened.entry.name, opened.entry.arguments), details)
        self._recorder.pending.take(opened.entry.id)
        writer = self._context.spool.writer()
        try:
            writer.write(
                json.dumps(self._recorder.funnel.conceal(result.content), ensure_ascii=False).encode("utf-8", "replace")
            )
            call = ToolCall(
                id=opened.entry.id,
                name=opened.entry.name,
                arguments=opened.entry.arguments,
                status=CallStatus.FAILED if result.is_error else CallStatus.DONE,
                started_at_ns=opened.entry.began_at_ns,
                duration_ns=time.perf_counter_ns() - opened.clock_ns,
                output=writer.save(),
            )
        finally:
            writer.discard()
        self._recorder.end_step(opened, call)

    # -- replay --------------------------------------------------------------------------------------------------------

    def _replayed_result(self, lane: Lane, result: ToolResult) -> bool:
        """True if the journal records the tool's end. The files are then as they were."""
        with self._lock:
            met = self._tools.get(result.id)
        if not self._recorder.replay.replaying or met is None:
            return False
        name, arguments = met.entry.name, met.entry.arguments
        number = lane.number if lane.recorded else None
        if not self._recorder.replay.has_left(number):
            return False
        if self._recorder.replay.replayed_on_wire(EntryKind.TOOL, name, arguments, number, called=False) is None:
            return False
        with self._lock:
            self._tools.pop(result.id, None)
            self._finished.add(result.id)
        return True

    def _again(self, request: TurnRequest, lane: Lane, known: int, entry: JournalEntry) -> RecordedReply:
        """A recorded reply, with the tools that it asks for: the agent runs them again, and a tool whose end is not
        recorded runs for real."""
        if not lane.recorded:
            lane.recorded, lane.number = True, entry.details.get(LANE, lane.number)
            lane.caller, lane.side = entry.details.get(CALLER, lane.caller), _is_side(entry.details)
            self._lanes.add(lane)
        recorded = wire_records.recorded(entry)
        content = request.reader.read_again(request, recorded) if entry.status is CallStatus.DONE else ReplyContent()
        self._heard(lane, known, [*request.digests[known:], *content.digests])
        if not lane.side:
            self._recorder.met([*request.new_messages(known), *content.messages])
        if REPLY_DENIED in entry.details:
            return replace(recorded, status=Denied.http_status, error=entry.details[REPLY_DENIED])
        asked = {call["id"]: call["arguments"] for call in entry.result["calls"]}
        self._lanes.called(lane, asked)
        if asked:
            self._recorder.replay.meets_calls(lane.number, list(asked))
        live = self._recorder.replay.live_if_exhausted()
        for call in entry.result["calls"]:
            if live:
                self._open_tool(ModelCall(call["id"], call["name"], call["arguments"]), entry, lane)
            else:
                with self._lock:
                    self._tools[call["id"]] = self._recorder.unrecorded(call["name"], call["arguments"])
        return recorded

    # -- conversations -------------------------------------------------------------------------------------------------

    def _said(self, lane: Lane, content: ReplyContent) -> None:
        """The model's words join the conversation."""
        at = len(lane.digests)
        if not lane.side:
            for number, message in enumerate(content.messages):
                self._recorder.message(message, rid=_rid(lane, at, number, message))
        self._heard(lane, at, content.digests)

    def _unheard(self, request: TurnRequest, lane: Lane, known: int, outline: dict[str, Any]) -> RecordedReply | None:
        """Returns a recorded reply that the agent never received: the daemon was killed in between, and the agent
        repeats its request. The rest of the reply's recording is completed here, as far as it is missing."""
        self._resumed.discard(lane.number)
        entry = self._recorder.reply(request.model[:200], outline) if known == len(request.digests) else None
        if entry is None:
            return None
        recorded = wire_records.recorded(entry)
        if len(lane.digests) == known:
            self._said(lane, request.reader.read_again(request, recorded))
        self._lanes.called(lane, {call["id"]: call["arguments"] for call in entry.result["calls"]})
        for call in entry.result["calls"]:
            self._open_tool(ModelCall(call["id"], call["name"], call["arguments"]), entry, lane)
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
            else:
                opened = self._recorder.pending.opened(line["entry"])
                if opened is not None:
                    self._tools[line["tool"]] = opened
                    self._unclosed.add(line["tool"])
                owner = lanes.get(line.get("lane", -1))
                if owner is not None:
                    self._lanes.called(owner, {line["tool"]: None if opened is None else opened.entry.arguments})
        for lane in lanes.values():
            self._lanes.add(lane)
        self._resumed = set(lanes)

    def _lane(self, request: TurnRequest) -> tuple[Lane, int]:
        """The lane that a request belongs to, and the number of its messages that are known."""
        with self._lock:
            open_calls = {call_id: opened.entry.arguments for call_id, opened in self._tools.items()}
        lane, known = self._lanes.of(request, open_calls)
        if not known and request.aside:
            lane.side = True
        if self._finished and not lane.digests:
            told = known
            while told < len(request.items) and request.digests[told] in self._told(request):
                told += 1
            if known or told > opening_count(request):
                known = told
        return lane, known

    def _difference(self, request: TurnRequest, lane: Lane) -> str:
        """The first message of a request that is not the recorded one, line by line. The answers of tools may
        differ."""
        if lane.side:
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


def _is_side(details: dict[str, Any]) -> bool:
    return CALLER in details or bool(details.get(SIDE))


def _rid(lane: Lane, at: int, number: int, message: Message) -> str:
    """Name under which a message is recognised if it comes again: its place and a hash of its content, since an agent
    may take back its last messages."""
    text = json.dumps([message.role, message.content], sort_keys=True)
    return f"{lane.number}:{at}:{number}:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
