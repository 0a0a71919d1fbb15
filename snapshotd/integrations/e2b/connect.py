"""The Connect protocol for HTTP/1.1, with JSON, which both SDKs send: connectrpc.com/docs/protocol.

A unary call is a JSON object each way. In a stream, each message has five bytes before it: flags, and its length (32 bits,
big endian). The last one of an answer has the flag 2, and the error of the call if there is one.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from snapshotd.api.record import Json
from snapshotd.errors import SnapshotdError
from snapshotd.integrations.e2b.bodies import json_object, read_body
from snapshotd.integrations.e2b.failures import WireError

MESSAGE_MAX_BYTES = 8 << 20
"""The longest message: a command's words, or a piece of its input."""
_HEAD = struct.Struct(">BI")
_END = 2
_UNARY, _STREAM = "application/json", "application/connect+json"
_log = logging.getLogger(__name__)

Messages = AsyncIterator[Json]
Failure = Callable[[SnapshotdError | WireError], Awaitable[WireError]]


@dataclass(frozen=True, slots=True)
class Rpc:
    """One method of a service. Exactly one is given: `unary` takes and returns a message, `serving` returns a stream of
    them, `taking` takes one."""

    unary: Callable[[Any, Json], Awaitable[Json]] | None = None
    serving: Callable[[Any, Json], Messages] | None = None
    taking: Callable[[Any, Messages], Awaitable[Json]] | None = None

    async def answer(self, call: Any, request: Request, stopping: asyncio.Event, failure: Failure) -> Response:
        """`call`: the context that the method gets. `stopping`: streams end with it. `failure`: says what an error is to the
        client. WireError, or an error of the daemon: before anything was sent."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != (_UNARY if self.unary is not None else _STREAM):
            return Response(status_code=415, headers={"Accept-Post": f"{_UNARY}, {_STREAM}"})
        if request.headers.get("connect-content-encoding", "identity") != "identity":
            raise WireError("unimplemented", "compressed messages are not read; send them as they are")
        if self.unary is not None:
            return JSONResponse(await self.unary(call, json_object(await read_body(request, MESSAGE_MAX_BYTES))))
        if self.taking is not None:
            return _Stream(_once(self.taking(call, _messages(request))), stopping, failure, reads=True)
        assert self.serving is not None
        async with aclosing(cast(Any, _messages(request))) as messages:
            async for message in messages:
                return _Stream(self.serving(call, message), stopping, failure)
        raise WireError("invalid_argument", "the call has no message; send one")


def error_of(failure: WireError) -> Response:
    """The answer to a unary call that fails."""
    return JSONResponse({"code": failure.connect_code, "message": failure.message}, failure.status)


def bytes_of(message: Json, name: str) -> bytes | None:
    """A field of bytes; None: it is not there. WireError: it is no base64."""
    text = message.get(name)
    if text is None:
        return None
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as exc:
        raise WireError("invalid_argument", f"`{name}` is no base64: {exc}") from exc


def text(message: Json, name: str) -> str:
    """A field of text; empty if it is not there. WireError: it is no text."""
    found = message.get(name, "")
    if not isinstance(found, str) or "\0" in found:
        raise WireError("invalid_argument", f"`{name}` has to be a text without NUL")
    return found


def part(message: Json, name: str) -> Json:
    """A message within a message; empty if it is not there. WireError: it is none."""
    found = message.get(name) or {}
    if not isinstance(found, dict):
        raise WireError("invalid_argument", f"`{name}` has to be an object")
    return found


async def _once(answer: Awaitable[Json]) -> Messages:
    yield await answer


async def _messages(request: Request) -> Messages:
    """The messages of a body that comes piece by piece."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        while len(data) >= _HEAD.size:
            flags, length = _HEAD.unpack_from(data)
            if flags:
                raise WireError("unimplemented", "compressed messages are not read; send them as they are")
            _check_length(length)
            if len(data) < _HEAD.size + length:
                break
            message = bytes(data[_HEAD.size : _HEAD.size + length])
            del data[: _HEAD.size + length]
            yield json_object(message)
    if data:
        raise WireError("invalid_argument", "the body ends within a message")


def _check_length(length: int) -> None:
    if length > MESSAGE_MAX_BYTES:
        raise WireError("too_large", f"a message of {length} bytes is too long; {MESSAGE_MAX_BYTES} are the most")


class _Stream(Response):
    """An answer of several messages. Ends when the client goes away, also while there is nothing to send."""

    def __init__(self, messages: Messages, stopping: asyncio.Event, failure: Failure, *, reads: bool = False) -> None:
        """`reads`: `messages` itself reads the request's body, and notices there when the client goes away."""
        super().__init__(media_type=_STREAM)
        del self.headers["content-length"]
        self._answered, self._stopping, self._failure, self._reads = messages, stopping, failure, reads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        late = _Late(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if self._reads:
            await self._send(late)
            return
        sending = asyncio.create_task(self._send(late))
        leaving, stopping = asyncio.create_task(_wait_for_leave(receive)), asyncio.create_task(self._stopping.wait())
        others = (leaving, stopping)
        try:
            await asyncio.wait((sending, *others), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, *others):
                task.cancel()
            await asyncio.gather(sending, *others, return_exceptions=True)
        if sending.cancelled() and self._stopping.is_set():
            last = _error_json(WireError("unavailable", "the server was stopped; connect again when it is back"))
            await late({**_frame(_END, last), "more_body": False})
        if not sending.cancelled() and (error := sending.exception()) is not None:
            raise error

    async def _send(self, send: _Late) -> None:
        """WireError: the sandbox is gone, and nothing was sent."""
        last: Json = {}
        try:
            async with aclosing(cast(Any, self._answered)) as messages:
                async for message in messages:
                    await send(_frame(0, message))
        except (SnapshotdError, WireError) as exc:
            failure = await self._failure(exc)
            if failure.code == "gone" and not send.has_sent:
                raise failure from exc
            last = _error_json(failure)
        except (ClientDisconnect, OSError):
            return
        except Exception:  # noqa: BLE001 - the answer has begun: the client gets the error in it
            _log.exception("a stream failed")
            last = _error_json(WireError("internal", "the server has a defect; its log says more"))
        await send({**_frame(_END, last), "more_body": False})


class _Late:
    """Sends the head with the first piece: until then another answer may take its place, and a client that gets a head while
    it sends its body may take the rest back."""

    def __init__(self, send: Send, start: Json) -> None:
        self._send, self._start, self.has_sent = send, start, False

    async def __call__(self, piece: MutableMapping[str, Any]) -> None:
        if not self.has_sent:
            self.has_sent = True
            await self._send(self._start)
        await self._send(piece)


def _error_json(failure: WireError) -> Json:
    return {"error": {"code": failure.connect_code, "message": failure.message}}


def _frame(flags: int, message: Json) -> Json:
    data = json.dumps(message).encode()
    return {"type": "http.response.body", "body": _HEAD.pack(flags, len(data)) + data, "more_body": True}


async def _wait_for_leave(receive: Receive) -> None:
    """Wait until the client has gone away. The request's body has to be read by then."""
    while (await receive())["type"] != "http.disconnect":
        pass
