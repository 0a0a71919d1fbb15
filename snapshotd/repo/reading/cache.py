"""The values that a reader keeps in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

_VALUE_BYTES = 250
"""Memory that a cached value takes besides its own bytes (measured with tracemalloc): ten thousand small ones add
up."""

T = TypeVar("T")


class Cache(Generic[T]):
    """The most recently used values, bounded in bytes. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit, self._bytes = limit_bytes, 0
        self._values: OrderedDict[bytes, tuple[T, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> T | None:
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def __contains__(self, key: bytes) -> bool:
        return key in self._values

    def put(self, key: bytes, value: T, size_bytes: int) -> None:
        """Cache a value; one larger than a quarter of the cache is not kept."""
        size_bytes += _VALUE_BYTES
        if size_bytes > self._limit // 4:
            return
        with self._lock:
            old = self._values.pop(key, None)
            self._bytes += size_bytes - (old[1] if old else 0)
            self._values[key] = (value, size_bytes)
            while self._bytes > self._limit:
                self._bytes -= self._values.popitem(last=False)[1][1]

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self._bytes = 0
