"""The index: which pack holds an object, and where. One SQLite file, which can be rebuilt from the packs alone.

Tables (`user_version` 3; ids are raw bytes):

    packs     number (primary key), id (16 bytes), bytes, objects (frames in it)
    objects   id (primary key), kind, pack (number), offset, stored (the whole frame), plain, base (id or NULL), depth (0: no delta)
    records   number (ascending in the order they were saved), id

Durability: WAL with synchronous=FULL, so a committed transaction survives power loss. The writer commits only after the
packs are durable. Concurrency: one writer (`open_index(write=True)`); any number of readers, which see each transaction
as a whole. Thread-safe. With packs but no index, opening says DataLoss.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar, NamedTuple

from snapshotd.errors import DataLoss, InternalError
from snapshotd.repo.base import ObjectKind
from snapshotd.sqlite import Database, Form, create
from snapshotd.store.base import Store

INDEX_VERSION = 3
APPLICATION_ID = 0x736E7078  # "snpx"
_SCHEMA = """
CREATE TABLE packs (number INTEGER PRIMARY KEY, id BLOB NOT NULL UNIQUE, bytes INTEGER NOT NULL, objects INTEGER NOT NULL);
CREATE TABLE objects (
    id BLOB PRIMARY KEY, kind INTEGER NOT NULL, pack INTEGER NOT NULL REFERENCES packs(number), offset INTEGER NOT NULL,
    stored INTEGER NOT NULL, plain INTEGER NOT NULL, base BLOB, depth INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE records (number INTEGER PRIMARY KEY AUTOINCREMENT, id BLOB NOT NULL UNIQUE);
"""
_REMEDY = "run `snapshotd repair` to make it again from the packs"
FORM = Form(
    "the repository's index",
    APPLICATION_ID,
    INDEX_VERSION,
    INDEX_VERSION,
    _REMEDY,
    durable_commits=True,
    pragmas="PRAGMA cache_size = -16384;",
    checksums=True,
)
_COLUMNS = "o.id, o.kind, p.id, o.offset, o.stored, o.plain, o.base, o.depth"
_MANY = 256


class IndexEntry(NamedTuple):
    """The place of an object. `offset` and `stored` describe its whole frame in the pack; `depth` is the number of
    deltas to undo."""

    id: bytes
    kind: ObjectKind
    pack: bytes
    offset: int
    stored: int
    plain: int
    base: bytes | None
    depth: int


class PackRow(NamedTuple):
    """A pack: its id, length and number of frames."""

    id: bytes
    bytes: int
    objects: int


class Index:
    """See the module's text. Made by `open_index` and `create_index`."""

    remedy: ClassVar[str] = "run `snapshotd check`, then `snapshotd repair`"
    """The way out when a pack is damaged."""

    def __init__(self, path: Path, write: bool) -> None:
        """Opens an existing index. Errors: see `sqlite.Database`."""
        self.path = path
        self._db = Database(path, FORM, write=write)
        self._read_from("objects")

    def _read_from(self, table: str) -> None:
        """Look for objects in this table, or view, from now on."""
        select = f"SELECT {_COLUMNS} FROM {table} o JOIN packs p ON p.number = o.pack"
        self._find_sql = f"{select} WHERE o.id = ?"
        self._many_sql = f"{select} WHERE o.id IN ({','.join('?' * _MANY)})"
        self._page_sql = f"{select} WHERE o.id > ?"

    def close(self) -> None:
        """Idempotent. The last one to close folds the WAL into the file."""
        self._db.close()

    def fold(self) -> None:
        """Put everything that is in the WAL into the file itself, durably; `close` only tries this. No other process
        may have it open. OutOfSpace, Conflict."""
        self._db.fold()

    def problems(self) -> list[str]:
        """The problems that SQLite's own checks find; [] if there are none. Reads the whole file."""
        return self._db.problems()

    def find(self, object_id: bytes) -> IndexEntry | None:
        """An object's place; None if there is none."""
        for row in self._db.read(self._find_sql, (object_id,)):
            return entry_of(row)
        return None

    def find_readable(self, object_id: bytes) -> IndexEntry | None:
        """Like `find`, with objects that can still be read and that nothing new may build upon (in a fleet)."""
        return self.find(object_id)

    def find_many(self, object_ids: Sequence[bytes]) -> dict[bytes, IndexEntry]:
        """The places of the objects that exist. About 2 us each, against 8 us for `find`."""
        found: dict[bytes, IndexEntry] = {}
        for start in range(0, len(object_ids), _MANY):
            some = object_ids[start : start + _MANY]
            padded = (*some, *([None] * (_MANY - len(some))))
            for row in self._db.read(self._many_sql, padded):
                entry = entry_of(row)
                found[entry.id] = entry
        return found

    def objects(self, kind: ObjectKind | None = None, packs: Collection[bytes] | None = None) -> Iterator[IndexEntry]:
        """Every object, or those of a kind or in some packs (which takes as long as reading all). Read in pages by id:
        objects committed meanwhile may be there or not."""
        condition = ""
        values: list[bytes | int | str] = []
        if kind is not None:
            condition, values = condition + " AND o.kind = ?", [*values, int(kind)]
        if packs is not None:
            numbers = [
                int(row[0]) for raw in packs for row in self._db.read("SELECT number FROM packs WHERE id = ?", (raw,))
            ]
            condition, values = (
                condition + " AND o.pack IN (SELECT value FROM json_each(?))",
                [*values, json.dumps(numbers)],
            )
        last = b""
        while rows := self._db.read(f"{self._page_sql}{condition} ORDER BY o.id LIMIT 5000", (last, *values)):
            yield from map(entry_of, rows)
            last = rows[-1][0]

    def packs(self) -> list[PackRow]:
        """Every pack, oldest first."""
        return [PackRow(*row) for row in self._db.read("SELECT id, bytes, objects FROM packs ORDER BY number")]

    def stored_bytes(self) -> int:
        """Size of all packs."""
        return int(self._db.read("SELECT coalesce(sum(bytes), 0) FROM packs")[0][0])

    def records(self) -> Iterator[bytes]:
        """The ids of all records in the order they were saved. Records saved meanwhile may or may not be among them."""
        last = 0
        while rows := self._db.read(
            "SELECT number, id FROM records WHERE number > ? ORDER BY number LIMIT 1000", (last,)
        ):
            yield from (row[1] for row in rows)
            last = rows[-1][0]

    def transaction(self) -> AbstractContextManager[None]:
        """Everything inside becomes durable and visible at the end, or nothing does (any exception). Not nested.
        OutOfSpace; OSError when the disk fails: then any part may be durable, and the index must not be written to
        again."""
        return self._db.transaction()

    def add_pack(self, pack: PackRow) -> None:
        """Add a pack, inside a transaction. Not an error if it is there."""
        self._db.write("INSERT OR IGNORE INTO packs (id, bytes, objects) VALUES (?, ?, ?)", pack)

    def add_objects(self, entries: Iterable[IndexEntry]) -> None:
        """Inside a transaction; their packs are there. An object that is there already gets the new place. A new record
        is the last."""
        numbers: dict[bytes, int] = {}
        rows, records = [], []
        for entry in entries:
            number = numbers.get(entry.pack)
            if number is None:
                number = numbers[entry.pack] = self._pack_number(entry.pack)
            rows.append(
                (entry.id, int(entry.kind), number, entry.offset, entry.stored, entry.plain, entry.base, entry.depth)
            )
            if entry.kind == ObjectKind.RECORD:
                records.append((entry.id,))
        self._db.write_many("INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        if records:
            self._db.write_many("INSERT OR IGNORE INTO records (id) VALUES (?)", records)

    def add_stored(self, packs: Iterable[tuple[PackRow, Sequence[IndexEntry]]]) -> None:
        """Add packs, each with its objects, inside a transaction."""
        for row, entries in packs:
            self.add_pack(row)
            self.add_objects(entries)

    def remove_objects(self, object_ids: Iterable[bytes]) -> None:
        """Remove objects, inside a transaction. Missing ones are no error."""
        ids = [(object_id,) for object_id in object_ids]
        self._db.write_many("DELETE FROM objects WHERE id = ?", ids)
        self._db.write_many("DELETE FROM records WHERE id = ?", ids)

    def remove_empty_packs(self, packs: Iterable[bytes]) -> None:
        """Remove packs, inside a transaction. The caller knows that no object is in them, so none is searched for."""
        self._db.write_many("DELETE FROM packs WHERE id = ?", [(pack,) for pack in packs])

    def _pack_number(self, pack: bytes) -> int:
        row = self._db.read_one("SELECT number FROM packs WHERE id = ?", (pack,))
        if row is None:
            raise InternalError(f"objects of pack {pack.hex()} were added to the index before the pack")
        return int(row[0])


def open_index(path: Path, store: Store, kind: type[Index] = Index) -> Index:
    """The index for writing; a new one if there are neither an index nor packs. DataLoss when there are packs and no
    index."""
    if not path.exists():
        for key in store.keys("packs/"):
            raise missing_error(path, key)
        create_index(path)
    return kind(path, write=True)


def missing_error(path: Path, key: str) -> DataLoss:
    """The error of an index that is missing though there is a pack."""
    return DataLoss(
        f"the repository's index {path} is missing although there are packs ({key}): run `snapshotd repair` to make it again"
    )


def create_index(path: Path) -> None:
    """A new, empty index at `path`, durable. Replaces an existing index (close it before). Errors: see
    `sqlite.create`."""
    create(path, FORM, f"PRAGMA user_version = {INDEX_VERSION}; {_SCHEMA}")


def entry_of(row: Sequence) -> IndexEntry:  # type: ignore[type-arg]
    """The place that a row of `objects` says. DataLoss when no row can be so."""
    try:
        entry = IndexEntry(row[0], ObjectKind(row[1]), row[2], row[3], row[4], row[5], row[6], row[7])
        if len(entry.pack) == 16 and entry.offset >= 0 and entry.stored > 0 and entry.plain >= 0 and entry.depth >= 0:
            return entry
        what = "a place that cannot be"
    except (ValueError, TypeError):  # a damaged value can be of any type
        what = "values that cannot be"
    raise DataLoss(f"the index has an object with {what}: run `snapshotd repair` to make it again")
