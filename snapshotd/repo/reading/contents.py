"""Reading contents: a chunk, or a large one part by part through its list."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple, Protocol

from snapshotd.errors import DataLoss, NotFound
from snapshotd.repo.base import ObjectKind
from snapshotd.repo.format import chunks, pack
from snapshotd.repo.format.chunks import ChunkList
from snapshotd.repo.format.ids import Identity
from snapshotd.repo.format.index import IndexEntry
from snapshotd.repo.reading.cache import Cache

_PIECE_BYTES = 1 << 20
_CONTENT = (ObjectKind.CHUNK, ObjectKind.LIST)


class _Layout(NamedTuple):
    """A decoded list with the offset at which each part ends."""

    chunks: ChunkList
    ends: list[int]


class ObjectReader(Protocol):
    """The objects of a repository. `PackReader` says what each method does."""

    identity: Identity

    def find(self, raw: bytes) -> IndexEntry | None: ...

    def plain(self, raw: bytes, kinds: tuple[ObjectKind, ...] | None = None, keep: bool = True) -> bytes: ...

    def plain_at(self, entry: IndexEntry, keep: bool = True) -> bytes: ...

    def damage_error(self, raw: bytes, why: str, entry: IndexEntry | None = None) -> DataLoss: ...


class ContentReader:
    """The contents of a repository, by their raw ids. Thread-safe."""

    def __init__(self, reader: ObjectReader, cache_bytes: int) -> None:
        """`cache_bytes`: of decoded lists."""
        self._reader = reader
        self._lists: Cache[_Layout] = Cache(cache_bytes)

    def forget(self) -> None:
        """Empty the cache."""
        self._lists.clear()

    def size_bytes(self, raw: bytes) -> int:
        """See `Repository.size_bytes`."""
        entry = self._content(raw)
        return entry.plain if entry.kind == ObjectKind.CHUNK else self._layout(raw).chunks.plain

    def load(self, raw: bytes) -> Iterator[bytes]:
        """See `Repository.load`."""
        entry = self._content(raw)
        if entry.kind == ObjectKind.CHUNK:
            return self._load_chunk(entry)
        return self._load_list(raw, self._layout(raw).chunks)

    def read(self, raw: bytes, offset: int, length: int) -> bytes:
        """See `Repository.read`."""
        entry = self._content(raw)
        if offset < 0 or length < 0:
            raise ValueError("offset and length of a read are not negative")
        if entry.kind == ObjectKind.CHUNK:
            return self._reader.plain_at(entry)[offset : offset + length]
        pieces = []
        while length > 0:
            piece = self._read_once(raw, offset, length)
            if not piece:
                break
            pieces.append(piece)
            offset += len(piece)
            length -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def chunk_list(self, raw: bytes) -> ChunkList:
        """The parts of a content that is kept as a list, or of an inner list. NotFound, DataLoss."""
        return self._layout(raw).chunks

    def parts_of(self, raw: bytes | None) -> list[tuple[bytes, int]]:
        """The chunks of a content with their lengths, as a hint: [] if there is none. Long ones (over 64 lists) only as
        far as that."""
        entry = self._reader.find(raw) if raw is not None else None
        if entry is None or raw is None:
            return []
        if entry.kind == ObjectKind.CHUNK:
            return [(raw, entry.plain)]
        if entry.kind != ObjectKind.LIST:
            return []
        try:
            level = [self.chunk_list(raw)]
            while level and level[0].level:
                level = [self.chunk_list(part) for one in level[:64] for part, _ in one.parts]
        except (DataLoss, NotFound):
            return []  # only a hint
        return [part for one in level for part in one.parts]

    def _content(self, raw: bytes) -> IndexEntry:
        entry = self._reader.find(raw)
        if entry is None or entry.kind not in _CONTENT:
            raise NotFound(f"there is no content {raw.hex()} in the repository")
        return entry

    def _layout(self, raw: bytes) -> _Layout:
        cached = self._lists.get(raw)
        if cached is not None:
            return cached
        data = self._reader.plain(raw, (ObjectKind.LIST,))
        try:
            decoded = chunks.decode_list(data)
        except pack.BadFrame as exc:
            raise self._reader.damage_error(raw, str(exc)) from None
        layout = _Layout(decoded, list(accumulate(length for _, length in decoded.parts)))
        self._lists.put(raw, layout, 200 * len(layout.ends))
        return layout

    def _part(self, raw: bytes, whole: bytes, level: int, length: int) -> _Layout:
        """An inner list, which must be of the level and length that the list above says."""
        try:
            layout = self._layout(raw)
        except NotFound:
            raise self._reader.damage_error(whole, f"the list {raw.hex()} that is a part of it is missing") from None
        if not layout.chunks.inner or layout.chunks.level != level or layout.chunks.plain != length:
            raise self._reader.damage_error(whole, f"the list {raw.hex()} is not the part that it should be")
        return layout

    def _chunk(self, raw: bytes, whole: bytes, length: int, keep: bool) -> bytes:
        try:
            data = self._reader.plain(raw, (ObjectKind.CHUNK,), keep)
        except NotFound:
            raise self._reader.damage_error(whole, f"the chunk {raw.hex()} that is a part of it is missing") from None
        if len(data) != length:
            raise self._reader.damage_error(whole, f"the chunk {raw.hex()} has another length than the list says")
        return data

    def _load_chunk(self, entry: IndexEntry) -> Iterator[bytes]:
        data = self._reader.plain_at(entry)
        for start in range(0, len(data), _PIECE_BYTES):
            yield data[start : start + _PIECE_BYTES]

    def _load_list(self, raw: bytes, top: ChunkList) -> Iterator[bytes]:
        hasher = self._reader.identity.content_hasher()
        stack = [(top.level, iter(top.parts))]
        while stack:
            level, parts = stack[-1]
            part = next(parts, None)
            if part is None:
                stack.pop()
            elif level == 0:
                piece = self._chunk(part[0], raw, part[1], keep=False)
                hasher.update(piece)
                yield piece
            else:
                stack.append((level - 1, iter(self._part(part[0], raw, level - 1, part[1]).chunks.parts)))
        if hasher.digest() != raw:
            raise self._reader.damage_error(raw, "its bytes as a whole do not match its id")

    def _read_once(self, raw: bytes, offset: int, length: int) -> bytes:
        """The bytes of a range that lie in one chunk, from its offset on."""
        layout = self._layout(raw)
        while True:
            place = bisect_right(layout.ends, offset)
            if place == len(layout.ends):
                return b""
            part, size = layout.chunks.parts[place]
            offset -= layout.ends[place] - size
            if layout.chunks.level == 0:
                return self._chunk(part, raw, size, keep=True)[offset : offset + length]
            layout = self._part(part, raw, layout.chunks.level - 1, size)
