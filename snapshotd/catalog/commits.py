"""Moving a trajectory's head: its first snapshot, and every one after that. Inside a transaction of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from snapshotd.catalog import rows
from snapshotd.catalog.database import CatalogDatabase
from snapshotd.catalog.entries import add_entry, bind_entries, end_entry
from snapshotd.catalog.inserts import add_messages, add_snapshot, add_stack, add_trajectory
from snapshotd.catalog.lines import add_line, position_of, save_state
from snapshotd.catalog.lookup import read_row, snapshot_numbers
from snapshotd.errors import Conflict, InternalError
from snapshotd.terms import number_of
from snapshotd.types import Ended, JournalEntry, Message, Snapshot, SnapshotID, Trajectory, TrajectoryID, short

_WRITER_SELECT = """
SELECT t.pk, t.fence, h.id, (SELECT max(pk) FROM lines WHERE trajectory = t.pk)
FROM trajectories t JOIN snapshots h ON h.pk = t.head WHERE t.id = ?
"""
_HEAD_SELECT = """
SELECT h.pk, h.messages, h.stack, h.agent_state, i.id, k.layers
FROM snapshots h JOIN stacks k ON k.pk = h.stack JOIN images i ON i.pk = k.image WHERE h.id = ?
"""


class LineWriter(NamedTuple):
    """The writer's place in a trajectory: its row, its present line, its head."""

    trajectory: int
    line: int
    head: SnapshotID


def begin_trajectory(db: CatalogDatabase, trajectory: Trajectory, snapshot: Snapshot | None) -> None:
    """See `Catalog.add_trajectories`."""
    origin, messages = None, 0
    if trajectory.forked_from is not None:
        origin, messages = snapshot_numbers(db, trajectory.forked_from)
    first = snapshot.id if snapshot is not None else trajectory.forked_from
    if first is None or trajectory.head != first:
        raise InternalError(f"trajectory {trajectory.id} must begin at its head, not at {first}")
    number = add_trajectory(db, trajectory, origin)
    if snapshot is None:
        add_line(db, number, origin, messages)
    else:
        if snapshot.trajectory != trajectory.id or snapshot.parent != trajectory.forked_from:
            raise InternalError(
                f"snapshot {snapshot.id} does not fit the trajectory {trajectory.id} that it is to begin"
            )
        _begin_with(db, number, snapshot, origin)
    set_began(db, number, trajectory.began)


def _begin_with(db: CatalogDatabase, trajectory: int, snapshot: Snapshot, origin: int | None) -> None:
    """A trajectory's own first snapshot, which adds no messages."""
    continued = None if snapshot.continues is None else position_of(db, snapshot.continues)
    messages = 0 if continued is None else continued.messages
    if snapshot.messages != messages and (snapshot.follows is None or snapshot.messages > messages):
        raise InternalError(
            f"snapshot {snapshot.id} does not continue {snapshot.continues} ({number_of(messages, 'message')})"
        )
    line = add_line(db, trajectory, None if continued is None else continued.number, snapshot.messages)
    follows = None if continued is None or snapshot.follows is None else continued.number
    place = rows.Place(
        trajectory, line, origin, add_stack(db, snapshot.stack), follows, None if continued is None else continued.state
    )
    _move_head(db, trajectory, add_snapshot(db, snapshot, place))


def set_began(db: CatalogDatabase, trajectory: int, began: SnapshotID | None) -> None:
    """Set the snapshot at which a replay of a trajectory (in row `trajectory`) begins. NotFound."""
    if began is not None:
        db.write("UPDATE trajectories SET began = ? WHERE pk = ?", (snapshot_numbers(db, began)[0], trajectory))


def writer(db: CatalogDatabase, trajectory_id: TrajectoryID, fence: int | None) -> LineWriter:
    """The place of a trajectory's writer. NotFound; Conflict: another writer has a later fence."""
    trajectory, present, head, line = read_row(db, "trajectory", trajectory_id, _WRITER_SELECT)
    if fence is not None and fence < present:
        raise Conflict(
            f"trajectory {short(trajectory_id)} cannot be written any more under fence {fence}, because another writer has "
            f"{present}, and its head is {short(head)} by now: fork from {short(head)}, or let that writer end first"
        )
    return LineWriter(trajectory, line, head)


def commit(
    db: CatalogDatabase,
    snapshot: Snapshot,
    messages: Sequence[Message],
    *,
    expected_head: SnapshotID,
    entries: Sequence[JournalEntry],
    ended: Ended | None,
    state: dict[str, Any] | None,
    fence: int | None,
) -> None:
    """See `Catalog.commit_snapshot`."""
    if any(entry.status is None for entry in entries):
        raise InternalError(f"an open journal entry cannot be committed with snapshot {snapshot.id}")
    own = writer(db, snapshot.trajectory, fence)
    if own.head != expected_head:
        raise Conflict(
            f"snapshot {short(snapshot.id)} cannot follow {short(expected_head)} because the head of trajectory "
            f"{short(snapshot.trajectory)} is {short(own.head)} by now: fork from {short(expected_head)}, or go on from the head"
        )
    place, kept = _place(db, snapshot, len(messages), own, state)
    number = add_snapshot(db, snapshot, place)
    if ended is not None:
        end_entry(db, own.trajectory, ended)
    for entry in entries:
        add_entry(db, place.line, entry)
    bind_entries(db, place.line, snapshot, number)
    add_messages(db, place.line, kept, messages)
    _move_head(db, own.trajectory, number)


def _place(
    db: CatalogDatabase, snapshot: Snapshot, messages: int, own: LineWriter, state: dict[str, Any] | None
) -> tuple[rows.Place, int]:
    """The snapshot's place, and the number of messages that it keeps of the snapshot it continues."""
    row = db.read_one(_HEAD_SELECT, (own.head,))
    assert row is not None
    head, position, stack, saved, image, layers = row
    if (image, layers) != (snapshot.stack.image, rows.encode_layers(snapshot.stack)):
        stack = add_stack(db, snapshot.stack)
    line, follows = own.line, None
    kept = snapshot.messages - messages
    fits = snapshot.parent == own.head and kept == position
    if snapshot.follows is not None:
        followed = position_of(db, snapshot.follows)
        position, follows, saved = followed.messages, followed.number, followed.state
        fits = snapshot.parent == own.head and 0 <= kept <= position
        line = add_line(db, own.trajectory, follows, kept)
    if not fits:
        raise InternalError(
            f"snapshot {snapshot.id} does not continue {snapshot.continues} ({number_of(position, 'message')}) after {own.head}"
        )
    saved = save_state(db, None if state is None else rows.encode_json(state), saved)
    return rows.Place(own.trajectory, line, head, stack, follows, saved), kept


def _move_head(db: CatalogDatabase, trajectory: int, head: int) -> None:
    db.write("UPDATE trajectories SET head = ? WHERE pk = ?", (head, trajectory))
