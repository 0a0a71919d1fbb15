"""Snapshots: what they are, and what can be made from them outside of sandboxes."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from snapshotd.api.operation import ADMIN, READ, RUN, Operation
from snapshotd.api.record import ApiRecord, Base64Bytes, Bounds, OneOf, Request, SandboxPath, record
from snapshotd.api.wire import BYTES, LINES, LOG_MAX

CallStatus = Annotated[str, OneOf("done", "failed", "interrupted", "timed-out", "unknown")]
OutputName = Annotated[str, OneOf("stdout", "stderr", "output")]


@record(frozen=True)
class FileCounts(ApiRecord):
    """The differences between a snapshot's files and its parent's."""

    added: int
    changed: int
    deleted: int
    bytes: int
    """Content size of added and changed regular files."""


@record(frozen=True)
class DamagedOutput(ApiRecord):
    """An output that was damaged on disk and is gone."""

    output: OutputName
    """The output: `stdout`, `stderr` or `output`."""
    bytes: int | None
    """Its length, if it is known."""
    hash: str
    """The hash of its content, under this repository's key."""


@record(frozen=True)
class Tool(ApiRecord):
    """One recorded tool call."""

    name: str
    arguments: Any
    """Any JSON value."""
    status: CallStatus
    """Its outcome. `interrupted`: its sandbox was ended under it. `timed-out`: it took longer than its caller allowed, and
    was ended. `unknown`: it began, and its end was not recorded."""
    exit_code: int | None
    """Null for a function."""
    duration_ms: float
    started_at: str
    error: str | None
    """The error that a failed call raised."""
    outputs: tuple[OutputName, ...]
    """Outputs that were recorded. The client's `Snapshotd.output` returns them."""
    damaged: tuple[DamagedOutput, ...]
    """Outputs that were recorded, and that were damaged on disk and are gone."""


@record(frozen=True)
class ModelUseInfo(ApiRecord):
    """Model calls, and what they took as far as it was reported."""

    call_count: int
    duration_ms: float
    """Their durations added up."""
    input_tokens: int
    """Input tokens, from the provider's cache too."""
    output_tokens: int
    """Tokens that came out of model calls."""
    cached_tokens: int
    """Input tokens from the provider's cache."""
    cost_usd: float | None
    """The reported cost, in US dollars. Null: no call said what it cost."""


@record(frozen=True)
class SnapshotInfo(ApiRecord):
    """One snapshot."""

    id: str
    parent: str | None
    trajectory: str
    seq: int
    """Position in its trajectory."""
    tool: Tool
    """The call that a snapshot was taken after."""
    files: FileCounts | None
    """How its files differ from the parent's; null until the background has counted it."""
    state: Annotated[str, OneOf("captured", "stored", "lost", "pruned")]
    """captured: survives a crash of the daemon; stored: survives power loss; lost, pruned: its files are gone."""
    pause_ms: float
    """How long the sandbox stood still for the snapshot."""
    created_at: str
    tags: tuple[str, ...]
    """The names that a snapshot has."""
    method: str
    """How the snapshot was captured: pivot, copy, unchanged, build or reused."""
    messages: int
    """Length of the conversation up to it."""
    image: str
    layers: int
    """Sealed layers over the image."""
    follows: str | None
    """The snapshot whose conversation, journal and state it continues, where that is not its parent: after a rewind or an
    edit."""
    warnings: tuple[str, ...]
    """Parts of the sandbox's files that the stored ones lack, one sentence each."""
    refused: tuple[str, ...]
    """Connections that the rules of its network refused since the snapshot before (docs/network.md), one sentence each."""
    reused: str | None = None
    """The snapshot of an earlier run that its call was answered from."""
    side_effect: Annotated[str, OneOf("local", "idempotent", "irreversible")] | None = None
    """The effect of a second run of its call. Null: its call is in no journal, or the answer is not about one snapshot or a
    log."""
    sub_agent: str | None = None
    """The sub-agent that made its call: the number of its conversation behind the gateway, or what its client calls it. Null as
    `side_effect`, or where the agent itself made it."""
    model_use: ModelUseInfo | None = None
    """The model calls that came before its call and after the one before. Null as `side_effect`, or where there were none."""
    kind: Annotated[str, OneOf("call", "marker")] | None = None
    """call: of a tool of the agent, or of a command; marker: the daemon took it, for a person or on its own account (`start`,
    `edit`, `exit`, ...), and an agent's tool of the same name is a call. Null where the answer is not about one snapshot or a
    log."""
    published: bool | None = None
    """True: every node of the fleet can read it. Null as `kind`, and where the daemon is no node of a fleet."""


