"""The key-value store in the catalog's database.

Tenants, namespaces and keys are stored as bytes of UTF-8, so that every text (hostile JSON can hold lone surrogates)
has its place in one order, which is that of code points.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from snapshotd.catalog import rows
from snapshotd.catalog.database import CatalogDatabase, Row
from snapshotd.errors import Conflict, LimitExceeded, NotFound, UsageError
from snapshotd.types import StoredValue

MAX_NAME_BYTES = 1024
"""Length of a tenant, a namespace or a key: they are in an index."""
_PAGE = 200
_AFTER_ALL = b"\xff"
"""Sorts after every continuation of a text, because UTF-8 never holds this byte."""

_KEY_SELECT = "SELECT pk, version FROM keys WHERE tenant = ? AND namespace = ? AND key = ?"
_SELECT = """
SELECT k.key, k.tenant, k.namespace, v.version, v.created_at_ns, v.expires_at_ns, v.value
FROM keys k JOIN key_versions v ON v.key = k.pk
"""


class KeyValues:
    """The key-value store across trajectories: it outlives runs, and every trajectory. Versions of a key begin at 1 and
    only grow, also across deletion. An expired value reads as if it were not there, and `sweep` removes it. LimitExceeded:
    a tenant, namespace or key of more than 1,024 bytes; a value that nests too deep. UsageError: an empty key; a value
    that is not JSON."""

    def __init__(self, db: CatalogDatabase) -> None:
        self._db = db

    def put(
        self,
        tenant: str,
        namespace: str,
        key: str,
        value: Any,
        *,
        now_ns: int,
        expires_at_ns: int | None = None,
        expected_version: int | None = None,
        request: str | None = None,
    ) -> StoredValue:
        """A new version. `expected_version` 0: the key must not exist; else the version it must have. Conflict (naming
        the version). `request`, here and below: the caller's name for this change. The caller repeats it when it does
        not know if the change was made; a change that was made is not made again, and gets the same answer."""
        text = rows.encode_json(value)
        with self._db.transaction():
            number, latest = self._key(tenant, namespace, key)
            made = self._find_change(number, request)
            if made is not None:
                return made
            self._expect(key, expected_version, 0 if self._find_live(number, latest, now_ns) is None else latest)
            return self._add(number, latest, text, now_ns, expires_at_ns, request)

    def get(self, tenant: str, namespace: str, key: str, *, now_ns: int, version: int | None = None) -> StoredValue:
        """The newest value of a key, or the one of `version`. NotFound."""
        with self._db.lock:
            row = self._db.read_one(_KEY_SELECT, _names(tenant, namespace, key))
            found = None if row is None else self._find_live(row[0], row[1] if version is None else version, now_ns)
        if found is None:
            raise _no(namespace, key, version)
        return found

    def delete(
        self,
        tenant: str,
        namespace: str,
        key: str,
        *,
        now_ns: int,
        expected_version: int | None = None,
        request: str | None = None,
    ) -> None:
        """Recorded as a version. NotFound, Conflict."""
        with self._db.transaction():
            number, latest = self._key(tenant, namespace, key)
            if self._find_change(number, request) is not None:
                return
            if self._find_live(number, latest, now_ns) is None:
                raise _no(namespace, key, None)
            self._expect(key, expected_version, latest)
            self._add(number, latest, None, now_ns, None, request)

    def search(
        self,
        tenant: str,
        namespace: str,
        *,
        now_ns: int,
        prefix: str = "",
        where: Mapping[str, Any] | None = None,
        limit: int = 100,
        after: str = "",
    ) -> list[StoredValue]:
        """The newest versions in order of their keys: keys that begin with `prefix` and come behind `after`, in
        `namespace` and those below it ("a" has "a/b" below it). `where`: fields (dotted paths) of the value that must
        equal these JSON scalars. Versions of one key in several namespaces come together, beyond `limit` if need be. Cost:
        the keys of the namespace and those below it, and the values that are decoded."""
        fits = _filter(where or {})
        found: list[StoredValue] = []
        with self._db.lock:
            at: tuple[bytes, bytes] = (_name("the key", after), _AFTER_ALL) if after else (b"", b"")
            while page := self._page(tenant, namespace, prefix, at):
                for number, latest, key, within in page:
                    if len(found) >= max(limit, 0) and not (found and found[-1].key == _text(key)):
                        return found
                    value = self._find_live(number, latest, now_ns)
                    if value is not None and fits(value.value):
                        found.append(value)
                    at = (key, within)
        return found

    def history(self, tenant: str, namespace: str, key: str) -> list[StoredValue]:
        """All versions that are kept, newest first; empty if there are none."""
        where = "WHERE k.tenant = ? AND k.namespace = ? AND k.key = ? ORDER BY v.version DESC"
        return [_decode(row) for row in self._db.read(_SELECT + where, _names(tenant, namespace, key))]

    def sweep(self, *, now_ns: int, keep_versions: int) -> int:
        """Remove expired values, and versions of a key beyond the newest `keep_versions`. Returns their number."""
        with self._db.transaction():
            expired = self._db.write("DELETE FROM key_versions WHERE expires_at_ns <= ?", (now_ns,))
            return expired + self._db.write(
                "DELETE FROM key_versions WHERE pk IN (SELECT pk FROM ("
                "SELECT pk, row_number() OVER (PARTITION BY key ORDER BY version DESC) AS place FROM key_versions) AS numbered"
                " WHERE place > ?)",
                (max(keep_versions, 0),),
            )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _key(self, tenant: str, namespace: str, key: str) -> tuple[int, int]:
        """A key's row and latest version, made if it is new."""
        names = _names(tenant, namespace, key)
        if not key:
            raise UsageError("a value needs a key: give a text that is not empty")
        row = self._db.read_one(_KEY_SELECT, names)
        if row is not None:
            return row[0], row[1]
        return self._db.insert("INSERT INTO keys (tenant, namespace, key, version) VALUES (?,?,?,0)", names), 0

    def _expect(self, key: str, expected: int | None, version: int) -> None:
        if expected is not None and expected != version:
            has = f"has version {version}" if version else "does not exist"
            raise Conflict(
                f"key {_quote(key)} cannot be changed because it {has} and not version {expected}: read it again first"
            )

    def _find_change(self, number: int, request: str | None) -> StoredValue | None:
        """The change that was made under this name."""
        row = self._db.read_one(_SELECT + "WHERE k.pk = ? AND v.request = ?", (number, request))  # nothing equals NULL
        return None if row is None else _decode(row)

    def _add(
        self, number: int, latest: int, text: str | None, now_ns: int, expires_at_ns: int | None, request: str | None
    ) -> StoredValue:
        self._db.write("UPDATE keys SET version = ? WHERE pk = ?", (latest + 1, number))
        self._db.write(
            "INSERT INTO key_versions (key, version, created_at_ns, expires_at_ns, value, request) VALUES (?,?,?,?,?,?)",
            (number, latest + 1, now_ns, expires_at_ns, text, request),
        )
        row = self._db.read_one(_SELECT + "WHERE k.pk = ? AND v.version = ?", (number, latest + 1))
        assert row is not None
        return _decode(row)

    def _find_live(self, number: int, version: int, now_ns: int) -> StoredValue | None:
        """A version that is there, not expired and no deletion."""
        row = self._db.read_one(
            _SELECT
            + "WHERE k.pk = ? AND v.version = ? AND v.value IS NOT NULL AND (v.expires_at_ns IS NULL OR v.expires_at_ns > ?)",
            (number, version, now_ns),
        )
        return None if row is None else _decode(row)

    def _page(self, tenant: str, namespace: str, prefix: str, at: tuple[bytes, bytes]) -> list[Row]:
        """(row, latest version, key, namespace) of the next keys behind `at`, in the order of keys and then
        namespaces."""
        owner, within, first = _name("the tenant", tenant), _name("the namespace", namespace), _name("the key", prefix)
        below = (within + b"/", within + b"0") if within else (b"", _AFTER_ALL)  # "0" is what comes after "/"
        return self._db.read(
            "SELECT pk, version, key, namespace FROM keys"
            " WHERE tenant = ?1 AND (namespace = ?2 OR (namespace >= ?3 AND namespace < ?4))"
            " AND key >= ?5 AND key < ?6 AND (key, namespace) > (?7, ?8) ORDER BY key, namespace LIMIT ?9",
            (owner, within, *below, first, first + _AFTER_ALL, *at, _PAGE),
        )


