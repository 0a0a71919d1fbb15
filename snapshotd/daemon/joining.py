"""The joining of a fleet: what a daemon with SNAPSHOTD_FLEET opens besides what every daemon has. Imported by those alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from snapshotd.catalog.postgres.catalog import open_database
from snapshotd.config import Config, node_of
from snapshotd.engine.context import Context
from snapshotd.engine.node.alone import NotPublishing
from snapshotd.engine.node.lease import LeaseKeeper, NodeFacts
from snapshotd.engine.node.node import FleetNode
from snapshotd.engine.node.rights import NodeRights
from snapshotd.engine.node.watchdog import Watchdog
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.errors import Unavailable, UsageError
from snapshotd.fleet.base import LeaseTerms, NodeID
from snapshotd.fleet.coordination import PostgresCoordination
from snapshotd.fleet.tables import FleetTables
from snapshotd.types import TrajectoryID

_BOOT_ID, _MACHINE_ID = Path("/proc/sys/kernel/random/boot_id"), Path("/etc/machine-id")


def open_rights(config: Config, run_dir: Path, state_inode: str, local: Callable[[], list[TrajectoryID]]) -> NodeRights:
    """The rights of this daemon as a node, whose lease is held from now on. `state_inode`: what no other state directory of
    the machine has. UsageError, Unsupported (psycopg is missing), NotPermitted, VersionMismatch, Unavailable (no database
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
    watchdog = Watchdog(run_dir / "watchdog", terms.margin_ns // 3)
    rights = NodeRights(LeaseKeeper(facts, PostgresCoordination(tables, terms), watchdog), local)
    rights.lease.start(rights)
    return rights


def open_node(context: Context, rights: NodeRights, sessions: Sessions, starting: Callable[[], int]) -> FleetNode:
    """The daemon as a node, over its parts. `starting`: as of `FleetNode`."""
    seams = NotPublishing(context.catalog)
    return FleetNode(context, rights, sessions, seams, seams, starting)


def _host(state_inode: str) -> str:
    machine = _MACHINE_ID.read_text().strip() if _MACHINE_ID.exists() else ""
    return f"{machine} {_BOOT_ID.read_text().strip()} {state_inode}"
