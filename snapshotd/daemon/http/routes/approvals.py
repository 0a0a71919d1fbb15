"""Calls that wait for a person: list, look, decide, and a stream of events for outside tools."""

from __future__ import annotations

import contextlib
from typing import Annotated

from fastapi import Path as PathParameter
from fastapi import Query, Request
from starlette.responses import Response

from snapshotd import types as t
from snapshotd.daemon.http import models, streams
from snapshotd.daemon.http import models_mind as mind
from snapshotd.daemon.http.models_mind import check_json
from snapshotd.daemon.http.routes.shared import ServiceDep, new_router, user_of
from snapshotd.daemon.http.wire import LIST_MAX, PREVIEW_FILES, check_ref

router = new_router(tags=["approvals"])
_Approval = Annotated[str, PathParameter(description="A unique prefix of the approval's id.")]
_WATCH_DOC = {
    200: {
        "content": {streams.NDJSON: {}},
        "description": 'Lines: `{"event":"watching"}` at once; then `approval` (a person is asked, or has decided) and `finished` (a run '
        'ended), each with `trajectory`; `{"event":"alive"}` every few seconds in which nothing happens; `{"event":"lost","count"}` where '
        "a slow client has missed some.",
    }
}


@router.get("/approvals")
def approvals(service: ServiceDep, status: Annotated[t.ApprovalStatus | None, Query()] = None) -> list[mind.Approval]:
    """Oldest first; without `status` all."""
    return [mind.Approval.of(item) for item in service.engine.approvals.list(status)]


@router.post("/approvals")
def ask(body: mind.AskRequest, service: ServiceDep) -> mind.Approval | None:
    """Ask a person about a call of a program outside of the sandbox; with the same `call` again: what has been decided.
    null: the policy lets it run, and nobody is asked. Denied: the policy does not; Conflict: another call has the name."""
    asked = service.engine.approvals.ask(
        check_ref(body.trajectory, "trajectory"),
        body.call,
        body.tool,
        check_json(body.arguments, "the arguments"),
        side_effect=body.side_effect,
        question=body.question,
        expires_s=body.expires_s,
    )
    return None if asked is None else mind.Approval.of(asked)


@router.get("/approvals/{approval}")
def approval(
    approval: _Approval, service: ServiceDep, max_files: Annotated[int, Query(ge=0, le=LIST_MAX)] = PREVIEW_FILES
) -> mind.ApprovalView:
    """One, with the files that changed since the trajectory's last approval."""
    return mind.ApprovalView.of(
        service.engine.approvals.view(check_ref(approval, "approval"), max_files=max_files + 1), max_files
    )


@router.post("/approvals/{approval}/approve")
def approve(request: Request, approval: _Approval, body: mind.ApproveRequest, service: ServiceDep) -> mind.Approval:
    """Let the call run, with other arguments if they are given. Conflict: decided already, or the files are others by
    now."""
    by = body.by or user_of(request)
    decided = service.engine.approvals.approve(
        check_ref(approval, "approval"), by=by, reason=body.reason, arguments=body.edited()
    )
    return mind.Approval.of(decided)


@router.post("/approvals/{approval}/deny")
def deny(request: Request, approval: _Approval, body: mind.DenyRequest, service: ServiceDep) -> mind.Approval:
    """Refuse it; the agent is told why."""
    by = body.by or user_of(request)
    return mind.Approval.of(service.engine.approvals.deny(check_ref(approval, "approval"), by=by, reason=body.reason))


@router.get("/watch", response_class=Response, responses=_WATCH_DOC)  # type: ignore[arg-type]
async def watch(service: ServiceDep) -> Response:
    """Events for outside tools, of all trajectories, from now on."""

    def produce(emit: streams.Emit) -> None:
        with contextlib.closing(service.watchers.watch(service.engine)) as events:
            streams.each(emit, map(models.event_json, events))

    return await streams.ndjson(service.streams, produce)
