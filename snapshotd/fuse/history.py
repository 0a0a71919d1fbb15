"""The folders of the mount to browse: every stored snapshot, by trajectory and number, by id, and by tag.

    trajectories/<trajectory id>/<seq>/...      a fork's own snapshots; what it began from is in the trajectory it was forked from
    trajectories/<trajectory name>              a link to the id
    snapshots/<snapshot id>/...
    tags/<tag>                                  a link to the snapshot

Read from the catalog when they are asked for; the kernel believes an answer for a second.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from snapshotd.catalog.base import Catalog
from snapshotd.errors import Ambiguous, NotFound
from snapshotd.fuse.folders import Fixed, Folder, Item, Link, TreePlace
from snapshotd.trees.view import View
from snapshotd.types import KNOWN_NAME_PATTERN, Snapshot, SnapshotID, TrajectoryID, TreeID

CURRENT_S = 1.0
_ID = re.compile(rb"[0-9a-f]{32}")
_NUMBER = re.compile(rb"0|[1-9][0-9]{0,17}")

OpenView = Callable[[TreeID], View]


def history(catalog: Catalog, open_view: OpenView) -> Folder:
    """The root of the mount. `open_view(tree)` makes the view of a stored tree."""
    return Fixed(
        {
            b"trajectories": Trajectories(catalog, open_view),
            b"snapshots": Snapshots(catalog, open_view),
            b"tags": TagsFolder(catalog, open_view),
        }
    )


class _CatalogFolder(Folder):
    """A folder that is read from the catalog."""

    timeout_s = CURRENT_S

    def __init__(self, catalog: Catalog, open_view: OpenView) -> None:
        self._catalog, self._open_view = catalog, open_view


class Trajectories(_CatalogFolder):
    def find(self, name: bytes) -> Item | None:
        try:
            if _ID.fullmatch(name):
                try:
                    trajectory = self._catalog.trajectories.get(TrajectoryID(name.decode()))
                    return OneTrajectory(self._catalog, self._open_view, trajectory.id)
                except NotFound:
                    pass  # a name may look like an id
            text = _as_name(name)
            if text is not None:
                trajectory = self._catalog.refs.find_trajectory(text)
                if trajectory.name == text:
                    return Link(trajectory.id.encode())
        except (NotFound, Ambiguous):
            pass
        return None

    def entries(self) -> Iterator[tuple[bytes, Item]]:
        everything = self._catalog.trajectories.list()
        ids = {trajectory.id.encode() for trajectory in everything}
        for trajectory in everything:
            yield trajectory.id.encode(), OneTrajectory(self._catalog, self._open_view, trajectory.id)
            name = (trajectory.name or "").encode()
            if name and name not in ids:
                yield name, Link(trajectory.id.encode())


class OneTrajectory(_CatalogFolder):
    """Its stored snapshots by number. The catalog is asked for all of them at once, at most every `CURRENT_S`, but for
    each listing."""

    def __init__(self, catalog: Catalog, open_view: OpenView, trajectory: TrajectoryID) -> None:
        super().__init__(catalog, open_view)
        self._trajectory = trajectory
        self._known: dict[bytes, Item] = {}
        self._known_at = -CURRENT_S

    def find(self, name: bytes) -> Item | None:
        if _NUMBER.fullmatch(name) is None:
            return None
        if time.monotonic() - self._known_at > CURRENT_S:
            self._read()
        return self._known.get(name)

    def entries(self) -> Iterable[tuple[bytes, Item]]:
        self._read()
        return self._known.items()

    def _read(self) -> None:
        found = self._catalog.snapshots.of_trajectory(self._trajectory)
        self._known = {b"%d" % s.seq: item for s in found if (item := _place(s, self._open_view)) is not None}
        self._known_at = time.monotonic()


class Snapshots(_CatalogFolder):
    def find(self, name: bytes) -> Item | None:
        if _ID.fullmatch(name) is None:
            return None
        try:
            return _place(self._catalog.snapshots.get(SnapshotID(name.decode())), self._open_view)
        except NotFound:
            return None

    def entries(self) -> Iterator[tuple[bytes, Item]]:
        for snapshot in self._catalog.snapshots.all():
            item = _place(snapshot, self._open_view)
            if item is not None:
                yield snapshot.id.encode(), item


class TagsFolder(_CatalogFolder):
    def find(self, name: bytes) -> Item | None:
        text = _as_name(name)
        if text is None:
            return None
        try:
            snapshot = self._catalog.refs.find_snapshot(text)  # a tag wins over the beginning of an id
        except (NotFound, Ambiguous):
            return None
        return _to(snapshot) if text in snapshot.tags and snapshot.tree is not None else None

    def entries(self) -> Iterator[tuple[bytes, Item]]:
        for snapshot in self._catalog.snapshots.all():
            for tag in snapshot.tags if snapshot.tree is not None else ():
                yield tag.encode(), _to(snapshot)


def _as_name(name: bytes) -> str | None:
    text = name.decode("ascii", "replace")
    return text if KNOWN_NAME_PATTERN.fullmatch(text) else None


def _to(snapshot: Snapshot) -> Link:
    return Link(f"../snapshots/{snapshot.id}".encode())


def _place(snapshot: Snapshot, open_view: OpenView) -> TreePlace | None:
    """The place of a snapshot's stored tree. None: it is not stored (yet), or was given up."""
    return None if snapshot.tree is None else TreePlace(snapshot.tree, partial(open_view, snapshot.tree))
