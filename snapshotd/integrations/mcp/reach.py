"""The trajectories and snapshots that a client of the server may touch.

Sandboxes alone: a trajectory that is a folder of a user is refused, and one whose commands are processes of this machine
(`--isolation none`), unless the server was told to take them. With `only`, a trajectory and what was forked from it. Every
ref is resolved here, and the daemon gets the id: no name can come to mean something else in between.
"""

from __future__ import annotations

from dataclasses import dataclass

from snapshotd.api.snapshots import SnapshotInfo
from snapshotd.api.trajectories import OverviewInfo, TrajectoryInfo
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
        rows = self._within(await self.client.overview())
        found = [row.trajectory for row in rows if self.covers(row.trajectory)]
        return sorted(found, key=lambda info: info.created_at, reverse=True)

    async def trajectory(self, ref: str) -> TrajectoryInfo:
        """The trajectory of that id or name."""
        info = await self.client.trajectory(ref)
        if not self.covers(info):
            raise NotPermitted(
                f"{ref} is no sandbox: its commands and files are this machine's own, which an MCP client does not touch; name a "
                "trajectory that `list` shows, or let a person start `snapshotd mcp --isolation none`"
            )
        if self.only is not None and info.id not in {row.trajectory.id for row in await self._rows()}:
            raise self._outside(ref)
        return info

    async def snapshot(self, ref: str) -> SnapshotInfo:
        """The snapshot of that id or tag; of a trajectory: its head."""
        info = await self.client.snapshot(ref)
        if self.only is None:
            await self.trajectory(info.trajectory)
            return info
        rows = await self._rows()
        origin = next((row.origin for row in rows if row.trajectory.id == self.only), None)
        known = {row.trajectory.head for row in rows} | ({origin.id} if origin is not None else set())
        if info.id not in known and info.trajectory not in {row.trajectory.id for row in rows}:
            raise self._outside(ref)
        return info

    async def _rows(self) -> list[OverviewInfo]:
        return self._within(await self.client.overview())

    def _within(self, rows: list[OverviewInfo]) -> list[OverviewInfo]:
        """The one trajectory and its forks, to any depth."""
        if self.only is None:
            return rows
        ids = {self.only}
        while True:
            within = [row for row in rows if row.trajectory.id in ids or (row.origin and row.origin.trajectory in ids)]
            if len(within) == len(ids & {row.trajectory.id for row in within}):
                return within
            ids |= {row.trajectory.id for row in within}

    def _outside(self, ref: str) -> NotPermitted:
        assert self.only is not None
        return NotPermitted(
            f"{ref} is not of the trajectory {self.only[:12]}, the only one that this client may touch (`snapshotd mcp --trajectory`); "
            "name that one, one of its snapshots or forks"
        )
