"""The daemon itself: its version, its state, stopping it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import Query
from starlette.responses import Response

import snapshotd
from snapshotd import types as t
from snapshotd.api import operations
from snapshotd.api.service import DISK_MAX, StatsInfo, VersionInfo
from snapshotd.api.wire import API_VERSION, check_ref
from snapshotd.catalog.base import present_tenant
from snapshotd.daemon.http.metrics import METRICS_TYPE, write_metrics
from snapshotd.daemon.http.routes.shared import Service, ServiceDep, handles
from snapshotd.errors import UsageError

_FOR_TENANTS = ("daemon_version", "api_version", "mode", "weaker", "runtimes", "free_memory_bytes", "processor_count")


@handles(operations.VERSION)
def version(service: ServiceDep) -> VersionInfo:
    """To a caller of one tenant without the path and the process id."""
    if present_tenant() is not None:
        return VersionInfo(snapshotd.__version__, API_VERSION, 0, "")
    return VersionInfo(snapshotd.__version__, API_VERSION, service.pid, str(service.state_dir))


@handles(operations.STATUS)
def status(service: ServiceDep) -> dict[str, Any]:
    """Facts about the engine: versions, state directory, layer file system, runtimes, counts. To a caller of one tenant only
    how its sandboxes run."""
    facts = {
        "daemon_version": snapshotd.__version__,
        "api_version": API_VERSION,
        "pid": service.pid,
        "state_dir": str(service.state_dir),
        "listening": service.listening,
        "fingerprint": service.fingerprint,
        **service.engine.life.status(),
    }
    return facts if present_tenant() is None else {name: facts[name] for name in _FOR_TENANTS}


@handles(operations.STATS)
def stats(
    service: ServiceDep, trajectories: Annotated[int, Query(ge=0, le=DISK_MAX, description="As many in `disk`.")] = 50
) -> StatsInfo:
    """Figures of the moment: sandboxes, disk, the pauses of the last hour, requests. To a caller of one tenant those of its
    sandboxes and trajectories; the others, which are of the daemon as a whole, are 0."""
    return _stats(service, trajectories)


@handles(operations.METRICS, says="The figures of `/stats` in the text format of Prometheus.")
def metrics(service: ServiceDep) -> Response:
    """For a scrape by Prometheus."""
    return Response(write_metrics(_stats(service, 0), snapshotd.__version__), media_type=METRICS_TYPE)


@handles(operations.FLUSH)
def flush(
    service: ServiceDep,
    trajectory: Annotated[str | None, Query()] = None,
    published: Annotated[bool, Query(description="Of this trajectory of a fleet's node: also published.")] = False,
) -> None:
    """Return when every snapshot so far is stored and its files are counted."""
    chosen = (
        None if trajectory is None else t.TrajectoryID(service.engine.snapshots.trajectory(check_ref(trajectory)).id)
    )
    if published and chosen is None:
        raise UsageError("`published` is of one trajectory: name it")
    service.engine.storage.flush(chosen)
    if published and chosen is not None:
        service.engine.life.publish(chosen)


@handles(operations.SHUTDOWN)
def shutdown(service: ServiceDep) -> dict[str, int]:
    """Stop the daemon as SIGTERM does: no new requests, a last snapshot of every sandbox, then exit."""
    service.request_stop()
    return {"pid": service.pid}


def _stats(service: Service, most_trajectories: int) -> StatsInfo:
    tenant = present_tenant()
    if tenant is not None:
        return service.engine.stats.of_trajectories(service.engine.snapshots.of_tenant(tenant), most_trajectories)
    found = service.engine.stats.stats(most_trajectories)
    return replace(found, requests=service.requests.stats(), watchers=service.watchers.count())
