"""The conversations of one sandbox on the wire: each is a lane of its trajectory.

An agent with sub-agents leads several conversations side by side, and their requests come in any order. A request
belongs to the lane that it continues: it repeats the lane's first messages, or calls that the lane's model asked for.
A conversation that begins with words which an open call holds (a sub-agent's task) was called by that call. Where the
provider remembers the conversation, a request names the reply or the conversation that it continues, and brings the new
messages only. A client that offers no tools may arrange its messages anew for each request, as aider does with the
files that it shows: the model's newest words in it lead to the lane.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from snapshotd.gateway.base import TurnRequest
from snapshotd.types import CallID

MAX_LANES = 256
"""Conversations of one sandbox that are told apart; the one used longest ago is forgotten."""
MAX_CALLS = 10_000
"""Calls that are remembered with their lanes."""
MAX_ASKED = 256
"""Calls that have ended and may still lead to a conversation: a sub-agent may work in the background."""
MIN_TASK_CHARS = 8
"""A shorter text of a call's arguments says nothing about who was called by it."""


@dataclass(frozen=True, slots=True)
class Words:
    """A reply without calls to a request that offers no tools: whatever the agent does, it does because of the words.
    `at`: its place in the lane; `call_id`: of the snapshot that comes when the agent has done it."""

    at: int
    call_id: CallID
    said_at_ns: int


@dataclass(slots=True, eq=False)
class Lane:
    """One conversation as the agent sends it. `digests`: those of its messages, in order. `caller`: the provider's id
    of the call that led to it. `side`: no part of the trajectory's conversation. `begun`: a request has gone on from
    its first reply. `asking`: requests that wait for their replies now. `recorded`: its number is the one in the
    journal. `params`: the parameters that were recorded of it last. `words`: the model's newest ones, if the agent may
    act on them."""

    number: int
    digests: list[bytes] = field(default_factory=list)
    caller: str | None = None
    side: bool = False
    begun: bool = False
    asking: int = 0
    recorded: bool = False
    params: dict[str, Any] | None = None
    words: Words | None = None

    @property
    def details(self) -> dict[str, Any]:
        """The lane as the details of its entries name it."""
        return {"lane": self.number, **({} if self.caller is None else {"caller": self.caller})}


@dataclass(frozen=True, slots=True)
class LanePlace:
    """The place of a request in a lane. The lane holds the first `known` of its messages, and the next one is message
    number `at` of the lane. `opening`: the number of its messages that come before anything that the model said."""

    lane: Lane
    known: int
    at: int
    opening: int

    def end(self, request: TurnRequest) -> int:
        """The number of messages that the lane has with those of the request."""
        return self.at + len(request.items) - self.known


