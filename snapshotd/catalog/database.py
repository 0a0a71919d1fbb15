"""The database below the catalog: what `snapshotd.sqlite.Database` and `postgres.driver.PostgresDatabase` both are.

The catalog's SQL is written once, in words that both take: placeholders are `?`, or `?1` where a value comes twice;
`->`, `->>`, `json_each` and `json_array_length` look into JSON texts (PostgreSQL has them from `postgres/schema.py`).
A column that is ANY in `schema.py` takes a `TextBytes` where a text is not valid Unicode.

Errors of every method: DataLoss (damaged), OutOfSpace, Conflict (another one has been writing for 10 s), NotPermitted,
LimitExceeded (a value is too long), Unavailable (a server is away; in `transaction` nothing has changed, or the message
says that this is not known), InternalError.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from snapshotd.sqlite import Row, Value

__all__ = ["PAGE_CHARS", "PAGE_ROWS", "CatalogDatabase", "Row", "TextBytes", "Value"]

PAGE_ROWS, PAGE_CHARS = 500, 1 << 20
"""Most that one read takes of what may be long, so that no other waits longer."""


class TextBytes(bytes):
    """UTF-8 with surrogates of a text that is not valid Unicode. Plain bytes are bytes."""


class CatalogDatabase(Protocol):
    """All methods are thread-safe. Reads outside of `lock` and `transaction` see the latest commit, each its own."""

    @property
    def lock(self) -> AbstractContextManager[Any, bool | None]:
        """The lock to hold while several reads have to see one moment. It nests."""

    def read(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Run one statement and return all its rows. Writing statements belong inside `transaction`."""

    def read_one(self, sql: str, values: Sequence[Value] = ()) -> Row | None:
        """The first row, or None."""

    def read_page(self, sql: str, values: Sequence[Value], *, rows: int, size: int) -> list[Row]:
        """The first rows: at most `rows`, ending early once their texts add up to `size` characters. Not for a holder
        of `lock`."""

    def insert(self, sql: str, values: Sequence[Value]) -> int:
        """Run one INSERT and return the new row's number (`pk`)."""

    def write(self, sql: str, values: Sequence[Value] = ()) -> int:
        """Run one statement and return how many rows it changed."""

    def write_many(self, sql: str, values: Iterable[Sequence[Value]]) -> None:
        """Run one statement once per item."""

    def transaction(self) -> AbstractContextManager[None, bool | None]:
        """Writes inside become visible together at the end, or, on any exception, not at all. Does not nest. There is one
        writer at a time, so what a transaction has read holds until its end."""

    def flush(self) -> None:
        """Return when everything committed so far survives power loss."""

    def checkpoint(self) -> None:
        """Put what was committed into the database's main file, where it has one."""

    def problems(self) -> list[str]:
        """The problems that the database's own checks find; [] if there are none. Reads the whole of it."""

    def close(self) -> None:
        """Idempotent. Any other call afterwards is a defect."""
