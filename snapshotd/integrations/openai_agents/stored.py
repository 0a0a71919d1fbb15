"""A thread in the daemon's catalog: its items in batches, each with the snapshot that its sandbox had then."""

from __future__ import annotations

from typing import Any, NamedTuple

from snapshotd.client import AsyncSnapshotd
from snapshotd.integrations.logs import LogEntry, StoredLog


class ThreadPlace(NamedTuple):
    """A snapshot, and the sandbox that may stand there."""

    trajectory: str | None
    snapshot: str


class StoredThread:
    """Every method that changes something is one durable write. Errors: those of `StoredLog`."""

    def __init__(self, client: AsyncSnapshotd, thread: str) -> None:
        self._log = StoredLog(client, "openai-agents", thread)

    async def items(self) -> list[Any]:
        return [item for batch in await self._batches() for item in batch.value["items"]]

    async def add(self, items: list[Any], place: ThreadPlace | None) -> None:
        """Append items, all or none. `place`: the place of the files that belong to them."""
        await self._log.append({"items": items, "place": place})

    async def pop(self) -> Any:
        """Take the newest item away; None: there is none."""
        for batch in reversed(await self._batches()):
            if batch.value["items"]:
                *rest, last = batch.value["items"]
                await self._log.replace(batch, {"items": rest, "place": None})  # the place is of the whole batch
                return last
        return None

    async def clear(self) -> None:
        await self._log.append({"cleared": True})

    async def place(self) -> ThreadPlace | None:
        """The place of the files that belong to the newest items; None: no item has files yet."""
        for batch in reversed(await self._batches()):
            if batch.value["place"] is not None:
                return ThreadPlace(*batch.value["place"])
        return None

    async def _batches(self) -> list[LogEntry]:
        """The batches since the thread was cleared the last time."""
        found = await self._log.read()
        begin = max((at for at, batch in enumerate(found, 1) if "cleared" in batch.value), default=0)
        return found[begin:]
