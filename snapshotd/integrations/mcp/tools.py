"""The tools: one method for each, over the asynchronous client. A method's docstring is what the model reads of it, and its
row in the API says what it does to the world.

Arguments that many tools have in one way are not here: `key`, under which a call is made once, and the trajectory of a
server that has only one (`server.py`).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Any, Literal, TypeVar

import anyio
from mcp.server.mcpserver import Context
from mcp_types import ToolAnnotations
from pydantic import Field

from snapshotd.api import operations
from snapshotd.api.mind import RewindMode
from snapshotd.api.operations import Operation
from snapshotd.api.trajectories import TrajectoryInfo
from snapshotd.api.wire import FORK_MAX
from snapshotd.client import AsyncSnapshotd
from snapshotd.client.outcomes import argv_or_shell
from snapshotd.client.twofold import closing
from snapshotd.errors import SnapshotdError, UsageError
from snapshotd.integrations.mcp import answers
from snapshotd.integrations.mcp.reach import Reach

IDLE_S = 1800.0
"""A sandbox that a client has made and left ends, with a last snapshot, after so many seconds without a command."""
TIMEOUT_S = 600.0
_SAID_S = 0.5
_ENDING_S = 20.0
"""Seconds to wait for the end of a command whose call was cancelled."""
F = TypeVar("F", bound=Callable[..., Awaitable[Any]])

Trajectory = Annotated[str, Field(description="Id or name of a trajectory: a sandbox with its history.")]
Ref = Annotated[str, Field(description="A snapshot: its id or tag. A trajectory stands for its newest one.")]
Command = Annotated[
    str | list[str], Field(description="Text for `/bin/sh -c`, or a list: the program and its arguments.", min_length=1)
]
Cwd = Annotated[str | None, Field(description="Absolute path in the sandbox; null: /workspace.")]
Timeout = Annotated[float, Field(description="The command is ended after so many seconds.", gt=0, le=86400)]
Offset = Annotated[int, Field(description="Where to begin: 0, or `next_offset` of the answer before.", ge=0)]
Most = Annotated[int, Field(description="Most bytes of text in the answer.", ge=256, le=answers.TEXT_MAX_BYTES)]
Items = Annotated[int, Field(description="Most items in the answer.", ge=1, le=answers.ITEMS_MAX)]
Path = Annotated[str, Field(description="Path in the sandbox; a relative one starts at /workspace.", min_length=1)]


@dataclass(frozen=True, slots=True)
class ToolRow:
    """A tool's operation, and the argument that names the trajectory whose policy it is asked of (None: it asks nobody)."""

    operation: Operation[Any]
    subject: str | None
    annotations: ToolAnnotations


def tool(
    operation: Operation[Any],
    title: str,
    *,
    subject: str | None = None,
    destructive: bool = False,
    idempotent: bool = False,
    outside: bool = False,
) -> Callable[[F], F]:
    """Declares a tool. Its operation says if it only reads. `destructive`: it may end or replace what is there (a rewind
    brings files back, not what ran); `outside`: what it runs may reach more than the sandbox."""
    reads = operation.scope == operations.READ
    hints = ToolAnnotations(
        title=title,
        read_only_hint=reads,
        destructive_hint=destructive,
        idempotent_hint=reads or idempotent,
        open_world_hint=outside,
    )

    def declare(method: F) -> F:
        method.row = ToolRow(operation, subject, hints)  # type: ignore[attr-defined]
        return method

    return declare


