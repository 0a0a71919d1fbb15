"""Retry one failed subtask alone: go back to before it began, and keep the work that other tasks completed meanwhile.

A task that completed after the one that is retried, and does not depend on it, stays completed: the files that changed
while it ran become a layer over the files before the retried task, its values are set in the state, and its entries go
into the journal, from which the program is answered. That is only right if it did not build on the work of the retried
task: a path (or a value) that was changed outside of it before, and by it then, is refused, before anything happens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from snapshotd.api.history import RetryRequest, TaskInfo
from snapshotd.engine.base import Effect
from snapshotd.engine.context import Context
from snapshotd.engine.history.effects import Effects, task_of
from snapshotd.engine.history.rewinding import LayerMaker, Rewinding
from snapshotd.engine.journal import tasks
from snapshotd.engine.journal.answers import result_of
from snapshotd.engine.journal.replay import KEPT
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.engine.sandbox.step import marker
from snapshotd.engine.storage import look
from snapshotd.errors import Conflict, LimitExceeded
from snapshotd.layers.amend import amend
from snapshotd.trees import apply, diff
from snapshotd.trees.base import Change
from snapshotd.types import (
    CallID,
    CallStatus,
    EntryKind,
    JournalEntry,
    Kind,
    Snapshot,
    SnapshotID,
    Trajectory,
    new_id,
    short,
)

MAX_PATHS = 250_000
"""Paths in one comparison; more would take too much memory."""
MAX_RESULT_BYTES = 8 << 20
_OUTCOMES = (CallStatus.DONE, CallStatus.FAILED)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A task that stays completed: from the snapshot before it to the one that binds its end."""

    task: TaskInfo
    began: Snapshot
    ended: Snapshot


@dataclass(frozen=True, slots=True)
class _Plan:
    task: TaskInfo
    target: Snapshot
    kept: tuple[_Kept, ...]
    effects: tuple[Effect, ...]
    state: dict[str, Any]


