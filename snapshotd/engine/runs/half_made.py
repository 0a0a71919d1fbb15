"""Incomplete trajectories, listed so that they are removed after a crash.

The list is a fact of the catalog: an id enters it before its trajectory is recorded, and leaves it when the trajectory
is complete. The next start removes the incomplete trajectories of a dead daemon (recover.py).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from snapshotd.catalog.base import Catalog
from snapshotd.errors import NotFound
from snapshotd.types import Trajectory, TrajectoryID

_META_KEY = "half_made"


class HalfMade:
    """One per engine. Thread-safe."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()

    @contextmanager
    def making(self) -> Iterator[Callable[[TrajectoryID], None]]:
        """Yields a function to call with a trajectory's id before it is recorded. On leaving the block it is complete;
        after an error, if it is still there, the next start removes it."""
        told: list[TrajectoryID] = []

        def begin(trajectory: TrajectoryID) -> None:
            told.append(trajectory)
            self._change(lambda ids: [*ids, trajectory])

        try:
            yield begin
        except BaseException:
            told = [trajectory for trajectory in told if _find(self._catalog, trajectory) is None]
            raise
        finally:
            if told:
                self._change(lambda ids: [trajectory for trajectory in ids if trajectory not in told])

    def _change(self, change: Callable[[list[str]], list[str]]) -> None:
        with self._lock:
            self._catalog.set_meta(_META_KEY, json.dumps(change(_listed(self._catalog))))


def left_behind(catalog: Catalog) -> list[Trajectory]:
    """The trajectories that a dead daemon has not completed: they have no snapshot of their own."""
    found = [_find(catalog, TrajectoryID(trajectory)) for trajectory in _listed(catalog)]
    return [trajectory for trajectory in found if trajectory is not None and trajectory.head == trajectory.forked_from]


def forget_list(catalog: Catalog) -> None:
    """Empty the list: all incomplete trajectories are removed."""
    if _listed(catalog):
        catalog.set_meta(_META_KEY, "[]")


def _listed(catalog: Catalog) -> list[str]:
    ids: list[str] = json.loads(catalog.get_meta(_META_KEY) or "[]")
    return ids


def _find(catalog: Catalog, trajectory: TrajectoryID) -> Trajectory | None:
    try:
        return catalog.get_trajectory(trajectory)
    except NotFound:
        return None
