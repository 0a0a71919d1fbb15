"""Layers rebuilt from stored trees, as the kernel sees them: random work on real overlays, archived, and brought back
as one layer.

tests/long.py says how to run one seed again (each is about 60 operations).
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.errors import OutOfSpace
from snapshotd.kernel.files import DIR_FLAGS, remove_tree
from snapshotd.trees.archive import apply
from snapshotd.trees.base import RestoreReport
from snapshotd.trees.difference import DifferenceView
from snapshotd.trees.materialise import materialise
from snapshotd.trees.stored_view import StoredView
from snapshotd.trees.view import View
from snapshotd.types import Kind, TreeID
from tests import long, variety
from tests.capabilities import require
from tests.memory_repository import MemoryRepository
from tests.model.overlay_world import World, difference
from tests.stored_trees import save

SEEDS = long.seeds(3, 100)
ROUNDS = 6
Rows = dict[bytes, tuple[Any, ...]]


@pytest.fixture
def base() -> Iterator[Path]:
    require("root")
    path = Path(
        tempfile.mkdtemp(prefix="snapshotd-rebuilt-", dir="/var/tmp")
    )  # a disk: holes, attributes, and what overlayfs needs
    yield path
    fd = os.open(path.parent, DIR_FLAGS)
    remove_tree(fd, path.name)  # shutil.rmtree cannot: too deep
    os.close(fd)


def archive(repository: MemoryRepository, layer: Path, parent: TreeID | None) -> TreeID:
    fd = os.open(layer, DIR_FLAGS)
    try:
        applied = apply(repository, fd, parent, salt=os.fsencode(layer.name), marks=parent is not None)
    finally:
        os.close(fd)
    assert applied.warnings == ()
    return applied.tree


def write(view: View, target: Path, *, whiteouts: bool) -> RestoreReport:
    fd = os.open(target, DIR_FLAGS)
    try:
        return materialise(view, b"", fd, whiteouts=whiteouts)
    finally:
        os.close(fd)


def grouped(rows: dict[bytes, tuple[Any, ...]], group_of: dict[bytes, object]) -> Rows:
    """The rows with the names of each entry's link group in place of its number."""
    names: dict[object, list[bytes]] = {}
    for path in sorted(rows):
        names.setdefault(group_of[path], []).append(path)
    return {path: (*row[:-1], names[group_of[path]]) for path, row in rows.items()}


def expected_rows(world: World, stack: list[Path], repository: MemoryRepository, tree: TreeID) -> Rows:
    """What the stack itself shows, with the link groups of the tree: overlayfs has torn those that lie in several
    layers."""
    rows = world.fresh_manifest(stack)
    with StoredView(repository, tree) as view:
        return grouped(rows, {path: (view.child(path).source[1].link if path else 0) or path for path in rows})


def shown_rows(world: World, layer: Path) -> Rows:
    rows = world.fresh_manifest([layer, world.image])
    return grouped(rows, {path: row[-1] if row[-1] >= 0 else path for path, row in rows.items()})


def names_in(layer: Path) -> tuple[set[bytes], set[bytes]]:
    """Of a layer's entries the whiteouts and the others."""
    whiteouts: set[bytes] = set()
    others: set[bytes] = set()
    todo = [b""]
    while todo:
        parent = todo.pop()
        for name in os.listdir(os.path.join(os.fsencode(layer), parent)):
            path = os.path.join(parent, name)
            st = os.lstat(os.path.join(os.fsencode(layer), path))
            (whiteouts if stat.S_ISCHR(st.st_mode) and st.st_rdev == 0 else others).add(path)
            if stat.S_ISDIR(st.st_mode):
                todo.append(path)
    return whiteouts, others


def check(
    world: World, stack: list[Path], repository: MemoryRepository, below: TreeID, tree: TreeID, what: str
) -> None:
    layer = world._new_dir("rebuilt")
    with DifferenceView(repository, tree, below) as view:
        report = write(view, layer, whiteouts=True)
        listed = [path for path, _ in view.walk()]
        assert set(listed) == set.union(*names_in(layer)), what
    assert report.warnings == ()
    expected, got = expected_rows(world, stack, repository, tree), shown_rows(world, layer)
    if expected != got:
        pytest.fail(f"{what}\n{difference(expected, got)}\n" + "\n".join(world.log))
    check_smallest(repository, below, tree, layer, what)


