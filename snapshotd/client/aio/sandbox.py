"""Made by `snapshotd/client/aio/generate.py` from `snapshotd/client/sandbox.py`: change that one."""

from __future__ import annotations

import base64
import contextlib
import shlex
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

from snapshotd.client.aio.carrying import AsyncPort
from snapshotd.client.aio.client import AsyncSnapshotd
from snapshotd.client.aio.files import AsyncSandboxFiles, AsyncSnapshotFiles
from snapshotd.client.commands import Stream, TextLines
from snapshotd.client.local.arguments import bytes_of, check_flag, instance_of
from snapshotd.client.mind import Mode
from snapshotd.client.ports import OnFailure
from snapshotd.client.results import (
    ApplyInfo,
    ChangeInfo,
    CommandInfo,
    EffectInfo,
    ExportInfo,
    JournalInfo,
    MessageInfo,
    Provider,
    RestoreInfo,
    RewindPreview,
    SnapshotInfo,
    TaskInfo,
    TrajectoryInfo,
)
from snapshotd.client.sandbox import ExecResult, RunResult, _argv, _failed, _Kept, _stdin
from snapshotd.client.sharing import Form
from snapshotd.client.verbs import Wait
from snapshotd.errors import Conflict, NotFound, UsageError
from snapshotd.terms import DEFAULT_TENANT


