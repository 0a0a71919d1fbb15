"""Images: list, build, import, remove."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import Response

from snapshotd import types as t
from snapshotd.daemon.http import models, streams
from snapshotd.daemon.http.routes.shared import ServiceDep, new_router
from snapshotd.engine.base import ProgressSink
from snapshotd.errors import UsageError

router = new_router(tags=["images"])
_DOC = {
    200: {
        "content": {streams.NDJSON: {}},
        "description": 'Lines: `{"event":"progress","message"}`, at last `{"event":"result","image"}` or `{"event":"error","error"}`.',
    }
}


@router.get("/images")
def images(service: ServiceDep) -> list[models.Image]:
    return [models.Image.of(item) for item in service.engine.images.list()]


@router.post("/images/ensure", response_class=Response, responses=_DOC)  # type: ignore[arg-type]
async def ensure(body: models.ImageName, service: ServiceDep) -> Response:
    """The image that a sandbox of this name would start from. One that is not there is built or imported."""

    def produce(emit: streams.Emit) -> None:
        image = service.engine.images.ensure(body.image, streams.progress_lines(emit))
        emit({"event": "result", "image": models.Image.of(image)})

    return await streams.ndjson(service.streams, produce)


@router.post("/images/build", response_class=Response, responses=_DOC)  # type: ignore[arg-type]
async def build(body: models.ImageRequest, service: ServiceDep) -> Response:
    """Build from a recipe folder, or from one that comes with snapshotd (`default`, `minimal`)."""
    return await _make(service.engine.images.build, body, service)


@router.post("/images/import", response_class=Response, responses=_DOC)  # type: ignore[arg-type]
async def import_(body: models.ImageRequest, service: ServiceDep) -> Response:
    """Import a folder, a root file system tar, a `docker save` or OCI archive, or a Docker image by name."""
    return await _make(service.engine.images.import_, body, service)


@router.delete("/images/{ref:path}", status_code=204)
def remove(ref: str, service: ServiceDep) -> None:
    """Remove an image that no trajectory uses. `ref` may contain slashes, as Docker's names do."""
    service.engine.images.remove(ref)


async def _make(
    method: Callable[[str, str | None, ProgressSink], t.Image], body: models.ImageRequest, service: ServiceDep
) -> Response:
    if "\0" in body.source:
        raise UsageError(f"{body.source[:40]!r} contains a zero byte, so it cannot be the source of an image")

    def produce(emit: streams.Emit) -> None:
        image = method(body.source, body.name, streams.progress_lines(emit))
        emit({"event": "result", "image": models.Image.of(image)})

    return await streams.ndjson(service.streams, produce)
