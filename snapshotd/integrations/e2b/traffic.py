"""Requests for servers in sandboxes: HTTP and WebSockets, by the port in the host or in the headers.

Each port that is asked for has a unix socket, which the daemon's client leads into the sandbox. A request is passed on as it
is, but for what belongs to one connection (RFC 9110, section 7.6.1).
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import unix_connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.typing import Subprotocol

from snapshotd.client import AsyncSnapshotd
from snapshotd.client.verbs.ports import AsyncPort
from snapshotd.integrations.e2b.failures import WireError

_OF_CONNECTION = {
    "connection",
    "keep-alive",
    "proxy-connection",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
TRAFFIC_TOKEN = "e2b-traffic-access-token"
_OURS = {TRAFFIC_TOKEN, "e2b-sandbox-id", "e2b-sandbox-port", "x-access-token"}
_PORTS_MAX = 512
_OPEN_S = 10.0
_MESSAGE_MAX_BYTES = 16 << 20
"""A message of a WebSocket is held whole."""


class Traffic:
    """The open ports."""

    def __init__(self, client: AsyncSnapshotd) -> None:
        self._client = client
        self._folder = Path(tempfile.mkdtemp(prefix="snapshotd-e2b-"))
        self._names = itertools.count()
        self._ports: dict[tuple[str, int], asyncio.Task[_Way]] = {}

    async def pass_on(self, sandbox: str, number: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with what the server says."""
        way = await self._ensure_way(sandbox, number)
        if scope["type"] == "websocket":
            await way.websocket(WebSocket(scope, receive, send))
            return
        await way.http(Request(scope, receive), scope, receive, send)

    async def end(self, sandbox: str | None = None) -> None:
        """Cut the connections of a sandbox, or all."""
        for key in [one for one in self._ports if sandbox in (None, one[0])]:
            await self._drop(key)
        if sandbox is None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _ensure_way(self, sandbox: str, number: int) -> _Way:
        key = sandbox, number
        if key not in self._ports:
            while len(self._ports) >= _PORTS_MAX:
                await self._drop(next(iter(self._ports)))
            self._ports[key] = asyncio.create_task(self._open(sandbox, number))
        try:
            return await asyncio.shield(self._ports[key])
        except Exception:
            self._ports.pop(key, None)
            raise

    async def _open(self, sandbox: str, number: int) -> _Way:
        path = self._folder / str(next(self._names))
        return _Way(await self._client.port(sandbox, number, unix=path), path, number)

    async def _drop(self, key: tuple[str, int]) -> None:
        opened = self._ports.pop(key)
        with suppress(Exception, asyncio.CancelledError):
            await (await opened).close()


class _Way:
    """The way to one port."""

    def __init__(self, port: AsyncPort, path: Path, number: int) -> None:
        self._port, self._path, self._number = port, path, number
        self._http = httpx2.AsyncHTTPTransport(uds=str(path))
        """No client, which would keep cookies and add headers of its own: visitors share this one."""

    async def close(self) -> None:
        await self._http.aclose()
        await self._port.close()

    async def http(self, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        has_body = "content-length" in request.headers or "transfer-encoding" in request.headers
        asked = httpx2.Request(
            request.method,
            httpx2.URL(f"http://localhost:{self._number}", raw_path=_raw_path(scope)),
            headers=[*_headers_to_pass(request.headers.items()), ("host", request.headers.get("host", "localhost"))],
            content=request.stream() if has_body else None,
            extensions={"timeout": httpx2.Timeout(None, connect=_OPEN_S).as_dict()},
        )
        try:
            answered = await self._http.handle_async_request(asked)
        except (ClientDisconnect, OSError):
            return
        except httpx2.HTTPError as exc:
            raise WireError(
                "gone", f"the sandbox is running but port {self._number} is not open: The port is not open"
            ) from exc
        response = StreamingResponse(_raw(answered), answered.status_code)
        response.raw_headers = [
            (name.lower(), value) for name, value in answered.headers.raw if name.lower().decode() not in _OF_CONNECTION
        ]
        await response(scope, receive, send)

    async def websocket(self, socket: WebSocket) -> None:
        skipped = {
            "host",
            "sec-websocket-key",
            "sec-websocket-version",
            "sec-websocket-extensions",
            "sec-websocket-protocol",
        }
        headers = [(name, value) for name, value in _headers_to_pass(socket.headers.items()) if name not in skipped]
        host = socket.headers.get("host", "localhost")
        try:
            upstream = unix_connect(
                str(self._path),
                f"ws://{host}{_raw_path(socket.scope).decode('ascii')}",
                additional_headers=headers,
                subprotocols=[Subprotocol(one) for one in socket.scope["subprotocols"]] or None,
                open_timeout=_OPEN_S,
                max_size=_MESSAGE_MAX_BYTES,
                user_agent_header=None,
                compression=None,
            )
            async with upstream as server:
                await socket.accept(server.subprotocol)
                await _both(_from_client(socket, server), _from_server(socket, server))
        except InvalidStatus:
            await socket.close(1011)
        except (OSError, TimeoutError, InvalidHandshake):
            await socket.close(1013)


async def _both(*ways: Any) -> None:
    """Runs both until one has ended."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _from_client(socket: WebSocket, server: Any) -> None:
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            await server.close(message.get("code") or 1000)
            return
        with suppress(ConnectionClosed):
            await server.send(message["text"] if message.get("text") is not None else message.get("bytes") or b"")


async def _from_server(socket: WebSocket, server: Any) -> None:
    with suppress(WebSocketDisconnect, RuntimeError):
        async for message in server:
            if isinstance(message, str):
                await socket.send_text(message)
            else:
                await socket.send_bytes(message)
        await socket.close(server.close_code or 1000)


async def _raw(answered: httpx2.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answered.aiter_raw():
            yield piece
    finally:
        await answered.aclose()


def _headers_to_pass(headers: Any) -> list[tuple[str, str]]:
    """The headers of a request that are for the server in the sandbox."""
    listed = [(name.lower(), value) for name, value in headers]
    named = {one.strip().lower() for name, value in listed if name == "connection" for one in value.split(",")}
    return [one for one in listed if one[0] not in _OF_CONNECTION | _OURS | named | {"host"}]


def _raw_path(scope: Scope) -> bytes:
    query: bytes = scope.get("query_string", b"")
    path: bytes = scope.get("raw_path") or b"/"
    return path + (b"?" + query if query else b"")
