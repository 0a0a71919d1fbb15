"""A store in a dictionary. For tests; gone with the object."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from snapshotd.errors import Conflict, NotFound
from snapshotd.store.base import Store
from snapshotd.store.keys import check_range, check_store_key


class MemoryStore(Store):
    """Durable as long as the object lives. `close` forgets nothing: it can be handed to the next user, as a disk
    can."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Nothing to release."""

    def put(self, key: str, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        value = b"".join(parts)
        with self._lock:
            if self._values.setdefault(check_store_key(key), value) != value:
                raise Conflict(
                    f"there is another value under {key} in the memory store; values never change, use a new key"
                )

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        check_range(offset, length)
        return self._value(key)[offset : None if length is None else offset + length]

    def size_bytes(self, key: str) -> int:
        return len(self._value(key))

    def _value(self, key: str) -> bytes:
        with self._lock:
            value = self._values.get(check_store_key(key))
        if value is None:
            raise NotFound(f"there is no value under {key} in the memory store")
        return value

    def keys(self, prefix: str = "") -> Iterator[str]:
        with self._lock:
            found = sorted(key for key in self._values if key.startswith(prefix))
        return iter(found)

    def delete(self, key: str) -> None:
        with self._lock:
            self._values.pop(check_store_key(key), None)
