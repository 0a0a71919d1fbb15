"""Figures of the moment: sandboxes, disk, pauses."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection, Iterator

from snapshotd.api.forms import iso_time, milliseconds
from snapshotd.api.service import NodeStats, PauseMinute, PauseStats, SandboxStats, StatsInfo, TrajectoryDisk
from snapshotd.api.storage import UsageInfo
from snapshotd.engine.context import Context
from snapshotd.engine.pauses import BOUNDS_NS, Pauses
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.engine.services.storage import StorageService
from snapshotd.errors import SandboxFailed
from snapshotd.kernel.holding.usage import measure
from snapshotd.types import TrajectoryID

_BEGAN_AT_NS = time.time_ns()


class StatsService:
    """Thread-safe."""

    def __init__(
        self,
        context: Context,
        sessions: Sessions,
        storage: StorageService,
        pauses: Pauses,
        nodes: Callable[[], tuple[NodeStats, ...]] | None = None,
    ) -> None:
        """`nodes`: the nodes of the fleet that the daemon belongs to; None: of none."""
        self._context, self._sessions, self._storage, self._pauses = context, sessions, storage, pauses
        self._nodes = nodes

    def stats(self, most_trajectories: int) -> StatsInfo:
        """All figures but those of requests, which the engine does not see. `most_trajectories`: number of those whose disk use is
        told, the largest first."""
        return StatsInfo(
            measured_at=iso_time(time.time_ns()),
            began_at=iso_time(_BEGAN_AT_NS),
            sandboxes=tuple(self._sandboxes()),
            disk=tuple(self._disk(most_trajectories)),
            usage=self._storage.usage(),
            pauses=self._pause_stats(),
            requests=(),
            watchers=0,
            nodes=() if self._nodes is None else self._nodes(),
        )

    def of_trajectories(self, seen: Collection[TrajectoryID], most_trajectories: int) -> StatsInfo:
        """The figures of some trajectories; the whole daemon's are 0, or empty."""
        return StatsInfo(
            measured_at=iso_time(time.time_ns()),
            began_at=iso_time(_BEGAN_AT_NS),
            sandboxes=tuple(one for one in self._sandboxes() if one.trajectory in seen),
            disk=tuple(self._disk(most_trajectories, seen)),
            usage=UsageInfo(0, 0, 0, 0, {}, 0),
            pauses=PauseStats((), (0,), 0.0, ()),
            requests=(),
            watchers=0,
        )

    def _sandboxes(self) -> Iterator[SandboxStats]:
        for sandbox in self._sessions.live():
            if sandbox.closed:
                continue
            try:
                used = measure(sandbox.cgroup)
            except SandboxFailed:
                continue  # it has just ended
            line = sandbox.trajectory
            yield SandboxStats(
                trajectory=line.id,
                name=line.name,
                runtime=line.spec.runtime,
                agent_running=sandbox.use.agent_running,
                started_at=iso_time(sandbox.started_at_ns),
                cpu_ms=milliseconds(used.cpu_ns),
                used_memory_bytes=used.memory_bytes,
                process_count=used.processes,
                cpus=line.spec.limits.cpus,
                memory_bytes=line.spec.limits.memory_bytes,
            )

    def _disk(self, most: int, seen: Collection[TrajectoryID] | None = None) -> Iterator[TrajectoryDisk]:
        """`seen`: of these trajectories alone; None: of all."""
        if not most:
            return
        size = self._context.store.sizes.total
        totals = self._context.catalog.figures.totals()
        sized = (
            (size(own.layers), own.file_bytes, line) for line, own in totals.items() if seen is None or line in seen
        )
        names = {one.id: one.name for one in self._context.catalog.trajectories.list()}
        for layer_bytes, file_bytes, line in heapq.nlargest(most, sized):
            yield TrajectoryDisk(line, names.get(line), layer_bytes, file_bytes)

    def _pause_stats(self) -> PauseStats:
        total = self._pauses.total()
        minutes = (
            PauseMinute(iso_time(began), tuple(one.counts), milliseconds(one.sum_ns), milliseconds(one.longest_ns))
            for began, one in self._pauses.last_hour()
        )
        return PauseStats(
            tuple(map(milliseconds, BOUNDS_NS)), tuple(total.counts), milliseconds(total.sum_ns), tuple(minutes)
        )
