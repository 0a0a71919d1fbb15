"""The agent's mind: its journal, state and tasks; resuming, rewinding, editing, retrying; irreversible calls."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Query, Request
from starlette.responses import Response

from snapshotd.daemon.http import models, streams
from snapshotd.daemon.http import models_mind as mind
from snapshotd.daemon.http.peer import client_pid
from snapshotd.daemon.http.routes.shared import (
    NamedDep,
    Ref,
    ServiceDep,
    checked_ref,
    new_router,
    once_unless_abandoned,
    step_once,
)
from snapshotd.daemon.http.wire import LIST_MAX, PREVIEW_FILES, check_ref
from snapshotd.engine.base import Opener, RewindMode
from snapshotd.types import Trajectory

router = new_router(tags=["mind"], dependencies=[Depends(checked_ref)])
_JOURNAL_DOC: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {streams.NDJSON: {}},
        "description": "Lines: one entry each (`id`, `kind`, `name`, `arguments`, `side_effect`, `key`, `status`, `started_at`, "
        '`ended_at`, `result`, `error`, `facts`, `details`, `parent`, `snapshot`), at last `{"event":"end"}`.',
    }
}


@router.get("/snapshots/{ref}/journal", response_class=Response, responses=_JOURNAL_DOC)
async def journal(ref: Ref, service: ServiceDep) -> Response:
    """The journal up to a snapshot (of a trajectory: with the entries that its head does not bind yet), from the
    program's beginning."""

    def produce(emit: streams.Emit) -> None:
        for entry in service.engine.mind.journal(ref):
            streams.require(emit(mind.entry_json(entry)))
        emit({"event": "end"})

    return await streams.ndjson(service.streams, produce)


@router.get("/snapshots/{ref}/state")
def state(ref: Ref, service: ServiceDep) -> dict[str, Any]:
    """The agent's own JSON state as it was saved with the snapshot."""
    return service.engine.mind.state(ref)


@router.get("/snapshots/{ref}/tasks")
def tasks(ref: Ref, service: ServiceDep) -> list[mind.Task]:
    """The subtasks as they were at the snapshot, in the order in which they were declared."""
    return [mind.Task.of(item) for item in service.engine.mind.tasks(ref)]


@router.post("/trajectories/{ref}/resume")
def resume(ref: Ref, body: mind.ResumeRequest, service: ServiceDep) -> models.Trajectory:
    """Start its program again from the top, replay its journal, and let it run on. Answers when it is started; its
    events follow under /trajectories/{ref}/events. `Undecided`: an irreversible call may or may not have happened, and
    `decisions` does not cover it."""
    return models.Trajectory.of(service.engine.runs.resume(ref, decisions=body.chosen()))


@router.get("/trajectories/{ref}/rewind")
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
) -> mind.RewindPreview:
    """The effect that a rewind would have. Changes nothing."""
    return mind.RewindPreview.of(
        service.engine.branching.preview_rewind(
            ref, check_ref(to), mode=mode, max_files=max_files, session=session, opener=_opener(request)
        )
    )


@router.post("/trajectories/{ref}/rewind")
def rewind(
    request: Request, ref: Ref, body: mind.RewindRequest, service: ServiceDep, named: NamedDep
) -> models.Snapshot:
    """Go back to an older snapshot, in place; recorded as a new snapshot, and `undo` takes it back."""
    return step_once(
        service,
        named,
        body,
        lambda: service.engine.branching.rewind(
            ref,
            check_ref(body.to),
            mode=body.mode,
            compensate=body.compensate,
            session=body.session,
            opener=_opener(request),
        ),
    )


@router.post("/trajectories/{ref}/undo")
def undo(request: Request, ref: Ref, service: ServiceDep, named: NamedDep) -> models.Snapshot:
    """Take the last rewind (or undo) back."""
    return step_once(service, named, None, lambda: service.engine.branching.undo(ref, opener=_opener(request)))


@router.post("/trajectories/{ref}/promote")
def promote(ref: Ref, body: mind.PromoteRequest, service: ServiceDep, named: NamedDep) -> models.Snapshot:
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


@router.post("/trajectories/{ref}/merge")
def merge(ref: Ref, body: mind.MergeFields, service: ServiceDep, named: NamedDep) -> models.Snapshot:
    """Change files of a trajectory to what they are in another snapshot, or to given contents, in one step; recorded as a
    new snapshot, and `undo` takes it back. The client decides which; `Conflict` if the head is another one by now."""
    return step_once(
        service, named, body, lambda: service.engine.branching.merge(ref, check_ref(body.source), body.request())
    )


@router.post("/trajectories/{ref}/retry")
def retry(ref: Ref, body: mind.RetryRequest, service: ServiceDep, named: NamedDep) -> models.Snapshot:
    """Go back to before a task began, compensate its irreversible calls, and let the program go on from there."""
    return step_once(
        service,
        named,
        body,
        lambda: service.engine.branching.retry(ref, body.task, compensate=body.compensate, resume=body.resume),
    )


@router.get("/trajectories/{ref}/effects")
def effects(ref: Ref, service: ServiceDep) -> list[mind.Effect]:
    """The irreversible calls that its present history does not hold: left behind by rewinds. Newest first."""
    return [mind.Effect.of(item) for item in service.engine.branching.effects(ref)]


@router.post("/trajectories/{ref}/compensate")
def compensate(ref: Ref, body: mind.CompensateRequest, service: ServiceDep) -> list[mind.Effect]:
    """Run the compensations of calls that were left behind, newest first, each at most once. It goes on when the client
    goes away."""
    calls = tuple(check_ref(call, "call") for call in body.calls)
    return [mind.Effect.of(item) for item in service.engine.branching.compensate(ref, calls)]


@router.post("/snapshots/{ref}/edit", status_code=201)
async def edit(
    request: Request, ref: Ref, body: mind.EditRequest, service: ServiceDep, named: NamedDep
) -> models.Trajectory:
    """A new trajectory whose first snapshot is this one, edited. It is stopped again if the client goes away before the
    answer."""
    engine = service.engine
    wanted = body.request()

    def undo(line: Trajectory) -> None:
        engine.runs.stop(line.id)

    made = await once_unless_abandoned(
        request,
        service,
        named,
        body,
        lambda: engine.branching.edit(ref, wanted, name=body.name, resume=body.resume),
        lambda made: engine.snapshots.trajectory(made[0]),
        undo,
    )
    return models.Trajectory.of(made)


def _opener(request: Request) -> Opener:
    return Opener(namespace_pid=client_pid(request) or None)
