"""Commands and snapshots as objects. Each is written once (`twofold.py`); sandbox.py and aio/sandbox.py have its two forms."""

from __future__ import annotations

import base64
import contextlib
import shlex
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar, Unpack

from snapshotd.api.commands import CommandOptions
from snapshotd.api.storage import ExportOptions
from snapshotd.api.trajectories import ForkOptions
from snapshotd.client.client import Verbs
from snapshotd.client.local.arguments import bytes_of, instance_of
from snapshotd.client.outcomes import ExecResult, KeptOutput, argv_or_shell, exec_failure, input_of
from snapshotd.client.results import (
    ApplyInfo,
    ChangeInfo,
    CommandInfo,
    ExportInfo,
    JournalInfo,
    MessageInfo,
    RestoreInfo,
    SnapshotInfo,
    TaskInfo,
    TrajectoryInfo,
)
from snapshotd.client.twofold import Twofold, attribute, class_verb, closing, stream, verb
from snapshotd.client.verbs.base import Wait
from snapshotd.client.verbs.commands import Stream, TextLines
from snapshotd.errors import Conflict, NotFound, UsageError

ClientT = TypeVar("ClientT", bound=Verbs[Any])
SandboxT = TypeVar("SandboxT")
SnapshotT = TypeVar("SnapshotT")
CommandT = TypeVar("CommandT")


class ClientForm:
    """The classes of one of the two forms, which make each other."""

    def __init__(
        self,
        client: type[Any],
        sandbox: type[Any],
        snapshot: type[Any],
        command: type[Any],
        sandbox_files: type[Any],
        snapshot_files: type[Any],
    ) -> None:
        self.client, self.sandbox, self.snapshot, self.command = client, sandbox, snapshot, command
        self.sandbox_files, self.snapshot_files = sandbox_files, snapshot_files


class Object(Twofold, Generic[ClientT, SandboxT, SnapshotT, CommandT]):
    """Base of the objects. `_client` is what the user gave, and `_verbs` the same with coroutines."""

    _form: ClassVar[ClientForm]

    def __init__(self, client: ClientT) -> None:
        self._client = client
        self._verbs = client._coroutines

    @classmethod
    def _client_of(cls, client: ClientT | None) -> ClientT:
        """The client that is given, or a new one. UsageError: it is of another form, or none at all."""
        wanted = cls._form.client
        found: ClientT = wanted() if client is None else instance_of("client", client, wanted)
        return found

    def _sandbox_of(self, info: TrajectoryInfo) -> SandboxT:
        made: SandboxT = self._form.sandbox(self._client, info)
        return made

    def _snapshot_of(self, info: SnapshotInfo) -> SnapshotT:
        made: SnapshotT = self._form.snapshot(self._client, info)
        return made

    def _command_of(self, info: CommandInfo) -> CommandT:
        made: CommandT = self._form.command(self._client, info)
        return made


