"""Where a reader finds objects: in the index, or before it in what a writer has not flushed (writing/unflushed.py)."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

from snapshotd.errors import InternalError
from snapshotd.repo.base import ObjectKind
from snapshotd.repo.format import pack
from snapshotd.repo.format.index import Index, IndexEntry, missing_error
from snapshotd.store.base import Store

_LOOK_EVERY_S = 0.05
"""Time for which a new index may go unnoticed."""


class Finder(ABC):
    """Thread-safe. After `close` every method says InternalError."""

    @abstractmethod
    def index(self) -> Index | None:
        """The index; None while there is neither index nor pack. DataLoss when packs are there without one."""

    @abstractmethod
    def find(self, raw: bytes) -> IndexEntry | None:
        """The place of an object; None if there is none. In a place without a pack are the bytes that `plain` gives."""

    def find_readable(self, raw: bytes) -> IndexEntry | None:
        """Like `find`, for reading alone. See `Index.find_readable`."""
        entry = self.find(raw)
        if entry is None:
            index = self.index()
            return index.find_readable(raw) if index is not None else None
        return entry

    @abstractmethod
    def refresh(self) -> None:
        """An object is not where the index says: look for a newer index at the next call."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""

    def records(self) -> Iterator[bytes]:
        """The ids of all records in the order they were saved."""
        index = self.index()
        return index.records() if index is not None else iter(())

    def plain(self, raw: bytes, kinds: tuple[ObjectKind, ...] | None = None) -> bytes | None:
        """The plain bytes of an object that has no frame yet. None: it has one, or is of another kind than `kinds`."""
        return None

    def frame(self, raw: bytes) -> bytes | None:
        """The frame of an object whose pack the store has not got yet."""
        return None


class IndexFinder(Finder):
    """Finds objects in the index that lies at a path now."""

    def __init__(
        self, store: Store, index_path: Path, replaced: Callable[[], object], kind: type[Index] = Index
    ) -> None:
        """`replaced`: called when another index file is opened in place of the present one."""
        self._kind = kind
        self._store, self._path, self._replaced = store, index_path, replaced
        self._index: Index | None = None
        self._file = (0, 0)
        self._seen_s = 0.0
        self._closed = False
        self._lock = threading.Lock()

    def index(self) -> Index | None:
        """Return the index. One that a repair has put in its place is opened some milliseconds later at most. The old
        one stays open, since other threads may be reading from it."""
        with self._lock:
            if self._closed:
                raise closed_error(self._path)
            now = time.monotonic()
            if self._index is None or now - self._seen_s > _LOOK_EVERY_S:
                self._open_present()
                self._seen_s = now
            return self._index

    def _open_present(self) -> None:
        try:
            st = os.stat(self._path)
        except FileNotFoundError:
            if self._index is None:
                for key in self._store.keys(pack.PREFIX):
                    raise missing_error(self._path, key) from None
            return  # another process replaces it
        if self._index is None or self._file != (st.st_dev, st.st_ino):
            self._index = self._kind(self._path, write=False)
            self._file = (st.st_dev, st.st_ino)
            self._replaced()

    def find(self, raw: bytes) -> IndexEntry | None:
        index = self.index()
        entry = index.find(raw) if index is not None else None
        if entry is None and index is not None:
            self.refresh()
            again = self.index()
            if again is not None and again is not index:
                return again.find(raw)
        return entry

    def refresh(self) -> None:
        self._seen_s = 0.0

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._index is not None:
                self._index.close()
                self._index = None


def closed_error(index_path: Path) -> InternalError:
    """The error of any use after `close`."""
    return InternalError(f"the repository of {index_path} was used after it was closed")
