"""A directory brought to another state in place: the tree with everything in it, to nothing, from nothing, and to
itself changed."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotd.kernel.files import DIR_FLAGS
from snapshotd.kernel.namespaces import CONTAINER_IDS, user_namespace
from snapshotd.layers.amend import amend
from snapshotd.layers.store import LayerStore
from snapshotd.layers.view import open_stack
from snapshotd.trees import diff
from snapshotd.trees.apply import apply
from snapshotd.trees.base import RestoreReport
from snapshotd.trees.materialise import materialise
from snapshotd.trees.stack_view import StackView
from snapshotd.types import ImageID, Stack
from tests import oracles, variety
from tests.capabilities import require


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    require("root")
    os.close(user_namespace(CONTAINER_IDS))  # it is kept for the whole process
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    subprocess.run(["rm", "-rf", tmp_path / "full/deep", tmp_path / "live/deep"], check=True)  # deeper than shutil goes


def tree(path: Path) -> Path:
    path.mkdir()
    return path


def bring(live: Path, before: Path, after: Path, *, shift: int = 0) -> RestoreReport:
    """Apply what differs between two trees to a directory."""
    fds = [os.open(path, DIR_FLAGS) for path in (before, after, live)]
    try:
        with StackView(fds[:1]) as a, StackView(fds[1:2]) as b, StackView(fds[1:2]) as reading:
            return apply(fds[2], diff.diff(a, b), reading, shift=shift, whole_groups=True)
    finally:
        for fd in fds:
            os.close(fd)


def copy(source: Path, target: Path) -> Path:
    target.mkdir()
    fds = [os.open(path, DIR_FLAGS) for path in (source, target)]
    try:
        with StackView(fds[:1]) as view:
            materialise(view, b"", fds[1], whiteouts=True)
    finally:
        for fd in fds:
            os.close(fd)
    return target


def check(live: Path, expected: dict[bytes, variety.Fact]) -> None:
    assert variety.difference(expected, variety.manifest(live)) == ""


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree without its deep part. Shared: do not change it."""
    require("root")
    root = tmp_path_factory.mktemp("shallow") / "tree"
    variety.make(root, deep=False)
    return root


@pytest.fixture(scope="module")
def facts(shallow: Path) -> dict[bytes, variety.Fact]:
    """What is in it."""
    return variety.manifest(shallow)


def test_everything_comes_and_goes(place: Path) -> None:
    variety.make(place / "full")
    live, empty = tree(place / "live"), tree(place / "empty")
    os.utime(empty, ns=(0, 5))
    report = bring(live, empty, place / "full")
    assert report.warnings == ()
    check(live, variety.manifest(place / "full"))
    assert bring(live, place / "full", empty).warnings == ()
    check(live, variety.manifest(empty))


@pytest.mark.long  # our own comparison of the same trees: below
def test_two_oracles_of_others_agree(place: Path, shallow: Path) -> None:
    live = tree(place / "live")
    bring(live, tree(place / "empty"), shallow)
    assert oracles.rsync(shallow, live) == set()
    spec = oracles.mtree_spec(shallow)
    assert oracles.mtree(spec, live) == oracles.mtree(spec, shallow)


def swap_kinds(root: Path) -> None:
    """A file that becomes a directory, a directory that becomes a file, a link, a fifo."""
    for name in ("shapes/empty", "shapes/nested", "modes/dir 7777"):
        subprocess.run(["rm", "-r", root / name], check=True)
    (root / "shapes/empty").write_text("a file")
    os.symlink("elsewhere", root / "shapes/nested")
    os.mkfifo(root / "modes/dir 7777", 0o600)
    (root / "modes/file 0644").unlink()
    (root / "modes/file 0644").mkdir(0o1755)
    (root / "modes/file 0644/deeper").mkdir()
    (root / "modes/file 0644/deeper/file").write_text("x")


