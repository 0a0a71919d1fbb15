"""The daemon itself: its version, its state, stopping it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query

import snapshotd
from snapshotd import types as t
from snapshotd.daemon.http import models
from snapshotd.daemon.http.routes.shared import ServiceDep, new_router
from snapshotd.daemon.http.wire import API_VERSION, check_ref

router = new_router(tags=["service"])


@router.get("/version")
def version(service: ServiceDep) -> models.Version:
    return models.Version(
        version=snapshotd.__version__, api_version=API_VERSION, pid=service.pid, state_dir=str(service.state_dir)
    )


@router.get("/status")
def status(service: ServiceDep) -> dict[str, Any]:
    """Facts about the engine: versions, state directory, layer file system, runtimes, counts."""
    return {
        "daemon_version": snapshotd.__version__,
        "api_version": API_VERSION,
        "pid": service.pid,
        "state_dir": str(service.state_dir),
        **service.engine.life.status(),
    }


@router.post("/flush", status_code=204)
def flush(service: ServiceDep, trajectory: Annotated[str | None, Query()] = None) -> None:
    """Return when every snapshot so far is stored and its files are counted."""
    chosen = (
        None if trajectory is None else t.TrajectoryID(service.engine.snapshots.trajectory(check_ref(trajectory)).id)
    )
    service.engine.storage.flush(chosen)


@router.post("/shutdown", status_code=202)
def shutdown(service: ServiceDep) -> dict[str, int]:
    """Stop the daemon as SIGTERM does: no new requests, a last snapshot of every sandbox, then exit."""
    service.request_stop()
    return {"pid": service.pid}
