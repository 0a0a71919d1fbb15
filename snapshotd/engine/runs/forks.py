"""Forking: several trajectories from one snapshot, all or none.

launch   a sandbox for each child, on the snapshot's files
record   all of them, in one transaction
change   the files and the mind of the children that differ there, one step each
start    the programs
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from snapshotd.api.trajectories import ForkRequest
from snapshotd.engine.base import EditRequest, Forked, ForkPlace, Variant
from snapshotd.engine.context import Context
from snapshotd.engine.journal.gateways import model_env
from snapshotd.engine.journal.replay import Resumption
from snapshotd.engine.protocol.agent_handler import HandlerSlot
from snapshotd.engine.runs import folder_mode
from snapshotd.engine.runs.half_made import Announce
from snapshotd.engine.runs.resume import entries_upto
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.errors import UsageError
from snapshotd.failpoints import hit
from snapshotd.terms import number_of
from snapshotd.types import (
    ID_FORM,
    NAME_PATTERN,
    AgentSpec,
    ExperimentID,
    RequestKey,
    Snapshot,
    Trajectory,
    TrajectoryID,
    TrajectoryStatus,
    new_id,
    short,
)

T = TypeVar("T")
_PLACE = re.compile(r"\{(index|variant)\}")


def children(request: ForkRequest, variants: tuple[Variant, ...], part: ForkPlace | None = None) -> tuple[Variant, ...]:
    """Each child of a fork with its own name, arguments and environment. UsageError: see `BranchingService.fork`."""
    n, args, name = request.count, request.args, request.name
    if variants and n != len(variants):
        raise UsageError(
            f"{number_of(n, 'fork')} cannot have {number_of(len(variants), 'variant')}: each variant is one fork"
        )
    first, count = (0, n) if part is None else (part.first, part.count)
    if first + n > count:
        raise UsageError(f"there is no part of {n} children from number {first} in a fork of {count}")
    made = [_fill_variant(index, one, args, name) for index, one in enumerate(variants, first)]
    if not variants:
        made = [Variant(str(index), _name(name, str(index), index, count), args) for index in range(first, first + n)]
    for what, values in (("label", [one.label for one in made]), ("name", [one.name for one in made if one.name])):
        twice = next((value for place, value in enumerate(values) if value in values[:place]), None)
        if twice is not None:
            raise UsageError(f"two of the forks would have the {what} {twice!r}; give each its own")
    return tuple(made)


def _fill_variant(index: int, one: Variant, args: tuple[str, ...] | None, name: str | None) -> Variant:
    def fill(text: str) -> str:
        return _fill(text, one.label, index)

    own = args if one.args is None else one.args
    return replace(
        one,
        name=_name(name, one.label, index) if one.name is None else fill(one.name),
        args=None if own is None else tuple(map(fill, own)),
        env=tuple((key, fill(value)) for key, value in one.env),
    )


def _name(name: str | None, label: str, index: int, n: int = 0) -> str | None:
    if name is None:
        return None
    filled = _fill(name, label, index)
    return filled if filled != name or n == 1 else f"{name}-{label}"


def _fill(text: str, label: str, index: int) -> str:
    return _PLACE.sub(lambda found: str(index) if found[1] == "index" else label, text)


class Changes(Protocol):
    """The way to children that differ from their source in files or mind (engine/history/editing.py)."""

    def check(self, source: Snapshot, request: EditRequest) -> None:
        """Check that the change can be made. UsageError, LimitExceeded."""

    def making(self) -> AbstractContextManager[Announce]:
        """Inside the block the children that are announced are incomplete."""

    def change(self, trajectory: Trajectory, source: Snapshot, request: EditRequest) -> None:
        """Make the change in a running child, in one step."""


_SHELLS = ("sh", "bash", "dash")
FORK_INDEX, FORK_COUNT = "SNAPSHOTD_FORK_INDEX", "SNAPSHOTD_FORK_COUNT"


@dataclass(frozen=True, slots=True)
class _Child:
    """A launched child."""

    record: Trajectory
    variant: Variant
    sandbox: Sandbox
    calls: HandlerSlot


class Forks:
    """`forget`: takes a trajectory back that was recorded a moment ago; `resume`: starts a trajectory's program where it
    was left."""

    def __init__(
        self,
        context: Context,
        sessions: Sessions,
        forget: Callable[[TrajectoryID], None],
        resume: Callable[[Trajectory], object],
    ) -> None:
        self._context, self._catalog = context, context.catalog
        self._secrecy, self._config = context.secrecy, context.config
        self._sessions, self._forget, self._resume = sessions, forget, resume

    def fork_one(self, source: Snapshot, name: str | None, announce: Announce) -> Trajectory:
        """Make one fork. UsageError: a malformed name. Other errors: as `fork`."""
        check_name(name)
        one = children(ForkRequest(name=name), ())
        owner, place = self._catalog.trajectories.get(source.trajectory), ForkPlace(ExperimentID(new_id()), 0, 1)
        (child,) = self._launch(source, one, [self._record(owner, source, place, 0, one[0])], None, announce)
        with self._all_or_none([child]):
            self._adopt(child, None, None)
        return child.record

    def fork(
        self,
        source: Snapshot,
        request: ForkRequest,
        forked: tuple[Variant, ...],
        changes: Changes,
        *,
        part: ForkPlace | None = None,
        key: RequestKey | None = None,
    ) -> Forked:
        """See `BranchingService.fork`. `source` is pinned by the caller, `forked` comes from `children`. `key`: of the client's
        request, if the forks are what it asks for."""
        resume = request.resume
        owner = self._catalog.trajectories.get(source.trajectory)
        resumption = self.resumption(owner, source) if resume else None
        place = part or ForkPlace(ExperimentID(new_id()), 0, len(forked))
        edits = [one.edit for one in forked if one.edit is not None]
        for edit in edits:
            changes.check(source, edit)
        records: list[Trajectory] = []
        try:
            for index, one in enumerate(forked, place.first):
                records.append(self._record(owner, source, place, index, one))
        except BaseException:
            for record in records:
                self._secrecy.forget(record.id)
            raise
        if resumption is not None:
            records = [replace(record, began=resumption.began.id) for record in records]
        # children that need no change are complete when they are recorded
        with changes.making() if edits else nullcontext(lambda _: None) as announce:
            made = self._launch(source, forked, records, resumption, announce, None if edits else key)
            with self._all_or_none(made):
                for child in made:
                    self._adopt(child, resumption, request.idle_timeout_s)
                for child in made:
                    self._change(source, child, changes, resume=resume)
                if edits:  # only now: after a crash before, the next start removes the forks
                    self._catalog.requests.add(key, [child.record.id for child in made])
        with self._all_or_none(made):
            warnings = [] if resume else self._start_services(made)
            for child in made:
                self._start(child, resume=resume)
        return Forked(ExperimentID(place.experiment), tuple(map(self._as_made, made)), tuple(warnings))

    def _launch(
        self,
        source: Snapshot,
        forked: tuple[Variant, ...],
        forks: list[Trajectory],
        resumption: Resumption | None,
        announce: Announce,
        request: RequestKey | None = None,
    ) -> list[_Child]:
        """Launch the children, then record them. Nothing is left after an error."""
        launched: list[tuple[Sandbox, HandlerSlot]] = []
        try:
            begin = [source if resumption is None or one.edit is not None else resumption.began for one in forked]
            done = self._side_by_side(
                [partial(self._sessions.launch, fork, at, source) for fork, at in zip(forks, begin, strict=True)]
            )
            launched = [one.result() for one in done if one.exception() is None]
            for one in done:
                one.result()
            announce([fork.id for fork in forks])
            self._catalog.trajectories.add([(fork, None) for fork in forks], request=request)
            self._context.ownership.add_new([fork.id for fork in forks])
            hit("engine.fork.recorded")
        except BaseException:
            for sandbox, _ in launched:
                self._sessions.discard(sandbox)
            for fork in forks:
                self._secrecy.forget(fork.id)
            raise
        return [_Child(fork, one, *pair) for fork, one, pair in zip(forks, forked, launched, strict=True)]

    @contextmanager
    def _all_or_none(self, made: list[_Child]) -> Iterator[None]:
        """Remove all children after an error in the block."""
        try:
            yield
        except BaseException:
            for child in made:
                self._sessions.stop(child.record, keep=False)
                self._sessions.discard(child.sandbox)
                self._forget(child.record.id)
            raise

    def _adopt(self, child: _Child, resumption: Resumption | None, idle_timeout_s: float | None) -> None:
        child.sandbox.use.end_when_idle(self._config.idle_timeout_s if idle_timeout_s is None else idle_timeout_s)
        self._sessions.adopt(child.sandbox, child.calls, None if child.variant.edit is not None else resumption)

    def _change(self, source: Snapshot, child: _Child, changes: Changes, *, resume: bool) -> None:
        if child.variant.edit is None:
            return
        changes.change(child.record, source, child.variant.edit)
        hit("engine.fork.changed")
        if child.variant.args is not None and not resume:  # its program begins on what was changed
            self._catalog.trajectories.set_began(child.record.id, child.sandbox.head)

    def _start_services(self, made: list[_Child]) -> list[str]:
        """Start the services of all children, side by side. Returns a sentence for each that did not come back.
        SandboxFailed: a required one did not."""
        done = self._side_by_side(
            [partial(self._sessions.services.start, child.sandbox, strict=True) for child in made]
        )
        return [sentence for one in done for sentence in one.result()]

    def _side_by_side(self, works: Sequence[Callable[[], T]]) -> list[Future[T]]:
        """Do all of `works`, one or more, and return their results or errors. One alone needs no thread, which would take longer to begin
        than a sandbox without services."""
        if len(works) > 1:
            with ThreadPoolExecutor(min(len(works), self._config.forks_at_once)) as pool:
                return [pool.submit(work) for work in works]
        (work,), alone = works, Future[T]()
        try:
            alone.set_result(work())
        except BaseException as exc:  # noqa: BLE001 - as a pool does; whoever asks for the result gets it
            alone.set_exception(exc)
        return [alone]

    def _start(self, child: _Child, *, resume: bool) -> None:
        """Start the child's program, if one is to run. The program of a changed child is resumed: as a branch it could
        leave the recorded path before the change."""
        if child.record.agent is None or (child.variant.args is None and not resume):
            return
        if resume and child.variant.edit is not None:
            self._resume(child.record)
        else:
            self._sessions.start_agent(child.sandbox, child.record.agent)

    def _as_made(self, child: _Child) -> Trajectory:
        return child.record if child.variant.edit is None else self._catalog.trajectories.get(child.record.id)

    def resumption(self, owner: Trajectory, source: Snapshot) -> Resumption:
        """The recorded entries that a fork's program has to meet. UsageError: the source has no program."""
        if owner.agent is None or owner.began is None:
            raise UsageError(
                f"{short(owner.id)} has no program that could be resumed; fork without resuming, or give a command as its arguments"
            )
        began = self._catalog.snapshots.get(owner.began)
        return Resumption(began, source, entries_upto(self._catalog, source, began.id), branching=True)

    def _record(self, owner: Trajectory, source: Snapshot, part: ForkPlace, index: int, one: Variant) -> Trajectory:
        fork = TrajectoryID(new_id())
        own = self._secrecy.environment(fork, (*one.env, *model_env(owner, one.model)), one.secrets)
        env = dict(owner.env) | dict(own) | {FORK_INDEX: str(index), FORK_COUNT: str(part.count)}
        spec = self._context.sandbox_spec(owner.spec)
        folder_mode.check_variant(spec, one)
        limits = replace(spec.limits, **dict(one.limits))
        made = Trajectory(
            id=fork,
            name=one.name,
            spec=replace(spec, network=one.network or spec.network, limits=limits),
            agent=owner.agent,
            head=source.id,
            status=TrajectoryStatus.RUNNING,
            created_at_ns=time.time_ns(),
            forked_from=source.id,
            experiment=ExperimentID(part.experiment),
            env=tuple(env.items()),
            began=None if one.args is None else source.id,
        )
        if one.args is None:
            return made
        # Its own secrets may stand in its arguments, too, which are recorded.
        return replace(made, agent=self._secrecy.conceal_agent(made, fork_agent(owner, one.args, index)))


