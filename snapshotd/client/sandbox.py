"""Sandboxes and snapshots as objects, shaped like the SDKs of sandbox services."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, Unpack, cast, overload

from snapshotd.api.commands import ExecOptions, ServiceOptions
from snapshotd.api.history import PromoteOptions, RetryOptions, RewindOptions, RewindPreviewOptions
from snapshotd.api.snapshots import LogOptions, SnapshotOptions
from snapshotd.api.trajectories import (
    ForkOptions,
    NetworkChange,
    RemoveOptions,
    RunOptions,
    SandboxOptions,
    StopOptions,
)
from snapshotd.client.client import Snapshotd, Verbs
from snapshotd.client.objects import (
    AnyCommand,
    AnySnapshot,
    ClientForm,
    ClientT,
    CommandT,
    Object,
    SandboxT,
    SnapshotT,
    id_of,
    lines_of,
)
from snapshotd.client.outcomes import ExecResult, KeptOutput, RunResult, argv_or_shell, exec_failure, input_of
from snapshotd.client.results import EffectInfo, NetworkInfo, RewindPreview, TrajectoryInfo
from snapshotd.client.twofold import Blocking, BlockingContext, attribute, class_verb, stream, verb
from snapshotd.client.verbs.base import Wait
from snapshotd.client.verbs.commands import Stream
from snapshotd.client.verbs.files import SandboxFiles, SnapshotFiles
from snapshotd.client.verbs.ports import OnFailure, Port, PortT
from snapshotd.errors import UsageError


class SandboxRunOptions(RunOptions, total=False):
    """The keywords of a run, also of one that is waited for."""

    wait: Wait


class AnySandbox(
    Object[ClientT, SandboxT, SnapshotT, CommandT], Generic[ClientT, SandboxT, SnapshotT, CommandT, PortT]
):
    """A trajectory and its running sandbox. Leaving a `with` block stops it, with a last snapshot; nothing is
    removed. `files` reads and writes its files."""

    files: Any

    def __init__(self, client: ClientT, info: TrajectoryInfo) -> None:
        super().__init__(client)
        self.id = info.id
        self.name = info.name
        self.files = self._form.sandbox_files(client, info.id)

    @class_verb
    async def create(
        cls,
        *,
        idle_timeout: float = 0,
        wait: Wait = "captured",
        client: ClientT | None = None,
        **options: Unpack[SandboxOptions],
    ) -> SandboxT:
        """Start a sandbox. `workspace` is copied to /workspace; `SandboxOptions` has all keywords. After `idle_timeout`
        seconds without a command it is stopped (0: never). With `wait="stored"`, here and in the methods that make a
        snapshot, they return when it survives power loss."""
        given = cls._client_of(client)
        info, _ = await given._coroutines.create(idle_timeout=idle_timeout, wait=wait, **options)
        return cast("SandboxT", cls._form.sandbox(given, info))

    @class_verb
    async def run(
        cls,
        agent: str | Path | None = None,
        *,
        detach: bool = False,
        check: bool = False,
        on_stdout: Callable[[bytes], object] | None = None,
        on_stderr: Callable[[bytes], object] | None = None,
        client: ClientT | None = None,
        **options: Unpack[SandboxRunOptions],
    ) -> RunResult | SandboxT:
        """Run an agent file with `args`, or a `command`, to its end, as `wait`. With `detach` the answer is its sandbox
        at once. A run that is no longer waited for (an interrupt, an error in `on_stdout`) goes on. Further keywords are
        those of `Snapshotd.run`. UsageError for what only a run that is waited for has."""
        if detach and (check or on_stdout or on_stderr):
            raise UsageError("a detached run has no check, on_stdout or on_stderr; `Sandbox.wait` takes them")
        given = cls._client_of(client)
        info = await given._coroutines.run(agent=agent, detach=detach, **options)
        if detach:
            return cast("SandboxT", cls._form.sandbox(given, info))
        return await _wait_for_end(given._coroutines, info.id, on_stdout, on_stderr, check=check)

    @class_verb
    async def connect(cls, ref: str, *, client: ClientT | None = None) -> SandboxT:
        """An existing trajectory, by name or unique prefix of its id; running or not."""
        given = cls._client_of(client)
        return cast("SandboxT", cls._form.sandbox(given, await given._coroutines.trajectory(ref)))

    @attribute
    async def info(self) -> TrajectoryInfo:
        """Its present state (asks the daemon)."""
        return await self._verbs.trajectory(self.id)

    @verb
    async def exec(
        self,
        command: str | Sequence[str],
        *,
        check: bool = False,
        input: str | bytes | None = None,
        on_stdout: Callable[[bytes], object] | None = None,
        on_stderr: Callable[[bytes], object] | None = None,
        wait: Wait = "captured",
        if_head: AnySnapshot[Any, Any, Any, Any] | str | None = None,
        background: bool = False,
        stdin: bool = False,
        service: ServiceOptions | str | None = None,
        **options: Unpack[ExecOptions],
    ) -> ExecResult | CommandT:
        """Run a command as a tool call and take the snapshot. A string goes through `/bin/sh -c`, a list is run as it
        is.

        `input` is its standard input, text as UTF-8; without it that is empty. With `check`, ExecFailed for an exit
        code other than 0. CommandNotFound and CommandNotRunnable leave no snapshot. With `if_head`, Conflict when that
        is not the newest snapshot any more. After `timeout` seconds the command is ended with everything that it
        started: `timed_out`, exit code 124, and what it has done until then is there. `idle_timeout`: as in `create`,
        for the sandbox from now on.

        With `background` the answer is a `Command` at once, and its snapshot is taken when it ends; other calls go on
        beside it. With `stdin`, `Command.write` writes to it; otherwise its standard input is empty. UsageError for what
        only a command in the foreground has.

        With `service`, a name or a `ServiceOptions`, it comes back in forks and rewinds (docs/services.md).
        """
        if background or service is not None:
            if check or on_stdout or on_stderr or input is not None or if_head is not None or wait != "captured":
                raise UsageError(
                    "a command in the background has no check, on_stdout, on_stderr, input, if_head or wait: `Command.wait` and "
                    "`Command.write` are for them"
                )
            declared = ServiceOptions(service) if isinstance(service, str) else service
            info = await self._verbs.exec_in_background(
                self.id, argv_or_shell(command), stdin=stdin, service=declared, **options
            )
            return self._command_of(info)
        if stdin:
            raise UsageError("`stdin` is for a command in the background; give this one its `input`")
        output = KeptOutput(on_stdout, on_stderr)
        done = await self._verbs.exec(
            self.id,
            argv_or_shell(command),
            on_output=output.take,
            stdin=input_of(input),
            wait=wait,
            if_head=None if if_head is None else id_of(if_head),
            **options,
        )
        return output.check_result(done, command, check)

    @verb
    async def commands(self) -> list[CommandT]:
        """Its commands that run, and the newest background commands that have ended, oldest first."""
        return [self._command_of(info) for info in await self._verbs.commands(self.id)]

    @verb
    async def command(self, prefix: str) -> CommandT:
        """One of them, by a unique prefix of its id, or a service by its name. NotFound, Ambiguous."""
        return self._command_of(await self._verbs.command(self.id, prefix))

    @verb
    async def port(
        self,
        number: int | str,
        local: int | None = None,
        *,
        unix: str | Path | None = None,
        on_failure: OnFailure = lambda _: None,
    ) -> PortT:
        """A local address that reaches the server on a port inside, whatever the network: `with sandbox.port(8000) as
        port: urlopen(f"http://{port.address}/")`. A service's port has its name. As `Snapshotd.port`."""
        opened: PortT = await self._verbs.port(self.id, number, local, unix=unix, on_failure=on_failure)
        return opened

    @verb
    async def snapshot(
        self, name: str | None = None, *, wait: Wait = "captured", **options: Unpack[SnapshotOptions]
    ) -> SnapshotT:
        """Take a snapshot as it is now, with `name` as its tag. As `Snapshotd.take_snapshot`."""
        return self._snapshot_of(await self._verbs.take_snapshot(self.id, name, wait=wait, **options))

    @verb
    async def snapshots(self, last: int | None = None, **options: Unpack[LogOptions]) -> list[SnapshotT]:
        """Oldest first; as `Snapshotd.log`."""
        return [self._snapshot_of(info) for info in await self._verbs.log(self.id, last, **options)]

    @verb
    async def head(self) -> SnapshotT:
        """The newest snapshot."""
        return self._snapshot_of(await self._verbs.snapshot(self.id))

    @verb
    async def fork(self, n: int = 1, *, wait: Wait = "captured", **options: Unpack[ForkOptions]) -> list[SandboxT]:
        """`n` running sandboxes that start from the newest snapshot; this one runs on. As `Snapshotd.fork`."""
        head = (await self._verbs.snapshot(self.id)).id
        forked = await self._verbs.fork(head, n, wait=wait, **options)
        return [self._sandbox_of(item) for item in forked.trajectories]

    @verb
    async def rewind(
        self, to: AnySnapshot[Any, Any, Any, Any] | str, *, wait: Wait = "captured", **options: Unpack[RewindOptions]
    ) -> SnapshotT:
        """Go back to a snapshot, in the running sandbox: files, the agent's mind, or both. Recorded as a new snapshot;
        nothing is lost, and `undo` takes it back. As `Snapshotd.rewind`."""
        return self._snapshot_of(await self._verbs.rewind(self.id, id_of(to), wait=wait, **options))

    @verb
    async def preview_rewind(
        self, to: AnySnapshot[Any, Any, Any, Any] | str, **options: Unpack[RewindPreviewOptions]
    ) -> RewindPreview:
        """The effect that `rewind` would have. Changes nothing."""
        return await self._verbs.preview_rewind(self.id, id_of(to), **options)

    @verb
    async def undo(self, *, wait: Wait = "captured") -> SnapshotT:
        """Take the last rewind (or undo) back."""
        return self._snapshot_of(await self._verbs.undo(self.id, wait=wait))

    @verb
    async def promote(self, *, wait: Wait = "captured", **options: Unpack[PromoteOptions]) -> SnapshotT:
        """Make the newest snapshot the head of the trajectory that this one was forked from. As `Snapshotd.promote`."""
        return self._snapshot_of(await self._verbs.promote(self.id, wait=wait, **options))

    @verb
    async def resume(
        self, *, retry: Sequence[str] = (), skip: Sequence[str] = (), results: Mapping[str, Any] | None = None
    ) -> None:
        """Let the agent's program go on from the newest snapshot; `events` follows it. As `Snapshotd.resume`."""
        await self._verbs.resume(self.id, retry=retry, skip=skip, results=results)

    @stream
    async def events(self, *, follow: bool = True) -> AsyncIterator[dict[str, Any]]:
        """The events of the agent's run from its beginning; with `follow`, to its end. As `Snapshotd.events`."""
        return await self._verbs.events(self.id, follow=follow).begin()

    @stream
    async def lines(self, *, follow: bool = True, stream: Stream | None = None) -> AsyncIterator[str]:
        """The output of the agent's run, as `Command.lines`."""
        return lines_of(await self._verbs.events(self.id, follow=follow).begin(), stream)

    @verb
    async def wait(
        self,
        *,
        on_stdout: Callable[[bytes], object] | None = None,
        on_stderr: Callable[[bytes], object] | None = None,
        check: bool = False,
        timeout: float | None = None,
    ) -> RunResult:
        """Wait until the run of its agent, or of a fork's program, has ended, beyond a restart of the daemon. All that it
        prints comes to `on_stdout` and `on_stderr`, from its beginning. With `check`, ExecFailed for an exit code other
        than 0. After `timeout` seconds StillRunning (a TimeoutError): it runs on. UsageError: no program ever ran in it."""
        return await _wait_for_end(self._verbs, self.id, on_stdout, on_stderr, check=check, timeout=timeout)

    @verb
    async def retry(self, task: str, *, wait: Wait = "captured", **options: Unpack[RetryOptions]) -> SnapshotT:
        """Go back to before a task began and do it again. As `Snapshotd.retry`."""
        return self._snapshot_of(await self._verbs.retry(self.id, task, wait=wait, **options))

    @verb
    async def effects(self) -> list[EffectInfo]:
        """The irreversible calls that rewinds left behind, newest first."""
        return await self._verbs.effects(self.id)

    @verb
    async def compensate(self, *calls: str) -> list[EffectInfo]:
        """Run the compensations of those calls (all, if none is named), each at most once."""
        return await self._verbs.compensate(self.id, calls)

    @verb
    async def stop(self, *, wait: Wait = "captured", **options: Unpack[StopOptions]) -> None:
        """Take a last snapshot if anything changed (with `discard`: none) and end the container. `exec` starts another."""
        await self._verbs.stop(self.id, wait=wait, **options)

    @verb
    async def network(self, **change: Unpack[NetworkChange]) -> NetworkInfo:
        """The hosts that it reaches, after this change. As `Snapshotd.network`."""
        return await self._verbs.network(self.id, **change)

    @verb
    async def remove(self, **options: Unpack[RemoveOptions]) -> None:
        """Forget the trajectory with all its snapshots."""
        await self._verbs.remove(self.id, **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._verbs.stop(self.id)

    def __repr__(self) -> str:
        return f"<Sandbox {self.name or self.id[:12]}>"


async def _wait_for_end(
    verbs: Verbs[Any],
    identity: str,
    on_stdout: Callable[[bytes], object] | None,
    on_stderr: Callable[[bytes], object] | None,
    *,
    check: bool,
    timeout: float | None = None,
) -> RunResult:
    """The result of a run that has ended. See `AnySandbox.wait`."""
    kept = KeptOutput(on_stdout, on_stderr)
    ended = await verbs.wait(identity, on_output=kept.take, timeout=timeout)
    code = -1 if ended.exit_code is None else ended.exit_code
    result = RunResult(code, *kept.output(), ended.head, trajectory=ended.id, status=ended.status)
    if check and code != 0:
        raise exec_failure(shlex.join(ended.agent.argv if ended.agent else ()), result, None)
    return result


class Command(BlockingContext, AnyCommand[Snapshotd, "Sandbox", "Snapshot", "Command"]):
    __doc__ = AnyCommand.__doc__


class Snapshot(Blocking, AnySnapshot[Snapshotd, "Sandbox", "Snapshot", "Command"]):
    __doc__ = AnySnapshot.__doc__

    files: SnapshotFiles


class Sandbox(BlockingContext, AnySandbox[Snapshotd, "Sandbox", "Snapshot", "Command", Port]):
    __doc__ = AnySandbox.__doc__

    files: SandboxFiles

    if TYPE_CHECKING:  # a descriptor cannot tell these apart

        @overload  # type: ignore[override]
        @classmethod
        def run(
            cls,
            agent: str | Path | None = None,
            *,
            detach: Literal[False] = False,
            check: bool = False,
            on_stdout: Callable[[bytes], object] | None = None,
            on_stderr: Callable[[bytes], object] | None = None,
            client: Snapshotd | None = None,
            **options: Unpack[SandboxRunOptions],
        ) -> RunResult: ...
        @overload
        @classmethod
        def run(
            cls,
            agent: str | Path | None = None,
            *,
            detach: Literal[True],
            client: Snapshotd | None = None,
            **options: Unpack[SandboxRunOptions],
        ) -> Sandbox: ...
        @classmethod
        def run(cls, *args: Any, **kwargs: Any) -> Any:
            """Run an agent file, or a `command`, to its end; with `detach` the answer is its sandbox at once."""

        @overload  # type: ignore[override]
        def exec(
            self,
            command: str | Sequence[str],
            *,
            background: Literal[False] = False,
            check: bool = False,
            input: str | bytes | None = None,
            on_stdout: Callable[[bytes], object] | None = None,
            on_stderr: Callable[[bytes], object] | None = None,
            wait: Wait = "captured",
            if_head: AnySnapshot[Any, Any, Any, Any] | str | None = None,
            **options: Unpack[ExecOptions],
        ) -> ExecResult: ...
        @overload
        def exec(
            self,
            command: str | Sequence[str],
            *,
            background: Literal[True],
            stdin: bool = False,
            **options: Unpack[ExecOptions],
        ) -> Command: ...
        @overload
        def exec(
            self, command: str | Sequence[str], *, service: ServiceOptions | str, **options: Unpack[ExecOptions]
        ) -> Command: ...
        def exec(self, *args: Any, **kwargs: Any) -> Any:
            """Run a command as a tool call and take the snapshot. A string goes through `/bin/sh -c`. With `background` the
            answer is a `Command` at once, with `service` once it is ready."""


Command._form = Snapshot._form = Sandbox._form = ClientForm(
    Snapshotd, Sandbox, Snapshot, Command, SandboxFiles, SnapshotFiles
)
