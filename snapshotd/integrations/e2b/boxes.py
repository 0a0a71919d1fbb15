"""The life of sandboxes: made, paused, resumed, forked, ended, and ended when their time is over.

A sandbox is a trajectory. Paused, it is stopped, with a last snapshot; resumed, it is started from that: its files are there,
and its programs are not. Killed, it is stopped and the server forgets it; its history stays with the daemon, unless the
server was told to remove it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import heapq
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from snapshotd.api.trajectories import TrajectoryInfo
from snapshotd.client import AsyncSnapshotd
from snapshotd.client.exchange import use_keys
from snapshotd.errors import Conflict, NotFound, SnapshotdError
from snapshotd.integrations.e2b.failures import WireError, failure_of, gone, not_found
from snapshotd.integrations.e2b.locks import NamedLocks
from snapshotd.integrations.e2b.records import Box, Records

_AGAIN_S = 5.0
_MAY_BE_GONE = ("not_found", "unauthenticated", "gone")
"""Codes of a failure within a sandbox that a removed one has, too: no such file or process, no such user, no such port."""
_log = logging.getLogger(__name__)

Leaver = Callable[[str], Awaitable[object]]
Starter = Callable[[Box], Awaitable[object]]


class Boxes:
    """`on_leave` is told of a sandbox before its processes end, `on_start` of one that has been started. Errors: those of
    the daemon, and WireError."""

    def __init__(
        self, client: AsyncSnapshotd, records: Records, on_leave: Leaver, on_start: Starter, *, removes: bool = False
    ) -> None:
        """`removes`: a sandbox that was killed is removed, with its history."""
        self._client, self._records, self._on_leave, self._on_start = client, records, on_leave, on_start
        self._removes = removes
        self._lock = NamedLocks()
        self._ends: list[tuple[float, str]] = []
        self._sooner = asyncio.Event()

    # -- the set of sandboxes ------------------------------------------------------------------------------------------

    async def find(self, owner: str | None, sandbox: str) -> Box:
        """A sandbox of this owner; None: of any owner. WireError: there is no such sandbox."""
        box = await self._records.find(Box, sandbox)
        if box is None or owner not in (None, box.owner) or await self._was_removed(box):
            raise not_found(sandbox)
        return box

    async def all_of(self, owner: str | None) -> list[Box]:
        where = {} if owner is None else {"owner": owner}
        return [box async for box in self._records.all_of(Box, **where)]

    async def find_reachable(self, sandbox: str) -> Box:
        """A sandbox that runs, or that a request resumes. WireError: there is none."""
        box = await self._records.find(Box, sandbox)
        if box is None or (box.paused and not box.resumes):
            raise gone(sandbox)
        return box

    async def ensure_running(self, sandbox: str) -> Box:
        """Resume a sandbox that is paused, for a request within it. WireError: there is none that runs. A sandbox that a
        person has removed is found out by the request itself (`failure`)."""
        box = await self.find_reachable(sandbox)
        if box.paused:
            box, _ = await self.resume(box.owner, sandbox, None)
        if box.paused:
            raise gone(sandbox)
        return box

    async def check_there(self, box: Box) -> None:
        """WireError: a person has removed the sandbox. Requests within it that ask the daemon nothing else need this."""
        if await self._was_removed(box):
            raise gone(box.id)

    async def failure(self, box: Box, error: SnapshotdError | WireError) -> WireError:
        """The failure of a request within a sandbox: the sandbox is gone, where that is why something in it was not found."""
        failure = error if isinstance(error, WireError) else failure_of(error)
        if failure.code in _MAY_BE_GONE:
            with contextlib.suppress(SnapshotdError):  # the daemon does not say: the failure stands
                if await self._was_removed(box):
                    return gone(box.id)
        return failure

    async def _was_removed(self, box: Box) -> bool:
        """True if a person has removed the sandbox's trajectory. Then the server forgets the sandbox."""
        try:
            await self._client.trajectory(box.id)
            return False
        except NotFound:
            await self._on_leave(box.id)
            await self._records.drop(box)
            return True

    # -- their life ----------------------------------------------------------------------------------------------------

    async def create(self, snapshot: str, variant: dict[str, Any], draft: Box, *, key: str | None = None) -> Box:
        """Make a sandbox from a snapshot. `variant`: its network and limits. `draft`: what it is to be, without its id. `key`:
        under it, it is made once."""
        with use_keys(f"e2b {draft.owner} {key}") if key is not None else contextlib.nullcontext():
            made = await self._client.fork(snapshot, variants={"sandbox": variant}, idle_timeout=0)
        if key is not None and (known := await self._records.find(Box, made.trajectories[0].id)) is not None:
            return known
        return await self._add(made.trajectories[0], draft)

    async def fork(self, owner: str, sandbox: str, count: int, timeout_s: float) -> list[Box]:
        """Make `count` sandboxes with the present files of another one, all or none."""
        box = await self.find(owner, sandbox)
        snapshot = await self.take_snapshot(box)
        now = time.time()
        forked = (await self._client.fork(snapshot, count, idle_timeout=0)).trajectories
        draft = dataclasses.replace(box, started_at=now, ends_at=now + timeout_s, paused=False)
        return [await self._add(one, draft) for one in forked]

    async def _add(self, info: TrajectoryInfo, draft: Box) -> Box:
        box = dataclasses.replace(draft, id=info.id)
        await self._put(box)
        try:
            await self._on_start(box)
        except BaseException:
            await self.kill(box.owner, box.id)
            raise
        return box

    async def take_snapshot(self, box: Box) -> str:
        """The id of a snapshot of its files as they are now."""
        try:
            return (await self._client.take_snapshot(box.id, if_changed=True)).id
        except Conflict:
            return (await self._client.snapshot(box.id)).id  # it does not run: its head is that

    async def set_end(self, owner: str, sandbox: str, timeout_s: float) -> None:
        """Let a sandbox end `timeout_s` from now. WireError: it is paused."""
        async with self._lock(sandbox):
            box = await self.find(owner, sandbox)
            if box.paused:
                raise WireError("aborted", f"sandbox {sandbox} is paused; connect to it first")
            await self._put(dataclasses.replace(box, ends_at=time.time() + timeout_s))

    async def set_network(self, owner: str, sandbox: str, network: dict[str, Any]) -> None:
        """Record the network that a client has chosen for a sandbox. The daemon has been told already."""
        async with self._lock(sandbox):
            await self._records.put(dataclasses.replace(await self.find(owner, sandbox), network=network))

    async def pause(self, owner: str | None, sandbox: str) -> None:
        """Take a last snapshot of a sandbox and stop it. WireError: it is paused already."""
        async with self._lock(sandbox):
            box = await self.find(owner, sandbox)
            if box.paused:
                raise WireError("aborted", f"sandbox {sandbox} is already paused")
            await self._on_leave(sandbox)
            await self._client.stop(sandbox)
            await self._put(dataclasses.replace(box, paused=True))

    async def resume(self, owner: str, sandbox: str, timeout_s: float | None) -> tuple[Box, bool]:
        """Start a sandbox if it is paused. Returns it, and whether it was paused. It ends `timeout_s` from now, or later if it
        ran and had more time left."""
        async with self._lock(sandbox):
            box = await self.find(owner, sandbox)
            paused = box.paused
            ends_at = time.time() + (300.0 if timeout_s is None else timeout_s)
            if paused:
                await self._client.make_dir(sandbox, "/")  # starts it
                box = dataclasses.replace(box, paused=False, ends_at=ends_at)
                await self._put(box)
                await self._on_start(box)
            elif timeout_s is not None and ends_at > box.ends_at:
                box = dataclasses.replace(box, ends_at=ends_at)
                await self._put(box)
            return box, paused

    async def kill(self, owner: str | None, sandbox: str) -> None:
        """Stop a sandbox and forget it. WireError: there is no such sandbox."""
        async with self._lock(sandbox):
            box = await self.find(owner, sandbox)
            await self._on_leave(sandbox)
            try:
                await self._end(sandbox)
            except NotFound:
                pass  # somebody has removed it
            await self._records.drop(box)

    async def _end(self, sandbox: str) -> None:
        if self._removes:
            try:
                await self._client.remove(sandbox, force=True)
                return
            except Conflict:
                pass  # it has forks, which need its snapshots
        await self._client.stop(sandbox)

    async def _put(self, box: Box) -> None:
        await self._records.put(box)
        if not box.paused:
            heapq.heappush(self._ends, (box.ends_at, box.id))
            self._sooner.set()

    # -- their end -----------------------------------------------------------------------------------------------------

    async def watch_ends(self) -> None:
        """End each sandbox when its time is over, also those that an earlier server made. Never returns."""
        for box in await self.all_of(None):
            if not box.paused:
                heapq.heappush(self._ends, (box.ends_at, box.id))
        failed = defaultdict[str, int](int)
        while True:
            self._sooner.clear()
            wait_s = self._ends[0][0] - time.time() if self._ends else None
            if wait_s is None or wait_s > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._sooner.wait(), wait_s)
                continue
            _, sandbox = heapq.heappop(self._ends)
            try:
                await self._end_in_time(sandbox)
                failed.pop(sandbox, None)
            except WireError:
                pass  # it has been ended meanwhile
            except SnapshotdError as exc:
                failed[sandbox] += 1
                _log.warning("sandbox %s is not ended yet: %s", sandbox, exc)
                heapq.heappush(self._ends, (time.time() + _AGAIN_S * failed[sandbox], sandbox))

    async def _end_in_time(self, sandbox: str) -> None:
        box = await self.find(None, sandbox)
        if box.paused or box.ends_at > time.time():
            return  # its time was changed: another entry has it
        if box.pauses_at_end:
            await self.pause(None, sandbox)
        else:
            await self.kill(None, sandbox)
