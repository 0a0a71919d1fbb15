"""The agent's mind: journal, tasks, rewinds, edits, effects."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from snapshotd.api.operation import READ, RUN, Operation
from snapshotd.api.record import ApiRecord, Bounds, Json, OneOf, RelativePath, Request, field, record, unset
from snapshotd.api.snapshots import CallStatus, ChangeInfo, MessageInfo, SnapshotInfo
from snapshotd.api.wire import LINES, LIST_MAX, PREVIEW_FILES

ITEMS_MAX = 10_000
NAME_MAX = 1024
RewindMode = Literal["files", "conversation", "both"]
"""The part that a rewind takes back: the files, the agent's mind (conversation, journal and state), or both."""


@record(frozen=True)
class JournalInfo(ApiRecord):
    """One entry of a journal. `kind` is tool, model, question, task or checkpoint; `side_effect` local, idempotent or
    irreversible; `status` done, failed, unknown (cut off), or None: no end is recorded. `snapshot` binds it; None while
    none does."""

    id: str
    kind: str
    name: str
    arguments: Any
    side_effect: str
    key: str | None
    status: str | None
    started_at: str
    ended_at: str | None
    result: Any
    error: str | None
    facts: tuple[Any, ...]
    """Facts that the call was told, beside its arguments."""
    details: Json
    parent: str
    snapshot: str | None


@record(frozen=True)
class TaskInfo(ApiRecord):
    """A subtask of an agent."""

    name: str
    status: str
    """pending, in-progress, completed, failed or skipped."""
    depends: tuple[str, ...]
    """Tasks that have to end before."""
    note: str | None
    started_in: str | None
    """The snapshot before the task's first call."""
    ended_in: str | None
    """The snapshot of the task's end."""


@record(frozen=True)
class EffectInfo(ApiRecord):
    """An irreversible call that was left behind: it cannot be taken back, at most compensated."""

    trajectory: str
    call: str
    name: str
    arguments: Any
    status: CallStatus | None
    """Null: it was cut off."""
    started_at: str
    result: Any
    compensation: tuple[str, ...] | None
    """The command that undoes the call, if there is one."""
    compensated: CallStatus | None
    """How the compensation of the call ended. Null: it was not run; unknown: its end is not recorded."""


@record(frozen=True)
class RewindPreview(ApiRecord):
    """The effect that a rewind would have."""

    head: str
    target: str
    rewinds: RewindMode
    """Parts that a rewind brings back: `files`, `conversation` or `both`."""
    changes: tuple[ChangeInfo, ...]
    """Changes as in /diff, from the head to what would be there; at most as many as were asked for."""
    change_count: int
    """Number of all changes."""
    messages: tuple[MessageInfo, ...]
    """The messages that would go."""
    effects: tuple[EffectInfo, ...]
    """Irreversible calls that would be left behind, newest first."""
    untouched: tuple[str, ...] = ()
    """In a user's own folder: a sentence for each path that stays though an agent has changed it since."""


@record(frozen=True)
class DecisionFields(Request):
    call: Annotated[str, Bounds(min_length=4, max_length=32)]
    """Its id, or a unique prefix."""
    action: Literal["retry", "skip", "result"]
    """Run it again; go on as if it had returned null; this is its result."""
    result: Any = unset()
    """With `result`: any JSON value."""


@record(frozen=True)
class ResumeRequest(Request):
    decisions: Annotated[tuple[DecisionFields, ...], Bounds(max_length=ITEMS_MAX)] = ()


class RewindOptions(TypedDict, total=False):
    """The keywords by which the client takes a `RewindRequest`."""

    mode: RewindMode
    compensate: bool
    session: str | None


@record(frozen=True)
class RewindRequest(Request):
    to: str
    """The snapshot to go back to: tag, name or id prefix."""
    mode: RewindMode = "both"
    """The part that goes back: the files, the agent's mind, or both."""
    compensate: bool = False
    """Run the compensations of the irreversible calls that are left behind, newest first."""
    session: Annotated[str, Bounds(min_length=1, max_length=256)] | None = None
    """In a user's own folder: take back the changes of this session of the agent alone, or of `all`. Null: there may be
    one only."""


class RewindPreviewOptions(TypedDict, total=False):
    """The keywords by which the client takes a `RewindQuery`."""

    mode: RewindMode
    max_files: int
    session: str | None


@record(frozen=True)
class RewindQuery(Request):
    to: str
    mode: RewindMode = "both"
    max_files: Annotated[int, Bounds(ge=0, le=LIST_MAX)] = PREVIEW_FILES
    """At most so many changed files are listed."""
    session: Annotated[str, Bounds(min_length=1, max_length=256)] | None = None
    """As in the request that rewinds."""


class PromoteOptions(TypedDict, total=False):
    """The keywords by which the client takes a `PromoteRequest`."""

    into: str | None
    leave_behind: bool
    compensate: bool


@record(frozen=True)
class PromoteRequest(Request):
    into: str | None = None
    """The trajectory that takes it over; null: the one it was forked from."""
    leave_behind: bool = False
    """Also if that one has taken steps since the fork."""
    compensate: bool = False
    """The same, and run the compensations of the irreversible calls among them first."""


class RetryOptions(TypedDict, total=False):
    """The keywords by which the client takes a `RetryRequest`."""

    compensate: bool
    resume: bool


