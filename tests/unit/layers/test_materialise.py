"""Stored trees written into directories: by several threads, exactly, and without leaving anything open."""

from __future__ import annotations

import errno
import os
import stat
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.errors import DataLoss
from snapshotd.kernel.files import DIR_FLAGS, remove_tree
from snapshotd.repo.base import TreeEntry
from snapshotd.trees import materialise as module
from snapshotd.trees.base import RestoreReport
from snapshotd.trees.difference import DifferenceView
from snapshotd.trees.materialise import materialise
from snapshotd.trees.stored_view import StoredView
from snapshotd.trees.view import View
from snapshotd.types import BlobID, Kind
from tests import stored_trees
from tests.memory_repository import MemoryRepository
from tests.stored_trees import Plan, save, save_deep

ME = {"uid": os.getuid(), "gid": os.getgid()}
OWN = stored_trees.OWN._replace(**ME)  # type: ignore[arg-type]


def file(repository: MemoryRepository, data: bytes, **more: object) -> TreeEntry:
    return stored_trees.file(repository, data, **{**ME, **more})


def node(kind: Kind, mode: int, mtime_ns: int, **more: object) -> TreeEntry:
    return TreeEntry(b"", kind, mode, os.getuid(), os.getgid(), mtime_ns)._replace(**more)  # type: ignore[arg-type]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "target"
    path.mkdir()
    return path


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several threads also where the machine has one processor; afterwards no thread and no descriptor is left."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("materialise")] == []


def write(view: View, target: Path, *, whiteouts: bool = False) -> RestoreReport:
    fd = os.open(target, DIR_FLAGS)
    try:
        return materialise(view, b"", fd, whiteouts=whiteouts)
    finally:
        os.close(fd)


@pytest.mark.parametrize("open_ends", [3, 4096])
def test_many_files_of_all_sizes(target: Path, monkeypatch: pytest.MonkeyPatch, open_ends: int) -> None:
    monkeypatch.setattr(module, "_OPEN_ENDS", open_ends)
    repository, expected = MemoryRepository(), {}
    plan: dict[bytes, Plan | TreeEntry] = {b"": OWN}
    for d in range(30):
        files: dict[bytes, bytes | TreeEntry | Plan] = {
            b"": OWN._replace(mtime_ns=1000 + d, mode=(0o755, 0o1777, 0o2710)[d % 3])
        }
        for f in range((0, 1, 200)[d % 3]):
            data = os.urandom((f * 37) % 5000 + (2_000_000 if f == 100 else 0))
            files[b"f%d" % f] = file(
                repository, data, mtime_ns=5000 + f, mode=(0o644, 0o600, 0o4755, 0o777, 0o400)[f % 5]
            )
            expected[f"d{d}/f{f}"] = data, 5000 + f, (0o644, 0o600, 0o4755, 0o777, 0o400)[f % 5]
        plan[b"d%d" % d] = files
    mask = os.umask(0o077)
    try:
        with StoredView(repository, save(repository, plan)) as view:
            report = write(view, target)
    finally:
        os.umask(mask)
    size = sum(len(data) for data, _, _ in expected.values())
    assert report == RestoreReport(len(expected), 30, size, ())
    for name, (data, mtime_ns, mode) in expected.items():
        st = os.stat(target / name)
        assert ((target / name).read_bytes(), st.st_mtime_ns, stat.S_IMODE(st.st_mode)) == (data, mtime_ns, mode)
    for d in range(30):
        st = os.stat(target / f"d{d}")
        assert (st.st_mtime_ns, stat.S_IMODE(st.st_mode)) == (1000 + d, (0o755, 0o1777, 0o2710)[d % 3])
    assert os.stat(target).st_mtime_ns == OWN.mtime_ns


def test_hard_links_of_every_kind_across_directories(target: Path) -> None:
    repository = MemoryRepository()
    one = file(repository, b"x" * 100, link=1, nlink=3)
    link = node(Kind.SYMLINK, 0o777, 5, target=b"t", link=2, nlink=2)
    fifo = node(Kind.FIFO, 0o644, 5, link=3, nlink=2)
    alone = file(repository, b"", link=4, nlink=2)  # its other name is gone
    part: Plan = {b"": OWN, b"one": one, b"link": link, b"fifo": fifo}
    with StoredView(
        repository, save(repository, {b"": OWN, b"a": part, b"b": part, b"one": one, b"alone": alone})
    ) as view:
        report = write(view, target)
    assert (report.files, report.warnings, report.bytes) == (8, (), 100)
    for name in ("one", "link", "fifo"):
        assert os.lstat(target / "a" / name).st_ino == os.lstat(target / "b" / name).st_ino
    assert os.stat(target / "one").st_nlink == 3
    assert os.stat(target / "alone").st_nlink == 1


class Damaged(MemoryRepository):
    def load(self, content: BlobID) -> Iterator[bytes]:
        if self.contents[content] == b"damaged":
            raise DataLoss("pack 7 is damaged")
        return super().load(content)


