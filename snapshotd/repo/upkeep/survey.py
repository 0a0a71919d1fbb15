"""The content of the packs, found without an index: every intact frame, and the frames that an index should refer
to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from snapshotd.errors import DataLoss, NotFound, VersionMismatch
from snapshotd.repo.base import ObjectKind
from snapshotd.repo.format import compress, pack
from snapshotd.repo.format.ids import Identity
from snapshotd.repo.format.index import Index, IndexEntry, PackRow
from snapshotd.repo.format.record import decode_record
from snapshotd.repo.reading.cache import Cache
from snapshotd.repo.reading.reader import MAX_DEPTH, object_id
from snapshotd.store.base import Store

_PIECE_BYTES = 64 << 10
_BLOCK_BYTES = 4096
_CACHE_BYTES = 64 << 20


class Candidate(NamedTuple):
    """An intact frame. `id` is b"" for a delta: it follows when the base is known. `base` are the first bytes of an id,
    as in the frame."""

    id: bytes
    kind: ObjectKind
    pack: bytes
    offset: int
    stored: int
    plain: int
    base: bytes | None


@dataclass(slots=True)
class Survey:
    """The result of a survey. `packs` are the intact ones; `damaged` have a reason each, and may hold intact frames all
    the same."""

    packs: dict[bytes, PackRow] = field(default_factory=dict)
    damaged: dict[bytes, str] = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)


def read_what_is_left(store: Store, key: str) -> tuple[bytes, bool]:
    """A pack, and True if the medium could read all of it; unreadable blocks are zeros."""
    try:
        return store.get(key), True
    except DataLoss:
        pass
    size = store.size_bytes(key)
    pieces: list[bytes] = []
    for start in range(0, size, _PIECE_BYTES):
        pieces += _read_blocks(store, key, start, min(_PIECE_BYTES, size - start))
    return b"".join(pieces), False


def _read_blocks(store: Store, key: str, start: int, length: int) -> list[bytes]:
    try:
        return [store.get(key, start, length)]
    except DataLoss:
        if length <= _BLOCK_BYTES:
            return [bytes(length)]
    end = start + length
    return [
        block
        for at in range(start, end, _BLOCK_BYTES)
        for block in _read_blocks(store, key, at, min(_BLOCK_BYTES, end - at))
    ]


def survey(
    store: Store, identity: Identity, progress: Callable[[str], object], only: Collection[bytes] | None = None
) -> Survey:
    """Read every pack, or `only` some. Objects that are no deltas are decoded and hashed here. VersionMismatch when a
    newer version wrote a pack."""
    found = Survey()
    keys = {raw: key for key in store.keys(pack.PREFIX) if (raw := pack.pack_id_of(key)) is not None}
    keys = keys if only is None else {raw: key for raw, key in keys.items() if raw in only}
    for number, raw in enumerate(
        sorted(keys, key=lambda raw: (raw[1:], raw))
    ):  # oldest first: so records keep their order
        try:
            data, readable = read_what_is_left(store, keys[raw])
        except NotFound:
            continue
        _survey_pack(found, raw, data, identity)
        if not readable:
            found.damaged[raw] = "the disk cannot read parts of it"
            found.packs.pop(raw, None)
        progress(f"read {number + 1} of {len(keys)} packs")
    return found


def _survey_pack(found: Survey, raw: bytes, data: bytes, identity: Identity) -> None:
    head = head_problem(data, raw)
    problem = head or pack.end_problem(data)
    count = 0
    for frame in pack.frames(data, 0 if head else pack.HEAD_BYTES):  # the frames of a damaged head may begin anywhere
        if isinstance(frame, pack.BadFrame):
            problem = problem or str(frame)
            continue
        count += 1
        known = b"" if frame.base is not None else _decode(frame, None, identity)[0]
        if known is not None:
            found.candidates.append(
                Candidate(known, frame.kind, raw, frame.offset, frame.stored, frame.plain, frame.base)
            )
    if problem is None:
        found.packs[raw] = PackRow(raw, len(data), count)
    else:
        found.damaged[raw] = problem


def head_problem(data: bytes, raw: bytes) -> str | None:
    """The fault in a pack's head; None if there is none. VersionMismatch only when the whole pack is intact: otherwise
    its version number is damaged."""
    try:
        pack.check_head(data, raw)
    except DataLoss as exc:
        return exc.message
    except VersionMismatch:
        if pack.end_problem(data) is None:
            raise
        return "its version is damaged"
    return None


def _decode(frame: pack.Frame, base: bytes | None, identity: Identity) -> tuple[bytes | None, bytes]:
    """(id, plain bytes) of the object in a frame; (None, b"") if there is none."""
    try:
        plain = compress.decode(frame, base)
    except pack.BadFrame:
        return None, b""
    return object_id(identity, frame, plain), plain


def choose(found: Survey, current: dict[bytes, tuple[bytes, int]], decoder: Decoder) -> dict[bytes, IndexEntry]:
    """For each object that can be read, the frame to use. `current`: (pack, offset) by object where an index refers to
    now.

    From whole objects up, delta by delta, so that no chain can lead back to where it began (copies of one object may be
    deltas against each other in different packs). Among equals: one in an intact pack, then the one in use, then the
    latest. Every delta is decoded against every object that it may mean, which tells its id; one chain after the other,
    so that the base is in memory.
    """
    by_id: dict[bytes, list[Candidate]] = {}
    waiting: dict[bytes, list[Candidate]] = {}
    for candidate in found.candidates:
        if candidate.base is None:
            by_id.setdefault(candidate.id, []).append(candidate)
        else:
            waiting.setdefault(candidate.base, []).append(candidate)

    def rank(candidate: Candidate) -> tuple[bool, bool, bytes]:
        """The larger, the better."""
        used = current.get(candidate.id) == (candidate.pack, candidate.offset)
        return candidate.pack in found.packs, used, candidate.pack[1:]

    chosen: dict[bytes, IndexEntry] = {}
    waiting_bases: list[bytes] = []
    for raw, candidates in by_id.items():
        best = max(candidates, key=rank)
        chosen[raw] = IndexEntry(raw, best.kind, best.pack, best.offset, best.stored, best.plain, None, 0)
        waiting_bases.append(raw)
    while waiting_bases:
        base = chosen[waiting_bases.pop()]
        deltas = [one for one in waiting.get(base.id[: pack.BASE_BYTES], ()) if one.kind == base.kind]
        if not deltas or base.depth >= MAX_DEPTH:
            continue
        decoded = [one._replace(id=known) for one in deltas if (known := decoder.delta(one, base, chosen)) is not None]
        for one in sorted(decoded, key=rank, reverse=True):
            if one.id not in chosen:
                chosen[one.id] = IndexEntry(
                    one.id, one.kind, one.pack, one.offset, one.stored, one.plain, base.id, base.depth + 1
                )
                waiting_bases.append(one.id)
    return chosen


def records_in(store: Store, identity: Identity, index: Index, packs: Collection[bytes]) -> Iterator[bytes]:
    """The documents of the records in packs that the index does not know. Reads these packs, and the records of the
    index, which they may be deltas against. VersionMismatch."""
    found = survey(store, identity, lambda _: None, packs)
    found.candidates = [one for one in found.candidates if one.kind == ObjectKind.RECORD]
    if any(one.base is not None for one in found.candidates):
        for entry in index.objects(ObjectKind.RECORD):
            known, base = (entry.id, None) if entry.base is None else (b"", entry.base[: pack.BASE_BYTES])
            place = entry.pack, entry.offset, entry.stored, entry.plain
            found.candidates.append(Candidate(known, entry.kind, *place, base))
    decoder = Decoder(store, identity)
    chosen = choose(found, {}, decoder)
    for entry in chosen.values():
        if entry.pack in packs:
            yield decode_record(decoder.plain(entry, chosen))


class Decoder:
    """Decodes and hashes objects whose places are in a table instead of an index."""

    def __init__(self, store: Store, identity: Identity) -> None:
        self._store, self._identity = store, identity
        self._cache: Cache[bytes] = Cache(_CACHE_BYTES)

    def delta(self, one: Candidate, base: IndexEntry, places: dict[bytes, IndexEntry]) -> bytes | None:
        """The id of the object that the delta makes of `base`, whose own bases are at `places`; None if `base` does not
        fit."""
        try:
            raw, plain = _decode(self._frame(one), self.plain(base, places), self._identity)
        except (pack.BadFrame, DataLoss, NotFound):
            return None
        if raw is not None:
            self._cache.put(raw, plain, len(plain))
        return raw

    def plain(self, wanted: IndexEntry, places: dict[bytes, IndexEntry]) -> bytes:
        """The bytes of an object. BadFrame, DataLoss, NotFound."""
        plain = self._cache.get(wanted.id)
        chain = [wanted] if plain is None else []
        while chain and (below := chain[-1].base) is not None:
            plain = self._cache.get(below)
            if plain is not None:
                break
            chain.append(places[below])
        for one in reversed(chain):
            data = plain = compress.decode(self._frame(one), plain if one.base is not None else None)
            self._cache.put(one.id, data, len(data))
        assert plain is not None
        return plain

    def _frame(self, one: IndexEntry | Candidate) -> pack.Frame:
        return pack.decode_frame(self._store.get(pack.pack_key(one.pack), one.offset, one.stored))