@record(frozen=True)
class RetryRequest(Request):
    task: Annotated[str, Bounds(min_length=1, max_length=NAME_MAX)]
    compensate: bool = True
    """Compensate what the task did."""
    resume: bool = True
    """Let the program go on."""


@record(frozen=True)
class CompensateRequest(Request):
    calls: Annotated[tuple[str, ...], Bounds(max_length=ITEMS_MAX)] = ()
    """Ids or unique prefixes; none: all that were left behind."""


@record(frozen=True)
class MessageFields(Request):
    role: Annotated[str, Bounds(min_length=1, max_length=64)]
    content: Any


@record(frozen=True)
class FileFields(Request):
    path_b64: str
    """Path in the sandbox, relative to its root, as base64 of its bytes."""
    content_b64: str | None
    """Its new content; null removes it."""
    mode: Annotated[int, Bounds(ge=0, le=0o7777)] | None = None
    """Null: that of the file that is there, or 0644."""


class MergeOptions(TypedDict, total=False):
    """The keywords by which the client takes a `MergeRequest`."""

    base: str | None
    path: str | bytes | None
    dry_run: bool


@record(frozen=True)
class MergeRequest(Request):
    """Brings what changed between two snapshots to the head of a trajectory."""

    source: str
    """The snapshot that has the changes; of a trajectory: its head."""
    base: str | None = None
    """The snapshot that both are compared with; null: the last one that both go on from."""
    path_b64: str | None = None
    """The directory below which files are compared, from the sandbox's root, as base64 of its bytes; null: /workspace."""
    dry_run: bool = False
    """Only say what would change."""


@record(frozen=True)
class AppliedInfo(ApiRecord):
    """One path that an apply or a merge changes, relative to the directory that is compared."""

    change: Annotated[str, OneOf("added", "changed", "deleted")]
    path: RelativePath
    kind: str
    merged: bool
    """Both sides changed the text, and both changes are kept."""


@record(frozen=True)
class ConflictInfo(ApiRecord):
    """One path that both sides changed in ways that exclude each other."""

    path: RelativePath
    reason: str


@record(frozen=True)
class MergeInfo(ApiRecord):
    """The effect of a merge, or with `dry_run` the effect that it would have. With `conflicts` nothing is merged."""

    source: str
    """The snapshot whose changes are merged."""
    head: str
    """The snapshot that they are merged into."""
    base: str
    """The snapshot that both sides of a merge were compared with."""
    dry_run: bool
    changes: tuple[AppliedInfo, ...]
    conflicts: tuple[ConflictInfo, ...]
    """Paths that both sides changed in ways that exclude each other."""
    same: int
    """Changes that the head had already."""
    warnings: tuple[str, ...]
    """Changes that are never brought, one sentence each."""
    snapshot: SnapshotInfo | None
    """The new snapshot; null where nothing was merged."""


@record(frozen=True)
class EditFields(Request):
    """The differences between the new snapshot and its source."""

    files: Annotated[tuple[FileFields, ...], Bounds(max_length=ITEMS_MAX)] = ()
    messages: tuple[MessageFields, ...] | None = None
    """A whole conversation in place of the old one."""
    drop_messages: Annotated[int, Bounds(ge=0, le=1 << 53)] = 0
    """How many messages to leave out at the end."""
    add_messages: tuple[MessageFields, ...] = ()
    """Messages to append."""
    result: Any = unset()
    """Another result of the snapshot's tool call, also null; leave it out to keep the recorded one."""
    state: Json = field(default_factory=dict)
    """Keys of the state to set; null removes one."""


@record(frozen=True)
class EditRequest(EditFields):
    env: dict[str, str] = field(default_factory=dict)
    name: str | None = None
    """Name of the new trajectory."""
    resume: bool = False
    """Let the program go on from there."""


JOURNAL = Operation[Any]("GET", "/snapshots/{ref}/journal", LINES, READ, "history")
STATE = Operation[Json]("GET", "/snapshots/{ref}/state", dict[str, Any], READ, "history", by="journal")
TASKS = Operation("GET", "/snapshots/{ref}/tasks", list[TaskInfo], READ, "history", by="journal")
PREVIEW_REWIND = Operation(
    "GET", "/trajectories/{ref}/rewind", RewindPreview, READ, "history", query=RewindQuery, by="branching"
)
REWIND = Operation(
    "POST", "/trajectories/{ref}/rewind", SnapshotInfo, RUN, "history", body=RewindRequest, once=True, by="branching"
)
UNDO = Operation("POST", "/trajectories/{ref}/undo", SnapshotInfo, RUN, "history", once=True, by="branching")
PROMOTE = Operation(
    "POST", "/trajectories/{ref}/promote", SnapshotInfo, RUN, "history", body=PromoteRequest, once=True, by="branching"
)
MERGE = Operation("POST", "/trajectories/{ref}/merge", MergeInfo, RUN, "history", body=MergeRequest, once=True)
RETRY = Operation(
    "POST", "/trajectories/{ref}/retry", SnapshotInfo, RUN, "history", body=RetryRequest, once=True, by="branching"
)
EFFECTS = Operation("GET", "/trajectories/{ref}/effects", list[EffectInfo], READ, "history", by="branching")
COMPENSATE = Operation(
    "POST", "/trajectories/{ref}/compensate", list[EffectInfo], RUN, "history", body=CompensateRequest, by="branching"
)
