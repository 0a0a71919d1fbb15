"""Going back and apart: forks, rewinds, edits, merges and the effects that they leave behind."""

from __future__ import annotations

from collections.abc import Callable

from snapshotd.api.history import MergeRequest, PromoteRequest, RetryRequest, RewindQuery, RewindRequest
from snapshotd.api.trajectories import ForkRequest
from snapshotd.api.wire import check_ref
from snapshotd.engine.base import ITSELF, EditRequest, Effect, Forked, ForkPlace, Merged, Opener, RewindPreview, Variant
from snapshotd.engine.context import Context
from snapshotd.engine.folders.rewinding.rewinds import FolderRewinds
from snapshotd.engine.history.editing import Editing
from snapshotd.engine.history.effects import Effects
from snapshotd.engine.history.merging import Merging
from snapshotd.engine.history.promotion import Promotion
from snapshotd.engine.history.retry import Retry
from snapshotd.engine.history.rewinding import Rewinding
from snapshotd.engine.journal.approval.gate import Gate
from snapshotd.engine.requests import present
from snapshotd.engine.runs.forks import Forks, check_name, children
from snapshotd.engine.runs.resume import Resumes
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.engine.sandbox.step import StepListener
from snapshotd.engine.storage.cold import Cold
from snapshotd.errors import UsageError
from snapshotd.types import FOLDER, Snapshot, Trajectory, TrajectoryID, short

MAX_FORKS = 256


