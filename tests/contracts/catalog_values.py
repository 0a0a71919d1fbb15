"""What every catalog must do: the key-value store. See catalog.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from snapshotd.catalog.base import Catalog
from snapshotd.errors import Conflict, LimitExceeded, NotFound, UsageError
from snapshotd.types import StoredValue
from tests.contracts.refusal import refuses
from tests.records import started


def put(catalog: Catalog, key: str, value: Any, namespace: str = "n", **more: Any) -> StoredValue:
    return catalog.values.put("t", namespace, key, value, **{"now_ns": 1, **more})


def get(catalog: Catalog, key: str, namespace: str = "n", **more: Any) -> Any:
    return catalog.values.get("t", namespace, key, **{"now_ns": 1, **more}).value


def found(catalog: Catalog, namespace: str = "n", **more: Any) -> list[str]:
    return [one.key for one in catalog.values.search("t", namespace, **{"now_ns": 1, **more})]


def values_have_versions(catalog: Catalog) -> None:
    first = put(catalog, "k", {"a": [1, None]}, now_ns=5)
    assert first == StoredValue("t", "n", "k", 1, {"a": [1, None]}, 5)
    second = put(catalog, "k", None, now_ns=6, expires_at_ns=100)
    assert second == StoredValue("t", "n", "k", 2, None, 6, 100), "null is a value"
    assert get(catalog, "k") is None
    assert get(catalog, "k", version=1) == {"a": [1, None]}
    assert catalog.values.history("t", "n", "k") == [second, first]
    assert catalog.values.history("t", "n", "other") == []
    for version in (0, 3, -1):
        refuses(
            NotFound, lambda version=version: get(catalog, "k", version=version), says=("'k'", f"version {version}")
        )
    refuses(NotFound, get, catalog, "other")
    for error, value in ((UsageError, float("nan")), (UsageError, {1}), (LimitExceeded, nested(300))):
        refuses(error, put, catalog, "k", value)
    assert len(catalog.values.history("t", "n", "k")) == 2


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def a_version_can_be_expected(catalog: Catalog) -> None:
    put(catalog, "k", 1, expected_version=0)
    refuses(Conflict, lambda: put(catalog, "k", 2, expected_version=0), says=("version 1",))
    put(catalog, "k", 2, expected_version=1)
    refuses(Conflict, lambda: put(catalog, "k", 3, expected_version=1), says=("version 2",))
    refuses(Conflict, lambda: put(catalog, "other", 3, expected_version=1), says=("does not exist",))
    refuses(NotFound, get, catalog, "other")
    delete = catalog.values.delete
    refuses(Conflict, lambda: delete("t", "n", "k", now_ns=1, expected_version=1), says=("version 2",))
    assert get(catalog, "k") == 2
    delete("t", "n", "k", now_ns=1, expected_version=2)
    refuses(NotFound, lambda: delete("t", "n", "k", now_ns=1))
    put(catalog, "k", 4, expected_version=0)
    assert catalog.values.get("t", "n", "k", now_ns=1).version == 4


def a_change_that_is_asked_for_again_is_not_made_again(catalog: Catalog) -> None:
    first = put(catalog, "k", 1, request="a", expected_version=0)
    assert put(catalog, "k", 1, request="a", expected_version=0, now_ns=5) == first, "no conflict with itself"
    put(catalog, "k", 2, request="b")
    assert put(catalog, "k", 1, request="a", expected_version=0) == first, "as it was answered then"
    assert get(catalog, "k") == 2
    assert put(catalog, "other", 1, request="a").version == 1, "another key's"
    for _ in range(2):
        catalog.values.delete("t", "n", "k", now_ns=9, expected_version=2, request="c")
    refuses(NotFound, lambda: catalog.values.delete("t", "n", "k", now_ns=9, request="d"))
    assert [one.version for one in catalog.values.history("t", "n", "k")] == [3, 2, 1]
    for number in (4, 5):
        assert put(catalog, "k", 3).version == number, "one without a name is always another"


def a_deletion_is_a_version(catalog: Catalog) -> None:
    put(catalog, "k", 1)
    catalog.values.delete("t", "n", "k", now_ns=9)
    refuses(NotFound, get, catalog, "k")
    assert found(catalog) == []
    assert catalog.values.history("t", "n", "k")[0] == StoredValue("t", "n", "k", 2, None, 9, deleted=True)
    refuses(NotFound, lambda: get(catalog, "k", version=2))
    assert get(catalog, "k", version=1) == 1
    assert put(catalog, "k", 3).version == 3
    refuses(NotFound, lambda: catalog.values.delete("t", "n", "never", now_ns=1))


def what_has_expired_is_not_there(catalog: Catalog) -> None:
    put(catalog, "k", "long")
    put(catalog, "k", "short", expires_at_ns=10)
    assert get(catalog, "k", now_ns=9) == "short"
    assert found(catalog, now_ns=9) == ["k"]
    refuses(NotFound, lambda: get(catalog, "k", now_ns=10))
    refuses(NotFound, lambda: get(catalog, "k", now_ns=10, version=2))
    assert get(catalog, "k", now_ns=10, version=1) == "long"
    assert found(catalog, now_ns=10) == []
    refuses(NotFound, lambda: catalog.values.delete("t", "n", "k", now_ns=10))
    refuses(Conflict, lambda: put(catalog, "k", "x", now_ns=10, expected_version=2))
    assert put(catalog, "k", "again", now_ns=10, expected_version=0).version == 3


def a_sweep_removes_the_expired_and_the_old(catalog: Catalog) -> None:
    for number in range(5):
        put(catalog, "k", number)
        put(catalog, "gone", number, expires_at_ns=10)
    put(catalog, "one", 1)
    assert catalog.values.sweep(now_ns=9, keep_versions=9) == 0
    assert catalog.values.sweep(now_ns=10, keep_versions=2) == 8
    assert [one.version for one in catalog.values.history("t", "n", "k")] == [5, 4]
    assert catalog.values.history("t", "n", "gone") == []
    assert get(catalog, "one") == 1
    assert put(catalog, "gone", "new").version == 6, "a number is never used again"
    catalog.values.delete("t", "n", "one", now_ns=1)
    assert catalog.values.sweep(now_ns=10, keep_versions=1) == 2
    assert [one.deleted for one in catalog.values.history("t", "n", "one")] == [True]
    assert catalog.values.sweep(now_ns=10, keep_versions=1) == 0


def tenants_and_namespaces_are_apart(catalog: Catalog) -> None:
    for namespace in ("a", "a/b", "a/b/c", "ab", "a0", "b"):
        put(catalog, "k", namespace, namespace)
    catalog.values.put("u", "a", "k", "another tenant's", now_ns=1)
    assert get(catalog, "k", "a") == "a"

    def seen(namespace: str) -> list[Any]:
        return [one.namespace for one in catalog.values.search("t", namespace, now_ns=1)]

    assert seen("a") == ["a", "a/b", "a/b/c"]
    assert seen("a/b") == ["a/b", "a/b/c"]
    assert seen("b") == ["b"]
    assert seen("c") == []
    assert seen("") == ["a", "a/b", "a/b/c", "a0", "ab", "b"]
    assert [one.value for one in catalog.values.search("u", "", now_ns=1)] == ["another tenant's"]


def keys_are_searched_in_order(catalog: Catalog) -> None:
    keys = ["a", "a/1", "a/2", "a\x00", "b", "\u00e9", "\ud800", "\uffff", "\U0001f600", "%", "_"]
    for key in reversed(keys):
        put(catalog, key, key)
    keys.sort()
    assert found(catalog) == keys
    assert [get(catalog, key) for key in keys] == keys
    assert found(catalog, prefix="a") == ["a", "a\x00", "a/1", "a/2"]
    assert found(catalog, prefix="\ud800") == ["\ud800"]
    assert found(catalog, prefix="x") == []
    pages: list[str] = []
    while page := found(catalog, limit=3, after=pages[-1] if pages else ""):
        assert len(page) <= 3
        pages += page
    assert pages == keys
    assert found(catalog, prefix="a", after="a/1") == ["a/2"]
    assert found(catalog, limit=0) == []


def a_page_tears_no_key_apart(catalog: Catalog) -> None:
    for namespace in ("n", "n/1", "n/2"):
        for key in ("a", "b"):
            put(catalog, key, 0, namespace)
    assert found(catalog, limit=2) == ["a", "a", "a"]
    assert found(catalog, limit=2, after="a") == ["b", "b", "b"]
    assert found(catalog, limit=4) == ["a", "a", "a", "b", "b", "b"]


def fields_are_searched_for(catalog: Catalog) -> None:
    put(catalog, "1", {"a": {"b": 1, "c": "x"}, "n": None, "t": True})
    put(catalog, "2", {"a": {"b": 1.0, "c": "y"}, "t": 1})
    put(catalog, "3", {"a": 7})
    put(catalog, "4", "text")
    put(catalog, "5", {"a": {"b": [1]}})
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"a.b": 1}, ["1", "2"]),
        ({"a.b": 1, "a.c": "x"}, ["1"]),
        ({"n": None}, ["1"]),
        ({"t": True}, ["1"]),
        ({"t": 1}, ["2"]),
        ({"a": 7}, ["3"]),
        ({"a.b.c": 1}, []),
        ({"missing": None}, []),
        ({}, ["1", "2", "3", "4", "5"]),
    ]
    for where, wanted in cases:
        assert found(catalog, where=where) == wanted, where
    assert found(catalog, where={"a.b": 1}, limit=1) == ["1"]
    assert found(catalog, where={"a.b": 1}, limit=1, after="1") == ["2"]
    for wrong in ([1], {"x": 1}):
        refuses(UsageError, lambda wrong=wrong: found(catalog, where={"a": wrong}))


def hostile_names_are_bounded(catalog: Catalog) -> None:
    text = "\ud800\x00'; DROP TABLE keys; --"
    catalog.values.put(text, text, text, {text: text}, now_ns=1)
    one = catalog.values.get(text, text, text, now_ns=1)
    assert (one.tenant, one.namespace, one.key, one.value) == (text, text, text, {text: text})
    assert catalog.values.search(text, text, now_ns=1, where={text: text}) == [one]
    for names in (("x" * 1025, "n", "k"), ("t", "\u00e9" * 600, "k"), ("t", "n", "x" * 1025)):
        refuses(
            LimitExceeded,
            lambda names=names: catalog.values.put(names[0], names[1], names[2], 1, now_ns=1),
            says=("1024",),
        )
    refuses(UsageError, put, catalog, "", 1)
    assert found(catalog) == []


def values_outlive_every_trajectory(catalog: Catalog) -> None:
    trajectory, _ = started(catalog)
    put(catalog, "k", 1)
    catalog.trajectories.remove(trajectory.id)
    assert get(catalog, "k") == 1


def one_writer_wins_each_version(catalog: Catalog) -> None:
    put(catalog, "k", 0)
    rounds, failures = 100, list[BaseException]()

    def count() -> None:
        try:
            for _ in range(rounds):
                while True:
                    one = catalog.values.get("t", "n", "k", now_ns=1)
                    try:
                        put(catalog, "k", one.value + 1, expected_version=one.version)
                        break
                    except Conflict:
                        continue
        except BaseException as exc:
            failures.append(exc)
            raise

    workers = [threading.Thread(target=count) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    assert get(catalog, "k") == 3 * rounds


CHECKS: tuple[Callable[[Catalog], None], ...] = (
    values_have_versions,
    a_version_can_be_expected,
    a_change_that_is_asked_for_again_is_not_made_again,
    a_deletion_is_a_version,
    what_has_expired_is_not_there,
    a_sweep_removes_the_expired_and_the_old,
    tenants_and_namespaces_are_apart,
    keys_are_searched_in_order,
    a_page_tears_no_key_apart,
    fields_are_searched_for,
    hostile_names_are_bounded,
    values_outlive_every_trajectory,
    one_writer_wins_each_version,
)
