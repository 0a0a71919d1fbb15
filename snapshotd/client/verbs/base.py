"""The parts of the client's verbs: the way to the daemon, refs and paths for it, and waiting until a snapshot is
stored."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, TypeVar

from snapshotd.api import operations
from snapshotd.api.operation import Operation
from snapshotd.api.record import ApiRecord, Json, Request
from snapshotd.api.snapshots import SnapshotInfo
from snapshotd.api.trajectories import TrajectoryInfo
from snapshotd.client.transport import Transport
from snapshotd.client.twofold import Twofold, verb
from snapshotd.errors import DaemonUnavailable, UsageError

Wait = Literal["captured", "stored"]
"""Durability that a method waits for when it makes a snapshot: `captured` survives a crash of the daemon, `stored` also
a power loss."""
A = TypeVar("A", bound=ApiRecord)
R = TypeVar("R")


class VerbPart(Twofold):
    """Base of the parts of a client; each part holds the verbs of one subject."""

    _transport: Transport
    _reconnect_s: float

    async def _in_thread(self, work: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """The result of work with a client for threads, which is given as its first argument."""
        raise NotImplementedError

    def _check_here(self, what: str, *, remedy: str = "do this there") -> None:
        """UsageError: the daemon is on another machine, where `what` would mean something else."""
        if not self._transport.way.is_here:
            raise UsageError(
                f"the daemon at {self._transport.way.place} is on another machine, where {what} would mean something else: "
                f"{remedy}"
            )

    def _check_paths(self, body: Request | Json) -> None:
        """UsageError: a request names a path of this machine, and the daemon is on another one."""
        members = body if isinstance(body, dict) else vars(body)
        for name in ("workspace", "requirements", "program", "agent", "directory"):
            if (path := members.get(name)) is not None:
                self._check_here(f"the {name} {path}", remedy="do this there, or move files with `snapshotd cp`")

    @verb
    async def flush(self, trajectory: str | None = None, *, published: bool = False) -> None:
        """Return when every snapshot so far (of one trajectory, or all) survives power loss. `published`: of this one trajectory,
        every other node of the fleet can fork it, too. UsageError: the daemon is no node of a fleet; Conflict: another node owns
        the trajectory; Unavailable: the fleet's database or bucket does not answer."""
        await self._transport.call(operations.FLUSH, query={"trajectory": trajectory, "published": published or None})

    @verb
    async def snapshot(self, ref: str) -> SnapshotInfo:
        return await self._transport.call(operations.SNAPSHOT, ref)

    @verb
    async def trajectory(self, ref: str) -> TrajectoryInfo:
        return await self._transport.call(operations.TRAJECTORY, ref)

    async def _wait_until(self, taken: SnapshotInfo, wait: Wait) -> SnapshotInfo:
        """The snapshot as it is after the wait."""
        if wait == "captured":
            return taken
        await self.flush(taken.trajectory)
        return await self.snapshot(taken.id)

    async def _step(
        self, operation: Operation[SnapshotInfo], ref: str, body: Request | None, wait: Wait
    ) -> SnapshotInfo:
        """An operation that is answered with the snapshot of one step."""
        return await self._wait_until(await self._transport.call(operation, ref, body=body), wait)


Progress = Callable[[str], object]
"""Receives one line of progress for people."""


def b64(path: str | bytes) -> str:
    """A sandbox path, or any bytes, for a request."""
    return base64.urlsafe_b64encode(os.fsencode(path)).decode()


async def records_of(events: AsyncIterator[dict[str, Any]], record: type[A], what: str) -> AsyncIterator[A]:
    """The records of an answer. DaemonUnavailable: it has no end."""
    async for event in events:
        if event.get("event") == "end":
            return
        yield record.of(event)
    raise DaemonUnavailable(f"the daemon ended {what} early; repeat the command")


async def result_of(
    events: AsyncIterator[dict[str, Any]], progress: Progress | None, what: str, then: str
) -> dict[str, Any]:
    """The last event of long work, whose lines of progress go to `progress`."""
    async for event in events:
        if event["event"] == "progress" and progress is not None:
            progress(event["message"])
        elif event["event"] == "result":
            return event
    raise DaemonUnavailable(f"the daemon ended {what} without a result; {then}")
