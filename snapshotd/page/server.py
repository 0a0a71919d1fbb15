"""The server of `snapshotd ui`: it gives a browser on this machine the page's files, and passes the page's requests on to
the daemon's socket, with the rights of the user who started it. The daemon knows nothing of it.

    browser  --(one-time token in the URL's fragment)-->  POST /session  --(cookie and key)-->  /v1/...  -->  the daemon

Every user of this machine, and every page that a browser has open, can connect to a loopback port. So each request has to
name this server as its host (a name that was rebound to the loopback address is refused), a request that changes something
has to come from the page itself, and all but the page's files need the session.

The session has two halves. A script of the page cannot read the cookie, but a browser sends it to every server on this
address, whatever its port: to one of another user, or to a port that a sandbox has here. The page keeps the key for its own
origin, and sends it with each request.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import secrets
import socket
from collections.abc import Callable
from functools import cache, partial
from hashlib import sha256
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from snapshotd.api.wire import API_PREFIX
from snapshotd.errors import NotFound, NotPermitted, SnapshotdError, UsageError
from snapshotd.page.bundle import join_script
from snapshotd.page.passing import PAGE, open_ways, pass_events, pass_on, send_tree
from snapshotd.page.room import PageRoom, RoomProtocol
from snapshotd.page.terminal import MESSAGE_MAX_BYTES, serve_terminal
from snapshotd.serving import HEAD_S, HttpServer, listen_on

IDLE_S = 900.0
"""The server ends when no page was open for so long."""
PAGE_KEY = "x-snapshotd-page"
"""The header with the session's key. Where a browser lets a page send no header, it is a member of the query."""
SCRIPT, STYLE = "page.js", "style.css"
"""All modules of the page in one file; and its style."""
_SIGN_IN_MAX_BYTES = 256
_STATIC = files("snapshotd.page") / "static"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".txt": "text/plain",
}
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
"""Every answer has these. The page has no script and no style but its own files; nothing may frame it, or read what it gets."""
_KEPT = "private, max-age=31536000, immutable"
"""`cache-control` of a file whose address names its content. A browser keeps what it has made of a script, too."""
_TREES, _TERMINALS, _EVENTS = "/tree/", "/terminal/", "/events/"
_PRIVATE = (f"{API_PREFIX}/", _TREES, _TERMINALS, _EVENTS)
"""Paths that need the session: all but the page's files."""


class PageServer:
    """One server for one user's browser. `address` has the token that opens the page, once."""

    def __init__(self, socket_path: str, *, port: int = 0, idle_s: float = IDLE_S) -> None:
        """Listens at once, on 127.0.0.1; port 0 is any free one. Conflict when the port is taken."""
        self._listener: socket.socket = listen_on(port)
        self.port: int = self._listener.getsockname()[1]
        self._token = secrets.token_urlsafe(24)
        room = PageRoom()
        session = _Session(self._token, room)
        app = Starlette(
            routes=[
                Route("/session", session.open, methods=["POST"]),
                Route(f"{API_PREFIX}/{{path:path}}", pass_on, methods=["GET", "POST", "PUT", "DELETE"]),
                Route(_TREES + "{ref}.tar", send_tree, methods=["GET"]),
                WebSocketRoute(_TERMINALS + "{ref}", serve_terminal),
                WebSocketRoute(_EVENTS + "{path:path}", pass_events),
                Route("/{path:path}", _file, methods=["GET"]),
            ],
            exception_handlers={SnapshotdError: _handle_error},
            lifespan=lambda app: open_ways(app, socket_path),
        )
        self._server = HttpServer(
            _Idle(_Guard(app, session, self.port), idle_s, self.stop),
            log_config=None,
            loop="asyncio",  # it closes the socket object with the connection, which `PageRoom` looks at
            http=partial(RoomProtocol, room),
            ws="websockets-sansio",
            ws_max_size=MESSAGE_MAX_BYTES,
        )

    def address(self, trajectory: str | None = None) -> str:
        """The page's address with the token in its fragment, which a browser sends to nobody; opened at a trajectory."""
        place = "" if trajectory is None else f"/t/{quote(trajectory, safe='')}"
        return f"http://127.0.0.1:{self.port}/#token={self._token}{place}"

    def run(self) -> None:
        """Serve until told to stop, by a signal too, or until no page was open for long. From the main thread."""
        self._server.run(sockets=[self._listener])

    def stop(self) -> None:
        """End `run` soon. From any thread; idempotent."""
        self._server.stop_soon()


