"""A flipped bit in a database: it is found, or it says nothing. Never is a changed value believed, and never is it a
defect of ours."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.errors import DataLoss
from snapshotd.repo.base import ObjectKind
from snapshotd.repo.format.index import Index, IndexEntry, PackRow, create_index
from snapshotd.sqlite import remove
from tests import long
from tests.golden import make_catalog

HEAD, FLIPS = long.size(25, 100), long.size(50, 150)
"""Flips in the first 100 bytes, and all."""

Look = Callable[[Path], tuple[Any, list[str]]]
"""What a database holds, and what is wrong with it."""


def _catalog(path: Path) -> None:
    make_catalog.make(path)


def _look_at_catalog(path: Path) -> tuple[Any, list[str]]:
    with closing(SqliteCatalog(path)) as catalog:
        problems = catalog.problems()
        return make_catalog.read(catalog), problems


def _index(path: Path) -> None:
    rng = random.Random(5)
    create_index(path)
    with closing(Index(path, write=True)) as index, index.transaction():
        index.add_pack(PackRow(rng.randbytes(16), 1 << 20, 900))
        (pack,) = index.packs()
        kinds = [ObjectKind.RECORD, *list(ObjectKind)]
        index.add_objects(
            IndexEntry(rng.randbytes(32), kinds[n % len(kinds)], pack.id, n * 10, 10, 20, None, 0) for n in range(900)
        )


def _look_at_index(path: Path) -> tuple[Any, list[str]]:
    with closing(Index(path, write=False)) as index:
        problems = index.problems()
        return (list(index.objects()), index.packs(), list(index.records())), problems


@contextmanager
def _flipped(path: Path, data: bytes, at: int, bit: int) -> Iterator[None]:
    remove(path)
    path.write_bytes(data[:at] + bytes((data[at] ^ (1 << bit),)) + data[at + 1 :])
    yield
    remove(path)


@pytest.mark.parametrize(
    ("make", "look"), [(_catalog, _look_at_catalog), (_index, _look_at_index)], ids=["catalog", "index"]
)
def test_a_flip_is_found_or_says_nothing(tmp_path: Path, make: Callable[[Path], None], look: Look) -> None:
    path, rng, found = tmp_path / "it.db", random.Random(808), 0
    make(path)
    expected, data = look(path)[0], path.read_bytes()
    for number in range(FLIPS):
        at = number * 100 // HEAD if number < HEAD else rng.randrange(len(data))  # the head, then anywhere
        bit = rng.randrange(8)
        with _flipped(path, data, at, bit):
            try:
                content, problems = look(path)
            except DataLoss:
                found += 1
                continue
            assert problems or content == expected, (at, bit)
            found += bool(problems)
    assert found > FLIPS * 0.9


@pytest.mark.parametrize(
    ("make", "look"), [(_catalog, _look_at_catalog), (_index, _look_at_index)], ids=["catalog", "index"]
)
def test_what_changes_on_the_disk_meanwhile_is_found(tmp_path: Path, make: Callable[[Path], None], look: Look) -> None:
    """Not answered from memory."""
    path = tmp_path / "it.db"
    make(path)
    opened = SqliteCatalog(path) if make is _catalog else Index(path, write=False)
    with closing(opened):
        assert opened.problems() == []
        with path.open("r+b") as file:
            file.seek(3 * 4096 - 200)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes((byte[0] ^ 1,)))
        assert "checksum" in str(opened.problems())
