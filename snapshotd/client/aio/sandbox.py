"""The objects of sandbox.py, for asyncio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from snapshotd.api.commands import ExecOptions, ServiceOptions
from snapshotd.client.aio.client import AsyncSnapshotd
from snapshotd.client.objects import AnyCommand, AnySnapshot, ClientForm
from snapshotd.client.outcomes import ExecResult, RunResult
from snapshotd.client.sandbox import AnySandbox, SandboxRunOptions
from snapshotd.client.verbs.base import Wait
from snapshotd.client.verbs.files import AsyncSandboxFiles, AsyncSnapshotFiles
from snapshotd.client.verbs.ports import AsyncPort


class AsyncCommand(AnyCommand[AsyncSnapshotd, "AsyncSandbox", "AsyncSnapshot", "AsyncCommand"]):
    __doc__ = AnyCommand.__doc__


class AsyncSnapshot(AnySnapshot[AsyncSnapshotd, "AsyncSandbox", "AsyncSnapshot", "AsyncCommand"]):
    __doc__ = AnySnapshot.__doc__

    files: AsyncSnapshotFiles


class AsyncSandbox(AnySandbox[AsyncSnapshotd, "AsyncSandbox", "AsyncSnapshot", "AsyncCommand", AsyncPort]):
    __doc__ = AnySandbox.__doc__

    files: AsyncSandboxFiles

    if TYPE_CHECKING:  # a descriptor cannot tell these apart

        @overload  # type: ignore[override]
        @classmethod
        async def run(
            cls,
            agent: str | Path | None = None,
            *,
            detach: Literal[False] = False,
            check: bool = False,
            on_stdout: Callable[[bytes], object] | None = None,
            on_stderr: Callable[[bytes], object] | None = None,
            client: AsyncSnapshotd | None = None,
            **options: Unpack[SandboxRunOptions],
        ) -> RunResult: ...
        @overload
        @classmethod
        async def run(
            cls,
            agent: str | Path | None = None,
            *,
            detach: Literal[True],
            client: AsyncSnapshotd | None = None,
            **options: Unpack[SandboxRunOptions],
        ) -> AsyncSandbox: ...
        @classmethod
        async def run(cls, *args: Any, **kwargs: Any) -> Any:
            """Run an agent file, or a `command`, to its end; with `detach` the answer is its sandbox at once."""

        @overload  # type: ignore[override]
        async def exec(
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
        async def exec(
            self,
            command: str | Sequence[str],
            *,
            background: Literal[True],
            stdin: bool = False,
            **options: Unpack[ExecOptions],
        ) -> AsyncCommand: ...
        @overload
        async def exec(
            self, command: str | Sequence[str], *, service: ServiceOptions | str, **options: Unpack[ExecOptions]
        ) -> AsyncCommand: ...
        async def exec(self, *args: Any, **kwargs: Any) -> Any:
            """Run a command as a tool call and take the snapshot. A string goes through `/bin/sh -c`. With `background` the
            answer is a `Command` at once, with `service` once it is ready."""


AsyncCommand._form = AsyncSnapshot._form = AsyncSandbox._form = ClientForm(
    AsyncSnapshotd, AsyncSandbox, AsyncSnapshot, AsyncCommand, AsyncSandboxFiles, AsyncSnapshotFiles
)
