"""The requests of one trajectory's agents to the key-value store."""

from __future__ import annotations

import json
from typing import Any

from snapshotd.engine.journal.keyvalue import KeyValueStore
from snapshotd.engine.protocol.agent_handler import Answer, StoreOperation
from snapshotd.engine.secrecy import Secrecy
from snapshotd.errors import NotFound
from snapshotd.types import Trajectory


def carry_out(
    secrecy: Secrecy,
    store: KeyValueStore,
    trajectory: Trajectory,
    op: StoreOperation,
    fields: dict[str, Any],
    rid: str | None,
) -> Answer:
    """See `AgentHandler.store`. Values in the store have gone through the funnel of data that belong to no trajectory."""
    shared, tenant = secrecy.shared_funnel(trajectory), secrecy.tenant(trajectory)
    fields = shared.conceal(fields)
    namespace = fields.pop("namespace")
    if op == "put":
        put = store.put(tenant, namespace, fields.pop("key"), fields.pop("value"), request=rid, **fields)
        return {"version": put.version}
    if op == "delete":
        store.delete(tenant, namespace, fields.pop("key"), request=rid, **fields)
        return {}
    if op == "get":
        try:
            found = store.get(tenant, namespace, fields["key"], fields["version"])
        except NotFound:
            return {}
        return {"value": shared.reveal(found.value), "version": found.version}
    rows = store.search(tenant, namespace, **fields)
    listed = [{"key": row.key, "value": row.value, "version": row.version, "namespace": row.namespace} for row in rows]
    return {"body": json.dumps(shared.reveal(listed), ensure_ascii=False).encode(errors="backslashreplace")}
