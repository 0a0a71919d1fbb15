"""Following a run beyond the end of the daemon that it was followed at.

The events of a run are an append-only file in the state directory, which every daemon serves from its beginning. So a
follower whose connection ends too early asks again, passes over the events that it has seen, and goes on behind them. A
digest proves that these are the same events, and not the ones of another run of the same trajectory.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from snapshotd.client.exchange import DaemonAway, event_of
from snapshotd.client.transport import Transport
from snapshotd.client.twofold import closing
from snapshotd.errors import Conflict

_PAUSE_MIN_S, _PAUSE_MAX_S = 0.02, 0.5
_HELD_S = 10.0
"""A connection that held for so long has got somewhere, even if the agent said nothing: its daemon did not die of our
request."""


class StillRunning(Conflict, TimeoutError):  # noqa: N818 - like every error of ours, it is named by what is the case
    """A run or a command has not ended within the `timeout` of a wait for it. It runs on."""


class Following:
    """One follower of one run."""

    def __init__(
        self,
        transport: Transport,
        trajectory: str,
        *,
        what: str,
        patience_s: float,
        on_lost: Callable[[], object] | None,
        timeout: float | None = None,
    ) -> None:
        """`trajectory` is its path in the API, and `what` its name in errors. Errors other than that no daemon is there
        end the following, and so does StillRunning, `timeout` seconds from now."""
        self._transport, self._trajectory, self._what, self._on_lost = transport, trajectory, what, on_lost
        self._patience_s, self._timeout = patience_s, timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._count = 0
        from hashlib import blake2b  # only then: it loads OpenSSL

        self._nothing = blake2b(digest_size=16)
        self._digest = self._nothing.copy()
        self._held_since: float | None = None
        self._lost_at: float | None = None
        self._pause_s = 0.0

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """All events until `finished`, or until no more come although the trajectory does not run. The request has been
        sent when this returns."""
        try:
            return self._events(await self._lines())
        except TimeoutError:
            raise self._still_running() from None

    async def _events(self, lines: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
        while True:
            try:
                async with closing(self._unseen(lines)) as unseen:
                    async for line in unseen:
                        event = event_of(line)
                        yield event
                        if event["event"] == "finished":
                            return
                if not self._count or not await self._runs():
                    return
                lost = DaemonAway(
                    f"the daemon ended the events of {self._what}, which still runs; `snapshotd attach` follows it again"
                )
            except DaemonAway as exc:
                lost = exc
            except TimeoutError:
                raise self._still_running() from None
            lines = await self._again(lost)

    async def _lines(self) -> AsyncIterator[bytes]:
        self._held_since = None
        lines = await self._transport.raw_lines(
            "GET", f"{self._trajectory}/events", query={"follow": "true"}, deadline=self._deadline
        )
        self._held_since = time.monotonic()
        return lines

    def _still_running(self) -> StillRunning:
        return StillRunning(
            f"{self._what} has not ended within {self._timeout:g} s, and runs on: wait for it again, or end it"
        )

    async def _runs(self) -> bool:
        return bool((await self._transport.request("GET", self._trajectory))["status"] == "running")

    async def _unseen(self, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The lines behind the ones that were seen before. Conflict when these begin otherwise."""
        again = self._nothing.copy()
        known = self._count
        passed = 0
        async with closing(lines) as answered:
            async for line in answered:
                if passed < known:
                    passed += 1
                    again.update(line + b"\n")
                    if passed == known:
                        self._require(again.digest() == self._digest.digest())
                    continue
                self._digest.update(line + b"\n")
                self._count += 1
                self._lost_at = None
                yield line
        self._require(passed == known)

    def _require(self, same: bool) -> None:
        if not same:
            raise Conflict(
                f"another run of {self._what} has begun since its daemon went away, so the end of this one is not known; `snapshotd log` "
                f"lists its snapshots, `snapshotd attach` follows the new one"
            )

    async def _again(self, lost: DaemonAway) -> AsyncIterator[bytes]:
        """The lines of the next daemon. Raises `lost`, or the newest error of connecting to a daemon, when that takes
        too long."""
        while True:
            await self._wait(lost)
            try:
                return await self._lines()
            except DaemonAway as exc:
                lost = exc
            except TimeoutError:
                raise self._still_running() from None

    async def _wait(self, lost: DaemonAway) -> None:
        """Before the next request: at once after getting somewhere, then with growing pauses (nothing tells when a
        socket is there)."""
        now = time.monotonic()
        held = self._held_since is not None and now - self._held_since > _HELD_S
        if self._lost_at is None or held:
            self._lost_at, self._pause_s = now, 0.0
            if self._patience_s and self._on_lost is not None:
                self._on_lost()
        if now - self._lost_at >= self._patience_s:
            raise lost
        if self._deadline is not None and now >= self._deadline:
            raise self._still_running()
        await self._transport.links.pause(self._pause_s)
        self._pause_s = min(max(2 * self._pause_s, _PAUSE_MIN_S), _PAUSE_MAX_S)
