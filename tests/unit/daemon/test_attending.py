"""What a client says while its command runs: cut anywhere, too much of it, nonsense, and its end."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

from snapshotd.api.wire import BODY_MAX_BYTES, STDIN_WINDOW_BYTES
from snapshotd.daemon.http.attending import Lines, attend
from snapshotd.engine.base import Caller
from snapshotd.errors import LimitExceeded, UsageError


def _request(*pieces: bytes, whole: bool = False) -> Request:
    """A request whose body comes in these pieces; then the client is gone."""
    messages: list[Message] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages += [{"type": "http.request", "body": b"", "more_body": False}] if whole else []
    messages.append({"type": "http.disconnect"})

    async def receive() -> Message:
        return messages.pop(0)

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def _say(*events: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def _stdin(data: bytes) -> dict[str, str]:
    return {"event": "stdin", "data_b64": base64.b64encode(data).decode()}


async def _attended(caller: Caller, request: Request) -> bytes:
    lines = Lines(request)
    first = await lines.first()
    await attend(request, caller, lines)
    return first


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
@pytest.mark.parametrize("whole", [False, True])
def test_lines_are_cut_anywhere(size: int, whole: bool) -> None:
    body = b"first\n" + _say(
        _stdin(b"ab"), {"event": "unread", "stream": "stderr"}, _stdin(b"c"), {"event": "stdin_end"}
    )
    caller = Caller(gives_input=True)
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    assert asyncio.run(_attended(caller, _request(*pieces, whole=whole))) == b"first"
    assert caller.gone
    assert caller.hear() == {"stderr"}
    assert (caller.waiting, caller.waiting_bytes) == (True, 3)


@pytest.mark.parametrize(
    "line",
    [
        b"[]\n",
        b"{\n",
        b"[" * 100_000 + b"\n",
        b'{"event":"x"}\n',
        b'{"event":"unread","stream":"stdin"}\n',
        b'{"event":"stdin","data_b64":"?"}\n',
        _say(_stdin(b"x" * STDIN_WINDOW_BYTES), _stdin(b"y")),
    ],
)
def test_a_client_that_says_nonsense_is_given_up(line: bytes) -> None:
    caller = Caller(gives_input=True)
    asyncio.run(_attended(caller, _request(b"first\n" + line, _say({"event": "unread", "stream": "stdout"}))))
    assert caller.gone
    assert caller.hear() == set()
    assert caller.waiting_bytes <= STDIN_WINDOW_BYTES


def test_the_first_line_is_there_and_bounded() -> None:
    with pytest.raises(UsageError):
        asyncio.run(Lines(_request(b"no end", whole=True)).first())
    with pytest.raises(LimitExceeded):
        asyncio.run(Lines(_request(*[b"x" * (1 << 20)] * ((BODY_MAX_BYTES >> 20) + 2))).first())
