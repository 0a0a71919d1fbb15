"""Forking: several trajectories from one snapshot, all or none."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from snapshotd.engine.base import Forked
from snapshotd.engine.calls import AgentCalls
from snapshotd.engine.context import Context
from snapshotd.engine.sandbox import Sandbox
from snapshotd.engine.sessions import FORK_COUNT, FORK_INDEX, Sessions, fork_agent
from snapshotd.failpoints import hit
from snapshotd.types import ExperimentID, Snapshot, Trajectory, TrajectoryID, TrajectoryStatus, new_id

FORKS_AT_ONCE = 8
"""Containers made in parallel; more only queue for processors."""


class Forks:
    """`forget`: takes a trajectory back that was recorded a moment ago."""

    def __init__(self, context: Context, sessions: Sessions, forget: Callable[[TrajectoryID], None]) -> None:
        self._catalog, self._sessions, self._forget = context.catalog, sessions, forget

    def fork(self, source: Snapshot, n: int, args: tuple[str, ...] | None, name: str | None) -> Forked:
        """See `Engine.fork`. `source` is pinned by the caller."""
        owner = self._catalog.get_trajectory(source.trajectory)
        experiment = ExperimentID(new_id())
        forks = [self._record(owner, source, experiment, index, n, args, name) for index in range(n)]
        launched: list[tuple[Sandbox, AgentCalls]] = []
        try:
            with ThreadPoolExecutor(min(n, FORKS_AT_ONCE)) as pool:
                futures = [pool.submit(self._sessions.launch, fork, source) for fork in forks]
                failures = [f.exception() for f in futures]
                launched = [f.result() for f, failure in zip(futures, failures, strict=True) if failure is None]
            for failure in failures:
                if failure is not None:
                    raise failure
            self._catalog.add_trajectories([(fork, None) for fork in forks])
            hit("engine.fork.recorded")
        except BaseException:
            for sandbox, _ in launched:
                self._sessions.discard(sandbox)
            raise
        try:
            for (sandbox, calls), fork in zip(launched, forks, strict=True):
                self._sessions.adopt(sandbox, calls)
                if fork.agent is not None and args is not None:
                    self._sessions.start_agent(sandbox, fork.agent)
        except BaseException:
            for (sandbox, _), fork in zip(launched, forks, strict=True):
                self._sessions.stop(fork, keep=False)
                self._sessions.discard(sandbox)
                self._forget(fork.id)
            raise
        return Forked(experiment, tuple(forks))

    def _record(
        self, owner: Trajectory, source: Snapshot, experiment: ExperimentID, index: int, n: int, args: tuple[str, ...] | None,
        name: str | None,
    ) -> Trajectory:  # fmt: skip
        env = dict(owner.env) | {FORK_INDEX: str(index), FORK_COUNT: str(n)}
        return Trajectory(
            id=TrajectoryID(new_id()), name=name if n == 1 or name is None else f"{name}-{index}", spec=owner.spec,
            agent=owner.agent if args is None else fork_agent(owner, args, index), head=source.id, status=TrajectoryStatus.RUNNING,
            created_at_ns=time.time_ns(), forked_from=source.id, experiment=experiment, env=tuple(env.items()),
        )  # fmt: skip
