"""Forking: several trajectories from one snapshot, all or none."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from snapshotd.engine.base import Forked, ForkPart, Variant
from snapshotd.engine.context import Context
from snapshotd.engine.mind.calls import AgentCalls
from snapshotd.engine.mind.replay import Resumption
from snapshotd.engine.runs.sessions import FORK_COUNT, FORK_INDEX, Sessions, fork_agent
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.errors import UsageError
from snapshotd.failpoints import hit
from snapshotd.types import (
    NAME_PATTERN,
    ExperimentID,
    RequestKey,
    Snapshot,
    Trajectory,
    TrajectoryID,
    TrajectoryStatus,
    new_id,
    short,
)

_PLACE = re.compile(r"\{(index|variant)\}")


def children(
    n: int, args: tuple[str, ...] | None, name: str | None, variants: tuple[Variant, ...], part: ForkPart | None = None
) -> tuple[Variant, ...]:
    """Each child of a fork with its own name, arguments and environment. UsageError: see `Engine.fork`."""
    if variants and n != len(variants):
        raise UsageError(f"{n} forks were asked for, but there are {len(variants)} variants, one fork each")
    first, count = (0, n) if part is None else (part.first, part.count)
    if first + n > count:
        raise UsageError(f"there is no part of {n} children from number {first} in a fork of {count}")
    made = [_filled(index, one, args, name) for index, one in enumerate(variants, first)]
    if not variants:
        made = [Variant(str(index), _name(name, str(index), index, count), args) for index in range(first, first + n)]
    for what, values in (("label", [one.label for one in made]), ("name", [one.name for one in made if one.name])):
        twice = next((value for place, value in enumerate(values) if value in values[:place]), None)
        if twice is not None:
            raise UsageError(f"two of the forks would have the {what} {twice!r}; give each its own")
    return tuple(made)


def _filled(index: int, one: Variant, args: tuple[str, ...] | None, name: str | None) -> Variant:
    def fill(text: str) -> str:
        return _fill(text, one.label, index)

    own = args if one.args is None else one.args
    return Variant(
        one.label,
        _name(name, one.label, index) if one.name is None else fill(one.name),
        None if own is None else tuple(map(fill, own)),
        tuple((key, fill(value)) for key, value in one.env),
    )


def _name(name: str | None, label: str, index: int, n: int = 0) -> str | None:
    if name is None:
        return None
    filled = _fill(name, label, index)
    return filled if filled != name or n == 1 else f"{name}-{label}"


def _fill(text: str, label: str, index: int) -> str:
    return _PLACE.sub(lambda found: str(index) if found[1] == "index" else label, text)


class Forks:
    """`forget`: takes a trajectory back that was recorded a moment ago."""

    def __init__(self, context: Context, sessions: Sessions, forget: Callable[[TrajectoryID], None]) -> None:
        self._context, self._catalog, self._secrecy, self._config = (
            context,
            context.catalog,
            context.secrecy,
            context.config,
        )
        self._sessions, self._forget = sessions, forget

    def once(self, source: Snapshot, name: str | None, announce: Callable[[TrajectoryID], None]) -> Trajectory:
        """One fork. UsageError: a malformed name; the others as `fork`."""
        check_name(name)
        return self.fork(source, children(1, None, name, ()), announce=announce).trajectories[0]

    def fork(
        self,
        source: Snapshot,
        forked: tuple[Variant, ...],
        *,
        resume: bool = False,
        idle_timeout_s: float | None = None,
        part: ForkPart | None = None,
        announce: Callable[[TrajectoryID], None] = lambda _: None,
        request: RequestKey | None = None,
    ) -> Forked:
        """See `Engine.fork`. `source` is pinned by the caller, `forked` comes from `children`. `announce` is told of
        each before it is recorded. `request`: the client's, if the forks are what it asks for."""
        owner = self._catalog.get_trajectory(source.trajectory)
        resumption = self.resumption(owner, source) if resume else None
        place = part or ForkPart(ExperimentID(new_id()), 0, len(forked))
        forks = [self._record(owner, source, place, index, one) for index, one in enumerate(forked, place.first)]
        if resumption is not None:
            forks = [replace(fork, began=resumption.began.id) for fork in forks]
        launched: list[tuple[Sandbox, AgentCalls]] = []
        try:
            with ThreadPoolExecutor(min(len(forks), self._config.forks_at_once)) as pool:
                begin = source if resumption is None else resumption.began
                futures = [pool.submit(self._sessions.launch, fork, begin, source) for fork in forks]
                failures = [f.exception() for f in futures]
                launched = [f.result() for f, failure in zip(futures, failures, strict=True) if failure is None]
            for failure in failures:
                if failure is not None:
                    raise failure
            for fork in forks:
                announce(fork.id)
            self._catalog.add_trajectories([(fork, None) for fork in forks], request=request)
            hit("engine.fork.recorded")
        except BaseException:
            for sandbox, _ in launched:
                self._sessions.discard(sandbox)
            for fork in forks:
                self._secrecy.forget(fork.id)
            raise
        try:
            for (sandbox, calls), fork, one in zip(launched, forks, forked, strict=True):
                sandbox.use.end_when_idle(self._config.idle_timeout_s if idle_timeout_s is None else idle_timeout_s)
                self._sessions.adopt(sandbox, calls, resumption)
                if fork.agent is not None and (one.args is not None or resume):
                    self._sessions.start_agent(sandbox, fork.agent)
        except BaseException:
            for (sandbox, _), fork in zip(launched, forks, strict=True):
                self._sessions.stop(fork, keep=False)
                self._sessions.discard(sandbox)
                self._forget(fork.id)
            raise
        return Forked(place.experiment, tuple(forks))

    def resumption(self, owner: Trajectory, source: Snapshot) -> Resumption:
        """The recorded entries that a fork's program has to meet. UsageError: the source has no program."""
        if owner.agent is None or owner.began is None:
            raise UsageError(
                f"{short(owner.id)} has no program that could be resumed; fork without resuming, or give a command as its arguments"
            )
        began = self._catalog.get_snapshot(owner.began)
        entries = tuple(self._catalog.journal(source.id, since=began.id))
        return Resumption(began, source, entries, branching=True)

    def _record(self, owner: Trajectory, source: Snapshot, part: ForkPart, index: int, one: Variant) -> Trajectory:
        fork = TrajectoryID(new_id())
        own = self._secrecy.environment(fork, one.env, ())
        env = dict(owner.env) | dict(own) | {FORK_INDEX: str(index), FORK_COUNT: str(part.count)}
        agent = owner.agent
        if one.args is not None:
            agent = self._secrecy.concealed(owner, fork_agent(owner, one.args, index))
        return Trajectory(
            id=fork,
            name=one.name,
            spec=self._context.sandbox_spec(owner.spec),
            agent=agent,
            head=source.id,
            status=TrajectoryStatus.RUNNING,
            created_at_ns=time.time_ns(),
            forked_from=source.id,
            experiment=part.experiment,
            env=tuple(env.items()),
            began=None if one.args is None else source.id,
        )


def check_name(name: str | None) -> None:
    """UsageError: a malformed name."""
    if name is not None and not NAME_PATTERN.fullmatch(name):
        raise UsageError(
            f"name {name[:80]!r} is malformed: use 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit"
        )
