"""Commands: the service `process.Process`.

A command is one of the daemon in the background, which takes a snapshot when it ends: it goes on without its client, and
another one may follow it. Its number, which the protocol calls a pid, is the first 32 bits of its id, so nothing has to be
remembered. Terminals are in terminals.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, TypeVar, cast

from snapshotd.api.commands import CommandInfo
from snapshotd.api.record import Json
from snapshotd.client import AsyncSnapshotd
from snapshotd.errors import CommandNotFound, Conflict, NotFound, SandboxFailed
from snapshotd.integrations.e2b.connect import Messages, Rpc, bytes_of, part, text
from snapshotd.integrations.e2b.failures import WireError, gone
from snapshotd.integrations.e2b.inside.call import InnerCall
from snapshotd.integrations.e2b.inside.terminals import Terminals
from snapshotd.integrations.e2b.people import People

_PID_DIGITS = 8
_BASH, _SH = "/bin/bash", "/bin/sh"
SIGNALS = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9, 15: 15, 9: 9}
T = TypeVar("T")


class Processes:
    """The service's methods."""

    def __init__(self, client: AsyncSnapshotd, people: People, terminals: Terminals) -> None:
        self._client, self._people, self._terminals = client, people, terminals
        self.methods = {
            "List": Rpc(unary=self._list),
            "Start": Rpc(serving=self._start),
            "Connect": Rpc(serving=self._connect),
            "Update": Rpc(unary=self._update),
            "SendInput": Rpc(unary=self._send_input),
            "StreamInput": Rpc(taking=self._stream_input),
            "SendSignal": Rpc(unary=self._send_signal),
            "CloseStdin": Rpc(unary=self._close_stdin),
        }

    async def begin(
        self, call: InnerCall, argv: list[str], *, cwd: str = "", env: dict[str, str], stdin: bool
    ) -> CommandInfo:
        """Start a command as the call's user."""
        options: dict[str, Any] = {
            "cwd": self._people.path(call.box, call.person, cwd) if cwd else self._people.cwd(call.box, call.person),
            "env": environment(call, env),
            "user": call.person.name,
            "stdin": stdin,
            "timeout": call.timeout_s,
            "idle_timeout": 0,
        }
        try:
            return await self._client.exec_in_background(call.box.id, argv, **options)
        except CommandNotFound:
            if argv[0] != _BASH:
                raise
            return await self._client.exec_in_background(call.box.id, [_SH, *argv[1:]], **options)

    async def _list(self, call: InnerCall, message: Json) -> Json:
        commands = [
            {"config": _config(one), "pid": pid_of(one)}
            for one in await self._client.commands(call.box.id)
            if one.status == "running" and one.background
        ]
        return {"processes": [*commands, *self._terminals.list(call.box.id)]}

    async def _start(self, call: InnerCall, message: Json) -> Messages:
        config = part(message, "process")
        argv = [text(config, "cmd"), *_words(config)]
        env = {name: str(value) for name, value in part(config, "envs").items()}
        if message.get("pty") is not None:
            rows, columns = _size(message)
            opened = await self._terminals.open(
                call, argv, self._place(call, config), environment(call, env), rows, columns
            )
            async for event in opened:
                yield event
            return
        info = await self.begin(
            call, argv, cwd=text(config, "cwd"), env=env, stdin=message.get("stdin", True) is not False
        )
        async for event in self._events(call, info, 0):
            yield event

    async def _connect(self, call: InnerCall, message: Json) -> Messages:
        terminal = self._terminals.find(call.box.id, _pid(message))
        if terminal is not None:
            async for event in terminal.follow(call):
                yield event
            return
        info = await self._find(call, message)
        told = 0  # the output until now is not sent again
        async with aclosing(cast(Any, self._client.command_events(call.box.id, info.id, follow=False))) as events:
            async for _ in events:
                told += 1
        async for event in self._events(call, info, told):
            yield event

    async def _events(self, call: InnerCall, info: CommandInfo, told: int) -> Messages:
        """The events of a command, without the first `told`."""
        yield {"event": {"start": {"pid": pid_of(info)}}}
        async with aclosing(cast(Any, self._client.command_events(call.box.id, info.id))) as events:
            async for event in alive(events, call.keepalive_s):
                if event is None:
                    yield {"event": {"keepalive": {}}}
                elif event["event"] == "finished":
                    yield _end(call, event)
                elif event["event"] == "output":
                    told, said = max(0, told - 1), told > 0
                    if not said:
                        yield {"event": {"data": {event["stream"]: event["data_b64"]}}}
                else:
                    told = max(0, told - 1)

    async def _update(self, call: InnerCall, message: Json) -> Json:
        terminal = self._terminals.find(call.box.id, _pid(message))
        if terminal is None:
            await self._find(call, message)
            raise WireError("failed_precondition", "the command has no terminal, so it has no size")
        await terminal.resize(*_size(message))
        return {}

    async def _send_input(self, call: InnerCall, message: Json) -> Json:
        await self._input(call, part(message, "process"), part(message, "input"))
        return {}

    async def _stream_input(self, call: InnerCall, messages: Messages) -> Json:
        process: Json | None = None
        async for message in messages:
            if "start" in message:
                process = part(part(message, "start"), "process")
            elif "data" in message:
                if process is None:
                    raise WireError("invalid_argument", "the first message has to name the process")
                await self._input(call, process, part(part(message, "data"), "input"))
        return {}

    async def _input(self, call: InnerCall, process: Json, given: Json) -> None:
        typed, data = bytes_of(given, "pty"), bytes_of(given, "stdin")
        terminal = self._terminals.find(call.box.id, _pid({"process": process}))
        if terminal is not None:
            if typed is None:
                raise WireError("invalid_argument", "the command has a terminal; send its input as `pty`")
            terminal.type(typed)
            return
        info = await self._find(call, {"process": process})
        if data is None:
            raise WireError("invalid_argument", "the command has no terminal; send its input as `stdin`")
        try:
            await self._client.write_command(call.box.id, info.id, data)
        except Conflict as exc:
            raise WireError("failed_precondition", exc.message) from exc

    async def _send_signal(self, call: InnerCall, message: Json) -> Json:
        _pid(message)
        number = SIGNALS.get(message.get("signal", 0))
        if number is None:
            raise WireError("unimplemented", "only SIGNAL_SIGTERM and SIGNAL_SIGKILL can be sent")
        terminal = self._terminals.find(call.box.id, _pid(message))
        if terminal is not None:
            await terminal.end()
            return {}
        info = await self._find(call, message)
        try:
            await self._client.signal_command(call.box.id, info.id, number)
        except Conflict as exc:
            raise _no_process(message) from exc
        return {}

    async def _close_stdin(self, call: InnerCall, message: Json) -> Json:
        terminal = self._terminals.find(call.box.id, _pid(message))
        if terminal is not None:
            raise WireError("failed_precondition", "a terminal's input is not closed; type its end (Ctrl-D)")
        info = await self._find(call, message)
        try:
            await self._client.write_command(call.box.id, info.id, b"", end=True)
        except Conflict as exc:
            raise WireError("failed_precondition", exc.message) from exc
        return {}

    async def _find(self, call: InnerCall, message: Json) -> CommandInfo:
        """The running command that is meant. WireError: there is none."""
        try:
            info = await self._client.command(call.box.id, f"{_pid(message):0{_PID_DIGITS}x}")
        except NotFound as exc:
            raise _no_process(message) from exc
        if info.status != "running":
            raise _no_process(message)
        return info

    def _place(self, call: InnerCall, config: Json) -> str:
        cwd = text(config, "cwd")
        return self._people.path(call.box, call.person, cwd) if cwd else self._people.cwd(call.box, call.person)


