"""Files of sandboxes: read them, live or of a snapshot; write them, each time as a tool call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Query, Request
from starlette.responses import Response

from snapshotd.api import operations
from snapshotd.api.wire import sandbox_path
from snapshotd.daemon.http import streams
from snapshotd.daemon.http.encoding import event
from snapshotd.daemon.http.routes.shared import Named, NamedDep, PathB64, Ref, Service, ServiceDep, handles, once
from snapshotd.engine.base import Written

_User = Annotated[str | None, Query(max_length=256, description="Whose new files are, by name or number; else root's.")]
_WRITTEN = 'One line: `{"event":"result","snapshot","file_count","directories","bytes","warnings"}` or `{"event":"error","error"}`.'


@handles(
    operations.LIST_FILES, says='Lines: one entry each, as `stat` answers, sorted by name; at last `{"event":"end"}`.'
)
async def list_(ref: Ref, path_b64: PathB64, service: ServiceDep) -> Response:
    """The entries of a directory."""
    path = sandbox_path(path_b64)
    return await streams.ndjson(
        service.streams, lambda emit: streams.listing(emit, service.engine.files.list(ref, path))
    )


@handles(
    operations.READ_ARCHIVE,
    says="Frames as of an export; the raw bytes are a tar, and the last event is "
    '`{"event":"result","warnings"}` or `{"event":"error","error"}`.',
)
async def read_archive(ref: Ref, path_b64: PathB64, service: ServiceDep) -> Response:
    """A file or a directory with all that is in it, as a tar. Its members' paths begin with its last name."""
    path = sandbox_path(path_b64)

    def produce(emit: streams.Emit, write: streams.Write) -> None:
        emit({"event": "result", "warnings": service.engine.files.archive(ref, path, write)})

    return await streams.frames(service.streams, produce)


@handles(operations.WRITE_FILE, says=_WRITTEN, takes="The content, of any size.")
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


@handles(operations.WRITE_ARCHIVE, says=_WRITTEN, takes="A tar, of any size.")
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
        emit(event("result", done))

    return await streams.ndjson(service.streams, produce, uploading=True)
