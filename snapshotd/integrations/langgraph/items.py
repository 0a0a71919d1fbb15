"""The items of a store in the file: namespaces, values, expiry, and two indexes of their texts. Within a transaction or
`reading` of the database."""

from __future__ import annotations

import json
import re
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from operator import eq, ge, gt, le, lt, mul, ne
from typing import Any

from langgraph.store.base import MatchCondition

from snapshotd.errors import UsageError
from snapshotd.integrations.langgraph.values import json_array
from snapshotd.sqlite import Database, Row

Namespace = tuple[str, ...]
_SELECT = "SELECT i.pk, i.ns, i.key, i.value, i.created_ns, i.updated_ns FROM item i"
_LIVE = "(i.expires_ns IS NULL OR i.expires_ns > ?)"
_WORDS = re.compile(r"\w+")
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {"$eq": eq, "$ne": ne, "$gt": gt, "$gte": ge, "$lt": lt, "$lte": le}


@dataclass(frozen=True, slots=True)
class Stored:
    """An item. `score` is higher the better it fits a query; None without one."""

    pk: int
    namespace: Namespace
    key: str
    value: dict[str, Any]
    created_ns: int
    updated_ns: int
    score: float | None = None


class Items:
    """The items of one tenant."""

    def __init__(self, database: Database, tenant: str) -> None:
        self._db, self._tenant = database, tenant

    def put(
        self,
        namespace: Namespace,
        key: str,
        value: Mapping[str, Any],
        texts: Sequence[str],
        vectors: Sequence[Sequence[float]],
        ttl_ns: int | None,
    ) -> None:
        """Store an item, in place of one with its key. UsageError: it is not JSON."""
        now = time.time_ns()
        try:
            text = json.dumps(value)
        except (TypeError, ValueError, RecursionError) as exc:
            raise UsageError(f"the value of {key!r} cannot be stored because it is not JSON ({exc})") from exc
        row = self._db.read_one(
            "INSERT INTO item (tenant, ns, key, value, created_ns, updated_ns, expires_ns, ttl_ns) VALUES (?1, ?2, ?3, ?4, ?5, ?5, ?6, ?7)"
            " ON CONFLICT (tenant, ns, key) DO UPDATE SET value = ?4, updated_ns = ?5, expires_ns = ?6, ttl_ns = ?7 RETURNING pk",
            (self._tenant, encode(namespace), key, text, now, None if ttl_ns is None else now + ttl_ns, ttl_ns),
        )
        assert row is not None
        self._forget(row[0])
        if texts:
            self._db.write("INSERT INTO item_text (rowid, text) VALUES (?, ?)", (row[0], "\n".join(texts)))
        self._db.write_many(
            "INSERT INTO item_vector (item, number, vector) VALUES (?, ?, ?)",
            [(row[0], number, _pack(vector)) for number, vector in enumerate(vectors)],
        )

    def delete(self, namespace: Namespace, key: str) -> None:
        """A missing one is no error."""
        self._drop("tenant = ? AND ns = ? AND key = ?", (self._tenant, encode(namespace), key))

    def sweep(self) -> int:
        """Remove what has expired, of any tenant, and return how many items."""
        return self._drop("expires_ns <= ?", (time.time_ns(),))

    def get(self, namespace: Namespace, key: str) -> Stored | None:
        row = self._db.read_one(
            f"{_SELECT} WHERE i.tenant = ? AND i.ns = ? AND i.key = ? AND {_LIVE}",
            (self._tenant, encode(namespace), key, time.time_ns()),
        )
        return None if row is None else _decode(row)

    def search(
        self, prefix: Namespace, wanted: Mapping[str, Any] | None, query: str | None, vector: Sequence[float] | None
    ) -> Iterator[Stored]:
        """The items of a namespace and those below it with these fields: the best for the query first, or else the one
        that was changed last. A query by words leaves out what has none of them; one by a vector what has none."""
        if vector is not None:
            found = self._by_vector(prefix, vector)
        elif query is not None:
            found = self._by_words(prefix, query)
        else:
            rows = self._db.read(f"{_SELECT} {self._below} ORDER BY i.updated_ns DESC, i.pk", self._within(prefix))
            found = map(_decode, rows)
        return (item for item in found if not wanted or fits(item.value, dict(wanted)))

    def namespaces(self) -> list[Namespace]:
        """All namespaces, in order."""
        rows = self._db.read(f"SELECT DISTINCT i.ns FROM item i {self._below}", self._within(()))
        return sorted(decode(row[0]) for row in rows)

    def refresh(self, items: Iterable[Stored]) -> None:
        """Begin the time that items may live anew."""
        self._db.write(
            "UPDATE item SET expires_ns = ? + ttl_ns WHERE ttl_ns IS NOT NULL AND pk IN (SELECT value FROM json_each(?))",
            (time.time_ns(), json_array(item.pk for item in items)),
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    _below = f"WHERE i.tenant = ? AND i.ns >= ? AND i.ns < ? AND {_LIVE}"

    def _within(self, prefix: Namespace) -> tuple[str, str, str, int]:
        """The values for `_below`."""
        begin = encode(prefix)
        return self._tenant, begin, f"{begin[:-1]}\x01" if begin else "\U0010ffff\U0010ffff", time.time_ns()

    def _by_words(self, prefix: Namespace, query: str) -> Iterator[Stored]:
        words = " OR ".join(f'"{word}"' for word in _WORDS.findall(query))
        if not words:
            return
        for row in self._db.read(
            f"{_SELECT.replace(' FROM', ', -bm25(item_text) AS score FROM')} JOIN item_text ON item_text.rowid = i.pk"
            f" {self._below} AND item_text MATCH ? ORDER BY score DESC, i.pk",
            (*self._within(prefix), words),
        ):
            yield _decode(row)

    def _by_vector(self, prefix: Namespace, vector: Sequence[float]) -> Iterator[Stored]:
        """The whole namespace is compared: about 20 µs for each vector of 384 numbers."""
        asked = _unit(vector)
        best: dict[int, float] = {}
        for pk, stored in self._db.read(
            f"SELECT i.pk, v.vector FROM item i JOIN item_vector v ON v.item = i.pk {self._below}", self._within(prefix)
        ):
            other = array("f", stored)
            if len(other) != len(asked):
                raise UsageError(
                    f"the query's vector has {len(asked)} numbers and those of stored items have {len(other)}: use one embedding"
                )
            best[pk] = max(best.get(pk, -2.0), sum(map(mul, asked, other)))
        for pk in sorted(best, key=lambda pk: (-best[pk], pk)):
            row = self._db.read_one(f"{_SELECT} WHERE i.pk = ?", (pk,))
            assert row is not None
            yield _decode((*row, best[pk]))

    def _drop(self, where: str, values: tuple[str | int, ...]) -> int:
        gone = self._db.read(f"DELETE FROM item WHERE {where} RETURNING pk", values)
        for row in gone:
            self._forget(row[0])
        return len(gone)

    def _forget(self, pk: int) -> None:
        """Take an item out of the indexes."""
        self._db.write("DELETE FROM item_text WHERE rowid = ?", (pk,))
        self._db.write("DELETE FROM item_vector WHERE item = ?", (pk,))


def encode(namespace: Namespace) -> str:
    return "".join(f"{label}\0" for label in namespace)


def decode(text: str) -> Namespace:
    return tuple(text.split("\0")[:-1])


def _decode(row: Row) -> Stored:
    pk, ns, key, value, created, updated, *score = row
    return Stored(pk, decode(ns), key, json.loads(value), created, updated, *score)


def _unit(vector: Sequence[float]) -> array[float]:
    length = sqrt(sum(map(mul, vector, vector))) or 1.0
    return array("f", [number / length for number in vector])


def _pack(vector: Sequence[float]) -> bytes:
    return _unit(vector).tobytes()


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
