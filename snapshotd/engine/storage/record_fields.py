"""Reading fields of a JSON document that may be damaged or hostile. A malformed field raises a ValueError that names
it."""

from __future__ import annotations

import math
import re
from enum import StrEnum
from typing import Any, TypeVar

ID = re.compile(r"[0-9a-f]{32}")
DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_INTEGER = (1 << 63) - 1
"""Largest integer in a column of the catalog."""

ANY_TIME = -MAX_INTEGER
"""Least value of times and durations: clocks can be wrong, and set back."""
MAX_JSON_DEPTH = 200
"""Depth to which arguments, messages and other free values may nest: the catalog's limit."""

_Enum = TypeVar("_Enum", bound=StrEnum)


class Fields:
    """One JSON object. A missing field reads as null."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{where} is not an object")
        self._value: dict[str, Any] = value
        self._where = where

    @property
    def whole(self) -> dict[str, Any]:
        return self._value

    def every(self, key: re.Pattern[str], value: re.Pattern[str]) -> dict[str, str]:
        """The whole object, whose keys and values are texts that match."""
        if not all(
            key.fullmatch(name) and isinstance(item, str) and value.fullmatch(item)
            for name, item in self._value.items()
        ):
            raise ValueError(f"{self._where} holds what it must not")
        return self._value

    def value(self, name: str) -> Any:
        """Any JSON value."""
        return self._value.get(name)

    def has(self, name: str) -> bool:
        return name in self._value

    def within(self, name: str) -> Fields:
        """A field that is an object."""
        return Fields(self.value(name), name)

    def within_or_none(self, name: str) -> Fields | None:
        return None if self.value(name) is None else self.within(name)

    def text(self, name: str, pattern: re.Pattern[str] | None = None) -> str:
        """Any text (lone surrogates included), or a text that matches `pattern` as a whole."""
        value = self.value(name)
        if not isinstance(value, str) or (pattern is not None and not pattern.fullmatch(value)):
            raise ValueError(f"{self._where}.{name} is not what it must be")
        return value

    def text_or_none(self, name: str, pattern: re.Pattern[str] | None = None) -> str | None:
        return None if self.value(name) is None else self.text(name, pattern)

    def integer(self, name: str, least: int = 0) -> int:
        value = self.value(name)
        if type(value) is not int or not least <= value <= MAX_INTEGER:
            raise ValueError(f"{self._where}.{name} is not an integer of {least} or more")
        return value

    def integer_or_none(self, name: str, least: int = 0) -> int | None:
        return None if self.value(name) is None else self.integer(name, least)

    def number(self, name: str) -> float:
        """A finite number of at least zero, as it is written (1 stays an integer)."""
        value = self.value(name)
        if type(value) not in (int, float) or not 0 <= value <= MAX_INTEGER or not math.isfinite(value):
            raise ValueError(f"{self._where}.{name} is not a number")
        return value  # type: ignore[no-any-return]

    def one_of(self, name: str, enum: type[_Enum]) -> _Enum:
        return enum(self.text(name))

    def items(self, name: str) -> list[Any]:
        value = self.value(name)
        if not isinstance(value, list):
            raise ValueError(f"{self._where}.{name} is not a list")
        return value

    def texts(self, name: str, pattern: re.Pattern[str] | None = None) -> tuple[str, ...]:
        """A list of texts; as `text`."""
        values = self.items(name)
        if not all(isinstance(value, str) and (pattern is None or pattern.fullmatch(value)) for value in values):
            raise ValueError(f"{self._where}.{name} holds what it must not")
        return tuple(values)

    def pairs(self, name: str) -> tuple[tuple[str, str], ...]:
        """[[name, value], ...]."""
        values = self.items(name)
        if not all(
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in values
        ):
            raise ValueError(f"{self._where}.{name} is not a list of pairs")
        return tuple((key, value) for key, value in values)


def shallow(value: Any) -> Any:
    """Return any JSON value unchanged. ValueError if it nests deeper than `MAX_JSON_DEPTH`."""
    if nests_deeper(value, MAX_JSON_DEPTH):
        raise ValueError("a value nests too deep")
    return value


def nests_deeper(value: Any, levels: int) -> bool:
    """True if a JSON value nests deeper than `levels` lists and objects. Iterative, because the value may be
    hostile."""
    layer, depth = [value], 0
    while layer:
        layer = [item for item in layer if isinstance(item, dict | list)]
        if layer and depth == levels:
            return True
        depth += 1
        layer = [child for item in layer for child in (item.values() if isinstance(item, dict) else item)]
    return False
