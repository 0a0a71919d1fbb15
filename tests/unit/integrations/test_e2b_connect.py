"""The wire of the in-sandbox API: calls that send several messages."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import pytest
from starlette.requests import Request

from snapshotd.api.record import Json
from snapshotd.errors import NotFound, SnapshotdError
from snapshotd.integrations.e2b.connect import Messages, Rpc
from snapshotd.integrations.e2b.failures import WireError, gone


def test_a_call_with_many_messages_is_answered_after_the_last_one() -> None:
    """A client that gets the head of an answer while it sends may take the rest of its body back."""
    pieces = [_framed({"number": number}) for number in range(3)]
    taken: list[Json] = []
    sent: list[Any] = []
    sent_before_the_end: list[Any] = []

    async def receive() -> Json:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": True}
        sent_before_the_end.extend(sent)
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(piece: Any) -> None:
        sent.append(piece)

    async def take(call: Any, messages: Messages) -> Json:
        taken.extend([message async for message in messages])
        return {"done": True}

    async def scene() -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/",
            "headers": [(b"content-type", b"application/connect+json")],
        }
        answer = await Rpc(taking=take).answer(None, Request(scope, receive), asyncio.Event(), _gone)
        await answer(scope, receive, send)

    asyncio.run(scene())
    assert taken == [{"number": 0}, {"number": 1}, {"number": 2}]
    assert sent_before_the_end == []
    assert [piece["type"] for piece in sent][:2] == ["http.response.start", "http.response.body"]


@pytest.mark.parametrize("begun", [False, True], ids=["nothing was sent", "a message was sent"])
def test_a_sandbox_that_is_gone_is_said_by_the_status_unless_the_answer_has_begun(begun: bool) -> None:
    """The SDKs know a sandbox that is gone by the status 502, which only an answer without a head can still get."""
    sent: list[Any] = []
    asked = [{"type": "http.request", "body": _framed({}), "more_body": False}]

    async def receive() -> Json:
        if asked:
            return asked.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(piece: Any) -> None:
        sent.append(piece)

    async def serve(call: Any, message: Json) -> Messages:
        if begun:
            yield {"start": {}}
        raise NotFound("no such trajectory")

    async def scene() -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/",
            "headers": [(b"content-type", b"application/connect+json")],
        }
        answer = await Rpc(serving=serve).answer(None, Request(scope, receive), asyncio.Event(), _gone)
        await answer(scope, receive, send)

    if not begun:
        with pytest.raises(WireError, match="was not found"):
            asyncio.run(scene())
        assert sent == []
        return
    asyncio.run(scene())
    assert [piece["type"] for piece in sent] == ["http.response.start", *["http.response.body"] * 2]
    assert json.loads(sent[-1]["body"][5:])["error"]["code"] == "unavailable"


async def _gone(error: SnapshotdError | WireError) -> WireError:
    return gone("abcd")


def _framed(message: Json) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack(">BI", 0, len(data)) + data
