"""Snapshots in the catalog's database. The product's commit point is `SnapshotTable.commit`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from snapshotd.catalog import rows
from snapshotd.catalog.database import PAGE_CHARS, PAGE_ROWS, CatalogDatabase
from snapshotd.catalog.entries import add_entry, end_entry
from snapshotd.catalog.inserts import WARNINGS, add_messages, add_snapshot, add_stack, set_sentences
from snapshotd.catalog.lines import LineWriter, add_line, find_writer, position_of, save_state
from snapshotd.catalog.lookup import check_name, read_row, trajectory_number
from snapshotd.catalog.tables.requests import add_request
from snapshotd.errors import Conflict, InternalError
from snapshotd.kernel import turns
from snapshotd.terms import number_of
from snapshotd.types import (
    BlobID,
    Ended,
    FileChanges,
    JournalEntry,
    LayerID,
    Message,
    RecordID,
    RequestKey,
    Snapshot,
    SnapshotID,
    SnapshotState,
    TrajectoryID,
    TreeID,
    short,
)

_HEAD_SELECT = """
SELECT h.pk, h.messages, h.stack, h.agent_state, i.id, k.layers
FROM snapshots h JOIN stacks k ON k.pk = h.stack JOIN images i ON i.pk = k.image WHERE h.id = ?
"""
_OF_IDS = rows.SNAPSHOT_SELECT + "WHERE s.id IN (SELECT value FROM json_each(?))"
_AFTER_ALL = (1 << 63) - 1
"""More than any `seq`."""


class SnapshotTable:
    """Snapshots with their calls, and how far each is stored. Many are read in pages, so that a step never waits until ten
    thousand are read."""

    def __init__(self, db: CatalogDatabase) -> None:
        self._db = db

    def commit(
        self,
        snapshot: Snapshot,
        messages: Sequence[Message],
        *,
        expected_head: SnapshotID,
        entries: Sequence[JournalEntry] = (),
        ended: Ended | None = None,
        state: dict[str, Any] | None = None,
        fence: int | None = None,
        request: RequestKey | None = None,
    ) -> None:
        """The commit point. Adds the snapshot with its call, appends `messages` to the conversation, ends the journal
        entry `ended`, adds `entries` (complete ones, that had no beginning of their own), binds every ended entry of
        the line that no snapshot binds yet, saves `state` (None: unchanged), records the snapshot as what `request` has made
        and moves the head: together or not at all.

        The conversation continues the one of `snapshot.continues` and keeps `snapshot.messages - len(messages)` of its
        messages: all of them, or with `snapshot.follows` any number. With `follows` a new line of conversation and
        journal begins there, and unbound entries stay with the old line for good.
        Conflict when the head is not `expected_head`, or `fence` is older than the trajectory's; the message names the
        head. NotFound: `ended` is no open entry. UsageError: a tag could be taken for an id."""
        db = self._db
        for name in snapshot.tags:
            check_name(name)
        with db.transaction():
            if any(entry.status is None for entry in entries):
                raise InternalError(f"an open journal entry cannot be committed with snapshot {snapshot.id}")
            own = find_writer(db, snapshot.trajectory, fence)
            if own.head != expected_head:
                raise Conflict(
                    f"snapshot {short(snapshot.id)} cannot follow {short(expected_head)} because the head of trajectory "
                    f"{short(snapshot.trajectory)} is {short(own.head)} by now: fork from {short(expected_head)}, or go on from the head"
                )
            place, kept = self._place(snapshot, len(messages), own, state)
            number = add_snapshot(db, snapshot, place)
            if ended is not None:
                end_entry(db, own.trajectory, ended)
            for entry in entries:
                add_entry(db, place.line, entry)
            self._bind_entries(place.line, snapshot, number)
            add_messages(db, place.line, kept, messages)
            db.write("UPDATE trajectories SET head = ? WHERE pk = ?", (number, own.trajectory))
            add_request(db, request, [snapshot.id])

    def _place(
        self, snapshot: Snapshot, messages: int, own: LineWriter, state: dict[str, Any] | None
    ) -> tuple[rows.Place, int]:
        """The snapshot's place, and the number of messages that it keeps of the snapshot it continues."""
        row = self._db.read_one(_HEAD_SELECT, (own.head,))
        assert row is not None
        head, position, stack, saved, image, layers = row
        if (image, layers) != (snapshot.stack.image, rows.encode_layers(snapshot.stack)):
            stack = add_stack(self._db, snapshot.stack)
        line, follows = own.line, None
        kept = snapshot.messages - messages
        fits = snapshot.parent == own.head and kept == position
        if snapshot.follows is not None:
            followed = position_of(self._db, snapshot.follows)
            position, follows, saved = followed.messages, followed.number, followed.state
            fits = snapshot.parent == own.head and 0 <= kept <= position
            line = add_line(self._db, own.trajectory, follows, kept)
        if not fits:
            raise InternalError(
                f"snapshot {snapshot.id} does not continue {snapshot.continues} ({number_of(position, 'message')}) after {own.head}"
            )
        saved = save_state(self._db, None if state is None else rows.encode_json(state), saved)
        return rows.Place(own.trajectory, line, head, stack, follows, saved), kept

    def _bind_entries(self, line: int, snapshot: Snapshot, number: int) -> None:
        """Every ended entry of a line that no snapshot binds yet belongs to this one (in row `number`) from now on."""
        bound = self._db.write(
            "UPDATE entries INDEXED BY entries_unbound SET snapshot = ? WHERE line = ? AND snapshot IS NULL AND status > ''",
            (number, line),
        )
        if not bound:
            return
        self._db.write(
            "UPDATE entries SET arguments = NULL WHERE id = ? AND snapshot = ? AND arguments = ?",
            (snapshot.call.id, number, rows.encode_json(snapshot.call.arguments)),
        )

    def get(self, snapshot_id: SnapshotID) -> Snapshot:
        """The snapshot of this id, with its tags. NotFound."""
        select = rows.SNAPSHOT_SELECT + "WHERE s.id = ?"
        return rows.SnapshotDecoder()(read_row(self._db, "snapshot", snapshot_id, select))

    def get_many(self, snapshot_ids: Iterable[SnapshotID]) -> dict[SnapshotID, Snapshot]:
        """The snapshots with these ids, as far as they exist, read in pages."""
        decode, found = rows.SnapshotDecoder(), {}
        wanted = list(snapshot_ids)
        for at in range(0, len(wanted), PAGE_ROWS):
            turns.give_way()
            for row in self._db.read(_OF_IDS, (rows.encode_json(wanted[at : at + PAGE_ROWS]),)):
                taken = decode(row)
                found[taken.id] = taken
        return found

    def of_trajectory(
        self, trajectory_id: TrajectoryID, last: int | None = None, *, before: int | None = None
    ) -> list[Snapshot]:
        """The trajectory's own snapshots by `seq`; a fork's do not include the ones it began from. With `before`, only
        those whose `seq` is smaller; with `last`, only that many of the newest. The cost then does not depend on how
        many there are. NotFound."""
        trajectory = trajectory_number(self._db, trajectory_id)
        decode = rows.SnapshotDecoder()
        found: list[Snapshot] = []
        wanted, before = (sys.maxsize if last is None else last), (_AFTER_ALL if before is None else before)
        while len(found) < wanted:
            page = self._db.read_page(
                rows.SNAPSHOT_SELECT + "WHERE s.trajectory = ? AND s.seq < ? ORDER BY s.seq DESC",
                (trajectory, before),
                rows=min(wanted - len(found), PAGE_ROWS),
                size=PAGE_CHARS,
            )
            if not page:
                break
            found.extend(map(decode, page))
            before = found[-1].seq
        found.reverse()
        return found

    def count(self, trajectory_id: TrajectoryID) -> int:
        """Number of the trajectory's own snapshots. NotFound."""
        with self._db.lock:
            number = trajectory_number(self._db, trajectory_id)
            (row,) = self._db.read("SELECT count(*) FROM snapshots WHERE trajectory = ?", (number,))
        return int(row[0])

    def all(self) -> Iterator[Snapshot]:
        """Every snapshot, oldest first, without holding them all in memory."""
        last = 0
        while page := self._db.read_page(
            rows.SNAPSHOT_SELECT + "WHERE s.pk > ? ORDER BY s.pk", (last,), rows=PAGE_ROWS, size=PAGE_CHARS
        ):
            decode = rows.SnapshotDecoder()
            yield from map(decode, page)
            last = page[-1][0]

    def set_files(self, snapshot_id: SnapshotID, files: FileChanges) -> None:
        """Record the background count of changed files. Not an error when the snapshot is gone."""
        with self._db.transaction():
            self._db.write(
                "UPDATE snapshots SET files_added = ?, files_changed = ?, files_deleted = ?, files_bytes = ? WHERE id = ?",
                (files.added, files.changed, files.deleted, files.bytes, snapshot_id),
            )

    def set_state(self, snapshot_ids: Iterable[SnapshotID], state: SnapshotState) -> None:
        """Record durability. Unknown ids are ignored. A snapshot in any other state than `stored` has no tree afterwards."""
        values = [(state.value, snapshot_id) for snapshot_id in snapshot_ids]
        with self._db.transaction():
            self._db.write_many(
                "UPDATE snapshots SET state = ?1, tree = CASE ?1 WHEN 'stored' THEN tree END WHERE id = ?2", values
            )

    def unstored(self) -> list[SnapshotID]:
        """Snapshots in state `captured`, oldest first: the archive's remaining work. Cost: proportional to these, not to all."""
        found = self._db.read("SELECT id FROM snapshots WHERE state = 'captured' ORDER BY pk")
        return [SnapshotID(row[0]) for row in found]

    def set_stored(self, snapshot_id: SnapshotID, tree: TreeID, record: RecordID, warnings: Sequence[str] = ()) -> None:
        """Record that a snapshot is in the repository, with its tree, its record, and warnings about files that the
        tree lacks: state `stored`. Only a captured (or lost) snapshot changes. Not an error when it is gone. Durable
        after `flush`."""
        with self._db.transaction():
            changed = self._db.write(
                "UPDATE snapshots SET state = 'stored', tree = ?, record = ? WHERE id = ? AND state IN ('captured', 'lost')",
                (tree, record, snapshot_id),
            )
            if changed:
                set_sentences(self._db, WARNINGS, snapshot_id, warnings)

    def set_pruned(self, snapshot_ids: Iterable[SnapshotID]) -> None:
        """Give up the files of stored snapshots: state `pruned`, no tree. Others are left as they are. Unknown ids are
        ignored."""
        values = [(snapshot_id,) for snapshot_id in snapshot_ids]
        with self._db.transaction():
            self._db.write_many(
                "UPDATE snapshots SET state = 'pruned', tree = NULL WHERE id = ? AND state = 'stored'", values
            )

    def record(self, snapshot_id: SnapshotID) -> RecordID | None:
        """The record of a snapshot that is, or was, stored; None if it never was. NotFound."""
        found = read_row(self._db, "snapshot", snapshot_id, "SELECT record FROM snapshots WHERE id = ?")[0]
        return None if found is None else RecordID(found)

    def set_record(self, snapshot_id: SnapshotID, record: RecordID) -> None:
        """Replace a snapshot's record, which is damaged, by another one. Not an error when the snapshot is gone."""
        with self._db.transaction():
            self._db.write("UPDATE snapshots SET record = ? WHERE id = ?", (record, snapshot_id))

    def forget_outputs(self, blobs: Mapping[BlobID, int | None], *, spooled: bool = False) -> None:
        """Give up outputs that are damaged for good; `blobs` has their lengths (None: unknown). Calls that refer to them
        have them as `damaged` from now on. Calls of captured snapshots stay as they are, since their outputs are in the
        spool. `spooled`: the outputs in the spool are damaged, so only calls of captured snapshots change."""
        with self._db.transaction():
            for which in ("output", "stdout", "stderr"):
                having = f"call_{which} = ?1 AND state {'=' if spooled else '<>'} 'captured'"
                self._db.write_many(
                    f"INSERT INTO damaged_outputs SELECT pk, '{which}', ?1, CAST(?2 AS BIGINT) FROM snapshots WHERE {having}",
                    blobs.items(),
                )
                self._db.write_many(
                    f"UPDATE snapshots SET call_{which} = NULL WHERE {having}", ((blob,) for blob in blobs)
                )

    def referenced_layers(self) -> set[LayerID]:
        """Every layer that a snapshot's stack contains."""
        return {LayerID(row[0]) for row in self._db.read("SELECT DISTINCT value FROM stacks, json_each(stacks.layers)")}

    def unstored_blobs(self) -> set[BlobID]:
        """The blobs that calls of captured snapshots refer to: they must stay in the spool."""
        found = self._db.read("SELECT call_output, call_stdout, call_stderr FROM snapshots WHERE state = 'captured'")
        return {BlobID(blob) for row in found for blob in row if blob is not None}

    def referenced_records(self) -> set[RecordID]:
        """The records of all snapshots."""
        return {RecordID(row[0]) for row in self._db.read("SELECT record FROM snapshots WHERE record IS NOT NULL")}
