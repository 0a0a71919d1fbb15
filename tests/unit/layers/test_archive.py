"""Applying a layer to a stored tree: entries, sparse files, hard links, what is left alone, hostile layers. No overlay,
mostly no root."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import stat
from pathlib import Path

import pytest
from archive_rig import Recorder, at, layer, names, run

from snapshotd.repo.base import TreeEntry
from snapshotd.trees import archive, archive_links
from snapshotd.types import BlobID, Kind, TreeID
from tests.archives import NO_REDIRECTS
from tests.capabilities import require
from tests.memory_repository import MemoryRepository

FAR_NS = 9_000_000_000 * 10**9 + 1


def own(repository: MemoryRepository, tree: TreeID) -> TreeEntry:
    return repository.trees[tree].own


# -- what is left alone ------------------------------------------------------------------------------------------------


def test_only_the_directories_on_the_path_of_a_change_are_touched(tmp_path: Path) -> None:
    repository = Recorder()
    image = layer(tmp_path / "image", {f"d{i}/e{j}/f": f"{i}{j}" for i in range(5) for j in range(5)})
    first = run(repository, image, marks=False)
    assert first.entries == 5 + 25 + 25
    repository.forget()
    old = at(repository, first.tree, b"d2/e3/f")

    second = run(repository, layer(tmp_path / "l", {"d2/e3/f": "new"}), first.tree)
    path = [first.tree, at(repository, first.tree, b"d2").tree, at(repository, first.tree, b"d2/e3").tree]
    assert repository.loaded == path
    assert [previous for _, previous in repository.saved_trees] == path[::-1]
    assert repository.saved_contents == [(3, old.content)]
    assert second.entries == 3
    for i in range(5):
        for j in range(5):
            same = at(repository, first.tree, b"d%d/e%d" % (i, j)) == at(repository, second.tree, b"d%d/e%d" % (i, j))
            assert same == ((i, j) != (2, 3))
    assert names(repository, at(repository, second.tree, b"d2").tree) == [b"e%d" % j for j in range(5)]


def test_an_empty_layer_keeps_everything_but_the_roots_metadata(tmp_path: Path) -> None:
    repository = MemoryRepository()
    image = run(repository, layer(tmp_path / "image", {"a": "1", "d/b": "2"}), marks=False)
    empty = layer(tmp_path / "empty", {})
    empty.chmod(0o1750)
    after = run(repository, empty, image.tree)
    assert after.entries == 0
    assert repository.trees[after.tree].entries == repository.trees[image.tree].entries
    assert own(repository, after.tree).mode == 0o1750


def test_over_nothing(tmp_path: Path) -> None:
    repository = MemoryRepository()
    assert names(repository, run(repository, layer(tmp_path / "l", {"x/y": "1"})).tree) == [b"x"]


def test_an_image_has_no_parent(tmp_path: Path) -> None:
    repository = MemoryRepository()
    parent = run(repository, layer(tmp_path / "a", {})).tree
    with pytest.raises(ValueError, match="no parent"):
        run(repository, tmp_path / "a", parent, marks=False)


def test_a_directory_over_a_file_and_a_file_over_a_directory(tmp_path: Path) -> None:
    repository = Recorder()
    image = run(repository, layer(tmp_path / "image", {"x": "file", "y/in": "dir"}), marks=False)
    repository.forget()
    after = run(repository, layer(tmp_path / "l", {"x/in": "dir", "y": "file"}), image.tree)
    assert names(repository, after.tree) == [b"x", b"y"]
    assert names(repository, at(repository, after.tree, b"x").tree) == [b"in"]
    assert at(repository, after.tree, b"y").kind is Kind.FILE
    assert repository.saved_contents == [(4, None), (3, None)]  # y, then x/in: neither had a file before


def test_the_same_layer_makes_the_same_tree(tmp_path: Path) -> None:
    root = layer(tmp_path / "l", {"a": "1", "d/b": "2"})
    os.link(root / "a", root / "d/c")
    assert run(MemoryRepository(), root).tree == run(MemoryRepository(), root).tree


# -- entries -----------------------------------------------------------------------------------------------------------


def test_metadata_are_exact(tmp_path: Path) -> None:
    root = layer(tmp_path / "l", {"old": "1", "d/future": "2", "set": ""})
    os.utime(root / "old", ns=(0, -1_234_567_891_234_567_891))
    os.utime(root / "d/future", ns=(0, FAR_NS))
    os.chmod(root / "set", 0o7751)
    os.chmod(root / "d", 0o3705)
    os.utime(root / "d", ns=(0, -1))
    os.symlink(b"\xff/../\n" * 500, os.fsencode(root / "link"))
    os.utime(root / "link", ns=(0, 7), follow_symlinks=False)
    repository = MemoryRepository()
    tree = run(repository, root).tree
    expected = {path: os.lstat(root / path).st_mtime_ns for path in ("old", "d/future", "link", "d")}
    assert expected["old"] < 0  # the file system of the test holds what the test is about
    assert at(repository, tree, b"old").mtime_ns == expected["old"]
    assert at(repository, tree, b"d/future").mtime_ns == expected["d/future"]
    assert at(repository, tree, b"set").mode == 0o7751
    assert at(repository, tree, b"set").content is None
    directory = own(repository, at(repository, tree, b"d").tree or TreeID(""))
    assert (directory.mode, directory.mtime_ns) == (0o3705, -1)
    link = at(repository, tree, b"link")
    assert (link.kind, link.target, link.size, link.mtime_ns) == (Kind.SYMLINK, b"\xff/../\n" * 500, 0, 7)
    assert (link.uid, link.gid) == (os.getuid(), os.getgid())


def test_any_name_can_be(tmp_path: Path) -> None:
    nasty = sorted(
        [
            b"\xff\xfe",
            b"a\nb",
            b" ",
            b"-rf",
            b"x.",
            b"\xc3\xa9",
            b"e\xcc\x81",
            b"A",
            b"a",
            b"...",
            b"n" * 255,
            b"\x1b[2J",
        ]
    )
    root = os.fsencode(layer(tmp_path / "l", {}))
    for name in nasty:
        with open(os.path.join(root, name), "wb") as f:
            f.write(name)
    repository = MemoryRepository()
    tree = run(repository, tmp_path / "l").tree
    assert names(repository, tree) == nasty
    assert [repository.contents[entry.content or BlobID("")] for entry in repository.trees[tree].entries] == nasty


def test_extended_attributes_sorted_and_of_overlayfs_only_its_own_left_out(tmp_path: Path) -> None:
    root = layer(tmp_path / "l", {"f": "1", "d/x": ""})
    given = {
        "user.z%": b"",
        "user.a=\n": b"\0\xff",
        "user.overlay.opaque": b"y",
        "user.overlay.whiteout": b"y",
        "user.m": b"v" * 1000,
    }
    for path in ("f", "d", "d/x"):
        for name, value in given.items():
            os.setxattr(root / path, name, value)
    repository = MemoryRepository()
    tree = run(repository, root).tree
    expected = tuple(sorted((os.fsencode(name), value) for name, value in given.items()))
    assert at(repository, tree, b"f").xattrs == expected
    assert at(repository, tree, b"d/x").xattrs == expected
    assert own(repository, at(repository, tree, b"d").tree or TreeID("")).xattrs == expected


def test_attributes_that_cannot_be_recorded_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E2BIG needs a file system without a small limit (tests/system makes one); here, the same by bounds that a small
    file meets."""
    monkeypatch.setattr(archive, "MOST_BYTES", 100)
    root = layer(tmp_path / "l", {"many\n": "1", "few": "2", "d/x": ""})
    os.setxattr(root / "many\n", "user.a", b"x" * 100)
    os.setxattr(root / "d", "user.a", b"x" * 100)
    os.setxattr(root / "few", "user.a", b"x")
    repository = MemoryRepository()
    applied = run(repository, root)
    assert at(repository, applied.tree, b"many\n").xattrs == ()
    assert repository.contents[at(repository, applied.tree, b"many\n").content or BlobID("")] == b"1"
    assert at(repository, applied.tree, b"few").xattrs == ((b"user.a", b"x"),)
    assert [warning.split(":")[0] for warning in applied.warnings] == ["'many\\n'", "'d'"]


