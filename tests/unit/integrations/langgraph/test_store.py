"""`SnapshotdStore` in a file: namespaces, filters, expiry, and search by words and by vectors."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph.store.base import GetOp, InvalidNamespaceError, PutOp, SearchOp
from langgraph.store.memory import InMemoryStore

from snapshotd.errors import UsageError
from snapshotd.integrations.langgraph import SnapshotdSaver, SnapshotdStore, items
from tests import long
from tests.langgraph_rig import config, converse, messages


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SnapshotdStore]:
    with SnapshotdStore(tmp_path / "agent.db") as store:
        yield store


def plain(results: list[Any]) -> list[Any]:
    """Without times, and what a search found in one order."""
    return [
        sorted((item.namespace, item.key, str(item.value)) for item in result)
        if isinstance(result, list) and result and hasattr(result[0], "key")
        else (result.namespace, result.key, result.value)
        if hasattr(result, "key")
        else result
        for result in results
    ]


@pytest.mark.parametrize("seed", long.seeds(3, 60))
def test_it_answers_as_the_store_in_memory_does(store: SnapshotdStore, seed: int) -> None:
    draw, other = random.Random(seed), InMemoryStore()
    labels = ["a", "ab", "b", "*", "é", "x y"]
    conditions = [
        {},
        {"n": 3},
        {"n": {"$gte": 4}},
        {"n": {"$ne": 2, "$lt": 7}},
        {"o": {"p": True}},
        {"l": [1, 2]},
        {"s": None},
    ]

    def namespace(least: int = 1) -> tuple[str, ...]:
        return tuple(draw.choice(labels) for _ in range(draw.randint(least, 3)))

    def operation() -> Any:
        kind = draw.random()
        if kind < 0.6:
            value = {"n": draw.randrange(9), "o": {"p": draw.random() < 0.5, "q": 1}, "l": [1, draw.randrange(3)]}
            return PutOp(namespace(), draw.choice("kl"), value if draw.random() < 0.8 else None)
        if kind < 0.8:
            return GetOp(namespace(), draw.choice("kl"))
        return SearchOp(namespace(0), filter=draw.choice(conditions), limit=1000)

    for _ in range(60):
        batch = [operation() for _ in range(draw.randint(1, 6))]
        assert plain(store.batch(batch)) == plain(other.batch(batch))
        for empty in [name for name, found in other._data.items() if not found]:
            del other._data[empty]  # it lists namespaces that were only asked for
        path: Any = namespace()
        matched = {draw.choice(["prefix", "suffix"]): path} if draw.random() < 0.7 else {}
        rest: Any = {
            "max_depth": draw.choice([None, 1, 2]),
            "limit": draw.choice([3, 100]),
            "offset": draw.randrange(2),
        }
        assert store.list_namespaces(**matched, **rest) == other.list_namespaces(**matched, **rest)


def test_namespaces_are_paths_and_tenants_see_nothing_of_each_other(tmp_path: Path, store: SnapshotdStore) -> None:
    store.put(("user", "1"), "k", {"v": 1})
    store.put(("user", "10"), "k", {"v": 10})
    store.put(("user", "1", "deep"), "k", {"v": 2})
    assert [item.value["v"] for item in store.search(("user", "1"))] == [2, 1]
    with SnapshotdStore(tmp_path / "agent.db", tenant="other") as other:
        assert (other.search(()), other.list_namespaces(), other.get(("user", "1"), "k")) == ([], [], None)
        other.put(("user", "1"), "k", {"v": "mine"})
        other.delete(("user", "10"), "k")
    item = store.get(("user", "1"), "k")
    assert item is not None
    assert (item.value, item.namespace, item.created_at.tzinfo is not None) == ({"v": 1}, ("user", "1"), True)
    assert store.list_namespaces(prefix=("user",), max_depth=2) == [("user", "1"), ("user", "10")]
    for bad in (("a.b",), ("",), ("langgraph",), ()):
        with pytest.raises(InvalidNamespaceError):
            store.put(bad, "k", {})
    with pytest.raises(InvalidNamespaceError):
        store.batch([PutOp(("a\0b",), "k", {})])
    with pytest.raises(UsageError, match="lone surrogate"):
        store.put(("a",), "\udc80", {})
    with pytest.raises(UsageError, match="not JSON"):
        store.put(("a",), "k", {"v": object()})
    with pytest.raises(UsageError, match=r"\$regex"):
        store.search(("user",), filter={"v": {"$regex": "x"}})
    assert store.search(("user",), filter={"v": {"$gt": "text"}}) == []


def test_words_are_found(store: SnapshotdStore) -> None:
    store.put(("m",), "food", {"text": "Ann likes crème brûlée, and pasta"})
    store.put(("m",), "work", {"note": {"deep": ["Ann works on the daemon", "pasta pasta pasta"]}})
    store.put(("n",), "else", {"text": "pasta"})
    store.put(("m",), "hidden", {"text": "pasta"}, index=False)
    store.put(("m",), "part", {"title": "tea", "text": "pasta"}, index=["title"])
    found = store.search(("m",), query="pasta, please!")
    assert [item.key for item in found] == ["work", "food"]
    assert found[0].score > found[1].score  # type: ignore[operator]
    assert [item.key for item in store.search(("m",), query="creme BRULEE")] == ["food"]
    assert [item.key for item in store.search((), query="pasta", filter={"text": "pasta"})] == ["else"]
    assert [item.key for item in store.search(("m",), query="tea")] == ["part"]
    for odd in ('"', "AND OR NOT", "pasta* NEAR(", "  ", "'; DROP"):
        store.search(("m",), query=odd)
    store.put(("m",), "food", {"text": "nothing"})
    store.delete(("m",), "work")
    assert store.search(("m",), query="pasta") == []


def vectors(texts: list[str]) -> list[list[float]]:
    return [[text.count("a") * 1.0, text.count("b") * 1.0, 0.5] for text in texts]


def test_a_search_by_meaning_goes_through_the_callers_embedding(tmp_path: Path) -> None:
    async def asked(texts: list[str]) -> list[list[float]]:
        return vectors(texts)

    for name, embed in (("sync.db", vectors), ("async.db", asked)):
        with SnapshotdStore(tmp_path / name, index={"dims": 3, "embed": embed, "fields": ["text", "more[*]"]}) as store:
            puts = [PutOp(("m",), "a", {"text": "aaaa"}), PutOp(("m",), "b", {"text": "bb", "more": ["a", "bbbb"]})]
            ask = SearchOp(("m",), query="bbbb", limit=5)
            if name == "sync.db":
                store.batch(puts)
                (found,) = store.batch([ask])
            else:
                asyncio.run(store.abatch(puts))
                (found,) = asyncio.run(store.abatch([ask]))
            assert [item.key for item in found] == ["b", "a"]
            assert found[0].score == pytest.approx(1, abs=1e-6)
    other: Any = {"dims": 2, "embed": lambda texts: [[1, 1]] * len(texts)}
    with SnapshotdStore(tmp_path / "sync.db", index=other) as store, pytest.raises(UsageError, match="2 numbers"):
        store.search(("m",), query="x")


def test_items_expire_and_reading_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10**18]
    monkeypatch.setattr(items.time, "time_ns", lambda: now[0])
    with SnapshotdStore(tmp_path / "a.db", ttl={"default_ttl": 10}) as store:
        store.put(("m",), "read", {"text": "one"})
        store.put(("m",), "unread", {"text": "two"})
        store.put(("m",), "kept", {"text": "three"}, ttl=None)
        now[0] += 9 * 60 * 10**9
        assert store.get(("m",), "read") is not None
        assert store.get(("m",), "unread", refresh_ttl=False) is not None
        now[0] += 2 * 60 * 10**9
        assert {item.key for item in store.search(("m",))} == {"read", "kept"}
        assert store.get(("m",), "unread") is None
        assert store.search(("m",), query="two") == []
        store.put(("n",), "sweeps", {})
        assert store._db.read("SELECT count(*) FROM item") == [(3,)]
        assert store._db.read("SELECT count(*) FROM item_text") == [(2,)]


def test_one_file_holds_a_saver_and_a_store(tmp_path: Path) -> None:
    with SnapshotdSaver(tmp_path / "agent.db") as saver, SnapshotdStore(tmp_path / "agent.db") as store:
        running = [
            threading.Thread(
                target=lambda number=number: [store.put((f"n{number}",), str(key), {}) for key in range(20)]
            )
            for number in range(4)
        ]
        for thread in running:
            thread.start()
        converse(saver, messages(10))
        for thread in running:
            thread.join()
        assert len(store.search((), limit=100)) == 80
        assert len(list(saver.list(config("talk")))) == 20
