"""Writing new rows, one by one, inside a transaction of the caller."""

from __future__ import annotations

from collections.abc import Sequence

from snapshotd.catalog import rows
from snapshotd.catalog.database import CatalogDatabase
from snapshotd.catalog.lookup import find_tag, image_number, snapshot_numbers
from snapshotd.catalog.tenancy import is_own
from snapshotd.errors import Conflict, UsageError
from snapshotd.types import KNOWN_NAME_PATTERN, Image, Message, RecordID, Snapshot, SnapshotID, Stack, Trajectory, short


def add_image(db: CatalogDatabase, image: Image) -> None:
    """See `ImageTable.add`."""
    if db.read("SELECT 1 FROM images WHERE id = ?", (image.id,)):
        raise Conflict(f"image {image.id} is in the catalog already: use it as it is")
    db.write("UPDATE images SET name = '' WHERE name = ? AND name <> ''", (image.name,))
    db.write(rows.IMAGE_INSERT, rows.image_values(image))


def add_trajectory(db: CatalogDatabase, trajectory: Trajectory, forked_from: int | None) -> int:
    """Insert a trajectory whose head is `forked_from`, or (None) has to be set before the transaction ends. Returns its
    row. Conflict when its name or id is taken; NotFound (its image)."""
    if trajectory.name is not None:
        taken = db.read_one("SELECT id FROM trajectories WHERE name = ?", (trajectory.name,))
        if taken is not None:
            if not is_own(db, taken[0]):
                raise _name_taken(trajectory.name)
            raise Conflict(
                f"the name {trajectory.name} belongs to trajectory {short(taken[0])}: choose another or remove that one"
            )
        tag = find_tag(db, trajectory.name)
        if tag is not None:
            if not is_own(db, tag[1]):
                raise _name_taken(trajectory.name)
            raise Conflict(
                f"the name {trajectory.name} is a tag of snapshot {short(tag[0])}: choose another, or take the tag away with "
                f"`snapshotd tag --delete {trajectory.name}`"
            )
    if db.read("SELECT 1 FROM trajectories WHERE id = ?", (trajectory.id,)):
        raise Conflict(f"trajectory {trajectory.id} is in the catalog already")
    values = rows.trajectory_values(trajectory, image_number(db, trajectory.spec.image), forked_from, forked_from or 0)
    return db.insert(rows.TRAJECTORY_INSERT, values)


def add_stack(db: CatalogDatabase, stack: Stack) -> int:
    """Insert a stack; its row. NotFound (its image)."""
    return db.insert(
        "INSERT INTO stacks (image, layers) VALUES (?,?)", (image_number(db, stack.image), rows.encode_layers(stack))
    )


def add_snapshot(db: CatalogDatabase, snapshot: Snapshot, place: rows.Place, record: RecordID | None = None) -> int:
    """Insert a snapshot with its tags, not yet as the head of a trajectory. Returns its row. NotFound (its base),
    Conflict (a tag is taken)."""
    base = None
    if snapshot.base is not None:
        base = place.parent if snapshot.base == snapshot.parent else snapshot_numbers(db, snapshot.base)[0]
    number = db.insert(rows.SNAPSHOT_INSERT, rows.snapshot_values(snapshot, place, base, record))
    for name in snapshot.tags:
        add_tag(db, number, name, move=False)
    for kind, sentences in ((WARNINGS, snapshot.warnings), (REFUSED, snapshot.refused)):
        if sentences:
            set_sentences(db, kind, snapshot.id, sentences)
    for lost in snapshot.call.damaged:
        db.write("INSERT INTO damaged_outputs VALUES (?,?,?,?)", (number, lost.which, lost.hash, lost.bytes))
    return number


WARNINGS, REFUSED = "warnings", "refused"


def set_sentences(db: CatalogDatabase, kind: str, snapshot: SnapshotID, sentences: Sequence[str]) -> None:
    """Replace a snapshot's warnings or refusals. They are rare, so they are kept in `meta` and have no column."""
    key = f"{kind}/{snapshot}"
    if sentences:
        db.write(rows.META_INSERT, (key, rows.encode_json(list(sentences))))
    else:
        db.write("DELETE FROM meta WHERE key = ?", (key,))


def add_tag(db: CatalogDatabase, snapshot: int, name: str, *, move: bool) -> None:
    """See `References.tag`."""
    if not KNOWN_NAME_PATTERN.fullmatch(name):
        raise UsageError(
            f"{name[:80]!r} cannot be a tag: use up to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit"
        )
    namesake = db.read_one("SELECT id FROM trajectories WHERE name = ?", (name,))
    if namesake is not None:
        if not is_own(db, namesake[0]):
            raise _name_taken(name)
        raise Conflict(f"{name} is the name of trajectory {short(namesake[0])}, so it cannot be a tag: choose another")
    holder = find_tag(db, name)
    if holder is not None and not is_own(db, holder[1]):
        raise _name_taken(name)
    if holder is not None and holder[2] != snapshot and not move:
        raise Conflict(f"the tag {name} belongs to snapshot {short(holder[0])}: move it, or choose another name")
    db.write(
        "INSERT INTO tags VALUES (?,?) ON CONFLICT (name) DO UPDATE SET snapshot = excluded.snapshot", (name, snapshot)
    )


def _name_taken(name: str) -> Conflict:
    """The error for a name that another tenant's thing has. All tenants share the daemon's names, so it says that much."""
    return Conflict(f"the name {name} is taken: choose another")


def add_messages(db: CatalogDatabase, line: int, position: int, messages: Sequence[Message]) -> None:
    """Append to a line's conversation, from `position` on."""
    db.write_many(
        rows.MESSAGE_INSERT, ((line, position + n, *rows.encode_message(message)) for n, message in enumerate(messages))
    )
