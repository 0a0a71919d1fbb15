"""The verbs of the key-value store, which outlives runs and trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from snapshotd.api import operations
from snapshotd.api.values import PutValueRequest, SearchRequest, ValueInfo
from snapshotd.client.twofold import verb
from snapshotd.client.verbs.base import VerbPart
from snapshotd.terms import DEFAULT_TENANT


class ValueVerbs(VerbPart):
    """Part of `Snapshotd`. A value is any JSON value; a namespace has parts separated by slashes (`team/project`);
    nothing of one tenant is seen by another."""

    @verb
    async def put_value(
        self,
        namespace: str,
        key: str,
        value: Any,
        *,
        tenant: str = DEFAULT_TENANT,
        ttl_s: float | None = None,
        expected_version: int | None = None,
    ) -> ValueInfo:
        """A new version, gone after `ttl_s` seconds. With `expected_version` (0: there is none) a Conflict if another
        version is there. UsageError: malformed names; LimitExceeded."""
        body = PutValueRequest(value, ttl_s, expected_version)
        return await self._transport.call(operations.PUT_VALUE, body=body, query=_key(tenant, namespace, key))

    @verb
    async def get_value(
        self, namespace: str, key: str, *, tenant: str = DEFAULT_TENANT, version: int | None = None
    ) -> ValueInfo:
        """The newest version, or an older one. NotFound: it is not there, was deleted, or has expired."""
        return await self._transport.call(operations.GET_VALUE, query=_key(tenant, namespace, key, version=version))

    @verb
    async def delete_value(
        self, namespace: str, key: str, *, tenant: str = DEFAULT_TENANT, expected_version: int | None = None
    ) -> None:
        """Recorded as a version. NotFound; Conflict."""
        query = _key(tenant, namespace, key, expected_version=expected_version)
        await self._transport.call(operations.DELETE_VALUE, query=query)

    @verb
    async def search_values(
        self,
        namespace: str,
        *,
        tenant: str = DEFAULT_TENANT,
        prefix: str = "",
        where: Mapping[str, Any] | None = None,
        limit: int = 100,
        after: str = "",
    ) -> list[ValueInfo]:
        """The newest versions in the order of their keys, of a namespace and those below it: keys that begin with
        `prefix` and come behind `after`, and whose fields (dotted paths) equal those of `where`."""
        body = SearchRequest(namespace, tenant, prefix, dict(where or {}), limit, after)
        return await self._transport.call(operations.SEARCH_VALUES, body=body)

    @verb
    async def value_history(self, namespace: str, key: str, *, tenant: str = DEFAULT_TENANT) -> list[ValueInfo]:
        """All versions that are kept, newest first; empty if there are none."""
        return await self._transport.call(operations.VALUE_HISTORY, query=_key(tenant, namespace, key))


def _key(tenant: str, namespace: str, key: str, **versions: int | None) -> dict[str, str | int | None]:
    return {"tenant": tenant, "namespace": namespace, "key": key, **versions}
