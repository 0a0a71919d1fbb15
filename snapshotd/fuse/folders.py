"""The folders above the trees of a mount: they hold names, links, and places where a tree begins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from snapshotd.trees.view import View

FOREVER_S = 365 * 24 * 3600.0
"""Time for which the kernel may keep an entry that never changes."""


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link."""

    target: bytes


@dataclass(frozen=True, slots=True)
class TreePlace:
    """A place where a tree begins. `open_view` makes the view (the mount closes it); ids are shown shifted by `shift`.
    Places with one `key` show the same tree and share its view."""

    key: object
    open_view: Callable[[], View]
    shift: int = 0


class Folder(ABC):
    """A directory that belongs to no tree. Both methods may raise the errors of reading the catalog or repository."""

    timeout_s: float = FOREVER_S
    """Time for which the kernel may believe an answer about this folder's entries."""

    @abstractmethod
    def find(self, name: bytes) -> Item | None:
        """The entry `name`, or None."""

    @abstractmethod
    def entries(self) -> Iterable[tuple[bytes, Item]]:
        """All entries, in a stable order."""


Item: TypeAlias = Folder | Link | TreePlace


class Fixed(Folder):
    """A folder whose entries are known beforehand."""

    def __init__(self, items: dict[bytes, Item]) -> None:
        self._items = items

    def find(self, name: bytes) -> Item | None:
        return self._items.get(name)

    def entries(self) -> Iterable[tuple[bytes, Item]]:
        return self._items.items()
