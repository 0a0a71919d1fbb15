"""The folders above the trees: lazy layers by name, and the history by trajectory, id and tag."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.catalog.base import SnapshotRow
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.fuse.folders import Folder, Link, TreePlace
from snapshotd.fuse.history import history
from snapshotd.fuse.lazy_layers import LazyLayers, layer_name
from snapshotd.trees.stack_view import StackView
from snapshotd.trees.view import View
from snapshotd.types import RecordID, TreeID
from tests.records import begin, committed, fork, started

TREE, OTHER = TreeID("a" * 64), TreeID("b" * 64)


def test_a_layers_name_says_what_to_open() -> None:
    asked: list[tuple[TreeID, TreeID]] = []

    def open_view(tree: TreeID, below: TreeID) -> View:
        asked.append((tree, below))
        fd = os.open("/", os.O_RDONLY)
        try:
            return StackView([fd])
        finally:
            os.close(fd)

    place = LazyLayers(open_view).find(layer_name(TREE, OTHER, 1_700_000_000))
    assert isinstance(place, TreePlace)
    assert place.shift == 1_700_000_000
    place.open_view().close()
    assert asked == [(TREE, OTHER)]


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b"x",
        layer_name(TREE, OTHER, 0)[:-1],
        layer_name(TREE, OTHER, 0) + b"\n",
        b"-1" + layer_name(TREE, OTHER, 0)[1:],
        layer_name(TREE, OTHER, 12_345_678_901),
        layer_name(TreeID("A" * 64), OTHER, 0),
        layer_name(TREE, OTHER, 4_294_967_295),
    ],
)
def test_what_is_no_name_of_a_layer_is_not_there(name: bytes) -> None:
    def open_view(tree: TreeID, below: TreeID) -> View:
        raise AssertionError("nothing may be opened")

    layers = LazyLayers(open_view)
    assert layers.find(name) is None
    assert list(layers.entries()) == []


class History:
    def __init__(self, catalog: SqliteCatalog) -> None:
        self.catalog = catalog
        self.opened: list[TreeID] = []
        self.top = history(catalog, self._open)

    def _open(self, tree: TreeID) -> View:
        self.opened.append(tree)
        raise FileNotFoundError

    def at(self, *names: str) -> object:
        item: object = self.top
        for name in names:
            assert isinstance(item, Folder)
            item = item.find(name.encode())
        return item

    def names(self, *names: str) -> list[str]:
        folder = self.at(*names)
        assert isinstance(folder, Folder)
        listed = [(name.decode(), type(item)) for name, item in folder.entries()]
        for name, kind in listed:
            assert type(self.at(*names, name)) is kind  # listing and looking up agree
        return [name for name, _ in listed]


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[History]:
    catalog = SqliteCatalog(":memory:")
    yield History(catalog)
    catalog.close()


def test_trajectories_have_their_own_stored_snapshots_by_number(shown: History) -> None:
    trajectory, first = started(shown.catalog, "fix-it")
    second = committed(shown.catalog, first)
    third = committed(shown.catalog, second)
    branch = fork(second, trajectory)
    shown.catalog.trajectories.add([(branch, None)])
    for snapshot in (first, third):
        shown.catalog.snapshots.set_stored(snapshot.id, TREE, RecordID("e" * 64))
    assert shown.names() == ["trajectories", "snapshots", "tags"]
    assert shown.names("trajectories") == [trajectory.id, "fix-it", branch.id]
    assert shown.at("trajectories", "fix-it") == Link(trajectory.id.encode())
    assert shown.names("trajectories", trajectory.id) == ["0", "2"]
    assert shown.names("trajectories", branch.id) == []
    assert shown.names("snapshots") == [first.id, third.id]
    assert shown.opened == []  # nothing is read of a tree before somebody enters it
    place = shown.at("trajectories", trajectory.id, "2")
    assert isinstance(place, TreePlace)
    with pytest.raises(FileNotFoundError):
        place.open_view()
    assert (place.shift, shown.opened) == (0, [TREE])


def test_tags_lead_to_snapshots(shown: History) -> None:
    _, first = started(shown.catalog)
    second = committed(shown.catalog, first)
    shown.catalog.snapshots.set_stored(first.id, TREE, RecordID("e" * 64))
    shown.catalog.refs.tag(first.id, "good")
    shown.catalog.refs.tag(second.id, "not-stored")
    assert shown.names("tags") == ["good"]
    assert shown.at("tags", "good") == Link(f"../snapshots/{first.id}".encode())
    assert shown.at("tags", "not-stored") is None
    assert shown.at("tags", first.id) is None  # what resolves otherwise is no tag


def test_a_name_that_looks_like_an_id_is_found_unless_it_is_one(shown: History) -> None:
    """As older versions allowed it."""
    trajectory, _ = started(shown.catalog)
    image = shown.catalog.images.find(trajectory.spec.image)
    (lookalike, first), (impostor, second) = begin(image, "0" * 32), begin(image, trajectory.id)
    shown.catalog.others.restore([], [lookalike, impostor], [SnapshotRow(first), SnapshotRow(second)])
    assert sorted(shown.names("trajectories")) == sorted([trajectory.id, lookalike.id, "0" * 32, impostor.id])
    assert shown.at("trajectories", "0" * 32) == Link(lookalike.id.encode())
    assert isinstance(shown.at("trajectories", trajectory.id), Folder)


@pytest.mark.parametrize(
    "name", ["", "x", "..", "a b", "\x00", "é", "f" * 32, "0" * 31, "00", "-1", "9" * 18, "9" * 40, "0\n"]
)
def test_what_is_not_there_is_not_found(shown: History, name: str) -> None:
    trajectory, first = started(shown.catalog, "fix-it")
    shown.catalog.snapshots.set_stored(first.id, OTHER, RecordID("e" * 64))
    for place in (("trajectories",), ("trajectories", trajectory.id), ("snapshots",), ("tags",), ()):
        assert shown.at(*place, name) is None