class AsyncCommand:
    """A command in the background of a sandbox: `AsyncSandbox.exec(..., background=True)` starts one, `AsyncSandbox.commands` and
    `AsyncSandbox.command` find it again. `id` is its name."""

    def __init__(self, client: AsyncSnapshotd, info: CommandInfo) -> None:
        self._client = client
        self._sandbox = info.trajectory
        self.id = info.id

    @property
    async def info(self) -> CommandInfo:
        """Its present state (asks the daemon): `status`, `exit_code`, `snapshot`."""
        return await self._client.command(self._sandbox, self.id)

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
        kept = _Kept(on_stdout, on_stderr)
        async for event in self._client.command_events(self._sandbox, self.id, timeout=timeout):
            if event["event"] == "output":
                kept.take(event["stream"], base64.b64decode(event["data_b64"]))
        info = await self.info
        exit_code = -1 if info.exit_code is None else info.exit_code
        result = kept.result(exit_code, info.snapshot, timed_out=info.status == "timed-out")
        if check and result.exit_code != 0:
            raise _failed(shlex.join(info.argv), result, info.error)
        return result

    async def output(self, *, follow: bool = False) -> AsyncIterator[tuple[str, bytes]]:
        """The pieces of its output from the beginning, in order, each with its stream ("stdout" or "stderr"). With
        `follow`, until it has ended."""
        async for event in self._client.command_events(self._sandbox, self.id, follow=follow):
            if event["event"] == "output":
                yield (event["stream"], base64.b64decode(event["data_b64"]))

    async def lines(self, *, follow: bool = False, stream: Stream | None = None) -> AsyncIterator[str]:
        """Its output from the beginning as lines of text, without their ends; of one stream, if it is named. With
        `follow`, each line as it comes, until the command has ended. Bytes that are not UTF-8 become U+FFFD."""
        lines = TextLines(stream)
        async for event in self._client.command_events(self._sandbox, self.id, follow=follow):
            for line in lines.take(event):
                yield line
        for line in lines.last():
            yield line

    async def write(self, data: str | bytes, *, end: bool = False) -> None:
        """Write to its standard input, and with `end` close it behind that. For a command that was started with
        `stdin=True`. As `AsyncSnapshotd.write_command`."""
        await self._client.write_command(self._sandbox, self.id, bytes_of("data", data), end=end)

    async def signal(self, number: int) -> None:
        """Send a signal to its process group, as a terminal does. Conflict: it has ended."""
        await self._client.signal_command(self._sandbox, self.id, number)

    async def kill(self) -> None:
        """End it at once, with all that it started. Not an error when it has ended."""
        with contextlib.suppress(Conflict, NotFound):
            await self._client.signal_command(self._sandbox, self.id, signal.SIGKILL)

    async def __aenter__(self) -> AsyncCommand:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Kill it."""
        await self.kill()

    def __repr__(self) -> str:
        return f"<Command {self.id[:12]}>"


class AsyncSnapshot:
    """One immutable snapshot. `info` is its record, `files` reads its files."""

    def __init__(self, client: AsyncSnapshotd, info: SnapshotInfo) -> None:
        self._client = client
        self.info = info
        self.files = AsyncSnapshotFiles(client, info.id)

    @classmethod
    async def get(cls, ref: str, *, client: AsyncSnapshotd | None = None) -> AsyncSnapshot:
        """By tag, unique prefix of an id, or a trajectory's name or id (its head)."""
        client = AsyncSnapshotd() if client is None else instance_of("client", client, AsyncSnapshotd)
        return cls(client, await client.snapshot(ref))

    @property
    def id(self) -> str:
        return self.info.id

    async def diff(self, other: AsyncSnapshot | str | None = None) -> list[ChangeInfo]:
        """The changes from this snapshot to `other`; without it, from the parent to this one."""
        return [item async for item in self._client.diff(self.id, None if other is None else _id(other))]

    async def patch(self, other: AsyncSnapshot | str | None = None) -> bytes:
        """The same as a patch of /workspace, held in memory."""
        parts: list[bytes] = []
        await self._client.patch(self.id, None if other is None else _id(other), write=parts.append)
        return b"".join(parts)

    async def cat(self, path: str | bytes) -> bytes:
        """A regular file's content, held in memory. NotFound; UsageError for anything but a regular file."""
        return b"".join([item async for item in self._client.cat(self.id, path)])

    async def restore(self, to: str | Path, *, path: str = "") -> RestoreInfo:
        """Write the tree, or the part below `path`, into a folder that does not exist or is empty."""
        return await self._client.restore(self.id, to, path=path)

    async def apply(
        self,
        to: str | Path,
        base: AsyncSnapshot | str | None = None,
        path: str | bytes | None = None,
        dry_run: bool = False,
    ) -> ApplyInfo:
        """Bring what changed up to here to a local folder, as `AsyncSnapshotd.apply`, which can make a commit of it, too."""
        return await self._client.apply(self.id, to, None if base is None else _id(base), path, dry_run)

    async def fork(
        self,
        n: int = 1,
        *,
        args: Sequence[str] | None = None,
        name: str | None = None,
        resume: bool = False,
        variants: Mapping[str, Mapping[str, Any]] | None = None,
        wait: Wait = "captured",
        idle_timeout: float | None = None,
    ) -> list[AsyncSandbox]:
        """`n` running sandboxes that start from here, or one for each of `variants`; with `resume` the agent's program
        goes on in each. Each ends after `idle_timeout` seconds without a command (None: half an hour, 0: never); `exec`
        starts it again. As `AsyncSnapshotd.fork`."""
        forked = await self._client.fork(
            self.id, n, args=args, name=name, resume=resume, variants=variants, wait=wait, idle_timeout=idle_timeout
        )
        return [AsyncSandbox(self._client, item) for item in forked.trajectories]

    async def edit(self, **changes: Any) -> AsyncSandbox:
        """A new trajectory that begins here with something changed; takes the keywords of `AsyncSnapshotd.edit`."""
        return AsyncSandbox(self._client, await self._client.edit(self.id, **changes))

    async def conversation(self) -> list[MessageInfo]:
        """The conversation up to here."""
        return await self._client.conversation(self.id)

    async def journal(self) -> list[JournalInfo]:
        """The journal up to here, from the program's beginning."""
        return [item async for item in self._client.journal(self.id)]

    async def state(self) -> dict[str, Any]:
        """The agent's own state as it was saved here."""
        return await self._client.state(self.id)

    async def tasks(self) -> list[TaskInfo]:
        """The subtasks as they were here."""
        return await self._client.tasks(self.id)

    async def export(
        self, to: str | Path, *, form: Form = "bundle", whole: bool = False, since: AsyncSnapshot | str | None = None
    ) -> ExportInfo:
        """Write it (with `whole`: its trajectory up to it) as one file: a `bundle` for `AsyncSnapshotd.import_bundle`, an
        `oci` image for `docker load`, or a plain `tar`. The file is there whole or not at all."""
        return await self._client.export_file(
            self.id, to, form=form, whole=whole, since=None if since is None else _id(since)
        )

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        check: bool = False,
        input: str | bytes | None = None,
        on_stdout: Callable[[bytes], object] | None = None,
        on_stderr: Callable[[bytes], object] | None = None,
        timeout: float | None = None,
    ) -> ExecResult:
        """Run a command in a throw-away fork; nothing of it is kept. Otherwise as `AsyncSandbox.exec`."""
        output = _Kept(on_stdout, on_stderr)
        done = await self._client.exec_snapshot(
            self.id,
            _argv(command),
            cwd=cwd,
            env=env,
            user=user,
            on_output=output.take,
            stdin=_stdin(input),
            timeout=timeout,
        )
        return output.checked(done, command, check)

    async def tag(self, name: str, *, move: bool = False) -> None:
        await self._client.tag(self.id, name, move=move)

    def __repr__(self) -> str:
        return f"<Snapshot {self.id[:12]} seq={self.info.seq} tool={self.info.tool.name!r}>"


