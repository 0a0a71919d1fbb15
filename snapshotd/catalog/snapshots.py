"""Reading snapshots in pages, so that a step never waits until ten thousand are read; and their lost outputs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping

from snapshotd.catalog import rows
from snapshotd.catalog.database import CatalogDatabase
from snapshotd.catalog.lines import PAGE_CHARS, PAGE_ROWS
from snapshotd.catalog.lookup import trajectory_number
from snapshotd.kernel import turns
from snapshotd.types import BlobID, Snapshot, SnapshotID, TrajectoryID

_OF_IDS = rows.SNAPSHOT_SELECT + "WHERE s.id IN (SELECT value FROM json_each(?))"
_AFTER_ALL = (1 << 63) - 1
"""More than any `seq`."""


def newest_snapshots(db: CatalogDatabase, trajectory: int, last: int | None, before: int | None) -> list[Snapshot]:
    """See `Catalog.snapshots`; of the trajectory in row `trajectory`."""
    decode = rows.SnapshotDecoder()
    found: list[Snapshot] = []
    wanted, before = (sys.maxsize if last is None else last), (_AFTER_ALL if before is None else before)
    while len(found) < wanted:
        page = db.read_page(
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


def get_snapshots(db: CatalogDatabase, snapshot_ids: Iterable[SnapshotID]) -> dict[SnapshotID, Snapshot]:
    """See `Catalog.get_snapshots`."""
    decode, found = rows.SnapshotDecoder(), {}
    wanted = list(snapshot_ids)
    for at in range(0, len(wanted), PAGE_ROWS):
        turns.give_way()
        for row in db.read(_OF_IDS, (rows.encode_json(wanted[at : at + PAGE_ROWS]),)):
            taken = decode(row)
            found[taken.id] = taken
    return found


def count_snapshots(db: CatalogDatabase, trajectory_id: TrajectoryID) -> int:
    """See `Catalog.count_snapshots`."""
    with db.lock:
        number = trajectory_number(db, trajectory_id)
        (row,) = db.read("SELECT count(*) FROM snapshots WHERE trajectory = ?", (number,))
    return int(row[0])


def all_snapshots(db: CatalogDatabase) -> Iterator[Snapshot]:
    """See `Catalog.all_snapshots`."""
    last = 0
    while page := db.read_page(
        rows.SNAPSHOT_SELECT + "WHERE s.pk > ? ORDER BY s.pk", (last,), rows=PAGE_ROWS, size=PAGE_CHARS
    ):
        decode = rows.SnapshotDecoder()
        yield from map(decode, page)
        last = page[-1][0]


def forget_outputs(db: CatalogDatabase, blobs: Mapping[BlobID, int | None], *, spooled: bool) -> None:
    """See `Catalog.forget_outputs`. Inside a transaction of the caller."""
    for which in ("output", "stdout", "stderr"):
        having = f"call_{which} = ?1 AND state {'=' if spooled else '<>'} 'captured'"
        db.write_many(
            f"INSERT INTO damaged_outputs SELECT pk, '{which}', ?1, CAST(?2 AS BIGINT) FROM snapshots WHERE {having}",
            blobs.items(),
        )
        db.write_many(f"UPDATE snapshots SET call_{which} = NULL WHERE {having}", ((blob,) for blob in blobs))
