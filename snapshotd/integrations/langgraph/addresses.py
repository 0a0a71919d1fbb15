"""Savers by address, to move threads between them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from langgraph.checkpoint.base import BaseCheckpointSaver

from snapshotd.errors import NotFound, Unsupported, UsageError
from snapshotd.integrations.langgraph.saver import SnapshotdSaver

_OTHERS = {
    "sqlite": ("langgraph.checkpoint.sqlite", "SqliteSaver", "langgraph-checkpoint-sqlite"),
    "postgres": ("langgraph.checkpoint.postgres", "PostgresSaver", "langgraph-checkpoint-postgres psycopg[binary]"),
    "postgresql": ("langgraph.checkpoint.postgres", "PostgresSaver", "langgraph-checkpoint-postgres psycopg[binary]"),
    "redis": ("langgraph.checkpoint.redis", "RedisSaver", "langgraph-checkpoint-redis"),
}
"""Scheme to the saver's module, its class, and the packages that have it."""


@contextmanager
def saver_at(address: str, *, may_create: bool) -> Iterator[BaseCheckpointSaver[Any]]:
    """The saver at a path (snapshotd's file), at `sqlite:///agent.db` (a path behind `sqlite:///`), `postgres://...` or
    `redis://...`. With `may_create` it is made if it is missing, tables too.

    UsageError (no such address; the service refuses), NotFound (there is no file), Unsupported (its package is not
    installed), and those of SnapshotdSaver."""
    scheme = urlsplit(address).scheme if "://" in address else ""
    if scheme == "":
        _check_there(Path(address), may_create)
        with SnapshotdSaver(address) as saver:
            yield saver
        return
    if scheme not in _OTHERS:
        raise UsageError(
            f"{address!r} is not the address of a saver; use a path, sqlite:///PATH, postgres://... or redis://..."
        )
    module, name, packages = _OTHERS[scheme]
    try:
        kind = getattr(importlib.import_module(module), name)
    except ImportError as exc:
        raise Unsupported(f"the saver of {scheme} is not installed: run `pip install {packages}`") from exc
    place = address
    if scheme == "sqlite":
        place = unquote(address.partition(":///")[2])
        _check_there(Path(place), may_create)
    with ExitStack() as opened:
        try:
            saver = opened.enter_context(kind.from_conn_string(place))
            if may_create:
                saver.setup()
            next(saver.list(None, limit=1), None)  # a damaged source is found before a target is made
        except Exception as exc:
            raise UsageError(f"the saver at {scheme}://... cannot be used: {words_of(exc)}") from exc
        yield saver


def words_of(exc: Exception) -> str:
    """The words of a saver's own error, on one line."""
    return " ".join(str(exc).split())[:300]


def _check_there(path: Path, may_create: bool) -> None:
    if not str(path) or path.is_dir():
        raise UsageError(f"{str(path)!r} is no file; name one, as in sqlite:///agent.db")
    if not may_create and not path.exists():
        raise NotFound(f"there is no file {path}; name the saver that has the threads")
