"""The verbs of the agent's mind: its journal, state and tasks; resuming, rewinding, editing, retrying, compensating."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Unpack

from snapshotd.api import operations
from snapshotd.api.history import (
    CompensateRequest,
    DecisionFields,
    EditFields,
    EditRequest,
    EffectInfo,
    FileFields,
    JournalInfo,
    MergeInfo,
    MergeOptions,
    MergeRequest,
    MessageFields,
    PromoteOptions,
    PromoteRequest,
    ResumeRequest,
    RetryOptions,
    RetryRequest,
    RewindOptions,
    RewindPreview,
    RewindPreviewOptions,
    RewindQuery,
    RewindRequest,
    TaskInfo,
)
from snapshotd.api.record import UNSET, Json
from snapshotd.api.snapshots import SnapshotInfo
from snapshotd.api.trajectories import TrajectoryInfo
from snapshotd.api.wire import check_ref
from snapshotd.client.local.arguments import MessageLike, bytes_of, messages_of, sandbox_path
from snapshotd.client.twofold import stream, verb
from snapshotd.client.verbs.base import VerbPart, Wait, b64, records_of

RECORDED = UNSET
"""Stands for "leave the value as it is recorded", where None is a value."""


class HistoryVerbs(VerbPart):
    """Part of `Snapshotd`."""

    @stream
    async def journal(self, ref: str) -> AsyncIterator[JournalInfo]:
        """The journal up to a snapshot (of a trajectory: with the entries that its head does not bind yet), from the
        program's beginning."""
        return records_of(await self._transport.lines(*operations.JOURNAL.at(ref)), JournalInfo, "the journal")

    @verb
    async def state(self, ref: str) -> Json:
        """The agent's own JSON state as it was saved with a snapshot."""
        return await self._transport.call(operations.STATE, ref)

    @verb
    async def tasks(self, ref: str) -> list[TaskInfo]:
        """The subtasks as they were at a snapshot, in the order in which they were declared."""
        return await self._transport.call(operations.TASKS, ref)

    @verb
    async def resume(
        self, ref: str, *, retry: Sequence[str] = (), skip: Sequence[str] = (), results: Mapping[str, Any] | None = None
    ) -> TrajectoryInfo:
        """Start a trajectory's program again from the top, replay what is recorded up to its head, and let it run on.
        Returns when it is started; `events` follows it.

        Undecided: an irreversible call may or may not have happened. Decide each by its id or a prefix of it: run it
        again (`retry`), skip it as if it had returned None (`skip`), or give its result (`results`). Conflict: it runs,
        or has finished; UsageError: there is no program.
        """
        decisions = [DecisionFields(call, "retry") for call in retry]
        decisions += [DecisionFields(call, "skip") for call in skip]
        decisions += [DecisionFields(call, "result", result) for call, result in (results or {}).items()]
        return await self._transport.call(operations.RESUME, ref, body=ResumeRequest(tuple(decisions)))

    @verb
    async def rewind(
        self, ref: str, to: str, *, wait: Wait = "captured", **options: Unpack[RewindOptions]
    ) -> SnapshotInfo:
        """Go back to snapshot `to`, in place: with `mode` the "files", the agent's mind ("conversation"), or
        "both". Returns the new snapshot that records it; nothing is destroyed, and `undo` takes it back.

        With `compensate`, the registered compensations of irreversible calls that are left behind run before, newest
        first, each at most once. Conflict while a process of the sandbox's own lives, or `to` is no part of the
        trajectory's history; SandboxFailed: a compensation failed, and nothing was rewound.

        In a user's own folder, `session` takes back the changes of one session of the agent alone, or of "all". Conflict:
        it is not given, and several sessions have changed files since; NotFound: it has changed none. The paths that
        had to stay are in `left` of the snapshot's `tool.arguments`.
        """
        return await self._step(operations.REWIND, ref, RewindRequest(to, **options), wait)

    @verb
    async def preview_rewind(self, ref: str, to: str, **options: Unpack[RewindPreviewOptions]) -> RewindPreview:
        """The effect that `rewind` would have, with at most `max_files` changed files. Changes nothing."""
        query = RewindQuery(check_ref(to), **options)
        return await self._transport.call(operations.PREVIEW_REWIND, ref, query=query)

    @verb
    async def undo(self, ref: str, *, wait: Wait = "captured") -> SnapshotInfo:
        """Take the last rewind (or promotion, or undo) of a trajectory back. Conflict: steps were taken since, or its head is no
        rewind."""
        return await self._step(operations.UNDO, ref, None, wait)

    @verb
    async def promote(self, ref: str, *, wait: Wait = "captured", **options: Unpack[PromoteOptions]) -> SnapshotInfo:
        """Make the head of a fork the head of the trajectory that it was forked from (`into`: of one further up):
        files, conversation, journal and state. Returns the new snapshot of that trajectory, and `undo` takes it back.

        Conflict: it is no fork of it, something runs in one of the two, or the trajectory took steps since the fork.
        With `leave_behind` these steps are left behind; with `compensate`, too, after the registered compensations of
        irreversible calls among them have run. Its program, arguments and environment stay as they are."""
        return await self._step(operations.PROMOTE, ref, PromoteRequest(**options), wait)

    @verb
    async def merge(self, source: str, into: str, **options: Unpack[MergeOptions]) -> MergeInfo:
        """Bring what changed from `base` to the snapshot `source` (of a trajectory: its head) below the directory `path`
        (/workspace) to the head of the trajectory `into`, in one step that `undo` takes back; with `dry_run`, only say
        what that would be. `base` is the last snapshot that both go on from, unless given. The mind of `into` goes on.

        Three-way, as `apply`: changes of `into` are kept, and with conflicts nothing is merged and the answer names
        them. UsageError (nothing in common, and no base), Conflict (something runs in `into`, or it changed meanwhile),
        Unsupported (there is no git, and texts are to be merged)."""
        fields: dict[str, Any] = dict(options)
        if (path := fields.pop("path", None)) is not None:
            fields["path_b64"] = b64(sandbox_path(path))
        body = MergeRequest(check_ref(source), **fields)
        return await self._transport.call(operations.MERGE, into, body=body)

    @verb
    async def edit(
        self,
        ref: str,
        *,
        files: Mapping[str | bytes, str | bytes | None] | None = None,
        messages: Sequence[MessageLike] | None = None,
        drop_messages: int = 0,
        add_messages: Sequence[MessageLike] = (),
        result: Any = RECORDED,
        state: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        name: str | None = None,
        resume: bool = False,
        wait: Wait = "captured",
    ) -> TrajectoryInfo:
        """A new trajectory whose first snapshot is that one, edited; with `resume` its program goes on from there.

        `files`: path to content (text as UTF-8; None removes it); relative paths start at /workspace. A message is
        {"role": ..., "content": ...}, or a pair of both: `messages` in place of the conversation, or `drop_messages` at
        its end and `add_messages` after that. `result`: of the snapshot's tool call. `state`: keys to set (None removes
        one). UsageError: an edit that cannot be made.
        """
        changes = edit_fields(files, messages, drop_messages, add_messages, result, state)
        body = EditRequest(**vars(changes), env=dict(env or {}), name=name, resume=resume)
        made = await self._transport.call(operations.EDIT, ref, body=body)
        if wait == "stored":
            await self.flush(made.id)
        return made

    @verb
    async def retry(
        self, ref: str, task: str, *, wait: Wait = "captured", **options: Unpack[RetryOptions]
    ) -> SnapshotInfo:
        """Go back to before a task began (files and mind), compensate its irreversible calls (unless `compensate` is false),
        and let the program go on from there (unless `resume` is false). Tasks that completed after it and do not depend
        on it stay completed, with their files. NotFound: no such task."""
        return await self._step(operations.RETRY, ref, RetryRequest(task, **options), wait)

    @verb
    async def effects(self, ref: str) -> list[EffectInfo]:
        """The irreversible calls of a trajectory that its present history does not hold, newest first."""
        return await self._transport.call(operations.EFFECTS, ref)

    @verb
    async def compensate(self, ref: str, calls: Sequence[str] = ()) -> list[EffectInfo]:
        """Run the compensations of calls that were left behind (all, if none is named), newest first, each at most
        once."""
        return await self._transport.call(operations.COMPENSATE, ref, body=CompensateRequest(tuple(calls)))


def edit_fields(
    files: Mapping[str | bytes, str | bytes | None] | None = None,
    messages: Sequence[MessageLike] | None = None,
    drop_messages: int = 0,
    add_messages: Sequence[MessageLike] = (),
    result: Any = RECORDED,
    state: Mapping[str, Any] | None = None,
) -> EditFields:
    """Changes of files and mind. See `Mind.edit`."""
    return EditFields(
        files=tuple(_file(path, content) for path, content in (files or {}).items()),
        drop_messages=drop_messages,
        messages=None if messages is None else _messages("messages", messages),
        add_messages=_messages("add_messages", add_messages),
        state=dict(state or {}),
        result=result,
    )


def _file(path: str | bytes, content: str | bytes | None) -> FileFields:
    raw = None if content is None else bytes_of(f"files[{path!r}]", content)
    return FileFields(b64(sandbox_path(path)), None if raw is None else base64.b64encode(raw).decode())


def _messages(name: str, messages: Sequence[MessageLike]) -> tuple[MessageFields, ...]:
    return tuple(MessageFields(role, content) for role, content in messages_of(name, messages))
