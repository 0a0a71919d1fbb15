"""Bytes under keys: where the repository keeps its packs.

A key is 1 to 200 characters of [a-z0-9._-] in parts joined by `/` (no part empty, `.` or `..`). A value is written
once, as a whole, and never changes; so it may be cached for ever. Values are up to some 64 MiB.

    local.py    a directory
    memory.py   a dictionary, for tests
    s3.py       a bucket of an S3-compatible service (extra `s3`)

Durability: `put` returns when the value would survive power loss (local: file and directory synced; S3: acknowledged).
A put that fails or is cut off leaves nothing under the key, or the whole value (a timeout after success).
Errors: NotFound; Conflict (another value is under the key already); OutOfSpace; DataLoss (the value has another length
than it should, the medium reports an error); Unsupported (the service lacks conditional writes); DaemonUnavailable is
never raised: a service that cannot be reached after the retries is OSError with a message that names it. A failed list
is an error, never an empty list. Concurrency: thread-safe; several processes may use one store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence


class Store(ABC):
    """See the module's text."""

    @abstractmethod
    def close(self) -> None:
        """Release what it holds. Idempotent."""

    @abstractmethod
    def put(self, key: str, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """Store the joined parts under a new key. Conflict if the key has another value; the same value counts as
        success (a retry of a put whose answer was lost). OutOfSpace: nothing is under the key."""

    @abstractmethod
    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read `length` bytes from `offset`, or the rest. Fewer when the value ends before. NotFound."""

    @abstractmethod
    def size_bytes(self, key: str) -> int:
        """A value's length. NotFound."""

    @abstractmethod
    def keys(self, prefix: str = "") -> Iterator[str]:
        """Every key that begins with `prefix`, in the order of their bytes. A value put or deleted meanwhile may be
        there or not."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove a value. Not an error when it is missing. Durable on return."""

    def forget(self, key: str) -> bool:
        """A reader found the bytes of a value wrong: drop what is kept of it on this machine. False if nothing was, so that
        reading again is of no use."""
        return False

    def remove_leftovers(self) -> None:  # noqa: B027 - most media leave nothing
        """Remove halves of values whose writing process died. Opening a store does this too, but a process that was
        killed shortly before may still be ending then."""
