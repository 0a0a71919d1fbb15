"""The journal of an agent that does not use our library: the recording gateway reads its mind from the wire.

    a request with tool results   ends the tool calls of the turn before it, each with a snapshot, while the model already thinks
    the next request without      ends them, too, or the turn of an agent that acts on the model's words (open_calls.py)
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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from snapshotd.engine.context import Context
from snapshotd.engine.mind.approvals import Gate
from snapshotd.engine.mind.pending import Open
from snapshotd.engine.mind.recorder import Recorder
from snapshotd.engine.mind.replay import CALLER, CAPTURE, LANE, PARAMS, REPLY_DENIED, SIDE, TOKENS
from snapshotd.engine.mind.reuse import REUSED
from snapshotd.engine.mind.wire import records
from snapshotd.engine.mind.wire.lanes import Lane, LanePlace, Lanes, Words, texts, words_key
from snapshotd.engine.mind.wire.open_calls import Ends, WireCalls
from snapshotd.engine.protocol.agent_handler import Intent
from snapshotd.engine.sandbox import live
from snapshotd.engine.sandbox.live import LiveRecord
from snapshotd.errors import Denied, SnapshotdError, Unsupported
from snapshotd.failpoints import hit
from snapshotd.gateway.base import Api, ModelCall, RecordedReply, ReplyContent, TurnReply, TurnRequest
from snapshotd.types import CallID, CallStatus, EntryKind, JournalEntry, Message, new_id

_LINES, _LINE_CHARS = 20, 200
"""The most of a difference that a person is shown."""
_TOLD = 2000
"""Messages at the end of a recorded conversation that are recognised when another program sends them."""


@dataclass(slots=True)
class _Turn:
    """A turn in the course of forwarding. `ends`: what the request ends of the turn before it. `opened`: its entry, once
    the provider has the request."""

    intent: Intent
    details: dict[str, Any]
    lane: Lane
    ends: Ends
    opened: Open | None = None
    step: threading.Thread | None = None
    failure: SnapshotdError | None = None


class ModelCalls:
    """Implements `gateway.base.GatewayHandler` for one sandbox. Thread-safe."""

    def __init__(self, context: Context, recorder: Recorder, gate: Gate) -> None:
        self._recorder = recorder
        self._lanes, finished = _past(recorder)
        self._calls = WireCalls(context, recorder, gate, self._lanes, finished)
        self._heard_before: dict[Api, frozenset[bytes]] = {}
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
        ends = self._calls.ends(request, place)
        outline = records.outline(request, place.opening)
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
        params = records.params(request, lane.params)
        if params != lane.params:
            more[PARAMS] = lane.params = params
        if lane.side:
            more["messages"] = [{"role": message.role, "content": message.content} for message in told]
        if reply is not None:
            more[REUSED] = reply.id
        intent = Intent(new_id(), request.model[:200], outline, EntryKind.MODEL)
        turn = _Turn(intent, {**lane.details, **more}, lane, ends)
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
        if turn.ends:
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
        details = {"gateway": True, "usage": records.usage(reply), "stop_reason": content.stop_reason}
        if request.sent_as is not None:
            details["sent_as"] = request.sent_as
        details |= self._captured(request, reply)
        result = records.result(reply, calls)
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
            return None if reply is None or records.recorded(reply) is None else reply
        except Unsupported:
            return None  # it was too large to be kept

    def _reuse(self, request: TurnRequest, turn: _Turn, opened: Open, reply: JournalEntry) -> RecordedReply:
        """An earlier run's reply is recorded as this one's, after the results that the request brings, and goes to the agent."""
        self._take_steps(turn)
        recorded = records.recorded(reply)
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

    def _take_steps(self, turn: _Turn) -> None:
        try:
            self._calls.close(turn.ends)
        except SnapshotdError as exc:
            turn.failure = exc

    # -- replay --------------------------------------------------------------------------------------------------------

    def _again(self, request: TurnRequest, place: LanePlace, entry: JournalEntry) -> RecordedReply:
        """A recorded reply, with the tools that it asks for: the agent runs them again, and a tool whose end is not
        recorded runs for real."""
        lane = place.lane
        if not lane.recorded:
            lane.recorded, lane.number = True, entry.details.get(LANE, lane.number)
            lane.caller, lane.side = entry.details.get(CALLER, lane.caller), _is_side(entry.details)
            self._lanes.add(lane)
        recorded = records.recorded(entry)
        content = request.reader.read_again(request, recorded) if entry.status is CallStatus.DONE else ReplyContent()
        at = place.end(request)
        self._heard(lane, place.at, [*request.digests[place.known :], *content.digests])
        self._replied(lane, request, content)
        if not lane.side:
            self._recorder.met([*request.new_messages(place.known), *content.messages])
        if REPLY_DENIED in entry.details:
            return replace(recorded, status=Denied.http_status, error=entry.details[REPLY_DENIED])
        calls = _calls(entry)
        self._lanes.called(lane, {call.id: call.arguments for call in calls})
        if calls:
            self._recorder.replay.meets_calls(lane.number, [call.id for call in calls])
        live = self._recorder.replay.live_if_exhausted()
        self._calls.asked(lane, request, calls, entry if live else None, at)
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
        self._replied(lane, request, content)
        self._lanes.called(lane, {call.id: call.arguments for call in calls})
        self._calls.asked(lane, request, calls, entry, at)

    def _replied(self, lane: Lane, request: TurnRequest, content: ReplyContent) -> None:
        """The lane ends with this reply now, which a later request may name. Where no tools are offered, it may repeat the
        words among other messages."""
        at, reply_id = len(lane.digests), content.response_id
        conversation = self._lanes.replied(lane, request, reply_id)
        if reply_id is not None and request.store:
            self._note({"reply": reply_id, "of": lane.number, "at": at, "conversation": conversation})
        if content.messages and not request.offers_tools:
            words = words_key(request, request.reader.item(content.messages[-1]))
            self._lanes.remember(lane, at, words, None)
            self._note({"reply": words, "of": lane.number, "at": at, "conversation": None})

    def _unheard(self, request: TurnRequest, place: LanePlace, outline: dict[str, Any]) -> RecordedReply | None:
        """Returns a recorded reply that the agent never received: the daemon was killed in between, and the agent
        repeats its request. The rest of the reply's recording is completed here, as far as it is missing."""
        lane = place.lane
        self._resumed.discard(lane.number)
        entry = self._recorder.reply(request.model[:200], outline) if place.known == len(request.digests) else None
        if entry is None:
            return None
        recorded = records.recorded(entry)
        if len(lane.digests) == place.at:
            self._said(lane, request, request.reader.read_again(request, recorded), _calls(entry), entry)
        else:
            self._lanes.called(lane, {call["id"]: call["arguments"] for call in entry.result["calls"]})
            self._calls.asked(lane, request, _calls(entry), entry, place.at)
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
                arguments = self._calls.restore(line)
                owner = lanes.get(line.get("lane", -1))
                if owner is not None:
                    self._lanes.called(owner, {line["tool"]: arguments})
        for lane in lanes.values():
            self._lanes.add(lane)
        self._resumed = set(lanes)

    def _place(self, request: TurnRequest) -> LanePlace:
        """The place of a request in its lane."""
        place = self._lanes.of(request, self._calls.open)
        if not place.known and request.aside:
            place.lane.side = True
        if self._calls.finished and not place.lane.digests:
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