def check_smallest(repository: MemoryRepository, below: TreeID, tree: TreeID, layer: Path, what: str) -> None:
    """A whiteout hides something; a file that is equal below is there only for its link group; holes are holes."""
    whiteouts, others = names_in(layer)
    with StoredView(repository, below) as old, StoredView(repository, tree) as new:
        for path in whiteouts:
            assert exists(old, path), f"{what}: whiteout {path!r}"
            assert not exists(new, path), f"{what}: whiteout {path!r}"
        for path in others:
            entry, mine = new.lstat(path), os.lstat(os.path.join(os.fsencode(layer), path))
            if entry.kind is not Kind.DIRECTORY and exists(old, path) and old.lstat(path).inode == entry.inode:
                assert mine.st_nlink > 1, f"{what}: {path!r} is equal on both sides"
            extents = new.child(path).source[1].extents
            if extents is not None:
                assert mine.st_blocks * 512 <= sum(length + 8191 for _, length in extents), (
                    f"{what}: {path!r} lost its hole"
                )


def exists(view: View, path: bytes) -> bool:
    try:
        view.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rebuilt_layer_shows_the_tree(base: Path, seed: int) -> None:
    world = World(base, seed)
    try:
        repository = MemoryRepository()
        image = tree = archive(repository, world.image, None)
        for number in range(ROUNDS):
            for _ in range(world.rng.randrange(1, 12)):
                world.step()
            stack = world.live_stack()
            world.pivot()
            tree = archive(repository, stack[0], tree)
            check(world, stack, repository, image, tree, f"seed {seed}: layer {number}")
    finally:
        world.close()


def test_a_link_group_of_which_a_directory_was_renamed(base: Path) -> None:
    """The kernel finds the moved names in the image, by a redirect. The rebuilt layer has none, and must have all names
    of the group."""
    world = World(base, 0)
    try:
        for name in ("old", "still"):
            (world.image / "links" / name).mkdir(parents=True)
        (world.image / "links/old/one").write_text("linked")
        os.link(world.image / "links/old/one", world.image / "links/still/two")
        (world.image / "links/still/other").write_text("other")
        repository = MemoryRepository()
        image = archive(repository, world.image, None)
        world.remount([])
        live = os.path.join(os.fsdecode(world.mount), "links")
        os.rename(f"{live}/old", f"{live}/new")
        stack = world.live_stack()
        world.pivot()
        tree = archive(repository, stack[0], image)
        check(world, stack, repository, image, tree, "renamed")
        layer = world._new_dir("again")
        with DifferenceView(repository, tree, image) as view:
            write(view, layer, whiteouts=True)
        assert names_in(layer / "links") == ({b"old"}, {b"new", b"new/one", b"still", b"still/two"})
        assert os.stat(layer / "links/new/one").st_ino == os.stat(layer / "links/still/two").st_ino
    finally:
        world.close()


def test_nothing_changed(base: Path) -> None:
    world = World(base, 1)
    try:
        repository = MemoryRepository()
        image = archive(repository, world.image, None)
        layer = world._new_dir("rebuilt")
        with DifferenceView(repository, image, image) as view:
            report = write(view, layer, whiteouts=True)
        assert (report.files, report.directories, os.listdir(layer)) == (0, 0, [])
    finally:
        world.close()


@pytest.mark.long  # the tree: e2e/test_variety.py; rebuilt: below
def test_the_variety_tree_comes_back(base: Path) -> None:
    """Into a directory and as a layer; sockets only as a layer."""
    root, restored, layer, empty = (base / name for name in ("variety", "restored", "layer", "empty"))
    variety.make(root)
    for path in (restored, layer, empty):
        path.mkdir()
    expected = variety.manifest(root)
    repository = MemoryRepository()
    tree, nothing = archive(repository, root, None), archive(repository, empty, None)
    with DifferenceView(repository, tree, nothing) as view:
        report = write(view, layer, whiteouts=True)
    assert report.warnings == ()
    assert variety.difference(expected, variety.manifest(layer)) == ""
    with StoredView(repository, tree) as view:
        report = write(view, restored, whiteouts=False)
    sockets = {path for path, fact in expected.items() if fact.kind == stat.S_IFSOCK}
    assert len(report.warnings) == len(sockets) > 0
    kept = {path: fact for path, fact in expected.items() if path not in sockets}
    assert variety.difference(kept, variety.manifest(restored)) == ""


def test_a_full_target(base: Path) -> None:
    """Found by a thread that writes files, told by the one that called; nothing is left open."""
    place = base / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    subprocess.run(mount, check=True, timeout=60)
    try:
        repository = MemoryRepository()
        tree = save(repository, {b"d%d" % n: {b"f%d" % m: os.urandom(5000) for m in range(40)} for n in range(40)})
        (place / "target").mkdir()
        before = set(os.listdir("/proc/self/fd"))
        with StoredView(repository, tree) as view, pytest.raises(OutOfSpace, match="cannot restore 'd"):
            write(view, place / "target", whiteouts=False)
        assert set(os.listdir("/proc/self/fd")) <= before, "what earlier tests left may close meanwhile"
        shutil.rmtree(place / "target")
    finally:
        subprocess.run(["umount", place], check=True, timeout=60)
