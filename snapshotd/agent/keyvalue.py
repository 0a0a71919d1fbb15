"""`store`: values that outlive runs, shared by all trajectories and the people outside.

A replay gets the recorded answers: it sees no newer values, and writes nothing again.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from snapshotd.agent.calls import put, within
from snapshotd.agent.session import session
from snapshotd.agent.wire.connection import SnapshotdError
from snapshotd.agent.wire.values import strict


class StoredValue(NamedTuple):
    """One version of a value. Versions of a key begin at 1 and only grow."""

    key: str
    value: Any
    version: int
    namespace: str


class Store:
    """Use the module's `store`. Thread-safe. A namespace is a path such as `team/notes`; a search in `team` also finds
    the namespaces below it.

    Every method may raise SnapshotdError (`Conflict`: another version than `expected_version`; 0 means that the key
    must not exist) and SnapshotdUnavailable. Values are JSON of up to 1 MiB; TypeError or ValueError for others.
    Outside of a sandbox: a store of this process.
    """

    def __init__(self) -> None:
        self._outside = _Memory()

    def get(self, key: str, default: Any = None, *, namespace: str = "default", version: Optional[int] = None) -> Any:
        """The newest value, or the one of `version`; `default` if there is none."""
        found = self.entry(key, namespace=namespace, version=version)
        return default if found is None else found.value

    def entry(self, key: str, *, namespace: str = "default", version: Optional[int] = None) -> Optional[StoredValue]:
        """The value with its version, or None."""
        fields: Dict[str, Any] = dict(within(), namespace=namespace, key=key)
        if version is not None:
            fields["version"] = version
        answer = (
            session.request("store_get", fields) if session.inside() else self._outside.get(namespace, key, version)
        )
        if "version" not in answer:
            return None
        return StoredValue(
            key, answer["body"] if "body" in answer else answer.get("value"), answer["version"], namespace
        )

    def put(
        self,
        key: str,
        value: Any,
        *,
        namespace: str = "default",
        ttl_s: Optional[float] = None,
        expected_version: Optional[int] = None,
    ) -> int:
        """Store a value and return its version. `ttl_s`: seconds after which it is gone."""
        copy = strict(value)
        if not session.inside():
            return self._outside.put(namespace, key, copy, ttl_s, expected_version)
        fields: Dict[str, Any] = dict(within(), namespace=namespace, key=key)
        if ttl_s is not None:
            fields["ttl_s"] = ttl_s
        if expected_version is not None:
            fields["expected_version"] = expected_version
        return int(session.request("store_put", fields, put(fields, "value", copy))["version"])

    def delete(self, key: str, *, namespace: str = "default", expected_version: Optional[int] = None) -> None:
        """Remove a value. SnapshotdError (`NotFound`) if there is none."""
        if not session.inside():
            self._outside.delete(namespace, key, expected_version)
            return
        fields: Dict[str, Any] = dict(within(), namespace=namespace, key=key)
        if expected_version is not None:
            fields["expected_version"] = expected_version
        session.request("store_delete", fields)

    def search(
        self,
        prefix: str = "",
        *,
        namespace: str = "default",
        where: Optional[Dict[str, Any]] = None,
        limit: int = 100,
        after: str = "",
    ) -> List[StoredValue]:
        """Values in the order of their keys. Their keys begin with `prefix` and come behind `after`, and their fields
        (dotted paths) equal the values in `where`."""
        fields: Dict[str, Any] = dict(within(), namespace=namespace, prefix=prefix, limit=limit)
        if where:
            fields["where"] = strict(where)
        if after:
            fields["after"] = after
        found = session.request("store_search", fields)["body"] if session.inside() else self._outside.search(fields)
        return [
            StoredValue(entry["key"], entry["value"], entry["version"], entry.get("namespace", namespace))
            for entry in found
        ]


class _Memory:
    """The store of a program outside of a sandbox."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: Dict[Tuple[str, str], List[Tuple[Any, float]]] = {}
        """Values and their expiry times, by namespace and key. A deletion is a version that has expired."""

    def get(self, namespace: str, key: str, version: Optional[int]) -> Dict[str, Any]:
        versions = self._versions.get((namespace, key), [])
        number = len(versions) if version is None else version
        if not 1 <= number <= len(versions) or versions[number - 1][1] <= time.monotonic():
            return {}
        return {"value": strict(versions[number - 1][0]), "version": number}

    def put(self, namespace: str, key: str, value: Any, ttl_s: Optional[float], expected: Optional[int]) -> int:
        with self._lock:
            self._expect(namespace, key, expected)
            versions = self._versions.setdefault((namespace, key), [])
            versions.append((value, float("inf") if ttl_s is None else time.monotonic() + ttl_s))
            return len(versions)

    def delete(self, namespace: str, key: str, expected: Optional[int]) -> None:
        with self._lock:
            self._expect(namespace, key, expected)
            if not self.get(namespace, key, None):
                raise SnapshotdError("The store has no {!r} in {!r}.".format(key, namespace), "NotFound")
            self._versions[namespace, key].append((None, 0.0))

    def search(self, fields: Dict[str, Any]) -> List[Dict[str, Any]]:
        wanted, found = fields["namespace"], []
        with self._lock:
            for namespace, key in sorted(self._versions, key=lambda place: (place[1], place[0])):
                entry = self.get(namespace, key, None)
                below = namespace == wanted or namespace.startswith(wanted + "/")
                if not entry or not below or not key.startswith(fields["prefix"]) or key <= fields.get("after", ""):
                    continue
                if all(_at(entry["value"], path) == value for path, value in fields.get("where", {}).items()):
                    found.append(dict(entry, key=key, namespace=namespace))
        return found[: fields["limit"]]

    def _expect(self, namespace: str, key: str, expected: Optional[int]) -> None:
        version = self.get(namespace, key, None).get("version", 0)
        if expected is not None and expected != version:
            raise SnapshotdError(
                "{!r} in {!r} has version {}, not {}.".format(key, namespace, version, expected), "Conflict"
            )


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


store = Store()