def change_metadata(root: Path) -> None:
    os.chmod(root / "shapes/wide", 0o2711)
    os.chown(root / "shapes/wide/7", 12, 34)
    os.chmod(root / "shapes/wide/7", 0o4711)
    os.setxattr(root / "attributes/dir", "user.plain", b"another")
    os.removexattr(root / "attributes/dir", "user.empty")
    os.removexattr(root / "attributes/file", "user.zeros")
    os.chmod(root, 0o700)


def work_in_a_directory_with_a_default_access_list(root: Path) -> None:
    (root / "capabilities_and_acls/dir/inherits").unlink()
    path = root / "capabilities_and_acls/dir/plain"
    path.write_text("made without inheriting")
    for name in os.listxattr(path):
        os.removexattr(path, name)
    path.chmod(0o640)
    (root / "capabilities_and_acls/dir/folder").mkdir()
    for name in os.listxattr(root / "capabilities_and_acls/dir/folder"):
        os.removexattr(root / "capabilities_and_acls/dir/folder", name)


def change_link_groups(root: Path) -> None:
    """One more name for a group, one name less, and a group written anew."""
    os.link(root / "links/z/file", root / "links/z/another")
    (root / "links/z/symlink").unlink()
    os.link(root / "links/z/fifo", root / "shapes/fifo far away")
    first = root / "shapes/wide/1"
    os.link(first, root / "links/a/linked")
    first.write_text("written through one of two names")


def rename_a_directory(root: Path) -> None:
    (root / "holes").rename(root / "shapes/wide/holes")


CHANGES = (
    swap_kinds,
    change_metadata,
    work_in_a_directory_with_a_default_access_list,
    change_link_groups,
    rename_a_directory,
)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(CHANGES, id="all at once"),
        *(pytest.param((one,), id=one.__name__, marks=pytest.mark.long) for one in CHANGES),
    ],
)
def test_a_changed_tree(
    place: Path, shallow: Path, facts: dict[bytes, variety.Fact], changes: tuple[Callable[[Path], None], ...]
) -> None:
    """Each change has paths of its own, so that all of them at once show what each one shows."""
    after, live = copy(shallow, place / "after"), copy(shallow, place / "live")
    for change in changes:
        change(after)
    expected = variety.manifest(after)
    assert expected != facts
    assert bring(live, shallow, after).warnings == ()
    check(live, expected)
    bring(live, after, shallow)
    check(live, facts)


def test_what_did_not_change_is_left_alone(place: Path) -> None:
    before, after, live = tree(place / "before"), tree(place / "after"), tree(place / "live")
    for root, text in ((before, "old"), (after, "new"), (live, "old")):
        (root / "dir").mkdir()
        (root / "dir/changed").write_text(text)
        (root / "dir/same").write_text("same")
    (live / "dir/same").write_text("different in the live tree")
    (live / "dir/own").write_text("only in the live tree")
    inode = (live / "dir/same").stat().st_ino
    bring(live, before, after)
    assert {p.name: p.read_text() for p in (live / "dir").iterdir()} == {
        "changed": "new",
        "same": "different in the live tree",
        "own": "only in the live tree",
    }
    assert (live / "dir/same").stat().st_ino == inode


def test_links_in_the_live_tree_are_not_followed(place: Path) -> None:
    before, after, live, outside = (tree(place / name) for name in ("before", "after", "live", "outside"))
    for root, text in ((before, "old"), (after, "new")):
        (root / "dir").mkdir()
        (root / "dir/file").write_text(text)
        (root / "file").write_text(text)
    (outside / "file").write_text("precious")
    os.symlink(outside, live / "dir")
    os.symlink(outside / "file", live / "file")
    with pytest.raises(OSError, match="dir"):
        bring(live, before, after)
    assert (outside / "file").read_text() == "precious"
    (live / "dir").unlink()
    (live / "dir").mkdir()
    os.symlink(outside / "file", live / "dir/file")
    bring(live, before, after)
    assert (outside / "file").read_text() == "precious"
    assert stat.S_ISREG(os.lstat(live / "file").st_mode)
    assert (live / "dir/file").read_text() == "new"


