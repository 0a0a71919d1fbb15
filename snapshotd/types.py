"""Ids and records shared by two or more packages. Values only: nothing here reads or writes anything.

Times are integers in nanoseconds since the epoch (`*_at_ns`) or durations (`*_ns`); sizes are bytes.
Paths inside a sandbox are `bytes`, relative to the sandbox's root, without a leading slash (b"workspace/a.py").
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NewType

from snapshotd.network import Network as Network
from snapshotd.terms import DEFAULT_TENANT as DEFAULT_TENANT
from snapshotd.terms import ID_FORM as ID_FORM
from snapshotd.terms import KNOWN_NAME_PATTERN as KNOWN_NAME_PATTERN
from snapshotd.terms import NAME_PATTERN as NAME_PATTERN
from snapshotd.terms import NO_ISOLATION as NO_ISOLATION
from snapshotd.terms import SECONDS as SECONDS
from snapshotd.terms import SECONDS_MOST as SECONDS_MOST
from snapshotd.terms import SHORT_ID_CHARS as SHORT_ID_CHARS
from snapshotd.terms import duration as duration
from snapshotd.terms import short as short

SnapshotID = NewType("SnapshotID", str)
TrajectoryID = NewType("TrajectoryID", str)
ExperimentID = NewType("ExperimentID", str)
LayerID = NewType("LayerID", str)
ImageID = NewType("ImageID", str)
ContainerID = NewType("ContainerID", str)
CallID = NewType("CallID", str)
BlobID = NewType("BlobID", str)
TreeID = NewType("TreeID", str)
RecordID = NewType("RecordID", str)
ApprovalID = NewType("ApprovalID", str)

ID_HEX_CHARS = 32
"""Length of every id: 128 random bits in lower-case hexadecimal."""
MIN_PREFIX_CHARS = 4
"""Fewest characters of an id that can stand for it."""

FOLDER = "folder"
"""The runtime of a trajectory that is a folder of this machine: no sandbox runs in it."""

SNAPSHOT_NOW = "snapshot"
"""Name of the marker of a snapshot that a person has taken between calls."""
DURING = "during"
"""Argument of that marker: the tool calls of the agent that had begun and not ended."""


@dataclass(frozen=True, slots=True)
class RequestKey:
    """The idempotency key of a request. `digest`: of the request without the key, so that another one under the same key is
    seen. `at_ns`: when it came. `earlier`: digests that earlier versions made of it."""

    key: str
    digest: str
    at_ns: int
    earlier: tuple[str, ...] = ()


def new_id() -> str:
    """128 random bits as 32 hexadecimal characters."""
    return secrets.token_hex(ID_HEX_CHARS // 2)


class Kind(StrEnum):
    """The kind of a directory entry."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    FIFO = "fifo"
    SOCKET = "socket"
    CHAR_DEVICE = "char-device"
    BLOCK_DEVICE = "block-device"


class CallStatus(StrEnum):
    """The one terminal outcome of a tool call. `interrupted`: its sandbox was ended under it. `timed-out`: it took
    longer than its caller allowed, and was ended. `unknown`: it began, and its end was not recorded."""

    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    TIMED_OUT = "timed-out"
    UNKNOWN = "unknown"


class SideEffect(StrEnum):
    """The effect of running a tool a second time. `local`: only files, which are rolled back with it; `idempotent`:
    none, under the same key; `irreversible`: it happens twice."""

    LOCAL = "local"
    IDEMPOTENT = "idempotent"
    IRREVERSIBLE = "irreversible"


class EntryKind(StrEnum):
    """The event that a journal entry records: a tool call, a model call, a question to a person, a task's end, a named
    snapshot."""

    TOOL = "tool"
    MODEL = "model"
    QUESTION = "question"
    TASK = "task"
    CHECKPOINT = "checkpoint"


class ApprovalStatus(StrEnum):
    """`pending` is the only one that changes. `stale`: it no longer fits the call (arguments or files changed)."""

    PENDING = "pending"
    APPROVED = "approved"
    DENIED = "denied"
    EXPIRED = "expired"
    STALE = "stale"


class SnapshotState(StrEnum):
    """Durability of a snapshot: survives a daemon crash; survives power loss; known to be gone (with the power, or
    damaged on disk); or its files were given up by a retention policy (call and conversation are still there)."""

    CAPTURED = "captured"
    STORED = "stored"
    LOST = "lost"
    PRUNED = "pruned"


