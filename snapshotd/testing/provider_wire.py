"""The form of a scripted reply in each of the four APIs, plain and as a stream. Ids follow from the step: same step,
same bytes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

CREATED = 1_700_000_000
PROMPT_IDS = [7, 8, 9]
"""Token ids of every prompt."""
LOGPROBS = "message.output_text.logprobs"
_RESPONSE_ID = re.compile(r"resp_(?:(lane\d{1,9})_)?(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that the model asks for."""

    id: str
    name: str
    arguments: Any
    namespace: str | None = None
    """The tool's, in the Responses API."""

    @property
    def text(self) -> str:
        """The arguments as JSON; a text is taken as it is, so that a script can hold broken ones."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)


@dataclass(frozen=True, slots=True)
class Reply:
    """The model's reply at one step. `piece_chars`: length of a stream's deltas; `lane`: a prefix of its ids."""

    step: int
    model: str
    text: str | None = None
    calls: tuple[Call, ...] = ()
    input_tokens: int = 10
    output_tokens: int = 5
    cached_tokens: int = 0
    piece_chars: int = 8
    request: dict[str, Any] = field(default_factory=dict)
    lane: str = ""

    def pieces(self, text: str) -> list[str]:
        return [text[start : start + self.piece_chars] for start in range(0, len(text), self.piece_chars)]

    def has_flag(self, field: str) -> bool:
        """True if the request has this flag."""
        return self.request.get(field) is True

    def logprobs(self, first: int = 0, count: int | None = None) -> list[dict[str, Any]]:
        """Log probabilities of the text's tokens, which are its pieces: -0.5 for the first, -1.0 for the next, ..."""
        pieces = list(enumerate(self.pieces(self.text or "")))[first : None if count is None else first + count]
        return [
            {"token": piece, "logprob": -(number + 1) / 2, "bytes": list(piece.encode()), "top_logprobs": []}
            for number, piece in pieces
        ]

    def token_ids(self) -> list[int]:
        """Ids of all tokens, those of the calls too: 100 for the first, 101 for the next, ..."""
        count = len(self.pieces(self.text or "")) + sum(len(self.pieces(call.text)) for call in self.calls)
        return list(range(100, 100 + count))


