"""A stored tree as a view: what it shows, what it reads, and that damage is named, never shown."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest

from snapshotd.errors import DataLoss, NotFound
from snapshotd.repo.base import Tree, TreeEntry
from snapshotd.trees.base import ChangeKind, Entry
from snapshotd.trees.diff import diff
from snapshotd.trees.stored_view import StoredView
from snapshotd.types import BlobID, Kind, TreeID
from tests.memory_repository import MemoryRepository
from tests.stored_trees import OWN, Plan, file, save, save_deep

LINK = TreeEntry(b"", Kind.SYMLINK, 0o777, 1, 2, 3, target=b"\xff/no/where")
FIFO = TreeEntry(b"", Kind.FIFO, 0o600, 0, 0, 0)
DEVICE = TreeEntry(b"", Kind.CHAR_DEVICE, 0o600, 0, 0, 0, rdev=os.makedev(1, 3))


@pytest.fixture
def repository() -> MemoryRepository:
    return MemoryRepository()


def view_of(repository: MemoryRepository, plan: Plan) -> StoredView:
    return StoredView(repository, save(repository, plan))


def contents(fd: int) -> bytes:
    with open(fd, "rb") as f:
        return f.read()


def test_shows_every_kind_with_its_metadata(repository: MemoryRepository) -> None:
    own = OWN._replace(mode=0o1777, uid=7, gid=8, mtime_ns=-1, xattrs=((b"user.a", b"\0"),))
    body = file(repository, b"text", mode=0o4711, uid=5, gid=6, mtime_ns=1 << 62, xattrs=((b"user.n", b"v"),))
    with view_of(repository, {b"d": {b"": own, b"in": b""}, b"f": body, b"l": LINK, b"p": FIFO, b"z": DEVICE}) as view:
        assert [path for path, _ in view.walk()] == [b"d", b"d/in", b"f", b"l", b"p", b"z"]
        entry = view.lstat(b"f")
        assert (entry.kind, entry.mode, entry.uid, entry.gid, entry.size, entry.mtime_ns) == (
            Kind.FILE,
            0o4711,
            5,
            6,
            4,
            1 << 62,
        )
        assert (entry.ctime_ns, entry.nlink, entry.rdev) == (1 << 62, 1, 0)
        assert view.xattrs(b"f") == {b"user.n": b"v"}
        listed = dict(view.list(b""))
        assert listed[b"d"] == view.lstat(b"d") == view.entry_of(view.directory(b"d")) == listed[b"d"]
        assert hash(listed[b"d"]) == hash(view.lstat(b"d"))
        assert listed[b"d"] != listed[b"f"]
        d = view.lstat(b"d")
        assert (d.kind, d.mode, d.uid, d.gid, d.size, d.mtime_ns) == (Kind.DIRECTORY, 0o1777, 7, 8, 0, -1)
        assert view.xattrs(b"d") == {b"user.a": b"\0"}
        assert (view.readlink(b"l"), view.lstat(b"l").size) == (b"\xff/no/where", 10)
        assert view.lstat(b"z").rdev == os.makedev(1, 3)
        assert view.lstat(b"").mode == 0o755
        assert view.xattrs(b"") == {}


def test_marks_of_overlayfs_never_come_out(repository: MemoryRepository) -> None:
    marks = ((b"trusted.overlay.whiteout", b"y"), (b"user.x", b""))
    own = OWN._replace(xattrs=((b"trusted.overlay.opaque", b"y"),))
    with view_of(repository, {b"": own, b"f": file(repository, b"", xattrs=marks)}) as view:
        assert view.xattrs(b"f") == {b"user.x": b""}
        assert view.xattrs(b"") == {}


@pytest.mark.parametrize("path", [b"no", b"d/no", b".", b"..", b"d/..", b"d/../f", b"a\0b", b"x" * 300, b"e", b"g"])
def test_names_that_do_not_exist(repository: MemoryRepository, path: bytes) -> None:
    with view_of(repository, {b"f": b"", b"d": {b"f": b""}}) as view, pytest.raises(FileNotFoundError):
        view.lstat(path)


def test_components_that_are_no_directories(repository: MemoryRepository) -> None:
    with view_of(repository, {b"f": b"", b"l": LINK}) as view:
        for path in (b"f/x", b"l/f"):
            with pytest.raises(NotADirectoryError):
                view.lstat(path)
        with pytest.raises(NotADirectoryError):
            view.list(b"f")


def test_open_refuses_what_is_not_a_regular_file(repository: MemoryRepository) -> None:
    codes = {b"p": errno.EINVAL, b"z": errno.EINVAL, b"l": errno.ELOOP, b"d": errno.EISDIR}
    with view_of(repository, {b"p": FIFO, b"z": DEVICE, b"l": LINK, b"d": {b"x": b""}}) as view:
        for path, code in codes.items():
            for action in (
                lambda c: view.open_child(c),
                lambda c: view.read_child(c, 0, 1),
                lambda c: view.copy_child(c, -1),
            ):
                with pytest.raises(OSError) as caught:
                    action(view.child(path))
                assert caught.value.errno == code
        with pytest.raises(OSError):
            view.readlink(b"p")


def test_files_are_read_with_their_holes(repository: MemoryRepository) -> None:
    """By `open`, `copy_child`, and in every range, against the plain bytes."""
    extents = ((3, 2), (5, 4), (20, 1))
    sparse = file(repository, b"abcdefg", size=30, extents=extents)
    plain = bytes(3) + b"abcdef" + bytes(11) + b"g" + bytes(9)
    hollow = file(repository, b"", size=5, extents=())
    with view_of(repository, {b"s": sparse, b"h": hollow, b"f": b"whole", b"e": b""}) as view:
        for name, expected in ((b"s", plain), (b"h", bytes(5)), (b"f", b"whole"), (b"e", b"")):
            child = view.child(name)
            assert contents(view.open(name)) == expected
            for start in range(len(expected) + 2):
                for length in (0, 1, 2, 7, 100):
                    assert view.read_child(child, start, length) == expected[start : start + length], (
                        name,
                        start,
                        length,
                    )
            fd = os.memfd_create("target")
            assert view.copy_child(child, fd) == len(expected)
            os.lseek(fd, 0, os.SEEK_SET)
            assert contents(fd) == expected


@pytest.mark.parametrize("size", [3 << 20, 9 << 20])
def test_large_files_and_long_holes(repository: MemoryRepository, size: int, tmp_path: object) -> None:
    data = os.urandom(size)
    entry = file(repository, data, size=1 << 40, extents=((4096, size // 2), (1 << 39, size - size // 2)))
    view = StoredView(repository, save(repository, {b"s": entry, b"f": data}), scratch=str(tmp_path))
    assert contents(view.open(b"f")) == data
    fd = view.open(b"s")
    try:
        assert os.fstat(fd).st_size == 1 << 40
        assert os.fstat(fd).st_blocks * 512 < size + (1 << 20)
        assert os.pread(fd, size // 2, 4096) == data[: size // 2]
        assert os.pread(fd, size, 1 << 39)[: size - size // 2] == data[size // 2 :]
        assert os.lseek(fd, 0, os.SEEK_CUR) == 0
    finally:
        os.close(fd)
    assert os.listdir(str(tmp_path)) == []
    assert view.read_child(view.child(b"s"), (1 << 39) - 10, 20) == bytes(10) + data[size // 2 : size // 2 + 10]


def test_one_file_one_number(repository: MemoryRepository) -> None:
    one = file(repository, b"x", link=9, nlink=2)
    other = file(repository, b"x", link=8, nlink=2)
    view = view_of(repository, {b"a": one, b"b": {b"c": one}, b"d": other})
    with view:
        assert view.lstat(b"a").inode == view.lstat(b"b/c").inode != view.lstat(b"d").inode
        assert view.lstat(b"a").nlink == 2
        variants: list[dict[str, object]] = [
            {"mode": 1},
            {"uid": 1},
            {"gid": 1},
            {"mtime_ns": 1},
            {"size": 2},
            {"content": None},
            {"extents": ((0, 1),)},
            {"target": b"x"},
            {"rdev": 1},
            {"link": 1},
            {"nlink": 3},
            {"xattrs": ((b"a", b"b"),)},
            {"xattrs": ((b"a", b""), (b"b", b""))},
            {"kind": Kind.FIFO},
        ]
        root = view.directory()
        numbers = {view.child_of(root, one._replace(name=b"v", **variant)).entry.inode for variant in variants}  # type: ignore[arg-type]
        assert len(numbers | {view.lstat(b"a").inode}) == len(variants) + 1


def test_diff_skips_equal_subtrees_without_reading_them(repository: MemoryRepository) -> None:
    same: Plan = {b"deep": {b"f": b"x"}}
    a = save(repository, {b"same": same, b"d": {b"f": b"old"}, b"gone": b""})
    b = save(repository, {b"same": same, b"d": {b"f": b"new"}})
    del repository.trees[save(repository, same)]
    with StoredView(repository, a) as left, StoredView(repository, b) as right:
        changes = [(change.path, change.kind) for change in diff(left, right)]
    assert changes == [(b"d/f", ChangeKind.CHANGED), (b"gone", ChangeKind.DELETED)]


def test_deeper_than_any_path(repository: MemoryRepository) -> None:
    depth, name = 6000, b"d" * 20
    tree = save_deep(repository, depth, name, {b"end": b"text"})
    with StoredView(repository, tree) as view:
        deepest = b"/".join([name] * depth)
        assert view.lstat(deepest + b"/end").size == 4
        assert contents(view.open(deepest + b"/end")) == b"text"
        assert sum(1 for _ in view.walk()) == depth + 1
        directory = view.directory()
        for _ in range(depth):
            directory = view.enter(directory, name)
        assert [child.name for child in view.children(directory)] == [b"end"]
        repository.contents.clear()
        with pytest.raises(DataLoss, match="of tree"):
            view.open(deepest + b"/end")


def test_a_missing_root_is_not_found(repository: MemoryRepository) -> None:
    with pytest.raises(NotFound):
        StoredView(repository, TreeID("0" * 64))


class Damaged(MemoryRepository):
    """Loads some of a content's bytes and then finds that the rest is damaged."""

    def load(self, content: BlobID) -> Iterator[bytes]:
        yield self.contents[content][:1]
        raise DataLoss("pack 7 is damaged")

    def read(self, content: BlobID, offset: int, length: int) -> bytes:
        raise DataLoss("pack 7 is damaged")


