"""One exchange with the daemon, apart from how its bytes are moved: the request's bytes, the answer's bytes, and the
errors that they stand for. Nothing here reads or writes, so both clients use it. Standard library only: `http.client`
alone takes a third of the time in which this package may be imported.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from snapshotd.api.record import Request, encode
from snapshotd.api.wire import (
    API_PREFIX,
    API_VERSION,
    BODY_MAX_BYTES,
    FRAME_DATA,
    FRAME_EVENT,
    FRAME_HEADER,
    FRAME_MAX_BYTES,
    KEY_HEADER,
    RECALL_HEADER,
    VERSION_HEADER,
    body_max_bytes,
)
from snapshotd.client.local.signatures import check_request
from snapshotd.errors import (
    DaemonUnavailable,
    InternalError,
    LimitExceeded,
    NotPermitted,
    SnapshotdError,
    UsageError,
    VersionMismatch,
    error_of,
)

Query = Mapping[str, str | int | bool | None]
"""None: it is left out."""
READ_BYTES = 1 << 16
UPLOAD_BYTES = 1 << 18
DYING_TRIES = 3
LINE_MAX_BYTES = 64 << 20
"""One NDJSON line: a megabyte of output in base64 is the usual most; this bounds a broken peer."""
_HEAD_MAX_BYTES = 64 << 10
_SIZE_MAX_BYTES = 1 << 10
"""The line that says how long a chunk is."""
_LOST = (
    "the daemon went away in the middle of the answer; everything it had captured is safe: run `snapshotd log` or the next command, "
    "which starts it again, and look at its daemon.log for the reason"
)
AGAIN_S = 10.0
"""A service manager starts the next daemon within that."""
_AGAIN_MOST = 3
"""A request that ends one daemon after the other is given up."""


class DaemonAway(DaemonUnavailable):
    """No daemon answered, or the connection ended before the answer did. A successor may be there soon."""

    @property
    def code(self) -> str:
        return DaemonUnavailable.__name__


class AnswerLost(DaemonAway):
    """The connection ended before the answer did: the daemon may have done what was asked."""


def answer_lost() -> AnswerLost:
    return AnswerLost(_LOST)


def answer_lost_in_plain(place: str) -> AnswerLost:
    """No answer began at an http:// address. A daemon that listens with TLS closes such a connection without a word."""
    return AnswerLost(
        f"{place} closed the connection without an answer: if the daemon listens there with TLS, write https:// in place of http://; "
        "else it went away, and the next command says more"
    )


def new_key() -> str:
    """A name for a request that makes something: the daemon makes it once, however often it is asked."""
    named = _NAMED.get()
    return os.urandom(16).hex() if named is None else next(named)


_NAMED: ContextVar[Iterator[str] | None] = ContextVar("named", default=None)


