"""Google's Gemini API: `POST /v1beta/models/NAME:generateContent`, and `:streamGenerateContent`. A content is a role and
parts; calls and results are parts.

The path says the model, and whether the reply is a stream: of events with `alt=sse`, else one list that grows.

Ids: the API has them for calls and results, but need not give them, and clients make up their own for calls that came
without. So an id says nothing here. Every call gets one that follows from its place: the conversation's first content,
the number of the model's turn, the number of the call in it. A result gets that of its call: the one with its id, else
the first of its name that has no result yet. The records have these ids; what goes to the provider, and to the agent,
stays as it is.

Source: https://ai.google.dev/api/generate-content. The API takes the names of fields in both spellings, `functionCall`
and `function_call`.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any
from urllib.parse import quote

from snapshotd.errors import UsageError
from snapshotd.gateway.base import Api, ModelCall, ProviderKind, ReplyContent, TokenUsage, TurnRequest
from snapshotd.gateway.clients import drop_changes
from snapshotd.gateway.dialect import (
    PART_LIMIT,
    Dialect,
    StreamReader,
    first_by_index,
    mapping,
    objects,
    text,
    tokens,
    without,
)
from snapshotd.gateway.digest import canonical_json
from snapshotd.gateway.peer import HttpRequest
from snapshotd.gateway.sse import Event
from snapshotd.types import Message

_PATH = re.compile(r"(/v1(?:alpha|beta)?/models/)([A-Za-z0-9._-]{1,200}):(generateContent|streamGenerateContent)")
_SPELLINGS = {
    "function_call": "functionCall",
    "function_response": "functionResponse",
    "inline_data": "inlineData",
    "file_data": "fileData",
    "thought_signature": "thoughtSignature",
}
_CALL, _RESULT = "functionCall", "functionResponse"
_UNSTABLE = frozenset({"thoughtSignature", "videoMetadata"})
_ID_CHARS = 16


class GeminiContent(Dialect):
    """See the module's text."""

    api = Api.GEMINI
    provider = ProviderKind.GEMINI
    path = "/v1beta/models/NAME:generateContent"
    conversation_fields = frozenset({"contents", "systemInstruction", "system_instruction"})

    def read_path(self, path: str) -> dict[str, Any] | None:
        found = _PATH.fullmatch(path)
        return None if found is None else {"model": found[2], "stream": found[3] == "streamGenerateContent"}

    def for_model(self, http: HttpRequest, fields: dict[str, Any], model: str) -> HttpRequest:
        return replace(http, path=_PATH.sub(lambda found: f"{found[1]}{quote(model, safe='')}:{found[3]}", http.path))

    def items(self, body: dict[str, Any]) -> list[Any]:
        contents = body.get("contents")
        if not isinstance(contents, list) or not all(isinstance(content, dict) for content in contents):
            raise UsageError("The request has no list of contents; set the field contents.")
        system = body.get("systemInstruction", body.get("system_instruction"))
        parts = system if isinstance(system, str) else mapping(system).get("parts")
        return [*([{"role": "system", "parts": parts}] if parts else []), *_give_ids(_join_turns(contents), [])]

    def message(self, item: dict[str, Any]) -> Message:
        role = text(item.get("role")) or "user"
        return Message("assistant" if role == "model" else role, item.get("parts"))

    def item(self, message: Message) -> dict[str, Any]:
        return {"role": "model" if message.role == "assistant" else message.role, "parts": message.content}

    def normal(self, item: dict[str, Any]) -> Any:
        return _normal(item)

    def from_model(self, item: dict[str, Any]) -> bool:
        return item.get("role") == "model"

    def calls(self, item: dict[str, Any]) -> Iterable[ModelCall]:
        if self.from_model(item):
            for part in objects(item.get("parts")):
                if isinstance(call := part.get(_CALL), dict):
                    yield ModelCall(text(call.get("id")) or "", text(call.get("name")) or "", call.get("args") or {})

    def results(self, item: dict[str, Any]) -> Iterable[tuple[str, Any, bool]]:
        """The API's words for a result: `output` for what a function gave, `error` for why it did not. A result that is
        there twice, as in a session that Gemini CLI goes on with, counts once; one that belongs to no call does not."""
        seen = {""}
        for part in objects(item.get("parts")):
            if isinstance(result := part.get(_RESULT), dict) and not self.from_model(item):
                call_id, given = text(result.get("id")) or "", result.get("response")
                if call_id not in seen:
                    seen.add(call_id)
                    yield call_id, given, "error" in mapping(given) and "output" not in mapping(given)

    def reply_items(self, reply: dict[str, Any], request: TurnRequest) -> list[dict[str, Any]]:
        content = mapping(_first(reply).get("content"))
        if not content.get("parts"):
            return []
        return _give_ids([{**content, "role": "model"}], request.items)

    def content(self, reply: dict[str, Any]) -> ReplyContent:
        blocked = text(mapping(reply.get("promptFeedback")).get("blockReason"))
        return ReplyContent(
            stop_reason=text(_first(reply).get("finishReason")) or blocked,
            usage=_usage(mapping(reply.get("usageMetadata"))),
            response_id=text(reply.get("responseId")),
            model=text(reply.get("modelVersion")),
            error=self.read_error(reply),
        )

    def read_reply(self, reply: Any, request: TurnRequest) -> ReplyContent:
        """A stream without `alt=sse` is a list of the same values as its events."""
        if isinstance(reply, list):
            stream = _ContentStream()
            for value in objects(reply):
                stream.take(Event("message", b""), value)
            reply = stream.reply()
        return super().read_reply(reply, request)

    def stream_reader(self, request: TurnRequest) -> StreamReader:
        return _ContentStream()


