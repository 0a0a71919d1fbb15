"""The part of the client that is about commands in the background."""

from __future__ import annotations

import base64
import codecs
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from snapshotd.api import operations
from snapshotd.api.commands import (
    BackgroundRequest,
    CommandInfo,
    CommandOptions,
    ExecInfo,
    ExecOptions,
    ExecRequest,
    InputRequest,
    ServiceOptions,
    SignalRequest,
    TerminalSize,
)
from snapshotd.api.record import replace
from snapshotd.api.snapshots import SnapshotInfo
from snapshotd.api.wire import STDIN_WINDOW_BYTES, check_ref
from snapshotd.client.exchange import AnswerLost, new_key
from snapshotd.client.feeding import AsyncTerminal, Feeder, Readable
from snapshotd.client.following import Following
from snapshotd.client.local.arguments import argv_of, check_count, check_seconds, texts_of
from snapshotd.client.twofold import closing, on_this_machine, stream, verb
from snapshotd.client.verbs.base import VerbPart, Wait
from snapshotd.errors import DaemonUnavailable

if TYPE_CHECKING:
    from snapshotd.client.client import Snapshotd

Stream = Literal["stdout", "stderr"]
OutputSink = Callable[[Stream, bytes], object]


def exec_junit(
    client: Snapshotd,
    ref: str,
    argv: Sequence[str],
    report: str | Path,
    *,
    on_output: OutputSink | None = None,
    stdin: Readable | None = None,
    **options: Unpack[CommandOptions],
) -> ExecInfo:
    """As `exec_snapshot`, and the local file `report` gets a JUnit report: the one that the command leaves at
    $SNAPSHOTD_JUNIT, else one that tells of the command as of one test. It is there whole or not at all. The shell in
    the image starts the command."""
    from snapshotd.client.branching.reports import exec_reported

    return exec_reported(client, ref, argv, report, on_output, stdin, options)


