"""Reading values back, without the silence of LangGraph's serialiser about a class that is gone.

`JsonPlusSerializer` returns the bare fields of an object whose class cannot be imported or made, or is not in its list
of allowed ones, and a program goes on with a dictionary where it had put an object.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

import ormsgpack
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer

from snapshotd.errors import UsageError
from snapshotd.integrations.langgraph.cutting import EXTENSIONS, elements

_BARE = frozenset((dict, list, tuple, str, int, float, bool, bytes, type(None)))
"""The classes of bare fields, themselves: an enum that is a text, or a named tuple, is an object that came back."""
_CLASSES = (0, 1, 2, 4, 5)
"""The extension types of langgraph.checkpoint.serde.jsonplus that name a class."""
_MAY_NAME = re.compile(rb"[\xc7-\xc9\xd4-\xd8].{0,4}[\x00-\x05][\x93\x94][\xa0-\xbf\xd9]", re.DOTALL)
"""The beginning of such a value: quickly says of most lists that they hold none."""


class Dumper:
    """Serialises what can be read back, and nothing else. Thread-safe."""

    def __init__(self) -> None:
        self._readable: set[Any] = set()
        """Classes that were read back; of an enum its members, since one may be readable and another not."""

    def dump(self, serde: SerializerProtocol, value: Any) -> tuple[str, bytes]:
        """As `dumps_typed`, whose errors it has. UsageError: `load` would refuse it; a thread would be stuck there. Each
        class is tried once."""
        kind, data = serde.dumps_typed(value)
        new = _objects(value) - self._readable
        if new:
            loaded = load(serde, kind, bytes(data))
            if isinstance(value, bytes | bytearray) and type(loaded) is not type(value):
                raise _unreadable(type(value).__module__, type(value).__qualname__)
            self._readable |= new
        return kind, data


def _objects(value: Any) -> set[Any]:
    """The classes of a value, or of the items of a list, that are more than bare fields, and members of enums."""
    items = value if type(value) in (list, tuple) else (value,)
    classes = set(map(type, items)) - _BARE
    enums = {each for each in classes if issubclass(each, Enum)}
    if enums:
        return (classes - enums) | {(type(item), id(item)) for item in items if type(item) in enums}
    return classes


def load(serde: SerializerProtocol, kind: str, data: bytes) -> Any:
    """The value. UsageError: its class, or that of an item of a list, cannot be read back."""
    value = serde.loads_typed((kind, data))
    if kind == "msgpack" and type(value) in _BARE:
        _check(value, data)
    elif kind.startswith("msgpack+") and type(serde) is EncryptedSerializer and type(value) in _BARE:
        _check(value, serde.cipher.decrypt(kind.partition("+")[2], data))
    return value


def _check(value: Any, data: bytes) -> None:
    if data[0] in EXTENSIONS:
        _name(data)
    if not (isinstance(value, list) and not _BARE.isdisjoint(map(type, value)) and _MAY_NAME.search(data)):
        return
    begin, ends = elements(data) or (0, [])
    for item, end in zip(value, ends, strict=False):
        if type(item) in _BARE and data[begin] in EXTENSIONS:
            _name(data[begin:end])
        begin = end


def _name(data: bytes) -> None:
    """UsageError: the extension names a class, which could not be made."""

    def parse_class(number: int, inner: bytes) -> Any:
        return (
            ormsgpack.unpackb(inner, ext_hook=lambda *_: None, option=ormsgpack.OPT_NON_STR_KEYS)
            if number in _CLASSES
            else None
        )

    fields = ormsgpack.unpackb(data, ext_hook=parse_class, option=ormsgpack.OPT_NON_STR_KEYS)
    if isinstance(fields, list) and len(fields) >= 2:
        raise _unreadable(fields[0], fields[1])


def _unreadable(module: str, name: str) -> UsageError:
    return UsageError(
        f"a value of class {module}.{name} cannot be read back: make that class importable under this name and with "
        "these fields again, or allow it in the serializer (allowed_msgpack_modules)"
    )