def test_damage_names_the_file() -> None:
    repository = Damaged()
    tree = save(repository, {b"d": {b"f\n": b"text"}})
    with StoredView(repository, tree) as view:
        child = view.child(b"d/f\n")
        for action in (lambda: view.open_child(child), lambda: view.read_child(child, 1, 2)):
            with pytest.raises(DataLoss) as caught:
                action()
            assert caught.value.message == f"file 'd/f\\n' of tree {tree}: pack 7 is damaged"


def test_damage_of_one_directory_does_not_hide_the_others(repository: MemoryRepository) -> None:
    gone = save(repository, {b"x": b"1"})
    with view_of(repository, {b"a": {b"x": b"1"}, b"b": {b"y": b"2"}}) as view:
        del repository.trees[gone]
        assert [(name, entry.kind) for name, entry in view.list(b"")] == [
            (b"a", Kind.DIRECTORY),
            (b"b", Kind.DIRECTORY),
        ]
        assert [name for name, _ in view.list(b"b")] == [b"y"]
        for action in (
            lambda: view.list(b"a"),
            lambda: view.list(b"")[0][1].mode,
            lambda: view.xattrs(b"a"),
            lambda: list(view.walk()),
        ):
            with pytest.raises(DataLoss, match="directory 'a' of tree"):
                action()


