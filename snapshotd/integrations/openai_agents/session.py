"""`SnapshotdSandboxSession`: one sandbox of ours as the SDK's session. Every command and every change of a file is one
snapshot, and `state.snapshot` names the newest."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agents.sandbox.errors import (
    ExecNonZeroError,
    ExecTimeoutError,
    ExecTransportError,
    ExposedPortUnavailableError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
    WorkspaceStartError,
    WorkspaceWriteTypeError,
)
from agents.sandbox.files import EntryKind, FileEntry
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.sandbox.types import ExecResult, ExposedPortEndpoint, Permissions, User
from agents.sandbox.util.tar_utils import UnsafeTarMemberError, validate_tar_bytes
from agents.sandbox.workspace_paths import sandbox_path_str

from snapshotd.client import AsyncPort, AsyncSandbox, AsyncSnapshotd, FileInfo
from snapshotd.errors import CommandNotFound, CommandNotRunnable, NotFound, SnapshotdError
from snapshotd.integrations.openai_agents.state import (
    SnapshotdSessionState,
    SnapshotdSnapshot,
    gone,
    reference_to,
    snapshot_in,
)

IDLE_S = 1800.0
"""A sandbox whose program has gone away ends, with a last snapshot, after so many seconds without a command."""
_KINDS = {"file": EntryKind.FILE, "directory": EntryKind.DIRECTORY, "symlink": EntryKind.SYMLINK}


class SnapshotdSandboxSession(BaseSandboxSession):
    """Made by `SnapshotdSandboxClient`. Errors are the SDK's own, with ours as their cause."""

    state: SnapshotdSessionState

    def __init__(self, state: SnapshotdSessionState, box: AsyncSandbox, client: AsyncSnapshotd) -> None:
        self.state, self.box, self._client = state, box, client
        self._ports: dict[int, AsyncPort] = {}
        has_files = isinstance(state.snapshot, SnapshotdSnapshot)
        self._set_start_state_preserved(has_files, system=has_files)

    # -- its life ------------------------------------------------------------------------------------------------------

    async def _start_workspace(self) -> None:
        """The sandbox of a snapshot has its files already. Else those of the manifest are made, or unpacked from the
        archive of another kind of sandbox."""
        if isinstance(self.state.snapshot, SnapshotdSnapshot):
            await self._reapply_ephemeral_manifest_on_resume()
        else:
            await super()._start_workspace()

    async def _after_start(self) -> None:
        await self._find_head()

    def _wrap_start_error(self, error: Exception) -> Exception:
        if isinstance(error, SnapshotdError):
            return WorkspaceStartError(path=self._workspace_root_path(), cause=error)
        return error

    async def _persist_snapshot(self) -> None:
        """Nothing: the newest snapshot is there, and `state` names it."""

    async def _shutdown_backend(self) -> None:
        for port in self._ports.values():
            await port.close()
        self._ports.clear()
        with self._failing_write(self._workspace_root_path()):
            await self.box.stop()
            await self._find_head()

    async def running(self) -> bool:
        try:
            return (await self.box.info).status == "running"
        except SnapshotdError:
            return False

    async def persist_workspace(self) -> io.IOBase:
        """A reference to a new snapshot: no tar is made, nor moved."""
        with self._failing_read(self._workspace_root_path()):
            self._note((await self.box.snapshot()).id)
        return reference_to(self.state.snapshot.id)

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        """Take the files of a reference, or of a tar that another kind of sandbox has made."""
        content, root = data.read(), self._workspace_root_path()
        snapshot = snapshot_in(content)
        if snapshot is not None:
            await self._go_to(snapshot)
            return
        try:
            validate_tar_bytes(content, allow_external_symlink_targets=False)
        except UnsafeTarMemberError as exc:
            raise WorkspaceArchiveWriteError(path=root, context={"member": exc.member}, cause=exc) from exc
        with self._failing_write(root):
            done = await self._client.write_archive(self.box.id, sandbox_path_str(root), io.BytesIO(content))
        self._note(done.snapshot.id)

    async def _go_to(self, snapshot: str) -> None:
        """Go on in a fork of a snapshot: another user of the present sandbox keeps its files."""
        if snapshot == self.state.snapshot.id:
            return
        try:
            forked = await self._client.fork(snapshot, idle_timeout=IDLE_S)
            await self.box.stop()
        except SnapshotdError as exc:
            raise gone(snapshot, exc) from exc
        self.box = AsyncSandbox(self._client, forked.trajectories[0])
        self.state.trajectory = self.box.id
        self._note(snapshot)

    # -- commands ------------------------------------------------------------------------------------------------------

    async def exec(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
    ) -> ExecResult:
        """Run a command; the daemon changes to the user, so the image needs no sudo."""
        words = self._prepare_exec_command(*command, shell=shell, user=None)
        return await self._run(words, timeout, user.name if isinstance(user, User) else user)

    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> ExecResult:
        return await self._run([str(word) for word in command], timeout, None)

    async def _run(self, words: list[str], timeout: float | None, user: str | None) -> ExecResult:
        env = await self.state.manifest.environment.resolve()
        cwd = self.state.manifest.root if self.state.workspace_root_ready else None
        try:
            done = await self.box.exec(words, cwd=cwd, env=env, user=user, timeout=timeout)
        except (CommandNotFound, CommandNotRunnable) as exc:
            code = 127 if isinstance(exc, CommandNotFound) else 126
            return ExecResult(stdout=b"", stderr=f"{exc.message}\n".encode(), exit_code=code)
        except SnapshotdError as exc:
            raise ExecTransportError(command=words, cause=exc, message=exc.message) from exc
        self._note(done.snapshot_id)
        if done.timed_out:
            raise ExecTimeoutError(command=words, timeout_s=timeout)
        return ExecResult(stdout=done.stdout_bytes, stderr=done.stderr_bytes, exit_code=done.exit_code)

    async def _resolve_exposed_port(self, port: int) -> ExposedPortEndpoint:
        try:
            opened = self._ports.get(port) or await self.box.port(port)
        except SnapshotdError as exc:
            raise ExposedPortUnavailableError(
                port=port, exposed_ports=self.state.exposed_ports, reason="backend_unavailable", cause=exc
            ) from exc
        self._ports[port] = opened
        assert opened.number is not None
        return ExposedPortEndpoint(host="127.0.0.1", port=opened.number)

    # -- files, by the daemon: nothing of the image is needed ----------------------------------------------------------

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        if user is not None:
            await self._check_read_with_exec(path, user=user)
        with self._failing_read(path):
            return io.BytesIO(await self.box.files.read(self._text(path)))

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        if user is not None:
            await self._check_write_with_exec(path, user=user)
        content = data.read()
        if isinstance(content, str):
            content = content.encode()
        if not isinstance(content, bytes | bytearray):
            raise WorkspaceWriteTypeError(path=path, actual_type=type(content).__name__)
        name = user.name if isinstance(user, User) else user
        with self._failing_write(path):
            done = await self.box.files.write(self._text(path, for_write=True), bytes(content), user=name)
        self._note(done.snapshot.id)

    async def ls(self, path: Path | str, *, user: str | User | None = None) -> list[FileEntry]:
        if user is not None:
            return await super().ls(path, user=user)
        text = self._text(path)
        with self._failing_command("ls", text):
            found = await self.box.files.list(text)
        return [_entry(text, info) for info in found]

    async def mkdir(self, path: Path | str, *, parents: bool = False, user: str | User | None = None) -> None:
        if user is not None or not parents:
            await super().mkdir(path, parents=parents, user=user)
            return
        text = self._text(path, for_write=True)
        with self._failing_command("mkdir", text):
            try:
                if (await self.box.files.stat(text)).kind == "directory":
                    return  # no call, and no snapshot
            except NotFound:
                pass
            self._note((await self.box.files.make_dir(text)).id)

    async def rm(self, path: Path | str, *, recursive: bool = False, user: str | User | None = None) -> None:
        if user is not None or not recursive:
            await super().rm(path, recursive=recursive, user=user)
            return
        text = self._text(path, for_write=True)
        with self._failing_command("rm", text):
            try:
                self._note((await self.box.files.remove(text)).id)
            except NotFound:
                pass  # as `rm -rf`

    # -- inside --------------------------------------------------------------------------------------------------------

    def _text(self, path: Path | str, *, for_write: bool = False) -> str:
        return sandbox_path_str(self.normalize_path(path, for_write=for_write))

    def _note(self, snapshot: str | None) -> None:
        if snapshot is not None:
            self.state.snapshot = SnapshotdSnapshot(id=snapshot)

    async def _find_head(self) -> None:
        self._note((await self.box.head()).id)

    @contextmanager
    def _failing_read(self, path: Path) -> Iterator[None]:
        try:
            yield
        except NotFound as exc:
            raise WorkspaceReadNotFoundError(path=path, cause=exc) from exc
        except SnapshotdError as exc:
            raise WorkspaceArchiveReadError(path=path, cause=exc) from exc

    @contextmanager
    def _failing_write(self, path: Path) -> Iterator[None]:
        try:
            yield
        except SnapshotdError as exc:
            raise WorkspaceArchiveWriteError(path=path, cause=exc, message=exc.message) from exc

    @contextmanager
    def _failing_command(self, *words: str) -> Iterator[None]:
        """Turn an error inside the block into that of a failed command, as the SDK's own sessions run one here."""
        try:
            yield
        except SnapshotdError as exc:
            said = ExecResult(stdout=b"", stderr=f"{exc.message}\n".encode(), exit_code=1)
            raise ExecNonZeroError(said, command=words, cause=exc) from exc


def _entry(folder: str, info: FileInfo) -> FileEntry:
    return FileEntry(
        path=f"{folder.rstrip('/')}/{info.name}",
        permissions=Permissions.from_mode(int(info.mode, 8)).model_copy(update={"directory": info.kind == "directory"}),
        owner=str(info.uid),
        group=str(info.gid),
        size=info.size,
        kind=_KINDS.get(info.kind, EntryKind.OTHER),
    )
