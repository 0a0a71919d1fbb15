"""Checks of the values in a TOML text that a person wrote: what is wrong is named with its line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from snapshotd.api.wire import PARALLEL_MAX, QUEUE_MAX
from snapshotd.client.branching.toml_places import place
from snapshotd.client.local.sizes import size_bytes
from snapshotd.errors import UsageError
from snapshotd.terms import nearest

Check = tuple[Callable[[Any], bool], str]
"""True for a value that fits, and the words for such a value."""


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


def _is_table_of_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e15


def _is_whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_size(value: Any) -> bool:
    return _is_whole(value, 1, 1 << 50) or (isinstance(value, str) and bool(size_bytes(value)))


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):  # a date, nan
        return False
    return True


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(one, dict) and set(one) == {"role", "content"} and _is_text(one["role"]) and _is_json(one)
        for one in value
    )


TEXT: Check = (_is_text, "text")
TEXTS: Check = (_is_texts, "a list of texts")
WORDS: Check = (lambda value: value == [] or _is_texts(value), "a list of texts")
TABLE_OF_TEXTS: Check = (_is_table_of_texts, "a table of texts")
FLAG: Check = (lambda value: isinstance(value, bool), "true or false")
COUNT: Check = (lambda value: _is_whole(value, 1, QUEUE_MAX), f"a whole number from 1 to {QUEUE_MAX}")
PARALLEL: Check = (lambda value: _is_whole(value, 1, PARALLEL_MAX), f"a whole number from 1 to {PARALLEL_MAX}")
WHOLE: Check = (lambda value: _is_whole(value, 0, 1 << 53), "a whole number")
NUMBER: Check = (_is_number, "a number above 0")
TABLE: Check = (lambda value: isinstance(value, dict), "a table")
SIZE: Check = (_is_size, "a size such as '512m' or '2g'")
JSON: Check = (_is_json, "a JSON value")
JSON_TABLE: Check = (lambda value: isinstance(value, dict) and _is_json(value), "a table of JSON values")
CONVERSATION: Check = (_is_conversation, "a list of tables with role and content")


def one_of(*values: str) -> Check:
    return (lambda value: value in values, f"one of {', '.join(values)}")


@dataclass(frozen=True, slots=True)
class TomlText:
    """A TOML text, and the name under which a person knows it."""

    text: str
    shown: str

    def refusal(self, message: str, *path: str) -> UsageError:
        """The error about a key, with its line."""
        return UsageError(f"{self.shown}{place(self.text, *path) if path else ''}: {message}; nothing was started")

    def check(self, table: Mapping[str, Any], known: Mapping[str, Check], *path: str) -> None:
        """UsageError: the table at `path` has an unknown key, or a value that does not fit."""
        where = f" of {'.'.join(path)}" if path else ""
        for key, value in table.items():
            if key not in known:
                raise self.refusal(f"there is no key {key!r}{where}{nearest(key, known)}", *path, key)
            fits, wanted = known[key]
            if not fits(value):
                raise self.refusal(f"{key}{where} is not {wanted}", *path, key)
