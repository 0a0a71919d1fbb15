"""Files of sandboxes: read them, live or of a snapshot; write them, each time as a tool call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, Query, Request
from starlette.responses import Response

from snapshotd.daemon.http import models, streams
from snapshotd.daemon.http import models_files as words
from snapshotd.daemon.http.routes.shared import (
    Named,
    NamedDep,
    PathB64,
    Ref,
    Service,
    ServiceDep,
    checked_ref,
    new_router,
    once,
    sandbox_path,
    step_once,
)
from snapshotd.daemon.http.wire import FILES_PATH, FRAMES
from snapshotd.engine.base import Written

router = new_router(prefix=FILES_PATH, tags=["files"], dependencies=[Depends(checked_ref)])
_User = Annotated[str | None, Query(max_length=256, description="Whose new files are, by name or number; else root's.")]
_BYTES_DOC: dict[int | str, dict[str, Any]] = {200: {"content": {streams.BYTES: {}}, "description": "Raw bytes."}}
_LIST_DOC: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {streams.NDJSON: {}},
        "description": 'Lines: one entry each, as `stat` answers, sorted by name; at last `{"event":"end"}`.',
    }
}
_ARCHIVE_DOC: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {FRAMES: {}},
        "description": "Frames as of an export; the raw bytes are a tar, and the last event is "
        '`{"event":"result","warnings"}` or `{"event":"error","error"}`.',
    }
}
_WRITTEN_DOC: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {streams.NDJSON: {}},
        "description": 'One line: `{"event":"result","snapshot","file_count","directories","bytes","warnings"}` or '
        '`{"event":"error","error"}`.',
    }
}


def _body_doc(what: str) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {streams.BYTES: {}}, "description": what}}


@router.get("/{ref}/content", response_class=Response, responses=_BYTES_DOC)
async def read(ref: Ref, path_b64: PathB64, service: ServiceDep) -> Response:
    """The content of a regular file. A trajectory's name or id stands for its files as they are now, a snapshot's id or
    tag for those of the snapshot; so for all that reads here. Links are followed."""
    path = sandbox_path(path_b64)
    return await streams.octets(service.streams, lambda: service.engine.files.read(ref, path))


@router.get("/{ref}/stat")
def stat(ref: Ref, path_b64: PathB64, service: ServiceDep) -> words.File:
    """The entry at a path, behind all links."""
    return words.File.of(service.engine.files.stat(ref, sandbox_path(path_b64)))


@router.get("/{ref}/list", response_class=Response, responses=_LIST_DOC)
async def list_(ref: Ref, path_b64: PathB64, service: ServiceDep) -> Response:
    """The entries of a directory."""
    path = sandbox_path(path_b64)

    def produce(emit: streams.Emit) -> None:
        for found in service.engine.files.list(ref, path):
            streams.require(emit(words.File.of(found).model_dump()))
        emit({"event": "end"})

    return await streams.ndjson(service.streams, produce)


@router.get("/{ref}/archive", response_class=Response, responses=_ARCHIVE_DOC)
async def read_archive(ref: Ref, path_b64: PathB64, service: ServiceDep) -> Response:
    """A file or a directory with all that is in it, as a tar. Its members' paths begin with its last name."""
    path = sandbox_path(path_b64)

    def produce(emit: streams.Emit, write: streams.Write) -> None:
        warnings = service.engine.files.archive(ref, path, write)
        emit({"event": "result", "warnings": list(warnings)})

    return await streams.frames(service.streams, produce)


@router.post(
    "/{ref}/content",
    response_class=Response,
    responses=_WRITTEN_DOC,
    openapi_extra=_body_doc("The content, of any size."),
)
async def write(
    request: Request,
    ref: Ref,
    path_b64: PathB64,
    service: ServiceDep,
    named: NamedDep,
    user: _User = None,
    mode: Annotated[int | None, Query(ge=0, le=0o7777, description="Permission bits, as a number.")] = None,
) -> Response:
    """Write a file, whole or not at all, as one tool call with a snapshot."""
    path, upload = sandbox_path(path_b64), streams.Upload(request)
    return await _write(
        service,
        named,
        [path_b64, user, mode],
        lambda: service.engine.files.write(ref, path, upload.read, user=user, mode=mode),
    )


@router.post(
    "/{ref}/archive", response_class=Response, responses=_WRITTEN_DOC, openapi_extra=_body_doc("A tar, of any size.")
)
async def write_archive(
    request: Request,
    ref: Ref,
    path_b64: PathB64,
    service: ServiceDep,
    named: NamedDep,
    user: _User = None,
    attributes: Annotated[bool, Query(description="Modes and times are the archive's, not those of new files.")] = True,
) -> Response:
    """Put what a tar holds below a directory, as one tool call with a snapshot."""
    path, upload = sandbox_path(path_b64), streams.Upload(request)
    return await _write(
        service,
        named,
        [path_b64, user, attributes],
        lambda: service.engine.files.unpack(ref, path, upload.read, user=user, attributes=attributes),
    )


async def _write(service: Service, named: Named, body: object, make: Callable[[], Written]) -> Response:
    """The answer to an upload that becomes one step."""

    def produce(emit: streams.Emit) -> None:
        done = once(service, named, body, make, lambda made: Written.told_by(service.engine.snapshots.get(made[0])))
        emit({"event": "result", **words.written_json(done)})

    return await streams.ndjson(service.streams, produce, uploading=True)


@router.post("/{ref}/make_dir")
def make_dir(ref: Ref, body: words.MakeDirRequest, service: ServiceDep, named: NamedDep) -> models.Snapshot:
    """Make a directory, with those above it."""
    path = sandbox_path(body.path_b64)
    return step_once(service, named, body, lambda: service.engine.files.make_dir(ref, path, user=body.user))


@router.post("/{ref}/remove")
def remove(ref: Ref, body: words.RemoveFileRequest, service: ServiceDep, named: NamedDep) -> models.Snapshot:
    """Remove a file, a link, or a directory with all that is in it."""
    path = sandbox_path(body.path_b64)
    return step_once(service, named, body, lambda: service.engine.files.remove(ref, path))


@router.post("/{ref}/rename")
def rename(ref: Ref, body: words.RenameFileRequest, service: ServiceDep, named: NamedDep) -> models.Snapshot:
    """Rename a file or a directory."""
    path, to = sandbox_path(body.path_b64), sandbox_path(body.to_b64)
    return step_once(service, named, body, lambda: service.engine.files.rename(ref, path, to))
