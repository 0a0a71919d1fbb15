"""A dialect: how one API writes requests, replies, streams and errors. One module each: `openai_chat`,
`openai_responses`, `anthropic`, `gemini`.

All input here is foreign: it comes from an agent in a sandbox, or from a provider that may be any program. A reader
takes what has the expected shape and passes over the rest; only a part that makes a request meaningless is refused
(UsageError). Nothing raises for a reply.

`normal` forms drop the parts that clients change when they send a message again: null and empty fields, ids and marks
that the provider adds, cache marks that move from turn to turn; one text part is the same as a text; a call's arguments
are compared as JSON, not as text.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from snapshotd.errors import UsageError
from snapshotd.gateway import json_body
from snapshotd.gateway.base import Api, ItemReader, ProviderKind, RecordedReply, ReplyContent, TurnRequest
from snapshotd.gateway.digest import DigestMemo
from snapshotd.gateway.peer import HttpRequest
from snapshotd.gateway.sse import Event, EventReader

ERROR_LIMIT_CHARS = 2000
PART_LIMIT = 4096
"""Choices, calls or blocks of one streamed reply: a made index must not cost memory."""
_TOKEN_LIMIT = 1 << 53
_ROLE_LIMIT_CHARS = 64


class StreamReader(ABC):
    """Puts a streamed reply together, one event at a time."""

    settled = False
    """The model has said everything; only the provider's epilogue may follow (counts, an end mark)."""
    asked = False
    """A call for the agent is complete: some agents make it before the reply has ended."""
    finished = False
    """The stream's own end mark, or an error that ends it, was there. Nothing of interest follows."""

    def feed(self, event: Event) -> None:
        """Take one event. An event that cannot be read is passed over."""
        value = json_body.parse_or_none(event.data)
        self.take(event, value if isinstance(value, dict) else {})

    @abstractmethod
    def take(self, event: Event, value: dict[str, Any]) -> None:
        """Take one event, with its data as an object (empty if they are none)."""

    @abstractmethod
    def reply(self) -> dict[str, Any]:
        """The reply so far, in the shape of a plain reply."""


class Dialect(ItemReader, ABC):
    """One API. Stateless: one instance serves all threads."""

    api: Api
    provider: ProviderKind
    path: str
    """Path of its requests."""
    conversation_fields: frozenset[str]
    """Fields of the body that `items` takes its entries from, or `previous`."""

    def read_path(self, path: str) -> dict[str, Any] | None:
        """Fields of the body that the path of a request says in their place. None: the path is that of another API."""
        return {} if path == self.path else None

    def for_model(self, http: HttpRequest, fields: dict[str, Any], model: str) -> HttpRequest:
        """The same request to another model. `fields`: its body, parsed."""
        body = json.dumps({**fields, "model": model}, ensure_ascii=False, separators=(",", ":"))
        return replace(http, body=body.encode())

    @abstractmethod
    def items(self, body: dict[str, Any]) -> list[Any]:
        """The conversation of a request's body, the system prompt first."""

    @abstractmethod
    def stream_reader(self, request: TurnRequest) -> StreamReader:
        """For the stream that answers `request`."""

    @abstractmethod
    def content(self, reply: dict[str, Any]) -> ReplyContent:
        """The content of a plain reply of status 200; without digests."""

    @abstractmethod
    def reply_items(self, reply: dict[str, Any], request: TurnRequest) -> list[dict[str, Any]]:
        """The reply to `request` as items of a conversation, in the form in which the agent will send them back in its next
        request."""

    def read_request(self, body: dict[str, Any], body_bytes: int, memo: DigestMemo) -> TurnRequest:
        """The request in a parsed body. Raises UsageError for one that no provider could answer, or that cannot be
        recorded."""
        model, stream = body.get("model"), body.get("stream")
        if not isinstance(model, str) or not 1 <= len(model) <= 256 or not model.isprintable():
            raise UsageError("The request names no model; set the field model to a text of 1 to 256 characters.")
        items = self.items(body)
        for number, item in enumerate(items):
            role = (item.get("role") or "") if isinstance(item, dict) else None
            if not isinstance(role, str) or len(role) > _ROLE_LIMIT_CHARS or (role and not role.isprintable()):
                raise UsageError(f"Message {number} of the request is not an object with a role; correct it.")
        known = self.conversation_fields | {"model", "stream"}
        params = {name: value for name, value in body.items() if name not in known}
        previous, store = self.previous(body), self.stores(body)
        return TurnRequest(self.api, model, stream is True, params, items, self, memo, previous, store, body_bytes)

    def previous(self, body: dict[str, Any]) -> str | None:
        """The id of the reply or conversation that the request continues."""
        return None

    def stores(self, body: dict[str, Any]) -> bool:
        """True if the request asks the provider to remember the reply."""
        return False

    def read_reply(self, reply: Any, request: TurnRequest) -> ReplyContent:
        """The content of a plain reply, or of one put together from a stream."""
        if not isinstance(reply, dict):
            return ReplyContent(error="the reply is not a JSON object")
        found = self.content(reply)
        items = self.reply_items(reply, request)
        messages = tuple(self.message(item) for item in items)
        digests = tuple(request.memo.of(self.api.value, item, self.normal) for item in items)
        calls = tuple(call for item in items for call in self.calls(item))
        return ReplyContent(
            messages, digests, calls, found.stop_reason, found.usage, found.response_id, found.model, found.error
        )

    def read_again(self, request: TurnRequest, recorded: RecordedReply) -> ReplyContent:
        if not recorded.content_type.startswith("text/event-stream"):
            return self.read_reply(json_body.parse_or_none(recorded.body), request)
        stream = self.stream_reader(request)
        for event in EventReader(len(recorded.body)).feed(recorded.body):
            stream.feed(event)
        return self.read_reply(stream.reply(), request)

    def read_error(self, reply: Any) -> str | None:
        """The provider's error in one line, if `reply` is one."""
        error = reply.get("error") if isinstance(reply, dict) else None
        if isinstance(error, str):
            return error[:ERROR_LIMIT_CHARS]
        if not isinstance(error, dict):
            return None
        kind, message = (
            text(error.get("type")) or text(error.get("code")) or text(error.get("status")) or "error",
            text(error.get("message")) or "no message",
        )
        return f"{kind}: {message}"[:ERROR_LIMIT_CHARS]


