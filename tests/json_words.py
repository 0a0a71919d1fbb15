"""Comparison of what `--json` prints with the table of words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from snapshotd.cli.reference import words

WORDS = words()
_CHECKS: dict[str, Any] = {
    "any": lambda _: True,
    "text": lambda value: isinstance(value, str),
    "id": lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{32}|[0-9a-f]{64}", value),
    "time": lambda value: isinstance(value, str) and re.fullmatch(r"[0-9]{4}-[0-9-]{5}T[0-9:.]+Z", value),
    "count": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "bool": lambda value: isinstance(value, bool),
    "map": lambda value: isinstance(value, dict),
}


def faults(value: Any, kind: str, word: str, met: set[str] | None = None) -> Iterator[str]:
    """What is not as the table says. `met` gets the words that were there."""
    if value is None:
        return
    if kind.startswith("list of "):
        if not isinstance(value, list):
            yield f"{word} is no list: {value!r}"
            return
        for item in value:
            yield from faults(item, kind.removeprefix("list of "), word, met)
    elif kind == "object":
        if not isinstance(value, dict):
            yield f"{word} is no object: {value!r}"
            return
        for key, item in value.items():
            if key not in WORDS:
                yield f"{key} (in {word}) is in no table"
            else:
                if met is not None:
                    met.add(key)
                yield from faults(item, WORDS[key][0], key, met)
    elif not _CHECKS[kind](value):
        yield f"{word} is no {kind}: {value!r}"
