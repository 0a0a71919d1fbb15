"""The tools that look at the history of a sandbox, and that bring it back."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field

from snapshotd.api import operations
from snapshotd.api.history import RewindMode
from snapshotd.integrations.mcp import answers
from snapshotd.integrations.mcp.tools import Items, Most, Offset, Ref, ToolSet, Trajectory, answer_of, tool


class HistoryTools(ToolSet):
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
            changes=[answer_of(answers.ChangeAnswer, one) for one in changes], next_offset=end, patch=text
        )

    @tool(operations.APPROVALS, "List calls that wait for a person")
    async def approvals(self) -> answers.ApprovalsAnswer:
        """List the calls that wait for a person's decision. No tool decides: ask the person."""
        within = {info.id for info in await self._reach.trajectories()}
        found = [one for one in await self._client.approvals("pending") if one.trajectory in within]
        return answers.ApprovalsAnswer(approvals=[answer_of(answers.ApprovalAnswer, one) for one in found])

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
            changes=[answer_of(answers.ChangeAnswer, one) for one in view.changes],
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
