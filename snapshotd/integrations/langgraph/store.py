"""`SnapshotdStore`: LangGraph's long-term memory in a file, which may be the saver's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from langgraph.store.base import (
    BaseStore,
    GetOp,
    IndexConfig,
    Item,
    ListNamespacesOp,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    TTLConfig,
    ensure_embeddings,
    get_text_at_path,
    validate_op_namespace,
)

from snapshotd.integrations.langgraph.checkpoints import name_of
from snapshotd.integrations.langgraph.file import open_file
from snapshotd.integrations.langgraph.items import Items, Namespace, Stored, is_under

_NS_PER_MINUTE = 60 * 10**9
_Texts = dict[tuple[Namespace, str], list[str]]


class SnapshotdStore(BaseStore):
    """A store for LangGraph in one file, with search by words, or by meaning when it is given an embedding.

        with SnapshotdStore("agent.db") as store:
            graph = builder.compile(store=store)

    Nothing of one tenant is seen by another. A `batch` is one durable transaction, whose reads see what was there before
    it. An item with a time to live (in minutes) is gone when that has passed since it was put, or read, unless the read
    says otherwise. Without a query, the items that changed last come first.

    Any number of threads and processes may use one file. Errors of every method: those of `SnapshotdSaver`; UsageError
    also for a value that is not JSON; InvalidNamespaceError.
    """

    supports_ttl = True

    def __init__(
        self,
        path: str | Path,
        *,
        tenant: str = "default",
        index: IndexConfig | None = None,
        ttl: TTLConfig | None = None,
    ) -> None:
        """Open a file, made when there is none. `index`: the embedding that a query goes through, and the fields that it
        sees (all texts without `fields`; "$" is the whole value as JSON). `ttl`: `default_ttl` and
        `refresh_on_read`. Errors: as `SnapshotdSaver`."""
        self._db = open_file(path)
        self._items = Items(self._db, name_of("tenant", tenant))
        self.ttl_config = ttl
        self.index_config = index
        self._fields: Sequence[str] | None = (index or {}).get("fields")
        self._embeddings = None if index is None else ensure_embeddings(index["embed"])

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Do several things at once; see the class. `put`, `get`, `search` and the others come here."""
        todo, texts, queries = self._prepare(ops)
        embed = self._embeddings
        if embed is None:
            return self._do(todo, texts, {}, {})
        words = [text for some in texts.values() for text in some]
        vectors = dict(zip(words, embed.embed_documents(words), strict=True)) if words else {}
        return self._do(todo, texts, vectors, {query: embed.embed_query(query) for query in queries})

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """See `batch`."""
        todo, texts, queries = self._prepare(ops)
        embed = self._embeddings
        if embed is None:
            return await asyncio.to_thread(self._do, todo, texts, {}, {})
        words = [text for some in texts.values() for text in some]
        vectors = dict(zip(words, await embed.aembed_documents(words), strict=True)) if words else {}
        asked = await asyncio.gather(*map(embed.aembed_query, queries))
        return await asyncio.to_thread(self._do, todo, texts, vectors, dict(zip(queries, asked, strict=True)))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _prepare(self, ops: Iterable[Op]) -> tuple[list[Op], _Texts, list[str]]:
        """Check the operations. Returns them, the texts of the values that they put, and their queries. UsageError;
        InvalidNamespaceError."""
        todo, texts, queries = list(ops), _Texts(), dict[str, None]()
        for op in todo:
            validate_op_namespace(op)
            if isinstance(op, GetOp | PutOp):
                _check(op.namespace, op.key)
            elif isinstance(op, SearchOp):
                _check(op.namespace_prefix)
                queries |= {op.query: None} if op.query else {}
            if isinstance(op, PutOp) and op.value is not None and op.index is not False:
                fields = op.index if op.index is not None else self._fields
                found = (
                    _strings(op.value)
                    if fields is None
                    else (text for field in fields for text in get_text_at_path(op.value, field))
                )
                texts[op.namespace, op.key] = [text for text in found if text]
        return todo, texts, list(queries)

    def _do(
        self,
        todo: list[Op],
        texts: _Texts,
        vectors: Mapping[str, Sequence[float]],
        queries: Mapping[str, Sequence[float]],
    ) -> list[Result]:
        puts = {(op.namespace, op.key): op for op in todo if isinstance(op, PutOp)}
        refreshing = any(isinstance(op, GetOp | SearchOp) and op.refresh_ttl for op in todo) and self._any_expires()
        with self._db.transaction() if puts or refreshing else self._db.reading():
            results = [self._answer(op, queries, refreshing) for op in todo]
            for op in puts.values():
                if op.value is None:
                    self._items.delete(op.namespace, op.key)
                    continue
                words = texts.get((op.namespace, op.key), [])
                ttl = None if op.ttl is None else int(op.ttl * _NS_PER_MINUTE)
                self._items.put(
                    op.namespace, op.key, op.value, words, [vectors[word] for word in words if vectors], ttl
                )
            if puts:
                self._items.sweep()
        return results

    def _answer(self, op: Op, queries: Mapping[str, Sequence[float]], refreshing: bool) -> Result:
        if isinstance(op, GetOp):
            found = self._items.get(op.namespace, op.key)
            if found is not None and op.refresh_ttl and refreshing:
                self._items.refresh([found])
            return None if found is None else Item(**_fields(found))
        if isinstance(op, SearchOp):
            items = self._items.search(op.namespace_prefix, op.filter, op.query, queries.get(op.query or ""))
            chosen = list(islice(items, op.offset, op.offset + op.limit))
            if op.refresh_ttl and refreshing:
                self._items.refresh(chosen)
            return [SearchItem(**_fields(item), score=item.score) for item in chosen]
        if isinstance(op, ListNamespacesOp):
            conditions = op.match_conditions or ()
            names = [name for name in self._items.namespaces() if all(is_under(name, each) for each in conditions)]
            if op.max_depth is not None:
                names = sorted({name[: op.max_depth] for name in names})
            return names[op.offset : op.offset + op.limit]
        return None

    def _any_expires(self) -> bool:
        return self._db.read_one("SELECT 1 FROM item WHERE expires_ns IS NOT NULL LIMIT 1") is not None


def _fields(item: Stored) -> dict[str, Any]:
    return {
        "namespace": item.namespace,
        "key": item.key,
        "value": item.value,
        "created_at": datetime.fromtimestamp(item.created_ns / 1e9, UTC),
        "updated_at": datetime.fromtimestamp(item.updated_ns / 1e9, UTC),
    }


def _strings(value: object) -> Iterator[str]:
    """All texts in a value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for item in value.values() for text in _strings(item))
    elif isinstance(value, list | tuple):
        yield from (text for item in value for text in _strings(item))


def _check(namespace: Namespace, key: str = "") -> None:
    for label in (*namespace, key):
        name_of("name", label)
