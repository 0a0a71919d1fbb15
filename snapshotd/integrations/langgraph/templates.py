"""Messages that were read before, as templates: to copy one takes a third of the time in which a serialiser makes it.

The messages of a growing list come with every checkpoint that is read, and each caller gets objects of its own, which it
may change. A piece of such a list is whole elements (cutting.py), and its row never changes, so what was made of it once
is copied from then on. This holds for LangChain's own messages that LangGraph's own serialiser makes, whose fields are
plain; every other value is made as ever.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from langchain_core.messages import BaseMessage
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from snapshotd.integrations.langgraph.cutting import run_of_extensions
from snapshotd.integrations.langgraph.readable import load

_KEPT_BYTES = 16 << 20
"""Bytes of serialised messages; as objects they take four times as much."""
_SEEN_PIECES = 1 << 16
_SCALARS = frozenset((str, int, float, bool, bytes, type(None)))


class Held(NamedTuple):
    """A serialised value: its head, and the pieces behind it with the numbers of their rows."""

    kind: str
    head: bytes
    rows: Sequence[int]
    pieces: Sequence[bytes]


class Templates:
    """Thread-safe."""

    def __init__(self) -> None:
        self._made: OrderedDict[int, tuple[BaseMessage, ...]] = OrderedDict()
        """By the piece's row. An empty one: a piece that is not made of messages."""
        self._sizes: dict[int, int] = {}
        self._size = 0
        self._seen: set[int] = set()
        self._guard = threading.Lock()

    def load(self, serde: SerializerProtocol, value: Held) -> Any:
        """The value. UsageError: its class, or that of an item of a list, cannot be read back."""
        copied = self._copied(serde, value) if value.kind == "msgpack" and value.rows and value.head else None
        return load(serde, value.kind, b"".join([value.head, *value.pieces])) if copied is None else copied

    def _copied(self, serde: SerializerProtocol, value: Held) -> list[BaseMessage] | None:
        made = self._made
        new = [place for place, row in enumerate(value.rows) if row not in made]
        if new and not self._learn(serde, value, new):
            return None
        found: list[BaseMessage] = []
        for row in value.rows:
            templates = made.get(row)
            if not templates:
                return None
            found += map(_copy, templates)
        return found if len(found) == _count(value.head) else None

    def _learn(self, serde: SerializerProtocol, value: Held, new: Sequence[int]) -> bool:
        """Make templates of the new pieces, unless most of the value is read for the first time: a program that reads
        once would gain nothing."""
        if type(serde) is not JsonPlusSerializer:
            return False
        rows = [value.rows[place] for place in new]
        with self._guard:
            unseen = set(rows) - self._seen
            if 2 * len(unseen) > len(value.rows):
                if len(self._seen) > _SEEN_PIECES:
                    self._seen.clear()
                self._seen |= unseen
                return False
        if sum(map(len, value.pieces)) > _KEPT_BYTES:
            return False
        for place, row in zip(new, rows, strict=True):
            templates = _templates(serde, value.pieces[place])
            with self._guard:
                self._size += len(value.pieces[place]) - self._sizes.get(row, 0)
                self._made[row], self._sizes[row] = templates, len(value.pieces[place])
                while self._size > _KEPT_BYTES:
                    self._size -= self._sizes.pop(self._made.popitem(last=False)[0])
        return True


def _templates(serde: SerializerProtocol, piece: bytes) -> tuple[BaseMessage, ...]:
    count = run_of_extensions(piece)
    if not 0 < count < 16:
        return ()
    made = load(serde, "msgpack", bytes([0x90 | count]) + piece)
    return tuple(made) if all(map(_can_be_copied, made)) else ()


def _can_be_copied(value: Any) -> bool:
    return (
        isinstance(value, BaseMessage)
        and type(value).__module__.startswith("langchain_core.messages.")
        and not value.__pydantic_private__
        and not value.__pydantic_extra__
        and all(map(_is_plain, value.__dict__.values()))
    )


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    return all(map(_is_plain, value)) if type(value) is list else type(value) in _SCALARS


def _copy(template: BaseMessage) -> BaseMessage:
    made = copy.copy(template)
    fields = made.__dict__
    for name, value in fields.items():
        if type(value) not in _SCALARS:
            fields[name] = _copy_plain(value)
    return made


def _copy_plain(value: Any) -> Any:
    if type(value) is dict:
        return {key: item if type(item) in _SCALARS else _copy_plain(item) for key, item in value.items()}
    return [item if type(item) in _SCALARS else _copy_plain(item) for item in value]


def _count(head: bytes) -> int:
    """The number of elements of an array with this header."""
    return head[0] & 15 if len(head) == 1 else int.from_bytes(head[1:], "big")
