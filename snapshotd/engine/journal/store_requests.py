"""The requests of one trajectory's agents to the key-value store."""

from __future__ import annotations

import json
from typing import Any

from snapshotd.engine.context import Context
from snapshotd.engine.journal.keyvalue import KeyValueStore
from snapshotd.engine.protocol.agent_handler import Answer, StoreOperation
from snapshotd.errors import NotFound
from snapshotd.types import Trajectory


class StoreRequests:
    """Thread-safe. Values in the store have gone through the funnel of data that belong to no trajectory."""

    def __init__(self, context: Context, store: KeyValueStore, trajectory: Trajectory) -> None:
        self._secrecy, self._store, self._trajectory = context.secrecy, store, trajectory

    def carry_out(self, op: StoreOperation, fields: dict[str, Any], rid: str | None) -> Answer:
        """See `AgentHandler.store`."""
        shared, tenant = self._secrecy.shared_funnel(self._trajectory), self._secrecy.tenant(self._trajectory)
        fields = shared.conceal(fields)
        namespace = fields.pop("namespace")
        if op == "put":
            put = self._store.put(tenant, namespace, fields.pop("key"), fields.pop("value"), request=rid, **fields)
            return {"version": put.version}
        if op == "delete":
            self._store.delete(tenant, namespace, fields.pop("key"), request=rid, **fields)
            return {}
        if op == "get":
            try:
                found = self._store.get(tenant, namespace, fields["key"], fields["version"])
            except NotFound:
                return {}
            return {"value": shared.reveal(found.value), "version": found.version}
        rows = self._store.search(tenant, namespace, **fields)
        listed = [
            {"key": row.key, "value": row.value, "version": row.version, "namespace": row.namespace} for row in rows
        ]
        return {"body": json.dumps(shared.reveal(listed), ensure_ascii=False).encode(errors="backslashreplace")}