def check_name(name: str | None) -> None:
    """Check the form of a trajectory's name. UsageError."""
    if name is not None and not NAME_PATTERN.fullmatch(name):
        raise UsageError(
            f"name {name[:80]!r} is malformed: use 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit"
        )
    if name is not None and ID_FORM.fullmatch(name):
        raise UsageError(
            f"name {name} could be taken for an id, which begins like that: choose one with another letter"
        )


def fork_agent(source: Trajectory | None, args: tuple[str, ...], index: int) -> AgentSpec:
    """The program of a fork: the source's with its arguments replaced, or `args` as a command. Where the source's is a
    command, arguments that begin with an option are its new ones, and everything else is another command. A shell with
    its script and the script's name (`sh -c SCRIPT NAME`) is one program. `{index}` becomes the fork's number."""
    filled = tuple(arg.replace("{index}", str(index)) for arg in args)
    agent = source.agent if source is not None else None
    if agent is None:
        return AgentSpec(argv=filled, program=0)
    program = agent.program
    if not program and filled and filled[0].startswith("-"):
        scripted = agent.argv[0].rpartition("/")[2] in _SHELLS and agent.argv[1:2] == ("-c",) and len(agent.argv) > 3
        program = 4 if scripted else 1
    return replace(agent, argv=(*agent.argv[:program], *filled))
