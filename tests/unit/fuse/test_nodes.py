from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from snapshotd.fuse import nodes as module
from snapshotd.fuse.folders import Fixed, TreePlace
from snapshotd.fuse.nodes import ROOT_NUMBER, Nodes, SharedView, ShownNode
from snapshotd.trees.stack_view import StackView
from snapshotd.trees.view import View


class Counted(StackView):
    """A view of a folder that tells whether it was closed."""

    closed = False

    def __init__(self, folder: Path) -> None:
        fd = os.open(folder, os.O_RDONLY)
        super().__init__([fd])
        os.close(fd)

    def close(self) -> None:
        super().close()
        self.closed = True


class Shown:
    def __init__(self, folder: Path) -> None:
        self.views: list[Counted] = []
        self.folder = folder
        self.place = TreePlace("tree", self.open)
        self.nodes = Nodes(Fixed({}))

    def open(self) -> View:
        self.views.append(Counted(self.folder))
        return self.views[-1]

    def root(self, name: bytes = b"here") -> ShownNode:
        node = self.nodes.of_item(self.nodes.get(ROOT_NUMBER), name, self.place)
        self.nodes.note_lookup(node)
        self.nodes.open_place(node)
        return node

    def child(self, parent: ShownNode, name: bytes) -> ShownNode:
        assert parent.tree is not None
        node = self.nodes.of_child(parent, parent.tree.view.find(parent.directory, name))
        self.nodes.note_lookup(node)
        return node


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    (tmp_path / "sub/deeper").mkdir(parents=True)
    (tmp_path / "one").touch()
    (tmp_path / "two").touch()
    os.link(tmp_path / "one", tmp_path / "sub/one again")
    result = Shown(tmp_path)
    yield result
    for view in result.views:
        view.close()


def test_names_of_one_file_have_one_number_and_everything_else_its_own(shown: Shown) -> None:
    root = shown.root()
    sub = shown.child(root, b"sub")
    one, two, again = shown.child(root, b"one"), shown.child(root, b"two"), shown.child(sub, b"one again")
    assert one is again
    assert one.lookups == 2
    assert len({ROOT_NUMBER, root.number, sub.number, one.number, two.number}) == 5
    assert all(node.number < 1 << 56 for node in (root, sub, one, two))
    assert again.path() == "'here/one'"


def test_a_number_comes_back_after_it_was_forgotten(shown: Shown) -> None:
    root = shown.root()
    numbers = [shown.child(root, name).number for name in (b"one", b"two", b"sub")]
    shown.nodes.forget([(number, 1) for number in numbers])
    assert len(shown.nodes) == 2
    with pytest.raises(KeyError):
        shown.nodes.get(numbers[0])
    assert [shown.child(root, name).number for name in (b"one", b"two", b"sub")] == numbers


def test_what_is_forgotten_as_often_as_it_was_told_is_dropped_and_the_view_closed(shown: Shown) -> None:
    root = shown.root()
    one = shown.child(root, b"one")
    shown.child(root, b"one")
    shown.nodes.forget([(one.number, 1), (12345, 1), (ROOT_NUMBER, 7)])
    assert shown.nodes.get(one.number) is one
    shown.nodes.forget([(root.number, 1)])
    assert not shown.views[0].closed
    shown.nodes.forget([(one.number, 1)])
    assert shown.views[0].closed
    assert len(shown.nodes) == 1
    shown.root()
    assert len(shown.views) == 2


def test_places_with_one_tree_share_its_view_but_no_numbers(shown: Shown) -> None:
    here, there = shown.root(b"here"), shown.root(b"there")
    assert len(shown.views) == 1
    one, other = shown.child(here, b"one"), shown.child(there, b"one")
    assert len({here.number, there.number, one.number, other.number}) == 4
    shown.nodes.forget([(here.number, 1), (one.number, 1)])
    assert not shown.views[0].closed
    shown.nodes.forget([(there.number, 1), (other.number, 1)])
    assert shown.views[0].closed


def test_a_place_is_opened_when_it_is_entered_and_once(shown: Shown) -> None:
    node = shown.nodes.of_item(shown.nodes.get(ROOT_NUMBER), b"here", shown.place)
    shown.nodes.note_lookup(node)
    assert shown.views == []
    shown.nodes.forget([(node.number, 1)])
    assert len(shown.nodes) == 1
    first, second = shown.root(), shown.root()
    assert first is second
    assert len(shown.views) == 1


def test_two_files_that_hash_to_one_number_get_two(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_digest", lambda number, name: b"\xff" * 7 + name.ljust(9, b"\0")[:9])
    root = shown.root()
    one, two = shown.child(root, b"two"), shown.child(root, b"sub")
    numbers = (root.number, one.number, two.number)
    assert numbers == ((1 << 56) - 1, 2, 3)  # around the end, and not the root's
    assert shown.child(root, b"two") is one


def test_deep_trees_have_paths_of_any_length(shown: Shown, tmp_path: Path) -> None:
    at = shown.root()
    for _ in range(5000):
        deeper = ShownNode(at.number, b"", at, b"d" * 10)
        at = deeper
    assert len(at.path()) < 4100
    assert at.path().startswith("'here/dddddddddd/")


def test_a_view_serves_one_thread_at_a_time_and_nobody_waits_for_ever() -> None:
    """Many who read in threads and many who wait for a moment between them."""

    class Slow:
        users = 0

        def read_child(self, child: object, offset: int, length: int) -> bytes:
            assert self.users == 0
            self.users += 1
            time.sleep(0.002)  # the work
            self.users -= 1
            return b"x" * length

    view = Slow()
    source = SharedView(view, "key")  # type: ignore[arg-type]
    answers: list[bytes] = []

    async def reader() -> None:
        for _ in range(10):
            data = await source.read_in_thread(None, 0, 3)  # type: ignore[arg-type]
            answers.append(data)

    async def other() -> None:
        for _ in range(20):
            await source.idle()
            assert view.users == 0
            await trio.lowlevel.checkpoint()

    async def main() -> None:
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(reader)
                    nursery.start_soon(other)

    trio.run(main)
    assert answers == [b"xxx"] * 40