def test_attributes_are_bounded_for_each_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MOST_BYTES_PER_DIRECTORY", 100)
    root = layer(tmp_path / "l", {"a": "", "b": "", "c": "", "d/e": ""})
    for path in ("a", "b", "c", "d/e"):
        os.setxattr(root / path, "user.a", b"x" * 40)
    repository = MemoryRepository()
    applied = run(repository, root)
    assert [bool(at(repository, applied.tree, path).xattrs) for path in (b"a", b"b", b"c", b"d/e")] == [
        True,
        True,
        False,
        True,
    ]
    assert [warning.split(":")[0] for warning in applied.warnings] == ["'c'"]


def test_warnings_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MOST_BYTES", 0)
    root = layer(tmp_path / "l", {f"f{i}": "" for i in range(150)})
    for path in root.iterdir():
        os.setxattr(path, "user.a", b"x")
    warnings = run(MemoryRepository(), root).warnings
    assert len(warnings) == 101
    assert warnings[-1] == "and 50 more like these"


def test_fifos_and_sockets_are_recorded_and_not_opened(tmp_path: Path) -> None:
    root = layer(tmp_path / "l", {})
    os.mkfifo(root / "fifo", 0o640)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(root / "socket"))
    repository = MemoryRepository()
    tree = run(repository, root).tree
    assert [entry.kind for entry in repository.trees[tree].entries] == [Kind.FIFO, Kind.SOCKET]
    assert all(entry.content is None and entry.rdev == 0 for entry in repository.trees[tree].entries)