class CommandVerbs(VerbPart):
    """The verbs about commands in the background. `command` is a unique prefix of a command's id."""

    @verb
    async def exec(
        self,
        ref: str,
        argv: Sequence[str],
        *,
        on_output: OutputSink | None = None,
        wait: Wait = "captured",
        if_head: str | None = None,
        stdin: Readable | None = None,
        terminal: AsyncTerminal | None = None,
        **options: Unpack[ExecOptions],
    ) -> ExecInfo:
        """Run a command as a tool call and take the snapshot. It goes on, and is captured, even if this process goes
        away. It runs once: if the answer is lost, the daemon, or the next one, is asked what became of it, and
        DaemonUnavailable means that nothing is recorded.

        CommandNotFound and CommandNotRunnable leave no snapshot. `on_output` gets raw output as it comes; if it raises
        BrokenPipeError, this process stops reading that stream, and the command meets a broken pipe when it writes
        again. `stdin` is read as far as the command takes it, in a thread where reading may wait; unbuffered input
        (`read` returns the bytes at hand) reaches the command at once.

        With `if_head` the command runs only if that snapshot is the trajectory's head: of several such requests at one
        time one runs, and the others get a Conflict that names the head.

        After `timeout` seconds the command is ended with everything that it started: the exit code is 124, the result
        `timed_out`, and what it has printed and written until then is there. `idle_timeout`: as `create`, for
        the sandbox from now on; None: as it is, or the daemon's default (half an hour) if it was stopped.

        With `terminal` the command has a terminal in place of pipes: all that it prints comes as "stdout", `stdin` is
        typed into it, and the command ends when this process goes away.
        """
        head = None if if_head is None else check_ref(if_head)
        request = ExecRequest(**command_fields(argv, **options), if_head=head, terminal=_size_of(terminal))
        paths = operations.EXEC.to(ref), operations.EXEC_ATTENDED.to(ref)
        done = await self._exec(paths, request, on_output, stdin, terminal, f"of {ref}", new_key())
        return done if done.snapshot is None else replace(done, snapshot=await self._wait_until(done.snapshot, wait))

    @verb
    async def exec_snapshot(
        self,
        ref: str,
        argv: Sequence[str],
        *,
        on_output: OutputSink | None = None,
        stdin: Readable | None = None,
        terminal: AsyncTerminal | None = None,
        **options: Unpack[CommandOptions],
    ) -> ExecInfo:
        """Run a command in a throw-away fork of a snapshot; nothing of it is kept, and it ends when this process goes
        away. `on_output`, `stdin`, `timeout`, `terminal`: as `exec`."""
        request = ExecRequest(**command_fields(argv, **options), terminal=_size_of(terminal))
        paths = operations.EXEC_SNAPSHOT.to(ref), operations.EXEC_SNAPSHOT_ATTENDED.to(ref)
        return await self._exec(paths, request, on_output, stdin, terminal, f"in a fork of {ref}", None)

    exec_junit = on_this_machine(exec_junit)

    async def _exec(
        self,
        paths: tuple[str, str],
        request: ExecRequest,
        on_output: OutputSink | None,
        stdin: Readable | None,
        terminal: AsyncTerminal | None,
        where: str,
        key: str | None,
    ) -> ExecInfo:
        """Run a command, show its output and return its outcome. `paths`: of the plain operation, which is asked for an answer
        that was lost, and of the attended one, which runs the command. `where`: the sandbox, for messages. `key`: of the
        request; None if the command is not recorded."""
        shown = ShownOutput(on_output)
        async with await self._transport.converse(
            paths[1], request, query={"stdin": stdin is not None or None}, key=key
        ) as talk:
            feeder = None if stdin is None else Feeder(self._transport.links, talk, stdin)
            if terminal is not None:
                terminal.send_to(talk)
            try:
                async with closing(await talk.events()) as events:
                    async for event in events:
                        if event["event"] == "output":
                            if not shown.show(event):
                                await talk.say(json.dumps({"event": "unread", "stream": event["stream"]}).encode())
                        elif event["event"] == "taken" and feeder is not None:
                            await feeder.make_room(event["bytes"])
                        elif event["event"] == "result":
                            return ExecInfo.of(event)
                raise DaemonUnavailable(
                    f"the daemon ended the command {where} without a result; `snapshotd log` shows whether it was captured"
                )
            except DaemonUnavailable as exc:
                if feeder is not None and feeder.failure is not None:
                    raise feeder.failure from None
                if key is None or not isinstance(exc, AnswerLost):
                    raise
                lost = exc
            finally:
                if terminal is not None:
                    terminal.send_to(None)
                if feeder is not None:
                    talk.break_off()
                    await feeder.end()
        # It is not run again, which may be wrong: the daemon is asked if it has ended, and waits until it has.
        shown.begin_again()
        *again, result = await self._transport.recall(paths[0], key, lost, body=request)
        for event in again:
            shown.show(event)
        return ExecInfo.of(result)

    @verb
    async def exec_in_background(
        self,
        ref: str,
        argv: Sequence[str],
        *,
        stdin: bool = False,
        service: ServiceOptions | None = None,
        **options: Unpack[ExecOptions],
    ) -> CommandInfo:
        """Start a command and return. It is a tool call whose snapshot is taken when it ends; other calls, each with a
        snapshot, go on beside it. Any client finds it again, also after a restart of the daemon. `stop`, a rewind and
        the end of the sandbox's agent end it.

        With `stdin`, its standard input is what `write_command` writes; otherwise it is empty. LimitExceeded: too many
        run in the sandbox. Further keywords: as `exec`.

        With `service` the command is a service: the answer comes when it is ready, a snapshot declares it, and it is started
        again, and awaited, wherever a sandbox begins from a later one (docs/services.md). Conflict: there is one of that
        name; SandboxFailed: it does not get ready, and nothing is declared.
        """
        body = BackgroundRequest(**command_fields(argv, **options), stdin=stdin, service=service)
        return await self._transport.call(operations.START_COMMAND, ref, body=body)

    @verb
    async def commands(self, ref: str) -> list[CommandInfo]:
        """A trajectory's commands that run, also those in the foreground whose client has gone away, and the newest
        background commands that have ended, oldest first."""
        return await self._transport.call(operations.COMMANDS, ref)

    @verb
    async def command(self, ref: str, command: str) -> CommandInfo:
        """One of them. NotFound, Ambiguous."""
        return await self._transport.call(operations.COMMAND, ref, command)

    @stream
    async def command_events(
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
            return await self._transport.lines(*operations.COMMAND_EVENTS.at(ref, command), query={"follow": False})
        return await Following(
            self._transport,
            operations.COMMAND.to(ref, command),
            what=f"command {command} of {ref}",
            patience_s=self._reconnect_s,
            on_lost=on_lost,
            timeout=timeout,
        ).events()

    @verb
    async def signal_command(self, ref: str, command: str, number: int = 15) -> CommandInfo:
        """Send a signal to a command's process group, as a terminal does; SIGKILL, to all that it started. Returns at
        once. Conflict: it has ended."""
        check_count("number", number, 1, 64)
        return await self._transport.call(operations.SIGNAL_COMMAND, ref, command, body=SignalRequest(int(number)))

    @verb
    async def remove_service(self, ref: str, name: str, *, wait: Wait = "captured") -> SnapshotInfo:
        """End a service, and take its declaration away: the snapshot is the first without it. A stopped sandbox is started
        for that. NotFound: there is no service of that name."""
        removed = await self._transport.call(operations.REMOVE_SERVICE, ref, name)
        return await self._wait_until(removed, wait)

    @verb
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


def command_fields(argv: Sequence[str], **options: Unpack[ExecOptions]) -> dict[str, Any]:
    """A command by the names in `CommandFields`. UsageError for arguments that make no sense."""
    fields: dict[str, Any] = {"argv": tuple(argv_of(argv)), **options, "env": texts_of("env", options.get("env"))}
    for name in ("timeout", "idle_timeout"):
        if name in fields:
            fields[f"{name}_s"] = seconds = fields.pop(name)
            check_seconds(name, seconds, zero=name == "idle_timeout")
    return fields


def _size_of(terminal: AsyncTerminal | None) -> TerminalSize | None:
    return None if terminal is None else TerminalSize(terminal.rows, terminal.columns)


class ShownOutput:
    """Shows the events `output` of one command to `on_output`, each byte once, although an answer that was lost is read
    again from its beginning."""

    def __init__(self, on_output: OutputSink | None) -> None:
        self._on_output = on_output
        self._shown = Counter[str]()
        self._passed = Counter[str]()
        self._unread = set[str]()

    def begin_again(self) -> None:
        """The events come from the first one on."""
        self._passed.clear()

    def show(self, event: dict[str, Any]) -> bool:
        """False if the caller has just stopped reading that stream: `on_output` raised BrokenPipeError."""
        stream = event["stream"]
        if self._on_output is None or stream in self._unread:
            return True
        data = base64.b64decode(event["data_b64"])
        known = self._shown[stream] - self._passed[stream]
        self._passed[stream] += len(data)
        if known >= len(data):
            return True
        self._shown[stream] = self._passed[stream]
        try:
            self._on_output(stream, data[known:])
        except BrokenPipeError:
            self._unread.add(stream)
            return False
        return True


class TextLines:
    """The output of a command, event by event, as lines of text. Bytes that are not UTF-8 become U+FFFD. Lines of two
    streams that are written at the same time stay whole."""

    def __init__(self, stream: str | None) -> None:
        """`stream`: only that one; None: both."""
        self._stream = stream
        self._decoders: dict[str, codecs.IncrementalDecoder] = {}
        self._rest: dict[str, str] = {}

    def take(self, event: dict[str, Any]) -> list[str]:
        """The lines that an event completes, without their ends."""
        if event["event"] != "output" or self._stream not in (None, event["stream"]):
            return []
        name = event["stream"]
        decoder = self._decoders.setdefault(name, codecs.getincrementaldecoder("utf-8")("replace"))
        text = self._rest.get(name, "") + decoder.decode(base64.b64decode(event["data_b64"]))
        *whole, self._rest[name] = text.split("\n")
        return whole

    def last(self) -> list[str]:
        """The text behind the last end of a line, in each stream."""
        rests = [self._rest[name] + decoder.decode(b"", final=True) for name, decoder in self._decoders.items()]
        return [rest for rest in rests if rest]
