"""Conditions of a search: filters of values, and of namespaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import eq, ge, gt, le, lt, ne
from typing import Any

from langgraph.store.base import MatchCondition

from snapshotd.errors import UsageError

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {"$eq": eq, "$ne": ne, "$gt": gt, "$gte": ge, "$lt": lt, "$lte": le}


def fits(value: Any, wanted: Any) -> bool:
    """True if a value is as wanted: equal; an object with fields that fit; or as operators say ({"$gt": 3}). Values of
    kinds that have no order do not fit. UsageError: an unknown operator."""
    if isinstance(wanted, Mapping):
        if any(str(name).startswith("$") for name in wanted):
            return all(_compare(value, name, other) for name, other in wanted.items())
        return isinstance(value, Mapping) and all(fits(value.get(name), other) for name, other in wanted.items())
    if isinstance(wanted, list | tuple):
        return isinstance(value, list) and len(value) == len(wanted) and all(map(fits, value, wanted))
    return bool(value == wanted)


def _compare(value: Any, name: str, other: Any) -> bool:
    if name not in _OPERATORS:
        raise UsageError(f"a filter has no operator {name!r}: it may be one of {', '.join(_OPERATORS)}")
    try:
        return _OPERATORS[name](value, other)
    except TypeError:
        return False


def is_under(namespace: tuple[str, ...], condition: MatchCondition) -> bool:
    """True if a namespace begins ("prefix") or ends ("suffix") with a path, whose "*" stands for any label."""
    path = tuple(condition.path)
    if len(namespace) < len(path):
        return False
    part = namespace[: len(path)] if condition.match_type == "prefix" else namespace[len(namespace) - len(path) :]
    return all(wanted in ("*", label) for label, wanted in zip(part, path, strict=True))