class TrajectoryStatus(StrEnum):
    """`running`: its sandbox is up. `stopped`: no sandbox, goes on from its head. `finished`/`failed`: its agent ended.

    `interrupted`: its sandbox went away without a request (crash of daemon or machine).
    """

    RUNNING = "running"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class IdMap:
    """A contiguous user namespace map: container ids 0..count-1 are host ids base..base+count-1."""

    base: int
    count: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one sandbox. `memory_bytes` counts swap too; `cpus` is in whole processors (0.5 = half of
    one). `disk_bytes`: limit of all its layers above the image together; 0: half of the file system that holds the
    layers."""

    memory_bytes: int = 2 << 30
    cpus: float = 2.0
    pids: int = 1024
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """Everything that decides a sandbox's container. Equal specs can share a warm container."""

    image: ImageID
    runtime: str
    network: Network = Network.NONE
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """The program a trajectory runs: `argv` inside the sandbox, its working directory and extra environment.

    `program` is how many leading items of `argv` are the program itself; the rest are arguments that a fork may
    replace.
    """

    argv: tuple[str, ...]
    program: int
    cwd: str = "/workspace"
    env: tuple[tuple[str, str], ...] = ()
    user: str | None = None
    """The user that runs it, as `USER[:GROUP]` in the sandbox; None: root."""


@dataclass(frozen=True, slots=True)
class Stack:
    """The layers of a snapshot's root: sealed layers, newest first, over an image's root."""

    image: ImageID
    layers: tuple[LayerID, ...] = ()

    def push(self, layer: LayerID) -> Stack:
        return Stack(self.image, (layer, *self.layers))


@dataclass(frozen=True, slots=True)
class FileChanges:
    """The differences between a snapshot's files and its parent's. `bytes` is the content size of added and changed
    regular files."""

    added: int = 0
    changed: int = 0
    deleted: int = 0
    bytes: int = 0


OutputKind = Literal["output", "stderr", "stdout"]


@dataclass(frozen=True, slots=True)
class DamagedOutput:
    """An output whose bytes a repair gave up: which of the three, its id, which is a hash of its content, its length
    (None: unknown)."""

    which: OutputKind
    hash: BlobID
    bytes: int | None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One recorded call. `arguments` is any JSON value; outputs live in the repository under their blob ids. `damaged`:
    outputs that it had and that are gone, by name."""

    id: CallID
    name: str
    arguments: Any
    status: CallStatus
    started_at_ns: int
    duration_ns: int
    exit_code: int | None = None
    error: str | None = None
    output: BlobID | None = None
    stdout: BlobID | None = None
    stderr: BlobID | None = None
    damaged: tuple[DamagedOutput, ...] = ()

    def damage_of(self, which: OutputKind) -> DamagedOutput | None:
        """The output, if it is damaged for good."""
        return next((one for one in self.damaged if one.which == which), None)

    @property
    def outputs(self) -> tuple[BlobID, ...]:
        """The outputs that the call has, at most three."""
        return tuple(blob for blob in (self.output, self.stdout, self.stderr) if blob is not None)


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a conversation: `role` is free text (system, user, assistant, tool), `content` any JSON value."""

    role: str
    content: Any


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One entry of a journal: an intent, durable before it is carried out, and its one outcome.

    `status` None: its end is not recorded (yet). UNKNOWN: it was cut off; a replay passes over it. A TOOL, TASK or
    CHECKPOINT entry ends with a snapshot of its own, whose call has the outputs; `result` holds answers from outside (a
    model's reply, a decision), and the result that a person gave for a cut-off call. `facts`: recorded values (`now`,
    `random`, `uuid`) that the program requested since the entry before. `details`: JSON of the kind: usage and cost of
    a model call, `compensate`, `task`, ... `after`: the head when it began. `snapshot`: the one that binds it; None
    while none does.
    """

    id: CallID
    kind: EntryKind
    name: str
    arguments: Any
    after: SnapshotID
    began_at_ns: int
    side_effect: SideEffect = SideEffect.LOCAL
    key: str | None = None
    """The idempotency key, the same at every attempt."""
    status: CallStatus | None = None
    ended_at_ns: int | None = None
    result: Any = None
    error: str | None = None
    facts: tuple[Any, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)
    snapshot: SnapshotID | None = None
    number: int = field(default=0, compare=False)
    """Its place among the entries of its line, in the order in which they began: the catalog gives it."""


@dataclass(frozen=True, slots=True)
class ModelUse:
    """The model calls of a snapshot, or of all snapshots of a trajectory: their number, their durations added up, and what
    they took as far as it was reported. `cost_usd`: None if no call said what it cost."""

    calls: int = 0
    duration_ns: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The outcome of a journal entry. See `JournalEntry`."""

    id: CallID
    status: CallStatus
    at_ns: int
    result: Any = None
    error: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    """Added to the details of its beginning."""


