"""A cache of bundles under keys, as CI services have it: an entry never changes, and a key finds it as a whole or by
its beginning.

A cache is a folder, or a bucket (`s3://...`), with these values in it:

    entries/k<key>      JSON: the key, the time, and size and SHA-256 of each part. Written last: the entry exists from here on
    parts/<id>/<number> the bundle in pieces

A key's letters and digits stand for themselves and every other byte as `_xx`, so keys with one beginning have names with
one beginning. An entry is read by whoever can write the cache, so everything is verified before it is used.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from snapshotd.client.local.arguments import local_path
from snapshotd.errors import Conflict, DataLoss, NotFound, SnapshotdError, UsageError
from snapshotd.store.open import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapshotd.store.base import Store

T = TypeVar("T")
PART_BYTES = 16 << 20
_ENTRY_MAX_BYTES = 4 << 20
_NAME_MAX = 180
_ENTRIES, _PARTS, _VERSION = "entries/k", "parts/", 1
_PLAIN = re.compile(rb"[^a-z0-9.-]")


@dataclass(frozen=True, slots=True)
class _Entry:
    key: str
    created: float
    data: str
    parts: tuple[tuple[int, str], ...]
    """Size in bytes and SHA-256 of each."""


class BundleCache:
    """The cache at a folder's path or a bucket's address. Use it as a context manager."""

    def __init__(self, place: str | Path) -> None:
        """Errors: UsageError (no such place), and those of the store."""
        text = str(place)
        try:
            self._store: Store = open_store(
                text if "://" in text else f"file://{quote(str(local_path(place)), safe='/')}"
            )
        except SnapshotdError:
            raise
        except OSError as exc:
            raise UsageError(
                f"the cache {text} cannot be opened: {exc.strerror or exc}; name a folder, or s3://bucket/prefix"
            ) from exc

    def __enter__(self) -> BundleCache:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def has(self, key: str) -> bool:
        """True if there is an entry under exactly this key."""
        try:
            self._store.size_bytes(_name(key))
        except NotFound:
            return False
        return True

    def save(self, key: str, produce: Callable[[Callable[[bytes], object]], T]) -> T | None:
        """`produce(write)` writes the entry's bytes. None, and nothing is left, if another process saved the key
        meanwhile: entries never change. An error of `produce` leaves nothing either."""
        name = _name(key)
        writer = _Writer(self._store)
        try:
            made = produce(writer.write)
            writer.end()
            entry = {
                "version": _VERSION,
                "key": key,
                "created": time.time(),
                "data": writer.data,
                "parts": writer.parts,
            }
            self._store.put(name, [json.dumps(entry).encode()])
        except Conflict:
            writer.remove()
            return None
        except BaseException:
            writer.remove()
            raise
        return made

    def find(self, key: str, restore_keys: Sequence[str] = ()) -> CacheEntry | None:
        """The entry of exactly `key`; else the newest one that begins with `key`, then with each of `restore_keys` in
        their order; else None."""
        exact = self._read(_name(key))
        if exact is not None:
            return CacheEntry(self._store, exact, exact=True)
        for prefix in (key, *restore_keys):
            entries = [self._read(name) for name in self._store.keys(_name(prefix))]
            begun = [entry for entry in entries if entry is not None]
            if begun:
                return CacheEntry(self._store, max(begun, key=lambda entry: entry.created), exact=False)
        return None

    def _read(self, name: str) -> _Entry | None:
        """None if it is not there (any more)."""
        try:
            data = self._store.get(name, 0, _ENTRY_MAX_BYTES + 1)
        except NotFound:
            return None
        try:
            entry = _entry(json.loads(data))
        except (ValueError, TypeError, KeyError, RecursionError):
            entry = None
        if entry is None or _name(entry.key) != name:
            raise DataLoss(f"the entry {name} of the cache is damaged; delete it, and save it under its key again")
        return entry


class CacheEntry:
    """An entry's bytes, in order; each part is verified before any of it is given out."""

    def __init__(self, store: Store, entry: _Entry, *, exact: bool) -> None:
        self._store, self._entry = store, entry
        self._next, self._left = 0, memoryview(b"")
        self.key, self.exact = entry.key, exact
        self.bytes = sum(size for size, _ in entry.parts)

    def read(self, count: int) -> bytes:
        """At most `count` bytes; b"" at the end. DataLoss: a part is missing or differs."""
        while not self._left and self._next < len(self._entry.parts):
            self._left = memoryview(self._part(self._next))
            self._next += 1
        piece, self._left = bytes(self._left[:count]), self._left[count:]
        return piece

    def _part(self, number: int) -> bytes:
        size, digest = self._entry.parts[number]
        try:
            data = self._store.get(_part_name(self._entry.data, number), 0, size + 1)
        except NotFound:
            data = None
        if data is None or len(data) != size or hashlib.sha256(data).hexdigest() != digest:
            wrong = "missing" if data is None else "not what was saved"
            raise DataLoss(
                f"part {number + 1} of {len(self._entry.parts)} of the cache's entry {self.key!r} is {wrong}; nothing was taken "
                f"from it: delete {_name(self.key)} in the cache, and save the key again"
            )
        return data


