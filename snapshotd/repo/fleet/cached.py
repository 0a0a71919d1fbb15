"""A bucket with a node's disk before it: the parts of packs that are read come in whole blocks, and are kept (blocks.py).

Whole values pass by: a check, and a collection, read what the bucket has.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future

from snapshotd.repo.fleet.blocks import BLOCK_BYTES, DiskBlocks
from snapshotd.store.base import Store

_MOST_BYTES = 64 << 20
"""No pack is larger (store/base.py). A longer range passes by."""
_RECENT = 16
"""Blocks kept in memory: small files that are read one after the other lie in the same ones."""


class CachedStore(Store):
    """A store before another one, which keeps ranges of its values on this machine. Closes both. Thread-safe: two threads that need
    one block ask for it once."""

    def __init__(self, store: Store, blocks: DiskBlocks) -> None:
        self.store, self.blocks = store, blocks
        self._lock = threading.Lock()
        self._coming: dict[tuple[str, int], Future[bytes | None]] = {}
        self._recent: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def close(self) -> None:
        self.store.close()
        self.blocks.close()

    def put(self, key: str, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        self.store.put(key, parts)

    def size_bytes(self, key: str) -> int:
        return self.store.size_bytes(key)

    def keys(self, prefix: str = "") -> Iterator[str]:
        return self.store.keys(prefix)

    def remove_leftovers(self) -> None:
        self.store.remove_leftovers()

    def delete(self, key: str) -> None:
        self.store.delete(key)
        self.forget(key)

    def forget(self, key: str) -> bool:
        with self._lock:
            recent = [one for one in self._recent if one[0] == key]
            for one in recent:
                del self._recent[one]
        return self.blocks.forget(key) or bool(recent)

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        if not length or offset < 0 or not 0 < length <= _MOST_BYTES:
            return self.store.get(key, offset, length)
        first, last = offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES
        found = self._get_blocks(key, range(first, last + 1))
        data = found[first] if first == last else b"".join(found[number] for number in range(first, last + 1))
        start = offset - first * BLOCK_BYTES
        return data[start : start + length]

    def _get_blocks(self, key: str, numbers: range) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for number in numbers:
            data = self._here(key, number)
            if data is not None:
                found[number] = data
        while missing := [number for number in numbers if number not in found]:
            mine, others, just_came = self._claim(key, missing)
            found.update(just_came)
            try:
                for run in _runs(mine):
                    found.update(self._fetch(key, run))
            finally:
                self._settle(key, mine, found)
            for number, coming in others.items():
                data = coming.result()
                if data is not None:
                    found[number] = data
        return found

    def _here(self, key: str, number: int) -> bytes | None:
        with self._lock:
            data = self._recent.get((key, number))
            if data is not None:
                self._recent.move_to_end((key, number))
                return data
        data = self.blocks.load(key, number)
        if data is not None:
            self._remember(key, number, data)
        return data

    def _remember(self, key: str, number: int, data: bytes) -> None:
        with self._lock:
            self._recent[key, number] = data
            if len(self._recent) > _RECENT:
                self._recent.popitem(last=False)

    def _claim(
        self, key: str, numbers: Sequence[int]
    ) -> tuple[list[int], dict[int, Future[bytes | None]], dict[int, bytes]]:
        """Divide blocks into those that this thread is to get, those that others are getting now, and those that have come
        since this thread looked."""
        with self._lock:
            here = {number: self._recent[key, number] for number in numbers if (key, number) in self._recent}
            others = {number: self._coming[key, number] for number in numbers if (key, number) in self._coming}
            mine = [number for number in numbers if number not in others and number not in here]
            for number in mine:
                self._coming[key, number] = Future()
        return mine, others, here

    def _fetch(self, key: str, run: Sequence[int]) -> dict[int, bytes]:
        """Blocks beside each other by one request. Errors: as of the store."""
        data = self.store.get(key, run[0] * BLOCK_BYTES, len(run) * BLOCK_BYTES)
        found = {number: data[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES] for at, number in enumerate(run)}
        for number, block in found.items():
            if block:
                self.blocks.save(key, number, block)
                self._remember(key, number, block)
        return found

    def _settle(self, key: str, mine: Sequence[int], found: Mapping[int, bytes]) -> None:
        """Let the threads go on that wait for these blocks. One that could not be had is asked for by each of them."""
        with self._lock:
            for number in mine:
                self._coming.pop((key, number)).set_result(found.get(number))


def _runs(numbers: Sequence[int]) -> Iterator[list[int]]:
    run: list[int] = []
    for number in numbers:
        if run and number != run[-1] + 1:
            yield run
            run = []
        run.append(number)
    if run:
        yield run
