"""Serialised values at rest: as they are if short, else as the pieces that they are made of, each stored once in its
family.

    [kind, data]                        a short one
    [kind, head, pieces]                head, then the pieces
    [kind, head, pieces, recipe, keep]  head, then the first `keep` pieces of that recipe, then the pieces

The second form is for up to 64 pieces. A longer list that grows refers to the recipe that its earlier states refer to,
and names what came after. So a list of n messages costs a new message and a few numbers per step, and to read it takes
one row beside the pieces.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import ormsgpack
from blake3 import blake3

from snapshotd.errors import DataLoss
from snapshotd.integrations.langgraph import codec
from snapshotd.integrations.langgraph.cutting import Pieces, cut, cut_rest, head_of
from snapshotd.sqlite import Database

_SHORT_BYTES = 128
_MOST_OWN = 64
_HASH_BYTES = 16
"""Under a key of the file that nobody outside knows: who writes messages cannot make two of one hash."""
_KNOWN_HASHES, _KEPT_RECIPES, _KEPT_BYTES = 1 << 16, 64, 32 << 20


class Packed(NamedTuple):
    """A value at rest."""

    kind: str
    head: bytes
    own: tuple[int, ...] = ()
    recipe: int = 0
    keep: int = 0

    def row(self) -> list[Any]:
        """For msgpack."""
        if not (self.own or self.recipe):
            return [self.kind, self.head]
        row: list[Any] = [self.kind, self.head, steps(self.own)]
        return [*row, self.recipe, self.keep] if self.recipe else row

    @staticmethod
    def of(row: Sequence[Any]) -> Packed:
        kind, head, *rest = row
        own = tuple(accumulate(rest[0])) if rest else ()
        return Packed(kind, head, own, *rest[1:])


class CutValue(NamedTuple):
    """A serialised value that is about to be stored."""

    kind: str
    data: bytes
    pieces: Pieces
    hashes: Sequence[bytes] = ()
    shared: int = 0
    """Pieces at the beginning that are those of the value it grew from."""


class StoredValues:
    """The pieces and recipes of a file. Hold the database's lock, but for `cut`. All it remembers is of rows
    that never change; `epoch` goes up with every removal from a family."""

    def __init__(self, database: Database) -> None:
        self._db = database
        row = database.read_one("SELECT hash_key FROM secret")
        if row is None:
            raise DataLoss(f"{database.name} is damaged (its key is missing): {database.form.remedy}")
        self._key: bytes = row[0]
        self._known: OrderedDict[tuple[int, int, bytes], int] = OrderedDict()
        self._recipes: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._pieces: OrderedDict[int, bytes] = OrderedDict()
        self._kept_bytes = 0

    def cut(self, kind: str, data: bytes, before: CutValue | None = None) -> CutValue:
        """The pieces of what a serialiser made. May be called without the lock. `before`: the value that it may have
        grown from; then only what is new is looked at."""
        data = bytes(data)
        if len(data) <= _SHORT_BYTES:
            return CutValue(kind, data, Pieces(len(data), [], 0))
        pieces, hashes, shared = None, list[bytes](), 0
        if before is not None and before.kind == kind and before.pieces.settled and before.pieces.head:
            old, head = before.pieces, head_of(data)
            ends = old.ends[: old.settled]
            if head and data.startswith(before.data[old.head : old.head + ends[-1]], head):
                pieces, hashes, shared = cut_rest(data, head, ends), list(before.hashes[: old.settled]), old.settled
        pieces = pieces or cut(kind, data)
        key, view = self._key, memoryview(data)
        for begin, end in pieces.places(shared):
            hashes.append(blake3(view[begin:end], key=key).digest(_HASH_BYTES))
        return CutValue(kind, data, pieces, hashes, shared)

    def store(self, family: int, epoch: int, value: CutValue, before: Packed | None) -> Packed:
        """Store the pieces of a value that the file lacks, inside a transaction. `before`: the value that it may have grown from."""
        head = value.data[: value.pieces.head]
        if not value.pieces.ends:
            return Packed(value.kind, head)
        known = self._known
        pks = list(self.pieces_of(before)[: value.shared]) if before is not None and value.shared else []
        for digest, (begin, end) in zip(value.hashes[len(pks) :], value.pieces.places(len(pks)), strict=True):
            pk = known.get((family, epoch, digest))
            if pk is None:
                pk = known[family, epoch, digest] = self._piece(family, digest, value.data[begin:end])
            pks.append(pk)
        while len(known) > _KNOWN_HASHES:
            known.popitem(last=False)
        if len(pks) <= _MOST_OWN:
            return Packed(value.kind, head, tuple(pks))
        if before is not None and before.recipe:
            base = self.pieces_in(before.recipe)
            keep = _count_shared(base, pks)
            if len(pks) - keep <= _MOST_OWN:
                return Packed(value.kind, head, tuple(pks[keep:]), before.recipe, keep)
        recipe = self._db.insert(
            "INSERT INTO recipe (family, pieces) VALUES (?, ?)", (family, codec.compress(ormsgpack.packb(steps(pks))))
        )
        return Packed(value.kind, head, (), recipe, len(pks))

    def forget(self) -> None:
        """Forget all rows, after a transaction was rolled back: its rows are not there, and their numbers are used again."""
        self._known.clear()
        self._recipes.clear()
        self._pieces.clear()
        self._kept_bytes = 0

    def pieces_of(self, value: Packed) -> tuple[int, ...]:
        """The rows of its pieces, in order."""
        return self.pieces_in(value.recipe)[: value.keep] + value.own if value.recipe else value.own

    def load_kept(self, values: Iterable[Packed]) -> Mapping[int, bytes] | None:
        """As `load`, where all of these pieces are in memory; else None, and the file is not read."""
        known = self._pieces.__contains__
        for value in values:
            if value.recipe and value.recipe not in self._recipes:
                return None
            if not all(map(known, self.pieces_of(value))):
                return None
        return self._pieces

    def load(self, values: Sequence[Packed]) -> Mapping[int, bytes]:
        """The pieces of these values, and perhaps others; good for as long as the lock is held."""
        kept = self._pieces
        missing = {pk for value in values for pk in self.pieces_of(value) if pk not in kept}
        if not missing:
            return kept
        found = {pk: kept[pk] for value in values for pk in self.pieces_of(value) if pk not in missing}
        rows = self._db.read(
            "SELECT pk, data FROM json_each(?) JOIN piece ON pk = value", (json_array(sorted(missing)),)
        )
        for pk, data in rows:
            found[pk] = codec.expand(data)
            self._keep(pk, found[pk])
        if len(rows) != len(missing):
            raise self.damage("a piece of a value")
        return found

    def damage(self, what: str) -> DataLoss:
        return DataLoss(f"{self._db.name} is damaged ({what} is missing): {self._db.form.remedy}")

    def _piece(self, family: int, digest: bytes, piece: bytes) -> int:
        made = self._db.write(
            "INSERT INTO piece (family, hash, data) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
            (family, digest, codec.compress(piece)),
        )
        if made:
            pk = self._db.connection.last_insert_rowid()
            self._keep(pk, piece)
            return pk
        row = self._db.read_one("SELECT pk FROM piece WHERE family = ? AND hash = ?", (family, digest))
        assert row is not None
        return int(row[0])

    def _keep(self, pk: int, piece: bytes) -> None:
        self._pieces[pk] = piece
        self._kept_bytes += len(piece)
        while self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._pieces.popitem(last=False)[1])

    def pieces_in(self, pk: int) -> tuple[int, ...]:
        """The rows of the pieces of a recipe."""
        found = self._recipes.get(pk)
        if found is None:
            row = self._db.read_one("SELECT pieces FROM recipe WHERE pk = ?", (pk,))
            if row is None:
                raise self.damage("the recipe of a value")
            found = self._recipes[pk] = tuple(accumulate(ormsgpack.unpackb(codec.expand(row[0]))))
            if len(self._recipes) > _KEPT_RECIPES:
                self._recipes.popitem(last=False)
        return found


def steps(numbers: Sequence[int]) -> list[int]:
    """The first number, then the difference of each to the one before it: most take one byte in msgpack."""
    return [*numbers[:1], *(after - before for before, after in pairwise(numbers))]


def json_array(numbers: Iterable[int]) -> str:
    """A JSON array, for `json_each`."""
    return f"[{','.join(map(str, numbers))}]"


def _count_shared(base: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning of two lists."""
    both = zip(base, other, strict=False)
    return next((place for place, (one, two) in enumerate(both) if one != two), min(len(base), len(other)))