class Retry:
    """See the module's text. Thread-safe."""

    def __init__(self, context: Context, sessions: Sessions, rewinding: Rewinding, effects: Effects) -> None:
        self._context, self._catalog, self._sessions = context, context.catalog, sessions
        self._rewinding, self._effects = rewinding, effects

    def retry(self, trajectory: Trajectory, request: RetryRequest) -> Snapshot:
        """See `BranchingService.retry`, without the resumption."""
        with self._sessions.start_for_change(trajectory) as sandbox:
            with self._rewinding.quieten(sandbox, "retry a task of"):
                self._rewinding.settle(sandbox, mind=True)
                head = self._catalog.snapshots.get(sandbox.head)
            with self._context.pins.pinned(head.id):
                plan = self._plan(self._catalog.trajectories.get(trajectory.id), head, request.task)
                if request.compensate:
                    self._effects.run_all(
                        trajectory, plan.effects, "`snapshotd retry --no-compensate` leaves the call behind"
                    )
                with (
                    self._rewinding.quieten(sandbox, "retry a task of"),
                    self._context.pins.pinned(plan.target.id) as target,
                ):
                    self._rewinding.settle(sandbox, mind=True)
                    call = marker(
                        "retry", {"task": request.task, "to": target.id, "kept": [kept.task.name for kept in plan.kept]}
                    )
                    entries = [entry for kept in plan.kept for entry in self._copy_entries(kept)]
                    return self._rewinding.switch(
                        sandbox,
                        call,
                        files=target,
                        follows=target,
                        entries=entries,
                        state=plan.state,
                        change=self._with_files(plan.kept) if plan.kept else None,
                    )

    # -- what to do ----------------------------------------------------------------------------------------------------

    def _plan(self, trajectory: Trajectory, head: Snapshot, name: str) -> _Plan:
        state = self._catalog.conversations.state(head.id)
        task, listed = tasks.find(state, name), tasks.tasks_of(state)
        if task.started_in is None:
            raise Conflict(
                f"the task {name!r} cannot be retried: it has not begun; `snapshotd resume {short(trajectory.id)}` goes on"
            )
        again = {name} | tasks.dependents(listed, name)
        line = self._line(head, SnapshotID(task.started_in))
        if not line:
            raise Conflict(
                f"the task {name!r} cannot be retried: {short(task.started_in)}, where it began, is not of this line any more"
            )
        target = line[0]
        self._rewinding.check_files(trajectory, target)
        then = {
            t.name for t in tasks.tasks_of(self._catalog.conversations.state(target.id)) if t.status == tasks.COMPLETED
        }
        wanted = [t for t in listed if t.status == tasks.COMPLETED and t.name not in again and t.name not in then]
        kept = tuple(sorted((self._plan_kept(t, line, again) for t in wanted), key=lambda k: line.index(k.began)))
        self._check_files(line, kept)
        effects = [e for e in self._effects.beyond(trajectory, target) if task_of(e.entry) in again]
        return _Plan(task, target, kept, tuple(effects), self._state(target, kept))

    def _line(self, head: Snapshot, began: SnapshotID) -> list[Snapshot]:
        """The snapshots from `began` to the head, as the mind went; empty if that does not lie on its way."""
        line = [head]
        while line[-1].id != began:
            before = line[-1].continues
            if before is None:
                return []
            line.append(self._catalog.snapshots.get(before))
        return line[::-1]

    def _plan_kept(self, task: TaskInfo, line: Sequence[Snapshot], again: set[str]) -> _Kept:
        places: dict[str | None, int] = {snapshot.id: index for index, snapshot in enumerate(line)}
        if task.started_in not in places or task.ended_in not in places:
            raise Conflict(
                f"the task {task.name!r}, which would stay completed, began before the one to be retried, or outside of this line; "
                "rewind instead (`snapshotd rewind`)"
            )
        first, last = places[task.started_in], places[task.ended_in]
        for index in range(first + 1, len(line)):
            if any(_is_end(entry, task.name) for entry in self._catalog.journal.own(line[index].id)):
                last = max(last, index)
                break
        for snapshot in line[first + 1 : last + 1]:
            for entry in self._catalog.journal.own(snapshot.id):
                if task_of(entry) in again:
                    raise Conflict(
                        f"the tasks {task.name!r} and {task_of(entry)!r} ran at the same time, so that their files cannot be told apart; "
                        "rewind instead (`snapshotd rewind`)"
                    )
        return _Kept(task, line[first], line[last])

    def _state(self, target: Snapshot, kept: Sequence[_Kept]) -> dict[str, Any]:
        state = self._catalog.conversations.state(target.id)
        values = dict(state.get("values", {}))
        for item in kept:
            before, after = (
                self._catalog.conversations.state(s.id).get("values", {}) for s in (item.began, item.ended)
            )
            for key in before.keys() | after.keys():
                if before.get(key) == after.get(key) and (key in before) == (key in after):
                    continue
                if (key in values) != (key in before) or values.get(key) != before.get(key):
                    raise Conflict(
                        f"the task {item.task.name!r} cannot stay completed: it changed the state {key!r} after another had"
                    )
                if key in after:
                    values[key] = after[key]
                else:
                    values.pop(key, None)
        return tasks.keep({**state, "values": values} if kept else state, [item.task for item in kept])

    # -- files ---------------------------------------------------------------------------------------------------------

    def _check_files(self, line: Sequence[Snapshot], kept: Sequence[_Kept]) -> None:
        """Refuse kept changes that build on a change that goes. Conflict, naming the path."""
        gone: dict[bytes, Change] = {}
        at = line[0]
        for item in kept:
            if line.index(item.began) > line.index(at):
                with self._changes(at, item.began) as changes:
                    gone.update((change.path, change) for change in changes)
            if gone:
                with self._changes(item.began, item.ended) as changes:
                    for change in changes:
                        _check_path(item.task.name, change.path, gone)
            if line.index(item.ended) > line.index(at):
                at = item.ended

    @contextmanager
    def _changes(self, a: Snapshot, b: Snapshot) -> Iterator[Iterator[Change]]:
        with look.open_view(self._context, a) as before, look.open_view(self._context, b) as after:
            yield _check_count(diff.diff(before, after))

    def _with_files(self, kept: Sequence[_Kept]) -> LayerMaker:
        """Makes the layer in which the changes of the kept tasks are."""
        return lambda stack: amend(self._context.store, stack, lambda root: self._write(root, kept))

    def _write(self, root: int, kept: Sequence[_Kept]) -> None:
        for item in kept:
            with (
                look.open_view(self._context, item.began) as before,
                look.open_view(self._context, item.ended) as after,
            ):
                apply.apply(root, diff.diff(before, after), after)

    # -- the journal ---------------------------------------------------------------------------------------------------

    def _copy_entries(self, kept: _Kept) -> list[JournalEntry]:
        """The recorded entries of a kept task, for the new line of the journal."""
        recorded = self._catalog.journal.read(kept.ended.id, since=kept.began.id)
        own = [
            e
            for e in recorded
            if (e.name if e.kind is EntryKind.TASK else task_of(e)) == kept.task.name and e.status in _OUTCOMES
        ]
        return [self._copy_entry(entry, kept) for entry in own]

    def _copy_entry(self, entry: JournalEntry, kept: _Kept) -> JournalEntry:
        result, known = result_of(self._context, entry, MAX_RESULT_BYTES)
        if not known:
            raise LimitExceeded(
                f"the task {kept.task.name!r} cannot stay completed: the result of {entry.name} in it is no JSON of up to "
                f"{MAX_RESULT_BYTES} bytes; rewind instead"
            )
        details = {KEPT: entry.id, **entry.details}
        return replace(
            entry, id=CallID(new_id()), after=kept.began.id, result=result, details=details, facts=(), snapshot=None
        )


def _is_end(entry: JournalEntry, task: str) -> bool:
    return entry.kind is EntryKind.TASK and entry.name == task and entry.status is CallStatus.DONE


def _check_count(changes: Iterator[Change]) -> Iterator[Change]:
    for number, change in enumerate(changes):
        if number >= MAX_PATHS:
            raise LimitExceeded(
                f"a task cannot be retried alone where more than {MAX_PATHS} paths changed around it; rewind instead"
            )
        yield change


def _check_path(task: str, path: bytes, gone: dict[bytes, Change]) -> None:
    """`gone`: changes outside of the task that will be undone."""
    parts = path.split(b"/")
    for count in range(1, len(parts) + 1):
        change = gone.get(b"/".join(parts[:count]))
        if change is None:
            continue
        both_directories = all(
            side is not None and side.kind is Kind.DIRECTORY for side in (change.before, change.after)
        )
        if count == len(parts) or not both_directories:
            shown = "/" + change.path.decode(errors="backslashreplace")
            raise Conflict(
                f"the task {task!r} cannot stay completed: it changed {shown!r}, which had changed before it; rewind instead"
            )
