"""The verbs about commands in the background, each a line over `runs/commands.py`. See `engine/base.py` for the contract."""

from __future__ import annotations

from collections.abc import Iterator

from snapshotd.api.commands import BackgroundRequest
from snapshotd.engine.base import CommandInfo, Engine, Event
from snapshotd.engine.context import Context
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.types import Trajectory


class LocalCommandVerbs(Engine):
    """The part of the engine that is about commands in the background. A class that inherits it sets `_context` and
    `_sessions`."""

    _context: Context
    _sessions: Sessions

    def exec_in_background(self, ref: str, request: BackgroundRequest) -> CommandInfo:
        sandbox = self._sessions.running(self._trajectory(ref), request.idle_timeout_s)
        return self._sessions.exec_in_background(sandbox, request)

    def commands(self, ref: str) -> list[CommandInfo]:
        return self._sessions.commands.all_of(self._trajectory(ref).id)

    def command(self, ref: str, command: str) -> CommandInfo:
        return self._sessions.commands.find(self._trajectory(ref), command)

    def command_events(self, ref: str, command: str, *, follow: bool) -> Iterator[Event]:
        return self._sessions.commands.events(self._trajectory(ref), command, follow=follow)

    def signal_command(self, ref: str, command: str, number: int) -> CommandInfo:
        return self._sessions.commands.signal(self._trajectory(ref), command, number)

    def write_command(self, ref: str, command: str, data: bytes, *, end: bool) -> int:
        return self._sessions.commands.write(self._trajectory(ref), command, data, end=end)

    def _trajectory(self, ref: str) -> Trajectory:
        return self._context.catalog.resolve_trajectory(ref)
