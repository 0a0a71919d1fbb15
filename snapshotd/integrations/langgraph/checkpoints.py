"""Threads, checkpoints and writes in the file. Knows LangGraph's records, not its classes nor their serialisation."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import ormsgpack

from snapshotd.errors import UsageError
from snapshotd.integrations.langgraph import codec
from snapshotd.integrations.langgraph.commits import Commits
from snapshotd.integrations.langgraph.values import CutValue, Packed, StoredValues, json_array
from snapshotd.sqlite import Database, Row, Value

_SELECT = (
    "SELECT c.pk, c.space, c.id, p.id, c.metadata, c.body FROM checkpoint c LEFT JOIN checkpoint p ON p.pk = c.parent"
)
_FIND = """
WITH found AS MATERIALIZED (
    SELECT c.pk, c.id, c.parent, c.metadata, c.body, s.pk AS space, t.family, f.epoch
    FROM thread t CROSS JOIN space s ON s.thread = t.pk AND s.ns = ? CROSS JOIN family f ON f.pk = t.family
    CROSS JOIN checkpoint c ON c.space = s.pk AND c.shown {}
)
SELECT space, family, epoch, pk, id, (SELECT id FROM checkpoint WHERE pk = found.parent), metadata, body FROM found
UNION ALL
SELECT NULL, NULL, NULL, w.path, w.task, w.idx, w.channel, w.value FROM found CROSS JOIN writes w ON w.checkpoint = found.pk
"""
_FIND_ONE, _FIND_LATEST = (
    _FIND.format("AND c.id = ? WHERE t.name = ?"),
    _FIND.format("WHERE t.name = ? ORDER BY c.id DESC LIMIT 1"),
)
"""A checkpoint, then its writes. In one statement: each further one takes as long as half of this."""
_KEPT_PLACES, _KEPT_BODIES = 1024, 64


class CheckpointPlace(NamedTuple):
    """A thread's namespace: its row, its names, the family that its pieces belong to, and how often something was
    removed from that family."""

    space: int
    thread: str
    ns: str
    family: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Body:
    """The content of a checkpoint's row beside its names and metadata."""

    state: tuple[str, bytes]
    """The checkpoint without its values, serialised."""
    values: dict[str, Packed]
    """By channel."""

    def encode(self) -> bytes:
        rows = {channel: value.row() for channel, value in self.values.items()}
        return codec.compress(ormsgpack.packb([*self.state, rows]))

    @classmethod
    def decode(cls, stored: bytes) -> Body:
        kind, data, rows = ormsgpack.unpackb(codec.expand(stored))
        return cls((kind, data), {channel: Packed.of(row) for channel, row in rows.items()})


class Write(NamedTuple):
    """A task's write to a channel. It replaces one of the same task and number if `replaces`."""

    task: str
    number: int
    path: str
    channel: str
    value: CutValue
    replaces: bool


class FoundCheckpoint(NamedTuple):
    """A checkpoint as it was read, with all that is needed to make its values without the file."""

    pk: int
    place: CheckpointPlace
    id: str
    parent: str | None
    metadata: dict[str, Any]
    body: Body
    writes: Sequence[tuple[str, str, Packed]] = ()
    """(task, channel, value) in the order in which they apply."""


