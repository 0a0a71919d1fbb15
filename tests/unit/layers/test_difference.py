"""The layer between two stored trees: what it shows, and that it is as lazy as it says. The kernel's verdict is in
tests/system."""

from __future__ import annotations

import os

import pytest

from snapshotd.errors import DataLoss
from snapshotd.repo.base import Tree, TreeEntry
from snapshotd.trees.difference import DifferenceView
from snapshotd.trees.stored_view import StoredView
from snapshotd.trees.view import View
from snapshotd.types import Kind, TreeID
from tests.memory_repository import MemoryRepository
from tests.stored_trees import OWN, Plan, file, save, save_deep

LINK = TreeEntry(b"", Kind.SYMLINK, 0o777, 0, 0, 0, target=b"x")


class Counting(MemoryRepository):
    """Counts which trees are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[TreeID] = []

    def load_tree(self, tree_id: TreeID) -> Tree:
        self.loaded.append(tree_id)
        return super().load_tree(tree_id)


@pytest.fixture
def repository() -> Counting:
    return Counting()


def shown(view: View) -> dict[bytes, str]:
    """Path to kind, `-` for whiteouts; listing and looking up must agree."""
    result = {}
    for path, entry in view.walk():
        assert view.lstat(path) == entry
        whiteout = entry.kind is Kind.CHAR_DEVICE and entry.rdev == 0
        assert not whiteout or (entry.mode, entry.uid, entry.gid, view.xattrs(path)) == (0, 0, 0, {})
        result[path] = "-" if whiteout else {Kind.DIRECTORY: "d", Kind.FILE: "f", Kind.SYMLINK: "l"}[entry.kind]
    return result


def difference(repository: MemoryRepository, tree: Plan, below: Plan) -> dict[bytes, str]:
    with DifferenceView(repository, save(repository, tree), save(repository, below)) as view:
        return shown(view)


def test_nothing_differs(repository: Counting) -> None:
    plan: Plan = {b"d": {b"f": b"x"}, b"f": b"y"}
    assert difference(repository, plan, plan) == {}


def test_changed_added_and_deleted_names(repository: Counting) -> None:
    below: Plan = {b"d": {b"a": b"1", b"b": b"2", b"c": b"3"}, b"gone": {b"x": b""}, b"same": {b"x": b""}, b"z": b""}
    tree: Plan = {b"d": {b"a": b"1", b"b": b"new", b"e": b"5"}, b"same": {b"x": b""}, b"n": {b"x": b"", b"y": {}}}
    assert difference(repository, tree, below) == {
        b"d": "d",
        b"d/b": "f",
        b"d/c": "-",
        b"d/e": "f",
        b"gone": "-",
        b"n": "d",
        b"n/x": "f",
        b"n/y": "d",
        b"z": "-",
    }


def test_kinds_change(repository: Counting) -> None:
    below: Plan = {b"dir": {b"x": b""}, b"file": b"1", b"link": LINK, b"other": {b"x": {b"y": b""}}}
    tree: Plan = {b"dir": b"1", b"file": {b"x": b""}, b"link": {b"x": {}}, b"other": LINK}
    assert difference(repository, tree, below) == {
        b"dir": "f",
        b"file": "d",
        b"file/x": "f",
        b"link": "d",
        b"link/x": "d",
        b"other": "l",
    }


def test_a_directory_of_its_own_metadata(repository: Counting) -> None:
    """It is shown with those of `tree`, and nothing in it is."""
    below: Plan = {b"d": {b"x": b"1", b"y": {b"z": b""}}}
    own = OWN._replace(mode=0o700, uid=3, mtime_ns=77, xattrs=((b"user.a", b"b"),))
    tree: Plan = {b"": OWN._replace(uid=9), b"d": {b"": own, b"x": b"1", b"y": {b"z": b""}}}
    with DifferenceView(repository, save(repository, tree), save(repository, below)) as view:
        assert shown(view) == {b"d": "d"}
        entry = view.lstat(b"d")
        assert (entry.mode, entry.uid, entry.mtime_ns, view.xattrs(b"d")) == (0o700, 3, 77, {b"user.a": b"b"})
        assert (view.lstat(b"").uid, view.xattrs(b"")) == (9, {})


def test_data_come_from_the_tree(repository: Counting) -> None:
    sparse = file(repository, b"data", size=100, extents=((10, 4),))
    with DifferenceView(
        repository,
        save(repository, {b"f": b"new", b"s": sparse, b"l": LINK}),
        save(repository, {b"f": b"o", b"w": b""}),
    ) as view:
        with open(view.open(b"f"), "rb") as f:
            assert f.read() == b"new"
        assert view.read_child(view.child(b"s"), 8, 8) == bytes(2) + b"data" + bytes(2)
        assert view.readlink(b"l") == b"x"
        fd = os.memfd_create("target")
        assert view.copy_child(view.child(b"s"), fd) == 100
        os.close(fd)
        for action in (lambda: view.open(b"w"), lambda: view.readlink(b"w"), lambda: view.list(b"w")):
            with pytest.raises(OSError):
                action()


@pytest.mark.parametrize("path", [b"same", b"same/x", b"d/same", b"no", b"d/no", b"..", b"d/.."])
def test_what_is_equal_or_nowhere_does_not_exist(repository: Counting, path: bytes) -> None:
    below: Plan = {b"same": {b"x": b""}, b"d": {b"same": b"", b"b": b""}}
    tree: Plan = {b"same": {b"x": b""}, b"d": {b"same": b"", b"b": b"new"}}
    with (
        DifferenceView(repository, save(repository, tree), save(repository, below)) as view,
        pytest.raises(FileNotFoundError),
    ):
        view.lstat(path)


def test_equal_directories_are_not_read(repository: Counting) -> None:
    same: Plan = {b"in": {b"x": b""}}
    below, tree = (
        save(repository, {b"same": same, b"d": {b"x": b""}}),
        save(repository, {b"same": same, b"d": {b"x": b"1"}}),
    )
    with DifferenceView(repository, tree, below) as view:
        assert shown(view) == {b"d": "d", b"d/x": "f"}
    assert save(repository, same) not in repository.loaded


def test_without_whole_groups_only_what_is_entered_is_read(repository: Counting) -> None:
    deep: Plan = {b"x": {b"y": {b"z": b""}}}
    below, tree = save(repository, {}), save(repository, {b"new": deep})
    with DifferenceView(repository, tree, below, whole_groups=False) as view:
        assert [name for name, _ in view.list(b"")] == [b"new"]
        assert save(repository, deep) not in repository.loaded


def test_its_own_null_devices_are_no_whiteouts_of_others(repository: Counting) -> None:
    """Nothing can be shown for a real 0:0 in a layer: where a name lies below it is hidden, elsewhere it is left
    out."""
    null = TreeEntry(b"", Kind.CHAR_DEVICE, 0o666, 1, 1, 1, xattrs=((b"user.a", b""),))
    assert difference(repository, {b"a": null, b"b": null, b"c": null}, {b"a": b"", b"c": null}) == {
        b"a": "-",
        b"c": "-",
    }


def test_identities(repository: Counting) -> None:
    below, tree = save(repository, {b"d": {b"x": b""}}), save(repository, {b"d": {b"x": b"1"}})
    with (
        DifferenceView(repository, tree, below) as view,
        DifferenceView(repository, tree, tree) as other,
        StoredView(repository, tree) as stored,
    ):
        roots = [v.identity(v.directory()) for v in (view, other, stored)]
        assert len({*roots, view.identity(view.directory(b"d"))}) == 4
        with DifferenceView(repository, tree, below) as again:
            assert again.identity(again.directory()) == roots[0]


# -- hard links --------------------------------------------------------------------------------------------------------


def test_a_group_that_is_equal_on_both_sides_is_not_shown(repository: Counting) -> None:
    one = file(repository, b"x", link=5, nlink=2)
    assert difference(repository, {b"a": one, b"d": {b"b": one}, b"n": b""}, {b"a": one, b"d": {b"b": one}}) == {
        b"n": "f"
    }


def test_a_group_that_was_written_again_is_shown(repository: Counting) -> None:
    old, new = file(repository, b"x", link=5, nlink=2), file(repository, b"x", link=6, nlink=3)
    assert difference(repository, {b"a": new, b"b": new, b"c": new}, {b"a": old, b"b": old}) == {
        b"a": "f",
        b"b": "f",
        b"c": "f",
    }


def test_a_group_whose_directory_was_renamed_is_shown_as_a_whole(repository: Counting) -> None:
    """The names that moved kept the number of their group, and those that did not move did not change at all."""
    one, other = file(repository, b"x", link=5, nlink=4), file(repository, b"y", link=7, nlink=2)
    still: Plan = {
        b"deep": {b"er": {b"x": one, b"other": other}, b"by": b""},
        b"x": one,
        b"z": other,
        b"beside": {b"f": b""},
    }
    below: Plan = {b"old": {b"a": one, b"f": b""}, b"still": still, b"top": one}
    tree: Plan = {b"new": {b"a": one, b"f": b""}, b"still": still, b"top": one}
    expected = {
        b"new": "d",
        b"new/a": "f",
        b"new/f": "f",
        b"old": "-",
        b"still": "d",
        b"still/deep": "d",
        b"still/deep/er": "d",
        b"still/deep/er/x": "f",
        b"still/x": "f",
        b"top": "f",
    }
    assert difference(repository, tree, below) == expected
    with DifferenceView(repository, save(repository, tree), save(repository, below)) as view:
        assert (
            len({entry.inode for path, entry in view.walk() if path.rpartition(b"/")[2] in (b"a", b"x", b"top")}) == 1
        )
        with pytest.raises(FileNotFoundError):
            view.lstat(b"still/beside")
    with DifferenceView(repository, save(repository, tree), save(repository, below), whole_groups=False) as view:
        assert shown(view) == {b"new": "d", b"new/a": "f", b"new/f": "f", b"old": "-"}


def test_a_group_that_lost_a_name(repository: Counting) -> None:
    """Its entries may still say how many they were. Nobody is found, nothing else is shown."""
    one = file(repository, b"x", link=5, nlink=3)
    below: Plan = {b"old": {b"a": one}, b"gone": one, b"same": {b"f": b"1"}}
    assert difference(repository, {b"new": {b"a": one}, b"same": {b"f": b"1"}}, below) == {
        b"new": "d",
        b"new/a": "f",
        b"old": "-",
        b"gone": "-",
    }


def test_deeper_than_any_path_with_a_group(repository: Counting) -> None:
    depth = 6000
    one = file(repository, b"x", link=5, nlink=2)
    still = save_deep(repository, depth, b"d" * 20, {b"x": one})

    def tree(name: bytes) -> TreeID:
        moved = save_deep(repository, depth, b"d" * 20, {b"y": one})
        entries = (
            TreeEntry(name, Kind.DIRECTORY, 0, 0, 0, 0, tree=moved),
            TreeEntry(b"s", Kind.DIRECTORY, 0, 0, 0, 0, tree=still),
        )
        return repository.save_tree(Tree(OWN, entries))

    with DifferenceView(repository, tree(b"m"), tree(b"n")) as view:
        assert sum(1 for _ in view.walk()) == 2 * (depth + 1) + 2 + 1
        deepest = b"s/" + b"/".join([b"d" * 20] * depth)
        assert [name for name, _ in view.list(deepest)] == [b"x"]


def test_damage_below_is_found(repository: Counting) -> None:
    below, tree = save(repository, {b"d": {b"x": b""}}), save(repository, {b"d": {b"x": b"1"}})
    with DifferenceView(repository, tree, below, whole_groups=False) as view:
        del repository.trees[save(repository, {b"x": b""})]
        with pytest.raises(DataLoss, match=f"directory 'd' of tree {below}"):
            view.list(b"d")
