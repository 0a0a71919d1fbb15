"""Images: list, build, import, remove."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import Response

from snapshotd import types as t
from snapshotd.api import operations
from snapshotd.api.storage import EnsureImageRequest, ImageRequest
from snapshotd.daemon.http import streams
from snapshotd.daemon.http.decoding import given_limits
from snapshotd.daemon.http.routes.shared import Service, ServiceDep, handles
from snapshotd.engine.base import ProgressSink
from snapshotd.errors import UsageError

_SAYS = 'Lines: `{"event":"progress","message"}`, at last `{"event":"result","image"}` or `{"event":"error","error"}`.'


@handles(operations.IMAGES)
def images(service: ServiceDep) -> list[t.Image]:
    return service.engine.images.list()


@handles(operations.ENSURE_IMAGE, says=_SAYS)
async def ensure(body: EnsureImageRequest, service: ServiceDep) -> Response:
    """The image that a sandbox of this name would start from. One that is not there is built or imported."""
    limits = t.Limits(**given_limits(body.limits))
    return await _answer(service, lambda progress: service.engine.images.ensure(body.image, progress, limits))


@handles(operations.BUILD_IMAGE, says=_SAYS)
async def build(body: ImageRequest, service: ServiceDep) -> Response:
    """Build from a recipe folder, or from one that comes with snapshotd (`default`, `minimal`)."""
    source = _checked(body.source)
    return await _answer(service, lambda progress: service.engine.images.build(source, body.name, progress))


@handles(operations.IMPORT_IMAGE, says=_SAYS)
async def import_(body: ImageRequest, service: ServiceDep) -> Response:
    """Import a folder, a root file system tar, a `docker save` or OCI archive, or a Docker image by name."""
    source = _checked(body.source)
    return await _answer(service, lambda progress: service.engine.images.import_(source, body.name, progress))


@handles(operations.REMOVE_IMAGE)
def remove(ref: str, service: ServiceDep) -> None:
    """Remove an image that no trajectory uses. `ref` may contain slashes, as Docker's names do."""
    service.engine.images.remove(ref)


def _checked(source: str) -> str:
    if "\0" in source:
        raise UsageError(f"{source[:40]!r} contains a zero byte, so it cannot be the source of an image")
    return source


async def _answer(service: Service, make: Callable[[ProgressSink], t.Image]) -> Response:
    return await streams.ndjson(
        service.streams, lambda emit: streams.result(emit, "image", make(streams.progress_lines(emit)))
    )
