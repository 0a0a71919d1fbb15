"""Forking: several trajectories from one snapshot, all or none."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from snapshotd.engine.base import Forked
from snapshotd.engine.context import Context
from snapshotd.engine.mind.calls import AgentCalls
from snapshotd.engine.mind.replay import Resumption
from snapshotd.engine.runs.sessions import FORK_COUNT, FORK_INDEX, Sessions, fork_agent
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.errors import UsageError
from snapshotd.failpoints import hit
from snapshotd.types import ExperimentID, Snapshot, Trajectory, TrajectoryID, TrajectoryStatus, new_id, short


class Forks:
    """`forget`: takes a trajectory back that was recorded a moment ago."""

    def __init__(self, context: Context, sessions: Sessions, forget: Callable[[TrajectoryID], None]) -> None:
        self._catalog, self._secrecy, self._at_once = context.catalog, context.secrecy, context.config.forks_at_once
        self._sessions, self._forget = sessions, forget

    def fork(
        self,
        source: Snapshot,
        n: int,
        args: tuple[str, ...] | None,
        name: str | None,
        *,
        resume: bool = False,
        announce: Callable[[TrajectoryID], None] = lambda _: None,
    ) -> Forked:
        """See `Engine.fork`. `source` is pinned by the caller. `announce` is told of each before it is recorded."""
        owner = self._catalog.get_trajectory(source.trajectory)
        resumption = self.resumption(owner, source) if resume else None
        experiment = ExperimentID(new_id())
        forks = [self._record(owner, source, experiment, index, n, args, name) for index in range(n)]
        if resumption is not None:
            forks = [replace(fork, began=resumption.began.id) for fork in forks]
        elif args is not None:
            forks = [replace(fork, began=source.id) for fork in forks]
        launched: list[tuple[Sandbox, AgentCalls]] = []
        try:
            with ThreadPoolExecutor(min(n, self._at_once)) as pool:
                place = source if resumption is None else resumption.began
                futures = [pool.submit(self._sessions.launch, fork, place, source) for fork in forks]
                failures = [f.exception() for f in futures]
                launched = [f.result() for f, failure in zip(futures, failures, strict=True) if failure is None]
            for failure in failures:
                if failure is not None:
                    raise failure
            for fork in forks:
                announce(fork.id)
            self._catalog.add_trajectories([(fork, None) for fork in forks])
            hit("engine.fork.recorded")
        except BaseException:
            for sandbox, _ in launched:
                self._sessions.discard(sandbox)
            raise
        try:
            for (sandbox, calls), fork in zip(launched, forks, strict=True):
                self._sessions.adopt(sandbox, calls, resumption)
                if fork.agent is not None and (args is not None or resume):
                    self._sessions.start_agent(sandbox, fork.agent)
        except BaseException:
            for (sandbox, _), fork in zip(launched, forks, strict=True):
                self._sessions.stop(fork, keep=False)
                self._sessions.discard(sandbox)
                self._forget(fork.id)
            raise
        return Forked(experiment, tuple(forks))

    def resumption(self, owner: Trajectory, source: Snapshot) -> Resumption:
        """What the program of a fork has to meet. UsageError: there is none."""
        if owner.agent is None or owner.began is None:
            raise UsageError(
                f"{short(owner.id)} has no program that could be resumed; fork without --resume, or give a command after `--`"
            )
        began = self._catalog.get_snapshot(owner.began)
        entries = tuple(self._catalog.journal(source.id, since=began.id))
        return Resumption(began, source, entries, branching=True)

    def _record(
        self,
        owner: Trajectory,
        source: Snapshot,
        experiment: ExperimentID,
        index: int,
        n: int,
        args: tuple[str, ...] | None,
        name: str | None,
    ) -> Trajectory:
        env = dict(owner.env) | {FORK_INDEX: str(index), FORK_COUNT: str(n)}
        return Trajectory(
            id=TrajectoryID(new_id()),
            name=name if n == 1 or name is None else f"{name}-{index}",
            spec=owner.spec,
            agent=owner.agent if args is None else self._secrecy.concealed(owner, fork_agent(owner, args, index)),
            head=source.id,
            status=TrajectoryStatus.RUNNING,
            created_at_ns=time.time_ns(),
            forked_from=source.id,
            experiment=experiment,
            env=tuple(env.items()),
        )