@pytest.mark.parametrize(
    ("data", "size", "extents"),
    [
        (b"four", 3, None),
        (b"four", 5, None),
        (b"four", -4, None),
        (b"", 5, None),
        (b"", -5, None),
        (b"four", 9, ((0, 3),)),
        (b"four", 9, ((0, 5),)),
        (b"four", 9, ((0, 2), (3, 4))),
        (b"four", 9, ((0, 2), (1, 2))),
        (b"four", 9, ((4, 2), (0, 2))),
        (b"four", 9, ((-4, 4),)),
        (b"four", 9, ((6, 4),)),
        (b"four", 9, ((0, 0), (0, 4))),
        (b"", 9, ((0, 4),)),
        (b"four", 9, ((0, 1 << 60),)),
        (b"four", 9, ()),
    ],
)
def test_sizes_that_cannot_be(
    repository: MemoryRepository, data: bytes, size: int, extents: tuple[tuple[int, int], ...] | None
) -> None:
    with (
        view_of(repository, {b"f": file(repository, data, size=size, extents=extents)}) as view,
        pytest.raises(DataLoss, match="file 'f'"),
    ):
        os.close(view.open(b"f"))


@pytest.mark.parametrize("name", [b"..", b".", b"", b"a/../../b"])
def test_names_that_cannot_be(repository: MemoryRepository, name: bytes) -> None:
    """No repository gives them out; if one did, they would be where a restore writes."""
    tree = save(repository, {b"x": b""})
    repository.trees[tree] = Tree(OWN, (file(repository, b"")._replace(name=name),))
    with StoredView(repository, tree) as view, pytest.raises(DataLoss, match="impossible name"):
        view.list(b"")


def test_lazy_entries_are_entries(repository: MemoryRepository) -> None:
    with view_of(repository, {b"d": {b"x": b""}}) as view:
        entry = view.list(b"")[0][1]
        assert isinstance(entry, Entry)
        with pytest.raises(AttributeError):
            entry.no_such_thing  # type: ignore[attr-defined]  # noqa: B018
