"""Looking at snapshots, and making things from them outside of sandboxes: files, patches, restored folders, tags."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

from fastapi import Depends, Query, Request
from starlette.responses import Response

from snapshotd import types as t
from snapshotd.daemon.http import models, streams
from snapshotd.daemon.http.peer import client_pid
from snapshotd.daemon.http.routes.shared import (
    NamedDep,
    PathB64,
    Ref,
    ServiceDep,
    checked_ref,
    new_router,
    once,
    sandbox_path,
)
from snapshotd.daemon.http.wire import check_ref
from snapshotd.errors import UsageError

router = new_router(tags=["snapshots"], dependencies=[Depends(checked_ref)])
_WORKSPACE = base64.urlsafe_b64encode(b"workspace").decode()
_BYTES_DOC = {200: {"content": {streams.BYTES: {}}, "description": "Raw bytes."}}


@router.get("/snapshots", response_model=list[models.Snapshot])
def all_snapshots(service: ServiceDep) -> Response:
    """Every snapshot of every trajectory."""
    return streams.listed(models.Snapshot.of(item) for item in service.engine.snapshots.all())


@router.get("/snapshots/{ref}")
def snapshot(ref: Ref, service: ServiceDep) -> models.Snapshot:
    return models.Snapshot.of(service.engine.snapshots.get(ref))


@router.get("/snapshots/{ref}/conversation")
def conversation(ref: Ref, service: ServiceDep) -> list[models.Message]:
    """The conversation up to the snapshot, from its beginning, across forks."""
    return [models.Message.of(item) for item in service.engine.mind.conversation(ref)]


@router.get("/snapshots/{ref}/output/{which}", response_class=Response, responses=_BYTES_DOC)  # type: ignore[arg-type]
async def output(ref: Ref, which: Literal["stdout", "stderr", "output"], service: ServiceDep) -> Response:
    """The tool call's recorded output; empty if it has none."""
    return await streams.octets(service.streams, lambda: service.engine.snapshots.output(ref, which))


@router.get("/snapshots/{ref}/file", response_class=Response, responses=_BYTES_DOC)  # type: ignore[arg-type]
async def cat(ref: Ref, path_b64: PathB64, service: ServiceDep) -> Response:
    """The content of a regular file."""
    path = sandbox_path(path_b64)
    return await streams.octets(service.streams, lambda: service.engine.snapshots.cat(ref, path))


@router.get("/snapshots/{ref}/status")
def status(ref: Ref, path_b64: PathB64, service: ServiceDep) -> models.FileStatus:
    """The entry at a path, links not followed."""
    return models.FileStatus.of(*service.engine.snapshots.lstat(ref, sandbox_path(path_b64)))


@router.post("/snapshots/{ref}/restore")
def restore(request: Request, ref: Ref, body: models.RestoreRequest, service: ServiceDep) -> models.RestoreAnswer:
    """Write the snapshot's tree, or a part of it, into a folder of the machine, by the path that the client sees."""
    to = models.absolute(body.to, "target folder")
    assert to is not None
    path = sandbox_path(base64.urlsafe_b64encode(body.path.encode()).decode())
    return models.RestoreAnswer.of(
        service.engine.snapshots.restore(ref, to, path=path, namespace_pid=client_pid(request))
    )


@router.get(
    "/diff",
    response_class=Response,
    responses={200: {"content": {streams.NDJSON: {}}, "description": "One change per line."}},
)
async def diff(a: str, service: ServiceDep, b: Annotated[str | None, Query()] = None) -> Response:
    """The changes from `a` to `b`; without `b`, from the parent of `a` to `a`. Ends with `{"event":"end"}`."""
    _check(a, b)

    def produce(emit: streams.Emit) -> None:
        for change in service.engine.snapshots.diff(a, b):
            streams.require(emit(models.change_json(change)))
        emit({"event": "end"})

    return await streams.ndjson(service.streams, produce)


@router.get(
    "/patch",
    response_class=Response,
    responses={200: {"content": {streams.NDJSON: {}}, "description": "Pieces of a patch."}},
)
async def patch(
    a: str,
    service: ServiceDep,
    b: Annotated[str | None, Query()] = None,
    root_b64: Annotated[str, Query()] = _WORKSPACE,
) -> Response:
    """The changes below `root_b64` as a git-style patch: lines `{"event":"data","data_b64"}`, last
    `{"event":"end","outside"}` with the number of changes that lie elsewhere."""
    _check(a, b)
    root = sandbox_path(root_b64)

    def produce(emit: streams.Emit) -> None:
        def write(data: bytes) -> None:
            streams.require(emit({"event": "data", "data_b64": base64.b64encode(data).decode()}))

        emit({"event": "end", "outside": service.engine.snapshots.patch(a, b, root=root, write=write)})

    return await streams.ndjson(service.streams, produce)


@router.put("/tags/{name}")
def tag(name: str, body: models.TagRequest, service: ServiceDep, named: NamedDep) -> models.Tagged:
    """Give a snapshot a tag."""
    if not t.NAME_PATTERN.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be a tag: use up to 64 letters, digits and ._- , starting with a letter or digit"
        )
    check_ref(body.ref)
    tagged = once(
        service,
        named,
        body,
        lambda: service.engine.snapshots.tag(body.ref, name, move=body.move),
        lambda made: t.SnapshotID(made[0]),
    )
    return models.Tagged(snapshot=tagged, name=name)


@router.delete("/tags/{name}", status_code=204)
def untag(name: str, service: ServiceDep) -> None:
    service.engine.snapshots.untag(check_ref(name, "tag"))


def _check(a: str, b: str | None) -> None:
    check_ref(a)
    if b is not None:
        check_ref(b)
