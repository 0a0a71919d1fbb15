"""How a client reaches the server: by its standard input and output, or by HTTP on the loopback.

Every user of this machine, and every page that a browser has open, can connect to a loopback port. So over HTTP each
request needs the token of a file that only its user reads, has to name this server as its host (a name that was rebound to
the loopback address is refused), and may come from no page but one of this server's own address (there is none). There is
no other address to listen on: the protocol has no encryption of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import Callable
from typing import Any

import anyio
from mcp.server.mcpserver import MCPServer
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.message import SessionMessage
from mcp_types import INVALID_REQUEST, PARSE_ERROR, ErrorData, JSONRPCError
from pydantic import ValidationError
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from snapshotd.serving import HttpServer, listen_on

PATH = "/mcp"
_CONNECTIONS_MAX = 256


def serve_stdio(server: MCPServer[Any]) -> None:
    """Serve the one client at standard input and output until the input ends, or nobody reads the output. Calls that run
    are cancelled then."""
    try:
        anyio.run(_serve_stdio, server)
    except* (KeyboardInterrupt, asyncio.CancelledError, BrokenPipeError):
        pass


async def _serve_stdio(server: MCPServer[Any]) -> None:
    """As the SDK does; but a line that is no message has an answer, where the SDK drops it and the client waits."""
    inner = server._lowlevel_server
    checked, messages = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    async with stdio_server() as (lines, answers), anyio.create_task_group() as group:

        async def check() -> None:
            async with checked:
                async for item in lines:
                    if isinstance(item, SessionMessage):
                        await checked.send(item)
                    elif (error := _refusal(item)) is not None:
                        await answers.send(SessionMessage(error))

        group.start_soon(check)
        await inner.run(messages, answers, inner.create_initialization_options())
        group.cancel_scope.cancel()


def _refusal(failure: Exception) -> JSONRPCError | None:
    """The answer to a line that is no message, with the id of the request that it was meant to be, if that can be read.
    None: it is empty."""
    if not isinstance(failure, ValidationError):
        raise failure
    first, *_ = found = failure.errors()
    code, said = INVALID_REQUEST, "Invalid Request: it is no message of JSON-RPC 2.0"
    message: Any = next((one["input"] for one in found if one["type"] == "missing"), None)
    if first["type"] == "json_invalid":
        if not first["input"].strip():
            return None
        code, said = PARSE_ERROR, f"Parse error: {first['msg'][:200]}"
        with contextlib.suppress(ValueError, RecursionError):
            message = json.loads(first["input"])  # takes half a character, which the SDK does not
    given = message.get("id") if isinstance(message, dict) and "method" in message else None
    number = given if isinstance(given, int | str) and not isinstance(given, bool) else None
    if isinstance(number, str):
        number = number.encode("utf-8", "replace").decode()
    return JSONRPCError(jsonrpc="2.0", id=number, error=ErrorData(code=code, message=said))


def serve_http(server: MCPServer[Any], port: int, token: str, on_ready: Callable[[str], object]) -> None:
    """Serve on 127.0.0.1 until a signal; port 0 is any free one. `on_ready` gets the address. Conflict: the port is
    taken."""
    with listen_on(port) as listener:
        bound = listener.getsockname()[1]
        on_ready(f"http://127.0.0.1:{bound}{PATH}")
        app = http_app(server, bound, token)
        HttpServer(app, ws="none", limit_concurrency=_CONNECTIONS_MAX).run(sockets=[listener])


def http_app(server: MCPServer[Any], port: int, token: str) -> ASGIApp:
    """The server for requests to this port of the loopback that have the token."""
    hosts = [f"{name}:{port}" for name in ("127.0.0.1", "localhost")]
    settings = TransportSecuritySettings(allowed_hosts=hosts, allowed_origins=[f"http://{host}" for host in hosts])
    return _WithToken(server.streamable_http_app(streamable_http_path=PATH, transport_security=settings), token)


class _WithToken:
    """Lets through what has the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._wanted = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if hmac.compare_digest(given, self._wanted):
            await self._app(scope, receive, send)
            return
        told = {"error": "this server wants `Authorization: Bearer TOKEN`, with the token of the file that it named"}
        await JSONResponse(told, 401, {"www-authenticate": "Bearer"})(scope, receive, send)
