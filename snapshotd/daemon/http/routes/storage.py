"""Durable storage: usage, retention policies, prune, check, repair, export and import, mounting the snapshots as
folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Query, Request
from starlette.responses import Response

from snapshotd import types as t
from snapshotd.daemon.http import models, streams
from snapshotd.daemon.http import models_storage as storage
from snapshotd.daemon.http.peer import client_pid
from snapshotd.daemon.http.routes.shared import Ref, ServiceDep, checked_ref, new_router
from snapshotd.daemon.http.wire import FRAMES, UPLOAD_PATH, check_ref
from snapshotd.engine.base import ExportForm
from snapshotd.errors import Unsupported, UsageError

router = new_router(tags=["storage"], dependencies=[Depends(checked_ref)])
_Line = Annotated[str | None, Query(description="A trajectory, for its own policy; else the global one.")]


def _lines_doc(result: str) -> dict[int | str, dict[str, Any]]:
    text = f'Lines: `{{"event":"progress","message"}}`, at last `{{"event":"result",{result}}}` or `{{"event":"error","error"}}`.'
    return {200: {"content": {streams.NDJSON: {}}, "description": text}}


_EXPORT_DOC: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {FRAMES: {}},
        "description": "Frames: a byte that is 0 for raw bytes of the file and 1 for an event, the length of the content (32 bits, big "
        'endian), the content. Events: `{"event":"progress","message"}`, at last `{"event":"result","warnings"}` or '
        '`{"event":"error","error"}`.',
    }
}
_IMPORT_DOC = {
    "requestBody": {"required": True, "content": {streams.BYTES: {}}, "description": "A bundle, of any size."}
}


@router.get("/usage")
def usage(service: ServiceDep) -> storage.Usage:
    """Disk use."""
    return storage.Usage.of(service.engine.storage.usage())


@router.get("/policy")
def policy(service: ServiceDep, trajectory: _Line = None) -> storage.Policy:
    """The retention policy: the global one, or the one that holds for a trajectory."""
    return storage.Policy.of(service.engine.storage.policy(_checked(trajectory)))


@router.put("/policy")
def set_policy(body: storage.Policy, service: ServiceDep, trajectory: _Line = None) -> storage.Policy:
    """Set it. Nothing is removed before the next prune."""
    service.engine.storage.set_policy(_checked(trajectory), body.policy())
    return storage.Policy.of(service.engine.storage.policy(trajectory))


@router.delete("/policy", status_code=204)
def clear_policy(service: ServiceDep, trajectory: _Line = None) -> None:
    """Remove it."""
    service.engine.storage.set_policy(_checked(trajectory), None)


@router.post("/prune", response_class=Response, responses=_lines_doc('"report"'))
async def prune(body: storage.PruneRequest, service: ServiceDep) -> Response:
    """Give up the files of snapshots that no rule keeps, and collect objects that nothing refers to. It goes on when
    the client goes away."""
    chosen = None if body.policy is None else body.policy.policy()

    def produce(emit: streams.Emit) -> None:
        report = service.engine.storage.prune(
            chosen, dry_run=body.dry_run, grace_s=body.grace_s, progress=streams.progress_lines(emit)
        )
        emit({"event": "result", "report": storage.PruneAnswer.of(report)})

    return await streams.ndjson(service.streams, produce)


@router.post("/check", response_class=Response, responses=_lines_doc('"report"'))
async def check(body: storage.CheckRequest, service: ServiceDep) -> Response:
    """Verify the repository; damage is in the report and no error. It ends when the client goes away."""

    def produce(emit: streams.Emit) -> None:
        def progress(message: str) -> None:
            streams.require(emit({"event": "progress", "message": message}))

        report = service.engine.storage.check(read_data=body.read_data, progress=progress)
        emit({"event": "result", "report": storage.check_json(report)})

    return await streams.ndjson(service.streams, produce)


@router.post("/repair", response_class=Response, responses=_lines_doc('"report"'))
async def repair(service: ServiceDep) -> Response:
    """Rebuild damaged parts from intact ones. It goes on when the client goes away."""

    def produce(emit: streams.Emit) -> None:
        report = service.engine.storage.repair(streams.progress_lines(emit))
        emit({"event": "result", "report": storage.RepairAnswer.of(report)})

    return await streams.ndjson(service.streams, produce)


@router.get("/snapshots/{ref}/export", response_class=Response, responses=_EXPORT_DOC)
async def export(
    ref: Ref,
    service: ServiceDep,
    form: Annotated[ExportForm, Query()] = "bundle",
    whole: Annotated[bool, Query(description="The trajectory up to the snapshot.")] = False,
    since: Annotated[str | None, Query(description="Only what came after this snapshot.")] = None,
    forks: Annotated[bool, Query(description="Of atif and jsonl: the trajectories forked from it, too.")] = False,
) -> Response:
    """A snapshot as one file: a bundle for `/import`, an image for `docker load`, or the plain tree. `atif` and `jsonl`:
    what was said and done up to it, one document or conversation a line."""
    if since is not None:
        check_ref(since)

    def produce(emit: streams.Emit, write: streams.Write) -> None:
        progress = streams.progress_lines(emit)
        warnings = service.engine.storage.export(
            ref, form=form, whole=whole, since=since, forks=forks, write=write, progress=progress
        )
        emit({"event": "result", "warnings": list(warnings)})

    return await streams.frames(service.streams, produce)


@router.post(UPLOAD_PATH, response_class=Response, responses=_lines_doc('"imported"'), openapi_extra=_IMPORT_DOC)
async def import_(
    request: Request,
    service: ServiceDep,
    name: Annotated[str | None, Query(description="Name of the trajectory.")] = None,
) -> Response:
    """Take a bundle in, all or nothing."""
    if name is not None and not t.NAME_PATTERN.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be a name: use up to 64 letters, digits and ._- , starting with a letter or digit"
        )
    upload = streams.Upload(request)

    def produce(emit: streams.Emit) -> None:
        imported = service.engine.storage.import_bundle(upload.read, name, streams.progress_lines(emit))
        emit({"event": "result", "imported": storage.ImportAnswer.of(imported)})

    return await streams.ndjson(service.streams, produce, uploading=True)


@router.post("/mount", status_code=204)
def mount(request: Request, body: storage.MountRequest, service: ServiceDep) -> None:
    """Show every stored snapshot below a directory, read-only, to the process that asks and all that share its
    mounts."""
    service.engine.storage.mount(_directory(body), _namespace_pid(request))


@router.post("/umount", status_code=204)
def unmount(request: Request, body: storage.MountRequest, service: ServiceDep) -> None:
    """End it."""
    service.engine.storage.unmount(_directory(body), _namespace_pid(request))


def _checked(trajectory: str | None) -> str | None:
    return None if trajectory is None else check_ref(trajectory, "trajectory")


def _directory(body: storage.MountRequest) -> Path:
    path = models.absolute(body.directory, "directory")
    assert path is not None
    return path


def _namespace_pid(request: Request) -> int:
    pid = client_pid(request)
    if pid == 0:
        raise Unsupported(
            "the client runs outside of the daemon's process namespace, so the daemon cannot reach its mounts; run the command where the "
            "daemon runs, such as with `docker exec`"
        )
    return pid