class BranchingService:
    """Every method may raise NotFound or Ambiguous for a `ref`."""

    def __init__(
        self,
        context: Context,
        sessions: Sessions,
        cold: Cold,
        gate: Gate,
        folder_rewinds: FolderRewinds,
        forks: Forks,
        resumes: Resumes,
        listener: StepListener,
        forget: Callable[[TrajectoryID], None],
    ) -> None:
        """`listener` is told of every step; `forget`: as in `Editing`."""
        self._context, self._catalog, self._sessions = context, context.catalog, sessions
        self._folder_rewinds, self._forks, self._resumes = folder_rewinds, forks, resumes
        self._effects = Effects(context, sessions, gate, listener)
        self._rewinding = Rewinding(context, sessions, cold, self._effects, listener)
        self._retry = Retry(context, sessions, self._rewinding, self._effects)
        self._promotion = Promotion(context, sessions, self._rewinding, self._effects)
        self._merging = Merging(context, sessions, self._rewinding)
        self._editing = Editing(context, sessions, self._rewinding, forks.fork_one, forget, listener)

    def fork(
        self, ref: str, request: ForkRequest, variants: tuple[Variant, ...] = (), part: ForkPlace | None = None
    ) -> Forked:
        """New trajectories (1..256) from one snapshot, each with a running sandbox, all or none. With `args`, the
        trajectory's program (or, where it has none, `args` as a command) is started in each; `{index}` in an argument
        is the fork's number from 0. With `resume` the program (with `args`, if given) is replayed up to the snapshot
        and goes on from there; if it leaves the recorded path, it goes on live from the last snapshot that matched.
        With `variants`, those of the request, there is one child for each. Several children are called NAME-0,
        NAME-1, ..., or by the labels of their variants, unless `{index}` or `{variant}` in the name tells them apart.
        `part`: these are some of more children.
        With `resume`, the program of a child with an `edit` may not leave the recorded path before the snapshot: its run
        is interrupted then, as one that `resume` starts. UsageError: there is no program to resume, two variants have
        one label or name, an edit cannot be made, or a model is named where there is no gateway."""
        if not 1 <= request.count <= MAX_FORKS:
            raise UsageError(f"cannot fork {request.count} times: the number must be from 1 to {MAX_FORKS}")
        forked = children(request, variants, part)
        for one in forked:
            check_name(one.name)
        with self._context.pins.pinned(self._catalog.refs.find_snapshot(ref).id) as source:
            return self._forks.fork(source, request, forked, self._editing, part=part, key=present())

    def rewind(self, ref: str, request: RewindRequest, *, opener: Opener = ITSELF) -> Snapshot:
        """Go back to an older snapshot, in place; recorded as a new snapshot, and `undo` takes it back.

        Nothing is destroyed. Commands in the background are ended, as `interrupted`; changes since the head are captured
        first. With `compensate` the registered compensations of the irreversible calls that are left behind run before the
        rewind, newest first, each at most once. Conflict
        while a process other than init lives in the sandbox, or `to` is not of this trajectory's history;
        SandboxFailed: a compensation failed (what ran stays recorded, nothing was rewound).

        In a user's own folder a path is changed only if all changes since are an agent's, and what is there is what they
        left; the others are named (`left` in the call's arguments). `session`: take the changes of this session of the
        agent back alone, and of those that it continues ("all": of all). Conflict: it is None, and several have changed
        files since; NotFound: it has changed none; UsageError: the trajectory is no folder's. `opener`: who opens that
        folder. NotFound: there is none at its path; Conflict: another one is there; Unsupported: the opener cannot be
        seen."""
        trajectory = self._trajectory(ref)
        is_folder = _is_folder(trajectory, request.session)
        with self._context.pins.pinned(self._snapshot(request.to).id) as target:
            if is_folder:
                return self._folder_rewinds.rewind(trajectory, target, opener, request)
            return self._rewinding.rewind(trajectory, target, request)

    def preview_rewind(self, ref: str, query: RewindQuery, *, opener: Opener = ITSELF) -> RewindPreview:
        """The effect that a rewind would have. Changes nothing."""
        trajectory = self._trajectory(ref)
        is_folder = _is_folder(trajectory, query.session)
        with self._context.pins.pinned(self._snapshot(query.to).id) as target:
            if is_folder:
                return self._folder_rewinds.preview(trajectory, target, opener, query)
            return self._rewinding.preview(trajectory, target, query)

    def undo(self, ref: str, *, opener: Opener = ITSELF) -> Snapshot:
        """Take the last rewind (or undo) back.

        A promotion, too; files and mind, in place; recorded as a new snapshot. Conflict: its head is no rewind (steps were
        taken since), or as `rewind`."""
        trajectory = self._trajectory(ref)
        if _is_folder(trajectory):
            return self._folder_rewinds.undo(trajectory, opener)
        return self._rewinding.undo(trajectory)

    def promote(self, ref: str, request: PromoteRequest) -> Snapshot:
        """Make a fork's head the head of the trajectory that it was forked from, in place; recorded there as a new snapshot,
        and `undo` takes it back.

        `into`: of one further up. Files and mind go over; program, arguments and environment stay that one's own, and the
        fork stays as it is. Conflict: it is no fork of it, or took no step; something runs in either sandbox; the
        trajectory took steps since the fork, unless `leave_behind` or `compensate`, which runs compensations first, as
        `rewind` does. LimitExceeded: the mind is too large to be copied."""
        return self._promotion.promote(self._trajectory(ref), request)

    def merge(self, ref: str, request: MergeRequest) -> Merged:
        """Bring what changed between two snapshots to a trajectory, in place: three-way, all in one step, which is recorded
        as a new snapshot, and `undo` takes it back. The mind goes on. With a conflict nothing is merged. UsageError: the
        snapshots have nothing in common, and no base is named; Conflict: the head changed meanwhile, or as `rewind`;
        NotFound: no snapshot has the directory; Unsupported: texts are to be merged, and there is no git."""
        return self._merging.merge(self._trajectory(ref), request)

    def recall_merge(self, snapshot: str, request: MergeRequest) -> Merged:
        """The answer to the merge that has made this snapshot."""
        return self._merging.recall(self._snapshot(snapshot), request)

    def edit(self, ref: str, request: EditRequest, *, name: str | None = None, resume: bool = False) -> Trajectory:
        """A new trajectory whose first snapshot is that one, edited; with `resume` its program goes on from there.
        UsageError: an edit that cannot be made (the message says which)."""
        with self._context.pins.pinned(self._snapshot(ref).id) as source:
            if resume:
                self._check_program(self._catalog.trajectories.get(source.trajectory))
            edited = self._editing.edit(source, request, name)
        if resume:
            return self._resumes.resume(edited, ())
        if (sandbox := self._sessions.find(edited.id)) is not None:
            self._sessions.services.revive(sandbox)
        return edited

    def retry(self, ref: str, request: RetryRequest) -> Snapshot:
        """Go back to before a task began, compensate its irreversible calls, and let the program go on from there.

        Files and mind go back; without `resume` no program goes on. Tasks that completed after it and do not depend on it
        stay completed, with their files. NotFound: no such task."""
        trajectory = self._trajectory(ref)
        if request.resume:
            self._check_program(trajectory)
        snapshot = self._retry.retry(trajectory, request)
        if request.resume:
            self._resumes.resume(self._catalog.trajectories.get(trajectory.id), ())
        return snapshot

    def _check_program(self, trajectory: Trajectory) -> None:
        if trajectory.agent is None or trajectory.began is None:
            raise UsageError(
                f"trajectory {short(trajectory.id)} has no program that could go on; ask for it without resuming"
            )

    def effects(self, ref: str) -> list[Effect]:
        """The irreversible calls that its present history does not hold: left behind by rewinds. Newest first."""
        return self._effects.left_behind(self._trajectory(ref))

    def compensate(self, ref: str, calls: tuple[str, ...]) -> list[Effect]:
        """Run the compensations of calls that were left behind, newest first, each at most once. It goes on when the client
        goes away.

        All, if none is named."""
        named = tuple(check_ref(call, "call") for call in calls)
        return self._effects.compensate(self._trajectory(ref), named)

    def _trajectory(self, ref: str) -> Trajectory:
        return self._catalog.refs.find_trajectory(ref)

    def _snapshot(self, ref: str) -> Snapshot:
        return self._catalog.refs.find_snapshot(ref)


def _is_folder(trajectory: Trajectory, session: str | None = None) -> bool:
    """True for a user's own folder, where alone a session may be named (UsageError)."""
    is_folder = trajectory.spec.runtime == FOLDER
    if session is not None and not is_folder:
        raise UsageError("a sandbox has one agent; a session is chosen in a user's own folder alone")
    return is_folder
