"""Requests of the page, as the daemon answers them; and the files of a snapshot as a download."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.websockets import WebSocket, WebSocketDisconnect

from snapshotd.api.operation import ADMIN
from snapshotd.api.operations import EXPORT, OPERATIONS, READ_ARCHIVE
from snapshotd.api.wire import API_PREFIX, API_VERSION, BYTES, KEY_HEADER, VERSION_HEADER
from snapshotd.client.aio.links import TaskLinks
from snapshotd.client.transport import Transport
from snapshotd.errors import DaemonUnavailable, NotFound
from snapshotd.terms import short

PAGE = "page"
"""The member of a query that has the session's key where a browser lets a page send no header."""
_PASSED_ON = ("content-type", KEY_HEADER.lower())
"""Headers of the page's requests that the daemon sees."""
_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=8)
"""Each tab has a stream of events for as long as it is open; the server bounds the connections to it."""
_NAME = r"(?!\.\.?(?:/|$))[^/]+"
"""A place in a path: not one that would lead to another operation."""


@contextlib.asynccontextmanager
async def open_ways(app: Starlette, socket_path: str) -> AsyncIterator[None]:
    """Open two ways to the daemon while the server runs: `daemon` passes requests on, `transport` understands answers."""
    app.state.transport = Transport(Path(socket_path), links=TaskLinks())
    async with httpx2.AsyncClient(
        transport=httpx2.AsyncHTTPTransport(uds=socket_path, limits=_LIMITS),
        base_url="http://daemon",
        timeout=None,
        headers={VERSION_HEADER: API_VERSION},
    ) as client:
        app.state.daemon = client
        yield


async def pass_on(request: Request) -> Response:
    """Return the daemon's answer to a request of the page. NotFound for what a page has no use for; DaemonUnavailable."""
    if not _is_of_page(request.method, request.url.path):
        raise NotFound(f"the page has no {request.method} {request.url.path}; use the command line")
    daemon: httpx2.AsyncClient = request.app.state.daemon
    sent = daemon.build_request(
        request.method,
        httpx2.URL(path=request.url.path, query=_query(request)),
        headers={name: request.headers[name] for name in _PASSED_ON if name in request.headers},
        content=request.stream() if request.method != "GET" else None,
    )
    try:
        answer = await daemon.send(sent, stream=True)
    except httpx2.TransportError as exc:
        raise DaemonUnavailable(f"the daemon does not answer ({exc}); `snapshotd daemon` says more") from exc
    headers = {name: answer.headers[name] for name in ("content-type", "content-length") if name in answer.headers}
    if headers.get("content-type") == BYTES:  # bytes of a sandbox: a browser stores them, and shows nothing of them
        headers |= {"content-disposition": "attachment", "content-security-policy": "sandbox"}
    return StreamingResponse(_pieces(answer), answer.status_code, headers)


def _query(request: Request) -> bytes:
    """Encode the request's query without the session's key, which is the server's alone."""
    return urlencode([(name, text) for name, text in request.query_params.multi_items() if name != PAGE]).encode()


async def pass_events(socket: WebSocket) -> None:
    """Send each line of an answer that goes on while the page is open, as a message. A browser allows six connections to a server
    for all of its tabs together, and does not count WebSockets."""
    path = f"{API_PREFIX}/{socket.path_params['path']}"
    await socket.accept()
    if not _is_of_page("GET", path):
        await socket.close()
        return
    daemon: httpx2.AsyncClient = socket.app.state.daemon
    try:
        async with daemon.stream("GET", httpx2.URL(path=path)) as answer:
            sending = asyncio.create_task(_send_lines(socket, answer))
            with contextlib.suppress(WebSocketDisconnect):
                await socket.receive_text()  # a page says nothing: it leaves
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
    except httpx2.TransportError:
        await socket.close()


async def _send_lines(socket: WebSocket, answer: httpx2.Response) -> None:
    with contextlib.suppress(WebSocketDisconnect):
        with contextlib.suppress(httpx2.TransportError):  # the daemon was killed
            async for line in answer.aiter_lines():
                await socket.send_text(line)
        await socket.close()


async def send_tree(request: Request) -> Response:
    """Send a tar of all files of a snapshot, or of those below `path_b64`, for a browser to store. An error before the first
    byte is the answer; a later one breaks the download off, and the browser says so."""
    ref, below = request.path_params["ref"], request.query_params.get("path_b64")
    operation, query = (EXPORT, {"form": "tar"}) if below is None else (READ_ARCHIVE, {"path_b64": below})
    transport: Transport = request.app.state.transport
    pieces = _data(await transport.frames(*operation.at(ref), query=query))
    first = await anext(pieces, b"")
    name = f"{short(ref)}.tar"

    async def whole() -> AsyncIterator[bytes]:
        async with contextlib.aclosing(pieces):
            yield first
            async for piece in pieces:
                yield piece

    return StreamingResponse(
        whole(), media_type="application/x-tar", headers={"content-disposition": f'attachment; filename="{name}"'}
    )


async def _data(frames: AsyncIterator[bytes | dict[str, Any]]) -> AsyncGenerator[bytes, None]:
    async for frame in frames:
        if isinstance(frame, bytes):
            yield frame


async def _pieces(answer: httpx2.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()


def _is_of_page(method: str, path: str) -> bool:
    return any(known == method and pattern.fullmatch(path) for known, pattern in _operations())


@cache
def _operations() -> list[tuple[str, re.Pattern[str]]]:
    """The operations that a page may ask for: none brings a body of any size, and none is an administrator's."""
    return [
        (row.method, re.compile(API_PREFIX + re.sub(r"\{\w+\}", _NAME, row.path)))
        for row in OPERATIONS.values()
        if row.scope != ADMIN and not row.is_upload
    ]