def test_damage_found_by_a_thread_is_told(target: Path) -> None:
    repository = Damaged()
    files: Plan = {
        b"": OWN,
        **{b"f%03d" % n: file(repository, b"damaged" if n == 150 else b"fine") for n in range(300)},
    }
    with (
        StoredView(repository, save(repository, {b"": OWN, b"d": files, b"e": files})) as view,
        pytest.raises(DataLoss, match=r"^file 'd/f150' of tree [0-9a-f]+: pack 7 is damaged$"),
    ):
        write(view, target)
    assert (target / "d/f000").read_bytes() == b"fine"


def test_what_cannot_be_held_is_told_by_path(disk_path: Path) -> None:
    """From threads as well; memory would hold the huge file. A failed file leaves nothing, and its directory keeps its time."""
    repository = MemoryRepository()
    entries: Plan = {
        b"": OWN,
        b"\xff" * 255: file(repository, b"x"),
        b"huge": file(repository, b"x", size=(1 << 63) - 1, extents=((0, 1),)),
        b"null": node(Kind.CHAR_DEVICE, 0o600, 0),
        b"ok": file(repository, b"x"),
        b"socket": node(Kind.SOCKET, 0o600, 0),
    }
    tree = save(repository, {b"": OWN, b"d": entries})
    with StoredView(repository, tree) as view:
        report = write(view, disk_path)
    assert report.files == 2
    assert sorted(warning.split(" ")[0] for warning in report.warnings) == ["'d/huge'", "'d/null'", "'d/socket'"]
    assert sorted(os.listdir(os.fsencode(disk_path / "d"))) == [b"ok", b"\xff" * 255]
    assert os.stat(disk_path / "d").st_mtime_ns == OWN.mtime_ns


def test_a_layer_has_whiteouts_and_sockets(target: Path) -> None:
    repository = MemoryRepository()
    below = save(repository, {b"": OWN, b"gone": b"", b"d": {b"": OWN, b"gone": b"", b"same": b""}})
    socket = node(Kind.SOCKET, 0o640, 7)
    tree = save(repository, {b"": OWN, b"s": socket, b"d": {b"": OWN, b"same": b"", b"new": file(repository, b"x")}})
    with DifferenceView(repository, tree, below) as view:
        report = write(view, target, whiteouts=True)
    assert report == RestoreReport(4, 1, 1, ())
    assert sorted(os.listdir(target)) == ["d", "gone", "s"]
    assert sorted(os.listdir(target / "d")) == ["gone", "new"]
    for name in ("gone", "d/gone"):
        st = os.lstat(target / name)
        assert stat.S_ISCHR(st.st_mode)
        assert st.st_rdev == 0
    st = os.lstat(target / "s")
    assert (stat.S_ISSOCK(st.st_mode), stat.S_IMODE(st.st_mode), st.st_mtime_ns) == (True, 0o640, 7)
    assert os.stat(target / "d").st_mtime_ns == OWN.mtime_ns


def test_access_lists_of_the_target_are_not_inherited(target: Path) -> None:
    entries = [(1, 7, 0xFFFFFFFF), (2, 7, 4242), (4, 0, 0xFFFFFFFF), (16, 7, 0xFFFFFFFF), (32, 0, 0xFFFFFFFF)]
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    for name in ("system.posix_acl_default", "system.posix_acl_access"):
        try:
            os.setxattr(target, name, acl)
        except OSError as exc:
            if exc.errno != errno.EOPNOTSUPP:
                raise
            pytest.skip("the file system of temporary files has no access lists")
    repository = MemoryRepository()
    with StoredView(repository, save(repository, {b"": OWN, b"d": {b"": OWN, b"f": file(repository, b"x")}})) as view:
        assert write(view, target).warnings == ()
    for path in (target, target / "d", target / "d/f"):
        assert [name for name in os.listxattr(path) if name.startswith("system.")] == []
    assert stat.S_IMODE(os.stat(target / "d/f").st_mode) == 0o644


def test_deeper_than_any_path(target: Path) -> None:
    """Every level has files before and after the way down, and its own time."""
    repository, depth = MemoryRepository(), 1500
    tree = save_deep(repository, depth, b"d" * 100, {b"": OWN, b"end": file(repository, b"x")})
    with StoredView(repository, tree) as view:
        report = write(view, target)
    assert (report.files, report.directories) == (1, depth)
    fd = os.open(target, DIR_FLAGS)
    for _ in range(depth):
        deeper = os.open(b"d" * 100, DIR_FLAGS, dir_fd=fd)
        os.close(fd)
        fd = deeper
        assert os.fstat(fd).st_mtime_ns == OWN.mtime_ns
    assert os.listdir(fd) == ["end"]
    os.close(fd)
    fd = os.open(target.parent, DIR_FLAGS)
    remove_tree(fd, target.name)
    os.close(fd)