@record(frozen=True)
class MessageInfo(ApiRecord):
    """One entry of a conversation."""

    role: str
    """The author of a message: `user`, `assistant`, ..."""
    content: Any
    """Content of the message."""


@record(frozen=True)
class EntryInfo(ApiRecord):
    """One side of a change."""

    kind: str
    mode: str
    """Permission bits, octal text."""
    uid: int
    gid: int
    size: int


@record(frozen=True)
class ChangeInfo(ApiRecord):
    """One path that differs."""

    change: Annotated[str, OneOf("added", "changed", "deleted")]
    path: SandboxPath
    before: EntryInfo | None
    """The entry on the first side."""
    after: EntryInfo | None
    """The entry on the second side."""


@record(frozen=True)
class FileStatus(ApiRecord):
    """The entry at a path."""

    kind: str
    mode: str
    """Permission bits, octal text."""
    uid: int
    gid: int
    size: int
    target: Base64Bytes | None
    """Where a symbolic link leads, base64; null for anything else."""


@record(frozen=True)
class RestoreRequest(Request):
    to: str
    """Absolute path on the daemon's machine; must not exist or be empty."""
    path: str = ""
    """Only what lies below this path."""


@record(frozen=True)
class RestoreInfo(ApiRecord):
    """The result of a restore."""

    file_count: int
    directories: int
    bytes: int
    warnings: tuple[str, ...]
    """Everything the target could not hold, one sentence each."""


class SnapshotOptions(TypedDict, total=False):
    """The keywords by which the client takes a `SnapshotRequest`, besides `name`."""

    if_changed: bool


@record(frozen=True)
class SnapshotRequest(Request):
    name: str | None = None
    """The new snapshot's tag; not together with `if_changed`."""
    if_changed: bool = False
    """Answer with the head if no file was written since."""


class LogOptions(TypedDict, total=False):
    """The keywords by which the client takes a `LogQuery`, besides `last`."""

    before: int | None


@record(frozen=True)
class LogQuery(Request):
    last: Annotated[int, Bounds(ge=1, le=LOG_MAX)] | None = None
    before: Annotated[int, Bounds(ge=0, le=LOG_MAX)] | None = None


@record(frozen=True)
class TagRequest(Request):
    ref: str
    move: bool = False
    """Take the tag away from the snapshot that has it."""


@record(frozen=True)
class TaggedInfo(ApiRecord):
    snapshot: str
    name: str


TAKE_SNAPSHOT = Operation(
    "POST", "/trajectories/{ref}/snapshot", SnapshotInfo, RUN, "runs", body=SnapshotRequest, once=True, by="runs"
)
LOG = Operation("GET", "/trajectories/{ref}/log", list[SnapshotInfo], READ, "trajectories", query=LogQuery)
ALL_SNAPSHOTS = Operation("GET", "/snapshots", list[SnapshotInfo], READ, "snapshots", by="snapshots.all", own=True)
SNAPSHOT = Operation("GET", "/snapshots/{ref}", SnapshotInfo, READ, "snapshots")
CONVERSATION = Operation("GET", "/snapshots/{ref}/conversation", list[MessageInfo], READ, "snapshots", by="journal")
OUTPUT = Operation[Any]("GET", "/snapshots/{ref}/output/{which}", BYTES, READ, "snapshots")
CAT = Operation[Any]("GET", "/snapshots/{ref}/file", BYTES, READ, "snapshots", by="snapshots")
FILE_STATUS = Operation("GET", "/snapshots/{ref}/status", FileStatus, READ, "snapshots", by="snapshots.lstat")
RESTORE = Operation("POST", "/snapshots/{ref}/restore", RestoreInfo, ADMIN, "snapshots", body=RestoreRequest)
DIFF = Operation[Any]("GET", "/diff", LINES, READ, "snapshots")
PATCH = Operation[Any]("GET", "/patch", LINES, READ, "snapshots")
TAG = Operation("PUT", "/tags/{name}", TaggedInfo, RUN, "snapshots", body=TagRequest, once=True)
UNTAG = Operation[None]("DELETE", "/tags/{name}", None, RUN, "snapshots", by="snapshots")
