"""`sandbox="snapshotd"`: a sandbox for each sample, and in the sample's log the snapshot of every call."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, overload

from inspect_ai.log import transcript
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from inspect_ai.util._sandbox.environment import SandboxUnavailableError
from pydantic import BaseModel, Field

from snapshotd.client import AsyncSandbox, AsyncSnapshotd
from snapshotd.errors import CommandNotFound, CommandNotRunnable, NotFound, SnapshotdError, UsageError

PREFIX = "inspect-"
_WORKSPACE = "/workspace"
_READABLE, _WRITABLE = 0o444, 0o222


class SnapshotdConfig(BaseModel, frozen=True):
    """How a sample's sandbox is made; the words of `Sandbox.create`. `user`: runs the commands that name none; else root.
    `snapshot`: it is a fork of that one, and `image` is not used."""

    image: str = "default"
    runtime: Literal["auto", "runc", "docker", "none"] = "auto"
    network: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    user: str | None = None
    snapshot: str | None = None

    def __hash__(self) -> int:  # Inspect keeps configurations in a dictionary
        return hash(self.model_dump_json())


@sandboxenv(name="snapshotd")
class SnapshotdEnvironment(SandboxEnvironment):
    """One sandbox. A sample's sandbox is stopped at its end and keeps its snapshots; `inspect sandbox cleanup snapshotd`
    removes those of all samples."""

    def __init__(self, box: AsyncSandbox, config: SnapshotdConfig) -> None:
        super().__init__()
        self.box, self._config = box, config

    # -- its life ------------------------------------------------------------------------------------------------------

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        chosen = (
            config if isinstance(config, SnapshotdConfig) else SnapshotdConfig(**({"image": config} if config else {}))
        )
        name = f"{PREFIX}{re.sub(r'[^A-Za-z0-9_.-]+', '-', task_name)[:40]}-{uuid.uuid4().hex[:12]}"
        client = AsyncSnapshotd()
        try:
            if chosen.snapshot is not None:
                forked = await client.fork(chosen.snapshot, name=name, idle_timeout=0)
                box = AsyncSandbox(client, forked.trajectories[0])
            else:
                more: dict[str, Any] = {} if chosen.network is None else {"network": chosen.network}
                box = await AsyncSandbox.create(
                    client=client, name=name, image=chosen.image, runtime=chosen.runtime, env=chosen.env, **more
                )
        except SnapshotdError as exc:
            raise SandboxUnavailableError(exc.message) from exc
        made = cls(box, chosen)
        made._tell("start", (await box.head()).id)
        return {"default": made}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            with suppress(NotFound):  # it was removed meanwhile
                await environment.as_type(cls).box.stop()

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:  # noqa: A002 - Inspect's name
        """Remove the sandboxes of samples, or the one of this id or name, with their snapshots."""
        client = AsyncSnapshotd()
        for one in await client.trajectories():
            if (one.name or "").startswith(PREFIX) and id in (None, one.id, one.name):
                await client.remove(one.id, force=True)

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return SnapshotdConfig(**config)

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        as_user = [] if user is None else ["--user", user]
        return SandboxConnection(type="snapshotd", command=" ".join(["snapshotd", "shell", *as_user, self.box.id]))

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,  # noqa: A002 - Inspect's name
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command. One that takes too long is ended with all that it started, and not tried again."""
        place = cwd if cwd is None or cwd.startswith("/") else f"{_WORKSPACE}/{cwd}"
        name = user or self._config.user
        try:
            done = await self.box.exec(cmd, input=input, cwd=place, env=env, user=name, timeout=timeout)
        except CommandNotFound as exc:
            return ExecResult(False, 127, "", f"{exc.message}\n")
        except CommandNotRunnable as exc:
            raise PermissionError(exc.message) from exc
        except UsageError as exc:
            if user is not None and "user" in exc.message:
                raise SandboxUserUnsupportedError(exc.message) from exc
            raise
        except SnapshotdError as exc:
            raise SandboxUnavailableError(exc.message) from exc
        self._tell("exec", done.snapshot_id)
        if done.timed_out:
            raise TimeoutError(f"the command took longer than {timeout} s")
        most = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        if max(len(done.stdout_bytes), len(done.stderr_bytes)) > most:
            said = done.stdout_bytes[:most].decode(errors="replace")
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, said)
        return ExecResult(done.exit_code == 0, done.exit_code, done.stdout, done.stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file, whole or not at all. PermissionError, too, for one that its mode lets nobody write."""
        with _failing(file):
            try:
                info = await self.box.files.stat(file)
            except NotFound:
                pass
            else:
                _check(file, info.kind, info.mode, _WRITABLE)
            try:
                done = await self.box.files.write(file, contents, user=self._config.user)
            except NotFound as exc:  # the directories are made, so it is the sandbox that is gone
                raise SandboxUnavailableError(f"{file}: {exc.message}") from exc
        self._tell("write_file", done.snapshot.id)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...
    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...
    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Read a file. PermissionError, too, for one that its mode lets nobody read."""
        with _failing(file):
            info = await self.box.files.stat(file)
            _check(file, info.kind, info.mode, _READABLE)
            if info.size > SandboxEnvironmentLimits.MAX_READ_FILE_SIZE:
                raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
            content = await self.box.files.read(file)
        return content.decode() if text else content

    def _tell(self, call: str, snapshot: str | None) -> None:
        """Note in the sample's log which snapshot holds what a call did."""
        transcript().info({"call": call, "trajectory": self.box.id, "snapshot": snapshot}, source="snapshotd")


def _check(file: str, kind: str, mode: str, wanted: int) -> None:
    if kind == "directory":
        raise IsADirectoryError(f"{file} is a directory")
    if not int(mode, 8) & wanted:
        raise PermissionError(f"the mode of {file} lets nobody do that")


@contextmanager
def _failing(file: str) -> Iterator[None]:
    try:
        yield
    except NotFound as exc:
        raise FileNotFoundError(f"{file}: {exc.message}") from exc
    except UsageError as exc:
        raise (IsADirectoryError if "directory" in exc.message else PermissionError)(f"{file}: {exc.message}") from exc
    except SnapshotdError as exc:
        raise SandboxUnavailableError(f"{file}: {exc.message}") from exc