def test_links_out_of_the_layer_are_text(tmp_path: Path) -> None:
    root = layer(tmp_path / "l", {})
    for name, target in {
        "a": "/proc/self/root",
        "b": "/proc/self/fd/0",
        "c": "../" * 40 + "etc/passwd",
        "d": "/",
    }.items():
        os.symlink(target, root / name)
    repository = Recorder()
    tree = run(repository, root).tree
    assert [entry.kind for entry in repository.trees[tree].entries] == [Kind.SYMLINK] * 4
    assert repository.saved_contents == []


# -- hard links --------------------------------------------------------------------------------------------------------


def test_link_groups(tmp_path: Path) -> None:
    root = layer(tmp_path / "l", {"z": "shared", "a/one": "shared", "single": "x", "outside": "y"})
    os.unlink(root / "z")
    os.link(root / "a/one", root / "z")
    os.link(root / "a/one", root / "a.b")
    os.link(root / "outside", tmp_path / "elsewhere")
    os.symlink("t", root / "link")
    os.link(root / "link", root / "a/link", follow_symlinks=False)
    os.mkfifo(root / "fifo")
    os.link(root / "fifo", root / "fifo2")
    repository = Recorder()
    applied = run(repository, root)
    entry = {
        path: at(repository, applied.tree, path)
        for path in (b"z", b"a/one", b"a.b", b"single", b"outside", b"link", b"a/link")
    }
    link = int.from_bytes(hashlib.blake2b(b"salta/one", digest_size=8).digest())
    assert {entry[path].link for path in (b"z", b"a/one", b"a.b")} == {link}
    assert {entry[path].nlink for path in (b"z", b"a/one", b"a.b")} == {3}
    assert (entry[b"single"].link, entry[b"single"].nlink) == (0, 1)
    assert (entry[b"outside"].link, entry[b"outside"].nlink) == (0, 1)  # its other name is no part of the layer
    assert entry[b"link"].link == entry[b"a/link"].link not in (0, link)
    assert at(repository, applied.tree, b"fifo").link == at(repository, applied.tree, b"fifo2").link != 0
    assert sorted(size for size, _ in repository.saved_contents) == [1, 1, 6]  # each inode is read once
    assert run(repository, root, salt=b"other").tree != applied.tree
    blocks = {st.st_ino: st.st_blocks for st in (os.lstat(path) for path in [root, *root.rglob("*")])}
    assert applied.bytes == 512 * sum(blocks.values())


