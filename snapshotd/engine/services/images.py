"""Images: the roots that sandboxes start from."""

from __future__ import annotations

from snapshotd.engine.base import ProgressSink
from snapshotd.engine.context import Context
from snapshotd.types import NO_ISOLATION, Image, Limits


class ImageService:
    """See `images/base.py` for the errors."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def list(self) -> list[Image]:
        return self._context.images.list()

    def ensure(self, name: str, progress: ProgressSink, limits: Limits) -> Image:
        """The image that a sandbox of this image name would start from, made first if need be. NotFound. Unsupported:
        nothing can keep the sandbox to its limits."""
        runtime = self._context.runtime("auto")
        if runtime.name == NO_ISOLATION:
            return self._context.images.empty((), "/workspace")
        runtime.check_limits(limits)
        return self._context.ensure_image(name, progress)

    def build(self, recipe: str, name: str | None, progress: ProgressSink) -> Image:
        """From a recipe folder, or the name of one that comes with snapshotd (`default`, `minimal`, ...). Reuses an
        unchanged one."""
        return self._context.images.build(recipe, name, progress)

    def import_(self, source: str, name: str | None, progress: ProgressSink) -> Image:
        """From a folder, a tar of a root file system, a `docker save` or OCI archive, or a Docker image name."""
        return self._context.images.import_(source, name, progress)

    def remove(self, ref: str) -> None:
        """Remove an image that no trajectory uses. `ref` may contain slashes, as Docker's names do."""
        self._context.images.remove(ref)