@contextmanager
def use_keys(name: str) -> Iterator[None]:
    """Requests within get keys that follow from `name` and their order: whoever repeats them under the same name, in
    another process too, gets what the first ones have made. For this thread, or task, and the tasks that it starts."""
    from hashlib import blake2b  # only then: it loads OpenSSL

    keys = (
        blake2b(f"{number} {name}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest() for number in count()
    )
    before = _NAMED.set(keys)
    try:
        yield
    finally:
        _NAMED.reset(before)


class Again:
    """Says when to ask again, under its key, a request whose answer was lost: at once, then with growing pauses (nothing
    tells when the next daemon is there)."""

    def __init__(self, key: str | None, patience_s: float) -> None:
        """`key` None: never. `patience_s`: after a loss, how long to look for a daemon."""
        self._key, self._patience_s = key, patience_s
        self._until, self._pause_s = 0.0, 0.0
        self._lost: list[AnswerLost] = []

    def pause_s(self, failed: DaemonAway) -> float:
        """Seconds to wait. Where that was the last time, or it is not safe (a request without a key may be done twice),
        raises the error that the answer was lost by; or `failed`, if no request was sent."""
        now = time.monotonic()
        if self._key is not None and isinstance(failed, AnswerLost):
            self._lost.append(failed)
            self._until, self._pause_s = now + self._patience_s, 0.0
        if now >= self._until or len(self._lost) > _AGAIN_MOST:
            raise self._lost[0] if self._lost else failed
        pause_s, self._pause_s = self._pause_s, min(max(2 * self._pause_s, 0.02), 0.5)
        return pause_s


def too_late(timeout_s: float | None) -> DaemonUnavailable:
    return DaemonUnavailable(
        f"the daemon has not answered within {timeout_s:g} s, the client's request timeout; it may still do what was asked: look "
        f"at what is there before you repeat it, or give the client a longer `request_timeout`"
    )


def segment(ref: str) -> str:
    """A ref as one segment of a URL path."""
    return quote(ref, safe="")


def members_of(query: Request) -> Query:
    """A record as the query of a request, which leaves out what the daemon takes anyway. UsageError: a member has another type
    than its annotation says, or is out of its bounds."""
    check_request(query)
    members: Query = {name: value for name, value in vars(query).items() if value != vars(type(query)).get(name)}
    return members


def request_bytes(
    method: str, path: str, query: Query | None, body: Any, *, key: str | None = None, recall: bool = False
) -> bytes:
    """A whole request whose body is JSON, or that has none (None). `recall`: the daemon makes nothing, and answers from
    what an earlier request under the key has made. LimitExceeded: no daemon takes it."""
    named = {**_named(key), **({RECALL_HEADER: "true"} if recall else {})}
    if body is None:
        return _head(method, path, query, {**named, **({"Content-Length": "0"} if method in ("POST", "PUT") else {})})
    data = line_bytes(body, body_max_bytes(path))
    headers = {**named, "Content-Type": "application/json", "Content-Length": str(len(data))}
    return _head(method, path, query, headers) + data


def begin_bytes(path: str, query: Query | None, content_type: str, key: str | None = None) -> bytes:
    """The head of a POST whose body comes in chunks."""
    return _head("POST", path, query, {**_named(key), "Content-Type": content_type, "Transfer-Encoding": "chunked"})


def _named(key: str | None) -> dict[str, str]:
    return {} if key is None else {KEY_HEADER: key}


def chunk_bytes(data: bytes) -> bytes:
    """A part of such a body (RFC 9112, 7.1); without data, its end."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def line_bytes(body: Any, most: int = BODY_MAX_BYTES) -> bytes:
    """A JSON body. LimitExceeded: no daemon takes it. UsageError: an argument is nothing that JSON has, or none that the
    request can have."""
    if isinstance(body, Request):
        check_request(body)
    try:
        data = json.dumps(body, default=encode).encode()
    except (TypeError, ValueError) as exc:
        raise UsageError(
            f"an argument cannot be sent to the daemon: {exc}; give texts, numbers, lists and maps"
        ) from None
    if len(data) > most:
        raise LimitExceeded(f"the request has {len(data)} bytes, but {most} are the most; put large input into files")
    return data


def _head(method: str, path: str, query: Query | None, headers: dict[str, str]) -> bytes:
    texts = {True: "true", False: "false"}
    given = {
        key: texts[value] if isinstance(value, bool) else value
        for key, value in (query or {}).items()
        if value is not None
    }
    target = API_PREFIX + path + ("?" + urlencode(given) if given else "")
    fixed = {"Host": "snapshotd", VERSION_HEADER: API_VERSION, "Connection": "close"}
    lines = [f"{method} {target} HTTP/1.1", *(f"{key}: {value}" for key, value in {**fixed, **headers}.items())]
    return "\r\n".join((*lines, "", "")).encode("ascii")


class HttpAnswer:
    """Takes one answer apart as its bytes come (RFC 9112). DaemonAway when they end too early, or are no answer."""

    def __init__(self) -> None:
        self.status = 0
        """0 until the head is there."""
        self.headers: dict[str, str] = {}
        self.ended = False
        self._buffer = bytearray()
        self._chunked = False
        self._left: int | None = 0
        """Bytes that the body, or its chunk, still has; None: all until the connection ends."""
        self._behind_chunk = False

    def feed(self, data: bytes) -> bytes:
        """Take what was received (nothing: the connection has ended), and return the bytes of the body in it."""
        if self.ended:
            return b""
        if not data:
            if not self.status or self._left is not None:
                raise answer_lost()
            self.ended = True
        self._buffer += data
        if not self.status and not self._take_head():
            return b""
        if self._left is not None:
            return b"".join(self._take_body())
        body = bytes(self._buffer)
        self._buffer.clear()
        return body

    def _take_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _HEAD_MAX_BYTES:
                raise answer_lost()
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        self.headers = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        try:
            self.status = int(first.split(" ")[1])
            length = int(self.headers["content-length"]) if "content-length" in self.headers else None
        except (IndexError, ValueError):
            raise answer_lost() from None
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        self._left = 0 if self._chunked else length
        self.ended = self.status == 204 or (self._left == 0 and not self._chunked)
        return True

    def _take_body(self) -> list[bytes]:
        pieces = []
        while not self.ended and (self._buffer if self._left or not self._chunked else self._next_chunk()):
            assert self._left is not None
            pieces.append(bytes(self._buffer[: self._left]))
            del self._buffer[: self._left]
            self._left -= len(pieces[-1])
            self._behind_chunk = not self._left
            self.ended = not self._left and not self._chunked
        return pieces

    def _next_chunk(self) -> bool:
        """Take the line that tells the size of a chunk. True if it was there, and bytes of the chunk are."""
        start = 2 if self._behind_chunk else 0
        end = self._buffer.find(b"\r\n", start)
        if end < 0:
            if len(self._buffer) > _SIZE_MAX_BYTES:
                raise answer_lost()
            return False
        try:
            self._left = int(self._buffer[start:end].split(b";")[0], 16)
        except ValueError:
            raise answer_lost() from None
        del self._buffer[: end + 2]
        self._behind_chunk = False
        self.ended = not self._left
        return bool(self._buffer) and not self.ended


def check_answer(answer: HttpAnswer) -> None:
    """VersionMismatch: it comes from a daemon of another version."""
    theirs = answer.headers.get(VERSION_HEADER.lower())
    if theirs != API_VERSION:
        raise VersionMismatch(
            f"the daemon speaks API version {ascii(theirs or 'unknown')[1:40]}, but this client speaks {API_VERSION}; run "
            f"`snapshotd daemon --stop` and repeat the command, which starts a daemon of the client's version"
        )


def failure(status: int, text: bytes) -> SnapshotdError:
    """The error that an answer with such a status is."""
    try:
        return error_of(json.loads(text))
    except (ValueError, KeyError, TypeError):
        return InternalError(
            f"the daemon answered with HTTP status {status} and no error that this client understands; see its daemon.log"
        )


def event_of(line: bytes) -> dict[str, Any]:
    """The event of an answer's line. An `error` event is raised as the error it carries."""
    event: dict[str, Any] = json.loads(line)
    if event.get("event") == "error":
        raise error_of(event)
    return event


class LineSplitter:
    """Bytes as lines. `rest`: what came behind the last one."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are whole by now. InternalError for one that is too long."""
        *whole, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > LINE_MAX_BYTES:
            raise InternalError(
                f"the daemon sent a line of more than {LINE_MAX_BYTES >> 20} MiB, which is no part of its API"
            )
        return whole


class FrameSplitter:
    """Bytes as the frames of `wire.FRAMES`. `ended` after the `result` event."""

    def __init__(self) -> None:
        self.ended = False
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes | dict[str, Any]]:
        """The frames that are whole by now. An `error` event is raised as the error it carries."""
        self._buffer += data
        while not self.ended and len(self._buffer) >= FRAME_HEADER.size:
            kind, length = FRAME_HEADER.unpack_from(self._buffer)
            if length > {FRAME_DATA: FRAME_MAX_BYTES, FRAME_EVENT: LINE_MAX_BYTES}.get(kind, -1):
                raise InternalError(
                    f"the daemon sent a frame of kind {kind} with {length} bytes, which is no part of its API"
                )
            end = FRAME_HEADER.size + length
            if len(self._buffer) < end:
                return
            content = bytes(self._buffer[FRAME_HEADER.size : end])
            del self._buffer[:end]
            if kind == FRAME_DATA:
                yield content
                continue
            event = event_of(content)
            self.ended = event.get("event") == "result"
            yield event