class Lanes:
    """Thread-safe. `first`: the number of the next lane."""

    def __init__(self, first: int = 0) -> None:
        self._lanes: list[Lane] = []
        self._owners: dict[str, Lane] = {}
        """The lane of every call that a model asked for, by the provider's id."""
        self._asked: dict[str, Any] = {}
        """The arguments of the newest calls."""
        self._replies: dict[str, tuple[Lane, int]] = {}
        """The place behind every reply that a later request may continue, by its id or by its words (`words_key`)."""
        self._remembered: dict[str, tuple[Lane, int]] = {}
        """The same of the newest reply in a conversation that the provider keeps, by that conversation's id."""
        self._next = first
        self._lock = threading.Lock()

    def place(self, request: TurnRequest, open_calls: Mapping[str, Any]) -> LanePlace:
        """The place of a request in the lane that it continues or begins. `open_calls`: the arguments of the calls that
        have no result yet, by id."""
        opening = opening_count(request)
        with self._lock:
            place = (
                self._find_named(request)
                or self._find_repeated(request, opening)
                or self._find_by_words(request, opening)
            )
            if place is None:
                taken = {other.caller for other in self._lanes}
                free = {call_id: arguments for call_id, arguments in open_calls.items() if call_id not in taken}
                ended = {
                    call_id: arguments
                    for call_id, arguments in self._asked.items()
                    if call_id not in taken and call_id not in open_calls
                }
                caller = _caller(request, opening, free) or _caller(request, opening, ended, whole=True)
                lane = Lane(self._next, caller=caller)
                lane.side = lane.caller is not None
                self._next += 1
                place = LanePlace(lane, 0, 0, opening)
            else:
                lane = place.lane
                self._lanes.remove(lane)
                lane.begun |= place.at > opening or len(request.items) > opening
            self._lanes.append(lane)
            del self._lanes[:-MAX_LANES]
        return place

    def _find_named(self, request: TurnRequest) -> LanePlace | None:
        """The place of a request that names what it continues: a reply, or a conversation that the provider keeps."""
        if request.previous is None:
            return None
        found = self._replies.get(request.previous) or self._remembered.get(request.previous)
        if found is None:
            results = (result for item in request.items for result in request.reader.results(item))
            owner = next((self._owners[call_id] for call_id, _, _ in results if call_id in self._owners), None)
            found = None if owner is None else (owner, len(owner.digests))
        if found is None or found[0] not in self._lanes:
            return None
        lane, at = found
        instructed = int(bool(request.items) and request.items[0].get("role") in ("system", "developer"))
        known = int(instructed and request.digests[:1] == tuple(lane.digests[:1]))
        return _place_from(request, lane, known, at, instructed)

    def _find_by_words(self, request: TurnRequest, opening: int) -> LanePlace | None:
        """The place of a request without tools that repeats a lane's words, though what comes before them is another than
        it was, but for the first message. The newest of the lane's words count: a client may put the same few words of
        its own between others."""
        if request.offers_tools or request.aside:
            return None
        found: LanePlace | None = None
        for number in range(opening, len(request.items)):
            if not request.reader.from_model(request.items[number]):
                continue
            lane, at = self._replies.get(words_key(request, request.items[number]), (None, 0))
            if lane not in self._lanes or lane.digests[:1] != [request.digests[0]]:
                continue
            if found is None or at >= found.at:
                found = LanePlace(lane, number + 1, at, opening)
        return None if found is None else _place_from(request, found.lane, found.known, found.at, opening)

    def _find_repeated(self, request: TurnRequest, opening: int) -> LanePlace | None:
        """The lane whose first messages the request repeats, else the one whose calls it carries. A question on the side
        may carry the calls of the conversation that it is about."""
        found: tuple[int, Lane] | None = None
        for lane in self._lanes:
            if request.aside and not lane.side:
                continue
            known = self._count_known(request, lane)
            again = len(request.items) == opening and (lane.begun or lane.asking > 0)
            if known >= max(1, opening) and not again and (found is None or known >= found[0]):
                found = known, lane
        if found is not None:
            found[1].digests[: found[0]] = request.digests[: found[0]]
            return LanePlace(found[1], found[0], found[0], opening)
        if request.aside:
            return None
        for number in range(len(request.items) - 1, opening - 1, -1):
            for call in request.reader.calls(request.items[number]):
                owner = self._owners.get(call.id)
                if owner is not None and owner in self._lanes:
                    return LanePlace(owner, number + 1, number + 1, opening)
        return None

    def _count_known(self, request: TurnRequest, lane: Lane) -> int:
        """The number of a request's messages that the lane holds. A client may spell a call's arguments otherwise than
        the model did: the call's id says that it is the same message."""
        known = request.matching_prefix(lane.digests)
        while 0 < known < len(request.items):
            if known < len(lane.digests) and request.digests[known] == lane.digests[known]:
                known += 1
                continue
            ids = [call.id for call in request.reader.calls(request.items[known])]
            if not ids or any(self._owners.get(call_id) is not lane for call_id in ids):
                break
            known += 1
        return known

    def add_calls(self, lane: Lane, calls: Mapping[str, Any]) -> None:
        """Note the calls that the lane's model asks for. `calls`: their arguments, by id."""
        with self._lock:
            self._owners.update(dict.fromkeys(calls, lane))
            self._asked.update(calls)
            while len(self._asked) > MAX_ASKED:
                del self._asked[next(iter(self._asked))]
            while len(self._owners) > MAX_CALLS:
                del self._owners[next(iter(self._owners))]

    def add_reply(self, lane: Lane, request: TurnRequest, reply_id: str | None) -> str | None:
        """Remember the reply to this request, with which the lane ends now, by its id. Returns the id of the conversation that
        the provider keeps, if it keeps one."""
        if reply_id is None:
            return None
        conversation = None if request.previous in self._replies else request.previous
        self.remember(lane, len(lane.digests), reply_id, conversation)
        return conversation

    def remember(self, lane: Lane, at: int, reply_id: str, conversation: str | None) -> None:
        """Remember that a reply ends before message number `at` of the lane. `conversation`: the one that the provider keeps."""
        with self._lock:
            self._replies[reply_id] = lane, at
            if conversation is not None:
                self._remembered[conversation] = lane, at
            for places in (self._replies, self._remembered):
                while len(places) > MAX_CALLS:
                    del places[next(iter(places))]

    def lane_of(self, call_id: str) -> Lane | None:
        """The lane whose model asked for this call; None if none did."""
        with self._lock:
            return self._owners.get(call_id)

    @property
    def next_number(self) -> int:
        return self._next

    def add(self, lane: Lane) -> None:
        """Add a lane of before, in place of the one with its number."""
        with self._lock:
            self._lanes = [*(other for other in self._lanes if other.number != lane.number), lane]
            for call_id, owner in self._owners.items():
                if owner.number == lane.number:
                    self._owners[call_id] = lane
            for places in (self._replies, self._remembered):
                places.update({key: (lane, at) for key, (owner, at) in places.items() if owner.number == lane.number})
            self._next = max(self._next, lane.number + 1)

    def find(self, number: int) -> Lane | None:
        """The lane of this number; None if there is none."""
        with self._lock:
            return next((lane for lane in self._lanes if lane.number == number), None)


