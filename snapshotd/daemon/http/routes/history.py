"""The agent's mind: its journal, state and tasks; resuming, rewinding, editing, retrying; irreversible calls."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request
from starlette.responses import Response

from snapshotd.api import operations
from snapshotd.api.history import EditRequest, MergeRequest, ResumeRequest
from snapshotd.api.wire import LIST_MAX, PREVIEW_FILES, check_ref
from snapshotd.daemon.http import streams
from snapshotd.daemon.http.decoding import check_decisions, check_name, edit_request, merge_request
from snapshotd.daemon.http.routes.shared import (
    NamedDep,
    OpenerDep,
    Ref,
    ServiceDep,
    handles,
    once,
    once_unless_abandoned,
)
from snapshotd.engine.base import Merged, RewindMode, RewindPreview
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


@handles(operations.RESUME)
def resume(ref: Ref, body: ResumeRequest, service: ServiceDep) -> Trajectory:
    """Start its program again from the top, replay its journal, and let it run on. Answers when it is started; its
    events follow under /trajectories/{ref}/events. `Undecided`: an irreversible call may or may not have happened, and
    `decisions` does not cover it."""
    check_decisions(body.decisions)
    return service.engine.runs.resume(ref, decisions=body.decisions)


@handles(operations.PREVIEW_REWIND)
def preview_rewind(
    ref: Ref,
    to: str,
    service: ServiceDep,
    opener: OpenerDep,
    mode: Annotated[RewindMode, Query()] = "both",
    max_files: Annotated[
        int, Query(ge=0, le=LIST_MAX, description="At most so many changed files are listed.")
    ] = PREVIEW_FILES,
    session: Annotated[
        str | None, Query(min_length=1, max_length=256, description="As in the request that rewinds.")
    ] = None,
) -> RewindPreview:
    """The effect that a rewind would have. Changes nothing."""
    return service.engine.branching.preview_rewind(
        ref, check_ref(to), mode=mode, max_files=max_files, session=session, opener=opener
    )


@handles(operations.MERGE)
def merge(ref: Ref, body: MergeRequest, service: ServiceDep, named: NamedDep) -> Merged:
    """Bring what changed between two snapshots to the head of a trajectory: three-way, in one step, recorded as a new
    snapshot, and `undo` takes it back. With a conflict nothing is merged. `Conflict` if something runs in it, or its head
    changed meanwhile."""
    asked, branching = merge_request(body), service.engine.branching
    return once(
        service, named, body, lambda: branching.merge(ref, asked), lambda made: branching.recall_merge(made[0], asked)
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
