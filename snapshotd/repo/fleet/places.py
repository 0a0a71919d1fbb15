"""The index of a node of a fleet: all packs of all nodes, and what the other nodes do not know yet.

Tables beside those of `Index`, made when a node opens its index for the first time:

    condemned        like `objects`, with the time (milliseconds): can be read, and nothing new builds upon it
    copies           like `objects`, without depth: further places of objects that several nodes stored at the same time
    foreign_packs    pack id, node: packs that are not this node's own
    removed_packs    pack id, time: packs in which nothing lives; their bytes go after the grace
    dropped          object id, pack id: places that an object had, in packs that may stay
    merged           node, number and seal of its last segment here, and the number that this node's segments have told
    changed          objects, and `changed_packs` packs, that differ from what this node has published
    outbox           the segment that is being published, and the last changes that it holds

A change and its row in `changed` are one transaction, and so are a foreign segment and its row in `merged`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from snapshotd.errors import DataLoss
from snapshotd.repo.base import ObjectKind
from snapshotd.repo.format.index import Index, IndexEntry, PackRow, entry_of
from snapshotd.repo.format.segment import FIRST
from snapshotd.repo.reading.reader import MAX_DEPTH

COPY_COLUMNS = "id, kind, pack, offset, stored, plain, base"
_OBJECT = """id BLOB{} NOT NULL, kind INTEGER NOT NULL, pack INTEGER NOT NULL REFERENCES packs(number),
    offset INTEGER NOT NULL, stored INTEGER NOT NULL, plain INTEGER NOT NULL, base BLOB"""
_TABLES = f"""
CREATE TABLE IF NOT EXISTS condemned ({_OBJECT.format(" PRIMARY KEY")}, depth INTEGER NOT NULL, at_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS copies ({_OBJECT.format("")}, PRIMARY KEY (id, pack)) WITHOUT ROWID;
CREATE VIEW IF NOT EXISTS known AS SELECT * FROM objects
    UNION ALL SELECT id, kind, pack, offset, stored, plain, base, depth FROM condemned;
CREATE TABLE IF NOT EXISTS foreign_packs (id BLOB PRIMARY KEY, node TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS removed_packs (id BLOB PRIMARY KEY, at_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS dropped (id BLOB NOT NULL, pack BLOB NOT NULL, PRIMARY KEY (id, pack)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS dropped_pack ON dropped (pack);
CREATE TABLE IF NOT EXISTS merged (node TEXT PRIMARY KEY, number INTEGER NOT NULL, seal BLOB NOT NULL, told INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS changed (number INTEGER PRIMARY KEY AUTOINCREMENT, id BLOB NOT NULL UNIQUE, pack BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS changed_packs (number INTEGER PRIMARY KEY AUTOINCREMENT, id BLOB NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS outbox (
    number INTEGER PRIMARY KEY, data BLOB NOT NULL, objects_upto INTEGER NOT NULL, packs_upto INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS objects_base ON objects (base) WHERE base IS NOT NULL;
CREATE INDEX IF NOT EXISTS condemned_base ON condemned (base) WHERE base IS NOT NULL;
CREATE INDEX IF NOT EXISTS objects_pack ON objects (pack);
CREATE INDEX IF NOT EXISTS condemned_pack ON condemned (pack);
CREATE INDEX IF NOT EXISTS copies_pack ON copies (pack);
"""


class FleetPlaces(Index):
    """The tables, what is looked up in them, and the changes that are no node's own. See the module's text. For reading it
    needs tables that a writer has made."""

    def __init__(self, path: Path, write: bool) -> None:
        super().__init__(path, write)
        if write:
            with self._db.transaction():
                for statement in _TABLES.split(";\n"):
                    if statement.strip():
                        self._db.write(statement)
        self._readable_sql = self._find_sql.replace("FROM objects o", "FROM known o")

    def find_readable(self, object_id: bytes) -> IndexEntry | None:
        for row in self._db.read(self._readable_sql, (object_id,)):
            return entry_of(row)
        return None

    @contextmanager
    def seeing_condemned(self) -> Iterator[None]:
        """Find condemned objects and removed packs like all others, inside the block."""
        self._read_from("known")
        try:
            yield
        finally:
            self._read_from("objects")

    def packs(self) -> list[PackRow]:
        if "FROM known" in self._find_sql:
            return super().packs()
        removed = {row[0] for row in self._db.read("SELECT id FROM removed_packs")}
        return [row for row in super().packs() if row.id not in removed]

    def knows_pack(self, pack: bytes) -> bool:
        """True if the pack is there, or removed."""
        return self._db.read_one("SELECT 1 FROM packs WHERE id = ?", (pack,)) is not None

    def home_of(self, pack: bytes) -> str | None:
        """The node that made a pack; None for this node itself, and for packs that are not known."""
        row = self._db.read_one("SELECT node FROM foreign_packs WHERE id = ?", (pack,))
        return None if row is None else str(row[0])

    def last_merged(self, node: str) -> tuple[int, bytes]:
        """Number and seal of the last segment of a node that is in this index."""
        row = self._db.read_one("SELECT number, seal FROM merged WHERE node = ?", (node,))
        return (0, FIRST) if row is None else (int(row[0]), bytes(row[1]))

    def condemned_objects(self) -> Mapping[bytes, int]:
        """Every condemned object, with its time in milliseconds."""
        return dict(self._db.read("SELECT id, at_ms FROM condemned"))

    def removed_packs(self, limit_ms: int) -> list[bytes]:
        """Packs that were removed at this time or before, and hold nothing that lives or was condemned later."""
        rows = self._db.read(
            "SELECT r.id FROM removed_packs r JOIN packs p ON p.id = r.id WHERE r.at_ms <= ?"
            " AND NOT EXISTS (SELECT 1 FROM objects o WHERE o.pack = p.number)"
            " AND NOT EXISTS (SELECT 1 FROM condemned c WHERE c.pack = p.number AND c.at_ms > ?)",
            (limit_ms, limit_ms),
        )
        return [bytes(row[0]) for row in rows]

    def keep_pack(self, pack: bytes) -> bool:
        return self._db.write("DELETE FROM removed_packs WHERE id = ?", (pack,)) > 0

    def settle(self, ids: Sequence[bytes]) -> None:
        """Give objects that were put in these places, and the deltas against them, the depths that follow from their bases
        here. DataLoss when a base is missing, or deltas stand on each other."""
        waiting, placed = deque(ids), set(ids)
        rounds: dict[bytes, int] = {}
        while waiting:
            raw = waiting.popleft()
            rounds[raw] = rounds.get(raw, 0) + 1
            row = self._db.read_one(
                "SELECT o.depth, o.base, b.depth FROM known o LEFT JOIN known b ON b.id = o.base WHERE o.id = ?", (raw,)
            )
            if row is None:
                continue
            if (row[1] is not None and row[2] is None) or rounds[raw] > MAX_DEPTH:
                what = f"the object {raw.hex()} builds upon one that no node has told of"
                raise DataLoss(f"{what}: run `snapshotd check` on the node that stored it")
            depth = 0 if row[1] is None else row[2] + 1
            if depth != row[0] or raw in placed:
                placed.discard(raw)
                for table in ("objects", "condemned"):
                    self._db.write(f"UPDATE {table} SET depth = ? WHERE id = ?", (depth, raw))
                    waiting += [one[0] for one in self._db.read(f"SELECT id FROM {table} WHERE base = ?", (raw,))]

    def use_copy(self, raw: bytes, pack: bytes | None = None) -> bool:
        """Let an object's copy in a pack, or its next one, be its place; the caller settles it. False if there is none."""
        row = self._db.read_one(
            f"SELECT {COPY_COLUMNS} FROM copies WHERE id = ? AND pack = coalesce((SELECT number FROM packs WHERE id = ?), pack)"
            " ORDER BY pack LIMIT 1",
            (raw, pack),
        )
        if row is None:
            return False
        self._db.write("INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?, ?, ?, 0)", row)
        self._db.write("DELETE FROM copies WHERE id = ? AND pack = ?", (raw, row[2]))
        return True

    def remember_records(self, ids: Sequence[bytes]) -> None:
        kind = int(ObjectKind.RECORD)
        add = "INSERT OR IGNORE INTO records (id) SELECT id FROM objects WHERE id = ? AND kind = ?"
        self._db.write_many(add, [(raw, kind) for raw in ids])

    def drop_pack(self, pack: bytes) -> None:
        for (number,) in self._db.read("SELECT number FROM packs WHERE id = ?", (pack,)):
            self._db.write("DELETE FROM copies WHERE pack = ?", (number,))
            self._db.write("DELETE FROM condemned WHERE pack = ?", (number,))
            rows = self._db.read("SELECT id FROM objects WHERE pack = ?", (number,))
            moved = {row[0] for row in rows if self.use_copy(row[0])}
            Index.remove_objects(self, [row[0] for row in rows if row[0] not in moved])
            self.settle(list(moved))
            self._db.write("DELETE FROM packs WHERE number = ?", (number,))
        self._db.write("DELETE FROM dropped WHERE pack = ?", (pack,))
        for table in ("foreign_packs", "removed_packs"):
            self._db.write(f"DELETE FROM {table} WHERE id = ?", (pack,))
