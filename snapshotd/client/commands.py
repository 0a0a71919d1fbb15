"""The part of the client that is about commands in the background."""

from __future__ import annotations

import base64
import codecs
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from snapshotd.api import operations
from snapshotd.api.commands import BackgroundRequest, CommandInfo, InputRequest, SignalRequest
from snapshotd.api.wire import STDIN_WINDOW_BYTES
from snapshotd.client.following import Following
from snapshotd.client.local.arguments import argv_of, check_count, check_seconds, texts_of
from snapshotd.client.verbs import Verbs

Stream = Literal["stdout", "stderr"]
OutputSink = Callable[[Stream, bytes], object]


class CommandVerbs(Verbs):
    """The verbs about commands in the background. `command` is a unique prefix of a command's id."""

    _reconnect_s: float

    def exec_in_background(
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
        return self._transport.call(operations.START_COMMAND, ref, body=body)

    def commands(self, ref: str) -> list[CommandInfo]:
        """A trajectory's commands that run, also those in the foreground whose client has gone away, and the newest
        background commands that have ended, oldest first."""
        return self._transport.call(operations.COMMANDS, ref)

    def command(self, ref: str, command: str) -> CommandInfo:
        """One of them. NotFound, Ambiguous."""
        return self._transport.call(operations.COMMAND, ref, command)

    def command_events(
        self,
        ref: str,
        command: str,
        *,
        follow: bool = True,
        on_lost: Callable[[], object] | None = None,
        timeout: float | None = None,
    ) -> Iterator[dict[str, Any]]:
        """The events of a command from its beginning: `started`, `output` (with `stream` and `data_b64`), and last
        `finished` (with `status`, `exit_code`, `snapshot`). With `follow`, waits for more until `finished`, beyond the
        end of the daemon: as `events`; StillRunning (a TimeoutError) after `timeout` seconds."""
        check_seconds("timeout", timeout)
        if not follow:
            return self._transport.lines(*operations.COMMAND_EVENTS.at(ref, command), query={"follow": False})
        return Following(
            self._transport,
            operations.COMMAND.to(ref, command),
            what=f"command {command} of {ref}",
            patience_s=self._reconnect_s,
            on_lost=on_lost,
            timeout=timeout,
        ).events()

    def signal_command(self, ref: str, command: str, number: int = signal.SIGTERM) -> CommandInfo:
        """Send a signal to a command's process group, as a terminal does; SIGKILL, to all that it started. Returns at
        once. Conflict: it has ended."""
        check_count("number", number, 1, 64)
        return self._transport.call(operations.SIGNAL_COMMAND, ref, command, body=SignalRequest(int(number)))

    def write_command(self, ref: str, command: str, data: bytes, *, end: bool = False) -> None:
        """Write to a command's standard input, and with `end` close it behind that. Returns when the command's pipe has
        taken all: a command that does not read holds this up. UsageError: it was started without `stdin`; Conflict: it
        has ended, or its input has."""
        view = memoryview(data)
        while True:
            piece = bytes(view[:STDIN_WINDOW_BYTES])
            last = len(piece) == len(view)
            body = InputRequest(base64.b64encode(piece).decode(), end and last)
            taken = self._transport.call(operations.WRITE_COMMAND, ref, command, body=body).bytes
            view = view[taken:]
            if last and taken == len(piece):
                return


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
