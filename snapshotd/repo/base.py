"""The repository: durable storage of bytes under the hash of their content.

Today it holds tool outputs as blobs; trees are durable as sealed layers (`layers/store.py`), which the engine flushes before it
reports a snapshot as stored. Chunks, packs and trees come behind this same interface.

Errors: NotFound (no such blob), DataLoss (stored bytes are damaged), OutOfSpace (disk full; nothing was saved).
Concurrency: thread-safe.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from snapshotd.types import BlobID


class BlobWriter(ABC):
    """A blob being written. Use as a context manager: leaving it by an exception discards the blob."""

    size_bytes: int
    """Plain bytes taken so far."""

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Append plain bytes. OutOfSpace."""

    @abstractmethod
    def save(self) -> BlobID:
        """Finish: the blob is complete and visible (it survives kill -9; power loss after `flush`). Returns its id. Call once."""

    @abstractmethod
    def discard(self) -> None:
        """Drop it. Not an error after `save`, which it does not undo."""

    def __enter__(self) -> BlobWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


class Repository(ABC):
    @abstractmethod
    def close(self) -> None:
        """Release descriptors. Idempotent. Flushes nothing. Any other call afterwards is a defect."""

    @abstractmethod
    def writer(self) -> BlobWriter:
        """Begin a blob. Its memory use is constant whatever its size."""

    def save_blob(self, data: bytes) -> BlobID:
        """Store bytes that are in memory already."""
        with self.writer() as writer:
            writer.write(data)
            return writer.save()

    @abstractmethod
    def load_blob(self, blob_id: BlobID) -> Iterator[bytes]:
        """The blob's plain bytes in pieces of at most 1 MiB. Every byte is checked: DataLoss is raised at the latest when the end is
        reached, and always before wrong data would pass as complete."""

    @abstractmethod
    def size_bytes(self, blob_id: BlobID) -> int:
        """Plain size. NotFound."""

    @abstractmethod
    def flush(self) -> None:
        """Return when everything saved so far is durable against power loss. A failure is fatal for what was not flushed: OSError."""

    @abstractmethod
    def blobs(self) -> Iterator[BlobID]:
        """Every stored blob."""

    @abstractmethod
    def remove(self, blob_id: BlobID) -> None:
        """Delete a blob. Not an error when it is missing."""
