"""A fork of more children than fit at once: each runs its program to the end before the next takes its place."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from snapshotd.api.trajectories import ForkQueueRequest, ForkRequest, QueuedFork, QueueInfo, RemoveQuery
from snapshotd.at_once import at_once
from snapshotd.engine import records
from snapshotd.engine.base import ForkPlace, Variant
from snapshotd.engine.experiments.base import Attendance
from snapshotd.engine.experiments.parts import Services, count_fitting, full_disk_named
from snapshotd.errors import SnapshotdError, UsageError
from snapshotd.types import ExperimentID, SnapshotID, Trajectory, TrajectoryID, TrajectoryStatus, new_id


class _LeftOff(Exception):  # noqa: N818 - not a failure: nobody waits for the rest
    """The client is gone, and this child has not begun."""


@dataclass(slots=True)
class _Queue:
    services: Services
    source: SnapshotID
    request: ForkQueueRequest
    variants: tuple[Variant, ...]
    attendance: Attendance
    labels: list[str]
    experiment: ExperimentID = field(default_factory=lambda: ExperimentID(new_id()))
    made: list[TrajectoryID] = field(default_factory=list)
    taken_back: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, index: int) -> QueuedFork:
        """Start one child, and wait for its end. With `keep_going` it carries its error."""
        label, line = self.labels[index], None
        try:
            with full_disk_named():
                line = self._start(index)
            for _ in self.services.runs.events(line.id, follow=True):
                pass
            line = self.services.snapshots.trajectory(line.id)
        except SnapshotdError as exc:
            if not self.request.keep_going:
                raise
            return QueuedFork(index, label, None if line is None else records.trajectory(line), exc.message)
        whole = line.status in (TrajectoryStatus.FINISHED, TrajectoryStatus.FAILED)
        why = None if whole else f"its program did not end by itself: {line.status}"
        return QueuedFork(index, label, records.trajectory(line), why)

    def _start(self, index: int) -> Trajectory:
        if self.attendance.gone:
            raise _LeftOff
        asked = self.request
        (made,) = self.services.branching.fork(
            self.source,
            ForkRequest(args=asked.args, name=asked.name, resume=asked.resume),
            self.variants[index : index + 1],
            ForkPlace(self.experiment, index, len(self.labels)),
        ).trajectories
        with self.lock:
            self.made.append(made.id)
            late = self.taken_back
        if late:
            self._remove(made.id)
        return made

    def take_back(self) -> None:
        """Remove what was started, newest first, and what another thread starts meanwhile."""
        with self.lock:
            self.taken_back, made = True, self.made[::-1]
        for trajectory in made:
            self._remove(trajectory)

    def _remove(self, trajectory: TrajectoryID) -> None:
        """Remove a child. One that cannot be removed stays in the list of trajectories."""
        with contextlib.suppress(SnapshotdError):
            self.services.runs.remove(trajectory, RemoveQuery(force=True))


def fork_queue(
    services: Services,
    ref: str,
    request: ForkQueueRequest,
    variants: tuple[Variant, ...],
    attendance: Attendance,
    on_child: Callable[[QueuedFork], object],
) -> QueueInfo:
    """See `ExperimentService.fork_queue`."""
    n = len(variants) or request.n
    ways = variants or (Variant(""),)
    if not request.resume and request.args is None and any(one.args is None for one in ways):
        raise UsageError(
            "a queue needs programs that end, so that others can begin: give the forks a command, or let the program resume"
        )
    source = services.snapshots.get(ref)
    many = request.parallel or count_fitting(ways, services.snapshots.trajectory(source.trajectory))
    labels = [one.label for one in variants] or [str(index) for index in range(n)]
    queue = _Queue(services, source.id, request, variants, attendance, labels)
    found: dict[int, QueuedFork] = {}
    try:
        for index, child in at_once(range(n), many, queue.run, thread="fork"):
            found[index] = child
            on_child(child)
    except SnapshotdError:
        if not request.keep_going:
            queue.take_back()
        raise
    return QueueInfo(queue.experiment, tuple(found[index] for index in range(n)))
