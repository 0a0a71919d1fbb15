"""Reading values back, without the silence of LangGraph's serialiser about a class that is gone.

`JsonPlusSerializer` returns the bare fields of an object whose class cannot be imported or made, or is not in its list
of allowed ones, and a program goes on with a dictionary where it had put an object.
"""

from __future__ import annotations

import re
from typing import Any

import ormsgpack
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer

from snapshotd.errors import UsageError
from snapshotd.integrations.langgraph.cutting import EXTENSIONS, elements

_BARE = (dict, list, tuple, str, int, float, bool, bytes, type(None))
_BARE_TYPES = frozenset(_BARE)
_CLASSES = (0, 1, 2, 4, 5)
"""The extension types of langgraph.checkpoint.serde.jsonplus that name a class."""
_MAY_NAME = re.compile(rb"[\xc7-\xc9\xd4-\xd8].{0,4}[\x00-\x05][\x93\x94][\xa0-\xbf\xd9]", re.DOTALL)
"""The beginning of such a value: quickly says of most lists that they hold none."""


def load(serde: SerializerProtocol, kind: str, data: bytes) -> Any:
    """The value. UsageError: its class, or that of an item of a list, cannot be read back."""
    value = serde.loads_typed((kind, data))
    if kind == "msgpack" and isinstance(value, _BARE):
        _check(value, data)
    elif kind.startswith("msgpack+") and type(serde) is EncryptedSerializer and isinstance(value, _BARE):
        _check(value, serde.cipher.decrypt(kind.partition("+")[2], data))
    return value


def _check(value: Any, data: bytes) -> None:
    if data[0] in EXTENSIONS:
        _name(data)
    if not (isinstance(value, list) and not _BARE_TYPES.isdisjoint(map(type, value)) and _MAY_NAME.search(data)):
        return
    begin, ends = elements(data) or (0, [])
    for item, end in zip(value, ends, strict=False):
        if isinstance(item, _BARE) and data[begin] in EXTENSIONS:
            _name(data[begin:end])
        begin = end


def _name(data: bytes) -> None:
    """UsageError naming the class of an extension, if it has one."""

    def named(number: int, inner: bytes) -> Any:
        return (
            ormsgpack.unpackb(inner, ext_hook=lambda *_: None, option=ormsgpack.OPT_NON_STR_KEYS)
            if number in _CLASSES
            else None
        )

    fields = ormsgpack.unpackb(data, ext_hook=named, option=ormsgpack.OPT_NON_STR_KEYS)
    if isinstance(fields, list) and len(fields) >= 2:
        raise UsageError(
            f"a value of class {fields[0]}.{fields[1]} cannot be read back: make that class importable under this name and with "
            "these fields again, or allow it in the serializer (allowed_msgpack_modules)"
        )
