"""Durable storage: usage, retention policies, prune, check, repair, export and import, mounting the snapshots as
folders."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request
from starlette.responses import Response

from snapshotd.api import operations
from snapshotd.api.storage import CheckRequest, ExportQuery, MountRequest, Policy, PruneRequest
from snapshotd.api.wire import check_ref
from snapshotd.daemon.http import streams
from snapshotd.daemon.http.decoding import absolute, check_name
from snapshotd.daemon.http.peer import client_pid
from snapshotd.daemon.http.routes.shared import Ref, ServiceDep, handles
from snapshotd.errors import Unsupported

_Line = Annotated[str | None, Query(description="A trajectory, for its own policy; else the global one.")]
_SAYS = 'Lines: `{"event":"progress","message"}`, at last `{"event":"result",%s}` or `{"event":"error","error"}`.'
_REPORT = _SAYS % '"report"'


@handles(operations.POLICY)
def policy(service: ServiceDep, trajectory: _Line = None) -> Policy:
    """The retention policy: the global one, or the one that holds for a trajectory."""
    return service.engine.storage.policy(_check_line(trajectory))


@handles(operations.SET_POLICY)
def set_policy(body: Policy, service: ServiceDep, trajectory: _Line = None) -> Policy:
    """Set it. Nothing is removed before the next prune."""
    service.engine.storage.set_policy(_check_line(trajectory), body)
    return service.engine.storage.policy(trajectory)


@handles(operations.CLEAR_POLICY)
def clear_policy(service: ServiceDep, trajectory: _Line = None) -> None:
    """Remove it."""
    service.engine.storage.set_policy(_check_line(trajectory), None)


@handles(operations.PRUNE, says=_REPORT)
async def prune(body: PruneRequest, service: ServiceDep) -> Response:
    """Give up the files of snapshots that no rule keeps, and collect objects that nothing refers to. It goes on when
    the client goes away."""

    def produce(emit: streams.Emit) -> None:
        progress = streams.progress_lines(emit)
        streams.result(emit, "report", service.engine.storage.prune(body, progress))

    return await streams.ndjson(service.streams, produce)


@handles(operations.CHECK, says=_REPORT)
async def check(body: CheckRequest, service: ServiceDep) -> Response:
    """Verify the repository; damage is in the report and no error. It ends when the client goes away."""

    def produce(emit: streams.Emit) -> None:
        def progress(message: str) -> None:
            streams.require(emit({"event": "progress", "message": message}))

        streams.result(emit, "report", service.engine.storage.check(body, progress))

    return await streams.ndjson(service.streams, produce)


@handles(operations.REPAIR, says=_REPORT)
async def repair(service: ServiceDep) -> Response:
    """Rebuild damaged parts from intact ones. It goes on when the client goes away."""
    return await streams.ndjson(
        service.streams,
        lambda emit: streams.result(emit, "report", service.engine.storage.repair(streams.progress_lines(emit))),
    )


@handles(
    operations.EXPORT,
    says="Frames: a byte that is 0 for raw bytes of the file and 1 for an event, the length of the content (32 bits, big "
    'endian), the content. Events: `{"event":"progress","message"}`, at last `{"event":"result","warnings"}` or '
    '`{"event":"error","error"}`.',
)
async def export(ref: Ref, query: ExportQuery, service: ServiceDep) -> Response:
    """A snapshot as one file: a bundle for `/import`, an image for `docker load`, or the plain tree. `atif` and `jsonl`:
    what was said and done up to it, one document or conversation a line."""

    def produce(emit: streams.Emit, write: streams.Write) -> None:
        warnings = service.engine.storage.export(ref, query, write=write, progress=streams.progress_lines(emit))
        streams.result(emit, "warnings", warnings)

    return await streams.frames(service.streams, produce)


@handles(operations.IMPORT_BUNDLE, says=_SAYS % '"imported"', takes="A bundle, of any size.")
async def import_(
    request: Request,
    service: ServiceDep,
    name: Annotated[str | None, Query(description="Name of the trajectory.")] = None,
) -> Response:
    """Take a bundle in, all or nothing."""
    check_name(name, "a name")
    upload = streams.Upload(request)

    def produce(emit: streams.Emit) -> None:
        imported = service.engine.storage.import_bundle(upload.read, name, streams.progress_lines(emit))
        streams.result(emit, "imported", imported)

    return await streams.ndjson(service.streams, produce, uploading=True)


@handles(operations.MOUNT)
def mount(request: Request, body: MountRequest, service: ServiceDep) -> None:
    """Show every stored snapshot below a directory, read-only, to the process that asks and all that share its
    mounts."""
    service.engine.storage.mount(absolute(body.directory, "directory"), _namespace_pid(request))


@handles(operations.UNMOUNT)
def unmount(request: Request, body: MountRequest, service: ServiceDep) -> None:
    """End it."""
    service.engine.storage.unmount(absolute(body.directory, "directory"), _namespace_pid(request))


def _check_line(trajectory: str | None) -> str | None:
    return None if trajectory is None else check_ref(trajectory, "trajectory")


def _namespace_pid(request: Request) -> int:
    pid = client_pid(request)
    if pid == 0:
        raise Unsupported(
            "the client runs outside of the daemon's process namespace, so the daemon cannot reach its mounts; run the command where the "
            "daemon runs, such as with `docker exec`"
        )
    return pid
