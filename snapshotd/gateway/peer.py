"""One HTTP/1.1 connection from inside a sandbox, with h11: whole requests in, answers out, everything bounded.

A slow peer is cut off: there is a time limit for a head, for every piece of a body, for the whole body, and for taking
the answer.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import h11

from snapshotd.errors import LimitExceeded, SnapshotdError, UsageError
from snapshotd.gateway.base import NO_RETRY, Budget
from snapshotd.gateway.keys import Header

HEAD_LIMIT_BYTES = 64 << 10
IDLE_S = 300.0
"""Between requests."""
HEAD_S = 30.0
STALL_S = 60.0
"""Time for the next piece of a body, and for taking any part of an answer."""
BODY_S = 300.0
_PIECE_BYTES = 64 << 10
_LINGER_S = 2.0
_LINGER_BYTES = 4 << 20
_PATH = re.compile(r"/[A-Za-z0-9._~:@/-]{0,500}")
"""No escapes: a provider could read them as a path that is not allowed."""


class Gone(Exception):  # noqa: N818 - the ordinary end of a connection
    """The peer closed, stalled, or broke off."""


class Refused(Exception):  # noqa: N818 - carries the error that is shown
    """The client sent no request, or too much; the connection cannot go on after the answer."""

    def __init__(self, error: SnapshotdError, status: int | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.status = status or error.http_status


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request, complete. `path` has no escapes and no `..`; `query`: the text after the question mark."""

    method: str
    path: str
    query: str
    headers: list[Header] = field(repr=False)
    body: bytes = field(repr=False)

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)


class Peer:
    """A connection. Belongs to one thread, but for `interrupt`."""

    def __init__(self, connected: socket.socket, budget: Budget, body_limit_bytes: int) -> None:
        self.fd = connected.fileno()
        self._socket = connected
        self._budget = budget
        self._taken = 0
        self._body_limit = body_limit_bytes
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_LIMIT_BYTES)
        self._head: list[Header] = []
        self._wants_no_body = False
        """True if the request is a HEAD."""

    @property
    def head(self) -> list[Header]:
        """Headers of the request that is being read or answered; empty before."""
        return self._head

    def read_request(self) -> HttpRequest | None:
        """The next request, or None when there will be no other. Raises Gone and Refused."""
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        if self._http.our_state is not h11.IDLE:
            return None
        self._head, self._wants_no_body = [], False
        try:
            request = self._read_head()
            if request is None:
                return None
            self._head = list(request.headers)
            method, target = request.method.decode("ascii"), request.target.decode("ascii", "replace")
            self._wants_no_body = method == "HEAD"
            body = self._read_body(self._head)
        except h11.RemoteProtocolError as exc:
            raise Refused(
                UsageError(f"The request is not HTTP/1.1 ({exc}); correct it."), exc.error_status_hint
            ) from None
        path, _, query = target.partition("?")
        if (
            not _PATH.fullmatch(path)
            or "//" in path
            or any(part in (".", "..") for part in path.split("/"))
            or not query.isprintable()
        ):
            path = ""  # matches no route
        return HttpRequest(method, path, query, self._head, body)

    def reserve(self, amount: int) -> None:
        """Take memory for this request; given back when it is answered. Raises Refused with a status that clients try
        again after."""
        if not self._budget.take(amount):
            error = LimitExceeded(
                "The requests to models need too much memory at once; wait until some of them are answered."
            )
            raise Refused(error, 503)
        self._taken += amount

    def release(self) -> None:
        """Give back reserved memory."""
        self._budget.give(self._taken)
        self._taken = 0

    def start(self, status: int, headers: Sequence[Header], length: int | None) -> None:
        """Send the head of an answer. Without a length the body goes in chunks (to an HTTP/1.0 peer: until the
        connection ends)."""
        framing = [] if length is None else [(b"content-length", str(length).encode())]
        self._send(h11.Response(status_code=status, headers=[*headers, *framing]))

    def send(self, data: bytes) -> None:
        """Send some of the body."""
        if data:
            self._send(h11.Data(data=data))

    def end(self) -> None:
        """The body is complete. Leaving this out, and closing, is how an answer is cut."""
        self._send(h11.EndOfMessage())

    def answer(self, status: int, value: dict[str, Any], headers: Sequence[tuple[str, str]] = (NO_RETRY,)) -> None:
        """Send a complete answer of JSON."""
        body = json.dumps(value).encode()
        extra = [(name.encode(), text.encode()) for name, text in headers]
        self.whole(status, [(b"content-type", b"application/json"), *extra], body)

    def whole(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """Send a complete answer, at once: its reader is woken only once."""
        framing = (b"content-length", str(len(body)).encode())
        data = [] if self._wants_no_body else [h11.Data(data=body)]
        self._send(h11.Response(status_code=status, headers=[*headers, framing]), *data, h11.EndOfMessage())

    @property
    def answering(self) -> bool:
        """True if an answer has begun and not ended: an error can then only cut it."""
        return self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE, h11.DONE)

    def linger(self) -> None:
        """Read a little of the data that the peer is still sending, so that it sees the answer and not a reset
        connection."""
        deadline, left = time.monotonic() + _LINGER_S, _LINGER_BYTES
        try:
            self._socket.shutdown(socket.SHUT_WR)
            while left > 0 and (wait := deadline - time.monotonic()) > 0:
                self._socket.settimeout(wait)
                if not (data := self._socket.recv(_PIECE_BYTES)):
                    return
                left -= len(data)
        except OSError:
            return  # it saw it, or does not care

    def interrupt(self) -> None:
        """Make the reading or writing thread find the connection closed. Any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed already

    def close(self) -> None:
        self.release()
        self._socket.close()

    def _read_head(self) -> h11.Request | None:
        deadline: float | None = None
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Request):
                return event
            if event is not h11.NEED_DATA:
                return None  # closed between requests
            if deadline is None and self._http.trailing_data[0]:
                deadline = time.monotonic() + HEAD_S
            self._receive(IDLE_S if deadline is None else deadline - time.monotonic())
            if deadline is None:
                deadline = time.monotonic() + HEAD_S

    def _read_body(self, headers: list[Header]) -> bytes:
        announced = next((int(value) for name, value in headers if name == b"content-length"), 0)
        if announced > self._body_limit:
            raise Refused(_too_long(self._body_limit))
        if self._http.they_are_waiting_for_100_continue:
            self._send(h11.InformationalResponse(status_code=100, headers=[]))
        deadline, body = time.monotonic() + BODY_S, bytearray()
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._receive(min(STALL_S, deadline - time.monotonic()))
            elif isinstance(event, h11.Data):
                if len(body) + len(event.data) > self._body_limit:
                    raise Refused(_too_long(self._body_limit))
                self.reserve(3 * len(event.data))  # while it grows, as a whole, and as text
                body += event.data
            else:
                return bytes(body)

    def _receive(self, wait_s: float) -> None:
        if wait_s <= 0:
            raise Gone
        try:
            self._socket.settimeout(wait_s)
            data = self._socket.recv(_PIECE_BYTES)
        except OSError as exc:  # TimeoutError included
            raise Gone from exc
        self._http.receive_data(data)

    def _send(self, *events: h11.Event) -> None:
        data = b"".join(self._http.send(event) or b"" for event in events)
        try:
            self._socket.settimeout(STALL_S)
            self._socket.sendall(data)
        except OSError as exc:
            raise Gone from exc


def _too_long(limit_bytes: int) -> LimitExceeded:
    return LimitExceeded(f"The request's body is longer than {limit_bytes} bytes; send less.")
