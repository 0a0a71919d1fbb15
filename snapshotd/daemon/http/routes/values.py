"""The key-value store across trajectories."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from snapshotd.api import operations
from snapshotd.api.values import PutValueRequest, SearchRequest
from snapshotd.catalog.base import own_tenant
from snapshotd.daemon.http.decoding import check_json
from snapshotd.daemon.http.routes.shared import ServiceDep, handles
from snapshotd.types import DEFAULT_TENANT, StoredValue

Namespace = Annotated[str, Query(max_length=8192, description="Parts separated by slashes: `team/project`.")]
Key = Annotated[str, Query(max_length=1024)]
Tenant = Annotated[str, Query(max_length=1024)]
Version = Annotated[int | None, Query(ge=0, le=1 << 53)]


@handles(operations.GET_VALUE)
def get(
    namespace: Namespace, key: Key, service: ServiceDep, tenant: Tenant = DEFAULT_TENANT, version: Version = None
) -> StoredValue:
    """The newest value of a key, or an older version of it."""
    return service.engine.values.get(own_tenant(tenant), namespace, key, version)


@handles(operations.PUT_VALUE)
def put(
    namespace: Namespace, key: Key, body: PutValueRequest, service: ServiceDep, tenant: Tenant = DEFAULT_TENANT
) -> StoredValue:
    """A new version. Conflict: another version is there than the one expected."""
    value = check_json(body.value, f"the value of {key!r}")
    return service.engine.values.put(
        own_tenant(tenant), namespace, key, value, ttl_s=body.ttl_s, expected_version=body.expected_version
    )


@handles(operations.DELETE_VALUE)
def delete(
    namespace: Namespace,
    key: Key,
    service: ServiceDep,
    tenant: Tenant = DEFAULT_TENANT,
    expected_version: Version = None,
) -> None:
    """Recorded as a version; older ones can still be read."""
    service.engine.values.delete(own_tenant(tenant), namespace, key, expected_version=expected_version)


@handles(operations.VALUE_HISTORY)
def history(namespace: Namespace, key: Key, service: ServiceDep, tenant: Tenant = DEFAULT_TENANT) -> list[StoredValue]:
    """All versions that are kept, newest first."""
    return service.engine.values.history(own_tenant(tenant), namespace, key)


@handles(operations.SEARCH_VALUES)
def search(body: SearchRequest, service: ServiceDep) -> list[StoredValue]:
    """The newest versions in the order of their keys."""
    return service.engine.values.search(
        own_tenant(body.tenant),
        body.namespace,
        prefix=body.prefix,
        where=dict(body.where) or None,
        limit=body.limit,
        after=body.after,
    )
