"""Requests from inside a sandbox as bytes: lines, bodies, JSON and its bounds. docs/agent-protocol.md has the table.

The sender is an attacker. Anything malformed raises `Malformed`, after which the connection is closed; nothing here
keeps more than a line and one read in memory.
"""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
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
_CALL_ID = re.compile(r"[0-9a-f]{32}")
_RID = re.compile(r"[0-9a-f]{16,32}")
_REQUEST_ID_LIMIT = 1 << 53


class Malformed(Exception):  # noqa: N818 - carries the error that is shown
    """The bytes are not a request; the connection cannot go on. `error` says why."""

    def __init__(self, error: SnapshotdError) -> None:
        super().__init__(error.message)
        self.error = error


class Disconnected(Exception):  # noqa: N818 - the ordinary end of a connection
    """The peer is gone, or stalled."""


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """One request line. `body_bytes` raw bytes follow it if that is not None."""

    id: int
    op: str
    fields: dict[str, Any]
    body_bytes: int | None


class Wire:
    """One connection's bytes. Reads belong to one thread; `interrupt` may be called from any other."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._buffer = bytearray()
        self._body_left = 0

    def read_request(self) -> AgentRequest | None:
        """The next request, or None when the peer closed between requests. Waits without limit for its first byte."""
        line = self._read_line()
        if line is None:
            return None
        request = parse_request(line)
        self._body_left = request.body_bytes or 0
        return request

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

    def _read_line(self) -> bytes | None:
        start = 0
        while (end := self._buffer.find(b"\n", start)) < 0:
            start = len(self._buffer)
            if start >= LINE_LIMIT_BYTES:
                raise Malformed(
                    LimitExceeded(
                        f"A request's line is longer than {LINE_LIMIT_BYTES} bytes; send large values as a body."
                    )
                )
            if not self._receive(STALL_S if self._buffer else None):
                if self._buffer:
                    raise Disconnected
                return None
        if end >= LINE_LIMIT_BYTES:
            raise Malformed(
                LimitExceeded(f"A request's line is longer than {LINE_LIMIT_BYTES} bytes; send large values as a body.")
            )
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

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
        raise Malformed(UsageError(f"A request is not JSON ({reason}); send one JSON object per line.")) from None
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
                raise Malformed(UsageError("A request holds a number beyond the range of a double; send it as text."))
        nodes += len(deeper)
        if nodes > NODE_LIMIT:
            raise Malformed(
                LimitExceeded(f"A request holds more than {NODE_LIMIT} JSON values; send large values as a body.")
            )
        if not deeper:
            return
        level = deeper
    raise Malformed(LimitExceeded(f"A request's JSON is nested deeper than {DEPTH_LIMIT} levels; make it flatter."))


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Malformed(
            UsageError("A request holds text that is not valid Unicode (a lone surrogate); escape it first.")
        ) from None


def parse_request(line: bytes) -> AgentRequest:
    """One line as a request. Raises Malformed."""
    fields = parse_json(line)
    if not isinstance(fields, dict):
        raise Malformed(UsageError("A request is not a JSON object; send one object per line."))
    request_id = fields.pop("id", None)
    if type(request_id) is not int or not 0 <= request_id < _REQUEST_ID_LIMIT:
        raise Malformed(UsageError("A request's id is not an integer from 0 to 2^53; number the requests."))
    op = fields.pop("op", None)
    if not isinstance(op, str) or len(op) > 64:
        raise Malformed(
            UsageError("A request's op is not the name of a request; see the table in docs/agent-protocol.md.")
        )
    body_bytes = fields.pop("body_bytes", None)
    if body_bytes is not None and (type(body_bytes) is not int or not 0 <= body_bytes < 1 << 62):
        raise Malformed(
            UsageError("A request's body_bytes is not a number of bytes; leave it out when there is no body.")
        )
    return AgentRequest(request_id, op, fields, body_bytes)


# -- fields ------------------------------------------------------------------------------------------------------------


def label(fields: dict[str, Any], key: str, limit: int) -> str:
    """A printable text of 1 to `limit` characters. People see it in lists, so it holds nothing that moves a cursor."""
    value = fields.get(key)
    if not isinstance(value, str) or not 1 <= len(value) <= limit or not value.isprintable():
        raise Malformed(
            UsageError(f"The field {key} is not a text of 1 to {limit} printable characters; correct the request.")
        )
    return value


def call_id(fields: dict[str, Any]) -> str:
    value = fields.get("call")
    if not isinstance(value, str) or not _CALL_ID.fullmatch(value):
        raise Malformed(
            UsageError("The field call is not an id of 32 hexadecimal characters; make a random one for each call.")
        )
    return value


def request_name(fields: dict[str, Any]) -> str | None:
    """The field rid, of a request that may be sent again; None where there is none."""
    value = fields.get("rid")
    if value is not None and (not isinstance(value, str) or not _RID.fullmatch(value)):
        raise Malformed(
            UsageError("The field rid is not 16 to 32 hexadecimal characters; make random ones, or leave it out.")
        )
    return value


def optional_text(fields: dict[str, Any], key: str) -> str | None:
    value = fields.get(key)
    if value is not None and not isinstance(value, str):
        raise Malformed(UsageError(f"The field {key} is not a text; correct the request or leave it out."))
    return value


def integer(fields: dict[str, Any], key: str, low: int, high: int, default: int | None = None) -> int:
    """An integer from `low` to `high`."""
    value = fields.get(key, default)
    if type(value) is not int or not low <= value <= high:
        raise Malformed(UsageError(f"The field {key} is not an integer from {low} to {high}; correct the request."))
    return value


def boolean(fields: dict[str, Any], key: str, *, default: bool = False) -> bool:
    """True or false; `default` when it is left out."""
    value = fields.get(key, default)
    if not isinstance(value, bool):
        raise Malformed(UsageError(f"The field {key} is neither true nor false; correct the request."))
    return value


def one_of(fields: dict[str, Any], key: str, choices: list[str], default: str | None = None) -> str:
    """One of a few words."""
    value = fields.get(key, default)
    if not isinstance(value, str) or value not in choices:
        raise Malformed(UsageError(f"The field {key} is none of {', '.join(choices)}; correct the request."))
    return value


def optional_label(fields: dict[str, Any], key: str, limit: int) -> str | None:
    """As `label`, or None when it is left out."""
    return None if fields.get(key) is None else label(fields, key, limit)
