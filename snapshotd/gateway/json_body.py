"""JSON from agents and providers, within bounds: strict UTF-8, finite numbers, valid Unicode, limited depth and count
of values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any

from snapshotd.errors import LimitExceeded, UsageError

DEPTH_LIMIT = 100
"""Levels of nesting. A tool's schema takes two for each level of its arguments."""
NODE_LIMIT = 1_000_000
"""Values in one body: a conversation of 10,000 messages has about 100,000. A body of `[[],[],` takes fifty times its
size when parsed."""
NODE_BYTES = 100
"""Memory that one parsed value costs, roughly (CPython: 56 for an empty list or a short text, and its place in a
container)."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def count_values(body: bytes) -> int:
    """At least the number of JSON values in `body`, found without parsing it. Punctuation inside texts counts only up
    to the limit."""
    count = _punctuation(body)
    return count if count <= NODE_LIMIT else _punctuation(_STRING.sub(b"", body))


def _punctuation(body: bytes) -> int:
    return 1 + len(body) - len(body.translate(None, b",:[{"))  # in half the time of four `count`


def parse(body: bytes) -> Any:
    """The value of a body that `count_values` found within `NODE_LIMIT`.

    Lone surrogates, which some clients send when they cut a text in the middle of a character, become U+FFFD. Raises
    UsageError for a body that is not JSON and LimitExceeded for one that is nested too deeply.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as exc:  # UnicodeDecodeError and JSONDecodeError are ValueErrors, as are integers of 4300 digits
        raise UsageError(f"The request's body is not JSON ({str(exc)[:200]}); send one JSON object.") from None
    _check_depth(value)
    return _repair(value) if _SURROGATE.search(body) else value


def parse_object(body: bytes) -> dict[str, Any]:
    """Like `parse`, and UsageError for anything but an object."""
    value = parse(body)
    if not isinstance(value, dict):
        raise UsageError("The request's body is not a JSON object; send one.")
    return value


def parse_or_none(body: bytes) -> Any:
    """Like `parse`, with every bound checked, and None for an unreadable body."""
    try:
        return parse(body) if count_values(body) <= NODE_LIMIT else None
    except (UsageError, LimitExceeded):
        return None


def parse_text(text: str) -> Any:
    """A text as JSON, or the text itself if it is no JSON: the arguments of a tool call, which a model wrote."""
    value = parse_or_none(text.encode("utf-8", "replace"))
    return text if value is None else value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is beyond the range of a double")
    return number


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEPTH_LIMIT):
        level = [child for node in level for child in _children(node) if type(child) in (dict, list)]
        if not level:
            return
    raise _too_deep()


def _children(node: Any) -> Iterable[Any]:
    return node.values() if type(node) is dict else node if type(node) is list else ()


def _too_deep() -> LimitExceeded:
    return LimitExceeded(f"The request's JSON is nested deeper than {DEPTH_LIMIT} levels; make it flatter.")


def _repair(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_repair(child) for child in value]
    if isinstance(value, dict):
        return {_repair(name): _repair(child) for name, child in value.items()}
    return value
