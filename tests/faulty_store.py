"""A store that fails on purpose, over any real one.

    store = FaultyStore(MemoryStore(), Script([("put", 3, Fault.FULL), ("get", 1, Fault.FLIPPED)]))    # third put, first get
    store = FaultyStore(LocalStore(path), Seeded(7, {Fault.ERROR_AFTER: 0.05}))                        # one in twenty calls

Every injected fault is kept in `store.injected`, so that a test can tell what the code above had to bear.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

from snapshotd.errors import OutOfSpace
from snapshotd.store.base import Store

OPERATIONS = ("put", "get", "size_bytes", "keys", "delete")


class Fault(StrEnum):
    """What can go wrong. A fault that makes no sense for an operation is never injected there (see `APPLIES`)."""

    ERROR_BEFORE = "error-before"
    """OSError, and nothing was done."""
    ERROR_AFTER = "error-after"
    """OSError although it was done: a timeout after success."""
    TRUNCATED = "truncated"
    """Less is returned than there is."""
    FLIPPED = "flipped"
    """One bit of what is returned is wrong."""
    FULL = "full"
    """OutOfSpace, and nothing was done."""
    LIST_FAILS = "list-fails"
    """Some keys, then OSError."""
    LIST_STALE = "list-stale"
    """The list is from before the latest put and delete."""


_EVERYWHERE = (Fault.ERROR_BEFORE,)
APPLIES: dict[str, tuple[Fault, ...]] = {
    "put": (*_EVERYWHERE, Fault.ERROR_AFTER, Fault.FULL),
    "get": (*_EVERYWHERE, Fault.TRUNCATED, Fault.FLIPPED),
    "size_bytes": _EVERYWHERE,
    "keys": (*_EVERYWHERE, Fault.LIST_FAILS, Fault.LIST_STALE),
    "delete": (*_EVERYWHERE, Fault.ERROR_AFTER),
}

Schedule = Callable[[str, str], Fault | None]
"""(operation, key) to what goes wrong with it. Called once for each operation, under the store's lock."""


def no_faults(_operation: str, _key: str) -> Fault | None:
    """The schedule of a good day."""
    return None


class Script:
    """Faults at counted calls: (operation, which call of it, from 1; 0 is every one of them, fault)."""

    def __init__(self, steps: Iterable[tuple[str, int, Fault]]) -> None:
        self._steps = {(operation, number): fault for operation, number, fault in steps}
        for (operation, _), fault in self._steps.items():
            if fault not in APPLIES[operation]:
                raise ValueError(f"{fault} cannot happen to {operation}")
        self._seen = dict.fromkeys(OPERATIONS, 0)

    def __call__(self, operation: str, _key: str) -> Fault | None:
        self._seen[operation] += 1
        return self._steps.get((operation, self._seen[operation])) or self._steps.get((operation, 0))


class Seeded:
    """Faults at random with the given probabilities; the same seed and calls give the same faults."""

    def __init__(self, seed: int, rates: Mapping[Fault, float]) -> None:
        self._random, self._rates = random.Random(seed), dict(rates)

    def __call__(self, operation: str, _key: str) -> Fault | None:
        drawn = self._random.random()
        for fault, rate in self._rates.items():
            if fault in APPLIES[operation]:
                if drawn < rate:
                    return fault
                drawn -= rate
        return None


class FaultyStore(Store):
    """Passes everything on to `inner`, but for what `schedule` says. Closing it closes `inner`."""

    def __init__(self, inner: Store, schedule: Schedule = no_faults) -> None:
        self.inner, self.schedule = inner, schedule
        self.injected: list[tuple[str, str, Fault]] = []
        self._lock = threading.Lock()
        self._put_last: str | None = None
        self._deleted_last: str | None = None

    def close(self) -> None:
        self.inner.close()

    def _fault(self, operation: str, key: str) -> Fault | None:
        """What happens to this call. Raises it right here if it comes before anything is done."""
        with self._lock:
            fault = self.schedule(operation, key)
            if fault is not None:
                self.injected.append((operation, key, fault))
        if fault is Fault.ERROR_BEFORE:
            raise OSError(f"injected: {operation} of {key!r} was not done")
        if fault is Fault.FULL:
            raise OutOfSpace(f"injected: no space for {key!r}")
        return fault

    def put(self, key: str, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        fault = self._fault("put", key)
        self.inner.put(key, parts)
        self._put_last = key
        if fault is Fault.ERROR_AFTER:
            raise OSError(f"injected: the answer to put of {key!r} was lost")

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        fault = self._fault("get", key)
        data = self.inner.get(key, offset, length)
        if fault is Fault.TRUNCATED:
            return data[: len(data) // 2]
        if fault is Fault.FLIPPED and data:
            with self._lock:
                at = random.Random(len(self.injected)).randrange(len(data) * 8)
            changed = bytearray(data)
            changed[at // 8] ^= 1 << at % 8
            return bytes(changed)
        return data

    def size_bytes(self, key: str) -> int:
        self._fault("size_bytes", key)
        return self.inner.size_bytes(key)

    def keys(self, prefix: str = "") -> Iterator[str]:
        fault = self._fault("keys", prefix)
        if fault is Fault.LIST_FAILS:
            return self._cut(prefix)
        if fault is Fault.LIST_STALE:
            return self._stale(prefix)
        return self.inner.keys(prefix)

    def _cut(self, prefix: str) -> Iterator[str]:
        found = list(self.inner.keys(prefix))
        yield from found[: len(found) // 2]
        raise OSError(f"injected: the list of {prefix!r} broke off")

    def _stale(self, prefix: str) -> Iterator[str]:
        found = set(self.inner.keys(prefix)) - {self._put_last}
        gone = self._deleted_last
        return iter(sorted(found | ({gone} if gone is not None and gone.startswith(prefix) else set()) - {None}))

    def delete(self, key: str) -> None:
        fault = self._fault("delete", key)
        self.inner.delete(key)
        self._deleted_last = key
        if fault is Fault.ERROR_AFTER:
            raise OSError(f"injected: the answer to delete of {key!r} was lost")
