"""The verbs about folders of this machine, and the ones that mean something else there: each a line over
`folders/folders.py`. See `engine/base.py` for the contract."""

from __future__ import annotations

from typing import Any

from snapshotd.engine.base import ITSELF, Opener, RewindMode, RewindPreview
from snapshotd.engine.folders import events
from snapshotd.engine.mind_verbs import MindVerbs
from snapshotd.errors import UsageError
from snapshotd.kernel.identity import HostUser
from snapshotd.types import FOLDER, Snapshot, Trajectory


class FolderVerbs(MindVerbs):
    """The part of the engine that is about folders."""

    def folder_hook(
        self, user: HostUser, folder: int, agent: str, payload: dict[str, Any], hook: int | None = None
    ) -> Snapshot | None:
        if agent not in events.AGENTS:
            raise UsageError(f"no hooks of {agent[:40]!r} are known; choose {', '.join(events.AGENTS)}")
        event = events.read(agent, payload)
        return None if event is None else self._mind.folders.hook(user, folder, event, hook)

    def folder_checkpoint(self, user: HostUser, folder: int, name: str) -> Snapshot:
        return self._mind.folders.checkpoint(user, folder, name)

    def folder_trajectory(self, user: HostUser, folder: int) -> Trajectory:
        return self._mind.folders.trajectory(user, folder)

    def folder_snapshot(self, user: HostUser, folder: int, ref: str) -> Snapshot:
        return self._mind.folders.snapshot(user, folder, ref)

    def folder_session(self, user: HostUser, folder: int, hook: int, to: str) -> str | None:
        return self._mind.folders.session_of(user, folder, hook, self._snapshot(to))

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
        trajectory = self._trajectory(ref)
        if trajectory.spec.runtime != FOLDER:
            return super().rewind(ref, to, mode=mode, compensate=compensate, session=session)
        with self._mind.context.pins.pinned(self._snapshot(to).id) as target:
            return self._mind.folders.rewind(trajectory, target, opener, mode, session)

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
        trajectory = self._trajectory(ref)
        if trajectory.spec.runtime != FOLDER:
            return super().preview_rewind(ref, to, mode=mode, max_files=max_files, session=session)
        with self._mind.context.pins.pinned(self._snapshot(to).id) as target:
            return self._mind.folders.preview(trajectory, target, opener, mode, max_files, session)

    def undo(self, ref: str, *, opener: Opener = ITSELF) -> Snapshot:
        trajectory = self._trajectory(ref)
        if trajectory.spec.runtime != FOLDER:
            return super().undo(ref)
        return self._mind.folders.undo(trajectory, opener)
