"""Terminals: commands that have one in place of pipes.

The daemon gives a terminal to a command whose client attends to it. That client is this server: it goes on when the
connection that opened the terminal ends, so another one can follow it. When the server ends, its terminals do. Output
that nobody follows is not kept here, as with E2B; the snapshot at the end has all.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from snapshotd.api.record import Json
from snapshotd.client import AsyncSnapshotd
from snapshotd.client.feeding import AsyncTerminal
from snapshotd.errors import SnapshotdError
from snapshotd.integrations.e2b.connect import Messages
from snapshotd.integrations.e2b.failures import WireError, failure_of
from snapshotd.integrations.e2b.inside.call import InnerCall
from snapshotd.integrations.typed_keys import TypedKeys

_UNREAD_MAX = 1024
"""So many events a follower may be behind; then the oldest are left out. A client that does not read stops nobody."""
_TYPED_MAX = 1 << 20
"""Bytes that may wait to be typed."""


class Terminals:
    """All open ones."""

    def __init__(self, client: AsyncSnapshotd) -> None:
        self._client = client
        self._open: dict[tuple[str, int], PtyTerminal] = {}

    async def open(
        self, call: InnerCall, argv: list[str], cwd: str, env: dict[str, str], rows: int, columns: int
    ) -> Messages:
        """Start a command in a new terminal, and follow it."""
        pid = secrets.randbelow((1 << 32) - 1) + 1
        terminal = PtyTerminal(self._client, call, pid, argv, lambda: self._open.pop((call.box.id, pid), None))
        self._open[call.box.id, pid] = terminal
        followed = terminal.follow(call)
        terminal.start(cwd, env, rows, columns)
        return followed

    def find(self, sandbox: str, pid: int) -> PtyTerminal | None:
        return self._open.get((sandbox, pid))

    def list(self, sandbox: str) -> list[Json]:
        return [one.info for (owner, _), one in self._open.items() if owner == sandbox]

    async def end(self, sandbox: str | None = None) -> None:
        """End those of a sandbox, or all."""
        for (owner, _), terminal in list(self._open.items()):
            if sandbox in (None, owner):
                await terminal.end()


class PtyTerminal:
    """One command in a terminal."""

    def __init__(
        self, client: AsyncSnapshotd, call: InnerCall, pid: int, argv: list[str], on_end: Callable[[], object]
    ) -> None:
        self._client, self._box, self._pid, self._argv, self._on_end = client, call.box.id, pid, argv, on_end
        self._user, self._timeout_s = call.person.name, call.timeout_s
        self._keys = TypedKeys()
        self._followers = set[asyncio.Queue[Json | WireError]]()
        self._terminal = AsyncTerminal()
        self._task: asyncio.Task[None] | None = None
        self.info: Json = {"config": {"cmd": argv[0], "args": argv[1:], "envs": {}}, "pid": pid}

    def start(self, cwd: str, env: dict[str, str], rows: int, columns: int) -> None:
        self._terminal = AsyncTerminal(rows, columns)
        self._task = asyncio.create_task(self._run(cwd, env))

    async def _run(self, cwd: str, env: dict[str, str]) -> None:
        last: Json | WireError = WireError("aborted", "the terminal was ended")
        try:
            done = await self._client.exec(
                self._box,
                self._argv,
                cwd=cwd,
                env=env,
                user=self._user,
                on_output=lambda _, data: self._tell(_data(data)),
                stdin=self._keys,
                timeout=self._timeout_s,
                idle_timeout=0,
                terminal=self._terminal,
            )
            last = {"exitCode": done.exit_code, "exited": True, "status": f"exit status {done.exit_code}"}
            if done.exit_code != 0:
                last["error"] = f"exit status {done.exit_code}"
            last = {"event": {"end": last}}
            if done.timed_out:
                last = WireError("deadline_exceeded", f"the terminal was ended after {self._timeout_s} s, its timeout")
        except SnapshotdError as exc:
            last = failure_of(exc)
        except asyncio.CancelledError:
            last = {"event": {"end": {"exitCode": -1, "status": "signal: killed", "error": "signal: killed"}}}
        finally:
            self._keys.end()  # lets its thread go
            self._tell(last)
            self._on_end()

    def _tell(self, event: Json | WireError) -> None:
        for follower in self._followers:
            if follower.full():
                follower.get_nowait()
            follower.put_nowait(event)

    def follow(self, call: InnerCall) -> Messages:
        """The events of the terminal from now on."""
        follower = asyncio.Queue[Json | WireError](_UNREAD_MAX)
        self._followers.add(follower)
        return self._events(follower, call.keepalive_s)

    async def _events(self, follower: asyncio.Queue[Any], keepalive_s: float) -> Messages:
        try:
            yield {"event": {"start": {"pid": self._pid}}}
            while True:
                try:
                    event = await asyncio.wait_for(follower.get(), keepalive_s)
                except TimeoutError:
                    event = {"event": {"keepalive": {}}}
                if isinstance(event, WireError):
                    raise event
                yield event
                if "end" in event["event"]:
                    return
        finally:
            self._followers.discard(follower)

    def type(self, data: bytes) -> None:
        """Type into the terminal. WireError: the command does not read."""
        if self._keys.waiting + len(data) > _TYPED_MAX:
            raise WireError(
                "resource_exhausted", "the terminal's program does not read what is typed; wait until it does"
            )
        if data:
            self._keys.put(data)

    async def resize(self, rows: int, columns: int) -> None:
        await self._terminal.resize(rows, columns)

    async def end(self) -> None:
        """End its command with everything that it started."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([self._task])


def _data(data: bytes) -> Json:
    return {"event": {"data": {"pty": base64.b64encode(data).decode()}}}
