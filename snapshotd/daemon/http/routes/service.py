"""The daemon itself: its version, its state, stopping it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query

import snapshotd
from snapshotd import types as t
from snapshotd.api import operations
from snapshotd.api.service import VersionInfo
from snapshotd.api.wire import API_VERSION, check_ref
from snapshotd.daemon.http.routes.shared import ServiceDep, handles


@handles(operations.VERSION)
def version(service: ServiceDep) -> VersionInfo:
    return VersionInfo(snapshotd.__version__, API_VERSION, service.pid, str(service.state_dir))


@handles(operations.STATUS)
def status(service: ServiceDep) -> dict[str, Any]:
    """Facts about the engine: versions, state directory, layer file system, runtimes, counts."""
    return {
        "daemon_version": snapshotd.__version__,
        "api_version": API_VERSION,
        "pid": service.pid,
        "state_dir": str(service.state_dir),
        **service.engine.life.status(),
    }


@handles(operations.FLUSH)
def flush(service: ServiceDep, trajectory: Annotated[str | None, Query()] = None) -> None:
    """Return when every snapshot so far is stored and its files are counted."""
    chosen = (
        None if trajectory is None else t.TrajectoryID(service.engine.snapshots.trajectory(check_ref(trajectory)).id)
    )
    service.engine.storage.flush(chosen)


@handles(operations.SHUTDOWN)
def shutdown(service: ServiceDep) -> dict[str, int]:
    """Stop the daemon as SIGTERM does: no new requests, a last snapshot of every sandbox, then exit."""
    service.request_stop()
    return {"pid": service.pid}