class Tools:
    """The tools of one server. `network`: of the sandboxes that it makes."""

    def __init__(self, reach: Reach, network: str) -> None:
        self._reach, self._network = reach, network

    @property
    def _client(self) -> AsyncSnapshotd:
        return self._reach.client

    async def _id(self, trajectory: str) -> str:
        return (await self._reach.trajectory(trajectory)).id

    async def _snapshot(self, ref: str) -> str:
        return (await self._reach.snapshot(ref)).id

    # -- sandboxes -----------------------------------------------------------------------------------------------------

    @tool(operations.TRAJECTORIES, "List sandboxes")
    async def list_(self, most: Items = answers.ITEMS) -> answers.TrajectoriesAnswer:
        """List trajectories (sandboxes, each with its history), newest first. Take an id or a name from here."""
        found = await self._reach.trajectories()
        return answers.TrajectoriesAnswer(
            trajectories=[_trajectory(info) for info in found[:most]], more=max(0, len(found) - most)
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
        return _trajectory(made)

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
        kept = _Kept(max_bytes)
        async with _said(ctx) as say, self._ended_with_us(lambda: self._client.stop(started.id)):
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
        return _trajectory(await self._client.stop(await self._id(trajectory)))

    # -- commands and files --------------------------------------------------------------------------------------------

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
        kept, end = _Kept(max_bytes), dict[str, Any]()

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

        async with _said(ctx) as say, self._ended_with_us(kill):
            await follow(kept.taker(say))
        told: dict[str, Any] = {name: end.get(name) for name in ("exit_code", "error", "snapshot")}
        return answers.CommandAnswer(**told, status=end.get("status", "unknown"), **kept.texts())

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
        target, kept = await self._snapshot(snapshot), _Kept(max_bytes)
        async with _said(ctx) as say:
            done = await self._client.exec_snapshot(
                target, argv_or_shell(command), cwd=cwd, timeout=timeout_s, on_output=kept.taker(say)
            )
        return answers.CommandAnswer(
            exit_code=done.exit_code, status=done.call.status, error=done.call.error, snapshot=None, **kept.texts()
        )

    @tool(operations.OUTPUT, "Read a call's output")
    async def read_output(
        self,
        snapshot: Ref,
        which: Annotated[Literal["stdout", "stderr", "output"], Field(description="As in `tool.outputs`.")] = "stdout",
        offset: Offset = 0,
        max_bytes: Most = answers.TEXT_BYTES,
    ) -> answers.PartAnswer:
        """Read the recorded output of the call that a snapshot was taken after; with `next_offset` to its end."""
        pieces = self._client.output(await self._snapshot(snapshot), which, start=offset, count=max_bytes + 1)
        part = await answers.text_part(pieces, 0, max_bytes)
        if part.next_offset is not None:
            part.next_offset += offset
        return part

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
        return answers.FilesAnswer(files=[_of(answers.FileAnswer, item) for item in items], next_offset=end)

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

    # -- looking -------------------------------------------------------------------------------------------------------

    @tool(operations.LOG, "Show the history")
    async def log(self, trajectory: Trajectory, last: Items = 20) -> answers.LogAnswer:
        """Show a trajectory's newest snapshots, one for each call. Their ids are what `rewind`, `diff`, `fork` and `try`
        take."""
        found = await self._client.log(await self._id(trajectory), last=last + 1)
        older = max(0, found[0].seq + 1) if len(found) > last else 0
        return answers.LogAnswer(snapshots=[answers.snapshot_of(info) for info in found[-last:]], older=older)

    @tool(operations.SNAPSHOT, "Show a snapshot")
    async def show(
        self,
        snapshot: Ref,
        messages: Annotated[int, Field(description="Messages of the recorded conversation to show.", ge=0, le=50)] = 0,
        max_bytes: Most = answers.TEXT_BYTES,
    ) -> answers.ShowAnswer:
        """Show one snapshot: the call that it was taken after, its result, and if asked the conversation up to it."""
        info = await self._reach.snapshot(snapshot)
        said = (await self._client.conversation(info.id))[-messages:] if messages else []
        shown = [answers.KeptText(max_bytes // max(1, len(said))) for _ in said]
        for one, message in zip(shown, said, strict=True):
            one.add(json.dumps({"role": message.role, "content": message.content}, ensure_ascii=False).encode())
        parts = [answers.PartAnswer(text=one.text(), next_offset=None) for one in shown]
        return answers.ShowAnswer(**answers.snapshot_of(info).model_dump(), conversation=parts)

    @tool(operations.DIFF, "Compare files of snapshots")
    async def diff(
        self,
        snapshot: Ref,
        to: Annotated[
            str | None, Field(description="Another snapshot; null: from the parent of the first to it.")
        ] = None,
        patch: Annotated[bool, Field(description="Also the changed lines, as a patch.")] = False,
        offset: Offset = 0,
        most: Items = answers.ITEMS,
        max_bytes: Most = answers.TEXT_BYTES,
    ) -> answers.DiffAnswer:
        """Show the files that differ between two snapshots, or that one call changed."""
        pair = (await self._snapshot(snapshot), None if to is None else await self._snapshot(to))
        changes, end = await answers.items_part(self._client.diff(*pair), offset, most)
        text = None
        if patch:
            kept = answers.KeptText(max_bytes)
            await self._client.patch(*pair, write=kept.add)
            text = answers.PartAnswer(text=kept.text(), next_offset=None)
        return answers.DiffAnswer(
            changes=[_of(answers.ChangeAnswer, one) for one in changes], next_offset=end, patch=text
        )

    @tool(operations.APPROVALS, "List calls that wait for a person")
    async def approvals(self) -> answers.ApprovalsAnswer:
        """List the calls that wait for a person's decision. No tool decides: ask the person."""
        within = {info.id for info in await self._reach.trajectories()}
        found = [one for one in await self._client.approvals("pending") if one.trajectory in within]
        return answers.ApprovalsAnswer(approvals=[_of(answers.ApprovalAnswer, one) for one in found])

    # -- the past and other pasts --------------------------------------------------------------------------------------

    @tool(operations.TAKE_SNAPSHOT, "Take a snapshot now", subject="trajectory")
    async def snapshot(
        self,
        trajectory: Trajectory,
        name: Annotated[str | None, Field(description="A tag, to find it again by.")] = None,
    ) -> answers.SnapshotAnswer:
        """Take a snapshot of a running sandbox. Every call takes one by itself: this is for a name to come back to."""
        return answers.snapshot_of(await self._client.take_snapshot(await self._id(trajectory), name))

    @tool(operations.PREVIEW_REWIND, "Preview a rewind")
    async def preview_rewind(self, trajectory: Trajectory, to: Ref, mode: RewindMode = "both") -> answers.PreviewAnswer:
        """Say what `rewind` would change, and change nothing."""
        target, snapshot = await self._id(trajectory), await self._snapshot(to)
        view = await self._client.preview_rewind(target, snapshot, mode=mode, max_files=answers.ITEMS)
        return answers.PreviewAnswer(
            target=view.target,
            changes=[_of(answers.ChangeAnswer, one) for one in view.changes],
            change_count=view.change_count,
            messages_dropped=len(view.messages),
            effects=[f"{one.name} ({one.status or 'cut off'})" for one in view.effects],
        )

    @tool(operations.REWIND, "Go back to a snapshot", subject="trajectory", destructive=True)
    async def rewind(self, trajectory: Trajectory, to: Ref, mode: RewindMode = "both") -> answers.SnapshotAnswer:
        """Set a sandbox back to one of its earlier snapshots, in place: all files, and what is recorded of the conversation.
        The answer is a new snapshot, `undo` takes it back, and nothing is lost. Your own messages stay: you still know
        what you tried."""
        return answers.snapshot_of(
            await self._client.rewind(await self._id(trajectory), await self._snapshot(to), mode=mode)
        )

    @tool(operations.UNDO, "Take a rewind back", subject="trajectory", destructive=True)
    async def undo(self, trajectory: Trajectory) -> answers.SnapshotAnswer:
        """Take the last rewind, merge or promotion of a trajectory back, if it took no step since."""
        return answers.snapshot_of(await self._client.undo(await self._id(trajectory)))

    @tool(operations.FORK, "Fork a snapshot", subject="snapshot")
    async def fork(
        self,
        snapshot: Ref,
        n: Annotated[int, Field(description="Number of forks.", ge=1, le=FORK_MAX)] = 1,
        name: Annotated[str | None, Field(description="A name; `{index}` in it is the fork's number from 0.")] = None,
    ) -> answers.ForksAnswer:
        """Start `n` new sandboxes from a snapshot, to try several ways side by side. Each is a trajectory of its own: work in
        them with `exec`, then `compare` or `score` them, and `promote` the best."""
        forked = await self._client.fork(await self._snapshot(snapshot), n, name=name, idle_timeout=IDLE_S)
        return answers.ForksAnswer(trajectories=[_trajectory(info) for info in forked.trajectories])

    @tool(operations.COMPARE, "Compare branches")
    async def compare(
        self,
        refs: Annotated[
            list[str], Field(description="Two or more trajectories or snapshots.", min_length=2, max_length=16)
        ],
    ) -> answers.CompareAnswer:
        """Compare branches from the last snapshot that they share: calls, failures, files. Each against the first."""
        found = await self._client.compare(*[await self._any(ref) for ref in refs])
        differences = [pair.first_difference for pair in found.pairs]
        return answers.CompareAnswer(
            fork_point=None if found.fork_point is None else found.fork_point.id,
            sides=[_of(answers.SideAnswer, side) for side in found.branches],
            first_differences=[
                "none" if one is None else f"call {one.number}: {one.difference}" for one in differences
            ],
            differing_files=[
                [_of(answers.ChangeAnswer, one) for one in pair.changes[: answers.ITEMS]] for pair in found.pairs
            ],
        )

    @tool(operations.SCORE, "Score branches by a command", subject="refs", outside=True)
    async def score(
        self,
        ctx: Context,
        refs: Annotated[list[str], Field(description="Trajectories or snapshots.", min_length=1, max_length=256)],
        command: Command,
        number: Annotated[bool, Field(description="The score is the last line of output that is a number.")] = False,
        junit: Annotated[
            str | None, Field(description="The score is the share of tests that passed in this report.")
        ] = None,
        repeat: Annotated[int, Field(ge=1, le=20)] = 1,
        timeout_s: Timeout = TIMEOUT_S,
    ) -> answers.ScoresAnswer:
        """Run a command in a throw-away fork of each branch and rank them. The score is 1 for exit code 0, else 0, unless
        said otherwise."""
        targets = [await self._any(ref) for ref in refs]
        async with _said(ctx) as say:
            rows = await self._client.score(
                targets,
                argv_or_shell(command),
                number=number,
                junit=junit,
                repeat=repeat,
                timeout=timeout_s,
                on_run=lambda row, _run: say(f"a run of {row.ref[:12]} has ended"),
            )
        named = dict(zip(targets, refs, strict=True))
        return answers.ScoresAnswer(
            rows=[
                answers.ScoreAnswer(
                    ref=named.get(row.ref, row.ref),
                    snapshot="" if row.snapshot is None else row.snapshot.id,
                    rank=row.rank,
                    score=row.mean,
                    errors=[run.error for run in row.runs if run.error is not None],
                )
                for row in rows
            ]
        )

    @tool(operations.BISECT, "Find the call that broke it", subject="trajectory", outside=True)
    async def bisect(
        self,
        ctx: Context,
        trajectory: Trajectory,
        command: Command,
        good: Annotated[str | None, Field(description="A snapshot where it passes; null: the first one.")] = None,
        bad: Annotated[str | None, Field(description="A snapshot where it fails; null: the newest.")] = None,
    ) -> answers.BisectAnswer:
        """Find the first snapshot of a trajectory at which a command fails, by runs in throw-away forks. Exit code 0 passes,
        125 cannot tell, all else fails. Then look at that call with `show` and `diff`."""
        ends = [None if ref is None else await self._snapshot(ref) for ref in (good, bad)]
        target = await self._id(trajectory)
        async with _said(ctx) as say:
            found = await self._client.bisect(
                target,
                argv_or_shell(command),
                good=ends[0],
                bad=ends[1],
                on_tried=lambda one: say(f"{one.snapshot.id[:12]} is {one.outcome}"),
            )
        return answers.BisectAnswer(
            first_bad=answers.snapshot_of(found.first_bad),
            last_good=found.last_good.id,
            unknown=[info.id for info in found.unknown],
            flaky=found.flaky,
        )

    @tool(operations.MERGE, "Merge files of a branch", subject="into", destructive=True)
    async def merge(
        self,
        source: Annotated[str, Field(description="The branch whose changes are taken.")],
        into: Annotated[str, Field(description="The trajectory that gets them.")],
        dry_run: Annotated[bool, Field(description="Only say what would change.")] = False,
    ) -> answers.MergeAnswer:
        """Bring the files that a branch has changed in /workspace to another trajectory, three-way, as one snapshot. With
        conflicts nothing is merged."""
        done = await self._client.merge(await self._snapshot(source), await self._id(into), dry_run=dry_run)
        return answers.MergeAnswer(
            snapshot=None if done.snapshot is None else done.snapshot.id,
            changes=[
                answers.ChangeAnswer(change=one.change, path=one.path.decode(errors="replace"))
                for one in done.changes[: answers.ITEMS_MAX]
            ],
            conflicts=[f"{one.path.decode(errors='replace')}: {one.reason}" for one in done.conflicts],
            warnings=[*done.warnings],
        )

    @tool(operations.PROMOTE, "Make a fork the trajectory", subject="trajectory", destructive=True)
    async def promote(
        self,
        trajectory: Trajectory,
        leave_behind: Annotated[
            bool, Field(description="Also if the trajectory that it was forked from took steps since.")
        ] = False,
    ) -> answers.SnapshotAnswer:
        """Make a fork's state the state of the trajectory that it was forked from. `undo` there takes it back."""
        info = await self._reach.trajectory(trajectory)
        if info.forked_from is not None:
            await self._reach.trajectory((await self._client.snapshot(info.forked_from)).trajectory)
        return answers.snapshot_of(await self._client.promote(info.id, leave_behind=leave_behind))

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _any(self, ref: str) -> str:
        """A trajectory (with its files as they are now), else a snapshot."""
        owner = await self._client.trajectory(ref)
        if owner.id.startswith(ref) or owner.name == ref:
            return await self._id(owner.id)
        return await self._snapshot(ref)

    async def _options(self, ctx: Context, name: str | None, image: str) -> dict[str, Any]:
        """The keywords of a new sandbox, whose image is there."""
        if self._reach.unisolated:
            return {"name": name, "runtime": "none"}
        async with _said(ctx) as say:
            await self._client.ensure_image(image, progress=say)
        return {"name": name, "image": image, "network": self._network}

    @asynccontextmanager
    async def _ended_with_us(self, end: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
        """A block that calls `end` if it is cancelled, and waits for it."""
        try:
            yield
        except asyncio.CancelledError:
            with anyio.move_on_after(_ENDING_S, shield=True):
                try:
                    await end()
                except SnapshotdError:
                    pass  # it has ended by itself, or its daemon has
            raise


class _Kept:
    """Both outputs of a command."""

    def __init__(self, most: int) -> None:
        self._kept = {"stdout": answers.KeptText(most), "stderr": answers.KeptText(most)}

    def taker(self, say: Callable[[str], None]) -> Callable[[str, bytes], None]:
        """Keeps output, and tells how much there is."""

        def take(stream: str, data: bytes) -> None:
            self._kept[stream].add(data)
            line = data.decode(errors="replace").strip().rpartition("\n")[2][:200]
            say(line or f"{sum(one.total for one in self._kept.values())} bytes of output")

        return take

    def texts(self) -> dict[str, Any]:
        """The fields of a `CommandAnswer`."""
        texts = {name: one.text() for name, one in self._kept.items()}
        return {**texts, "cut": any(one.is_cut for one in self._kept.values())}


@asynccontextmanager
async def _said(ctx: Context) -> AsyncIterator[Callable[[str], None]]:
    """Gives a function that tells the client of progress: the newest message, twice a second at most."""
    news, newest = asyncio.Event(), [""]

    def say(message: str) -> None:
        newest[:] = [message]
        news.set()

    async def pass_on() -> None:
        for number in count(1):
            await news.wait()
            news.clear()
            await ctx.report_progress(number, message=newest[0])
            await asyncio.sleep(_SAID_S)

    telling = asyncio.create_task(pass_on())
    telling.add_done_callback(
        lambda task: task.cancelled() or task.exception()
    )  # a client that has gone is told nothing
    try:
        yield say
    finally:
        telling.cancel()


def _trajectory(info: TrajectoryInfo) -> answers.TrajectoryAnswer:
    return _of(answers.TrajectoryAnswer, info)


A = TypeVar("A", bound=answers.Answer)


def _of(kind: type[A], record: object) -> A:
    return kind.model_validate(record)