class Colliding:
    """A hash that is 0 for every path."""

    def __init__(self, data: bytes, digest_size: int) -> None:
        self.digest_size = digest_size

    def copy(self) -> Colliding:
        return self

    def update(self, data: bytes) -> None:
        """All the same."""

    def digest(self) -> bytes:
        return bytes(self.digest_size)


def test_groups_whose_numbers_collide_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_links, "blake2b", Colliding)
    root = layer(tmp_path / "l", {"a": "1", "b": "2", "c": "3"})
    for path in "abc":
        os.link(root / path, root / f"{path}{path}")
    repository = MemoryRepository()
    entries = repository.trees[run(repository, root).tree].entries
    assert [entry.link for entry in entries] == [1, 1, 2, 2, 3, 3]  # never 0


def test_names_of_a_group_that_the_layer_does_not_mention_stay(tmp_path: Path) -> None:
    image = layer(tmp_path / "image", {"a": "1"})
    os.link(image / "a", image / "b")
    os.link(image / "a", image / "c")
    repository = MemoryRepository()
    before = run(repository, image, marks=False).tree
    after = run(repository, layer(tmp_path / "l", {"b": "torn away"}), before).tree
    assert at(repository, after, b"a") is at(repository, before, b"a")
    assert at(repository, after, b"c") is at(repository, before, b"c")
    assert (at(repository, after, b"b").link, at(repository, after, b"b").nlink) == (0, 1)


# -- overlay marks, and what only root can make ------------------------------------------------------------------------


def test_devices_and_whiteouts(tmp_path: Path) -> None:
    require("root")
    image = layer(tmp_path / "image", {"gone": "1", "gone2": "2", "kept": "3"})
    os.mknod(image / "device", stat.S_IFCHR)
    repository = MemoryRepository()
    base = run(repository, image, marks=False).tree
    assert (at(repository, base, b"device").kind, at(repository, base, b"device").rdev) == (
        Kind.CHAR_DEVICE,
        0,
    )  # marks=False: data
    root = layer(tmp_path / "l", {"gone2": ""})
    for name, kind, device in (
        ("block", stat.S_IFBLK, (254, 0)),
        ("char", stat.S_IFCHR, (5, 2)),
        ("zero", stat.S_IFBLK, (0, 0)),
    ):
        os.mknod(root / name, kind | 0o600, os.makedev(*device))
    os.mknod(root / "gone", stat.S_IFCHR)
    os.link(root / "gone", root / "device")  # as the kernel does with its whiteouts
    os.link(root / "gone", root / "never")
    os.setxattr(root / "gone2", "trusted.overlay.whiteout", b"")
    after = run(repository, root, base)
    assert names(repository, after.tree) == [b"block", b"char", b"kept", b"zero"]
    assert at(repository, after.tree, b"block").rdev == os.makedev(254, 0)
    assert at(repository, after.tree, b"char").rdev == os.makedev(5, 2)
    assert after.entries == 7


