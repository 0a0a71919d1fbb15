"""Finding rows by id or name, and the error messages for missing ones."""

from __future__ import annotations

from snapshotd.catalog import rows
from snapshotd.catalog.database import CatalogDatabase, Row
from snapshotd.errors import Ambiguous, NotFound, UsageError
from snapshotd.types import ID_FORM, KNOWN_NAME_PATTERN, MIN_PREFIX_CHARS, ImageID, SnapshotID, TrajectoryID, short

CANDIDATES = 5
_AFTER_ALL = "\U0010ffff"
"""Sorts after every character of an id, so that [prefix, prefix + this) is a range of the id's index."""


def read_row(db: CatalogDatabase, kind: str, row_id: str, select: str) -> Row:
    """The one row that `select` finds for an id of this kind. NotFound."""
    row = db.read_one(select, (row_id,))
    if row is None:
        raise no_such(kind, row_id)
    return row


def image_number(db: CatalogDatabase, image_id: ImageID) -> int:
    """An image's row. NotFound."""
    return int(read_row(db, "image", image_id, "SELECT pk FROM images WHERE id = ?")[0])


def trajectory_number(db: CatalogDatabase, trajectory_id: TrajectoryID) -> int:
    """A trajectory's row. NotFound."""
    return int(read_row(db, "trajectory", trajectory_id, "SELECT pk FROM trajectories WHERE id = ?")[0])


def snapshot_numbers(db: CatalogDatabase, snapshot_id: SnapshotID) -> tuple[int, int]:
    """A snapshot's row and the length of its conversation. NotFound."""
    number, messages = read_row(db, "snapshot", snapshot_id, "SELECT pk, messages FROM snapshots WHERE id = ?")
    return number, messages


def find_tag(db: CatalogDatabase, name: str) -> Row | None:
    """(snapshot id, trajectory id, snapshot's row) of the snapshot that has a tag, of any tenant."""
    return db.read_one(
        "SELECT s.id, t.id, s.pk FROM tags g JOIN snapshots s ON s.pk = g.snapshot JOIN trajectories t ON t.pk = s.trajectory"
        " WHERE g.name = ?",
        (name,),
    )


def check_name(name: str) -> None:
    """UsageError: the name has the form of an id, and could be taken for that id."""
    if ID_FORM.fullmatch(name.partition("@")[0]):
        raise UsageError(f"{name} could be taken for an id, which begins like that: choose a name with another letter")


def no_such(kind: str, ref: str) -> NotFound:
    """The error to raise for a missing row."""
    shown = ref if KNOWN_NAME_PATTERN.fullmatch(ref) else repr(ref[:80])
    where = {
        "image": "`snapshotd image ls` lists them",
        "tag": "`snapshotd tag --list` lists them",
        "approval": "`snapshotd approvals` lists them",
    }
    return NotFound(
        f"there is no {kind} {shown}: {where.get(kind, '`snapshotd ls` and `snapshotd log` show what there is')}"
    )


def id_range(prefix: str) -> tuple[str, str]:
    """The bounds [first, end) of the ids that begin with `prefix`."""
    return prefix, prefix + _AFTER_ALL


def searchable(ref: str) -> bool:
    """True if it can be a value in the database at all; a string with lone surrogates matches nothing."""
    return isinstance(rows.encode_text(ref), str)


def check_unique(ref: str, ids: list[str]) -> None:
    """Ambiguous when `ref` fits more than one id, or is too short to mean any."""
    if len(ids) > 1 or len(ref) < MIN_PREFIX_CHARS:
        shown = ", ".join(short(one) for one in sorted(ids)[:CANDIDATES])
        more = ", ..." if len(ids) > CANDIDATES else ""
        if len(ref) < MIN_PREFIX_CHARS:
            raise Ambiguous(
                f"{ref} is too short for an id, which it may be the beginning of ({shown}{more}): "
                f"type at least {MIN_PREFIX_CHARS} characters of it"
            )
        raise Ambiguous(f"{ref} fits several ids ({shown}{more}): type more characters")
