"""The tools that make sandboxes, and that work in them."""

from __future__ import annotations

import asyncio
import base64
import binascii
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import anyio
from mcp.server.mcpserver import Context
from pydantic import Field

from snapshotd.api import operations
from snapshotd.client.outcomes import argv_or_shell
from snapshotd.client.twofold import closing
from snapshotd.errors import SnapshotdError, UsageError
from snapshotd.integrations.mcp import answers
from snapshotd.integrations.mcp.tools import (
    IDLE_S,
    TIMEOUT_S,
    Command,
    Cwd,
    Items,
    KeptOutputs,
    Most,
    Offset,
    Path,
    Ref,
    Timeout,
    ToolSet,
    Trajectory,
    answer_of,
    report_progress,
    tool,
    trajectory_of,
)

_ENDING_S = 20.0
"""Seconds to wait for the end of a command whose call was cancelled."""


class HandTools(ToolSet):
    @tool(operations.TRAJECTORIES, "List sandboxes")
    async def list_(self, most: Items = answers.ITEMS) -> answers.TrajectoriesAnswer:
        """List trajectories (sandboxes, each with its history), newest first. Take an id or a name from here."""
        found = await self._reach.trajectories()
        return answers.TrajectoriesAnswer(
            trajectories=[trajectory_of(info) for info in found[:most]], more=max(0, len(found) - most)
        )

    @tool(operations.CREATE, "Create a sandbox")
    async def create(
        self,
        ctx: Context,
        name: Annotated[str | None, Field(description="A name to use in place of the id.")] = None,
        image: Annotated[str, Field(description="default, minimal, or a name such as debian:12.")] = "default",
    ) -> answers.TrajectoryAnswer:
        """Create an empty sandbox; commands run in its /workspace. It sleeps after half an hour without a command, and wakes
        with the next. Then use `exec`, `write_file`, and `rewind` when something went wrong."""
        made, _ = await self._client.create(**await self._options(ctx, name, image), idle_timeout=IDLE_S)
        return trajectory_of(made)

    @tool(operations.RUN_AGENT, "Run a program in a new sandbox", outside=True)
    async def run(
        self,
        ctx: Context,
        command: Command,
        name: Annotated[str | None, Field(description="A name for the new sandbox.")] = None,
        image: Annotated[str, Field(description="default, minimal, or a name such as debian:12.")] = "default",
        max_bytes: Most = answers.TEXT_BYTES,
    ) -> answers.RunAnswer:
        """Start a program, such as an agent, as the own program of a new sandbox, and wait for its end. Each of its tool
        calls is one snapshot: look at them with `log`. For single commands use `create` and `exec`."""
        options = await self._options(ctx, name, image)
        with anyio.CancelScope(shield=True):
            started = await self._client.run(command=argv_or_shell(command), detach=True, **options)
        kept = KeptOutputs(max_bytes)
        async with report_progress(ctx) as say, self._end_on_cancel(lambda: self._client.stop(started.id)):
            say(f"the program runs in {started.name or started.id[:12]}")
            info = await self._client.wait(started.id, on_output=kept.taker(say))
        return answers.RunAnswer(
            trajectory=info.id,
            status=info.status,
            exit_code=info.exit_code,
            error=None,
            snapshot=info.head,
            **kept.texts(),
        )

    @tool(operations.STOP, "Stop a sandbox", subject="trajectory", idempotent=True)
    async def stop(self, trajectory: Trajectory) -> answers.TrajectoryAnswer:
        """Take a last snapshot and end a sandbox's processes. Its history stays, and the next `exec` starts it again."""
        return trajectory_of(await self._client.stop(await self._id(trajectory)))

    @tool(operations.START_COMMAND, "Run a command", subject="trajectory", destructive=True, outside=True)
    async def exec(
        self,
        ctx: Context,
        trajectory: Trajectory,
        command: Command,
        cwd: Cwd = None,
        timeout_s: Timeout = TIMEOUT_S,
        max_bytes: Most = answers.TEXT_BYTES,
    ) -> answers.CommandAnswer:
        """Run a command in a sandbox and wait for it; then a snapshot of all files is taken. A failed command is an answer
        with its exit code. If it did harm, `rewind` to the snapshot before it. To try something without keeping it, use
        `try`."""
        target, argv = await self._id(trajectory), argv_or_shell(command)
        with anyio.CancelScope(shield=True):  # else it may have begun, and nobody would know to end it
            begun = await self._client.exec_in_background(target, argv, cwd=cwd, timeout=timeout_s, idle_timeout=None)
        kept, end = KeptOutputs(max_bytes), dict[str, Any]()

        async def follow(take: Callable[[str, bytes], object]) -> None:
            async with closing(self._client.command_events(target, begun.id)) as events:
                async for event in events:
                    if event["event"] == "output":
                        take(event["stream"], base64.b64decode(event["data_b64"]))
                    elif event["event"] == "finished":
                        end.update(event)

        async def kill() -> None:
            await self._client.signal_command(target, begun.id, signal.SIGKILL)
            await follow(lambda _stream, _data: None)

        async with report_progress(ctx) as say, self._end_on_cancel(kill):
            await follow(kept.taker(say))
        last: dict[str, Any] = {name: end.get(name) for name in ("exit_code", "error", "snapshot")}
        return answers.CommandAnswer(**last, status=end.get("status", "unknown"), **kept.texts())

    @tool(operations.EXEC_SNAPSHOT, "Try a command", subject="snapshot", outside=True)
    async def try_(
        self,
        ctx: Context,
        snapshot: Ref,
        command: Command,
        cwd: Cwd = None,
        timeout_s: Timeout = TIMEOUT_S,
        max_bytes: Most = answers.TEXT_BYTES,
    ) -> answers.CommandAnswer:
        """Run a command in a throw-away fork of a snapshot: you see what it prints, and nothing of it is kept. Good for
        tests, and for a look at an older state."""
        target, kept = await self._snapshot(snapshot), KeptOutputs(max_bytes)
        async with report_progress(ctx) as say:
            done = await self._client.exec_snapshot(
                target, argv_or_shell(command), cwd=cwd, timeout=timeout_s, on_output=kept.taker(say)
            )
        return answers.CommandAnswer(
            exit_code=done.exit_code, status=done.call.status, error=done.call.error, snapshot=None, **kept.texts()
        )

    @tool(operations.READ_FILE, "Read a file")
    async def read_file(
        self,
        ref: Ref,
        path: Path,
        offset: Offset = 0,
        max_bytes: Most = answers.TEXT_BYTES,
        as_base64: Annotated[bool, Field(description="The bytes as base64, for what is no text.")] = False,
    ) -> answers.PartAnswer:
        """Read a file of a sandbox as it is now (name the trajectory), or as it was at a snapshot."""
        pieces = self._client.read_file(await self._any(ref), path)
        if not as_base64:
            return await answers.text_part(pieces, offset, max_bytes)
        data, end = await answers.bytes_part(pieces, offset, max_bytes)
        return answers.PartAnswer(text=base64.b64encode(data).decode(), next_offset=end)

    @tool(operations.LIST_FILES, "List a directory")
    async def list_files(
        self, ref: Ref, path: Path = ".", offset: Offset = 0, most: Items = answers.ITEMS
    ) -> answers.FilesAnswer:
        """List a directory of a sandbox as it is now (name the trajectory), or as it was at a snapshot."""
        items, end = await answers.items_part(self._client.list_files(await self._any(ref), path), offset, most)
        return answers.FilesAnswer(files=[answer_of(answers.FileAnswer, item) for item in items], next_offset=end)

    @tool(operations.WRITE_FILE, "Write a file", subject="trajectory", destructive=True, idempotent=True)
    async def write_file(
        self,
        trajectory: Trajectory,
        path: Path,
        content: str,
        as_base64: Annotated[bool, Field(description="`content` is base64, for what is no text.")] = False,
    ) -> answers.SnapshotAnswer:
        """Write a file of a sandbox, whole, in place of the old one; missing directories are made. One snapshot."""
        try:
            data = base64.b64decode(content, validate=True) if as_base64 else content.encode()
        except (binascii.Error, UnicodeEncodeError) as exc:
            raise UsageError(f"`content` cannot be written: {exc}; send UTF-8 text, or base64 with as_base64") from exc
        return answers.snapshot_of((await self._client.write_file(await self._id(trajectory), path, data)).snapshot)

    # -- inside -----------------------------------------------------------------------------------------------------

    async def _options(self, ctx: Context, name: str | None, image: str) -> dict[str, Any]:
        """The keywords of a new sandbox, whose image is there."""
        if self._reach.unisolated:
            return {"name": name, "runtime": "none"}
        async with report_progress(ctx) as say:
            await self._client.ensure_image(image, progress=say)
        return {"name": name, "image": image, "network": self._network}

    @asynccontextmanager
    async def _end_on_cancel(self, end: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
        """Call `end`, and wait for it, if the block is cancelled."""
        try:
            yield
        except asyncio.CancelledError:
            with anyio.move_on_after(_ENDING_S, shield=True):
                try:
                    await end()
                except SnapshotdError:
                    pass  # it has ended by itself, or its daemon has
            raise