def _name(what: str, text: str) -> bytes:
    data = text.encode(errors="surrogatepass")
    if len(data) > MAX_NAME_BYTES:
        raise LimitExceeded(
            f"{what} {_quote(text)} has {len(data)} bytes and {MAX_NAME_BYTES} is the most: choose a shorter one"
        )
    return data


def _names(tenant: str, namespace: str, key: str) -> tuple[bytes, bytes, bytes]:
    return _name("the tenant", tenant), _name("the namespace", namespace), _name("the key", key)


def _text(data: bytes) -> str:
    return data.decode(errors="surrogatepass")


def _quote(text: str) -> str:
    return ascii(text[:80])


def _no(namespace: str, key: str, version: int | None) -> NotFound:
    which = "" if version is None else f" in version {version}"
    return NotFound(
        f"there is no key {_quote(key)}{which} in namespace {_quote(namespace)}: `snapshotd store ls` shows what there is"
    )


def _decode(row: Row) -> StoredValue:
    key, tenant, namespace, version, created, expires, value = row
    with rows.intact("key", row):
        content = None if value is None else json.loads(value)
        return StoredValue(
            _text(tenant), _text(namespace), _text(key), version, content, created, expires, value is None
        )


def _filter(where: Mapping[str, Any]) -> Callable[[Any], bool]:
    """The predicate: True if a value has all these fields. UsageError: a wanted value is no scalar."""
    for path, wanted in where.items():
        if not (wanted is None or isinstance(wanted, str | bool | int | float)):
            raise UsageError(
                f"field {_quote(path)} cannot be searched for a list or an object: give a text, a number, true, false or null"
            )
    return lambda value: all(_has(value, path.split("."), wanted) for path, wanted in where.items())


def _has(value: Any, path: list[str], wanted: Any) -> bool:
    for name in path:
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    return (
        isinstance(value, bool) is isinstance(wanted, bool) and not isinstance(value, dict | list) and value == wanted
    )
