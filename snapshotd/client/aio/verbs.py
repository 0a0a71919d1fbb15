"""Made by `snapshotd/client/aio/generate.py` from `snapshotd/client/verbs.py`: change that one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from snapshotd.api import operations
from snapshotd.api.operations import Operation
from snapshotd.api.record import Request
from snapshotd.api.snapshots import SnapshotInfo
from snapshotd.client.aio.transport import AsyncTransport
from snapshotd.client.verbs import Progress, Wait, check_wait
from snapshotd.errors import DaemonUnavailable


class AsyncVerbs:
    """Base of the parts of `AsyncSnapshotd`; each part holds the verbs of one subject."""

    _transport: AsyncTransport

    async def flush(self, trajectory: str | None = None) -> None:
        """Return when every snapshot so far (of one trajectory, or all) survives power loss."""
        await self._transport.call(operations.FLUSH, query={"trajectory": trajectory})

    async def snapshot(self, ref: str) -> SnapshotInfo:
        return await self._transport.call(operations.SNAPSHOT, ref)

    async def _settled(self, taken: SnapshotInfo, wait: Wait) -> SnapshotInfo:
        """The snapshot as it is after the wait."""
        if wait == "captured":
            return taken
        await self.flush(taken.trajectory)
        return await self.snapshot(taken.id)

    async def _step(
        self, operation: Operation[SnapshotInfo], ref: str, body: Request | None, wait: Wait
    ) -> SnapshotInfo:
        """An operation that is answered with the snapshot of one step."""
        check_wait(wait)
        return await self._settled(await self._transport.call(operation, ref, body=body), wait)


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
