"""What the tiny engine does about commands in the background. `cat` prints what is written to it and ends with its input;
`forever` runs until a signal ends it; every other command runs as in `exec` and has ended when it is answered."""

from __future__ import annotations

import base64
import dataclasses
import threading
from collections.abc import Callable, Iterator

from snapshotd import types as t
from snapshotd.api.commands import BackgroundRequest
from snapshotd.engine import base
from snapshotd.errors import Conflict, NotFound, UsageError
from tests.unit.daemon.fake_mind import NOW_NS


class FakeCommands:
    """Part of the fake engine, which has the rest."""

    background: dict[str, base.CommandInfo]
    printed: dict[str, list[base.Event]]
    changed: threading.Condition
    contents: dict[str, dict[bytes, bytes]]
    trajectory: Callable[[str], t.Trajectory]
    _take: Callable[..., t.Snapshot]
    _call: Callable[..., t.ToolCall]
    _execute: Callable[[tuple[str, ...], base.OutputSink], int]

    def exec_in_background(self, ref: str, request: BackgroundRequest) -> base.CommandInfo:
        line, argv = self.trajectory(ref), request.argv
        info = base.CommandInfo(
            t.CallID(t.new_id()),
            line.id,
            argv,
            request.cwd or "/workspace",
            NOW_NS,
            stdin=request.stdin,
            timeout_s=request.timeout_s,
        )
        events: list[base.Event] = [{"event": "started", "command": info.id, "began_at_ns": NOW_NS}]
        if argv[0] in ("cat", "forever"):
            self.background[info.id], self.printed[info.id] = info, events
            return info
        code = self._execute(argv, lambda stream, data: events.append(base.output_event(stream, data)))
        self.background[info.id], self.printed[info.id] = info, events
        self._end(info, code)
        return self.background[info.id]

    def _end(self, info: base.CommandInfo, code: int) -> None:
        line = self.trajectory(info.trajectory)
        call = dataclasses.replace(self._call("exec", {"argv": list(info.argv), "background": True}, code), id=info.id)
        taken = self._take(line, call, self.contents[line.head])
        ended = dataclasses.replace(info, status=call.status, exit_code=code, ended_at_ns=NOW_NS + 1, snapshot=taken.id)
        with self.changed:
            self.background[info.id] = ended
            self.printed[info.id].append(
                {
                    "event": "finished",
                    "command": info.id,
                    "exit_code": code,
                    "status": ended.status,
                    "snapshot": taken.id,
                }
            )
            self.changed.notify_all()

    def commands(self, ref: str) -> list[base.CommandInfo]:
        line = self.trajectory(ref)
        return [info for info in self.background.values() if info.trajectory == line.id]

    def command(self, ref: str, command: str) -> base.CommandInfo:
        found = [info for info in self.commands(ref) if info.id.startswith(command)]
        if len(found) != 1:
            raise NotFound(f"there is no background command {command!r}; `snapshotd ps {ref}` lists them")
        return found[0]

    def command_events(self, ref: str, command: str, *, follow: bool) -> Iterator[base.Event]:
        info = self.command(ref, command)
        return self._events_of(info, follow)

    def _events_of(self, info: base.CommandInfo, follow: bool) -> Iterator[base.Event]:
        at = 0
        while True:
            with self.changed:
                while follow and len(self.printed[info.id]) == at:
                    assert self.changed.wait(30), "the test never ended the command"
                events = self.printed[info.id][at:]
            at += len(events)
            yield from events
            if not follow or events[-1]["event"] == "finished":
                return

    def signal_command(self, ref: str, command: str, number: int) -> base.CommandInfo:
        info = self._running(ref, command)
        self._end(info, 128 + number)
        return info

    def write_command(self, ref: str, command: str, data: bytes, *, end: bool) -> int:
        info = self.command(ref, command)
        if not info.stdin:
            raise UsageError(f"command {t.short(info.id)} was started without an input")
        info = self._running(ref, command)
        taken = data[:100_000]
        with self.changed:
            if taken:
                encoded = base64.b64encode(taken).decode()
                self.printed[info.id].append({"event": "output", "stream": "stdout", "data_b64": encoded})
            self.changed.notify_all()
        if end and len(taken) == len(data):
            self._end(info, 0)
        return len(taken)

    def _running(self, ref: str, command: str) -> base.CommandInfo:
        info = self.command(ref, command)
        if not info.running:
            raise Conflict(f"command {t.short(info.id)} has ended already")
        return info
