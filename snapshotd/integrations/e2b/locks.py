"""Locks by name, for changes of one thing that have to come one behind the other."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary


class NamedLocks:
    """A lock is kept as long as somebody holds it or waits for it."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def __call__(self, name: str) -> asyncio.Lock:
        """The lock of this name."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock
