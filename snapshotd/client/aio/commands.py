"""Made by `snapshotd/client/aio/generate.py` from `snapshotd/client/commands.py`: change that one."""

from __future__ import annotations

import base64
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from snapshotd.api import operations
from snapshotd.api.commands import BackgroundRequest, CommandInfo, InputRequest, SignalRequest
from snapshotd.api.wire import STDIN_WINDOW_BYTES
from snapshotd.client.aio.following import AsyncFollowing
from snapshotd.client.aio.verbs import AsyncVerbs
from snapshotd.client.local.arguments import argv_of, check_count, check_seconds, texts_of


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
        body = BackgroundRequest(
            argv=tuple(argv_of(argv)),
            cwd=cwd,
            env=texts_of("env", env),
            user=user,
            stdin=stdin,
            timeout_s=timeout,
            idle_timeout_s=idle_timeout,
        )
        return await self._transport.call(operations.START_COMMAND, ref, body=body)

    async def commands(self, ref: str) -> list[CommandInfo]:
        """A trajectory's commands that run, also those in the foreground whose client has gone away, and the newest
        background commands that have ended, oldest first."""
        return await self._transport.call(operations.COMMANDS, ref)

    async def command(self, ref: str, command: str) -> CommandInfo:
        """One of them. NotFound, Ambiguous."""
        return await self._transport.call(operations.COMMAND, ref, command)

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
            return self._transport.lines(*operations.COMMAND_EVENTS.at(ref, command), query={"follow": False})
        return AsyncFollowing(
            self._transport,
            operations.COMMAND.to(ref, command),
            what=f"command {command} of {ref}",
            patience_s=self._reconnect_s,
            on_lost=on_lost,
            timeout=timeout,
        ).events()

    async def signal_command(self, ref: str, command: str, number: int = signal.SIGTERM) -> CommandInfo:
        """Send a signal to a command's process group, as a terminal does; SIGKILL, to all that it started. Returns at
        once. Conflict: it has ended."""
        check_count("number", number, 1, 64)
        return await self._transport.call(operations.SIGNAL_COMMAND, ref, command, body=SignalRequest(int(number)))

    async def write_command(self, ref: str, command: str, data: bytes, *, end: bool = False) -> None:
        """Write to a command's standard input, and with `end` close it behind that. Returns when the command's pipe has
        taken all: a command that does not read holds this up. UsageError: it was started without `stdin`; Conflict: it
        has ended, or its input has."""
        view = memoryview(data)
        while True:
            piece = bytes(view[:STDIN_WINDOW_BYTES])
            last = len(piece) == len(view)
            body = InputRequest(base64.b64encode(piece).decode(), end and last)
            taken = (await self._transport.call(operations.WRITE_COMMAND, ref, command, body=body)).bytes
            view = view[taken:]
            if last and taken == len(piece):
                return
