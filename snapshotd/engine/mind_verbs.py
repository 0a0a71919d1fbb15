"""The verbs of the agent's mind, each a line or two over the module that is about it. See `engine/base.py` for the
contract.

rewinding.py  promotion.py  merging.py  effects.py  retry.py  editing.py  approvals.py  keyvalue.py  tasks.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from snapshotd.engine.base import (
    ITSELF,
    ApprovalView,
    EditRequest,
    Effect,
    Engine,
    Event,
    MergeRequest,
    Opener,
    RewindMode,
    RewindPreview,
    Task,
)
from snapshotd.engine.context import Context
from snapshotd.engine.folders.folders import Folders
from snapshotd.engine.mind import tasks
from snapshotd.engine.mind.answers import with_result
from snapshotd.engine.mind.approvals import Gate
from snapshotd.engine.mind.keyvalue import KeyValueStore
from snapshotd.engine.past.editing import Editing, Fork
from snapshotd.engine.past.effects import Effects
from snapshotd.engine.past.merging import Merging
from snapshotd.engine.past.promotion import Promotion
from snapshotd.engine.past.retry import Retry
from snapshotd.engine.past.rewinding import Rewinding
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.engine.sandbox.step import StepListener
from snapshotd.engine.storing import look
from snapshotd.engine.storing.cold import Cold
from snapshotd.errors import UsageError
from snapshotd.trees.base import Change
from snapshotd.types import (
    Approval,
    ApprovalStatus,
    CallID,
    JournalEntry,
    SideEffect,
    Snapshot,
    SnapshotID,
    SnapshotState,
    StoredValue,
    Trajectory,
    TrajectoryID,
    short,
)


class Mind:
    """The parts that the verbs call."""

    def __init__(
        self,
        context: Context,
        sessions: Sessions,
        cold: Cold,
        gate: Gate,
        values: KeyValueStore,
        listener: StepListener,
        *,
        fork: Fork,
        forget: Callable[[TrajectoryID], None],
    ) -> None:
        """`listener` is told of every step; `fork`, `forget`: as in `Editing`."""
        self.context, self.gate, self.values = context, gate, values
        self.effects = Effects(context, sessions, gate, listener)
        self.rewinding = Rewinding(context, sessions, cold, self.effects, listener)
        self.retry = Retry(context, sessions, self.rewinding, self.effects)
        self.promotion = Promotion(context, sessions, self.rewinding, self.effects)
        self.merging = Merging(context, sessions, self.rewinding)
        self.folders = Folders(context, cold, listener)
        self.editing = Editing(context, sessions, self.rewinding, fork, forget, listener)

        values.start_sweeping()

    def close(self) -> None:
        """End all waiting calls and all watches. Idempotent."""
        self.gate.close()
        self.context.events.watch.close()
        self.values.close()
        self.folders.close()

    def journal(self, ref: str) -> Iterator[JournalEntry]:
        """See `Engine.journal`."""
        catalog = self.context.catalog
        snapshot = catalog.resolve_snapshot(ref)
        if ref in snapshot.tags or snapshot.id.startswith(ref):
            found = list(catalog.journal(snapshot.id, since=catalog.get_trajectory(snapshot.trajectory).began))
        else:
            trajectory = catalog.resolve_trajectory(ref)
            found = [*catalog.journal(trajectory.head, since=trajectory.began), *catalog.unbound(trajectory.id)]
        return (with_result(self.context, entry) for entry in found)

    def view(self, approval: Approval, max_files: int) -> ApprovalView:
        """See `Engine.approval`. No files are listed if the snapshot to compare with has given up its own."""
        trajectory = self.context.catalog.get_trajectory(approval.trajectory)
        since = self._compared_with(approval, trajectory)
        files: tuple[Change, ...] = ()
        if since is not None:
            files = tuple(islice(look.changes(self.context, since, approval.snapshot), max_files))
        return ApprovalView(approval, trajectory, files, since)

    def _compared_with(self, approval: Approval, trajectory: Trajectory) -> SnapshotID | None:
        catalog = self.context.catalog
        decided = [
            other
            for other in catalog.approvals.list(None, trajectory.id)
            if other.status in (ApprovalStatus.APPROVED, ApprovalStatus.DENIED)
            and other.created_at_ns < approval.created_at_ns
        ]
        since = decided[-1].snapshot if decided else trajectory.began or trajectory.forked_from
        if since is None:
            first = catalog.get_snapshot(approval.snapshot)
            while first.parent is not None:
                first = catalog.get_snapshot(first.parent)
            since = first.id
        kept = catalog.get_snapshot(since).state in (SnapshotState.CAPTURED, SnapshotState.STORED)
        return since if kept else None


class MindVerbs(Engine):
    """The part of the engine that is about the mind. A subclass sets `_mind`."""

    _mind: Mind

    def _trajectory(self, ref: str) -> Trajectory:
        return self._mind.context.catalog.resolve_trajectory(ref)

    def _snapshot(self, ref: str) -> Snapshot:
        return self._mind.context.catalog.resolve_snapshot(ref)

    # -- going back ----------------------------------------------------------------------------------------------------

    def rewind(
        self,
        ref: str,
        to: str,
        *,
        mode: RewindMode = "both",
        compensate: bool = False,
        session: str | None = None,
        opener: Opener = ITSELF,
    ) -> Snapshot:
        _refuse_session(session)
        with self._mind.context.pins.pinned(self._snapshot(to).id) as target:
            return self._mind.rewinding.rewind(self._trajectory(ref), target, mode, compensate=compensate)

    def preview_rewind(
        self,
        ref: str,
        to: str,
        *,
        mode: RewindMode = "both",
        max_files: int = 1000,
        session: str | None = None,
        opener: Opener = ITSELF,
    ) -> RewindPreview:
        _refuse_session(session)
        with self._mind.context.pins.pinned(self._snapshot(to).id) as target:
            return self._mind.rewinding.preview(self._trajectory(ref), target, mode, max_files)

    def undo(self, ref: str, *, opener: Opener = ITSELF) -> Snapshot:
        return self._mind.rewinding.undo(self._trajectory(ref))

    def promote(
        self, ref: str, *, into: str | None = None, leave_behind: bool = False, compensate: bool = False
    ) -> Snapshot:
        target = None if into is None else self._trajectory(into)
        return self._mind.promotion.promote(
            self._trajectory(ref), target, leave_behind=leave_behind, compensate=compensate
        )

    def merge(self, ref: str, source: str, request: MergeRequest) -> Snapshot:
        with self._mind.context.pins.pinned(self._snapshot(source).id) as pinned:
            return self._mind.merging.merge(self._trajectory(ref), pinned, request)

    def edit(self, ref: str, request: EditRequest, *, name: str | None = None, resume: bool = False) -> Trajectory:
        with self._mind.context.pins.pinned(self._snapshot(ref).id) as source:
            if resume:
                self._check_program(self._mind.context.catalog.get_trajectory(source.trajectory))
            edited = self._mind.editing.edit(source, request, name)
        return self.resume(edited.id) if resume else edited

    def retry(self, ref: str, task: str, *, compensate: bool = True, resume: bool = True) -> Snapshot:
        trajectory = self._trajectory(ref)
        if resume:
            self._check_program(trajectory)
        snapshot = self._mind.retry.retry(trajectory, task, compensate=compensate)
        if resume:
            self.resume(trajectory.id)
        return snapshot

    def _check_program(self, trajectory: Trajectory) -> None:
        if trajectory.agent is None or trajectory.began is None:
            raise UsageError(
                f"trajectory {short(trajectory.id)} has no program that could go on; ask for it without resuming"
            )

    def effects(self, ref: str) -> list[Effect]:
        return self._mind.effects.left_behind(self._trajectory(ref))

    def compensate(self, ref: str, calls: tuple[str, ...]) -> list[Effect]:
        return self._mind.effects.compensate(self._trajectory(ref), calls)

    # -- looking -------------------------------------------------------------------------------------------------------

    def journal(self, ref: str) -> Iterator[JournalEntry]:
        return self._mind.journal(ref)

    def state(self, ref: str) -> dict[str, Any]:
        values: dict[str, Any] = self._mind.context.catalog.state(self._snapshot(ref).id).get("values", {})
        return values

    def tasks(self, ref: str) -> list[Task]:
        return tasks.listed(self._mind.context.catalog.state(self._snapshot(ref).id))

    # -- approvals -----------------------------------------------------------------------------------------------------

    def ask(
        self,
        ref: str,
        call: str,
        tool: str,
        arguments: Any,
        *,
        side_effect: SideEffect = SideEffect.LOCAL,
        question: str | None = None,
        expires_s: float | None = None,
    ) -> Approval | None:
        return self._mind.gate.ask(
            self._trajectory(ref), CallID(call), tool, arguments, side_effect, question=question, expires_s=expires_s
        )

    def approvals(self, status: ApprovalStatus | None = None) -> list[Approval]:
        return self._mind.gate.list(status)

    def approval(self, ref: str, *, max_files: int = 1000) -> ApprovalView:
        return self._mind.view(self._mind.gate.find(ref), max_files)

    def approve(self, ref: str, *, by: str, reason: str | None = None, arguments: tuple[Any] | None = None) -> Approval:
        return self._mind.gate.approve(ref, by=by, reason=reason, arguments=arguments)

    def deny(self, ref: str, *, by: str, reason: str | None = None) -> Approval:
        return self._mind.gate.deny(ref, by=by, reason=reason)

    def watch(self) -> Iterator[Event]:
        return self._mind.context.events.watch.follow()

    # -- key-value store -----------------------------------------------------------------------------------------------

    def put_value(
        self,
        tenant: str,
        namespace: str,
        key: str,
        value: Any,
        *,
        ttl_s: float | None = None,
        expected_version: int | None = None,
    ) -> StoredValue:
        concealed = self._mind.context.secrecy.shared().conceal(value)
        return self._mind.values.put(tenant, namespace, key, concealed, ttl_s=ttl_s, expected_version=expected_version)

    def get_value(self, tenant: str, namespace: str, key: str, version: int | None = None) -> StoredValue:
        return self._mind.values.get(tenant, namespace, key, version)

    def delete_value(self, tenant: str, namespace: str, key: str, *, expected_version: int | None = None) -> None:
        self._mind.values.delete(tenant, namespace, key, expected_version=expected_version)

    def search_values(
        self,
        tenant: str,
        namespace: str,
        *,
        prefix: str = "",
        where: dict[str, Any] | None = None,
        limit: int = 100,
        after: str = "",
    ) -> list[StoredValue]:
        return self._mind.values.search(tenant, namespace, prefix=prefix, where=where, limit=limit, after=after)

    def value_history(self, tenant: str, namespace: str, key: str) -> list[StoredValue]:
        return self._mind.values.history(tenant, namespace, key)


def _refuse_session(session: str | None) -> None:
    if session is not None:
        raise UsageError("a sandbox has one agent; a session is chosen in a user's own folder alone")
