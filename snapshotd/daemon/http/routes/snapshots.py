"""Looking at snapshots, and making things from them outside of sandboxes: files, patches, restored folders, tags."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

from fastapi import Query, Request
from starlette.responses import Response

from snapshotd import types as t
from snapshotd.api import operations
from snapshotd.api.snapshots import RestoreRequest, TaggedInfo, TagRequest
from snapshotd.api.wire import OUTPUT_MAX, check_ref, sandbox_path
from snapshotd.daemon.http import streams
from snapshotd.daemon.http.decoding import absolute, check_name
from snapshotd.daemon.http.peer import client_pid
from snapshotd.daemon.http.routes.shared import NamedDep, Ref, ServiceDep, handles, once
from snapshotd.engine.base import LookedAt
from snapshotd.trees.base import RestoreReport
from snapshotd.trees.patch import MAX_FILE_BYTES, PatchBound

_WORKSPACE = base64.urlsafe_b64encode(b"workspace").decode()


@handles(operations.SNAPSHOT)
def snapshot(ref: Ref, service: ServiceDep) -> LookedAt:
    snapshots = service.engine.snapshots
    return snapshots.look_at([snapshots.get(ref)])[0]


@handles(operations.OUTPUT)
async def output(
    ref: Ref,
    which: Literal["stdout", "stderr", "output"],
    service: ServiceDep,
    start: Annotated[int, Query(ge=0, le=OUTPUT_MAX)] = 0,
    count: Annotated[int | None, Query(ge=1, le=OUTPUT_MAX)] = None,
) -> Response:
    """The tool call's recorded output, or `count` bytes of it from byte `start` on; empty if it has none."""
    return await streams.octets(
        service.streams, lambda: streams.cut(service.engine.snapshots.output(ref, which), start, count)
    )


@handles(operations.RESTORE)
def restore(request: Request, ref: Ref, body: RestoreRequest, service: ServiceDep) -> RestoreReport:
    """Write the snapshot's tree, or a part of it, into a folder of the machine, by the path that the client sees."""
    to = absolute(body.to, "target folder")
    path = sandbox_path(base64.urlsafe_b64encode(body.path.encode()).decode())
    return service.engine.snapshots.restore(ref, to, path=path, namespace_pid=client_pid(request))


@handles(operations.DIFF, says="One change per line.")
async def diff(a: str, service: ServiceDep, b: Annotated[str | None, Query()] = None) -> Response:
    """The changes from `a` to `b`; without `b`, from the parent of `a` to `a`. Ends with `{"event":"end"}`."""
    _check(a, b)
    return await streams.ndjson(
        service.streams, lambda emit: streams.listing(emit, service.engine.snapshots.diff(a, b))
    )


@handles(operations.PATCH, says="Pieces of a patch.")
async def patch(
    a: str,
    service: ServiceDep,
    b: Annotated[str | None, Query()] = None,
    root_b64: Annotated[str, Query()] = _WORKSPACE,
    max_file_bytes: Annotated[int | None, Query(ge=0, le=MAX_FILE_BYTES)] = None,
) -> Response:
    """The changes below `root_b64` as a git-style patch: lines `{"event":"data","data_b64"}`, last
    `{"event":"end","outside"}` with the number of changes that lie elsewhere. With `max_file_bytes` a line
    `{"event":"omitted","path","bytes"}` stands in place of each file that is larger; without it a file over 512 MiB is
    refused."""
    _check(a, b)
    root = sandbox_path(root_b64)

    def produce(emit: streams.Emit) -> None:
        def write(data: bytes) -> None:
            streams.require(emit({"event": "data", "data_b64": base64.b64encode(data).decode()}))

        def omit(path: bytes, size: int) -> None:
            streams.require(emit({"event": "omitted", "path": path.decode(errors="replace"), "bytes": size}))

        bound = None if max_file_bytes is None else PatchBound(max_file_bytes, omit)
        outside = service.engine.snapshots.patch(a, b, root=root, write=write, bound=bound)
        emit({"event": "end", "outside": outside})

    return await streams.ndjson(service.streams, produce)


@handles(operations.TAG)
def tag(name: str, body: TagRequest, service: ServiceDep, named: NamedDep) -> TaggedInfo:
    """Give a snapshot a tag."""
    check_name(name, "a tag")
    tagged = once(
        service,
        named,
        body,
        lambda: service.engine.snapshots.tag(body.ref, name, move=body.move),
        lambda made: t.SnapshotID(made[0]),
    )
    return TaggedInfo(tagged, name)


def _check(a: str, b: str | None) -> None:
    check_ref(a)
    if b is not None:
        check_ref(b)
