"""Copies of threads, and what removes something from the file.

A channel of the kind `DeltaChannel` has no value in most checkpoints: LangGraph makes it from the writes to earlier
ones, back to the nearest that has a value. So a checkpoint that a remaining one needs for that is not removed but
hidden, with nothing left in it but those writes and that value.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence

from snapshotd.errors import Conflict, NotFound, UsageError
from snapshotd.integrations.langgraph.checkpoints import Body, Checkpoints, unpack_value
from snapshotd.integrations.langgraph.values import json_array

_DELTAS = "counters_since_delta_snapshot"
"""The metadata that names a checkpoint's channels of that kind (`CheckpointMetadata` in langgraph.checkpoint.base)."""
_LATER = "SELECT pk, metadata FROM checkpoint WHERE space = ? AND shown"


class Removal:
    """Each method is one durable transaction. Thread-safe."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._all = checkpoints
        self._db = checkpoints.db

    def delete_thread(self, thread: str) -> None:
        """Remove a thread; a missing one is no error."""
        with self._all.writing():
            row = self._db.read_one("SELECT pk, family FROM thread WHERE name = ?", (thread,))
            if row is None:
                return
            pk, family = row
            spaces = self._spaces(pk)
            self._remove(
                self._rows("SELECT pk FROM checkpoint WHERE space IN (SELECT value FROM json_each(?))", spaces)
            )
            self._db.write("DELETE FROM space WHERE thread = ?", (pk,))
            self._db.write("DELETE FROM thread WHERE pk = ?", (pk,))
            self._sweep(family)

    def delete_for_runs(self, runs: Collection[str]) -> None:
        """Remove the checkpoints that these runs made, with the writes to them."""
        with self._all.writing():
            rows = self._db.read(
                "SELECT c.pk, c.space, t.family FROM checkpoint c JOIN space s ON s.pk = c.space JOIN thread t ON t.pk = s.thread"
                " WHERE c.shown AND json_extract(c.metadata, '$.run_id') IN (SELECT value FROM json_each(?))",
                (json.dumps(list(runs)),),
            )
            for space in {row[1] for row in rows}:
                self._reduce(space, {row[0] for row in rows if row[1] == space})
            for family in {row[2] for row in rows}:
                self._sweep(family)

    def prune(self, threads: Iterable[str], strategy: str) -> None:
        """Remove the checkpoints of threads: with the strategy "keep_latest" all but the one with the greatest id in each
        namespace, with "delete" all. Missing threads are no error. UsageError: another strategy."""
        if strategy not in ("keep_latest", "delete"):
            raise UsageError(f"there is no strategy {strategy!r} to prune by: it is 'keep_latest' or 'delete'")
        for thread in threads:
            if strategy == "delete":
                self.delete_thread(thread)
                continue
            with self._all.writing():
                row = self._db.read_one("SELECT pk, family FROM thread WHERE name = ?", (thread,))
                if row is None:
                    continue
                for space in self._spaces(row[0]):
                    numbers = [number for number, _ in self._db.read(f"{_LATER} ORDER BY id DESC", (space,))]
                    self._reduce(space, set(numbers[1:]))
                self._sweep(row[1])

    def copy_thread(self, source: str, target: str) -> None:
        """Make a thread with all checkpoints and writes of another one. It shares its pieces. NotFound: there is no
        such thread; Conflict: `target` exists."""
        with self._all.writing():
            row = self._db.read_one("SELECT pk, family FROM thread WHERE name = ?", (source,))
            if row is None:
                raise NotFound(f"thread {source!r} cannot be copied because there is none: check its id")
            if self._db.read_one("SELECT 1 FROM thread WHERE name = ?", (target,)):
                raise Conflict(
                    f"thread {source!r} cannot be copied to {target!r}, which exists: choose another id or delete that thread"
                )
            copy = self._db.insert("INSERT INTO thread (name, family) VALUES (?, ?)", (target, row[1]))
            for space, ns in self._db.read("SELECT pk, ns FROM space WHERE thread = ?", (row[0],)):
                self._copy_space(space, self._db.insert("INSERT INTO space (thread, ns) VALUES (?, ?)", (copy, ns)))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _copy_space(self, source: int, target: int) -> None:
        self._db.write(
            "INSERT INTO checkpoint (space, id, shown, metadata, body, snapshot)"
            " SELECT ?, id, shown, metadata, body, snapshot FROM checkpoint WHERE space = ? ORDER BY pk",
            (target, source),
        )
        self._db.write(
            "UPDATE checkpoint SET parent = other.pk FROM checkpoint mine, checkpoint above, checkpoint other"
            " WHERE checkpoint.space = ?1 AND mine.space = ?2 AND mine.id = checkpoint.id AND above.pk = mine.parent"
            " AND other.space = ?1 AND other.id = above.id",
            (target, source),
        )
        self._db.write(
            "INSERT INTO writes (checkpoint, task, idx, path, channel, value)"
            " SELECT other.pk, w.task, w.idx, w.path, w.channel, w.value FROM checkpoint mine"
            " JOIN checkpoint other ON other.space = ? AND other.id = mine.id JOIN writes w ON w.checkpoint = mine.pk"
            " WHERE mine.space = ?",
            (target, source),
        )

    def _reduce(self, space: int, gone: set[int]) -> None:
        """Remove the checkpoints in the rows `gone`. A checkpoint that the remaining ones need for
        delta channels is hidden."""
        parents: dict[int, int | None] = dict(
            self._db.read("SELECT pk, parent FROM checkpoint WHERE space = ?", (space,))
        )
        hidden = set(self._rows("SELECT pk FROM checkpoint WHERE space = ? AND NOT shown AND body IS NOT NULL", space))
        kept = [(pk, json.loads(text)) for pk, text in self._db.read(_LATER, (space,)) if pk not in gone]
        needed = self._find_needed(parents, ((pk, metadata.get(_DELTAS)) for pk, metadata in kept))
        removed = (gone | hidden) - set(needed)
        for pk, parent in parents.items():
            passed: set[int | None] = set()
            while (
                parent is not None and parent in removed and parent not in passed
            ):  # a checkpoint may be its own ancestor
                passed.add(parent)
                parent = parents[parent]
            if parent != parents[pk]:
                self._db.write("UPDATE checkpoint SET parent = ? WHERE pk = ?", (parent, pk))
        for pk in (gone | hidden) & set(needed):
            self._hide(pk, needed[pk])
        self._remove(sorted(removed))

    def _find_needed(
        self, parents: dict[int, int | None], kept: Iterable[tuple[int, Collection[str] | None]]
    ) -> dict[int, set[str]]:
        """Row to channels: the checkpoints that the remaining ones need, and for which of their delta channels."""
        needed: dict[int, set[str]] = {}
        for start, channels in kept:
            left, pk = set(channels or ()), parents.get(start)
            while left and pk is not None and not left <= needed.get(pk, set()):
                needed.setdefault(pk, set()).update(left)
                row = self._db.read_one("SELECT body FROM checkpoint WHERE pk = ?", (pk,))
                left -= set() if row is None or row[0] is None else Body.decode(row[0]).values.keys()
                pk = parents.get(pk)
        return needed

    def _hide(self, pk: int, channels: set[str]) -> None:
        row = self._db.read_one("SELECT body FROM checkpoint WHERE pk = ?", (pk,))
        assert row is not None
        body = Body.decode(row[0])
        rest = Body(("null", b""), {name: value for name, value in body.values.items() if name in channels})
        self._db.write(
            "UPDATE checkpoint SET shown = 0, metadata = NULL, snapshot = NULL, trajectory = NULL, body = ? WHERE pk = ?",
            (rest.encode(), pk),
        )
        self._db.write(
            "DELETE FROM writes WHERE checkpoint = ? AND channel NOT IN (SELECT value FROM json_each(?))",
            (pk, json.dumps(sorted(channels))),
        )

    def _remove(self, numbers: Sequence[int]) -> None:
        for table in ("writes", "call"):
            self._db.write(
                f"DELETE FROM {table} WHERE checkpoint IN (SELECT value FROM json_each(?))", (json_array(numbers),)
            )
        self._db.write("DELETE FROM checkpoint WHERE pk IN (SELECT value FROM json_each(?))", (json_array(numbers),))

    def _sweep(self, family: int) -> None:
        """Remove the pieces of a family that nothing refers to, and the family if it has no thread."""
        self._db.write("UPDATE family SET epoch = epoch + 1 WHERE pk = ?", (family,))
        within = (
            "FROM thread t JOIN space s ON s.thread = t.pk JOIN checkpoint c ON c.space = s.pk"
            " {} WHERE t.family = ? AND {} IS NOT NULL"
        )
        bodies = self._db.read("SELECT c.body " + within.format("", "c.body"), (family,))
        writes = self._db.read(
            "SELECT w.value " + within.format("JOIN writes w ON w.checkpoint = c.pk", "w.value"), (family,)
        )
        values = [value for row in bodies for value in Body.decode(row[0]).values.values()]
        values += [unpack_value(row[0]) for row in writes]
        pieces = {pk for value in values for pk in self._all.values.pieces_of(value)}
        recipes = {value.recipe for value in values if value.recipe}
        for recipe in recipes:
            pieces.update(self._all.values.pieces_in(recipe))
        for table, used in (("recipe", recipes), ("piece", pieces)):
            self._db.write(
                f"DELETE FROM {table} WHERE family = ? AND pk NOT IN (SELECT value FROM json_each(?))",
                (family, json_array(used)),
            )
        if not self._db.read_one("SELECT 1 FROM thread WHERE family = ?", (family,)):
            self._db.write("DELETE FROM family WHERE pk = ?", (family,))

    def _spaces(self, thread: int) -> list[int]:
        return self._rows("SELECT pk FROM space WHERE thread = ?", thread)

    def _rows(self, sql: str, value: int | list[int]) -> list[int]:
        rows = self._db.read(sql, (json_array(value) if isinstance(value, list) else value,))
        return [row[0] for row in rows]
