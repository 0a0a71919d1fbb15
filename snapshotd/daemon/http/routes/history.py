"""The agent's mind: its journal, state and tasks; resuming, rewinding, editing, retrying; irreversible calls."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from snapshotd.api import operations
from snapshotd.api.history import EditRequest, MergeRequest
from snapshotd.daemon.http import streams
from snapshotd.daemon.http.decoding import check_name, edit_request
from snapshotd.daemon.http.routes.shared import NamedDep, Ref, ServiceDep, handles, once, once_unless_abandoned
from snapshotd.engine.base import Merged
from snapshotd.types import Trajectory


@handles(
    operations.JOURNAL,
    says="Lines: one entry each (`id`, `kind`, `name`, `arguments`, `side_effect`, `key`, `status`, `started_at`, "
    '`ended_at`, `result`, `error`, `facts`, `details`, `parent`, `snapshot`), at last `{"event":"end"}`.',
)
async def journal(ref: Ref, service: ServiceDep) -> Response:
    """The journal up to a snapshot (of a trajectory: with the entries that its head does not bind yet), from the
    program's beginning."""
    return await streams.ndjson(
        service.streams, lambda emit: streams.listing(emit, service.engine.journal.entries(ref))
    )


@handles(operations.MERGE)
def merge(ref: Ref, body: MergeRequest, service: ServiceDep, named: NamedDep) -> Merged:
    """Bring what changed between two snapshots to the head of a trajectory: three-way, in one step, recorded as a new
    snapshot, and `undo` takes it back. With a conflict nothing is merged. `Conflict` if something runs in it, or its head
    changed meanwhile."""
    branching = service.engine.branching
    return once(
        service, named, body, lambda: branching.merge(ref, body), lambda made: branching.recall_merge(made[0], body)
    )


@handles(operations.EDIT)
async def edit(request: Request, ref: Ref, body: EditRequest, service: ServiceDep, named: NamedDep) -> Trajectory:
    """A new trajectory whose first snapshot is this one, edited. It is stopped again if the client goes away before the
    answer."""
    engine = service.engine
    check_name(body.name, "a name")
    wanted = edit_request(body, body.env)

    def undo(line: Trajectory) -> None:
        engine.runs.stop(line.id)

    return await once_unless_abandoned(
        request,
        service,
        named,
        body,
        lambda: engine.branching.edit(ref, wanted, name=body.name, resume=body.resume),
        lambda made: engine.snapshots.trajectory(made[0]),
        undo,
    )
