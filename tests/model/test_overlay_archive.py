"""Layers applied to stored trees, one after the other, against the view of the whole stack: random work on real
overlays, and forged marks. And the variety tree, on the file systems that layers lie on.

tests/long.py says how to run one seed again.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import stat
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from overlay_checks import NAMES, apply_to, new_layer, open_view, random_layer, whiteout
from overlay_world import _FORMATS, Manifest, World, difference, view_manifest

from snapshotd.kernel.files import DIR_FLAGS, remove_tree, sync_filesystem
from snapshotd.layers.merge import merge
from snapshotd.repo.base import TreeEntry
from snapshotd.trees.archive import apply
from snapshotd.trees.lookup import is_whiteout
from snapshotd.types import BlobID, Kind, TreeID
from tests import long, variety
from tests.capabilities import require
from tests.memory_repository import MemoryRepository

SEEDS = long.seeds(3, 120)
MARK_SEEDS = long.seeds(10, 600)
ROUNDS = 8


def tree_entries(repository: MemoryRepository, tree: TreeID) -> dict[bytes, TreeEntry]:
    """Path to entry; of directories, their own metadata."""
    found: dict[bytes, TreeEntry] = {}
    todo = [(b"", tree)]
    while todo:
        path, tree_id = todo.pop()
        loaded = repository.load_tree(tree_id)
        assert (loaded.own.name, loaded.own.kind, loaded.own.tree) == (b"", Kind.DIRECTORY, None)
        assert [entry.name for entry in loaded.entries] == sorted({entry.name for entry in loaded.entries})
        found[path] = loaded.own
        for entry in loaded.entries:
            child = path + b"/" + entry.name if path else entry.name
            if entry.kind is Kind.DIRECTORY:
                assert entry.tree is not None
                assert entry == TreeEntry(entry.name, Kind.DIRECTORY, 0, 0, 0, 0, tree=entry.tree)
                todo.append((child, entry.tree))
            else:
                assert entry.tree is None
                found[child] = entry
    return found


def data_of(repository: MemoryRepository, entry: TreeEntry) -> bytes:
    """The logical content of a file entry, whose form is checked on the way."""
    content = b"" if entry.content is None else repository.contents[entry.content]
    assert (entry.content is None) == (content == b"")
    if entry.extents is None:
        assert len(content) == entry.size
        return content
    data, at, end = bytearray(entry.size), 0, 0
    for start, length in entry.extents:
        assert length > 0
        assert start > end or (start == 0 and end == 0)
        data[start : start + length] = content[at : at + length]
        at, end = at + length, start + length
    assert at == len(content)
    assert end <= entry.size == len(data)
    return bytes(data)


def tree_manifest(repository: MemoryRepository, entries: dict[bytes, TreeEntry]) -> dict[bytes, tuple[Any, ...]]:
    """Rows as in `overlay_world.Manifest`, without link groups."""
    rows: dict[bytes, tuple[Any, ...]] = {}
    for path, entry in entries.items():
        content = entry.target
        if entry.kind is Kind.FILE:
            content = hashlib.sha256(data_of(repository, entry)).digest()
        rows[path] = (
            _FORMATS[entry.kind],
            entry.mode,
            entry.uid,
            entry.gid,
            entry.size,
            entry.mtime_ns,
            entry.rdev,
            content,
            entry.xattrs,
        )
    return rows


def everything(layer: Path) -> Iterator[tuple[bytes, os.stat_result]]:
    """Every entry of a directory tree by its path, without following links (`os.walk` calls a link to a directory a
    directory)."""
    todo = [b""]
    while todo:
        parent = todo.pop()
        for name in os.listdir(os.path.join(os.fsencode(layer), parent)):
            path = os.path.join(parent, name)
            st = os.lstat(os.path.join(os.fsencode(layer), path))
            yield path, st
            if stat.S_ISDIR(st.st_mode):
                todo.append(path)


def link_groups(layer: Path) -> dict[bytes, list[bytes]]:
    """Every name in a layer but whiteouts and directories, and the names of the same inode."""
    inodes: dict[int, list[bytes]] = defaultdict(list)
    fd = os.open(layer, DIR_FLAGS)
    for path, st in everything(layer):
        if not stat.S_ISDIR(st.st_mode) and not is_whiteout(fd, path, st):
            inodes[st.st_ino].append(path)
    os.close(fd)
    return {path: paths for paths in inodes.values() for path in paths}


class Checker:
    """Applies layers one by one and compares with the view of the stack."""

    def __init__(self) -> None:
        self.repository = MemoryRepository()
        self.tree: TreeID | None = None
        self.links: dict[tuple[int, int], tuple[int, int]] = {}

    def push(self, world: World, stack: list[Path], what: str, *, marks: bool = True) -> None:
        layer = stack[0]
        settle(layer)
        applied = apply_to(self.repository, layer, self.tree, salt=str(len(self.links)).encode(), marks=marks)
        self.tree = applied.tree
        assert applied.warnings == ()
        assert applied.entries == len(list(everything(layer)))
        assert applied.bytes == disk_usage(layer)
        entries = tree_entries(self.repository, applied.tree)
        with open_view(world, stack) as view:
            expected: Manifest = {path: row[:-1] for path, row in view_manifest(view).items()}
            inodes = {path: view.lstat(path).inode for path in expected}
        got = tree_manifest(self.repository, entries)
        if expected != got:
            pytest.fail(f"{what}\n{difference(expected, got)}\n" + "\n".join(world.log))
        self._check_links(entries, inodes, link_groups(layer), what)

    def _check_links(
        self,
        entries: dict[bytes, TreeEntry],
        inodes: dict[bytes, tuple[int, int]],
        groups: dict[bytes, list[bytes]],
        what: str,
    ) -> None:
        for path, names in groups.items():
            entry = entries[path]
            if len(names) == 1:
                assert (entry.link, entry.nlink) == (0, 1), f"{what}: {path!r}"
            else:
                assert entry.link, f"{what}: {path!r}"
                assert [p for p in groups if entries[p].link == entry.link] == [p for p in groups if p in names], (
                    f"{what}: {path!r}"
                )
                assert entry.nlink == len(names), f"{what}: {path!r}"
        for path, entry in entries.items():  # a name that no later layer mentions keeps what its layer has defined
            if entry.kind is not Kind.DIRECTORY:
                assert self.links.setdefault(inodes[path], (entry.link, entry.nlink)) == (entry.link, entry.nlink), (
                    f"{what}: {path!r}"
                )


def settle(layer: Path) -> None:
    """Writes everything back: ext4 gives a file with many extents one more block for their tree when it is written, not
    before."""
    fd = os.open(layer, DIR_FLAGS)
    try:
        sync_filesystem(fd)
    finally:
        os.close(fd)


def disk_usage(layer: Path) -> int:
    blocks = {st.st_ino: st.st_blocks for _, st in everything(layer)}
    return 512 * (os.lstat(layer).st_blocks + sum(blocks.values()))


@pytest.fixture
def world(base: Path) -> Iterator[World]:
    world = World(base, 0)
    yield world
    world.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_real_layers_equal_their_stack(base: Path, seed: int) -> None:
    world = World(base, seed)
    try:
        checker = Checker()
        checker.push(world, [world.image], f"seed {seed}: image", marks=False)
        for number in range(ROUNDS):
            for _ in range(world.rng.randrange(1, 12)):
                world.step()
            stack = world.live_stack()
            world.pivot()
            checker.push(world, stack, f"seed {seed}: layer {number}")
    finally:
        world.close()


def add_more(root: Path, rng: random.Random) -> None:
    """What `random_layer` has none of: hard links across directories, linked whiteouts, whiteouts by attribute,
    holes."""
    dirs = [root, *(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())]
    files = [
        path for path in root.rglob("*") if stat.S_ISREG(os.lstat(path).st_mode) or stat.S_ISCHR(os.lstat(path).st_mode)
    ]
    for number in range(rng.randrange(8)):
        path = rng.choice(dirs) / rng.choice((*NAMES, f"more{number}"))
        if os.path.lexists(path):
            continue
        dice = rng.random()
        if dice < 0.5 and files:
            os.link(rng.choice(files), path, follow_symlinks=False)
        elif dice < 0.65:
            os.setxattr(path.parent, "trusted.overlay.opaque", b"x")
            path.touch()
            os.setxattr(path, "trusted.overlay.whiteout", b"y")
        elif dice < 0.8:
            with open(path, "wb") as f:
                f.truncate(rng.randrange(1 << 20))
                for _ in range(rng.randrange(4)):
                    f.seek(rng.randrange(1 << 20))
                    f.write(rng.randbytes(rng.randrange(9000)))
            os.setxattr(path, "user.overlay.whiteout", b"y")
        else:
            whiteout(path)


@pytest.mark.parametrize("seed", MARK_SEEDS)
def test_forged_marks(world: World, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(4):
        checker, stack = Checker(), []
        for number in range(rng.randrange(2, 7)):
            layer = random_layer(world, rng)
            add_more(layer, rng)
            stack.insert(0, layer)
            checker.push(world, stack, f"seed {seed}: layer {number}")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_merged_layer_makes_the_same_tree(world: World, seed: int) -> None:
    """What the engine does to long stacks must not change what is stored: one merged layer is worth its layers, but for
    link groups."""
    rng = random.Random(seed)
    repository = MemoryRepository()
    stack = [random_layer(world, rng) for _ in range(rng.randrange(3, 6))]
    tree = None
    for layer in reversed(stack):
        below, tree = tree, apply_to(repository, layer, tree).tree
    image = apply_to(repository, stack[-1], None).tree
    target = new_layer(world)
    fds = world.open_all([*stack[:-1], target])
    merge(fds[:-1], fds[-1])
    for fd in fds:
        os.close(fd)
    assert below is not None
    merged = apply_to(repository, target, image).tree
    expected, got = (
        tree_manifest(repository, tree_entries(repository, each)) for each in (tree, merged) if each is not None
    )
    assert expected == got, f"seed {seed}: {difference(expected, got)}"


# -- the variety tree, and what only XFS can hold ----------------------------------------------------------------------


@pytest.fixture(params=["disk", "xfs"])
def place(request: pytest.FixtureRequest, base: Path) -> Iterator[Path]:
    """A directory on the disk of /var/tmp, or on an XFS made for the test."""
    if request.param == "disk":
        yield base
        return
    yield from mounted_xfs(base)


@pytest.fixture
def xfs(base: Path) -> Iterator[Path]:
    yield from mounted_xfs(base)


def mounted_xfs(base: Path) -> Iterator[Path]:
    require("xfs")
    image, at = base / "xfs.img", base / "xfs"
    at.mkdir()
    with open(image, "wb") as f:
        f.truncate(1 << 30)
    subprocess.run(["mkfs.xfs", "-q", image], check=True, timeout=60)
    subprocess.run(["mount", "-o", "loop", image, at], check=True, timeout=60)
    try:
        yield at
    finally:
        subprocess.run(["umount", at], check=True, timeout=60)


def facts(repository: MemoryRepository, tree: TreeID) -> dict[bytes, variety.Fact]:
    entries = tree_entries(repository, tree)
    groups: dict[int, list[bytes]] = defaultdict(list)
    for path, entry in entries.items():
        if entry.link:
            groups[entry.link].append(path)
    return {
        path: variety.Fact(
            _FORMATS[entry.kind],
            entry.mode,
            entry.uid,
            entry.gid,
            entry.mtime_ns,
            entry.size,
            entry.rdev,
            entry.target,
            hashlib.sha256(data_of(repository, entry)).hexdigest() if entry.kind is Kind.FILE else "",
            entry.xattrs,
            tuple(sorted(groups[entry.link])) if entry.link else (),
        )
        for path, entry in entries.items()
    }


def test_variety(place: Path) -> None:
    root = place / "variety"
    variety.make(root)
    try:
        expected = variety.manifest(root)
        repository = MemoryRepository()
        applied = apply_to(repository, root, None, marks=False)
    finally:
        fd = os.open(place, DIR_FLAGS)
        remove_tree(fd, b"variety")  # shutil.rmtree cannot: too deep
        os.close(fd)
    assert applied.warnings == ()
    assert applied.entries == len(expected) - 1
    assert variety.difference(expected, facts(repository, applied.tree)) == ""
    assert len({fact.kind for fact in expected.values()}) == 7
    assert any(fact.links for fact in expected.values())


@pytest.mark.long  # test_variety has it as a layer of its own
def test_variety_as_a_layer_over_its_image(base: Path) -> None:
    """Everything is copied up by the kernel, some of it is deleted: the layer holds all kinds, and the tree is what the
    mount shows."""
    world = World(base, 0)
    try:
        variety.make(world.image / "v", deep=False)
        checker = Checker()
        checker.push(world, [world.image], "image", marks=False)
        world.remount([])
        live = Path(os.fsdecode(world.mount)) / "v"
        for path, fact in variety.manifest(live).items():
            if fact.kind != stat.S_IFLNK and path:
                os.chmod(os.path.join(os.fsencode(live), path), fact.mode ^ 0o010)
        os.unlink(live / "links/z/file")
        os.rename(live / "times", live / "shapes/times")
        os.rename(live / "shapes", live / "moved")
        expected = variety.manifest(live.parent)
        stack = world.live_stack()
        world.pivot()
        checker.push(world, stack, "copied up")
        assert checker.tree is not None
        got = facts(checker.repository, checker.tree)
        without_links = [
            {path: (*fact_values(fact),) for path, fact in rows.items() if path} for rows in (expected, got)
        ]
        assert without_links[0] == without_links[1]
    finally:
        world.close()


def fact_values(fact: variety.Fact) -> tuple[Any, ...]:
    """Without `links`: copy-up tears groups apart, and only those within the layer are one inode."""
    return tuple(getattr(fact, name) for name in variety.Fact.__slots__[:-1])


def test_a_file_of_8_eib(xfs: Path) -> None:
    """Time and space as for what is in it."""
    layer = xfs / "l"
    layer.mkdir()
    size = (1 << 63) - 1
    fd = os.open(layer / "f", os.O_CREAT | os.O_WRONLY)
    os.ftruncate(fd, size)
    for offset in (5, 1 << 40, size - 3):
        assert os.pwrite(fd, b"abc", offset) == 3
    os.close(fd)
    repository, start = MemoryRepository(), time.monotonic()
    tree = apply_to(repository, layer, None).tree
    assert time.monotonic() - start < 5
    entry = tree_entries(repository, tree)[b"f"]
    assert entry.size == size
    assert entry.extents is not None
    assert len(entry.extents) == 3
    assert sum(entry.extents[-1]) == size
    content, at, found = repository.contents[entry.content or BlobID("")], 0, {}
    for offset, length in entry.extents:
        piece = content[at : at + length]
        found[offset + piece.index(b"abc")] = piece.strip(b"\0")
        at += length
    assert found == {5: b"abc", 1 << 40: b"abc", size - 3: b"abc"}


def test_more_attributes_than_the_kernel_lists(xfs: Path) -> None:
    """The kernel answers E2BIG; the entry is recorded without them, and a warning names it. Marks and whiteouts are
    still seen."""
    image, layer = xfs / "image", xfs / "l"
    for root in (image, layer):
        (root / "d").mkdir(parents=True)
    for path in ("d/below", "f", "gone"):
        (image / path).write_text("image")
    (layer / "f").write_text("content")
    (layer / "gone").touch()
    for path in ("d", "f", "gone"):
        for number in range(400):
            os.setxattr(layer / path, f"user.{number:0245d}", b"x")
        with pytest.raises(OSError, match="Argument list too long"):
            os.listxattr(layer / path)
    os.setxattr(layer / "d", "trusted.overlay.opaque", b"y")
    os.setxattr(layer / "gone", "trusted.overlay.whiteout", b"")
    repository = MemoryRepository()
    applied = apply_to(repository, layer, apply_to(repository, image, None).tree)
    entries = tree_entries(repository, applied.tree)
    assert sorted(entries) == [b"", b"d", b"f"]
    assert entries[b"d"].xattrs == entries[b"f"].xattrs == ()
    assert data_of(repository, entries[b"f"]) == b"content"
    assert [warning.split(" ")[0] for warning in applied.warnings] == ["'f':", "'d':"]


def test_gigabytes_of_attributes_take_no_memory(xfs: Path) -> None:
    layer = xfs / "l"
    layer.mkdir()
    (layer / "f").write_text("content")
    for number in range(100):
        os.setxattr(layer / "f", f"user.{number}", b"x" * 65536)
    repository = MemoryRepository()
    applied = apply_to(repository, layer, None)
    assert tree_entries(repository, applied.tree)[b"f"].xattrs == ()
    assert len(applied.warnings) == 1


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_a_mount_inside_a_layer_is_not_entered(base: Path, kind: str) -> None:
    layer = base / "l"
    (layer / "d").mkdir(parents=True)
    place = layer / "d/place"
    if kind == "directory":
        place.mkdir()
        mount = ["mount", "-t", "tmpfs", "none", place]
    else:
        place.touch()
        mount = ["mount", "--bind", "/proc/version", place]
    subprocess.run(mount, check=True, timeout=60)
    try:
        with pytest.raises(OSError, match="mounted inside a layer") as caught:
            apply_to(MemoryRepository(), layer, None)
    finally:
        subprocess.run(["umount", place], check=True, timeout=60)
    assert caught.value.errno == errno.EXDEV


def test_many_levels_and_linked_names_hold_few_descriptors(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whiteouts and links in a chain of 250 directories over another one."""
    image, layer = base / "image", base / "l"
    for root in (image, layer):
        at = root
        for level in range(250):
            at = at / "d"
            at.mkdir(parents=True)
            (at / f"f{level % 5}").write_text(str(level))
            if root is layer:
                os.mknod(at / f"f{(level + 1) % 5}", stat.S_IFCHR)
                if level:
                    os.link(at.parent / f"f{(level - 1) % 5}", at / "linked")
    fd = os.open(layer, DIR_FLAGS)
    repository, most = MemoryRepository(), 0
    save_tree = repository.save_tree

    def look(*args: Any) -> TreeID:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")))
        return save_tree(*args)

    monkeypatch.setattr(repository, "save_tree", look)
    before = len(os.listdir("/proc/self/fd"))
    tree = apply(repository, fd, apply_to(repository, image, None, marks=False).tree, salt=b"").tree
    os.close(fd)
    assert most < before + 300
    assert len(os.listdir("/proc/self/fd")) <= before - 1
    entries = tree_entries(repository, tree)
    assert len([path for path in entries if path.endswith(b"linked")]) == 249
    assert len({entry.link for entry in entries.values() if entry.link}) == 249
    assert all(entry.nlink == 2 for entry in entries.values() if entry.link)
