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

import threading
from dataclasses import dataclass, replace
from typing import Any

from snapshotd.engine.context import Context
from snapshotd.engine.journal.pending import Open
from snapshotd.engine.journal.pipeline import Journal
from snapshotd.engine.journal.replay import CALLER, CAPTURE, LANE, PARAMS, REPLY_DENIED, SIDE, TOKENS
from snapshotd.engine.journal.reuse import REUSED
from snapshotd.engine.journal.wire import records
from snapshotd.engine.journal.wire.conversations import Conversations, calls_of, is_side
from snapshotd.engine.journal.wire.lanes import Lane, LanePlace
from snapshotd.engine.journal.wire.open_calls import Ends, WireCalls
from snapshotd.engine.protocol.agent_handler import Intent
from snapshotd.engine.sandbox import live
from snapshotd.engine.sandbox.live import LiveRecord
from snapshotd.errors import Denied, SnapshotdError, Unsupported
from snapshotd.failpoints import hit
from snapshotd.gateway.base import ModelCall, RecordedReply, ReplyContent, TurnReply, TurnRequest
from snapshotd.types import CallStatus, EntryKind, JournalEntry, new_id


class ModelCalls:
    """Implements `gateway.base.GatewayHandler` for one sandbox. Thread-safe."""

    def __init__(self, context: Context, journal: Journal) -> None:
        self.recorder, self._journal, self._replay = journal.recorder, journal, journal.replay
        self.conversations = Conversations(journal)
        self.tools = WireCalls(context, journal, self.conversations)
        self._resumed: set[int] = set()
        """Conversations of an earlier daemon that no request has continued yet."""

    def turn(self, request: TurnRequest) -> RecordedReply | ModelTurn:
        """See `GatewayHandler.turn`. Where no recorded reply can answer it, the request is read once the provider has
        it."""
        if self._journal.is_answered or self._resumed:
            answer = self.answer(request)
            return answer if isinstance(answer, RecordedReply) else ModelTurn(self, request, answer)
        self.recorder.check()
        return ModelTurn(self, request)

    def answer(self, request: TurnRequest) -> RecordedReply | ForwardedRequest:
        """The recorded reply to a request: of this run or of an earlier one. Otherwise the request, as the provider is
        asked it."""
        place = self.conversations.place(request, self.tools.open)
        lane = place.lane
        replaying = self._replay.replaying
        ends = self.tools.meet_ends(request, place)
        outline = records.outline(request, place.opening)
        replayed = self._replay.meet_on_wire(
            EntryKind.MODEL,
            request.model[:200],
            outline,
            lane.number if lane.recorded else None,
            called=lane.caller is not None,
            difference=lambda: self.conversations.describe_difference(request, lane),
        )
        if replayed is not None:
            return self._repeat(request, place, replayed.entry)
        if lane.number in self._resumed:
            unheard = self._finish_unheard(request, place, outline)
            if unheard is not None:
                return unheard
        self._hear(request, place, replaying=replaying)
        reply = self._find_reply(request, outline, lane)
        more: dict[str, Any] = {SIDE: True} if lane.side and lane.caller is None else {}
        params = records.params(request, lane.params)
        if params != lane.params:
            more[PARAMS] = lane.params = params
        if lane.side:
            told = request.new_messages(place.known)
            more["messages"] = [{"role": message.role, "content": message.content} for message in told]
        if reply is not None:
            more[REUSED] = reply.id
        asked = ForwardedRequest(
            Intent(new_id(), request.model[:200], outline, EntryKind.MODEL), {**lane.details, **more}, lane, ends
        )
        if reply is not None:
            return self._reuse(request, asked, reply)
        self.conversations.begin_request(lane)
        return asked

    def _hear(self, request: TurnRequest, place: LanePlace, *, replaying: bool) -> None:
        """Add the messages that the request brings to the conversation. `replaying`: the program has just gone live, so
        the conversation may hold some of them, such as the tools' results."""
        lane, told = place.lane, request.new_messages(place.known)
        if replaying and not lane.side:
            self._journal.conversation.meet(told)
        else:
            self.conversations.add_messages(lane, place.at, told)
        lane.recorded = True
        self.conversations.extend(lane, place.at, request.digests[place.known :])

    def begin(self, asked: ForwardedRequest) -> Open:
        """Record the intent of a request."""
        opened = self.recorder.begin(asked.intent, asked.details)
        self.conversations.note({"turn": opened.entry.id})
        return opened

    def say(
        self, lane: Lane, request: TurnRequest, content: ReplyContent, calls: list[ModelCall], entry: JournalEntry
    ) -> None:
        """Add the model's words to the conversation, and open the calls that they ask for. Denied."""
        at = len(lane.digests)
        self.conversations.add_messages(lane, at, content.messages)
        self.conversations.extend(lane, at, content.digests)
        self.conversations.end_with(lane, request, content)
        self.conversations.ask_for(lane, calls)
        self.tools.open_calls(lane, request, calls, entry, at)

    def _find_reply(self, request: TurnRequest, outline: dict[str, Any], lane: Lane) -> JournalEntry | None:
        """An earlier run's reply to this request; None: it is forwarded."""
        reply = self._journal.reuse.find_reply(request.model[:200], outline, lane.number)
        try:
            return None if reply is None or records.reply_of(reply) is None else reply
        except Unsupported:
            return None  # it was too large to be kept

    def _reuse(self, request: TurnRequest, asked: ForwardedRequest, reply: JournalEntry) -> RecordedReply:
        """Record an earlier run's reply as this one's, after the results that the request brings."""
        opened = self.begin(asked)
        failure = self.tools.try_to_close(asked.ends)
        recorded = records.reply_of(reply)
        content = request.reader.read_again(request, recorded)
        self.recorder.pending.close(opened.entry.id)
        status, error = (CallStatus.DONE, None) if failure is None else (CallStatus.FAILED, failure.message)
        details = {"gateway": True, "usage": {}, "stop_reason": content.stop_reason}
        self.recorder.end_model(opened, status, reply.result, error, details)
        if failure is not None:
            raise failure
        self.say(asked.lane, request, content, calls_of(reply), opened.entry)
        return recorded

    def _repeat(self, request: TurnRequest, place: LanePlace, entry: JournalEntry) -> RecordedReply:
        """Send a recorded reply again. The agent runs the tools that it asks for once more, and a tool whose end is not recorded
        runs for real."""
        lane = place.lane
        if not lane.recorded:
            lane.recorded, lane.number = True, entry.details.get(LANE, lane.number)
            lane.caller, lane.side = entry.details.get(CALLER, lane.caller), is_side(entry.details)
            self.conversations.add(lane)
        recorded = records.reply_of(entry)
        content = request.reader.read_again(request, recorded) if entry.status is CallStatus.DONE else ReplyContent()
        self.conversations.extend(lane, place.at, [*request.digests[place.known :], *content.digests])
        self.conversations.end_with(lane, request, content)
        if not lane.side:
            self._journal.conversation.meet([*request.new_messages(place.known), *content.messages])
        if REPLY_DENIED in entry.details:
            return replace(recorded, status=Denied.http_status, error=entry.details[REPLY_DENIED])
        calls = calls_of(entry)
        self.conversations.ask_for(lane, calls)
        if calls:
            self._replay.wait_for_calls(lane.number, [call.id for call in calls])
        live = self._replay.go_live_if_exhausted()
        self.tools.open_calls(lane, request, calls, entry if live else None, place.end(request))
        return recorded

    def _finish_unheard(self, request: TurnRequest, place: LanePlace, outline: dict[str, Any]) -> RecordedReply | None:
        """Returns a recorded reply that the agent never received: the daemon was killed in between, and the agent
        repeats its request. The rest of the reply's recording is completed here, as far as it is missing."""
        lane = place.lane
        self._resumed.discard(lane.number)
        entry = self.recorder.find_reply(request.model[:200], outline) if place.known == len(request.digests) else None
        if entry is None:
            return None
        recorded, calls = records.reply_of(entry), calls_of(entry)
        if len(lane.digests) == place.at:
            self.say(lane, request, request.reader.read_again(request, recorded), calls, entry)
        else:
            self.conversations.ask_for(lane, calls)
            self.tools.open_calls(lane, request, calls, entry, place.at)
        return recorded

    def restore(self, record: LiveRecord) -> None:
        """Go on where the gateway of an earlier daemon was killed. A request that was being forwarded is repeated by
        its client."""
        lanes: dict[int, Lane] = {}
        for line in live.wire(record.directory):
            if "turn" in line:
                self.recorder.record_cut_off(line["turn"])
            elif "tool" in line:
                arguments = self.tools.restore(line)
                owner = lanes.get(line.get("lane", -1))
                if owner is not None:
                    self.conversations.ask_for(owner, [ModelCall(line["tool"], "", arguments)])
            else:
                self.conversations.restore(lanes, line)
        for lane in lanes.values():
            self.conversations.add(lane)
        self._resumed = set(lanes)


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A request as it is recorded. `ends`: what it ends of the turn before it."""

    intent: Intent
    details: dict[str, Any]
    lane: Lane
    ends: Ends


class ModelTurn:
    """A request on its way to the provider (`gateway.base.ForwardedTurn`). A crash before `sent` leaves a request that the agent
    repeats, as one before the reply is recorded does."""

    def __init__(self, calls: ModelCalls, request: TurnRequest, asked: ForwardedRequest | None = None) -> None:
        """`asked` None: the request is read in `sent`."""
        self._calls, self._request, self._asked = calls, request, asked
        self._opened: Open | None = None
        self._step: threading.Thread | None = None
        self._failure: SnapshotdError | None = None

    def sent(self) -> None:
        """See `ForwardedTurn.sent`: record the intent, and take the steps of the calls that the request ends."""
        hit("engine.journal.sent")
        if self._asked is None:
            answer = self._calls.answer(self._request)
            assert isinstance(answer, ForwardedRequest), "nothing is answered from records any more"
            self._asked = answer
        try:
            self._opened = self._calls.begin(self._asked)
        except BaseException:
            self._calls.conversations.end_request(self._asked.lane)
            raise
        if self._asked.ends:
            self._step = threading.Thread(target=self._take_steps, args=(self._asked.ends,), name="gateway-step")
            self._step.start()

    def _take_steps(self, ends: Ends) -> None:
        self._failure = self._calls.tools.try_to_close(ends)

    def replied(self, reply: TurnReply) -> None:
        """See `ForwardedTurn.replied`: record the reply, once the steps are taken."""
        assert self._asked is not None
        assert self._opened is not None, "`sent` comes first"
        recorder, request, content, opened = self._calls.recorder, self._request, reply.content, self._opened
        self._calls.conversations.end_request(self._asked.lane)
        if self._step is not None:
            self._step.join()
        recorder.pending.close(opened.entry.id)
        calls = [] if reply.failed else list(content.calls)
        details = {"gateway": True, "usage": records.usage(reply), "stop_reason": content.stop_reason}
        if request.sent_as is not None:
            details["sent_as"] = request.sent_as
        details |= self._token_details(reply)
        failure = self._failure
        status = CallStatus.FAILED if reply.failed or failure is not None else CallStatus.DONE
        error = reply.error or content.error or (f"the provider answered {reply.status}" if reply.failed else None)
        if failure is not None:  # its snapshot is missing, so the agent must not go on from it: it gets the error
            error = failure.message
        recorder.end_model(opened, status, records.result(reply, calls), error, details)
        if failure is not None:
            raise failure
        if not reply.failed:
            self._calls.say(self._asked.lane, request, content, calls, opened.entry)

    def _token_details(self, reply: TurnReply) -> dict[str, Any]:
        """The tokens of a reply, as details of its entry. Token ids spell a secret that stands in the text, and no
        marker can take its place among them; so there are none of a conversation with a secret."""
        if reply.capture is None:
            return {}
        said = "" if reply.body is None else reply.body.decode(errors="replace")
        everything = [list(self._request.items), dict(self._request.params), said]
        if reply.tokens is not None and self._calls.recorder.funnel.conceal(everything) != everything:
            return {CAPTURE: {**reply.capture, "left_out": "secrets"}}
        return {CAPTURE: dict(reply.capture), **({} if reply.tokens is None else {TOKENS: dict(reply.tokens)})}
