"""The catalog: the database of images, trajectories, snapshots, calls, conversations and tags.

It is the commit point of the product: a snapshot exists exactly when its row does, and `snapshots.commit` writes the
row, the tool call, the new messages and the trajectory's new head in one transaction. Everything a row refers to
(sealed layers, blobs) is complete before that. Layers and blobs that no row refers to are rubbish.

Durability: every method that writes survives `kill -9` of the process on return. It survives power loss after the next
`flush()`, which the engine calls before it reports a snapshot as stored.
Concurrency: all methods are thread-safe; there is one writer. Reads see the latest commit.
Errors: NotFound, Ambiguous, Conflict as each method says; DataLoss when the file is damaged; VersionMismatch when it
was written by a newer version; OutOfSpace when the disk is full (nothing changed).
"""

from __future__ import annotations

from snapshotd.catalog import rows
from snapshotd.catalog.database import CatalogDatabase
from snapshotd.catalog.parts import CallFacts, NumberedSnapshot, OtherCatalogs, SnapshotRow, TrajectoryTotals
from snapshotd.catalog.tables.approvals import ApprovalTable, Compensations
from snapshotd.catalog.tables.conversations import ConversationTable
from snapshotd.catalog.tables.experiments import ExperimentTable
from snapshotd.catalog.tables.figures import Figures
from snapshotd.catalog.tables.images import ImageTable
from snapshotd.catalog.tables.journal import JournalTable
from snapshotd.catalog.tables.others import OtherRows
from snapshotd.catalog.tables.refs import References
from snapshotd.catalog.tables.requests import RequestTable
from snapshotd.catalog.tables.snapshots import SnapshotTable
from snapshotd.catalog.tables.trajectories import TrajectoryTable
from snapshotd.catalog.tables.values import KeyValues
from snapshotd.catalog.tenancy import as_tenant, own_tenant, present_tenant

__all__ = [
    "CallFacts",
    "Catalog",
    "ExperimentTable",
    "KeyValues",
    "NumberedSnapshot",
    "OtherCatalogs",
    "SnapshotRow",
    "TrajectoryTotals",
    "as_tenant",
    "own_tenant",
    "present_tenant",
]


class Catalog:
    """The module's text holds for the methods of all parts. `SqliteCatalog` and `PostgresCatalog` give a database."""

    def __init__(self, database: CatalogDatabase) -> None:
        """`database` has the catalog's tables, and is closed with the catalog."""
        self._db = database
        self.figures = Figures(database)
        self.trajectories = TrajectoryTable(database, self.figures)
        self.snapshots = SnapshotTable(database)
        self.conversations = ConversationTable(database)
        self.journal = JournalTable(database)
        self.refs = References(database, self.trajectories, self.snapshots)
        self.images = ImageTable(database)
        self.requests = RequestTable(database)
        self.approvals = ApprovalTable(database)
        self.compensations = Compensations(database)
        self.values = KeyValues(database)
        self.experiments = ExperimentTable(database)
        self.others = OtherRows(database, self.figures, self.trajectories.tell)

    def close(self) -> None:
        """Release the database. Idempotent. Any other call afterwards is a defect."""
        self._db.close()

    def flush(self) -> None:
        """Return when everything committed so far is durable against power loss."""
        self._db.flush()

    def checkpoint(self) -> None:
        """Put what was committed into the catalog's main file, as far as no other process reads an earlier state."""
        self._db.checkpoint()

    def problems(self) -> list[str]:
        """The damages in the catalog's own file, in words; [] if there are none. Reads the whole of it."""
        return self._db.problems()

    def get_meta(self, key: str) -> str | None:
        """A named fact of this state directory (instance id, boot id), or None."""
        row = self._db.read_one("SELECT value FROM meta WHERE key = ?", (key,))
        return None if row is None else str(row[0])

    def set_meta(self, key: str, value: str) -> None:
        """Set or replace a named fact."""
        with self._db.transaction():
            self._db.write(rows.META_INSERT, (key, value))
