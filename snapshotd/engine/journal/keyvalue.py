"""The key-value store across trajectories: checks of names and values. The catalog does the rest
(`catalog.base.KeyValues`)."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from snapshotd.catalog.base import Catalog
from snapshotd.engine.secrecy import TENANT
from snapshotd.errors import LimitExceeded, SnapshotdError, UsageError
from snapshotd.failpoints import hit
from snapshotd.terms import RESERVED_TENANTS
from snapshotd.types import DEFAULT_TENANT, NAME_PATTERN, StoredValue

MAX_KEY_CHARS = 200
MAX_NAMESPACE_PARTS = 8
MAX_VALUE_BYTES = 1 << 20
MAX_TTL_S = 10 * 366 * 86400.0
MAX_RESULTS = 1000
MAX_CONDITIONS = 20
KEPT_VERSIONS = 100
SWEEP_EVERY_S = 600.0
_NS = 1_000_000_000
_log = logging.getLogger(__name__)


class KeyValueStore:
    """The verbs of the store, each checked first. Thread-safe. UsageError (malformed names), LimitExceeded, and the
    catalog's errors."""

    def __init__(self, catalog: Catalog, conceal: Callable[[Any], Any] = lambda value: value) -> None:
        """`conceal`: gives a value without the secrets in it."""
        self._values, self._conceal = catalog.values, conceal
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def put(
        self,
        tenant: str,
        namespace: str,
        key: str,
        value: Any,
        *,
        ttl_s: float | None = None,
        expected_version: int | None = None,
        request: str | None = None,
    ) -> StoredValue:
        """Conflict: there is another version than the `expected_version`. `request`: as in `catalog.base.KeyValues`."""
        _check(tenant, namespace, key)
        value = self._conceal(value)
        size = len(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        if size > MAX_VALUE_BYTES:
            raise LimitExceeded(
                f"the value of {key!r} has {size} bytes as JSON, more than {MAX_VALUE_BYTES}; keep it in a file"
            )
        if ttl_s is not None and not (math.isfinite(ttl_s) and 0 < ttl_s <= MAX_TTL_S):
            raise UsageError(f"{key!r} cannot be kept for {ttl_s} s; give more than 0 and at most {MAX_TTL_S:.0f}")
        now = time.time_ns()
        expires = None if ttl_s is None else now + int(ttl_s * _NS)
        stored = self._values.put(
            tenant,
            namespace,
            key,
            value,
            now_ns=now,
            expires_at_ns=expires,
            expected_version=expected_version,
            request=request,
        )
        hit("engine.values.changed")
        return stored

    def get(self, tenant: str, namespace: str, key: str, version: int | None = None) -> StoredValue:
        """NotFound."""
        _check(tenant, namespace, key)
        return self._values.get(tenant, namespace, key, now_ns=time.time_ns(), version=version)

    def delete(
        self, tenant: str, namespace: str, key: str, *, expected_version: int | None = None, request: str | None = None
    ) -> None:
        """NotFound, Conflict."""
        _check(tenant, namespace, key)
        self._values.delete(
            tenant, namespace, key, now_ns=time.time_ns(), expected_version=expected_version, request=request
        )
        hit("engine.values.changed")

    def search(
        self,
        tenant: str,
        namespace: str,
        *,
        prefix: str = "",
        where: dict[str, Any] | None = None,
        limit: int = 100,
        after: str = "",
    ) -> list[StoredValue]:
        """See `KeyValues.search`. `limit`: 1..1000."""
        _check(tenant, namespace)
        if not 1 <= limit <= MAX_RESULTS:
            raise UsageError(
                f"cannot search for {limit} values at once; ask for 1 to {MAX_RESULTS}, and go on behind the last key"
            )
        if max(len(prefix), len(after)) > MAX_KEY_CHARS:
            raise UsageError(
                f"a prefix, and the key to go on behind, have at most {MAX_KEY_CHARS} characters, as keys have"
            )
        for path, wanted in (where or {}).items():
            if not path or len(path) > MAX_KEY_CHARS or isinstance(wanted, (dict, list)):
                raise UsageError(
                    f"the condition {path[:80]!r} must be a path of 1 to {MAX_KEY_CHARS} characters and a plain value"
                )
        if where is not None and len(where) > MAX_CONDITIONS:
            raise LimitExceeded(f"a search has at most {MAX_CONDITIONS} conditions, not {len(where)}")
        return self._values.search(
            tenant, namespace, now_ns=time.time_ns(), prefix=prefix, where=where, limit=limit, after=after
        )

    def history(self, tenant: str, namespace: str, key: str) -> list[StoredValue]:
        """Newest first; empty if there are none."""
        _check(tenant, namespace, key)
        return self._values.history(tenant, namespace, key)

    # -- upkeep --------------------------------------------------------------------------------------------------------

    def start_sweeping(self) -> None:
        """Remove expired values and old versions, now and every ten minutes, in the background until `close`."""
        self._thread = threading.Thread(target=self._sweep, name="sweep-values")
        self._thread.start()

    def close(self) -> None:
        """End the sweeping. Idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _sweep(self) -> None:
        while True:
            try:
                self._values.sweep(now_ns=time.time_ns(), keep_versions=KEPT_VERSIONS)
            except SnapshotdError as exc:
                _log.warning("expired values were not removed: %s", exc.message)
            if self._closing.wait(SWEEP_EVERY_S):
                return


def tenant_env(tenant: str) -> tuple[tuple[str, str], ...]:
    """A tenant as a trajectory's environment records it. UsageError: malformed, or reserved."""
    _check_tenant(tenant)
    if tenant in RESERVED_TENANTS:
        raise UsageError(f"the tenant {tenant} is reserved for a program beside the daemon; choose another one")
    return () if tenant == DEFAULT_TENANT else ((TENANT, tenant),)


def _check_tenant(tenant: str) -> None:
    if not NAME_PATTERN.fullmatch(tenant):
        raise UsageError(
            f"tenant {tenant[:80]!r} is malformed: use 1 to 64 letters, digits, '.', '_' or '-', a letter or digit first"
        )


def _check(tenant: str, namespace: str, key: str | None = None) -> None:
    """Check the names of a place in the store. UsageError, naming the malformed part."""
    _check_tenant(tenant)
    parts = namespace.split("/")
    if len(parts) > MAX_NAMESPACE_PARTS or not all(_is_word(part) for part in parts):
        raise UsageError(
            f"namespace {namespace[:80]!r} is malformed: use 1 to {MAX_NAMESPACE_PARTS} parts with '/' between them, each of 1 to "
            f"{MAX_KEY_CHARS} printable characters"
        )
    if key is not None and not _is_word(key):
        raise UsageError(f"key {key[:80]!r} is malformed: use 1 to {MAX_KEY_CHARS} printable characters")


def _is_word(text: str) -> bool:
    return 1 <= len(text) <= MAX_KEY_CHARS and text.isprintable()
