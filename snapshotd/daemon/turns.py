"""One writer at a time: commands that are to run only while a certain snapshot is the head of their trajectory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from snapshotd.engine.base import Engine
from snapshotd.errors import Conflict
from snapshotd.types import TrajectoryID, short


class Turns:
    """Writers that name the head they saw take turns on a trajectory: the first runs, the others then find another head. Thread-safe.

    Who names no head does not wait here, and is one of the things that move the head.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[TrajectoryID, tuple[threading.Lock, int]] = {}

    @contextlib.contextmanager
    def take(self, engine: Engine, ref: str, head: str) -> Iterator[None]:
        """Hold the trajectory's turn, if snapshot `head` is its head then. Conflict names the head. NotFound, Ambiguous."""
        expected = engine.snapshot(head).id
        line = engine.trajectory(ref).id
        with self._turn(line):
            trajectory = engine.trajectory(line)
            if trajectory.head != expected:
                name = trajectory.name or short(line)
                raise Conflict(
                    f"the head of {name} is {short(trajectory.head)} and no longer {short(expected)}: another writer took a step, and "
                    f"nothing was run; look at it with `snapshotd show {short(trajectory.head)}` and go on from there, or go your own "
                    f"way with `snapshotd fork {short(expected)}`"
                )
            yield

    @contextlib.contextmanager
    def _turn(self, line: TrajectoryID) -> Iterator[None]:
        with self._lock:
            turn, waiting = self._of.get(line, (threading.Lock(), 0))
            self._of[line] = (turn, waiting + 1)
        try:
            with turn:
                yield
        finally:
            with self._lock:
                _, waiting = self._of[line]
                if waiting == 1:
                    del self._of[line]
                else:
                    self._of[line] = (turn, waiting - 1)
