"""The key-value store across trajectories."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from snapshotd.daemon.http import models_mind as mind
from snapshotd.daemon.http.routes.shared import ServiceDep, new_router
from snapshotd.types import DEFAULT_TENANT

router = new_router(prefix="/store", tags=["store"])
Namespace = Annotated[str, Query(max_length=8192, description="Parts separated by slashes: `team/project`.")]
Key = Annotated[str, Query(max_length=1024)]
Tenant = Annotated[str, Query(max_length=1024)]
Version = Annotated[int | None, Query(ge=0, le=1 << 53)]


@router.get("/value")
def get(
    namespace: Namespace, key: Key, service: ServiceDep, tenant: Tenant = DEFAULT_TENANT, version: Version = None
) -> mind.StoredValue:
    """The newest value of a key, or an older version of it."""
    return mind.StoredValue.of(service.engine.values.get(tenant, namespace, key, version))


@router.put("/value")
def put(
    namespace: Namespace, key: Key, body: mind.PutValueRequest, service: ServiceDep, tenant: Tenant = DEFAULT_TENANT
) -> mind.StoredValue:
    """A new version. Conflict: another version is there than the one expected."""
    value = mind.check_json(body.value, f"the value of {key!r}")
    stored = service.engine.values.put(
        tenant, namespace, key, value, ttl_s=body.ttl_s, expected_version=body.expected_version
    )
    return mind.StoredValue.of(stored)


@router.delete("/value", status_code=204)
def delete(
    namespace: Namespace,
    key: Key,
    service: ServiceDep,
    tenant: Tenant = DEFAULT_TENANT,
    expected_version: Version = None,
) -> None:
    """Recorded as a version; older ones can still be read."""
    service.engine.values.delete(tenant, namespace, key, expected_version=expected_version)


@router.get("/history")
def history(
    namespace: Namespace, key: Key, service: ServiceDep, tenant: Tenant = DEFAULT_TENANT
) -> list[mind.StoredValue]:
    """All versions that are kept, newest first."""
    return [mind.StoredValue.of(item) for item in service.engine.values.history(tenant, namespace, key)]


@router.post("/search")
def search(body: mind.SearchRequest, service: ServiceDep) -> list[mind.StoredValue]:
    """The newest versions in the order of their keys."""
    found = service.engine.values.search(
        body.tenant,
        body.namespace,
        prefix=body.prefix,
        where=mind.check_json(dict(body.where), "the search") or None,
        limit=body.limit,
        after=body.after,
    )
    return [mind.StoredValue.of(item) for item in found]
