"""Made by `snapshotd/client/aio/generate.py` from `snapshotd/client/commands.py`: change that one."""

from __future__ import annotations

import base64
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from snapshotd.client.aio.following import AsyncFollowing
from snapshotd.client.aio.verbs import AsyncVerbs
from snapshotd.client.commands import _path
from snapshotd.client.local.arguments import argv_of, check_count, check_seconds, texts_of
from snapshotd.client.results import CommandInfo
from snapshotd.client.verbs import ref_segment
from snapshotd.daemon.http.wire import STDIN_WINDOW_BYTES


class AsyncCommandVerbs(AsyncVerbs):
    """The verbs about commands in the background. `command` is a unique prefix of a command's id."""

    _reconnect_s: float

    async def exec_in_background(
        self,
        ref: str,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bool = False,
        timeout: float | None = None,
        idle_timeout: float | None = None,
    ) -> CommandInfo:
        """Start a command and return. It is a tool call whose snapshot is taken when it ends; other calls, each with a
        snapshot, go on beside it. Any client finds it again, also after a restart of the daemon. `stop`, a rewind and
        the end of the sandbox's agent end it.

        With `stdin`, its standard input is what `write_command` writes; otherwise it is empty. LimitExceeded: too many
        run in the sandbox. Further keywords: as `exec`.
        """
        check_seconds("timeout", timeout)
        check_seconds("idle_timeout", idle_timeout, zero=True)
        body = {
            "argv": argv_of(argv),
            "cwd": cwd,
            "env": texts_of("env", env),
            "user": user,
            "stdin": stdin,
            "timeout_s": timeout,
            "idle_timeout_s": idle_timeout,
        }
        path = f"/trajectories/{ref_segment(ref, 'trajectory')}/commands"
        return CommandInfo.of(await self._transport.request("POST", path, body=body, once=True))

    async def commands(self, ref: str) -> list[CommandInfo]:
        """A trajectory's commands that run, also those in the foreground whose client has gone away, and the newest
        background commands that have ended, oldest first."""
        path = f"/trajectories/{ref_segment(ref, 'trajectory')}/commands"
        return [CommandInfo.of(item) for item in await self._transport.request("GET", path)]

    async def command(self, ref: str, command: str) -> CommandInfo:
        """One of them. NotFound, Ambiguous."""
        return CommandInfo.of(await self._transport.request("GET", _path(ref, command)))

    def command_events(
        self,
        ref: str,
        command: str,
        *,
        follow: bool = True,
        on_lost: Callable[[], object] | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[dict[str, Any]]:
        """The events of a command from its beginning: `started`, `output` (with `stream` and `data_b64`), and last
        `finished` (with `status`, `exit_code`, `snapshot`). With `follow`, waits for more until `finished`, beyond the
        end of the daemon: as `events`; StillRunning (a TimeoutError) after `timeout` seconds."""
        check_seconds("timeout", timeout)
        if not follow:
            return self._transport.lines("GET", f"{_path(ref, command)}/events", query={"follow": "false"})
        return AsyncFollowing(
            self._transport,
            _path(ref, command),
            what=f"command {command} of {ref}",
            patience_s=self._reconnect_s,
            on_lost=on_lost,
            timeout=timeout,
        ).events()

    async def signal_command(self, ref: str, command: str, number: int = signal.SIGTERM) -> CommandInfo:
        """Send a signal to a command's process group, as a terminal does; SIGKILL, to all that it started. Returns at
        once. Conflict: it has ended."""
        check_count("number", number, 1, 64)
        return CommandInfo.of(
            await self._transport.request("POST", f"{_path(ref, command)}/signal", body={"signal": int(number)})
        )

    async def write_command(self, ref: str, command: str, data: bytes, *, end: bool = False) -> None:
        """Write to a command's standard input, and with `end` close it behind that. Returns when the command's pipe has
        taken all: a command that does not read holds this up. UsageError: it was started without `stdin`; Conflict: it
        has ended, or its input has."""
        view, path = (memoryview(data), f"{_path(ref, command)}/stdin")
        while True:
            piece = bytes(view[:STDIN_WINDOW_BYTES])
            last = len(piece) == len(view)
            body = {"data_b64": base64.b64encode(piece).decode(), "end": end and last}
            taken = (await self._transport.request("POST", path, body=body))["bytes"]
            view = view[taken:]
            if last and taken == len(piece):
                return
