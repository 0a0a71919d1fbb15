"""File contents in the archive: whole or streamed, holes, files that are mostly hole."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path

import pytest
from archive_rig import Recorder, at, layer, run

from snapshotd.errors import LimitExceeded
from snapshotd.repo.base import TreeEntry
from snapshotd.trees import archive, archive_data
from snapshotd.trees.archive_data import find_extents
from tests.memory_repository import MemoryRepository


def logical(repository: MemoryRepository, entry: TreeEntry) -> bytes:
    content = b"" if entry.content is None else repository.contents[entry.content]
    if entry.extents is None:
        return content
    data, done = bytearray(entry.size), 0
    for start, length in entry.extents:
        data[start : start + length] = content[done : done + length]
        done += length
    assert done == len(content)
    return bytes(data)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_sizes_around_the_border_between_whole_and_streamed(tmp_path: Path, size: int) -> None:
    root = layer(tmp_path / "l", {})
    data = random.Random(size).randbytes(size)
    (root / "f").write_bytes(data)
    repository = Recorder()
    entry = at(repository, run(repository, root).tree, b"f")
    assert (entry.size, entry.extents, logical(repository, entry)) == (size, None, data)
    assert repository.streamed == (size > 1 << 20)


@pytest.mark.parametrize("seed", range(20))
def test_sparse_files_keep_their_data_and_holes(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    root = layer(tmp_path / "l", {})
    with open(root / "f", "wb") as f:
        f.truncate(rng.randrange(1, 4 << 20))
        for _ in range(rng.randrange(6)):
            f.seek(rng.randrange(4 << 20))
            f.write(rng.randbytes(rng.randrange(1, 200_000)))
    repository = MemoryRepository()
    entry = at(repository, run(repository, root).tree, b"f")
    assert logical(repository, entry) == (root / "f").read_bytes()
    if entry.extents is not None:
        assert all(length > 0 for _, length in entry.extents)
        assert all(a + length < b for (a, length), (b, _) in pairwise(entry.extents))
        stored = 0 if entry.content is None else len(repository.contents[entry.content])
        assert stored <= os.stat(root / "f").st_blocks * 512


MIB = 1 << 20


def sparse(path: Path, size: int, *data: tuple[int, bytes]) -> Path:
    with path.open("wb") as f:
        f.truncate(size)
        for offset, piece in data:
            f.seek(offset)
            f.write(piece)
    return path


@pytest.mark.parametrize(
    ("grows_to", "written", "extents"),
    [
        (5 * MIB, [], ((MIB, 4096),)),
        (3 * MIB, [], ((MIB, 4096),)),
        (4 * MIB, [(3 * MIB + 100, b"y")], ((MIB, 4096), (3 * MIB, 4096))),
        (4 * MIB, [(MIB + 4096, b"y" * 4097)], ((MIB, 3 * 4096),)),
        (5 * MIB + 1, [(4 * MIB, bytes(MIB)), (5 * MIB, b"y")], ((MIB, 4096), (4 * MIB, MIB + 1))),
        (4 * MIB, [(0, b"y" * 4 * MIB)], None),
        (4096, [], ()),
    ],
)
def test_old_holes_that_became_zeros_are_holes(
    tmp_path: Path, grows_to: int, written: list[tuple[int, bytes]], extents: tuple[tuple[int, int], ...] | None
) -> None:
    """A file system without a word for holes gives zeros when the kernel copies the file up. Beyond the old end, zeros
    are what the program wrote."""
    repository = MemoryRepository()
    before = layer(tmp_path / "before", {})
    old = sparse(before / "f", 4 * MIB, (MIB, b"x" * 4096)).read_bytes()
    tree = run(repository, before).tree
    assert at(repository, tree, b"f").extents == ((MIB, 4096),)
    after = layer(tmp_path / "after", {})
    (after / "f").write_bytes(old)
    os.truncate(after / "f", grows_to)
    with (after / "f").open("r+b") as f:
        for offset, piece in written:
            f.seek(offset)
            f.write(piece)
    entry = at(repository, run(repository, after, tree).tree, b"f")
    assert entry.extents == extents
    assert logical(repository, entry) == (after / "f").read_bytes()


def test_nothing_but_a_hole(tmp_path: Path) -> None:
    root = layer(tmp_path / "l", {})
    (root / "f").touch()
    os.truncate(root / "f", 10 << 30)
    repository = Recorder()
    entry = at(repository, run(repository, root).tree, b"f")
    assert (entry.size, entry.extents, entry.content) == (10 << 30, (), None)
    assert repository.saved_contents == []


def test_reserved_space_beyond_the_end_is_not_data(tmp_path: Path) -> None:
    root = layer(tmp_path / "l", {})
    with open(root / "f", "wb") as f:
        f.write(b"x" * 5000)
        f.flush()
        fcntl.flock(f, fcntl.LOCK_EX)
        os.posix_fallocate(f.fileno(), 0, 1 << 20)
        f.truncate(1 << 20)
        f.seek(900_000)
        f.write(b"y" * 10)
    repository = MemoryRepository()
    entry = at(repository, run(repository, root).tree, b"f")
    assert logical(repository, entry) == (root / "f").read_bytes()


class FakeFile:
    """lseek of a file whose data lies where a test wants it: what no real file system of a test machine would say."""

    def __init__(self, data: list[tuple[int, int]]) -> None:
        self.data = data

    def lseek(self, _: int, offset: int, whence: int) -> int:
        index = bisect_right(self.data, offset, key=lambda piece: piece[1])
        if index < len(self.data):
            start, end = self.data[index]
            if whence == os.SEEK_DATA:
                return max(start, offset)
            return offset if offset < start else end
        if whence == os.SEEK_DATA:
            raise OSError(errno.ENXIO, "no data")
        return offset


def fake(monkeypatch: pytest.MonkeyPatch, data: list[tuple[int, int]]) -> FakeFile:
    file = FakeFile(data)
    monkeypatch.setattr(os, "lseek", file.lseek)
    return file


def test_data_beyond_the_end_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, [(10, 20), (90, 200), (300, 400)])
    assert find_extents(3, 100) == (((10, 10), (90, 10)), 0)
    assert find_extents(3, 90) == (((10, 10),), 0)


def test_a_file_system_that_contradicts_itself_is_no_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "lseek", lambda fd, offset, whence: offset)
    with pytest.raises(OSError, match="contradict") as caught:
        find_extents(3, 100)
    assert caught.value.errno == errno.EIO


def test_too_many_extents_are_joined_over_the_smallest_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    data, at_ = [], 1000
    for _ in range(10_000):
        end = at_ + rng.randrange(1, 50)
        data.append((at_, end))
        at_ = end + rng.randrange(1, 100_000)
    fake(monkeypatch, data)
    extents, zeros = find_extents(3, at_ + 5)
    assert extents is not None
    assert len(extents) == archive_data.MOST_EXTENTS
    covered = sum(length for _, length in extents)
    assert covered == sum(end - start for start, end in data) + zeros
    gaps = sorted(b - a for (_, a), (b, _) in pairwise(data))
    assert zeros == sum(gaps[: 10_000 - archive_data.MOST_EXTENTS])
    assert (extents[0][0], sum(extents[-1])) == (data[0][0], data[-1][1])
    position = 0
    for start, end in data:  # all data is inside
        while sum(extents[position]) < end:
            position += 1
        assert extents[position][0] <= start


def test_a_really_fragmented_file(tmp_path: Path) -> None:
    root = layer(tmp_path / "l", {})
    rng = random.Random(1)
    with open(root / "f", "wb") as f:
        offset = 0
        for _ in range(5000):
            f.seek(offset)
            f.write(rng.randbytes(8))
            offset += 4096 * rng.randrange(2, 5)
        f.truncate(offset)
    repository = MemoryRepository()
    entry = at(repository, run(repository, root).tree, b"f")
    assert entry.extents is not None
    assert len(entry.extents) == archive_data.MOST_EXTENTS
    assert logical(repository, entry) == (root / "f").read_bytes()


def test_years_of_zeros_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = layer(tmp_path / "l", {})
    with open(root / "f", "wb") as f:
        f.truncate(8 << 20)
        for i in range(6):
            f.seek((i << 20) + 5000)
            f.write(b"x")
    monkeypatch.setattr(archive_data, "MOST_EXTENTS", 2)
    monkeypatch.setattr(archive, "_MOST_ZERO_BYTES", 3 << 20)
    with pytest.raises(LimitExceeded, match="'f'"):
        run(MemoryRepository(), root)
    monkeypatch.setattr(archive, "_MOST_ZERO_BYTES", 8 << 20)
    repository = MemoryRepository()
    assert logical(repository, at(repository, run(repository, root).tree, b"f")) == (root / "f").read_bytes()
