"""The verbs of the key-value store, which outlives runs and trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from snapshotd.client.results_mind import ValueInfo
from snapshotd.client.verbs import Verbs
from snapshotd.terms import DEFAULT_TENANT


class Values(Verbs):
    """Part of `Snapshotd`. A value is any JSON value; a namespace has parts separated by slashes (`team/project`);
    nothing of one tenant is seen by another."""

    def put_value(
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
        body = {"value": value, "ttl_s": ttl_s, "expected_version": expected_version}
        return ValueInfo.of(
            self._transport.request("PUT", "/store/value", body=body, query=_key(tenant, namespace, key))
        )

    def get_value(
        self, namespace: str, key: str, *, tenant: str = DEFAULT_TENANT, version: int | None = None
    ) -> ValueInfo:
        """The newest version, or an older one. NotFound: it is not there, was deleted, or has expired."""
        return ValueInfo.of(
            self._transport.request("GET", "/store/value", query=_key(tenant, namespace, key, version=version))
        )

    def delete_value(
        self, namespace: str, key: str, *, tenant: str = DEFAULT_TENANT, expected_version: int | None = None
    ) -> None:
        """Recorded as a version. NotFound; Conflict."""
        self._transport.request(
            "DELETE", "/store/value", query=_key(tenant, namespace, key, expected_version=expected_version)
        )

    def search_values(
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
        body = {
            "tenant": tenant,
            "namespace": namespace,
            "prefix": prefix,
            "where": dict(where or {}),
            "limit": limit,
            "after": after,
        }
        return [ValueInfo.of(item) for item in self._transport.request("POST", "/store/search", body=body)]

    def value_history(self, namespace: str, key: str, *, tenant: str = DEFAULT_TENANT) -> list[ValueInfo]:
        """All versions that are kept, newest first; empty if there are none."""
        answer = self._transport.request("GET", "/store/history", query=_key(tenant, namespace, key))
        return [ValueInfo.of(item) for item in answer]


def _key(tenant: str, namespace: str, key: str, **versions: int | None) -> dict[str, str | None]:
    numbers = {name: None if version is None else str(version) for name, version in versions.items()}
    return {"tenant": tenant, "namespace": namespace, "key": key, **numbers}
