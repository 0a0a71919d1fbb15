"""Requests from inside a sandbox as bytes: lines, bodies, JSON and its bounds. docs/agent-protocol.md has the table.

The sender is an attacker. Anything malformed raises `Malformed`, after which the connection is closed; nothing here
keeps more than a line and one read in memory.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from typing import Any

from snapshotd.errors import LimitExceeded, SnapshotdError, UsageError

LINE_LIMIT_BYTES = 1 << 20
DEPTH_LIMIT = 64
NODE_LIMIT = 200_000
"""JSON values in one request. A line of `[[],[],...` would otherwise become a hundred times its size in memory."""
PIECE_BYTES = 64 << 10
STALL_S = 120.0
"""A peer that stops in the middle of a request, or does not read its answer, for this long is cut off. Waiting between
requests is free."""
_TOO_LONG = f"A request's line is longer than {LINE_LIMIT_BYTES} bytes; send large values as a body."


class Malformed(Exception):  # noqa: N818 - carries the error that is shown
    """The bytes are not a request; the connection cannot go on. `error` says why."""

    def __init__(self, message: str, kind: type[SnapshotdError] = UsageError) -> None:
        super().__init__(message)
        self.error = kind(message)


class Disconnected(Exception):  # noqa: N818 - the ordinary end of a connection
    """The peer is gone, or stalled."""


class Wire:
    """One connection's bytes. Reads belong to one thread; `interrupt` may be called from any other."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._buffer = bytearray()
        self._body_left = 0

    def read_line(self) -> bytes | None:
        """The next line, or None when the peer closed between requests. Waits without limit for its first byte."""
        start = 0
        while (end := self._buffer.find(b"\n", start)) < 0:
            start = len(self._buffer)
            if start >= LINE_LIMIT_BYTES:
                raise Malformed(_TOO_LONG, LimitExceeded)
            if not self._receive(STALL_S if self._buffer else None):
                if self._buffer:
                    raise Disconnected
                return None
        if end >= LINE_LIMIT_BYTES:
            raise Malformed(_TOO_LONG, LimitExceeded)
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def expect_body(self, size: int) -> None:
        """Take the next `size` bytes for the body of the present request."""
        self._body_left = size

    def body(self) -> Iterator[bytes]:
        """The rest of the present request's body, in pieces of at most 64 KiB. Disconnected if it does not come."""
        while self._body_left:
            if not self._buffer and not self._receive(STALL_S):
                raise Disconnected
            piece = bytes(self._buffer[: self._body_left])
            del self._buffer[: len(piece)]
            self._body_left -= len(piece)
            yield piece

    def skip_body(self) -> None:
        """Read past the rest of the body, so that the next request is found."""
        for _ in self.body():
            pass

    def send(self, answer: dict[str, Any], body: bytes | None = None) -> None:
        """Send one answer. Disconnected if the peer does not take it."""
        if body is not None:
            answer = {**answer, "body_bytes": len(body)}
        try:
            self._socket.settimeout(STALL_S)
            self._socket.sendall(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
            if body is not None:
                self._socket.sendall(body)
        except OSError as exc:
            raise Disconnected from exc

    def interrupt(self) -> None:
        """Make the reading thread find the connection closed."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed already

    def close(self) -> None:
        self._socket.close()

    def _receive(self, timeout_s: float | None) -> bool:
        """Read once into the (bounded) buffer. False at the end of the stream."""
        try:
            self._socket.settimeout(timeout_s)
            data = self._socket.recv(PIECE_BYTES)
        except OSError as exc:  # TimeoutError included
            raise Disconnected from exc
        self._buffer += data
        return bool(data)


def parse_json(data: bytes) -> Any:
    """A JSON value within the bounds: strict UTF-8, finite numbers, valid Unicode, limited depth and count. Raises
    Malformed."""
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except (
        ValueError,
        RecursionError,
    ) as exc:  # UnicodeDecodeError and JSONDecodeError are ValueErrors, as are integers of 4300 digits
        reason = "nested too deeply" if isinstance(exc, RecursionError) else str(exc)[:200]
        raise Malformed(f"A request is not JSON ({reason}); send one JSON object per line.") from None
    _check_bounds(value)
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check_bounds(value: Any) -> None:
    nodes = 0
    level: list[Any] = [value]
    for _ in range(DEPTH_LIMIT):
        deeper: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                deeper.extend(node)
                deeper.extend(node.values())
            elif isinstance(node, list):
                deeper.extend(node)
            elif isinstance(node, str):
                _check_text(node)
            elif isinstance(node, float) and not math.isfinite(node):
                raise Malformed("A request holds a number beyond the range of a double; send it as text.")
        nodes += len(deeper)
        if nodes > NODE_LIMIT:
            raise Malformed(
                f"A request holds more than {NODE_LIMIT} JSON values; send large values as a body.", LimitExceeded
            )
        if not deeper:
            return
        level = deeper
    raise Malformed(f"A request's JSON is nested deeper than {DEPTH_LIMIT} levels; make it flatter.", LimitExceeded)


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Malformed("A request holds text that is not valid Unicode (a lone surrogate); escape it first.") from None