def unreachable(exc: OSError, socket_path: Path) -> SnapshotdError:
    """The error that a failure to connect is."""
    if exc.errno in (errno.EACCES, errno.EPERM):
        return NotPermitted(
            f"user {os.geteuid()} may not use the daemon's socket {socket_path}, {_owner_of(socket_path)}"
        )
    return DaemonAway(
        f"no daemon answers on {socket_path} ({exc.strerror}); start it with `sudo snapshotd daemon`, or name the right place "
        f"with --state-dir or --socket"
    )


def _owner_of(socket_path: Path) -> str:
    """The user whom a socket serves, and the way to be that user."""
    try:
        owner = os.stat(socket_path).st_uid
    except OSError:
        return _why_way_is_closed(socket_path)
    if owner == 0:
        return "which serves root only; run the command with sudo, or name a daemon of your own with --state-dir"
    return (
        f"which serves user {owner} only; run the command as that user, or name a daemon of your own with --state-dir"
    )


def _why_way_is_closed(socket_path: Path) -> str:
    """The directory above a socket that keeps this user out, and the next step."""
    closed = next((each for each in reversed(socket_path.absolute().parents) if not os.access(each, os.X_OK)), None)
    if closed is None or closed.stat().st_uid != os.geteuid():
        return "since a directory on the way to it is closed to that user; run the command as the user who owns it (root: with sudo)"
    mode = stat.S_IMODE(closed.stat().st_mode)
    return f"since the mode {mode:04o} of {closed} keeps that user out, whose it is; give it the mode 0700"