class _Writer:
    """Cuts a stream into parts. `data`: the name that they have in common."""

    def __init__(self, store: Store) -> None:
        self._store, self._held = store, bytearray()
        self.data = secrets.token_hex(16)
        self.parts: list[tuple[int, str]] = []

    def write(self, data: bytes) -> None:
        self._held += data
        while len(self._held) >= PART_BYTES:
            self._put(bytes(self._held[:PART_BYTES]))
            del self._held[:PART_BYTES]

    def end(self) -> None:
        if self._held:
            self._put(bytes(self._held))

    def _put(self, part: bytes) -> None:
        self._store.put(_part_name(self.data, len(self.parts)), [part])
        self.parts.append((len(part), hashlib.sha256(part).hexdigest()))

    def remove(self) -> None:
        for number in range(len(self.parts) + 1):  # a put that failed may have left the last one
            with suppress(SnapshotdError, OSError):  # the error on its way says more
                self._store.delete(_part_name(self.data, number))


def _entry(found: Any) -> _Entry | None:
    parts = tuple((int(size), str(digest)) for size, digest in found["parts"])
    if found["version"] != _VERSION or not all(0 < size <= PART_BYTES for size, _ in parts):
        return None
    if re.fullmatch("[0-9a-f]{32}", found["data"]) is None:
        return None
    return _Entry(str(found["key"]), float(found["created"]), found["data"], parts)


def _name(key: str) -> str:
    """The name of a key's entry. UsageError: the key is empty, too long, or no text of UTF-8."""
    try:
        name = _PLAIN.sub(lambda found: b"_%02x" % found[0][0], key.encode()).decode()
    except UnicodeEncodeError as exc:
        raise UsageError(f"the key {key!r} of a cache is no text; use letters, digits and signs") from exc
    if not 1 <= len(name) <= _NAME_MAX:
        raise UsageError(
            f"the key {key[:300]!r} of a cache is empty or too long; use 1 to {_NAME_MAX} of a-z 0-9 . - (others count three times)"
        )
    return _ENTRIES + name


def _part_name(data: str, number: int) -> str:
    return f"{_PARTS}{data}/{number:06d}"


@contextmanager
def open_cache(place: str | Path) -> Iterator[BundleCache]:
    """Open the cache at `place`. UsageError: its folder or bucket failed, also later within the block."""
    with BundleCache(place) as cache:
        try:
            yield cache
        except OSError as exc:
            if isinstance(exc, BrokenPipeError):
                raise
            raise UsageError(f"the cache {place} failed: {exc}; see that it can be reached, and try again") from exc
