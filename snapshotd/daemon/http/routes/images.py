"""Images: list, build, import, remove."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from starlette.responses import Response

from snapshotd import types as t
from snapshotd.api import operations
from snapshotd.api.storage import EnsureImageRequest, ImageRequest
from snapshotd.catalog.base import present_tenant
from snapshotd.daemon.http import streams
from snapshotd.daemon.http.routes.shared import Service, ServiceDep, handles
from snapshotd.engine.base import ProgressSink

_SAYS = 'Lines: `{"event":"progress","message"}`, at last `{"event":"result","image"}` or `{"event":"error","error"}`.'


@handles(operations.IMAGES)
def images(service: ServiceDep) -> list[t.Image]:
    found = service.engine.images.list()
    return found if present_tenant() is None else [replace(image, source="") for image in found]


@handles(operations.ENSURE_IMAGE, says=_SAYS)
async def ensure(body: EnsureImageRequest, service: ServiceDep) -> Response:
    """The image that a sandbox of this name would start from. One that is not there is built or imported."""
    limits = t.Limits(**body.limits.given)
    return await _answer(service, lambda progress: service.engine.images.ensure(body.image, progress, limits))


@handles(operations.BUILD_IMAGE, says=_SAYS)
async def build(body: ImageRequest, service: ServiceDep) -> Response:
    """Build from a recipe folder, or from one that comes with snapshotd (`default`, `minimal`)."""
    return await _answer(service, lambda progress: service.engine.images.build(body.source, body.name, progress))


@handles(operations.IMPORT_IMAGE, says=_SAYS)
async def import_(body: ImageRequest, service: ServiceDep) -> Response:
    """Import a folder, a root file system tar, a `docker save` or OCI archive, or a Docker image by name."""
    return await _answer(service, lambda progress: service.engine.images.import_(body.source, body.name, progress))


async def _answer(service: Service, make: Callable[[ProgressSink], t.Image]) -> Response:
    return await streams.ndjson(
        service.streams, lambda emit: streams.result(emit, "image", make(streams.progress_lines(emit)))
    )
