"""The joining of a fleet: what a daemon with SNAPSHOTD_FLEET opens besides what every daemon has. Imported by those alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

from snapshotd.catalog.base import Catalog
from snapshotd.catalog.postgres.catalog import open_database
from snapshotd.config import Config, node_of
from snapshotd.daemon.children import StatePlaces, open_blocks
from snapshotd.engine.context import Context
from snapshotd.engine.node.collecting import NodePruneScope
from snapshotd.engine.node.lease import ANSWER_S, LeaseKeeper, NodeFacts
from snapshotd.engine.node.marks import PublishedMarks
from snapshotd.engine.node.node import FleetNode
from snapshotd.engine.node.pinning import NodePins
from snapshotd.engine.node.publisher import NodePublisher
from snapshotd.engine.node.removing import Removals
from snapshotd.engine.node.rights import NodeRights
from snapshotd.engine.node.shared import SharedHistory
from snapshotd.engine.node.takeover import NodeTakeover
from snapshotd.engine.node.watchdog import Watchdog
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.engine.storage.archive_queue import Archive
from snapshotd.engine.storage.archiver import Archiver
from snapshotd.engine.storage.cold import Cold
from snapshotd.engine.storage.upkeep import Upkeep
from snapshotd.errors import Unavailable, UsageError
from snapshotd.fleet.base import LeaseTerms, NodeID
from snapshotd.fleet.collection import Collection
from snapshotd.fleet.coordination import PostgresCoordination
from snapshotd.fleet.repository import PublishedSegments
from snapshotd.fleet.tables import FleetTables
from snapshotd.repo.fleet.blocks import DiskBlocks
from snapshotd.repo.fleet.reading import prepare
from snapshotd.repo.key import load_key
from snapshotd.store.open import open_store
from snapshotd.types import TrajectoryID

_NODE = "fleet_node"
_BOOT_ID, _MACHINE_ID = Path("/proc/sys/kernel/random/boot_id"), Path("/etc/machine-id")


def open_rights(config: Config, run_dir: Path, state_inode: str, local: Callable[[], list[TrajectoryID]]) -> NodeRights:
    """Open the rights of this daemon as a node, which registers in `join_fleet`. `state_inode`: differs for each state directory of
    the machine. UsageError, Unsupported (psycopg is missing), NotPermitted, VersionMismatch, Unavailable (no database
    answers)."""
    if not config.store:
        raise UsageError(
            "SNAPSHOTD_FLEET is set and SNAPSHOTD_STORE is not: a node's packs lie in a store that all nodes reach, such as s3://bucket"
        )
    facts = NodeFacts(NodeID(node_of(config)), _host(state_inode), config.node_address)
    terms = LeaseTerms()
    try:
        tables = FleetTables(open_database(config.fleet))
    except Unavailable as exc:
        raise Unavailable(f"the daemon cannot join its fleet (SNAPSHOTD_FLEET): {exc.message}") from exc
    tables.make()
    tables.database.give_up_after(ANSWER_S)
    watchdog = Watchdog(run_dir / "watchdog", terms.margin_ns // 3)
    return NodeRights(LeaseKeeper(facts, PostgresCoordination(tables, terms), watchdog), local)


def join_fleet(catalog: Catalog, places: StatePlaces, rights: NodeRights) -> DiskBlocks:
    """Prepare the repository of a node, and then hold the lease: a daemon that is refused leaves no row. Call it before anything
    opens the repository. Returns the blocks of packs that the node's disk keeps. UsageError: the state directory was another node's, or a
    daemon's that was alone; NotPermitted: its key is not the fleet's; OSError."""
    known = catalog.get_meta(_NODE)
    if known is None and catalog.trajectories.list():
        raise UsageError(
            f"the daemon of {places.state_dir} was alone and has packs where no other node looks for them: let a node begin with an empty "
            "state directory, and bring trajectories with `snapshotd export` and `snapshotd import`"
        )
    if known not in (None, places.node):
        raise UsageError(
            f"the state directory {places.state_dir} is that of node {known} and not of {places.node}: set SNAPSHOTD_NODE={known}"
        )
    key = load_key(places.repo_dir)
    with closing(open_store(places.store_url)) as bucket:
        prepare(bucket, places.node, places.repo_dir / "index.db", key)
    if known is None:
        catalog.set_meta(_NODE, places.node)
    rights.lease.start(rights)
    blocks = open_blocks(places, key)
    blocks.recount()
    return blocks


def open_node(
    context: Context,
    rights: NodeRights,
    sessions: Sessions,
    starting: Callable[[], int],
    archiver: Archiver,
    archive: Archive,
    cold: Cold,
    upkeep: Upkeep,
) -> FleetNode:
    """Open the daemon as a node, over its parts: what publishes, what brings the histories of other nodes, and what collects. The
    daemon's catalog finds those histories from now on. `starting`: as of `FleetNode`."""
    coordination, node = rights.lease.fleet, rights.lease.facts.node
    database = coordination.tables.database
    together = partial(database.transaction, nests=True)
    segments = PublishedSegments(coordination.tables)
    shared = SharedHistory(node, Catalog(database), coordination, segments, Collection(coordination.tables), together)
    marks = PublishedMarks(context.catalog)
    removals = Removals(context.catalog, shared, rights, marks)
    pins = NodePins(context, shared, rights, marks, sessions.used_snapshots)
    context.pins.hold_with(pins.hold)
    chores = (removals.publish, pins.renew)
    publisher = NodePublisher(context, archiver, archive.wait, archive.retry, shared, rights, marks, chores)
    takeover = NodeTakeover(context, archiver, publisher.merge, cold.write_image, shared, rights, marks)
    context.catalog.refs.look_up_in(takeover)
    everything = partial(removals.publish, all_of_them=True)
    upkeep.share(NodePruneScope(context, shared, rights, marks, rights.lease.epoch, everything, takeover.refresh))
    return FleetNode(context, rights, sessions, publisher, takeover, starting)


def _host(state_inode: str) -> str:
    machine = _MACHINE_ID.read_text().strip() if _MACHINE_ID.exists() else ""
    return f"{machine} {_BOOT_ID.read_text().strip()} {state_inode}"
