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

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
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


class Images(ABC):
    """The module's text holds for all methods."""

    @abstractmethod
    def list(self) -> list[Image]:
        """All images, newest first."""

    @abstractmethod
    def find(self, ref: str) -> Image:
        """By name or unique id prefix."""

    @abstractmethod
    def find_made(self, name: str) -> Image:
        """As `find`, for a caller who may make none: NotFound says how the daemon's owner does."""

    @abstractmethod
    def ensure(self, name: str, progress: Progress) -> Image:
        """The image that `name` stands for, made if need be: an existing one, else a recipe that comes with snapshotd,
        else a Docker image.

        NotFound names the next step. Building takes a minute, importing seconds; having it already, microseconds.
        """

    @abstractmethod
    def build(self, recipe: str, name: str | None, progress: Progress) -> Image:
        """From a recipe's name or folder; one that is unchanged is not built again."""

    @abstractmethod
    def import_(self, source: str, name: str | None, progress: Progress) -> Image:
        """From a folder, a root file system tar, a `docker save` or OCI archive, an OCI layout, or a Docker image name.

        A path is taken as a path when it exists or looks like one (it begins with `/` or `.`); `docker:NAME` is always
        Docker's. One that we have already (same content) is not taken again.
        """

    @abstractmethod
    def empty(self, env: tuple[tuple[str, str], ...], workdir: str) -> Image:
        """An image with nothing in it, for whole trees from elsewhere; made once for each pair of defaults."""

    @abstractmethod
    def adopt(self, image: Image, write: Callable[[Path], None]) -> None:
        """Have an image of another node of the fleet, with its id, unless it is here. `write` fills an empty root with its
        files; it is not called where another image here has the same stored tree. Its name is left out when taken."""

    @abstractmethod
    def remove(self, ref: str) -> None:
        """Forget an image and delete its files. Conflict while a trajectory uses it."""
