"""The gate that every request passes first: the version check, the bound on its body, one line in the log, and the count of requests."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

import snapshotd
from snapshotd.api.operations import OPERATIONS
from snapshotd.api.wire import API_PREFIX, API_VERSION, VERSION_HEADER, body_max_bytes
from snapshotd.daemon.access.access import Access
from snapshotd.daemon.access.audit import PATH_CHARS, Audit
from snapshotd.daemon.access.limits import BODY_S
from snapshotd.daemon.access.principals import PRINCIPAL
from snapshotd.daemon.http.counting import RequestCounts
from snapshotd.daemon.http.peer import PEER_TRANSPORT
from snapshotd.errors import LimitExceeded, NotPermitted, SnapshotdError, VersionMismatch

log = logging.getLogger("snapshotd.request")
_HEADER = VERSION_HEADER.lower().encode()
_UPLOADS = re.compile(
    "|".join(API_PREFIX + re.sub(r"\{\w+\}", "[^/]+", row.path) for row in OPERATIONS.values() if row.is_upload)
)
"""The paths of operations whose body may have any size: it is read piece by piece, and its reader sets the bounds."""


class _BodyTooLarge(Exception):  # noqa: N818 - never leaves this module
    pass


class VersionGate:
    """ASGI middleware. A request without a version header is let through (curl); one of another version is not. One that
    comes from another machine is for a caller that shows a token."""

    def __init__(
        self, app: ASGIApp, pid: int, counts: RequestCounts, access: Access, audit: Callable[[], Audit | None]
    ) -> None:
        """`audit`: None where no record of requests is kept."""
        self._app = app
        self._pid = pid
        self._counts = counts
        self._access, self._audit = access, audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic_ns()
        status = 0
        leave: Callable[[], None] | None = None

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (_HEADER, API_VERSION.encode())]
                self._record(scope, status)
            await send(message)

        try:
            try:
                leave = self._enter(scope)
            except SnapshotdError as exc:
                known = {NotPermitted: 401, LimitExceeded: 429}
                await _answer(sending, exc, known.get(type(exc)))
                return
            refusal = self._refusal(scope)
            if refusal is not None:
                await _answer(sending, refusal)
            elif _is_upload(scope):
                await self._app(scope, receive, sending)
            else:
                await self._limit_body(scope, receive, sending)
        finally:
            if leave is not None:
                leave()
            self._counts.add(scope, status, (time.monotonic_ns() - started) / 1e9)
            log.info(
                "request",
                extra={
                    "fields": {
                        "method": scope["method"],
                        "path": scope["path"] if PRINCIPAL in scope["state"] else scope["path"][:PATH_CHARS],
                        "status": status,
                        "duration_ms": (time.monotonic_ns() - started) // 1000 / 1000,
                    }
                },
            )

    def _enter(self, scope: Scope) -> Callable[[], None] | None:
        """Find out who calls. Returns what is to be called at the end; None: nothing is. NotPermitted, LimitExceeded."""
        state = scope["state"]
        if PRINCIPAL in state:
            return None  # a user of the socket
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        state[PRINCIPAL], leave = self._access.enter(header, state[PEER_TRANSPORT].abort)
        return leave

    def _record(self, scope: Scope, status: int) -> None:
        audit = self._audit()
        if audit is None:
            return
        address = "" if scope["client"] is None else str(scope["client"][0])
        operation = getattr(scope.get("route"), "operation", None)
        audit.add(scope["state"].get(PRINCIPAL), address, scope["method"], scope["path"], operation, status)

    def _refusal(self, scope: Scope) -> SnapshotdError | None:
        headers = dict(scope["headers"])
        theirs = headers.get(_HEADER)
        if theirs is not None and theirs != API_VERSION.encode():
            shown = ascii(theirs.decode(errors="replace")[:32]).strip("'")
            return VersionMismatch(
                f"the client speaks API version {shown}, but this daemon (snapshotd {snapshotd.__version__}, pid {self._pid}) speaks "
                f"{API_VERSION}; run `snapshotd daemon --stop` and the next command starts a daemon of the client's version"
            )
        length = headers.get(b"content-length", b"0")
        most = body_max_bytes(scope["path"].removeprefix(API_PREFIX))
        if not length.isdigit() or (int(length) > most and not _is_upload(scope)):
            return _too_large(most)
        return None

    async def _limit_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen = 0
        answered = False
        most = body_max_bytes(scope["path"].removeprefix(API_PREFIX))
        deadline = None if scope["client"] is None else asyncio.get_running_loop().time() + BODY_S

        async def receiving() -> Message:
            nonlocal seen, deadline
            if deadline is None:
                message = await receive()
            else:
                try:
                    async with asyncio.timeout_at(deadline):
                        message = await receive()
                except TimeoutError:
                    return {"type": "http.disconnect"}  # as if it had gone away in the middle
                if not message.get("more_body"):
                    deadline = None
            seen += len(message.get("body", b""))
            if seen > most:
                raise _BodyTooLarge
            return message

        async def sending(message: Message) -> None:
            nonlocal answered
            if seen > most:
                return  # FastAPI's own answer to a body it could not read; ours follows
            answered = True
            await send(message)

        try:
            await self._app(scope, receiving, sending)
        except _BodyTooLarge:
            pass  # answered below
        if seen > most and not answered:
            await _answer(send, _too_large(most))


def _is_upload(scope: Scope) -> bool:
    return scope["method"] == "POST" and _UPLOADS.fullmatch(scope["path"]) is not None


def _too_large(most: int) -> SnapshotdError:
    return LimitExceeded(
        f"the request's body is larger than {most >> 20} MiB; put large input into the workspace instead"
    )


async def _answer(send: Send, failure: SnapshotdError, status: int | None = None) -> None:
    body = json.dumps(failure.as_json()).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status or failure.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