class Wire:
    """One API. `path`: that of its requests."""

    path: str

    def request(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The body of a request for `path`, with the model and whether the reply is a stream. None: it is the path of
        another API."""
        return body if path == self.path else None

    def turns(self, body: dict[str, Any]) -> int:
        """Number of the model's replies that the request's conversation holds."""
        return sum(message.get("role") == "assistant" for message in _objects(body.get("messages")))

    def opening(self, body: dict[str, Any]) -> list[Any]:
        """The user's messages before the model's first words."""
        return [
            message
            for message in itertools.takewhile(
                lambda message: message.get("role") != "assistant", _objects(body.get("messages") or body.get("input"))
            )
            if message.get("role") == "user"
        ]

    def continued_lane(self, body: dict[str, Any]) -> str | None:
        """The lane of the reply that the request names as the one before it."""
        return None

    def results(self, body: dict[str, Any]) -> int:
        """Number of tool results that it holds."""
        return sum(message.get("role") == "tool" for message in _objects(body.get("messages")))

    def plain(self, reply: Reply) -> dict[str, Any]:
        raise NotImplementedError

    def events(self, reply: Reply) -> Iterator[tuple[str | None, dict[str, Any] | str]]:
        """Type (if the API names it) and data of every event of the stream."""
        raise NotImplementedError

    def stream(self, reply: Reply) -> Iterator[bytes]:
        """The events as bytes."""
        for kind, data in self.events(reply):
            text = data if isinstance(data, str) else json.dumps(data)
            yield (f"event: {kind}\n" if kind else "").encode() + f"data: {text}\n\n".encode()

    def error(self, status: int, kind: str, message: str) -> dict[str, Any]:
        return {"error": {"message": message, "type": kind, "param": None, "code": None}}


class Chat(Wire):
    path = "/v1/chat/completions"

    def plain(self, reply: Reply) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None, "annotations": []}
        if reply.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
                for call in reply.calls
            ]
        logprobs = {"content": reply.logprobs(), "refusal": None} if reply.has_flag("logprobs") else None
        choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": self._stop(reply)}
        ids = reply.has_flag("return_token_ids")
        return {
            "id": f"chatcmpl-{reply.step}",
            "object": "chat.completion",
            "created": CREATED,
            "model": reply.model,
            "choices": [{**choice, "token_ids": reply.token_ids()} if ids else choice],
            "usage": self._usage(reply),
            **({"prompt_token_ids": PROMPT_IDS} if ids else {}),
        }

    def events(self, reply: Reply) -> Iterator[tuple[str | None, dict[str, Any] | str]]:
        first = self._chunk(reply, {"role": "assistant", "content": None if reply.calls and not reply.text else ""})
        ids = iter(reply.token_ids() if reply.has_flag("return_token_ids") else ())
        yield None, {**first, "prompt_token_ids": PROMPT_IDS} if reply.has_flag("return_token_ids") else first
        for number, piece in enumerate(reply.pieces(reply.text or "")):
            logprobs = reply.logprobs(number, 1) if reply.has_flag("logprobs") else None
            yield None, self._chunk(reply, {"content": piece}, ids=ids, logprobs=logprobs)
        for number, call in enumerate(reply.calls):
            function = {"name": call.name, "arguments": ""}
            yield (
                None,
                self._chunk(
                    reply, {"tool_calls": [{"index": number, "id": call.id, "type": "function", "function": function}]}
                ),
            )
            for piece in reply.pieces(call.text):
                delta = {"tool_calls": [{"index": number, "function": {"arguments": piece}}]}
                yield None, self._chunk(reply, delta, ids=ids)
        yield None, self._chunk(reply, {}, self._stop(reply))
        if (reply.request.get("stream_options") or {}).get("include_usage"):
            yield None, {**self._chunk(reply, {}), "choices": [], "usage": self._usage(reply)}
        yield None, "[DONE]"

    def _chunk(
        self,
        reply: Reply,
        delta: dict[str, Any],
        stop: str | None = None,
        *,
        ids: Iterator[int] | None = None,
        logprobs: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        shown = None if logprobs is None else {"content": logprobs, "refusal": None}
        choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": shown, "finish_reason": stop}
        choice |= {"token_ids": [number]} if ids is not None and (number := next(ids, None)) is not None else {}
        return {
            "id": f"chatcmpl-{reply.step}",
            "object": "chat.completion.chunk",
            "created": CREATED,
            "model": reply.model,
            "choices": [choice],
        }

    @staticmethod
    def _stop(reply: Reply) -> str:
        return "tool_calls" if reply.calls else "stop"

    @staticmethod
    def _usage(reply: Reply) -> dict[str, Any]:
        return {
            "prompt_tokens": reply.input_tokens,
            "completion_tokens": reply.output_tokens,
            "total_tokens": reply.input_tokens + reply.output_tokens,
            "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
        }


class Responses(Wire):
    path = "/v1/responses"

    def turns(self, body: dict[str, Any]) -> int:
        """Runs of items that a model wrote, after those of the reply that the request continues."""
        before = _RESPONSE_ID.fullmatch(str(body.get("previous_response_id")))
        count, inside = (int(before[2]) + 1 if before else 0), False
        for item in _objects(body.get("input")):
            written = item.get("role") == "assistant" or item.get("type") in ("function_call", "reasoning")
            count += written and not inside
            inside = written
        return count

    def continued_lane(self, body: dict[str, Any]) -> str | None:
        before = _RESPONSE_ID.fullmatch(str(body.get("previous_response_id")))
        return f"{before[1]}_" if before and before[1] else None

    def results(self, body: dict[str, Any]) -> int:
        return sum(item.get("type") == "function_call_output" for item in _objects(body.get("input")))

    def plain(self, reply: Reply) -> dict[str, Any]:
        return self._response(reply, "completed", self._items(reply))

    def events(self, reply: Reply) -> Iterator[tuple[str | None, dict[str, Any] | str]]:
        for number, (kind, fields) in enumerate(self._typed_events(reply)):
            yield kind, {"type": kind, "sequence_number": number, **fields}

    def _typed_events(self, reply: Reply) -> Iterator[tuple[str, dict[str, Any]]]:
        begun = self._response(reply, "in_progress", [])
        yield "response.created", {"response": begun}
        yield "response.in_progress", {"response": begun}
        for number, item in enumerate(self._items(reply)):
            place = {"output_index": number, "item_id": item["id"]}
            empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
            started = {**item, "status": "in_progress", **empty}
            yield "response.output_item.added", {"output_index": number, "item": started}
            if item["type"] == "message":
                part, place = item["content"][0], {**place, "content_index": 0}
                yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
                for piece in reply.pieces(part["text"]):
                    yield "response.output_text.delta", {**place, "delta": piece, "logprobs": part["logprobs"][:1]}
                yield "response.output_text.done", {**place, "text": part["text"], "logprobs": part["logprobs"]}
                yield "response.content_part.done", {**place, "part": part}
            else:
                for piece in reply.pieces(item["arguments"]):
                    yield "response.function_call_arguments.delta", {**place, "delta": piece}
                yield (
                    "response.function_call_arguments.done",
                    {**place, "name": item["name"], "arguments": item["arguments"]},
                )
            yield "response.output_item.done", {"output_index": number, "item": item}
        yield "response.completed", {"response": self.plain(reply)}

    @staticmethod
    def _items(reply: Reply) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        if reply.text is not None:
            logprobs = reply.logprobs() if LOGPROBS in (reply.request.get("include") or ()) else []
            part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": logprobs}
            items.append(
                {
                    "id": f"msg_{reply.step}",
                    "type": "message",
                    "status": "completed",
                    "role": "assistant",
                    "content": [part],
                }
            )
        items += [
            {
                "id": f"fc_{call.id}",
                "type": "function_call",
                "status": "completed",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.text,
                **({} if call.namespace is None else {"namespace": call.namespace}),
            }
            for call in reply.calls
        ]
        return items

    @staticmethod
    def _response(reply: Reply, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {
            "input_tokens": reply.input_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens},
            "output_tokens": reply.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.input_tokens + reply.output_tokens,
        }
        return {
            "id": f"resp_{reply.lane}{reply.step}",
            "object": "response",
            "created_at": CREATED,
            "status": status,
            "model": reply.model,
            "output": items,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage if status == "completed" else None,
        }


class Messages(Wire):
    path = "/v1/messages"

    def results(self, body: dict[str, Any]) -> int:
        blocks = (block for message in _objects(body.get("messages")) for block in _objects(message.get("content")))
        return sum(block.get("type") == "tool_result" for block in blocks)

    def plain(self, reply: Reply) -> dict[str, Any]:
        content: list[dict[str, Any]] = [] if reply.text is None else [{"type": "text", "text": reply.text}]
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in reply.calls
        ]
        return {**self._head(reply), "content": content, "stop_reason": self._stop(reply), "usage": self._usage(reply)}

    def events(self, reply: Reply) -> Iterator[tuple[str | None, dict[str, Any] | str]]:
        for kind, fields in self._typed_events(reply):
            yield kind, {"type": kind, **fields}

    def _typed_events(self, reply: Reply) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "message_start", {"message": {**self._head(reply), "usage": {**self._usage(reply), "output_tokens": 1}}}
        yield "ping", {}
        if reply.text is not None:
            yield "content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}
            for piece in reply.pieces(reply.text):
                yield "content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": piece}}
            yield "content_block_stop", {"index": 0}
        for number, call in enumerate(reply.calls, 0 if reply.text is None else 1):
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            yield "content_block_start", {"index": number, "content_block": block}
            for piece in reply.pieces(call.text):
                yield (
                    "content_block_delta",
                    {"index": number, "delta": {"type": "input_json_delta", "partial_json": piece}},
                )
            yield "content_block_stop", {"index": number}
        stop = {"stop_reason": self._stop(reply), "stop_sequence": None}
        yield "message_delta", {"delta": stop, "usage": {"output_tokens": reply.output_tokens}}
        yield "message_stop", {}

    def error(self, status: int, kind: str, message: str) -> dict[str, Any]:
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_scripted"}

    @staticmethod
    def _head(reply: Reply) -> dict[str, Any]:
        return {
            "id": f"msg_{reply.step}",
            "type": "message",
            "role": "assistant",
            "model": reply.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    @staticmethod
    def _stop(reply: Reply) -> str:
        return "tool_use" if reply.calls else "end_turn"

    @staticmethod
    def _usage(reply: Reply) -> dict[str, Any]:
        return {
            "input_tokens": reply.input_tokens - reply.cached_tokens,
            "cache_read_input_tokens": reply.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": reply.output_tokens,
        }


class Gemini(Wire):
    """Its requests are those of Gemini's API: the model and the kind of reply are in the path. `with_ids`: the name of
    the one model whose calls come with ids, as newer models' do."""

    path = "/v1beta/models/m:generateContent"
    with_ids = "with-ids"

    def request(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        found = _GEMINI_PATH.fullmatch(path)
        return None if found is None else {**body, "model": found[1], "stream": found[2] == "streamGenerateContent"}

    def turns(self, body: dict[str, Any]) -> int:
        """Runs of the model's contents."""
        return sum(role == "model" for role, _ in itertools.groupby(_objects(body.get("contents")), _role))

    def opening(self, body: dict[str, Any]) -> list[Any]:
        return list(itertools.takewhile(lambda content: _role(content) != "model", _objects(body.get("contents"))))

    def results(self, body: dict[str, Any]) -> int:
        parts = (part for content in _objects(body.get("contents")) for part in _objects(content.get("parts")))
        return sum("functionResponse" in part for part in parts)

    def plain(self, reply: Reply) -> dict[str, Any]:
        text = [] if reply.text is None else [{"text": reply.text}]
        return self._reply(reply, [*text, *self._calls(reply)] or [{"text": ""}], last=True)

    def events(self, reply: Reply) -> Iterator[tuple[str | None, dict[str, Any] | str]]:
        texts = [{"text": piece} for piece in reply.pieces(reply.text or "")]
        parts = [*texts, *self._calls(reply)] or [{"text": ""}]
        for part in parts[:-1]:
            yield None, self._reply(reply, [part], last=False)
        yield None, self._reply(reply, parts[-1:], last=True)

    def error(self, status: int, kind: str, message: str) -> dict[str, Any]:
        return {"error": {"code": status, "message": message, "status": kind}}

    def _calls(self, reply: Reply) -> Iterator[dict[str, Any]]:
        for call in reply.calls:
            given = {"id": call.id} if reply.model == self.with_ids else {}
            yield {"functionCall": {**given, "name": call.name, "args": call.arguments}, "thoughtSignature": "c2lnbg=="}

    @staticmethod
    def _reply(reply: Reply, parts: list[dict[str, Any]], *, last: bool) -> dict[str, Any]:
        candidate = {"content": {"role": "model", "parts": parts}, **({"finishReason": "STOP"} if last else {})}
        return {
            "candidates": [{**candidate, "index": 0}],
            "usageMetadata": {
                "promptTokenCount": reply.input_tokens,
                "candidatesTokenCount": reply.output_tokens,
                "totalTokenCount": reply.input_tokens + reply.output_tokens,
                "cachedContentTokenCount": reply.cached_tokens,
            },
            "modelVersion": reply.model,
            "responseId": f"reply-{reply.step}",
        }


_GEMINI_PATH = re.compile(r"/v1(?:alpha|beta)?/models/([^/:]+):(generateContent|streamGenerateContent)")
WIRES: dict[str, Wire] = {wire.path: wire for wire in (Chat(), Responses(), Messages(), Gemini())}


def _role(content: dict[str, Any]) -> str:
    return str(content.get("role", "user"))


def _objects(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
