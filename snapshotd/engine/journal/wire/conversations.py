"""The conversations of one sandbox on the wire, as its gateway knows them: their lanes, and the notes from which the
gateway of the next daemon goes on with them."""

from __future__ import annotations

import difflib
import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from snapshotd.engine.journal.pipeline import Journal
from snapshotd.engine.journal.replay import CALLER, LANE, SIDE
from snapshotd.engine.journal.wire.lanes import Lane, LanePlace, Lanes, Words, texts, words_key
from snapshotd.gateway.base import Api, ModelCall, ReplyContent, TurnRequest
from snapshotd.types import CallID, EntryKind, JournalEntry, Message

_LINES, _LINE_CHARS = 20, 200
"""The most of a difference that a person is shown."""
_TOLD = 2000
"""Messages at the end of a recorded conversation that are recognised when another program sends them."""


class Conversations:
    """Thread-safe. Each change is noted in the sandbox's live record."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._lanes, self.finished = _past(journal)
        """`finished`: the calls of the past that have ended, by the provider's id."""
        self._heard_before: dict[Api, frozenset[bytes]] = {}
        self._waiting = threading.Lock()
        """Guards the number of requests that each lane waits for."""

    def place(self, request: TurnRequest, open_calls: Mapping[str, Any]) -> LanePlace:
        """The place of a request in the lane that it continues or begins. `open_calls`: as in `Lanes.place`."""
        place = self._lanes.place(request, open_calls)
        if not place.known and request.aside:
            place.lane.side = True
        if self.finished and not place.lane.digests:
            told = place.known
            while told < len(request.items) and request.digests[told] in self._newest_digests(request):
                told += 1
            if place.known or told > place.opening:
                place = replace(place, known=told, at=told)
        return place

    def _newest_digests(self, request: TurnRequest) -> frozenset[bytes]:
        """Digests of the recorded conversation, for a program that goes on with it without a replay."""
        if request.api not in self._heard_before:
            self._heard_before[request.api] = frozenset(
                request.memo.of(request.api.value, request.reader.item(message), request.reader.normal)
                for message in self._journal.conversation.newest(_TOLD)
            )
        return self._heard_before[request.api]

    def begin_request(self, lane: Lane) -> None:
        """Count a request of the lane as on its way to the provider."""
        with self._waiting:
            lane.asking += 1

    def end_request(self, lane: Lane) -> None:
        """Count the request of a `begin_request` as answered."""
        with self._waiting:
            lane.asking -= 1

    def lane_of(self, call_id: str) -> Lane | None:
        """The lane whose model asked for this call; None if none did."""
        return self._lanes.lane_of(call_id)

    def add(self, lane: Lane) -> None:
        """Add a lane of the journal."""
        self._lanes.add(lane)

    def add_messages(self, lane: Lane, at: int, messages: Sequence[Message]) -> None:
        """Append messages to the trajectory's conversation, unless the lane is on the side: its entries have them. `at`:
        the place of the first one in the lane."""
        for number, message in enumerate(messages if not lane.side else ()):
            self._journal.conversation.add(message, rid=_rid(lane, at, number, message))

    def extend(self, lane: Lane, at: int, digests: Sequence[bytes]) -> None:
        """Extend the lane by these messages, from number `at`."""
        lane.digests[at:] = digests
        self.note(
            {
                "dialog": lane.number,
                "at": at,
                "digests": [digest.hex() for digest in digests],
                "caller": lane.caller,
                "side": lane.side,
                "begun": lane.begun,
            }
        )

    def end_with(self, lane: Lane, request: TurnRequest, content: ReplyContent) -> None:
        """End the lane with the reply to this request, which a later request may name. Where no tools are offered, a later
        request may repeat the reply's words among other messages."""
        at, reply_id = len(lane.digests), content.response_id
        conversation = self._lanes.add_reply(lane, request, reply_id)
        if reply_id is not None and request.store:
            self.note({"reply": reply_id, "of": lane.number, "at": at, "conversation": conversation})
        if content.messages and not request.offers_tools:
            words = words_key(request, request.reader.item(content.messages[-1]))
            self._lanes.remember(lane, at, words, None)
            self.note({"reply": words, "of": lane.number, "at": at, "conversation": None})

    def ask_for(self, lane: Lane, calls: Sequence[ModelCall]) -> None:
        """Note that the lane's model asks for these calls."""
        self._lanes.add_calls(lane, {call.id: call.arguments for call in calls})

    def describe_difference(self, request: TurnRequest, lane: Lane) -> str:
        """The first message of a request that is not the recorded one, line by line, for a person. The answers of tools
        may differ."""
        if lane.side or request.previous is not None:  # its messages are not the first ones
            return ""
        reader, recorded = request.reader, self._journal.replay.messages_to_send(len(request.items))
        for number, (item, old) in enumerate(zip(request.items, recorded, strict=False)):
            digest = request.memo.of(request.api.value, reader.item(old), reader.normal)
            if digest != request.digests[number] and not any(True for _ in reader.results(item)):
                before, after = ("\n".join(texts(message.content)) for message in (old, reader.message(item)))
                lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
                changed = [line[:_LINE_CHARS] for line in lines if not line.startswith(("---", "+++", "@@"))]
                return "\n".join([f"; message {number} ({old.role}) differs:", *changed[:_LINES]]) + "\n"
        return ""

    def note(self, fields: dict[str, Any]) -> None:
        """Note something that the gateway of the next daemon has to know."""
        self._journal.sandbox.survival.note_wire(fields)

    def restore(self, lanes: dict[int, Lane], line: dict[str, Any]) -> None:
        """Apply a note of an earlier daemon about a lane to `lanes`, by their numbers; the one used last comes last."""
        if "dialog" in line:
            lane = lanes.pop(line["dialog"], None) or Lane(line["dialog"], recorded=True)
            lane.digests[line["at"] :] = map(bytes.fromhex, line["digests"])
            lane.caller, lane.side, lane.begun = line.get("caller"), line.get("side", False), line.get("begun", False)
            lanes[lane.number] = lane
        elif "words" in line:
            lanes[line["words"]].words = Words(line["at"], CallID(line["call"]), line["said"])
        else:
            self._lanes.remember(lanes[line["of"]], line["at"], line["reply"], line["conversation"])