class Checkpoints:
    """Every method that changes something is one durable transaction, and every one that reads sees one moment.
    Thread-safe. Errors: those of `sqlite.Database`; UsageError: a name that is no text."""

    def __init__(self, database: Database) -> None:
        self.db = database
        self.values = StoredValues(database)
        self._places: dict[tuple[str, str], CheckpointPlace] = {}
        self._named_last: dict[CheckpointPlace, tuple[str, int]] = {}
        """The latest checkpoint that was stored: (id, row). Writes and the next checkpoint mostly name it."""
        self._bodies: OrderedDict[int, tuple[bytes, Body]] = OrderedDict()
        """By row, with the bytes they were stored as: a body is used only where the file still has these bytes."""
        self._commits = Commits(database, self._forget)

    def put(
        self,
        thread: str,
        ns: str,
        checkpoint: str,
        parent: str | None,
        metadata: str,
        state: tuple[str, bytes],
        values: Mapping[str, CutValue | Packed],
        before: FoundCheckpoint | None,
        bound: tuple[str | None, str] | None = None,
    ) -> FoundCheckpoint | None:
        """Store a checkpoint, in place of one of the same id. `bound`: its sandbox's trajectory and
        snapshot. A packed value is one of `before`, the parent as it was read: None if anything was removed from the
        family since, so it has to be read again."""

        def change() -> FoundCheckpoint | None:
            place = self._place(thread, ns)
            if before is not None and before.place != place:
                return None
            old = before.body.values if before is not None else {}
            packed = {
                channel: value
                if isinstance(value, Packed)
                else self.values.store(place.family, place.epoch, value, old.get(channel))
                for channel, value in values.items()
            }
            body = Body(state, packed)
            above = None if parent is None else self._ensure_named(place, parent)
            encoded = body.encode()
            trajectory, snapshot = bound or (None, None)
            row = above, metadata, encoded, trajectory, snapshot, place.space, checkpoint
            made = self.db.write(
                "INSERT INTO checkpoint (parent, shown, metadata, body, trajectory, snapshot, space, id)"
                " VALUES (?, 1, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                row,
            )
            if made:  # RETURNING takes as long again
                pk = self.db.connection.last_insert_rowid()
            else:
                self.db.write(
                    "UPDATE checkpoint SET parent = ?, shown = 1, metadata = ?, body = ?, trajectory = ?, snapshot = ?"
                    " WHERE space = ? AND id = ?",
                    row,
                )
                pk = self._ensure_named(place, checkpoint)
            self._named_last[place] = checkpoint, pk
            self._bodies[pk] = encoded, body
            if len(self._bodies) > _KEPT_BODIES:
                self._bodies.popitem(last=False)
            return FoundCheckpoint(pk, place, checkpoint, parent, {}, body)

        return self._commits.run(change)

    def put_writes(self, thread: str, ns: str, checkpoint: str, writes: Sequence[Write]) -> None:
        """Add writes to a checkpoint, which may come later."""

        def change() -> None:
            place = self._place(thread, ns)
            pk = self._ensure_named(place, checkpoint)
            for write in writes:
                value = self.values.store(place.family, place.epoch, write.value, None)
                self.db.write(
                    f"INSERT OR {'REPLACE' if write.replaces else 'IGNORE'} INTO writes"
                    " (checkpoint, task, idx, path, channel, value) VALUES (?, ?, ?, ?, ?, ?)",
                    (pk, write.task, write.number, write.path, write.channel, pack_value(value)),
                )

        self._commits.run(change)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction. If it fails, what was remembered of its rows is forgotten."""
        try:
            with self.db.transaction():
                yield
        except BaseException:
            with self.db.lock:
                self._forget()
            raise

    def find(self, thread: str, ns: str, checkpoint: str | None) -> FoundCheckpoint | None:
        """A checkpoint, with its writes; the one with the greatest id if none is named."""
        rows = (
            self.db.read(_FIND_LATEST, (ns, thread))
            if checkpoint is None
            else self.db.read(_FIND_ONE, (ns, checkpoint, thread))
        )
        writes = [row[3:] for row in rows if row[0] is None]
        for space, family, epoch, *row in rows:
            if space is not None:
                return self._decode(row, CheckpointPlace(space, thread, ns, family, epoch), _in_order(writes))
        return None

    def numbers(
        self, thread: str | None, ns: str | None, checkpoint: str | None, before: str | None, limit: int | None
    ) -> list[int]:
        """The rows of the checkpoints with these names (None: any) and an id below `before`, the greatest id first."""
        conditions: list[tuple[str, Value]] = [
            (sql, value)
            for sql, value in (("t.name = ?", thread), ("s.ns = ?", ns), ("c.id = ?", checkpoint), ("c.id < ?", before))
            if value is not None
        ]
        where = "".join(f" AND {sql}" for sql, _ in conditions)
        rows = self.db.read(
            "SELECT c.pk FROM thread t JOIN space s ON s.thread = t.pk JOIN checkpoint c ON c.space = s.pk"
            f" WHERE c.shown{where} ORDER BY c.id DESC, c.pk DESC LIMIT ?",
            (*(value for _, value in conditions), -1 if limit is None else limit),
        )
        return [row[0] for row in rows]

    def page(self, numbers: Iterable[int], wanted: Mapping[str, Any]) -> list[FoundCheckpoint]:
        """The checkpoints in these rows, in this order, without those that are gone or whose metadata lacks something of
        `wanted`. Within `reading`."""
        rows = self.db.read(
            f"{_SELECT.replace('FROM', 'FROM json_each(?) CROSS JOIN', 1)} WHERE c.pk = value AND c.shown",
            (json_array(numbers),),
        )
        writes: dict[int, list[Row]] = {row[0]: [] for row in rows}
        for pk, *write in self.db.read(
            "SELECT w.checkpoint, w.path, w.task, w.idx, w.channel, w.value FROM json_each(?) j"
            " CROSS JOIN writes w ON w.checkpoint = j.value",
            (json_array(writes),),
        ):
            writes[pk].append(tuple(write))
        places: dict[int, CheckpointPlace] = {}
        found = []
        for row in rows:
            pk, space, _, _, metadata, _ = row
            if not wanted or _has(json.loads(metadata), wanted):
                places[space] = place = places.get(space) or self._place_of(space)
                found.append(self._decode((pk, *row[2:]), place, _in_order(writes[pk])))
        return found

    def ancestors(self, checkpoint: FoundCheckpoint) -> Iterator[tuple[int, Body]]:
        """(row, body) of the checkpoints before it, the nearest first, hidden ones too. Within `reading`."""
        seen = {checkpoint.pk}
        row = self.db.read_one("SELECT parent FROM checkpoint WHERE pk = ?", (checkpoint.pk,))
        while row is not None and row[0] is not None and row[0] not in seen:  # a checkpoint that is its own ancestor
            pk = row[0]
            seen.add(pk)
            row = self.db.read_one("SELECT parent, body FROM checkpoint WHERE pk = ?", (pk,))
            if row is None or row[1] is None:
                return
            yield pk, Body.decode(row[1])

    def writes_of(self, pk: int) -> list[tuple[str, str, Packed]]:
        """(task, channel, value) of a checkpoint's writes, in the order in which they apply. Within `reading`."""
        return _in_order(self.db.read("SELECT path, task, idx, channel, value FROM writes WHERE checkpoint = ?", (pk,)))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self.values.forget()
        self._places.clear()
        self._named_last.clear()

    def _decode(
        self, row: Sequence[Any], place: CheckpointPlace, writes: Sequence[tuple[str, str, Packed]]
    ) -> FoundCheckpoint:
        pk, checkpoint, parent, metadata, encoded = row
        kept = self._bodies.get(pk)
        body = kept[1] if kept is not None and kept[0] == encoded else Body.decode(encoded)
        return FoundCheckpoint(pk, place, checkpoint, parent, json.loads(metadata), body, writes)

    def _place_of(self, space: int) -> CheckpointPlace:
        names = self.db.read_one(
            "SELECT name, ns FROM space s JOIN thread t ON t.pk = s.thread WHERE s.pk = ?", (space,)
        )
        place = None if names is None else self._find_place(*names)
        if place is None:
            raise self.values.damage("the thread of a checkpoint")
        return place

    def _find_place(self, thread: str, ns: str) -> CheckpointPlace | None:
        """A thread's namespace, remembered as long as nothing was removed from its family."""
        kept = self._places.get((thread, ns))
        if kept is not None:
            row = self.db.read_one("SELECT epoch FROM family WHERE pk = ?", (kept.family,))
            if row is not None and row[0] == kept.epoch:
                return kept
            del self._places[thread, ns]
        row = self.db.read_one(
            "SELECT s.pk, t.name, s.ns, f.pk, f.epoch FROM thread t CROSS JOIN space s ON s.thread = t.pk AND s.ns = ?"
            " CROSS JOIN family f ON f.pk = t.family WHERE t.name = ?",
            (ns, thread),
        )
        if row is None:
            return None
        if len(self._places) >= _KEPT_PLACES:
            self._places.clear()
            self._named_last.clear()
        place = self._places[thread, ns] = CheckpointPlace(*row)
        return place

    def _place(self, thread: str, ns: str) -> CheckpointPlace:
        """A thread's namespace, made if it is new."""
        place = self._find_place(thread, ns)
        if place is None:
            if self.db.read_one("SELECT 1 FROM thread WHERE name = ?", (thread,)) is None:
                family = self.db.insert("INSERT INTO family DEFAULT VALUES", ())
                self.db.insert("INSERT INTO thread (name, family) VALUES (?, ?)", (thread, family))
            self.db.insert("INSERT INTO space (thread, ns) SELECT pk, ? FROM thread WHERE name = ?", (ns, thread))
            place = self._find_place(thread, ns)
            assert place is not None
        return place

    def _ensure_named(self, place: CheckpointPlace, checkpoint: str) -> int:
        """The row of a checkpoint. A checkpoint that is not stored yet gets a row with its name alone."""
        last = self._named_last.get(place)
        if last is not None and last[0] == checkpoint:
            return last[1]
        names = place.space, checkpoint
        row = self.db.read_one("SELECT pk FROM checkpoint WHERE space = ? AND id = ?", names)
        if row is not None:
            return int(row[0])
        return self.db.insert("INSERT INTO checkpoint (space, id) VALUES (?, ?)", names)


def _in_order(rows: list[Row]) -> list[tuple[str, str, Packed]]:
    """(task, channel, value) of writes, in the order in which they apply: LangGraph's `writes_sort_key`."""
    rows.sort(key=lambda row: row[:3])
    return [(task, channel, unpack_value(value)) for _, task, _, channel, value in rows]


def pack_value(value: Packed) -> bytes:
    return codec.compress(ormsgpack.packb(value.row()))


def unpack_value(stored: bytes) -> Packed:
    return Packed.of(ormsgpack.unpackb(codec.expand(stored)))


def _has(metadata: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(metadata.get(key) == value for key, value in wanted.items())


def name_of(what: str, name: object) -> str:
    """`name` as a text in the file. UsageError: it cannot be one."""
    text = str(name)
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise UsageError(
            f"the {what} {text[:80]!a} holds half of a character (a lone surrogate): give text that is valid Unicode"
        ) from exc
    return text
