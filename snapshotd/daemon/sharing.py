"""The history that a node of a fleet shares, over the daemon's parts. Imported by daemons that are nodes alone."""

from __future__ import annotations

from contextlib import closing
from functools import partial

from snapshotd.catalog.base import Catalog
from snapshotd.catalog.sql import SqlCatalog
from snapshotd.daemon.children import StatePlaces
from snapshotd.engine.context import Context
from snapshotd.engine.node.marks import Marks
from snapshotd.engine.node.publisher import NodePublisher
from snapshotd.engine.node.rights import NodeRights
from snapshotd.engine.node.shared import SharedHistory
from snapshotd.engine.node.takeover import NodeTakeover
from snapshotd.engine.storing.archive_queue import Archive
from snapshotd.engine.storing.archiver import Archiver
from snapshotd.engine.storing.cold import Cold
from snapshotd.errors import UsageError
from snapshotd.fleet.repository import PublishedSegments
from snapshotd.repo.fleet.reading import prepare
from snapshotd.repo.key import load_key
from snapshotd.store.open import open_store

_NODE = "fleet_node"


def prepare_repository(catalog: Catalog, places: StatePlaces) -> None:
    """Before anything opens the repository of a node. UsageError: the state directory was another node's, or a daemon's that
    was alone; NotPermitted: its key is not the fleet's; OSError."""
    known = catalog.get_meta(_NODE)
    if known is None and catalog.trajectories():
        raise UsageError(
            f"the daemon of {places.state_dir} was alone and has packs where no other node looks for them: let a node begin with an empty "
            "state directory, and bring trajectories with `snapshotd export` and `snapshotd import`"
        )
    if known not in (None, places.node):
        raise UsageError(
            f"the state directory {places.state_dir} is that of node {known} and not of {places.node}: set SNAPSHOTD_NODE={known}"
        )
    with closing(open_store(places.store_url)) as bucket:
        prepare(bucket, places.node, places.repo_dir / "index.db", load_key(places.repo_dir))
    if known is None:
        catalog.set_meta(_NODE, places.node)


def open_history(
    context: Context, archiver: Archiver, archive: Archive, cold: Cold, rights: NodeRights
) -> tuple[NodePublisher, NodeTakeover]:
    """What publishes, and what brings the histories of others. The daemon's catalog finds those from now on."""
    coordination, node = rights.lease.fleet, rights.lease.facts.node
    database = coordination.tables.database
    together = partial(database.transaction, nests=True)
    segments = PublishedSegments(coordination.tables)
    shared = SharedHistory(node, SqlCatalog(database), coordination, segments, together)
    marks = Marks(context.catalog)
    publisher = NodePublisher(context, archiver, archive.wait, archive.retry, shared, rights, marks)
    takeover = NodeTakeover(context, archiver, publisher.merge, cold.write_image, shared, rights, marks)
    archive.tell_of_stored(publisher.stored)
    context.catalog.look_elsewhere(takeover)
    return publisher, takeover
