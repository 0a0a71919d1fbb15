"""A whole catalog from one database into another: from a file into a PostgreSQL server, and back.

Rows keep their numbers. The target is filled in one transaction, which reads everything again before it ends and compares
it with the source: so it has all, or nothing as before. The source is read as of one moment and stays as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from snapshotd import sqlite
from snapshotd.catalog.database import CatalogDatabase, Row, TextBytes
from snapshotd.catalog.file import open_database as open_file
from snapshotd.catalog.postgres import catalog as postgres
from snapshotd.errors import Conflict, DataLoss, InternalError, NotFound
from snapshotd.failpoints import hit
from snapshotd.kernel.files import sync_dir

TABLES = (
    "meta",
    "images",
    "trajectories",
    "stacks",
    "states",
    "lines",
    "snapshots",
    "tags",
    "messages",
    "entries",
    "approvals",
    "compensations",
    "keys",
    "key_versions",
    "damaged_outputs",
    "requests",
    "experiments",
    "experiment_branches",
)
"""All tables, each behind those that its rows name, but for references that are checked at the end of a transaction."""
_PAGE_ROWS, _PAGE_CHARS = 1000, 1 << 20
_URLS = ("postgresql://", "postgres://")


@dataclass(frozen=True, slots=True)
class CopiedTable:
    """A table that both have now. `sha256`: hash of its rows, in their order."""

    name: str
    row_count: int
    sha256: str


@dataclass(frozen=True, slots=True)
class _Table:
    """`columns`, and those of them that are its `key` and that hold any text (TEXT, or a BLOB in SQLite)."""

    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    any_text: frozenset[str]


def migrate(
    source: str, target: str, progress: Callable[[str], object], alone: Callable[[Path], AbstractContextManager[object]]
) -> list[CopiedTable]:
    """Copy the catalog at `source` to `target`; each is the path of a file or the URL of a PostgreSQL database. `alone`:
    keeps others out of a file. NotFound (no source), Conflict (the target is not empty, or in use), DataLoss (a damaged
    source, or what came there is not what left here), and the errors of opening a catalog."""
    if not _is_url(source) and not Path(source).exists():
        raise NotFound(f"there is no catalog {source}: name one that exists")
    with (
        nullcontext() if _is_url(source) else alone(Path(source)),
        closing(_open(source)) as old,
        _filling(target, alone) as (new, finish),
        old.lock,
        new.transaction(),
    ):
        for table in _tables():
            if new.read(f"SELECT 1 FROM {table.name} LIMIT 1"):
                raise Conflict(
                    f"the catalog {_without_password(target)} is not empty ({table.name} has rows): name another target"
                )
        copied = [_copy(old, new, table, progress) for table in _tables()]
        for table, left in zip(_tables(), copied, strict=True):
            progress(f"verifying {table.name}")
            arrived = _digest(table, _pages(new, table))
            if arrived != left:
                raise DataLoss(
                    f"table {table.name} has {arrived.row_count} rows with the hash {arrived.sha256[:12]} in "
                    f"{_without_password(target)}, and {left.row_count} with {left.sha256[:12]} in "
                    f"{_without_password(source)}: nothing was kept; report this"
                )
        finish()
        hit("catalog.migrate.filled")
    return copied


def _is_url(place: str) -> bool:
    return place.startswith(_URLS)


def _without_password(place: str) -> str:
    """The place as people see it, without the password of a database."""
    return place if not _is_url(place) else "in PostgreSQL"


def _open(place: str) -> CatalogDatabase:
    return postgres.open_database(place) if _is_url(place) else open_file(Path(place))


@contextmanager
def _filling(
    place: str, alone: Callable[[Path], AbstractContextManager[object]]
) -> Iterator[tuple[CatalogDatabase, Callable[[], object]]]:
    """An open target, and what to call at the end of the transaction that fills it. A file has its name only when it is
    whole."""
    if _is_url(place):
        database = postgres.open_database(place)
        with closing(database):
            yield database, lambda: postgres.settle(database)
        return
    path = Path(place)
    if path.exists():
        raise Conflict(f"the file {path} is there already: name a target that does not exist, or move it away")
    with alone(path):
        made = path.with_name(f"{path.name}.migrating")
        sqlite.remove(made)  # left by a migration that was cut off
        try:
            with closing(open_file(made)) as file:
                yield file, lambda: None
                file.fold()
            sqlite.set_aside(made, path)
        except BaseException:
            sqlite.remove(made)
            raise
        sync_dir(path.parent)


def _tables() -> Sequence[_Table]:
    """The tables as a new file has them."""
    with closing(open_file(":memory:")) as empty:
        there = {row[0] for row in empty.read("SELECT name FROM sqlite_schema WHERE type = 'table'")}
        if there != {*TABLES}:
            raise InternalError(f"a migration forgets or invents tables: {', '.join(sorted(there ^ {*TABLES}))}")
        return [_describe(name, empty.read(f"PRAGMA table_info({name})")) for name in TABLES]


def _describe(name: str, columns: Sequence[Row]) -> _Table:
    key = sorted((place, column) for _, column, _, _, _, place in columns if place)
    return _Table(
        name,
        tuple(row[1] for row in columns),
        tuple(column for _, column in key),
        frozenset(row[1] for row in columns if row[2] == "ANY"),
    )


def _copy(old: CatalogDatabase, new: CatalogDatabase, table: _Table, progress: Callable[[str], object]) -> CopiedTable:
    total, done = int(old.read(f"SELECT count(*) FROM {table.name}")[0][0]), 0
    insert = f"INSERT INTO {table.name} ({', '.join(table.columns)}) VALUES ({', '.join('?' * len(table.columns))})"

    def copying() -> Iterator[list[Row]]:
        nonlocal done
        for page in _pages(old, table):
            new.write_many(insert, page)
            done += len(page)
            progress(f"{table.name}: {done} of {total} rows")
            yield page

    return _digest(table, copying())


def _pages(database: CatalogDatabase, table: _Table) -> Iterator[list[Row]]:
    """The rows of a table by its key. A text that is not valid Unicode is `TextBytes`, whichever database gives it."""
    key, select = ", ".join(table.key), f"SELECT {', '.join(table.columns)} FROM {table.name}"
    places = [table.columns.index(column) for column in table.key]
    free = [place for place, column in enumerate(table.columns) if column in table.any_text]
    behind, last = "", ()
    while page := database.read_page(f"{select}{behind} ORDER BY {key}", last, rows=_PAGE_ROWS, size=_PAGE_CHARS):
        behind = f" WHERE ({key}) > ({', '.join('?' * len(places))})"
        last = tuple(page[-1][place] for place in places)
        yield [_normal(row, free) for row in page] if free else page


def _normal(row: Row, free: Sequence[int]) -> Row:
    changed = list(row)
    for place in free:
        value = row[place]
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                changed[place] = TextBytes(value.encode(errors="surrogatepass"))
        elif isinstance(value, bytes):
            changed[place] = TextBytes(value)
    return tuple(changed)


def _digest(table: _Table, pages: Iterator[list[Row]]) -> CopiedTable:
    digest, count = hashlib.sha256(), 0
    for page in pages:
        count += len(page)
        for row in page:
            for value in row:
                data = (
                    value.encode()
                    if isinstance(value, str)
                    else value
                    if isinstance(value, bytes)
                    else repr(value).encode()
                )
                digest.update(f"{type(value).__name__}:{len(data)}:".encode())
                digest.update(data)
    return CopiedTable(table.name, count, digest.hexdigest())
