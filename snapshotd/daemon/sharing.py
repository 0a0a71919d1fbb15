"""The history that a node of a fleet shares, over the daemon's parts. Imported by daemons that are nodes alone."""

from __future__ import annotations

from functools import partial

from snapshotd.catalog.sql import SqlCatalog
from snapshotd.engine.context import Context
from snapshotd.engine.node.marks import Marks
from snapshotd.engine.node.publisher import NodePublisher
from snapshotd.engine.node.shared import Claims, SharedHistory
from snapshotd.engine.node.takeover import NodeTakeover
from snapshotd.engine.storing.archive_queue import Archive
from snapshotd.engine.storing.archiver import Archiver
from snapshotd.engine.storing.cold import Cold
from snapshotd.fleet.base import NodeID
from snapshotd.fleet.coordination import PostgresCoordination
from snapshotd.fleet.repository import PublishedSegments
from snapshotd.fleet.tables import FleetTables


def open_history(
    context: Context,
    archiver: Archiver,
    archive: Archive,
    cold: Cold,
    node: NodeID,
    tables: FleetTables,
    coordination: PostgresCoordination,
    claims: Claims,
) -> tuple[NodePublisher, NodeTakeover]:
    """What publishes, and what brings the histories of others. The daemon's catalog finds those from now on. `tables`, on which
    `coordination` works, stand beside the catalog's in one database."""
    database = tables.database
    together = partial(database.transaction, nests=True)
    shared = SharedHistory(node, SqlCatalog(database), coordination, PublishedSegments(tables), together)
    marks = Marks(context.catalog)
    publisher = NodePublisher(context, archiver, archive.wait, archive.retry, shared, claims, marks)
    takeover = NodeTakeover(context, archiver, publisher.merge, cold.write_image, shared, claims, marks)
    archive.tell_of_stored(publisher.stored)
    context.catalog.look_elsewhere(takeover)
    return publisher, takeover
