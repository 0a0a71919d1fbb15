"""What names and values of the key-value store may be; the rest is the catalog's contract."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.journal import keyvalue
from snapshotd.engine.journal.keyvalue import MAX_VALUE_BYTES, KeyValueStore
from snapshotd.errors import LimitExceeded, UsageError


@pytest.fixture
def store() -> Iterator[KeyValueStore]:
    catalog = SqliteCatalog(":memory:")
    made = KeyValueStore(catalog)
    yield made
    made.close()
    catalog.close()


@pytest.mark.parametrize(
    ("tenant", "namespace", "key"),
    [
        ("", "a", "k"),
        ("a/b", "a", "k"),
        ("-x", "a", "k"),
        ("t" * 65, "a", "k"),
        ("t", "", "k"),
        ("t", "a//b", "k"),
        ("t", "/a", "k"),
        ("t", "a/", "k"),
        ("t", "/".join("a" * 9), "k"),
        ("t", "n" * 201, "k"),
        ("t", "a\nb", "k"),
        ("t", "a", ""),
        ("t", "a", "k" * 201),
        ("t", "a", "k\x1b"),
    ],
)
def test_malformed_names(store: KeyValueStore, tenant: str, namespace: str, key: str) -> None:
    for call in (
        lambda: store.put(tenant, namespace, key, 1),
        lambda: store.get(tenant, namespace, key),
        lambda: store.delete(tenant, namespace, key),
        lambda: store.history(tenant, namespace, key),
    ):
        with pytest.raises(UsageError, match="malformed"):
            call()


def test_names_of_all_allowed_kinds(store: KeyValueStore) -> None:
    for namespace, key in (("/".join("a" * 8), "k" * 200), ("é ü", "a/b: c?"), ("n" * 200, "👍")):
        store.put("Tenant.1_x-y", namespace, key, [namespace])
        assert store.get("Tenant.1_x-y", namespace, key).value == [namespace]


def test_bounds(store: KeyValueStore) -> None:
    store.put("t", "a", "k", "x" * (MAX_VALUE_BYTES - 2))
    with pytest.raises(LimitExceeded):
        store.put("t", "a", "k", "x" * (MAX_VALUE_BYTES - 1))
    with pytest.raises(LimitExceeded):
        store.put("t", "a", "k", "é" * (MAX_VALUE_BYTES // 2))
    for ttl in (0, -1, float("nan"), float("inf"), 1e12):
        with pytest.raises(UsageError):
            store.put("t", "a", "k", 1, ttl_s=ttl)
    bad: list[dict[str, Any]] = [
        {"limit": 0},
        {"limit": 1001},
        {"prefix": "k" * 201},
        {"where": {"": 1}},
        {"where": {"a": [1]}},
    ]
    for more in bad:
        with pytest.raises(UsageError):
            store.search("t", "a", **more)
    with pytest.raises(LimitExceeded):
        store.search("t", "a", where={f"f{n}": 1 for n in range(21)})


def test_what_has_expired_is_swept(store: KeyValueStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyvalue, "SWEEP_EVERY_S", 0.01)
    monkeypatch.setattr(keyvalue, "KEPT_VERSIONS", 2)
    store.put("t", "a", "short", 1, ttl_s=0.05)
    for n in range(5):
        store.put("t", "a", "many", n)
    store.start_sweeping()
    deadline = time.monotonic() + 30
    while store.history("t", "a", "short") or len(store.history("t", "a", "many")) > 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert store.get("t", "a", "many").value == 4
    store.close()
    assert not any(thread.name == "sweep-values" for thread in threading.enumerate())