def opening_count(request: TurnRequest) -> int:
    """The number of messages before the model's first words."""
    return next(
        (number for number, item in enumerate(request.items) if request.reader.from_model(item)), len(request.items)
    )


def words_key(request: TurnRequest, item: dict[str, Any]) -> str:
    """A name of what a model has said: the same if the client sends it again without the spaces around it."""

    def words(item: dict[str, Any]) -> list[str]:
        return sorted(text.strip() for text in texts(request.reader.normal(item)))

    return request.memo.of(f"{request.api.value} words", item, words).hex()


def _place_from(request: TurnRequest, lane: Lane, known: int, at: int, opening: int) -> LanePlace:
    """The place of a request that goes on at `at`, or is sent once more: then the lane holds more of its messages."""
    while known < len(request.items) and lane.digests[at : at + 1] == [request.digests[known]]:
        known, at = known + 1, at + 1
    return LanePlace(lane, known, at, opening)


def _caller(request: TurnRequest, opening: int, calls: Mapping[str, Any], *, whole: bool = False) -> str | None:
    """The call whose arguments hold a text that the user's first words hold, too: the one with the longest. `whole`:
    the text has to be one of theirs, and not a part of it."""
    if not calls:
        return None
    said = [text for message in request.new_messages(limit=opening) for text in texts(message.content)]
    best: tuple[int, str] | None = None
    for call_id, arguments in calls.items():
        for text in texts(arguments):
            wanted = text.strip()
            length = len(wanted)
            if length < MIN_TASK_CHARS or (best is not None and length <= best[0]):
                continue
            if any(wanted == part.strip() if whole else wanted in part for part in said):
                best = length, call_id
    return None if best is None else best[1]


def texts(value: Any) -> Sequence[str]:
    """All texts within a JSON value, in order; without the names of fields."""
    found: list[str] = []
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if isinstance(current, str):
            found.append(current)
        elif isinstance(current, list):
            waiting.extend(reversed(current))
        elif isinstance(current, dict):
            waiting.extend(reversed(list(current.values())))
    return found
