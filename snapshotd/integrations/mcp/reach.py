"""The trajectories and snapshots that a client of the server may touch.

Sandboxes alone: a trajectory that is a folder of a user is refused, and one whose commands are processes of this machine
(`--isolation none`), unless the server was told to take them. With `only`, a trajectory and what was forked from it. Every
ref is resolved here, and the daemon gets the id: no name can come to mean something else in between.
"""

from __future__ import annotations

from dataclasses import dataclass

from snapshotd.api.snapshots import SnapshotInfo
from snapshotd.api.trajectories import TrajectoryInfo
from snapshotd.client import AsyncSnapshotd
from snapshotd.errors import NotPermitted
from snapshotd.types import FOLDER, NO_ISOLATION


@dataclass(frozen=True, slots=True)
class Reach:
    """`only`: id of the one trajectory; None: all sandboxes. Errors of its methods: NotFound, Ambiguous, NotPermitted."""

    client: AsyncSnapshotd
    only: str | None = None
    unisolated: bool = False

    def covers(self, info: TrajectoryInfo) -> bool:
        """True if it is a sandbox of the kind that may be touched."""
        return info.runtime != FOLDER and (self.unisolated or info.runtime != NO_ISOLATION)

    async def trajectories(self) -> list[TrajectoryInfo]:
        """All, newest first."""
        found = [info for info in await self.client.trajectories() if self.covers(info) and await self._is_within(info)]
        return sorted(found, key=lambda info: info.created_at, reverse=True)

    async def trajectory(self, ref: str) -> TrajectoryInfo:
        """The trajectory of that id or name."""
        info = await self.client.trajectory(ref)
        if not self.covers(info):
            raise NotPermitted(
                f"{ref} is no sandbox: its commands and files are this machine's own, which an MCP client does not touch; name a "
                "trajectory that `list` shows, or let a person start `snapshotd mcp --isolation none`"
            )
        if not await self._is_within(info):
            raise self._outside(ref)
        return info

    async def snapshot(self, ref: str) -> SnapshotInfo:
        """The snapshot of that id or tag; of a trajectory: its head. The one that the only trajectory was forked from is
        within reach, too: it is a part of its history."""
        info = await self.client.snapshot(ref)
        if self.only is not None and info.id == (await self.client.trajectory(self.only)).forked_from:
            return info
        try:
            await self.trajectory(info.trajectory)
        except NotPermitted:
            if self.only is None:
                raise
            raise self._outside(ref) from None
        return info

    async def _is_within(self, info: TrajectoryInfo) -> bool:
        """True for the only trajectory, and for its forks to any depth."""
        while self.only not in (None, info.id):
            if info.forked_from is None:
                return False
            info = await self.client.trajectory((await self.client.snapshot(info.forked_from)).trajectory)
        return True

    def _outside(self, ref: str) -> NotPermitted:
        assert self.only is not None
        return NotPermitted(
            f"{ref} is not of the trajectory {self.only[:12]}, the only one that this client may touch (`snapshotd mcp --trajectory`); "
            "name that one, one of its snapshots or forks"
        )
