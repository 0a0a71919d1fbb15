"""Calls that wait for a person: list, look, decide, and a stream of events for outside tools."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path as PathParameter
from fastapi import Query, Request
from starlette.responses import Response, StreamingResponse

from snapshotd import types as t
from snapshotd.api import operations
from snapshotd.api.approvals import ApprovalView, ApproveRequest, AskRequest, DenyRequest
from snapshotd.api.wire import LINES, LIST_MAX, PREVIEW_FILES, check_ref
from snapshotd.catalog.base import present_tenant
from snapshotd.daemon.http.decoding import optional_json
from snapshotd.daemon.http.encoding import approval_view
from snapshotd.daemon.http.routes.shared import ServiceDep, decider, handles

_Approval = Annotated[str, PathParameter(description="A unique prefix of the approval's id.")]


@handles(operations.ASK)
def ask(body: AskRequest, service: ServiceDep) -> t.Approval | None:
    """Ask a person about a call of a program outside of the sandbox; with the same `call` again: what has been decided.
    null: the policy lets it run, and nobody is asked. Denied: the policy does not; Conflict: another call of it has the name."""
    return service.engine.approvals.ask(body)


@handles(operations.APPROVAL)
def approval(
    approval: _Approval, service: ServiceDep, max_files: Annotated[int, Query(ge=0, le=LIST_MAX)] = PREVIEW_FILES
) -> ApprovalView:
    """One, with the files that changed since the trajectory's last approval."""
    return approval_view(
        service.engine.approvals.view(check_ref(approval, "approval"), max_files=max_files + 1), max_files
    )


@handles(operations.APPROVE_CALL)
def approve(request: Request, approval: _Approval, body: ApproveRequest, service: ServiceDep) -> t.Approval:
    """Let the call run, with other arguments if they are given. Conflict: decided already, or the files are others by
    now."""
    arguments = optional_json(body.arguments, "the arguments")
    return service.engine.approvals.approve(
        check_ref(approval, "approval"), by=decider(request, body.by), reason=body.reason, arguments=arguments
    )


@handles(operations.DENY_CALL)
def deny(request: Request, approval: _Approval, body: DenyRequest, service: ServiceDep) -> t.Approval:
    """Refuse it; the agent is told why."""
    return service.engine.approvals.deny(
        check_ref(approval, "approval"), by=decider(request, body.by), reason=body.reason
    )


@handles(
    operations.WATCH,
    says='Lines: `{"event":"watching"}` at once; then `approval` (a person is asked, or has decided), `finished` (a run '
    "ended), `snapshot` (one was taken, and once more when its files are counted; `snapshot` is it) and `trajectory` (one "
    'began, changed its status, or was removed), each with `trajectory`; `{"event":"alive"}` every few seconds in which '
    'nothing happens; `{"event":"lost","count"}` where a slow client has missed some.',
)
async def watch(service: ServiceDep) -> Response:
    """Events for outside tools, of all trajectories that the caller sees, from now on."""
    lines = await service.watchers.watch(service.engine, present_tenant())
    return StreamingResponse(lines, media_type=LINES)