def _first(reply: dict[str, Any]) -> dict[str, Any]:
    """The candidate that becomes part of the conversation."""
    return first_by_index(reply.get("candidates"))


def _usage(usage: dict[str, Any]) -> TokenUsage:
    """Their `promptTokenCount` includes the cached ones, their `candidatesTokenCount` leaves out the thoughts."""
    said, thought = tokens(usage.get("candidatesTokenCount")), tokens(usage.get("thoughtsTokenCount"))
    output = None if said is None and thought is None else (said or 0) + (thought or 0)
    return TokenUsage(tokens(usage.get("promptTokenCount")), output, tokens(usage.get("cachedContentTokenCount")))


def _normal(item: dict[str, Any]) -> list[Any]:
    """Without thoughts, signatures, ids, empty texts and results that are there twice; the model's texts that follow each
    other are one."""
    role = text(item.get("role")) or "user"
    return [role, _normal_parts(item.get("parts"), role == "model")]


def _normal_parts(parts: Any, from_model: bool) -> Any:
    if not isinstance(parts, list):
        return None if parts == "" else parts
    found: list[Any] = []
    results: set[str] = set()
    for part in map(_spell, parts):
        if not isinstance(part, dict):
            found.append(part)
            continue
        fields = without(part, _UNSTABLE)
        said = fields.get("text")
        if fields.pop("thought", False) is True or (said == "" and fields.keys() == {"text"}):
            continue
        if call_id := text(mapping(fields.get(_RESULT)).get("id")):
            if call_id in results:
                continue
            results.add(call_id)
        for name in (_CALL, _RESULT):
            if isinstance(inner := fields.get(name), dict):
                fields[name] = without({**inner, "args": inner.get("args") or {}} if name == _CALL else inner, ("id",))
        found.append(said if fields.keys() == {"text"} and isinstance(said, str) else fields)
    if from_model:
        runs = groupby(found, lambda part: isinstance(part, str))
        found = [part for texts, run in runs for part in (["".join(run)] if texts else run)]
    return found or None


def _spell(part: Any) -> Any:
    """A part with the names of the API's JSON."""
    if not isinstance(part, dict) or not any(name in _SPELLINGS for name in part):
        return part
    return {_SPELLINGS.get(name, name): value for name, value in part.items()}