class _Session:
    """The one session of a server: its token opens it once."""

    def __init__(self, token: str, room: PageRoom) -> None:
        self._token: str | None = token
        self._room = room
        self._cookie = self._key = ""

    async def open(self, request: Request) -> Response:
        """Exchange the token for a cookie that no script can read, and a key that no other origin gets."""
        try:
            async with asyncio.timeout(HEAD_S):
                given = json.loads(await _small_body(request))["token"]
        except (ValueError, KeyError, TypeError, TimeoutError):
            raise UsageError('the session is opened with {"token": TEXT}') from None
        if self._token is None or not _same(given, self._token):
            raise NotPermitted("this address has been used, or is not the server's; run `snapshotd ui` for a new one")
        self._token, self._cookie, self._key = None, secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        if request.client is not None:
            self._room.give_to(request.client.port)
        answer = JSONResponse({"key": self._key})
        answer.set_cookie(self._name(request), self._cookie, httponly=True, samesite="strict")
        return answer

    def holds(self, asked: HTTPConnection) -> bool:
        """True if the request has the session's cookie and its key."""
        key = asked.headers.get(PAGE_KEY) or asked.query_params.get(PAGE)
        return (
            self._token is None and _same(asked.cookies.get(self._name(asked)), self._cookie) and _same(key, self._key)
        )

    def _name(self, asked: HTTPConnection) -> str:
        return f"snapshotd-{asked.url.port}"  # cookies do not tell ports apart


async def _small_body(request: Request) -> bytes:
    """Read the body of a sign-in. ValueError: it is larger than what opens a session, or does not come."""
    body = b""
    with contextlib.suppress(ClientDisconnect):
        async for piece in request.stream():
            body += piece
            if len(body) > _SIGN_IN_MAX_BYTES:
                break
        else:
            return body
    raise ValueError("no sign-in")


def _same(given: object, kept: str) -> bool:
    return isinstance(given, str) and secrets.compare_digest(given.encode(errors="replace"), kept.encode())


class _Guard:
    """Refuses what does not come from the page, and puts the headers on every answer."""

    def __init__(self, app: ASGIApp, session: _Session, port: int) -> None:
        self._app, self._session = app, session
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = list(message.get("headers", ()))
                own = ((name.encode(), value.encode()) for name, value in _HEADERS.items())
                is_kept = (b"cache-control", _KEPT.encode()) in given
                message["headers"] = given + [one for one in own if not is_kept or one[0] != b"cache-control"]
            await send(message)

        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(HTTPConnection(scope), scope.get("method", "CONNECT"))
        if refusal is None:
            await self._app(scope, receive, sending)
        elif scope["type"] == "websocket":  # the browser gets a status of 403
            await send({"type": "websocket.close", "code": 1008, "reason": refusal.message})
        else:
            await _error_response(refusal)(scope, receive, sending)

    def _refusal(self, asked: HTTPConnection, method: str) -> SnapshotdError | None:
        host, is_private = asked.headers.get("host", ""), asked.scope["path"].startswith(_PRIVATE)
        if host not in self._hosts:
            return NotPermitted("the request names another host than this server")
        if "transfer-encoding" in asked.headers:  # no browser sends it; where it ends can be read in two ways
            return NotPermitted("the request does not say how long it is")
        site = asked.headers.get("sec-fetch-site", "none")
        if site not in ("same-origin", "none") and (is_private or method != "GET"):
            return NotPermitted("the request comes from another page")
        if method != "GET" and asked.headers.get("origin") != f"http://{host}":
            return NotPermitted("the request comes from another page")
        if is_private and not self._session.holds(asked):
            return NotPermitted("no session; open the address that `snapshotd ui` prints")
        return None


class _Idle:
    """Ends the server when there was no request for a while. A page that is open has one: its stream of events."""

    def __init__(self, app: ASGIApp, idle_s: float, stop: Callable[[], None]) -> None:
        self._app, self._idle_s, self._stop = app, idle_s, stop
        self._open = 0
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self._restart_timer()
            await self._app(scope, receive, send)
            return
        self._open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1
            self._restart_timer()

    def _restart_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._idle_s, self._end)

    def _end(self) -> None:
        if self._open == 0:
            self._stop()


async def _file(request: Request) -> Response:
    """Answer with one of the page's files."""
    found = _page_files().get(request.path_params["path"] or "index.html")
    if found is None:
        raise NotFound(f"the page has no {request.url.path}")
    media_type, data, version = found
    is_kept = request.query_params.get("v") == version
    return Response(data, media_type=media_type, headers={"cache-control": _KEPT} if is_kept else None)


@cache
def _page_files() -> dict[str, tuple[str, bytes, str]]:
    """Path to media type, content and version: only what is here can be asked for.

    The first file names the other two with their digests. Another user's server may have had this port before, and left
    the browser a script under this address: it does not run.
    """
    found: dict[str, bytes] = {}

    def collect(folder: Any, prefix: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                collect(entry, f"{prefix}{entry.name}/")
            elif f".{entry.name.rpartition('.')[2]}" in _TYPES:
                found[prefix + entry.name] = entry.read_bytes()

    collect(_STATIC, "")
    found[SCRIPT] = join_script().encode()
    for name in (SCRIPT, STYLE):
        named = f'{name}?v={_version(found[name])}" integrity="sha256-{base64.b64encode(sha256(found[name]).digest()).decode()}'
        found["index.html"] = found["index.html"].replace(f'"{name}"'.encode(), f'"{named}"'.encode())
    return {path: (_TYPES[f".{path.rpartition('.')[2]}"], data, _version(data)) for path, data in found.items()}


def _version(data: bytes) -> str:
    return sha256(data).hexdigest()[:16]


async def _handle_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, SnapshotdError)
    return _error_response(exc)


def _error_response(exc: SnapshotdError) -> Response:
    return JSONResponse(exc.as_json(), exc.http_status)
