"""Server-sent events, read while their bytes pass: https://html.spec.whatwg.org/multipage/server-sent-events.html
section 9.2.6."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
"""A carriage return at the very end may be the first half of a line end that is still on its way."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its type (`message` unless said) and its data lines, joined."""

    type: str
    data: bytes


class EventReader:
    """Takes a stream's bytes in any pieces.

    Holds at most one event, of about `limit_bytes`; beyond, `overflow` is set and nothing is read any more.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.overflow = False
        self._limit = limit_bytes
        self._line: list[bytes] = []
        self._held = 0
        self._type = b""
        self._data: list[bytes] = []
        self._first = True

    def feed(self, piece: bytes) -> list[Event]:
        """The events that `piece` completes."""
        if self.overflow or not piece:
            return []
        self._held += len(piece)
        if b"\n" not in piece and b"\r" not in piece and not (self._line and self._line[-1].endswith(b"\r")):
            self._line.append(piece)
            lines: list[bytes] = []
        else:
            *lines, rest = _LINE_END.split(b"".join((*self._line, piece)))
            self._line = [rest] if rest else []
        events = [event for line in lines if (event := self._take(line)) is not None]
        if self._held > self._limit:
            self.overflow = True
            self._line, self._data = [], []
        return events

    def _take(self, line: bytes) -> Event | None:
        if self._first:
            self._first = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._type = value
        return None

    def _dispatch(self) -> Event | None:
        kind, data = self._type, self._data
        self._type, self._data = b"", []
        self._held = sum(map(len, self._line))
        return Event(kind.decode("utf-8", "replace") or "message", b"\n".join(data)) if data else None
