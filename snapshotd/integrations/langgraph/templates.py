"""Messages that were read before, as templates: to copy one takes a fifth of the time in which a serialiser makes it.

The messages of a growing list come with every checkpoint that is read, and each caller gets objects of its own, which it
may change. A piece of such a list is whole elements (cutting.py), and its row never changes, so what was made of it once
is copied from then on. This holds for LangChain's own messages that LangGraph's own serialiser makes, whose fields are
plain; every other value is made as ever.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
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
_set = object.__setattr__


class Held(NamedTuple):
    """A serialised value: its head, and the pieces behind it with the numbers of their rows."""

    kind: str
    head: bytes
    rows: Sequence[int]
    pieces: Sequence[bytes]


class Template(NamedTuple):
    """A message that is only copied, never changed."""

    kind: type[BaseMessage]
    fields: dict[str, Any]
    deep: tuple[str, ...]
    """Names of the fields that are lists or dictionaries."""
    given: set[str]
    """Names of the fields that were given to its class (pydantic's `model_fields_set`)."""
    open: bool
    """True if its class takes further fields; it has none."""


class Templates:
    """Thread-safe."""

    def __init__(self) -> None:
        self._made: OrderedDict[int, tuple[Template, ...]] = OrderedDict()
        """By the piece's row. An empty one: a piece that is not made of messages."""
        self._sizes: dict[int, int] = {}
        self._size = 0
        self._seen: set[int] = set()
        self._guard = threading.Lock()

    def load(self, serde: SerializerProtocol, value: Held) -> Any:
        """The value. UsageError: its class, or that of an item of a list, cannot be read back."""
        if value.kind == "msgpack" and value.rows and value.head and type(serde) is JsonPlusSerializer:
            copied = self._copy_known(serde, value)
            if copied is not None:
                return copied
        return load(serde, value.kind, b"".join([value.head, *value.pieces]))

    def _copy_known(self, serde: SerializerProtocol, value: Held) -> list[BaseMessage] | None:
        """The list's messages: copies of those that were read before, the others made anew. None: the list has elements that
        are no messages, or most of it is new."""
        if self._is_mostly_new(value.rows):
            return None
        kept = [self._made.get(row) for row in value.rows]
        if () in kept:
            return None
        new = [place for place, templates in enumerate(kept) if templates is None]
        made = self._learn(serde, value, new) if new else []
        if made is None:
            return None
        found: list[BaseMessage] = []
        fresh = iter(made)
        for templates in kept:
            found += next(fresh) if templates is None else map(_copy, templates)
        return found if len(found) == _count(value.head) else None

    def _learn(self, serde: SerializerProtocol, value: Held, new: Sequence[int]) -> list[list[BaseMessage]] | None:
        """Make the messages of each of these pieces, and keep them as templates. None: they are too many, or a piece has
        something that is no message."""
        pieces = [value.pieces[place] for place in new]
        if sum(map(len, pieces)) > _KEPT_BYTES:
            return None
        counts = [run_of_extensions(piece) for piece in pieces]
        items = (
            load(serde, "msgpack", b"\xdd" + sum(counts).to_bytes(4, "big") + b"".join(pieces)) if all(counts) else []
        )
        made, at = [], 0
        for place, count in zip(new, counts, strict=True):
            made.append(items[at : at + count])
            at += count
            templates = tuple(map(_template, made[-1]))
            self._keep(
                value.rows[place], tuple(filter(None, templates)) if all(templates) else (), len(value.pieces[place])
            )
        return made if all(counts) else None

    def _is_mostly_new(self, rows: Sequence[int]) -> bool:
        """True if half of the pieces or more are read for the first time: a program that reads once would gain nothing
        by templates."""
        unseen = set(rows) - self._seen
        if unseen:
            with self._guard:
                if len(self._seen) > _SEEN_PIECES:
                    self._seen.clear()
                self._seen |= unseen
        return 2 * len(unseen) >= len(rows)

    def _keep(self, row: int, templates: tuple[Template, ...], size: int) -> None:
        with self._guard:
            self._size += size - self._sizes.get(row, 0)
            self._made[row], self._sizes[row] = templates, size
            while self._size > _KEPT_BYTES:
                self._size -= self._sizes.pop(self._made.popitem(last=False)[0])


def _template(value: Any) -> Template | None:
    """The template of a message. None: the value is no message of LangChain's, or a field of it is not plain."""
    kind: type[BaseMessage] = type(value)
    if not _is_message(kind) or value.__pydantic_private__ or value.__pydantic_extra__:
        return None
    fields = value.__dict__
    deep = tuple([name for name, item in fields.items() if type(item) not in _SCALARS])
    for name in deep:
        if not _is_plain(fields[name]):
            return None
    is_open = value.__pydantic_extra__ is not None
    return Template(kind, _copy_fields(fields, deep), deep, value.__pydantic_fields_set__.copy(), is_open)


@cache
def _is_message(kind: type) -> bool:
    return kind.__module__.startswith("langchain_core.messages.") and issubclass(kind, BaseMessage)


def _copy(template: Template) -> BaseMessage:
    """Copy a message as pydantic's `__copy__`, in a third of its time."""
    kind, fields, deep, given, is_open = template
    made = kind.__new__(kind)
    _set(made, "__dict__", _copy_fields(fields, deep))
    _set(made, "__pydantic_fields_set__", given.copy())
    _set(made, "__pydantic_extra__", {} if is_open else None)
    _set(made, "__pydantic_private__", None)
    return made


def _copy_fields(fields: dict[str, Any], deep: tuple[str, ...]) -> dict[str, Any]:
    copied = fields.copy()
    for name in deep:
        value = copied[name]
        copied[name] = _copy_plain(value) if value else type(value)()
    return copied


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                return False
        value = value.values()
    elif type(value) is not list:
        return type(value) in _SCALARS
    return all([type(item) in _SCALARS or _is_plain(item) for item in value])


def _copy_plain(value: Any) -> Any:
    if type(value) is dict:
        return {key: item if type(item) in _SCALARS else _copy_plain(item) for key, item in value.items()}
    return [item if type(item) in _SCALARS else _copy_plain(item) for item in value]


def _count(head: bytes) -> int:
    """The number of elements of an array with this header."""
    return head[0] & 15 if len(head) == 1 else int.from_bytes(head[1:], "big")