def test_what_is_mounted_in_the_live_tree_is_not_touched(place: Path) -> None:
    before, after, live, mounted = (tree(place / name) for name in ("before", "after", "live", "mounted"))
    for root, text in ((before, "old"), (after, "new"), (live, "old")):
        (root / "dir").mkdir()
        (root / "dir/file").write_text(text)
        (root / "other").write_text(text)
        (root / "gone/deep").mkdir(parents=True)
        (root / "file").write_text(text)
    subprocess.run(["rm", "-r", after / "gone"], check=True)
    (mounted / "kept").write_text("kept")
    spots = (live / "dir", live / "gone/deep", live / "file")
    try:
        for spot in spots[:2]:
            subprocess.run(["mount", "-t", "tmpfs", "none", spot], check=True)
            (spot / "file").write_text("mounted")
        subprocess.run(["mount", "--bind", mounted / "kept", spots[2]], check=True)
        report = bring(live, before, after)
        assert [(spot / "file").read_text() for spot in spots[:2]] == ["mounted"] * 2
        assert (live / "file").read_text() == "kept"
        assert (live / "other").read_text() == "new"
        assert len(report.warnings) == 3
        assert all("mounted" in warning for warning in report.warnings)
    finally:
        for spot in spots:
            subprocess.run(["umount", spot], check=False, stderr=subprocess.DEVNULL)


def test_ids_of_a_container(place: Path, shallow: Path, facts: dict[bytes, variety.Fact]) -> None:
    """Owners and access lists are shifted on their way into a root that is seen from outside."""
    live = tree(place / "live")
    bring(live, tree(place / "empty"), shallow, shift=100_000)
    got = variety.manifest(live)
    assert {p: (f.uid + 100_000, f.gid + 100_000, f.mode) for p, f in facts.items() if p} == {
        p: (f.uid, f.gid, f.mode) for p, f in got.items() if p
    }
    acl = os.getxattr(live / "capabilities_and_acls/acl", "system.posix_acl_access")
    named = [(tag, who) for tag, _, who in struct.iter_unpack("<HHI", acl[4:]) if who != 0xFFFFFFFF]
    assert named == [(0x02, 101_000), (0x08, 102_000)]


def test_a_missing_directory_is_an_error(place: Path) -> None:
    before, after, live = tree(place / "before"), tree(place / "after"), tree(place / "live")
    for root in (before, after):
        (root / "dir").mkdir()
    (after / "dir/file").write_text("x")
    with pytest.raises(FileNotFoundError, match="dir"):
        bring(live, before, after)


@pytest.mark.long  # such layers, of edits and merges: e2e/test_merge.py
def test_a_layer_over_a_stack(place: Path) -> None:
    """Through an overlay that nobody sees: the stack with the new layer is the tree that was asked for."""
    store = LayerStore(tree(place / "store"), "plain")
    image = ImageID("1" * 32)
    root = place / "store" / "images" / image / "root"
    root.parent.mkdir()
    variety.make(root, deep=False)
    after = copy(root, place / "after")
    for change in (swap_kinds, change_link_groups, change_metadata):
        change(after)
    fds = [os.open(path, DIR_FLAGS) for path in (root, after)]
    try:
        with StackView(fds[:1]) as a, StackView(fds[1:]) as b, StackView(fds[1:]) as reading:
            layer = amend(store, Stack(image), lambda fd: apply(fd, diff.diff(a, b), reading, whole_groups=True))
        with open_stack(store, Stack(image, (layer,))) as made:
            target = tree(place / "made")
            fd = os.open(target, DIR_FLAGS)
            try:
                materialise(made, b"", fd, whiteouts=True)
            finally:
                os.close(fd)
    finally:
        for fd in fds:
            os.close(fd)
    expected, got = variety.manifest(after), variety.manifest(target)
    assert variety.difference(expected, got) == ""
    assert os.listdir(place / "store" / layer) == ["upper"]
    store.close()


def test_a_layer_that_cannot_be_made_leaves_nothing(place: Path) -> None:
    store = LayerStore(tree(place / "store"), "plain")
    (place / "store" / "images" / "i" / "root").mkdir(parents=True)

    def fail(_: int) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        amend(store, Stack(ImageID("i")), fail)
    assert store.layers() == []
    store.close()