def test_an_opaque_directory_shows_nothing_below_and_still_gives_hints(tmp_path: Path) -> None:
    require("root")
    repository = Recorder()
    base = run(repository, layer(tmp_path / "image", {"d/f": "old", "d/e/g": "old2", "d/h": ""}), marks=False).tree
    repository.forget()
    root = layer(tmp_path / "l", {"d/f": "new", "d/e/g": "new2"})
    os.setxattr(root / "d", "trusted.overlay.opaque", b"y")
    os.setxattr(root / "d", "trusted.overlay.redirect", b"/d")  # opaque wins
    after = run(repository, root, base).tree
    assert names(repository, at(repository, after, b"d").tree) == [b"e", b"f"]
    assert dict(repository.saved_contents) == {
        3: at(repository, base, b"d/f").content,
        4: at(repository, base, b"d/e/g").content,
    }
    assert own(repository, at(repository, after, b"d").tree or TreeID("")).xattrs == ()


def test_redirects_lead_to_the_lower_directory_and_its_hints(tmp_path: Path) -> None:
    require("root")
    repository = Recorder()
    base = run(repository, layer(tmp_path / "image", {"a/b/f": "old", "a/b/kept": "", "x": "file"}), marks=False).tree
    repository.forget()
    root = layer(tmp_path / "l", {"moved/f": "new", "a/c/f": "newer", "nothing/f": "newest!", "file/f": "x"})
    for path, value in {"moved": b"/a/b", "a/c": b"b", "nothing": b"/a/none/b", "file": b"/x"}.items():
        os.setxattr(root / path, "trusted.overlay.redirect", value)
    os.mknod(root / "a/b", stat.S_IFCHR)
    old = at(repository, base, b"a/b/f").content
    after = run(repository, root, base).tree
    assert names(repository, at(repository, after, b"moved").tree) == [b"f", b"kept"]
    assert names(repository, at(repository, after, b"a").tree) == [b"c"]
    assert names(repository, at(repository, after, b"a/c").tree) == [b"f", b"kept"]
    assert names(repository, at(repository, after, b"nothing").tree) == [b"f"]
    assert names(repository, at(repository, after, b"file").tree) == [b"f"]
    assert dict(repository.saved_contents) == {3: old, 5: old, 7: None, 1: None}
    assert at(repository, after, b"moved/kept") is at(repository, base, b"a/b/kept")


@pytest.mark.parametrize(("value", "code"), [*NO_REDIRECTS, (b"..\0x", errno.EACCES)])
def test_redirects_that_are_none(tmp_path: Path, value: bytes, code: int) -> None:
    require("root")
    repository = MemoryRepository()
    base = run(repository, layer(tmp_path / "image", {"d/f": ""}), marks=False).tree
    root = layer(tmp_path / "l", {"d/g": ""})
    os.setxattr(root / "d", "trusted.overlay.redirect", value)
    with pytest.raises(OSError, match="redirect") as caught:
        run(repository, root, base)
    assert caught.value.errno == code


def test_marks_on_the_layers_root_do_not_count(tmp_path: Path) -> None:
    require("root")
    repository = MemoryRepository()
    base = run(repository, layer(tmp_path / "image", {"f": ""}), marks=False).tree
    root = layer(tmp_path / "l", {})
    os.setxattr(root, "trusted.overlay.opaque", b"y")
    os.setxattr(root, "trusted.overlay.redirect", b"not/valid")
    assert names(repository, run(repository, root, base).tree) == [b"f"]
    assert own(repository, run(repository, root, base).tree).xattrs == ()


def test_attributes_of_links_and_devices(tmp_path: Path) -> None:
    require("root")
    root = layer(tmp_path / "l", {})
    os.symlink("nowhere", root / "link")
    os.mkfifo(root / "fifo")
    os.setxattr(root / "link", "trusted.own", b"1", follow_symlinks=False)
    os.setxattr(root / "fifo", "trusted.own", b"2")
    os.chown(root / "link", 1234, 4_294_967_290, follow_symlinks=False)
    repository = MemoryRepository()
    tree = run(repository, root).tree
    link = at(repository, tree, b"link")
    assert (link.uid, link.gid, link.xattrs) == (1234, 4_294_967_290, ((b"trusted.own", b"1"),))
    assert at(repository, tree, b"fifo").xattrs == ((b"trusted.own", b"2"),)