class AnyCommand(Object[ClientT, SandboxT, SnapshotT, CommandT]):
    """A command in the background of a sandbox: `Sandbox.exec(..., background=True)` starts one, `Sandbox.commands` and
    `Sandbox.command` find it again. `id` is its name."""

    def __init__(self, client: ClientT, info: CommandInfo) -> None:
        super().__init__(client)
        self._sandbox = info.trajectory
        self.id = info.id

    @attribute
    async def info(self) -> CommandInfo:
        """Its present state (asks the daemon): `status`, `exit_code`, `snapshot`."""
        return await self._verbs.command(self._sandbox, self.id)

    @verb
    async def wait(
        self,
        *,
        on_stdout: Callable[[bytes], object] | None = None,
        on_stderr: Callable[[bytes], object] | None = None,
        check: bool = False,
        timeout: float | None = None,
    ) -> ExecResult:
        """Wait until it has ended, beyond a restart of the daemon. Its whole output comes to `on_stdout` and `on_stderr`,
        from its beginning. The exit code is -1 when it is not known. With `check`, ExecFailed for any but 0. After
        `timeout` seconds StillRunning (a TimeoutError): it runs on."""
        kept = KeptOutput(on_stdout, on_stderr)
        async for event in self._verbs.command_events(self._sandbox, self.id, timeout=timeout):
            if event["event"] == "output":
                kept.take(event["stream"], base64.b64decode(event["data_b64"]))
        info = await self.info
        exit_code = -1 if info.exit_code is None else info.exit_code
        result = kept.result(exit_code, info.snapshot, timed_out=info.status == "timed-out")
        if check and result.exit_code != 0:
            raise exec_failure(shlex.join(info.argv), result, info.error)
        return result

    @stream
    async def output(self, *, follow: bool = False) -> AsyncIterator[tuple[str, bytes]]:
        """The pieces of its output from the beginning, in order, each with its stream ("stdout" or "stderr"). With
        `follow`, until it has ended."""
        return pieces_of(await self._verbs.command_events(self._sandbox, self.id, follow=follow).begin())

    @stream
    async def lines(self, *, follow: bool = False, stream: Stream | None = None) -> AsyncIterator[str]:
        """Its output from the beginning as lines of text, without their ends; of one stream, if it is named. With
        `follow`, each line as it comes, until the command has ended. Bytes that are not UTF-8 become U+FFFD."""
        return lines_of(await self._verbs.command_events(self._sandbox, self.id, follow=follow).begin(), stream)

    @verb
    async def write(self, data: str | bytes, *, end: bool = False) -> None:
        """Write to its standard input, and with `end` close it behind that. For a command that was started with
        `stdin=True`. As `Snapshotd.write_command`."""
        await self._verbs.write_command(self._sandbox, self.id, bytes_of("data", data), end=end)

    @verb
    async def signal(self, number: int) -> None:
        """Send a signal to its process group, as a terminal does. Conflict: it has ended."""
        await self._verbs.signal_command(self._sandbox, self.id, number)

    @verb
    async def kill(self) -> None:
        """End it at once, with all that it started. Not an error when it has ended."""
        with contextlib.suppress(Conflict, NotFound):  # an ended one is no longer listed for ever
            from signal import SIGKILL  # rarely: the module takes a moment to import

            await self._verbs.signal_command(self._sandbox, self.id, SIGKILL)

    @verb
    async def remove(self) -> SnapshotT:
        """End a service, and take its declaration away: the snapshot is the first without it. A stopped sandbox is started for
        that. UsageError: the command is no service; NotFound: it is not declared any more."""
        service = (await self.info).service
        if service is None:
            raise UsageError(f"the command {self.id[:12]} is no service, so it has no declaration; kill it")
        return self._snapshot_of(await self._verbs.remove_service(self._sandbox, service))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Kill it."""
        await self.kill()

    def __repr__(self) -> str:
        return f"<Command {self.id[:12]}>"


class AnySnapshot(Object[ClientT, SandboxT, SnapshotT, CommandT]):
    """One immutable snapshot. `info` is its record, `files` reads its files."""

    files: Any

    def __init__(self, client: ClientT, info: SnapshotInfo) -> None:
        super().__init__(client)
        self.info = info
        self.files = self._form.snapshot_files(client, info.id)

    @class_verb
    async def get(cls, ref: str, *, client: ClientT | None = None) -> SnapshotT:
        """By tag, unique prefix of an id, or a trajectory's name or id (its head)."""
        given = cls._client_of(client)
        found: SnapshotT = cls._form.snapshot(given, await given._coroutines.snapshot(ref))
        return found

    @property
    def id(self) -> str:
        return self.info.id

    @verb
    async def diff(self, other: AnySnapshot[Any, Any, Any, Any] | str | None = None) -> list[ChangeInfo]:
        """The changes from this snapshot to `other`; without it, from the parent to this one."""
        return [item async for item in self._verbs.diff(self.id, None if other is None else id_of(other))]

    @verb
    async def patch(self, other: AnySnapshot[Any, Any, Any, Any] | str | None = None) -> bytes:
        """The same as a patch of /workspace, held in memory."""
        parts: list[bytes] = []
        await self._verbs.patch(self.id, None if other is None else id_of(other), write=parts.append)
        return b"".join(parts)

    @verb
    async def cat(self, path: str | bytes) -> bytes:
        """A regular file's content, held in memory. NotFound; UsageError for anything but a regular file."""
        return b"".join([piece async for piece in self._verbs.cat(self.id, path)])

    @verb
    async def restore(self, to: str | Path, *, path: str = "") -> RestoreInfo:
        """Write the tree, or the part below `path`, into a folder that does not exist or is empty."""
        return await self._verbs.restore(self.id, to, path=path)

    @verb
    async def apply(
        self,
        to: str | Path,
        base: AnySnapshot[Any, Any, Any, Any] | str | None = None,
        path: str | bytes | None = None,
        dry_run: bool = False,
    ) -> ApplyInfo:
        """Bring what changed up to here to a local folder, as `Snapshotd.apply`, which can make a commit of it, too."""
        return await self._verbs.apply(self.id, to, None if base is None else id_of(base), path, dry_run)

    @verb
    async def fork(self, n: int = 1, *, wait: Wait = "captured", **options: Unpack[ForkOptions]) -> list[SandboxT]:
        """`n` running sandboxes that start from here, or one for each of `variants`; with `resume` the agent's program
        goes on in each. Each ends after `idle_timeout` seconds without a command (None: half an hour, 0: never); `exec`
        starts it again. As `Snapshotd.fork`."""
        forked = await self._verbs.fork(self.id, n, wait=wait, **options)
        return [self._sandbox_of(item) for item in forked.trajectories]

    @verb
    async def edit(self, /, **changes: Any) -> SandboxT:
        """A new trajectory that begins here with something changed; takes the keywords of `Snapshotd.edit`."""
        return self._sandbox_of(await self._verbs.edit(self.id, **changes))

    @verb
    async def conversation(self, *, start: int = 0, count: int | None = None) -> list[MessageInfo]:
        """The conversation up to here, from message number `start` on; at most `count` messages."""
        return await self._verbs.conversation(self.id, start=start, count=count)

    @verb
    async def journal(self) -> list[JournalInfo]:
        """The journal up to here, from the program's beginning."""
        return [item async for item in self._verbs.journal(self.id)]

    @verb
    async def state(self) -> dict[str, Any]:
        """The agent's own state as it was saved here."""
        return await self._verbs.state(self.id)

    @verb
    async def tasks(self) -> list[TaskInfo]:
        """The subtasks as they were here."""
        return await self._verbs.tasks(self.id)

    @verb
    async def export(
        self,
        to: str | Path,
        *,
        since: AnySnapshot[Any, Any, Any, Any] | str | None = None,
        **options: Unpack[ExportOptions],
    ) -> ExportInfo:
        """Write it (with `whole`: its trajectory up to it) as one file: a `bundle` for `Snapshotd.import_bundle`, an
        `oci` image for `docker load`, or a plain `tar`. The file is there whole or not at all."""
        return await self._verbs.export_file(self.id, to, since=None if since is None else id_of(since), **options)

    @verb
    async def exec(
        self,
        command: str | Sequence[str],
        *,
        check: bool = False,
        input: str | bytes | None = None,
        on_stdout: Callable[[bytes], object] | None = None,
        on_stderr: Callable[[bytes], object] | None = None,
        **options: Unpack[CommandOptions],
    ) -> ExecResult:
        """Run a command in a throw-away fork; nothing of it is kept. Otherwise as `Sandbox.exec`."""
        output = KeptOutput(on_stdout, on_stderr)
        done = await self._verbs.exec_snapshot(
            self.id, argv_or_shell(command), on_output=output.take, stdin=input_of(input), **options
        )
        return output.check_result(done, command, check)

    @verb
    async def tag(self, name: str, *, move: bool = False) -> None:
        await self._verbs.tag(self.id, name, move=move)

    def __repr__(self) -> str:
        return f"<Snapshot {self.id[:12]} seq={self.info.seq} tool={self.info.tool.name!r}>"


def id_of(snapshot: AnySnapshot[Any, Any, Any, Any] | str) -> str:
    return snapshot.id if isinstance(snapshot, AnySnapshot) else snapshot


async def pieces_of(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[tuple[str, bytes]]:
    async with closing(events) as followed:
        async for event in followed:
            if event["event"] == "output":
                yield event["stream"], base64.b64decode(event["data_b64"])


async def lines_of(events: AsyncIterator[dict[str, Any]], stream: Stream | None) -> AsyncIterator[str]:
    lines = TextLines(stream)
    async with closing(events) as followed:
        async for event in followed:
            for line in lines.take(event):
                yield line
    for line in lines.last():
        yield line