def _past(journal: Journal) -> tuple[Lanes, set[str]]:
    """The lanes of the journal, for a program that goes on with their conversations without a replay, and the calls in
    it that have ended. In a replay they are met one by one."""
    lanes = Lanes()
    finished: set[str] = set()
    for entry in journal.recorder.past():
        if entry.kind is not EntryKind.MODEL or LANE not in entry.details:
            continue
        number = entry.details[LANE]
        lane = lanes.find(number) or Lane(
            number, caller=entry.details.get(CALLER), side=is_side(entry.details), recorded=True
        )
        lanes.add(lane)
        if not journal.replay.replaying and isinstance(entry.result, dict):
            asked = {call["id"]: call["arguments"] for call in entry.result.get("calls", ())}
            lanes.add_calls(lane, asked)
            finished.update(asked)
    return (Lanes(lanes.next_number), finished) if journal.replay.replaying else (lanes, finished)


def calls_of(entry: JournalEntry) -> list[ModelCall]:
    """The calls that a recorded reply asks for."""
    return [ModelCall(call["id"], call["name"], call["arguments"]) for call in entry.result["calls"]]


def is_side(details: dict[str, Any]) -> bool:
    """True if the details of an entry say that its lane is no part of the trajectory's conversation."""
    return CALLER in details or bool(details.get(SIDE))


def _rid(lane: Lane, at: int, number: int, message: Message) -> str:
    """Name under which a message is recognised if it comes again: its place and a hash of its content, since an agent
    may take back its last messages."""
    text = json.dumps([message.role, message.content], sort_keys=True)
    return f"{lane.number}:{at}:{number}:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