def _join_turns(contents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Contents of the model that follow each other as one: clients keep the events of a stream as they came."""
    found: list[dict[str, Any]] = []
    for role, group in groupby(contents, lambda content: content.get("role")):
        several = list(group)
        if role != "model" or len(several) == 1 or not all(isinstance(one.get("parts"), list) for one in several):
            found += several
        else:
            found.append({"role": role, "parts": [part for one in several for part in one["parts"]]})
    return found


def _give_ids(contents: list[dict[str, Any]], before: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Contents whose calls and results have the ids of their places. `before`: the items before them."""
    items = [*before, *contents]
    turn = sum(item.get("role") == "model" for item in before)
    conversation, found = "", []
    waiting = _Waiting()
    for content in contents:
        from_model, parts = content.get("role") == "model", content.get("parts")
        if from_model:
            turn, waiting = turn + 1, _Waiting()
        if not isinstance(parts, list):
            found.append(content)
            continue
        own = [_spell(part) for part in parts]
        held = [(at, name) for at, part in enumerate(own) for name in (_CALL, _RESULT) if _holds(part, name)]
        if held and not conversation:
            conversation = _mark(items)
        for at, name in held:
            inner = own[at][name]
            given, called = text(inner.get("id")) or "", text(inner.get("name")) or ""
            if name == _CALL:
                call_id = f"{conversation}-{turn}-{waiting.calls}"
                waiting.add(call_id, given, called)
            else:
                call_id = waiting.take_call(given, called) or given
            own[at] = {**own[at], name: {**inner, "id": call_id}}
        found.append({**content, "parts": own})
    return found


def _holds(part: Any, name: str) -> bool:
    return isinstance(part, dict) and isinstance(part.get(name), dict)


class _Waiting:
    """The calls of one turn of the model that have no result yet. Costs the same for each, however many there are."""

    def __init__(self) -> None:
        self.calls = 0
        self._answered: set[str] = set()
        self._by_id: dict[str, deque[str]] = defaultdict(deque)
        self._by_name: dict[str, deque[str]] = defaultdict(deque)
        self._last: dict[str, str] = {}
        """The call that a client's id has answered last: the same result may come again."""

    def add(self, call_id: str, given: str, name: str) -> None:
        """`given`: the client's id."""
        self.calls += 1
        self._by_name[name].append(call_id)
        if given:
            self._by_id[given].append(call_id)

    def take_call(self, given: str, name: str) -> str | None:
        """The id of the call that a result belongs to. None: there is none."""
        for queue in (self._by_id[given], self._by_name[name]):
            while queue:
                call_id = queue.popleft()
                if call_id not in self._answered:
                    self._answered.add(call_id)
                    self._last[given] = call_id
                    return call_id
            if given in self._last and given:
                return self._last[given]
        return None


def _mark(items: Sequence[dict[str, Any]]) -> str:
    """Names a conversation by its first content, without what is new in each run."""
    opening = next((item for item in items if item.get("role") != "system"), {})
    return hashlib.sha256(drop_changes(canonical_json(_normal(opening)))).hexdigest()[:_ID_CHARS]


class _ContentStream(StreamReader):
    """Each event is a reply with the next parts; the last has the reason why the model stopped. There is no end
    mark."""

    def __init__(self) -> None:
        self._top: dict[str, Any] = {}
        self._candidate: dict[str, Any] = {}
        self._parts: list[dict[str, Any]] = []
        self._texts: list[str] = []
        """The pieces of the last part, if it is a text."""

    def take(self, event: Event, value: dict[str, Any]) -> None:
        if value.get("error"):
            self._top["error"] = value["error"]
            self.finished = True
        names = ("responseId", "modelVersion", "usageMetadata", "promptFeedback")
        self._top.update({name: value[name] for name in names if value.get(name) is not None})
        candidate = _first(value)
        if not tokens(candidate.get("index")):
            self._candidate.update({name: said for name, said in candidate.items() if name != "content"})
            for part in objects(mapping(candidate.get("content")).get("parts")):
                self._part(_spell(part))
        self.settled = self.settled or bool(
            self._candidate.get("finishReason") or mapping(self._top.get("promptFeedback")).get("blockReason")
        )

    def _part(self, part: dict[str, Any]) -> None:
        self.asked = self.asked or isinstance(part.get(_CALL), dict)
        said = part.get("text")
        last = self._parts[-1] if self._parts else {}
        plain = isinstance(said, str) and part.keys() <= {"text", "thought"}
        if plain and self._texts and last.get("thought") == part.get("thought"):
            self._texts.append(str(said))
            return
        self._close_text()
        if len(self._parts) < PART_LIMIT:
            self._parts.append(part)
            self._texts = [str(said)] if plain else []

    def _close_text(self) -> None:
        if self._texts:
            self._parts[-1] = {**self._parts[-1], "text": "".join(self._texts)}
            self._texts = []

    def reply(self) -> dict[str, Any]:
        self._close_text()
        content = {"content": {"role": "model", "parts": list(self._parts)}} if self._parts else {}
        return {**self._top, "candidates": [{**self._candidate, **content}] if self._candidate or content else []}
