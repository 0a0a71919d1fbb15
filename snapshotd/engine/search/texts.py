"""The texts of a snapshot that can be found: what its call was given, what it printed, what was said.

They are read from the records, so secrets are markers here as they are there. At most `TEXT_BYTES` of each are taken: of an
output its beginning and its end.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from snapshotd.engine.context import Context
from snapshotd.errors import DataLoss, NotFound
from snapshotd.kernel import turns
from snapshotd.types import OutputKind, Snapshot

TEXT_BYTES = 256 << 10
_TAIL_BYTES = 64 << 10
_READ_MAX_BYTES = 8 << 20
"""An output is read to its end up to this length. A longer one has its beginning alone in the index."""
_OUTPUTS = ("error", "stdout", "stderr", "output")

_ESCAPES = re.compile("\x1b(?:\\[[0-9;?]*[ -/]*[@-~]|\\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\\\)|.)")
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_NO_WORDS = re.compile("[A-Za-z0-9+/=_-]{256,}")
"""Encoded data: an image in a message, for instance."""


@dataclass(frozen=True, slots=True)
class Text:
    """One record's text. `part`: see `api/find.py`."""

    kind: str
    part: str
    text: str
    cut: bool


def texts_of(context: Context, snapshot: Snapshot) -> Iterator[Text]:
    """All texts of a snapshot. NotFound: it was removed meanwhile."""
    yield _arguments(snapshot)
    for part in _OUTPUTS:
        found = _output(context, snapshot, part)
        if found is not None:
            yield found
    yield from _messages(context, snapshot)


def text_of(context: Context, snapshot: Snapshot, kind: str, part: str) -> str:
    """One text of a snapshot; empty if it cannot be read any more."""
    if kind == "argument":
        return _arguments(snapshot).text
    if kind == "output":
        found = _output(context, snapshot, part)
        return "" if found is None else found.text
    return next((text.text for text in _messages(context, snapshot) if text.part == part), "")


def _arguments(snapshot: Snapshot) -> Text:
    call = snapshot.call
    return _text_of_record("argument", _clean(call.name), "\n".join([call.name, *_strings(call.arguments)]))


def _messages(context: Context, snapshot: Snapshot) -> Iterator[Text]:
    own = context.catalog.conversations.own(snapshot.id)
    for number, message in enumerate(own, snapshot.messages - len(own)):
        turns.give_way()
        yield _text_of_record("message", str(number), "\n".join([message.role, *_strings(message.content)]))


def _output(context: Context, snapshot: Snapshot, part: str) -> Text | None:
    if part == "error":
        error = snapshot.call.error
        return None if error is None else _text_of_record("output", part, error)
    try:
        pieces = context.recorded_output(snapshot, cast(OutputKind, part))
        if pieces is None:
            return None
        head, tail, size = _ends(pieces)
    except (DataLoss, NotFound):
        return None
    cut = size > len(head) + len(tail)
    between = "\n…\n" if cut else ""
    return Text("output", part, _clean(head.decode(errors="replace") + between + tail.decode(errors="replace")), cut)


def _ends(pieces: Iterable[bytes]) -> tuple[bytes, bytes, int]:
    """The beginning and the end of an output, and its length as far as it was read."""
    head, size = bytearray(), 0
    tail: deque[bytes] = deque()
    held = 0
    for piece in pieces:
        turns.give_way()
        size += len(piece)
        room = TEXT_BYTES - _TAIL_BYTES - len(head)
        head += piece[: max(0, room)]
        rest = piece[max(0, room) :]
        if rest:
            tail.append(rest)
            held += len(rest)
        while tail and held - len(tail[0]) >= _TAIL_BYTES:
            held -= len(tail.popleft())
        if size > _READ_MAX_BYTES:
            return bytes(head), b"", size
    return bytes(head), b"".join(tail)[-_TAIL_BYTES:], size


def _text_of_record(kind: str, part: str, text: str) -> Text:
    return Text(kind, part, _clean(text[:TEXT_BYTES]), len(text) > TEXT_BYTES)


def _clean(text: str) -> str:
    """Text without what a terminal obeys, what is not seen, and what has no words."""
    return _NO_WORDS.sub(" ", _CONTROLS.sub(" ", _ESCAPES.sub("", text)))


def _strings(value: Any) -> Iterator[str]:
    """The texts and numbers of a JSON value, in their order, names of members too."""
    todo = [value]
    left = TEXT_BYTES
    while todo and left >= 0:
        item = todo.pop()
        if isinstance(item, dict):
            todo += [part for pair in reversed(item.items()) for part in reversed(pair)]
        elif isinstance(item, list | tuple):
            todo += reversed(item)
        elif item is not None and not isinstance(item, bool):
            text = str(item)
            left -= len(text) + 1
            yield text
