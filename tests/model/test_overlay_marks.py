"""View and merge against the kernel on layers written by hand: marks in every combination, those that no mount would
write included."""

from __future__ import annotations

import io
import os
import random
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from overlay_checks import new_layer, open_view, random_layer, whiteout
from overlay_world import World, difference, need_root, view_manifest

from snapshotd.formats.ingest import ingest_tar
from snapshotd.kernel import syscalls as sc
from snapshotd.kernel.files import DIR_FLAGS
from snapshotd.layers.merge import merge
from snapshotd.trees.diff import diff
from tests import long
from tests.archives import NO_REDIRECTS
from tests.loop_disk import loop_disk

SEEDS = long.seeds(4, 300)
EXT4_NAMES = 65_000
"""So many names a file can have."""


@pytest.fixture
def world(base: Path) -> Iterator[World]:
    world = World(base, 0)
    yield world
    world.close()


def merged(world: World, stack: list[Path], first: int, last: int) -> list[Path]:
    target = new_layer(world)
    fds = world.open_all([*stack[first:last], target])
    merge(fds[:-1], fds[-1])
    for fd in fds:
        os.close(fd)
    return [*stack[:first], target, *stack[last:]]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_marks(world: World, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(5):
        stack = [random_layer(world, rng) for _ in range(rng.randrange(2, 7))]
        expected = world.fresh_manifest(stack)
        with open_view(world, stack) as view:
            got = view_manifest(view)
        assert expected == got, f"seed {seed}: {difference(expected, got)}"
        for _ in range(3):
            first = rng.randrange(len(stack) - 1)
            last = rng.randrange(first, len(stack) - 1) + 1
            other = merged(world, stack, first, last)
            remounted = world.fresh_manifest(other)
            assert expected == remounted, f"seed {seed}: merge of {first}:{last}\n{difference(expected, remounted)}"
            with open_view(world, other) as a, open_view(world, stack) as b:
                assert view_manifest(a) == expected
                assert list(diff(a, b)) == []


def test_xattr_whiteouts(world: World) -> None:
    top, low, image = (new_layer(world) for _ in range(3))
    for root in (low, image):
        (root / "d").mkdir()
        (root / "d/gone").write_text("x")
        (root / "d/kept").write_text("x")
    (top / "d").mkdir()
    os.setxattr(top / "d", "trusted.overlay.opaque", b"x")
    (top / "d/gone").touch()
    os.setxattr(top / "d/gone", "trusted.overlay.whiteout", b"y")
    (top / "d/new").touch()
    stack = [top, low, image]
    expected = world.fresh_manifest(stack)
    assert sorted(expected) == [b"", b"d", b"d/kept", b"d/new"]
    for same in (stack, merged(world, stack, 0, 1), merged(world, stack, 0, 2)):
        assert world.fresh_manifest(same) == expected
        with open_view(world, same) as view:
            assert view_manifest(view) == expected


def test_a_bundle_that_names_a_directory_again_after_its_deletions(world: World) -> None:
    layer, image = new_layer(world), new_layer(world)
    directory, deletion = tarfile.TarInfo("d"), tarfile.TarInfo("d/gone")
    directory.type, deletion.type = tarfile.DIRTYPE, tarfile.CHRTYPE
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for member in (directory, deletion, directory):
            tar.addfile(member)
    stream.seek(0)
    fd = os.open(layer, DIR_FLAGS)
    ingest_tar(stream, fd, oci_whiteouts=False, overlay_marks=True)
    os.close(fd)
    assert stat.S_ISCHR(os.lstat(layer / "d/gone").st_mode)
    assert sorted(world.fresh_manifest([layer, image])) == [b"", b"d"]


@pytest.mark.parametrize(("value", "code"), NO_REDIRECTS)
def test_redirects_that_are_none(world: World, value: bytes, code: int) -> None:
    """The kernel refuses them with the same error; above all, they never lead out of a layer."""
    top, image = new_layer(world), new_layer(world)
    (top / "d").mkdir()
    (image / "d").mkdir()
    os.setxattr(top / "d", "trusted.overlay.redirect", value)
    at = world._new_dir("at")
    world.mount_overlay([top, image], world._new_dir("empty"), os.fsencode(at))
    try:
        with pytest.raises(OSError) as kernel:
            os.lstat(at / "d")
    finally:
        sc.call("umount2", str(at), 0)
    assert kernel.value.errno == code
    with open_view(world, [top, image]) as view:
        with pytest.raises(OSError) as caught:
            view.directory(b"d")
        assert caught.value.errno == code


def test_absolute_redirect_below_an_opaque_parent_goes_on(world: World) -> None:
    """The parent is met on the way of another absolute redirect, so that both marks count in one walk."""
    top, middle, image = (new_layer(world) for _ in range(3))
    (top / "d").mkdir()
    os.setxattr(top / "d", "trusted.overlay.redirect", b"/p/q")
    (middle / "p/q").mkdir(parents=True)
    os.setxattr(middle / "p", "trusted.overlay.opaque", b"y")
    os.setxattr(middle / "p/q", "trusted.overlay.redirect", b"/far")
    (image / "far").mkdir()
    (image / "far/file").write_text("x")
    stack = [top, middle, image]
    expected = world.fresh_manifest(stack)
    assert b"d/file" in expected
    for same in (stack, merged(world, stack, 0, 1), merged(world, stack, 1, 2), merged(world, stack, 0, 2)):
        assert world.fresh_manifest(same) == expected
        with open_view(world, same) as view:
            assert view_manifest(view) == expected


def test_marks_of_the_lowest_layer_do_not_count(world: World) -> None:
    top, image = new_layer(world), new_layer(world)
    (image / "d").mkdir()
    (image / "d/f").write_text("x")
    os.setxattr(image / "d", "trusted.overlay.redirect", b"not/valid")
    expected = world.fresh_manifest([top, image])
    assert b"d/f" in expected
    with open_view(world, [top, image]) as view:
        assert view_manifest(view) == expected


@pytest.fixture
def full() -> Iterator[World]:
    """A world on a file system of its own, which has the folder `full`: all names of one file, which can have no more.
    In the short set they are few, and the inode says that it has all that ext4 allows."""
    need_root()
    with loop_disk("ext4", 64 << 20) as disk:
        folder = disk.mount_point / "full"
        folder.mkdir()
        file = folder / "f0"
        file.write_text("content")
        os.setxattr(file, "user.kept", b"1")
        os.chown(file, 7, 8)
        file.chmod(0o4755)
        for i in range(1, long.size(20, EXT4_NAMES)):
            (folder / f"f{i}").hardlink_to(file)
        request = f"set_inode_field <{file.stat().st_ino}> links_count {EXT4_NAMES}"
        disk.unmount()
        subprocess.run(["debugfs", "-w", "-R", request, disk.image], check=True, capture_output=True, timeout=60)
        disk.mount()
        world = World(disk.mount_point, 0)
        yield world
        world.close()


def test_merge_of_a_file_that_can_have_no_more_names(full: World) -> None:
    """The merged layer gets copies that share what they can."""
    world = full
    low, image = new_layer(world), new_layer(world)
    for path in (world.base / "full").iterdir():
        path.rename(low / path.name)
    with pytest.raises(OSError, match="Too many links"):
        os.link(low / "f0", low / "one more")
    with open_view(world, merged(world, [low, image], 0, 1)) as view:
        entries = view.list(b"")
        assert len(entries) == len(os.listdir(low))
        assert {(entry.mode, entry.uid, entry.gid, entry.size) for _, entry in entries} == {(0o4755, 7, 8, 7)}
        assert len({entry.inode for _, entry in entries}) == 1  # none fitted the full file, all fitted one copy
        assert view.xattrs(b"f1") == {b"user.kept": b"1"}
        with open(view.open(b"f1")) as f:
            assert f.read() == "content"


def test_merge_needs_an_empty_target(world: World) -> None:
    low, target = new_layer(world), new_layer(world)
    (target / "x").touch()
    fds = [os.open(path, DIR_FLAGS) for path in (low, target)]
    with pytest.raises(ValueError, match="empty target"):
        merge(fds[:1], fds[1])
    with pytest.raises(ValueError, match="at least one"):
        merge([], fds[0])
    for fd in fds:
        os.close(fd)


def test_names_deleted_in_a_merged_directory_of_its_own_are_not_listed(world: World) -> None:
    """The kernel filters the whiteouts of directories that it merges. One that exists in a single layer needs a mark
    for that."""
    top, low, image = (new_layer(world) for _ in range(3))
    (low / "d/e").mkdir(parents=True)
    (low / "d/gone").write_text("x")
    (low / "d/e/gone").write_text("x")
    (low / "d/kept").write_text("x")
    (top / "d/e").mkdir(parents=True)
    whiteout(top / "d/gone")
    whiteout(top / "d/e/gone")
    expected = world.fresh_manifest([top, low, image])
    assert sorted(expected) == [b"", b"d", b"d/e", b"d/kept"]
    stack = merged(world, [top, low, image], 0, 2)
    assert world.fresh_manifest(stack) == expected
    with open_view(world, stack) as view:
        assert view_manifest(view) == expected
    world.remount(stack[:-1])
    os.unlink(os.path.join(world.mount, b"d/kept"))
    assert os.listdir(os.path.join(world.mount, b"d")) == [b"e"]
    shutil.rmtree(os.path.join(world.mount, b"d"))
    assert not os.path.lexists(os.path.join(world.mount, b"d"))