@dataclass(frozen=True, slots=True)
class Approval:
    """A question that a person has to decide, bound to (tool, arguments digest, snapshot); it does not cross a fork.

    `entry` is the call that waits. `digest`: SHA-256 of the canonical JSON of [tool, arguments], hexadecimal; of [tool,
    [entry, arguments]] for a call from outside of the sandbox (`ApprovalService.ask`), which is bound to no files. `edited`: other
    arguments that the approver put in their place, as a one-element tuple; None: as asked.
    """

    id: ApprovalID
    trajectory: TrajectoryID
    entry: CallID
    tool: str
    arguments: Any
    digest: str
    snapshot: SnapshotID
    side_effect: SideEffect
    created_at_ns: int
    question: str | None = None
    status: ApprovalStatus = ApprovalStatus.PENDING
    expires_at_ns: int | None = None
    decided_at_ns: int | None = None
    by: str | None = None
    reason: str | None = None
    edited: tuple[Any] | None = None


@dataclass(frozen=True, slots=True)
class Compensation:
    """The one compensation of an irreversible call: recorded before it runs, at most once. `status` None: it began, and
    its end is not recorded."""

    entry: CallID
    trajectory: TrajectoryID
    status: CallStatus | None
    began_at_ns: int
    ended_at_ns: int | None = None
    exit_code: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StoredValue:
    """One version of a value of the key-value store. `value` None and `deleted`: the version is a deletion."""

    tenant: str
    namespace: str
    key: str
    version: int
    """From 1, never used again for the same key."""
    value: Any
    created_at_ns: int
    expires_at_ns: int | None = None
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Immutable. Binds one tree (as a stack), one conversation head (`messages` entries long) and one tool call."""

    id: SnapshotID
    parent: SnapshotID | None
    trajectory: TrajectoryID
    seq: int
    stack: Stack
    call: ToolCall
    messages: int
    state: SnapshotState
    pause_ns: int
    created_at_ns: int
    method: str = "pivot"
    """The way it was captured: `pivot`, `copy` (live processes), `unchanged` (shares its parent's stack), `build`, or
    `reused` (has the files of another trajectory's snapshot)."""
    files: FileChanges | None = None
    """None until the background count is done."""
    tags: tuple[str, ...] = ()
    base: SnapshotID | None = None
    """The origin of its tree: the tree of `base` (None: of the image) with the first `own_layers` layers of the stack
    applied, the last of them first. The archive needs this, because the rest of the stack may have been merged, and
    need not exist."""
    own_layers: int = 0
    tree: TreeID | None = None
    """Its files in the repository. None unless `stored`."""
    follows: SnapshotID | None = None
    """The snapshot whose conversation, journal and state it continues, if that is not its parent. After a rewind of the
    conversation, it is the target of the rewind; for an edited snapshot, it is the one before the original."""
    warnings: tuple[str, ...] = ()
    """Parts of the sandbox's files that the stored ones lack, one sentence each."""
    refused: tuple[str, ...] = ()
    """Connections that the rules of its network refused since the snapshot before, one sentence each
    (egress/way_out.py has their bound)."""
    reused: SnapshotID | None = None
    """The snapshot of an earlier run that its call was answered from, if its method is `reused`. It need not be there
    any more."""

    @property
    def continues(self) -> SnapshotID | None:
        """The snapshot whose conversation, journal and state it continues."""
        return self.follows or self.parent


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The line of snapshots that one run produces. `forked_from` is the snapshot it began at, if it is a fork."""

    id: TrajectoryID
    name: str | None
    spec: SandboxSpec
    agent: AgentSpec | None
    head: SnapshotID
    status: TrajectoryStatus
    created_at_ns: int
    forked_from: SnapshotID | None = None
    experiment: ExperimentID | None = None
    exit_code: int | None = None
    env: tuple[tuple[str, str], ...] = field(default=())
    began: SnapshotID | None = None
    """The snapshot at which its program was started from the top: where a replay begins. None: no program was."""

    @property
    def shown_name(self) -> str:
        """Its name, or its short id if it has none, as commands take it."""
        return self.name or short(self.id)


@dataclass(frozen=True, slots=True)
class Image:
    """A root file system that sandboxes start from. Its files lie in `images/<id>/root` of the layer directory.

    `env` and `workdir` are defaults for commands; nothing else of a foreign image's configuration is used.
    `source` says where it came from, for people ("recipe default", "docker debian:12", "tar /x/y.tar").
    `source_id` identifies that source's content (a Docker image id, a recipe's digest), so that it is taken only once.
    """

    id: ImageID
    name: str
    source: str
    source_id: str
    bytes: int
    files: int
    created_at_ns: int
    env: tuple[tuple[str, str], ...] = ()
    workdir: str = "/workspace"
    tree: TreeID | None = None
    """Its files in the repository. None until it is stored, which happens with the first snapshot over it."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """Variants run from `snapshot`, which may be gone by now. `ended` says why no other branch begins; None while some
    may. `digest` is that of its description. `description` is JSON in the words of its driver; None: it came from an
    earlier version, and takes the next one that is given."""

    id: ExperimentID
    name: str
    snapshot: SnapshotID
    began_at_ns: int
    digest: str
    description: Any
    ended: str | None = None