class AsyncSandbox:
    """A trajectory and its running sandbox. Leaving a `with` block stops it, with a last snapshot; nothing is
    removed. `files` reads and writes its files."""

    def __init__(self, client: AsyncSnapshotd, info: TrajectoryInfo) -> None:
        self._client = client
        self.id = info.id
        self.name = info.name
        self.files = AsyncSandboxFiles(client, info.id)

    @classmethod
    async def create(
        cls,
        *,
        image: str = "default",
        workspace: str | Path | None = None,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        network: str | None = None,
        memory: int | str | None = None,
        cpus: float | None = None,
        pids: int | None = None,
        disk: int | str | None = None,
        runtime: str = "auto",
        secrets: Mapping[str, str] | None = None,
        providers: Sequence[Provider] = (),
        capture_tokens: bool = False,
        tenant: str = DEFAULT_TENANT,
        idle_timeout: float = 0,
        wait: Wait = "captured",
        client: AsyncSnapshotd | None = None,
    ) -> AsyncSandbox:
        """Start a sandbox. `workspace` is copied to /workspace, `memory` and `disk` are in bytes, or text such as
        "512m", `network` is none (the default) or bridge, `runtime="none"` means a plain folder without isolation,
        `secrets` are environment that is recorded nowhere in plain, `providers`
        are for the recording gateway, which with `capture_tokens` asks for token ids and log probabilities, `tenant` is
        the tenant of the store that its agents read and write, and after `idle_timeout` seconds without a command it is
        stopped (0: never). With `wait="stored"`, here and in the methods that make a snapshot, they return when it
        survives power loss."""
        client = AsyncSnapshotd() if client is None else instance_of("client", client, AsyncSnapshotd)
        info, _ = await client.create(
            image=image,
            workspace=workspace,
            name=name,
            env=env,
            network=network,
            memory=memory,
            cpus=cpus,
            pids=pids,
            disk=disk,
            runtime=runtime,
            secrets=secrets,
            providers=providers,
            capture_tokens=capture_tokens,
            tenant=tenant,
            idle_timeout=idle_timeout,
            wait=wait,
        )
        return cls(client, info)

    @overload
    @classmethod
    async def run(
        cls,
        agent: str | Path | None = None,
        *,
        args: Sequence[str] = (),
        command: Sequence[str] = (),
        detach: Literal[False] = False,
        check: bool = False,
        on_stdout: Callable[[bytes], object] | None = None,
        on_stderr: Callable[[bytes], object] | None = None,
        client: AsyncSnapshotd | None = None,
        **options: Any,
    ) -> RunResult: ...

    @overload
    @classmethod
    async def run(
        cls,
        agent: str | Path | None = None,
        *,
        detach: Literal[True],
        args: Sequence[str] = (),
        command: Sequence[str] = (),
        client: AsyncSnapshotd | None = None,
        **options: Any,
    ) -> AsyncSandbox: ...

    @classmethod
    async def run(
        cls,
        agent: str | Path | None = None,
        *,
        args: Sequence[str] = (),
        command: Sequence[str] = (),
        detach: bool = False,
        check: bool = False,
        on_stdout: Callable[[bytes], object] | None = None,
        on_stderr: Callable[[bytes], object] | None = None,
        client: AsyncSnapshotd | None = None,
        **options: Any,
    ) -> RunResult | AsyncSandbox:
        """Run an agent file with `args`, or a `command`, to its end, as `wait`. With `detach` the answer is its sandbox
        at once. A run that is no longer waited for (an interrupt, an error in `on_stdout`) goes on. Further keywords are
        those of `AsyncSnapshotd.run`. UsageError for what only a run that is waited for has."""
        check_flag("detach", detach)
        if detach and (check or on_stdout or on_stderr):
            raise UsageError("a detached run has no check, on_stdout or on_stderr; `Sandbox.wait` takes them")
        client = AsyncSnapshotd() if client is None else instance_of("client", client, AsyncSnapshotd)
        started = cls(client, await client.run(agent=agent, args=args, command=command, detach=detach, **options))
        return started if detach else await started.wait(on_stdout=on_stdout, on_stderr=on_stderr, check=check)

    @classmethod
    async def connect(cls, ref: str, *, client: AsyncSnapshotd | None = None) -> AsyncSandbox:
        """An existing trajectory, by name or unique prefix of its id; running or not."""
        client = AsyncSnapshotd() if client is None else instance_of("client", client, AsyncSnapshotd)
        return cls(client, await client.trajectory(ref))

    @property
    async def info(self) -> TrajectoryInfo:
        """Its present state (asks the daemon)."""
        return await self._client.trajectory(self.id)

    @overload
    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        check: bool = False,
        input: str | bytes | None = None,
        on_stdout: Callable[[bytes], object] | None = None,
        on_stderr: Callable[[bytes], object] | None = None,
        wait: Wait = "captured",
        if_head: AsyncSnapshot | str | None = None,
        timeout: float | None = None,
        idle_timeout: float | None = None,
        background: Literal[False] = False,
    ) -> ExecResult: ...

    @overload
    async def exec(
        self,
        command: str | Sequence[str],
        *,
        background: Literal[True],
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bool = False,
        timeout: float | None = None,
        idle_timeout: float | None = None,
    ) -> AsyncCommand: ...

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        check: bool = False,
        input: str | bytes | None = None,
        on_stdout: Callable[[bytes], object] | None = None,
        on_stderr: Callable[[bytes], object] | None = None,
        wait: Wait = "captured",
        if_head: AsyncSnapshot | str | None = None,
        timeout: float | None = None,
        idle_timeout: float | None = None,
        background: bool = False,
        stdin: bool = False,
    ) -> ExecResult | AsyncCommand:
        """Run a command as a tool call and take the snapshot. A string goes through `/bin/sh -c`, a list is run as it
        is.

        `input` is its standard input, text as UTF-8; without it that is empty. With `check`, ExecFailed for an exit
        code other than 0. CommandNotFound and CommandNotRunnable leave no snapshot. With `if_head`, Conflict when that
        is not the newest snapshot any more. After `timeout` seconds the command is ended with everything that it
        started: `timed_out`, exit code 124, and what it has done until then is there. `idle_timeout`: as in `create`,
        for the sandbox from now on.

        With `background` the answer is a `AsyncCommand` at once, and its snapshot is taken when it ends; other calls go on
        beside it. With `stdin`, `AsyncCommand.write` writes to it; otherwise its standard input is empty. UsageError for what
        only a command in the foreground has.
        """
        check_flag("background", background)
        if background:
            if check or on_stdout or on_stderr or (input is not None) or (if_head is not None) or (wait != "captured"):
                raise UsageError(
                    "a command in the background has no check, on_stdout, on_stderr, input, if_head or wait: `Command.wait` and `Command.write` are for them"
                )
            info = await self._client.exec_in_background(
                self.id,
                _argv(command),
                cwd=cwd,
                env=env,
                user=user,
                stdin=stdin,
                timeout=timeout,
                idle_timeout=idle_timeout,
            )
            return AsyncCommand(self._client, info)
        if stdin:
            raise UsageError("`stdin` is for a command in the background; give this one its `input`")
        output = _Kept(on_stdout, on_stderr)
        done = await self._client.exec(
            self.id,
            _argv(command),
            cwd=cwd,
            env=env,
            user=user,
            on_output=output.take,
            stdin=_stdin(input),
            wait=wait,
            if_head=None if if_head is None else _id(if_head),
            timeout=timeout,
            idle_timeout=idle_timeout,
        )
        return output.checked(done, command, check)

    async def commands(self) -> list[AsyncCommand]:
        """Its commands that run, also those in the foreground whose client has gone away, and the newest background
        commands that have ended, oldest first. `AsyncCommand.signal` and `kill` are for all."""
        return [AsyncCommand(self._client, info) for info in await self._client.commands(self.id)]

    async def command(self, prefix: str) -> AsyncCommand:
        """One of them, by a unique prefix of its id. NotFound, Ambiguous."""
        return AsyncCommand(self._client, await self._client.command(self.id, prefix))

    async def port(
        self,
        number: int,
        local: int | None = None,
        *,
        unix: str | Path | None = None,
        on_failure: OnFailure = lambda _: None,
    ) -> AsyncPort:
        """A local address that reaches the server on a port inside, whatever the network: `with sandbox.port(8000) as
        port: urlopen(f"http://{port.address}/")`. As `AsyncSnapshotd.port`."""
        return await self._client.port(self.id, number, local, unix=unix, on_failure=on_failure)

    async def snapshot(self, name: str | None = None, *, wait: Wait = "captured") -> AsyncSnapshot:
        """Take a snapshot as it is now, with `name` as its tag. Processes in it run on. Conflict: it does not run, its
        program is being replayed, or the name is taken."""
        return AsyncSnapshot(self._client, await self._client.take_snapshot(self.id, name, wait=wait))

    async def snapshots(self, last: int | None = None) -> list[AsyncSnapshot]:
        """Oldest first; with `last`, only this number of the newest."""
        return [AsyncSnapshot(self._client, info) for info in await self._client.log(self.id, last)]

    async def head(self) -> AsyncSnapshot:
        """The newest snapshot."""
        return AsyncSnapshot(self._client, await self._client.snapshot(self.id))

    async def fork(
        self,
        n: int = 1,
        *,
        args: Sequence[str] | None = None,
        name: str | None = None,
        resume: bool = False,
        variants: Mapping[str, Mapping[str, Any]] | None = None,
        wait: Wait = "captured",
        idle_timeout: float | None = None,
    ) -> list[AsyncSandbox]:
        """`n` running sandboxes that start from the newest snapshot; this one runs on."""
        return await (await self.head()).fork(
            n, args=args, name=name, resume=resume, variants=variants, wait=wait, idle_timeout=idle_timeout
        )

    async def rewind(
        self, to: AsyncSnapshot | str, *, mode: Mode = "both", compensate: bool = False, wait: Wait = "captured"
    ) -> AsyncSnapshot:
        """Go back to a snapshot, in the running sandbox: files, the agent's mind, or both. Recorded as a new snapshot;
        nothing is lost, and `undo` takes it back."""
        return AsyncSnapshot(
            self._client, await self._client.rewind(self.id, _id(to), mode=mode, compensate=compensate, wait=wait)
        )

    async def preview_rewind(self, to: AsyncSnapshot | str, *, mode: Mode = "both") -> RewindPreview:
        """The effect that `rewind` would have. Changes nothing."""
        return await self._client.preview_rewind(self.id, _id(to), mode=mode)

    async def undo(self, *, wait: Wait = "captured") -> AsyncSnapshot:
        """Take the last rewind (or undo) back."""
        return AsyncSnapshot(self._client, await self._client.undo(self.id, wait=wait))

    async def promote(
        self, *, into: str | None = None, leave_behind: bool = False, compensate: bool = False, wait: Wait = "captured"
    ) -> AsyncSnapshot:
        """Make the newest snapshot the head of the trajectory that this one was forked from. As `AsyncSnapshotd.promote`."""
        return AsyncSnapshot(
            self._client,
            await self._client.promote(self.id, into=into, leave_behind=leave_behind, compensate=compensate, wait=wait),
        )

    async def resume(
        self, *, retry: Sequence[str] = (), skip: Sequence[str] = (), results: Mapping[str, Any] | None = None
    ) -> None:
        """Let the agent's program go on from the newest snapshot; `events` follows it. As `AsyncSnapshotd.resume`."""
        await self._client.resume(self.id, retry=retry, skip=skip, results=results)

    def events(self, *, follow: bool = True) -> AsyncIterator[dict[str, Any]]:
        """The events of the agent's run from its beginning; with `follow`, until `finished`, beyond the end of the
        daemon. As `AsyncSnapshotd.events`."""
        return self._client.events(self.id, follow=follow)

    async def lines(self, *, follow: bool = True, stream: Stream | None = None) -> AsyncIterator[str]:
        """The output of the agent's run, as `AsyncCommand.lines`."""
        lines = TextLines(stream)
        async for event in self._client.events(self.id, follow=follow):
            for line in lines.take(event):
                yield line
        for line in lines.last():
            yield line

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
        kept = _Kept(on_stdout, on_stderr)
        ended = await self._client.wait(self.id, on_output=kept.take, timeout=timeout)
        code = -1 if ended.exit_code is None else ended.exit_code
        result = RunResult(code, *kept.output(), ended.head, trajectory=ended.id, status=ended.status)
        if check and code != 0:
            raise _failed(shlex.join(ended.agent.argv if ended.agent else ()), result, None)
        return result

    async def retry(
        self, task: str, *, compensate: bool = True, resume: bool = True, wait: Wait = "captured"
    ) -> AsyncSnapshot:
        """Go back to before a task began and do it again. As `AsyncSnapshotd.retry`."""
        return AsyncSnapshot(
            self._client, await self._client.retry(self.id, task, compensate=compensate, resume=resume, wait=wait)
        )

    async def effects(self) -> list[EffectInfo]:
        """The irreversible calls that rewinds left behind, newest first."""
        return await self._client.effects(self.id)

    async def compensate(self, *calls: str) -> list[EffectInfo]:
        """Run the compensations of those calls (all, if none is named), each at most once."""
        return await self._client.compensate(self.id, calls)

    async def stop(self, *, discard: bool = False, wait: Wait = "captured") -> None:
        """Take a last snapshot if anything changed (with `discard`: none) and end the container. `exec` starts it
        again."""
        await self._client.stop(self.id, discard=discard, wait=wait)

    async def remove(self, *, force: bool = False) -> None:
        """Forget the trajectory with all its snapshots."""
        await self._client.remove(self.id, force=force)

    async def __aenter__(self) -> AsyncSandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def __repr__(self) -> str:
        return f"<Sandbox {self.name or self.id[:12]}>"


def _id(snapshot: AsyncSnapshot | str) -> str:
    return snapshot.id if isinstance(snapshot, AsyncSnapshot) else snapshot