def error_body(provider: ProviderKind, status: int, message: str) -> dict[str, Any]:
    """An error in the shape of the provider's API."""
    if provider is ProviderKind.ANTHROPIC:
        return {
            "type": "error",
            "error": {"type": _ANTHROPIC_TYPES.get(status, _family(status)), "message": message},
            "request_id": None,
        }
    if provider is ProviderKind.GEMINI:
        state = _GEMINI_STATES.get(status, "INVALID_ARGUMENT" if status < 500 else "UNAVAILABLE")
        return {"error": {"code": status, "message": message, "status": state}}
    return {
        "error": {
            "message": message,
            "type": _OPENAI_TYPES.get(status, _family(status)),
            "param": None,
            "code": "snapshotd",
        }
    }


_ANTHROPIC_TYPES = {403: "permission_error", 404: "not_found_error", 413: "request_too_large", 504: "timeout_error"}
_GEMINI_STATES = {403: "PERMISSION_DENIED", 404: "NOT_FOUND", 409: "ABORTED", 504: "DEADLINE_EXCEEDED"}
_OPENAI_TYPES = {403: "permission_error", 404: "not_found_error", 409: "conflict_error", 504: "timeout_error"}


def _family(status: int) -> str:
    return "invalid_request_error" if status < 500 else "api_error"


# -- reading what others wrote -----------------------------------------------------------------------------------------


def text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """The objects of a list; nothing if it is no list."""
    return (entry for entry in value if isinstance(entry, dict)) if isinstance(value, list) else iter(())


def first_by_index(entries: Any) -> dict[str, Any]:
    """The object with the lowest index in a list of choices; empty if there is none."""
    return min(objects(entries), key=lambda entry: tokens(entry.get("index")) or 0, default={})


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def tokens(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < _TOKEN_LIMIT else None


def index(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < PART_LIMIT else None


def without(item: dict[str, Any], names: Iterable[str] = ()) -> dict[str, Any]:
    """A copy without the named fields, and without fields that are null or empty lists."""
    return {name: value for name, value in item.items() if name not in names and value is not None and value != []}


def normal_parts(content: Any, drop: frozenset[str], skip: frozenset[str] = frozenset()) -> Any:
    """The normal form of a content: parts without the fields `drop`, none of the types `skip`, and a single text part
    as text."""
    if not isinstance(content, list):
        return None if content == "" else content
    parts = [
        without(part, drop) if isinstance(part, dict) else part
        for part in content
        if not (isinstance(part, dict) and text(part.get("type")) in skip)
    ]
    if (
        len(parts) == 1
        and isinstance(parts[0], dict)
        and set(parts[0]) <= {"type", "text"}
        and isinstance(parts[0].get("text"), str)
    ):
        return parts[0]["text"] or None
    return parts or None
