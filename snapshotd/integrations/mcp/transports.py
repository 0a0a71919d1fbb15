"""How a client reaches the server: by its standard input and output, or by HTTP on the loopback.

Every user of this machine, and every page that a browser has open, can connect to a loopback port. So over HTTP each
request needs the token of a file that only its user reads, has to name this server as its host (a name that was rebound to
the loopback address is refused), and may come from no page but one of this server's own address (there is none). There is
no other address to listen on: the protocol has no encryption of its own.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from typing import Any

import anyio
from mcp.server.mcpserver import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from snapshotd.serving import HttpServer, listen_on

PATH = "/mcp"
_CONNECTIONS_MAX = 256


def serve_stdio(server: MCPServer[Any]) -> None:
    """Serve the one client at standard input and output until the input ends. Calls that run are cancelled then."""
    try:
        anyio.run(server.run_stdio_async)
    except (KeyboardInterrupt, asyncio.CancelledError):
        pass


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
