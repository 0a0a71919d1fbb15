"""Sandboxes and snapshots as objects, shaped like the SDKs of sandbox services."""

from __future__ import annotations

import base64
import contextlib
import io
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

from snapshotd.client.client import Snapshotd
from snapshotd.client.commands import Stream, TextLines
from snapshotd.client.files import SandboxFiles, SnapshotFiles
from snapshotd.client.local.arguments import argv_of, bytes_of, check_flag, check_function, instance_of
from snapshotd.client.mind import Mode
from snapshotd.client.ports import OnFailure, Port
from snapshotd.client.results import (
    ApplyInfo,
    ChangeInfo,
    CommandInfo,
    EffectInfo,
    ExecInfo,
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
from snapshotd.client.sharing import Form
from snapshotd.client.verbs import Wait
from snapshotd.errors import Conflict, NotFound, SnapshotdError, UsageError
from snapshotd.terms import DEFAULT_TENANT


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of a command. `stdout` and `stderr` are text with U+FFFD for bytes that are not UTF-8; the raw bytes
    are in `*_bytes`.

    `snapshot_id` is the snapshot that holds everything the command did; None for a command in a throw-away fork.
    `timed_out`: its `timeout` ended it. An exit code of 124 alone may be the command's own.
    """

    exit_code: int
    stdout_bytes: bytes
    stderr_bytes: bytes
    snapshot_id: str | None
    timed_out: bool = False

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(ExecResult):
    """The result of an agent's run: its output, the exit code of its program (-1: not known), and its last snapshot.
    `status` is the trajectory's: finished, failed, stopped or interrupted."""

    trajectory: str
    status: str


class ExecFailed(SnapshotdError):  # noqa: N818 - like every error of ours, it is named by what happened
    """A command or run given `check=True` ended with another exit code than 0. `result` is how; its snapshot was taken
    all the same."""

    def __init__(self, message: str, result: ExecResult) -> None:
        super().__init__(message)
        self.result = result


class Command:
    """A command in the background of a sandbox: `Sandbox.exec(..., background=True)` starts one, `Sandbox.commands` and
    `Sandbox.command` find it again. `id` is its name."""

    def __init__(self, client: Snapshotd, info: CommandInfo) -> None:
        self._client = client
        self._sandbox = info.trajectory
        self.id = info.id

    @property
    def info(self) -> CommandInfo:
        """Its present state (asks the daemon): `status`, `exit_code`, `snapshot`."""
        return self._client.command(self._sandbox, self.id)

    def wait(
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
        for event in self._client.command_events(self._sandbox, self.id, timeout=timeout):
            if event["event"] == "output":
                kept.take(event["stream"], base64.b64decode(event["data_b64"]))
        info = self.info
        exit_code = -1 if info.exit_code is None else info.exit_code
        result = kept.result(exit_code, info.snapshot, timed_out=info.status == "timed-out")
        if check and result.exit_code != 0:
            raise _failed(shlex.join(info.argv), result, info.error)
        return result

    def output(self, *, follow: bool = False) -> Iterator[tuple[str, bytes]]:
        """The pieces of its output from the beginning, in order, each with its stream ("stdout" or "stderr"). With
        `follow`, until it has ended."""
        for event in self._client.command_events(self._sandbox, self.id, follow=follow):
            if event["event"] == "output":
                yield event["stream"], base64.b64decode(event["data_b64"])

    def lines(self, *, follow: bool = False, stream: Stream | None = None) -> Iterator[str]:
        """Its output from the beginning as lines of text, without their ends; of one stream, if it is named. With
        `follow`, each line as it comes, until the command has ended. Bytes that are not UTF-8 become U+FFFD."""
        lines = TextLines(stream)
        for event in self._client.command_events(self._sandbox, self.id, follow=follow):
            for line in lines.take(event):
                yield line
        for line in lines.last():
            yield line

    def write(self, data: str | bytes, *, end: bool = False) -> None:
        """Write to its standard input, and with `end` close it behind that. For a command that was started with
        `stdin=True`. As `Snapshotd.write_command`."""
        self._client.write_command(self._sandbox, self.id, bytes_of("data", data), end=end)

    def signal(self, number: int) -> None:
        """Send a signal to its process group, as a terminal does. Conflict: it has ended."""
        self._client.signal_command(self._sandbox, self.id, number)

    def kill(self) -> None:
        """End it at once, with all that it started. Not an error when it has ended."""
        with contextlib.suppress(Conflict, NotFound):  # an ended one is no longer listed for ever
            self._client.signal_command(self._sandbox, self.id, signal.SIGKILL)

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Kill it."""
        self.kill()

    def __repr__(self) -> str:
        return f"<Command {self.id[:12]}>"


class Snapshot:
    """One immutable snapshot. `info` is its record, `files` reads its files."""

    def __init__(self, client: Snapshotd, info: SnapshotInfo) -> None:
        self._client = client
        self.info = info
        self.files = SnapshotFiles(client, info.id)

    @classmethod
    def get(cls, ref: str, *, client: Snapshotd | None = None) -> Snapshot:
        """By tag, unique prefix of an id, or a trajectory's name or id (its head)."""
        client = Snapshotd() if client is None else instance_of("client", client, Snapshotd)
        return cls(client, client.snapshot(ref))

    @property
    def id(self) -> str:
        return self.info.id

    def diff(self, other: Snapshot | str | None = None) -> list[ChangeInfo]:
        """The changes from this snapshot to `other`; without it, from the parent to this one."""
        return list(self._client.diff(self.id, None if other is None else _id(other)))

    def patch(self, other: Snapshot | str | None = None) -> bytes:
        """The same as a patch of /workspace, held in memory."""
        parts: list[bytes] = []
        self._client.patch(self.id, None if other is None else _id(other), write=parts.append)
        return b"".join(parts)

    def cat(self, path: str | bytes) -> bytes:
        """A regular file's content, held in memory. NotFound; UsageError for anything but a regular file."""
        return b"".join(self._client.cat(self.id, path))

    def restore(self, to: str | Path, *, path: str = "") -> RestoreInfo:
        """Write the tree, or the part below `path`, into a folder that does not exist or is empty."""
        return self._client.restore(self.id, to, path=path)

    def apply(
        self, to: str | Path, base: Snapshot | str | None = None, path: str | bytes | None = None, dry_run: bool = False
    ) -> ApplyInfo:
        """Bring what changed up to here to a local folder, as `Snapshotd.apply`, which can make a commit of it, too."""
        return self._client.apply(self.id, to, None if base is None else _id(base), path, dry_run)

    def fork(
        self,
        n: int = 1,
        *,
        args: Sequence[str] | None = None,
        name: str | None = None,
        resume: bool = False,
        variants: Mapping[str, Mapping[str, Any]] | None = None,
        wait: Wait = "captured",
        idle_timeout: float | None = None,
    ) -> list[Sandbox]:
        """`n` running sandboxes that start from here, or one for each of `variants`; with `resume` the agent's program
        goes on in each. Each ends after `idle_timeout` seconds without a command (None: half an hour, 0: never); `exec`
        starts it again. As `Snapshotd.fork`."""
        forked = self._client.fork(
            self.id, n, args=args, name=name, resume=resume, variants=variants, wait=wait, idle_timeout=idle_timeout
        )
        return [Sandbox(self._client, item) for item in forked.trajectories]

    def edit(self, **changes: Any) -> Sandbox:
        """A new trajectory that begins here with something changed; takes the keywords of `Snapshotd.edit`."""
        return Sandbox(self._client, self._client.edit(self.id, **changes))

    def conversation(self) -> list[MessageInfo]:
        """The conversation up to here."""
        return self._client.conversation(self.id)

    def journal(self) -> list[JournalInfo]:
        """The journal up to here, from the program's beginning."""
        return list(self._client.journal(self.id))

    def state(self) -> dict[str, Any]:
        """The agent's own state as it was saved here."""
        return self._client.state(self.id)

    def tasks(self) -> list[TaskInfo]:
        """The subtasks as they were here."""
        return self._client.tasks(self.id)

    def export(
        self, to: str | Path, *, form: Form = "bundle", whole: bool = False, since: Snapshot | str | None = None
    ) -> ExportInfo:
        """Write it (with `whole`: its trajectory up to it) as one file: a `bundle` for `Snapshotd.import_bundle`, an
        `oci` image for `docker load`, or a plain `tar`. The file is there whole or not at all."""
        return self._client.export_file(
            self.id, to, form=form, whole=whole, since=None if since is None else _id(since)
        )

    def exec(
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
        """Run a command in a throw-away fork; nothing of it is kept. Otherwise as `Sandbox.exec`."""
        output = _Kept(on_stdout, on_stderr)
        done = self._client.exec_snapshot(
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

    def tag(self, name: str, *, move: bool = False) -> None:
        self._client.tag(self.id, name, move=move)

    def __repr__(self) -> str:
        return f"<Snapshot {self.id[:12]} seq={self.info.seq} tool={self.info.tool.name!r}>"


class Sandbox:
    """A trajectory and its running sandbox. Leaving a `with` block stops it, with a last snapshot; nothing is
    removed. `files` reads and writes its files."""

    def __init__(self, client: Snapshotd, info: TrajectoryInfo) -> None:
        self._client = client
        self.id = info.id
        self.name = info.name
        self.files = SandboxFiles(client, info.id)

    @classmethod
    def create(
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
        client: Snapshotd | None = None,
    ) -> Sandbox:
        """Start a sandbox. `workspace` is copied to /workspace, `memory` and `disk` are in bytes, or text such as
        "512m", `network` is none (the default) or bridge, `runtime="none"` means a plain folder without isolation,
        `secrets` are environment that is recorded nowhere in plain, `providers`
        are for the recording gateway, which with `capture_tokens` asks for token ids and log probabilities, `tenant` is
        the tenant of the store that its agents read and write, and after `idle_timeout` seconds without a command it is
        stopped (0: never). With `wait="stored"`, here and in the methods that make a snapshot, they return when it
        survives power loss."""
        client = Snapshotd() if client is None else instance_of("client", client, Snapshotd)
        info, _ = client.create(
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
    def run(
        cls,
        agent: str | Path | None = None,
        *,
        args: Sequence[str] = (),
        command: Sequence[str] = (),
        detach: Literal[False] = False,
        check: bool = False,
        on_stdout: Callable[[bytes], object] | None = None,
        on_stderr: Callable[[bytes], object] | None = None,
        client: Snapshotd | None = None,
        **options: Any,
    ) -> RunResult: ...

    @overload
    @classmethod
    def run(
        cls,
        agent: str | Path | None = None,
        *,
        detach: Literal[True],
        args: Sequence[str] = (),
        command: Sequence[str] = (),
        client: Snapshotd | None = None,
        **options: Any,
    ) -> Sandbox: ...

    @classmethod
    def run(
        cls,
        agent: str | Path | None = None,
        *,
        args: Sequence[str] = (),
        command: Sequence[str] = (),
        detach: bool = False,
        check: bool = False,
        on_stdout: Callable[[bytes], object] | None = None,
        on_stderr: Callable[[bytes], object] | None = None,
        client: Snapshotd | None = None,
        **options: Any,
    ) -> RunResult | Sandbox:
        """Run an agent file with `args`, or a `command`, to its end, as `wait`. With `detach` the answer is its sandbox
        at once. A run that is no longer waited for (an interrupt, an error in `on_stdout`) goes on. Further keywords are
        those of `Snapshotd.run`. UsageError for what only a run that is waited for has."""
        check_flag("detach", detach)
        if detach and (check or on_stdout or on_stderr):
            raise UsageError("a detached run has no check, on_stdout or on_stderr; `Sandbox.wait` takes them")
        client = Snapshotd() if client is None else instance_of("client", client, Snapshotd)
        started = cls(client, client.run(agent=agent, args=args, command=command, detach=detach, **options))
        return started if detach else started.wait(on_stdout=on_stdout, on_stderr=on_stderr, check=check)

    @classmethod
    def connect(cls, ref: str, *, client: Snapshotd | None = None) -> Sandbox:
        """An existing trajectory, by name or unique prefix of its id; running or not."""
        client = Snapshotd() if client is None else instance_of("client", client, Snapshotd)
        return cls(client, client.trajectory(ref))

    @property
    def info(self) -> TrajectoryInfo:
        """Its present state (asks the daemon)."""
        return self._client.trajectory(self.id)

    @overload
    def exec(
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
        if_head: Snapshot | str | None = None,
        timeout: float | None = None,
        idle_timeout: float | None = None,
        background: Literal[False] = False,
    ) -> ExecResult: ...

    @overload
    def exec(
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
    ) -> Command: ...

    def exec(
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
        if_head: Snapshot | str | None = None,
        timeout: float | None = None,
        idle_timeout: float | None = None,
        background: bool = False,
        stdin: bool = False,
    ) -> ExecResult | Command:
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
        """
        check_flag("background", background)
        if background:
            if check or on_stdout or on_stderr or input is not None or if_head is not None or wait != "captured":
                raise UsageError(
                    "a command in the background has no check, on_stdout, on_stderr, input, if_head or wait: `Command.wait` and "
                    "`Command.write` are for them"
                )
            info = self._client.exec_in_background(
                self.id,
                _argv(command),
                cwd=cwd,
                env=env,
                user=user,
                stdin=stdin,
                timeout=timeout,
                idle_timeout=idle_timeout,
            )
            return Command(self._client, info)
        if stdin:
            raise UsageError("`stdin` is for a command in the background; give this one its `input`")
        output = _Kept(on_stdout, on_stderr)
        done = self._client.exec(
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

    def commands(self) -> list[Command]:
        """Its commands that run, also those in the foreground whose client has gone away, and the newest background
        commands that have ended, oldest first. `Command.signal` and `kill` are for all."""
        return [Command(self._client, info) for info in self._client.commands(self.id)]

    def command(self, prefix: str) -> Command:
        """One of them, by a unique prefix of its id. NotFound, Ambiguous."""
        return Command(self._client, self._client.command(self.id, prefix))

    def port(
        self,
        number: int,
        local: int | None = None,
        *,
        unix: str | Path | None = None,
        on_failure: OnFailure = lambda _: None,
    ) -> Port:
        """A local address that reaches the server on a port inside, whatever the network: `with sandbox.port(8000) as
        port: urlopen(f"http://{port.address}/")`. As `Snapshotd.port`."""
        return self._client.port(self.id, number, local, unix=unix, on_failure=on_failure)

    def snapshot(self, name: str | None = None, *, wait: Wait = "captured") -> Snapshot:
        """Take a snapshot as it is now, with `name` as its tag. Processes in it run on. Conflict: it does not run, its
        program is being replayed, or the name is taken."""
        return Snapshot(self._client, self._client.take_snapshot(self.id, name, wait=wait))

    def snapshots(self, last: int | None = None) -> list[Snapshot]:
        """Oldest first; with `last`, only this number of the newest."""
        return [Snapshot(self._client, info) for info in self._client.log(self.id, last)]

    def head(self) -> Snapshot:
        """The newest snapshot."""
        return Snapshot(self._client, self._client.snapshot(self.id))

    def fork(
        self,
        n: int = 1,
        *,
        args: Sequence[str] | None = None,
        name: str | None = None,
        resume: bool = False,
        variants: Mapping[str, Mapping[str, Any]] | None = None,
        wait: Wait = "captured",
        idle_timeout: float | None = None,
    ) -> list[Sandbox]:
        """`n` running sandboxes that start from the newest snapshot; this one runs on."""
        return self.head().fork(
            n, args=args, name=name, resume=resume, variants=variants, wait=wait, idle_timeout=idle_timeout
        )

    def rewind(
        self, to: Snapshot | str, *, mode: Mode = "both", compensate: bool = False, wait: Wait = "captured"
    ) -> Snapshot:
        """Go back to a snapshot, in the running sandbox: files, the agent's mind, or both. Recorded as a new snapshot;
        nothing is lost, and `undo` takes it back."""
        return Snapshot(
            self._client, self._client.rewind(self.id, _id(to), mode=mode, compensate=compensate, wait=wait)
        )

    def preview_rewind(self, to: Snapshot | str, *, mode: Mode = "both") -> RewindPreview:
        """The effect that `rewind` would have. Changes nothing."""
        return self._client.preview_rewind(self.id, _id(to), mode=mode)

    def undo(self, *, wait: Wait = "captured") -> Snapshot:
        """Take the last rewind (or undo) back."""
        return Snapshot(self._client, self._client.undo(self.id, wait=wait))

    def promote(
        self, *, into: str | None = None, leave_behind: bool = False, compensate: bool = False, wait: Wait = "captured"
    ) -> Snapshot:
        """Make the newest snapshot the head of the trajectory that this one was forked from. As `Snapshotd.promote`."""
        return Snapshot(
            self._client,
            self._client.promote(self.id, into=into, leave_behind=leave_behind, compensate=compensate, wait=wait),
        )

    def resume(
        self, *, retry: Sequence[str] = (), skip: Sequence[str] = (), results: Mapping[str, Any] | None = None
    ) -> None:
        """Let the agent's program go on from the newest snapshot; `events` follows it. As `Snapshotd.resume`."""
        self._client.resume(self.id, retry=retry, skip=skip, results=results)

    def events(self, *, follow: bool = True) -> Iterator[dict[str, Any]]:
        """The events of the agent's run from its beginning; with `follow`, until `finished`, beyond the end of the
        daemon. As `Snapshotd.events`."""
        return self._client.events(self.id, follow=follow)

    def lines(self, *, follow: bool = True, stream: Stream | None = None) -> Iterator[str]:
        """The output of the agent's run, as `Command.lines`."""
        lines = TextLines(stream)
        for event in self._client.events(self.id, follow=follow):
            for line in lines.take(event):
                yield line
        for line in lines.last():
            yield line

    def wait(
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
        ended = self._client.wait(self.id, on_output=kept.take, timeout=timeout)
        code = -1 if ended.exit_code is None else ended.exit_code
        result = RunResult(code, *kept.output(), ended.head, trajectory=ended.id, status=ended.status)
        if check and code != 0:
            raise _failed(shlex.join(ended.agent.argv if ended.agent else ()), result, None)
        return result

    def retry(self, task: str, *, compensate: bool = True, resume: bool = True, wait: Wait = "captured") -> Snapshot:
        """Go back to before a task began and do it again. As `Snapshotd.retry`."""
        return Snapshot(
            self._client, self._client.retry(self.id, task, compensate=compensate, resume=resume, wait=wait)
        )

    def effects(self) -> list[EffectInfo]:
        """The irreversible calls that rewinds left behind, newest first."""
        return self._client.effects(self.id)

    def compensate(self, *calls: str) -> list[EffectInfo]:
        """Run the compensations of those calls (all, if none is named), each at most once."""
        return self._client.compensate(self.id, calls)

    def stop(self, *, discard: bool = False, wait: Wait = "captured") -> None:
        """Take a last snapshot if anything changed (with `discard`: none) and end the container. `exec` starts it
        again."""
        self._client.stop(self.id, discard=discard, wait=wait)

    def remove(self, *, force: bool = False) -> None:
        """Forget the trajectory with all its snapshots."""
        self._client.remove(self.id, force=force)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Sandbox {self.name or self.id[:12]}>"


class _Kept:
    """The output of a command as it comes."""

    def __init__(
        self, on_stdout: Callable[[bytes], object] | None, on_stderr: Callable[[bytes], object] | None
    ) -> None:
        check_function("on_stdout", on_stdout)
        check_function("on_stderr", on_stderr)
        self._told = {"stdout": on_stdout, "stderr": on_stderr}
        self._pieces: dict[str, list[bytes]] = {"stdout": [], "stderr": []}

    def take(self, stream: str, data: bytes) -> None:
        self._pieces[stream].append(data)
        listener = self._told[stream]
        if listener is not None:
            listener(data)

    def output(self) -> tuple[bytes, bytes]:
        """All of both streams so far."""
        stdout, stderr = (b"".join(self._pieces[name]) for name in ("stdout", "stderr"))
        return stdout, stderr

    def result(self, exit_code: int, snapshot_id: str | None, *, timed_out: bool) -> ExecResult:
        return ExecResult(exit_code, *self.output(), snapshot_id, timed_out)

    def checked(self, done: ExecInfo, command: str | Sequence[str], check: bool) -> ExecResult:
        """The result of the command that ended so. ExecFailed, with `check`."""
        snapshot = None if done.snapshot is None else done.snapshot.id
        result = self.result(done.exit_code, snapshot, timed_out=done.timed_out)
        if check and result.exit_code != 0:
            raise _failed(command if isinstance(command, str) else shlex.join(command), result, done.call.error)
        return result


def _failed(command: str, result: ExecResult, error: str | None) -> ExecFailed:
    said = error or result.stderr[-500:].strip()
    return ExecFailed(f"the command `{command}` ended with exit code {result.exit_code}: {said}", result)


def _argv(command: str | Sequence[str]) -> list[str]:
    return ["/bin/sh", "-c", command] if isinstance(command, str) else argv_of(command)


def _stdin(data: str | bytes | None) -> io.BytesIO | None:
    return None if data is None else io.BytesIO(bytes_of("input", data))


def _id(snapshot: Snapshot | str) -> str:
    return snapshot.id if isinstance(snapshot, Snapshot) else snapshot
