"""Images: the root file systems that sandboxes start from, and every way to get one.

An image's content is foreign and hostile; once the catalog knows an image, its files never change. Names: the form of
Docker's references, which includes our own names. Only environment and working directory of a foreign configuration are
used.

Durability: on return an image survives power loss; before, nothing of it is visible, and the next start removes the
leftovers of a crash. Concurrency: thread-safe. Images are made one at a time: the second of two that need the same
missing one waits and finds it. Errors: NotFound, Ambiguous; UsageError (malformed, damaged or hostile source; the
message names the member), NotPermitted, Unsupported (a program or engine is missing), LimitExceeded, OutOfSpace.
Nothing is left behind by a failure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from snapshotd.errors import SnapshotdError
from snapshotd.types import Image, ImageID

Progress = Callable[[str], None]
"""Receives one line of progress for people."""


def innermost_reason(exc: BaseException) -> str:
    """The operating system's message, which a library has wrapped in several of its own errors."""
    while exc.__context__ is not None and not isinstance(exc.__context__, SnapshotdError):  # one that a caller is at
        exc = exc.__context__
    return exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)


class ImageRows(Protocol):
    """The catalog's images. The contract stands there."""

    def list(self) -> list[Image]: ...

    def find(self, ref: str) -> Image: ...

    def add(self, image: Image) -> None: ...

    def remove(self, image_id: ImageID) -> None: ...


class ImageCatalog(Protocol):
    """The part of the catalog that images need."""

    @property
    def images(self) -> ImageRows: ...

    def flush(self) -> None: ...
