"""`AsyncSnapshotd`: every verb of the daemon as a coroutine method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from snapshotd.client.aio.apart import in_thread
from snapshotd.client.aio.links import TaskLinks
from snapshotd.client.client import Verbs
from snapshotd.client.links import Links
from snapshotd.client.verbs.ports import AsyncPort

R = TypeVar("R")


class AsyncSnapshotd(Verbs[AsyncPort]):
    __doc__ = Verbs.__doc__

    _port = AsyncPort

    def _links(self) -> Links:
        return TaskLinks()

    async def _in_thread(self, work: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        return await in_thread(self._transport, work, *args, **kwargs)
