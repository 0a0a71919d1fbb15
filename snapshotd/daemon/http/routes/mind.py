"""The agent's mind: its journal, state and tasks; resuming, rewinding, editing, retrying; irreversible calls."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Request
from starlette.responses import Response

from snapshotd.api import operations
from snapshotd.api.mind import (
    CompensateRequest,
    EditRequest,
    MergeRequest,
    PromoteRequest,
    ResumeRequest,
    RetryRequest,
    RewindRequest,
)
from snapshotd.api.wire import LIST_MAX, PREVIEW_FILES, check_ref
from snapshotd.daemon.http import streams
from snapshotd.daemon.http.decoding import check_name, decisions, edit_request, merge_request
from snapshotd.daemon.http.peer import client_pid
from snapshotd.daemon.http.routes.shared import (
    NamedDep,
    Ref,
    ServiceDep,
    handles,
    once,
    once_unless_abandoned,
    step_once,
)
from snapshotd.engine.base import Effect, Merged, Opener, RewindMode, RewindPreview, Task
from snapshotd.types import Snapshot, Trajectory


@handles(
    operations.JOURNAL,
    says="Lines: one entry each (`id`, `kind`, `name`, `arguments`, `side_effect`, `key`, `status`, `started_at`, "
    '`ended_at`, `result`, `error`, `facts`, `details`, `parent`, `snapshot`), at last `{"event":"end"}`.',
)
async def journal(ref: Ref, service: ServiceDep) -> Response:
    """The journal up to a snapshot (of a trajectory: with the entries that its head does not bind yet), from the
    program's beginning."""
    return await streams.ndjson(service.streams, lambda emit: streams.listing(emit, service.engine.mind.journal(ref)))


@handles(operations.STATE)
def state(ref: Ref, service: ServiceDep) -> dict[str, Any]:
    """The agent's own JSON state as it was saved with the snapshot."""
    return service.engine.mind.state(ref)


@handles(operations.TASKS)
def tasks(ref: Ref, service: ServiceDep) -> list[Task]:
    """The subtasks as they were at the snapshot, in the order in which they were declared."""
    return service.engine.mind.tasks(ref)


@handles(operations.RESUME)
def resume(ref: Ref, body: ResumeRequest, service: ServiceDep) -> Trajectory:
    """Start its program again from the top, replay its journal, and let it run on. Answers when it is started; its
    events follow under /trajectories/{ref}/events. `Undecided`: an irreversible call may or may not have happened, and
    `decisions` does not cover it."""
    return service.engine.runs.resume(ref, decisions=decisions(body.decisions))


@handles(operations.PREVIEW_REWIND)
def preview_rewind(
    request: Request,
    ref: Ref,
    to: str,
    service: ServiceDep,
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
        ref, check_ref(to), mode=mode, max_files=max_files, session=session, opener=_opener(request)
    )


@handles(operations.REWIND)
def rewind(request: Request, ref: Ref, body: RewindRequest, service: ServiceDep, named: NamedDep) -> Snapshot:
    """Go back to an older snapshot, in place; recorded as a new snapshot, and `undo` takes it back."""

    def make() -> Snapshot:
        options: dict[str, Any] = {"mode": body.mode, "compensate": body.compensate, "session": body.session}
        return service.engine.branching.rewind(ref, check_ref(body.to), **options, opener=_opener(request))

    return step_once(service, named, body, make)


@handles(operations.UNDO)
def undo(request: Request, ref: Ref, service: ServiceDep, named: NamedDep) -> Snapshot:
    """Take the last rewind (or undo) back."""
    return step_once(service, named, None, lambda: service.engine.branching.undo(ref, opener=_opener(request)))


@handles(operations.PROMOTE)
def promote(ref: Ref, body: PromoteRequest, service: ServiceDep, named: NamedDep) -> Snapshot:
    """Make a fork's head the head of the trajectory that it was forked from, in place; recorded there as a new snapshot,
    and `undo` takes it back."""
    into = None if body.into is None else check_ref(body.into, "trajectory")
    return step_once(
        service,
        named,
        body,
        lambda: service.engine.branching.promote(
            ref, into=into, leave_behind=body.leave_behind, compensate=body.compensate
        ),
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


@handles(operations.RETRY)
def retry(ref: Ref, body: RetryRequest, service: ServiceDep, named: NamedDep) -> Snapshot:
    """Go back to before a task began, compensate its irreversible calls, and let the program go on from there."""
    return step_once(service, named, body, lambda: service.engine.branching.retry(ref, **vars(body)))


@handles(operations.EFFECTS)
def effects(ref: Ref, service: ServiceDep) -> list[Effect]:
    """The irreversible calls that its present history does not hold: left behind by rewinds. Newest first."""
    return service.engine.branching.effects(ref)


@handles(operations.COMPENSATE)
def compensate(ref: Ref, body: CompensateRequest, service: ServiceDep) -> list[Effect]:
    """Run the compensations of calls that were left behind, newest first, each at most once. It goes on when the client
    goes away."""
    return service.engine.branching.compensate(ref, tuple(check_ref(call, "call") for call in body.calls))


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


def _opener(request: Request) -> Opener:
    return Opener(namespace_pid=client_pid(request) or None)
