"""The one sentence about a request that does not fit its record: where, what, and what would."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Sequence
from typing import Any, get_args, get_type_hints

from fastapi.exceptions import RequestValidationError

from snapshotd.api.record import ApiRecord
from snapshotd.api.wire import API_PREFIX, KEY_HEADER
from snapshotd.errors import UsageError
from snapshotd.terms import nearest

_OBJECT = "Input should be an object"


def load_json(text: bytes) -> Any:
    """As `json.loads`, for which the last of two members of one name counts: they are a JSONDecodeError here."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise json.JSONDecodeError(f"{twice[:40]!r} is there twice", text.decode(errors="replace"), 0)
        return found

    return json.loads(text, object_pairs_hook=members)


def check_query(given: Sequence[tuple[str, str]], known: Collection[str]) -> None:
    """UsageError: a parameter of the query that the operation does not have, or one twice."""
    names = [name for name, _ in given]
    for name in names:
        if name not in known:
            hint = nearest(name, known) if known else "; it has none"
            raise UsageError(
                f"the request's query has {name[:40]!r}, which is no parameter of this operation{hint}; "
                f"{API_PREFIX}/openapi.json describes them"
            )
        if names.count(name) > 1:
            raise UsageError(f"the request's query has the parameter {name!r} twice; give it once")


def first_problem(exc: RequestValidationError, body: Any) -> str:
    """About the first of the problems. `body`: the record of the request's body; None: it has none."""
    first = exc.errors()[0]
    path = [part for part in first.get("loc", ()) if part != "body"]
    where, kind = ".".join(map(str, path)) or "body", first["type"]
    if kind == "json_invalid":
        at = f", at character {path[0]}" if path and path[0] else ""
        where, what = "body", f"it is no JSON ({first.get('ctx', {}).get('error', 'malformed')}{at})"
    elif kind == "string_pattern_mismatch" and path == ["header", KEY_HEADER]:
        where, what = f"header {KEY_HEADER}", "it has 1 to 200 printable ASCII characters and no spaces"
    elif kind == "unexpected_keyword_argument" and path:
        within = _hint_at(body, path[:-1])
        known = [field.name for field in dataclasses.fields(within)] if dataclasses.is_dataclass(within) else []
        what = f"there is no such field{nearest(str(path[-1]), known) if known else ''}"
    elif kind in ("tuple_type", "list_type"):
        what = "Input should be a list" + (" of strings" if _is_of_texts(_hint_at(body, path)) else "")
    else:
        what = _OBJECT if kind == "dataclass_type" else first.get("msg", "malformed")
    return f"the request's {where} is not acceptable: {what}; {API_PREFIX}/openapi.json describes it"


def _hint_at(body: Any, path: Sequence[Any]) -> Any:
    """The type at a path into a record: a record where there is one. None: not known."""
    hint = body
    for part in path:
        record = _record_in(hint)
        if isinstance(part, str) and record is not None:
            hint = get_type_hints(record).get(part)
    return _record_in(hint) or hint


def _record_in(hint: Any) -> type[ApiRecord] | None:
    if isinstance(hint, type) and issubclass(hint, ApiRecord):
        return hint
    return next(filter(None, map(_record_in, get_args(hint))), None)


def _is_of_texts(hint: Any) -> bool:
    return hint is str or any(one is not None and _is_of_texts(one) for one in get_args(hint))