def pid_of(info: CommandInfo) -> int:
    """The number of a command for a client."""
    return int(info.id[:_PID_DIGITS], 16)


def environment(call: InnerCall, given: dict[str, str]) -> dict[str, str]:
    """The environment of a command, beside that of its image."""
    return {
        "HOME": call.person.home,
        "USER": call.person.name,
        "LOGNAME": call.person.name,
        "E2B_SANDBOX": "true",
        "E2B_SANDBOX_ID": call.box.id,
        "E2B_TEMPLATE_ID": call.box.template,
        **call.box.env,
        **given,
    }


async def alive(events: AsyncIterator[T], pause_s: float) -> AsyncIterator[T | None]:
    """The events, and None whenever there was none for so long."""
    upcoming = asyncio.ensure_future(anext(events))
    try:
        while True:
            done, _ = await asyncio.wait((upcoming,), timeout=pause_s)
            if not done:
                yield None
                continue
            try:
                event = upcoming.result()
            except StopAsyncIteration:
                return
            yield event
            upcoming = asyncio.ensure_future(anext(events))
    finally:
        upcoming.cancel()
        await asyncio.gather(upcoming, return_exceptions=True)


def _end(call: InnerCall, finished: Json) -> Json:
    """The end of a command. WireError: its time was over, or it was ended with its sandbox."""
    if finished["status"] == "timed-out":
        raise WireError("deadline_exceeded", f"the command was ended after {call.timeout_s} s, its timeout")
    code = finished["exit_code"]
    if code is None:
        raise (
            gone(call.box.id) if finished["status"] == "interrupted" else SandboxFailed(finished["error"] or "it ended")
        )
    end = {"exitCode": code, "exited": True, "status": f"exit status {code}"}
    return {"event": {"end": {**end, **({} if code == 0 else {"error": finished["error"] or f"exit status {code}"})}}}


def _config(info: CommandInfo) -> Json:
    return {"cmd": info.argv[0], "args": list(info.argv[1:]), "cwd": info.cwd, "envs": {}}


def _pid(message: Json) -> int:
    pid = part(message, "process").get("pid", 0)
    if not isinstance(pid, int) or not 0 <= pid < 1 << 32:
        raise WireError(
            "invalid_argument", "the process has to be named by its `pid`, as the start of its stream had it"
        )
    return pid


def _no_process(message: Json) -> WireError:
    return WireError("not_found", f"process with pid {_pid(message)} not found")


def _words(config: Json) -> list[str]:
    args = config.get("args") or []
    if not isinstance(args, list) or not all(isinstance(word, str) for word in args):
        raise WireError("invalid_argument", "`args` has to be a list of texts")
    return args


def _size(message: Json) -> tuple[int, int]:
    size = part(part(message, "pty"), "size")
    rows, columns = size.get("rows", 24), size.get("cols", 80)
    if not all(isinstance(one, int) and 1 <= one <= 0xFFFF for one in (rows, columns)):
        raise WireError("invalid_argument", "a terminal has 1 to 65535 rows and columns")
    return rows, columns
