"""The form in which the journal keeps model requests and replies that passed the gateway."""

from __future__ import annotations

import base64
import hashlib
import json
from itertools import takewhile
from typing import Any

from snapshotd.engine.journal.replay import QUESTION
from snapshotd.errors import Unsupported
from snapshotd.gateway.base import REPLAY_LIMIT_BYTES, VOLATILE_PARAMS, ModelCall, RecordedReply, TurnReply, TurnRequest
from snapshotd.types import CallStatus, JournalEntry, Message

_OUTLINE_CHARS = 300
_PARAMS_CHARS = 1 << 20


def outline(request: TurnRequest, first: int) -> dict[str, Any]:
    """A short form of a request: a replay compares it, and a person sees it where the two differ. It leaves out the
    results of tools. `first`: the number of its messages before the model's first words in the conversation. A question
    on the side is also known by its system prompt alone (replay.py, `QUESTION`)."""
    fixed = hashlib.sha256((request.previous or "").encode())
    for number, (item, digest) in enumerate(zip(request.items, request.digests, strict=True)):
        fixed.update(digest if number < first or request.reader.from_model(item) else b"answer")
    opening = request.new_messages(max(0, first - 1), limit=1)
    question: dict[str, Any] = {}
    if request.aside:
        system = len(list(takewhile(lambda message: message.role in ("system", "developer"), request.new_messages())))
        question = {QUESTION: hashlib.sha256(b"".join(request.digests[:system])).hexdigest()}
    return {
        "api": str(request.api),
        "stream": request.stream,
        "messages": len(request.items),
        "digest": fixed.hexdigest(),
        "prompt": _excerpt(opening[0]) if opening else None,
        **question,
    }


def _excerpt(message: Message) -> str:
    content = message.content
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return text[:_OUTLINE_CHARS]


def params(request: TurnRequest, known: dict[str, Any] | None) -> dict[str, Any]:
    """The parameters of a request, the tools among them, without those that say nothing to the model. Larger ones than
    a mebibyte are left out. `known`: those of the request before, which are usually the same."""
    found = {name: value for name, value in request.params.items() if name not in VOLATILE_PARAMS}
    if found == known:
        return found
    size = len(json.dumps(found))
    return found if size <= _PARAMS_CHARS else {"left_out_characters": size}


def usage(reply: TurnReply) -> dict[str, int]:
    """The tokens that the provider counted."""
    usage = reply.content.usage
    numbers = {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cached_tokens": usage.cached_tokens,
    }
    return {name: number for name, number in numbers.items() if number is not None}


def result(reply: TurnReply, calls: list[ModelCall]) -> dict[str, Any]:
    """A reply as the result of its entry: its bytes, if they were kept, and the calls that it asks for."""
    body: dict[str, Any] = {}
    if reply.body is not None:
        try:
            body = {"body": reply.body.decode()}
        except UnicodeDecodeError:
            body = {"body_b64": base64.b64encode(reply.body).decode()}
    return {
        "status": reply.status,
        "content_type": reply.content_type,
        "complete": reply.complete,
        **body,
        "calls": [{"id": call.id, "name": call.name[:200] or "tool", "arguments": call.arguments} for call in calls],
    }


def reply_of(entry: JournalEntry) -> RecordedReply:
    """The reply of an entry, to be sent again. Unsupported: it was not kept."""
    result = entry.result
    if "body_b64" in result:
        return RecordedReply(
            result["status"], result["content_type"], base64.b64decode(result["body_b64"]), result["complete"]
        )
    if "body" in result:
        return RecordedReply(result["status"], result["content_type"], result["body"].encode(), result["complete"])
    if entry.status is CallStatus.DONE:
        raise Unsupported(
            f"a reply of more than {REPLAY_LIMIT_BYTES} bytes was not kept, so nothing behind it can be replayed; fork a snapshot "
            "without resuming, and start an agent there"
        )
    return RecordedReply(result["status"], "application/json", b"", error=entry.error or "the provider did not answer")
