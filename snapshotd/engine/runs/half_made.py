"""Incomplete trajectories, listed so that they are removed after a crash.

The list is a fact of the catalog: an id enters it before its trajectory is recorded, and leaves it when the trajectory
is complete. The next start removes the incomplete trajectories of a dead daemon (recover.py). Several that are made
together are one item of the list, and incomplete until all of them are complete.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from snapshotd.catalog.base import Catalog
from snapshotd.errors import NotFound
from snapshotd.types import Trajectory, TrajectoryID

_META_KEY = "half_made"

Announce = Callable[[Sequence[TrajectoryID]], None]
"""Told of trajectories, once, before they are recorded."""


class HalfMade:
    """One per engine. Thread-safe."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()

    @contextmanager
    def making(self) -> Iterator[Announce]:
        """Yields a function to call with the ids of trajectories before they are recorded. On leaving the block they are
        complete; after an error, the next start removes those that are still there."""
        told: list[TrajectoryID] = []

        def begin(trajectories: Sequence[TrajectoryID]) -> None:
            told.extend(trajectories)
            self._change(lambda items: [*items, list(trajectories)])

        try:
            yield begin
        except BaseException:
            if any(_find(self._catalog, trajectory) is not None for trajectory in told):
                told.clear()
            raise
        finally:
            if told:
                self._change(lambda items: [item for item in items if item != told])

    def _change(self, change: Callable[[list[list[str]]], list[list[str]]]) -> None:
        with self._lock:
            self._catalog.set_meta(_META_KEY, json.dumps(change(_read_list(self._catalog))))


def find_incomplete(catalog: Catalog) -> list[Trajectory]:
    """The trajectories that a dead daemon has not completed. A trajectory that was made alone is complete with its first own
    snapshot."""
    found: list[Trajectory] = []
    for item in _read_list(catalog):
        there = [one for one in (_find(catalog, TrajectoryID(trajectory)) for trajectory in item) if one is not None]
        if len(item) > 1 or any(one.head == one.forked_from for one in there):
            found += there
    return found


def forget_list(catalog: Catalog) -> None:
    """Empty the list: all incomplete trajectories are removed."""
    if _read_list(catalog):
        catalog.set_meta(_META_KEY, "[]")


def _read_list(catalog: Catalog) -> list[list[str]]:
    items: list[list[str]] = json.loads(catalog.get_meta(_META_KEY) or "[]")
    return items


def _find(catalog: Catalog, trajectory: TrajectoryID) -> Trajectory | None:
    try:
        return catalog.trajectories.get(trajectory)
    except NotFound:
        return None
