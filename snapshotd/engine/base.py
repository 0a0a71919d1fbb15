"""The words of the engine: requests to its services and their answers. The services are in `engine.py`."""

from __future__ import annotations

import base64
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from snapshotd.api.history import RewindMode
from snapshotd.catalog.base import CallFacts
from snapshotd.engine.caller import STREAMS as STREAMS
from snapshotd.engine.caller import Caller as Caller
from snapshotd.engine.caller import Stream as Stream
from snapshotd.trees.base import Change
from snapshotd.trees.base import Entry as TreeEntry
from snapshotd.trees.three_way import Item, Present, TreeConflict
from snapshotd.types import (
    Approval,
    CallID,
    CallStatus,
    ExperimentID,
    JournalEntry,
    Message,
    ModelUse,
    Network,
    Snapshot,
    SnapshotID,
    ToolCall,
    Trajectory,
    TrajectoryID,
)

T = TypeVar("T")
OutputSink = Callable[[Stream, bytes], None]
"""Receives raw output as it comes, from several threads but never two at once. May block (that slows the command
down)."""
ProgressSink = Callable[[str], None]
"""Receives one line of progress for people."""
Event = dict[str, Any]
"""One event of a run, JSON-ready. `event` is one of:

    started   trajectory, snapshot, runtime, image
    output    stream ("stdout"/"stderr"), data_b64 (raw bytes, base64); `call` where a tool call printed it, else `shown_bytes` (how many
              bytes of the program's stream are shown with this)
    snapshot  id, seq, tool, argument (the main one, as text), status, files (added, changed, deleted, bytes; None: to be counted, the
              snapshot's own record has them then), pause_ms, method; `reused`: the snapshot of an earlier run that its call was
              answered from. Comes before all that its agent does next
    warning   message; `code` (of errors.py) where it ended the run; `left_out_bytes` where so much output is not among the events
    replayed  call, tool, snapshot: answered from the journal
    live      snapshot, replayed (how many): a resumed program has reached the end of what is recorded
    approval  id, tool, status: a person is asked, or has decided
    finished  trajectory, exit_code, snapshots (how many), status; `reused` ({"calls", "of"}, with replies also "replies",
              "replies_of") if the run reuses; always last
"""


def output_event(stream: Stream, data: bytes) -> Event:
    """An event `output`."""
    return {"event": "output", "stream": stream, "data_b64": base64.b64encode(data).decode()}


@dataclass(frozen=True, slots=True)
class Opener:
    """The one who opens a user's own folder for a verb. The kernel's mounts are those of a process, and the daemon does not see what
    is mounted or unmounted after its start where `/` is a private mount."""

    folder: int | None = None
    """A descriptor of the folder, which the user has opened. None: it is opened by its path."""
    namespace_pid: int | None = 0
    """Process whose view of the files that path is meant in (the client); 0: this one; None: one that cannot be seen."""


ITSELF = Opener()


@dataclass(frozen=True, slots=True)
class ExecResult:
    """`snapshot` is None for a command in a throw-away fork."""

    exit_code: int
    snapshot: Snapshot | None
    call: ToolCall


@dataclass(frozen=True, slots=True)
class Variant:
    """One child of a fork whose children differ. Its `name` and `args` go before those of the fork, its `env` and its
    `secrets` are added to the source's. `{index}` and `{variant}` in its name, in its arguments and in the values of its
    environment become its number from 0 and its `label`. `model`: every model request through its gateway asks for this
    model. `network` and `limits` (fields of `Limits`) go before the source's."""

    label: str
    name: str | None = None
    args: tuple[str, ...] | None = None
    env: tuple[tuple[str, str], ...] = ()
    secrets: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    edit: EditRequest | None = None
    """Changes of files and mind, without an environment: the child's first own snapshot (marker `edit`)."""
    model: str | None = None
    network: Network | None = None
    limits: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Overview:
    """A trajectory as a list or a tree of all shows it. `newest`: the snapshot taken last, which is not its head after a rewind;
    `origin`: the one that it was forked from. `file_bytes`: content of the files that its snapshots added or changed;
    `layer_bytes`: disk use of their layers."""

    trajectory: Trajectory
    snapshots: int
    newest: Snapshot | None
    origin: Snapshot | None
    file_bytes: int = 0
    layer_bytes: int = 0
    model: ModelUse = field(default_factory=ModelUse)


@dataclass(frozen=True, slots=True)
class LookedAt:
    """A snapshot with what its journal entries tell, and True in `marker` if it is of no call (`engine/markers.py`).
    `published`: other nodes can read it; None: the daemon is no node of a fleet."""

    snapshot: Snapshot
    facts: CallFacts
    marker: bool
    published: bool | None = None


@dataclass(frozen=True, slots=True)
class ForkPlace:
    """The place of some children in a fork that is made piece by piece: its `experiment`, the number of their first one, and
    the number of all children."""

    experiment: ExperimentID
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Something in a tree: its path from the root (without a leading slash), what it is, and a link's target."""

    path: bytes
    entry: TreeEntry
    target: bytes | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """The effect of a write, and its snapshot. `warnings` names what was left out of an archive."""

    snapshot: Snapshot
    files: int = 1
    directories: int = 0
    bytes: int = 0
    warnings: tuple[str, ...] = ()

    @classmethod
    def told_by(cls, snapshot: Snapshot) -> Written:
        """The effect of the write that a snapshot was taken after, as its call tells it."""
        told = snapshot.call.arguments
        counts = (told.get("files", 1), told.get("directories", 0), told["bytes"])
        return cls(snapshot, *counts, tuple(told.get("warnings", ())))


@dataclass(frozen=True, slots=True)
class Forked:
    """`warnings`: a sentence for each service that did not come back."""

    experiment: ExperimentID
    trajectories: tuple[Trajectory, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A live sandbox, for `ps`."""

    trajectory: Trajectory
    container: str
    pid: int
    started_at_ns: int
    agent_running: bool


@dataclass(frozen=True, slots=True)
class Effect:
    """An irreversible call that a rewind, fork or retry leaves behind: it cannot be taken back, at most compensated.
    `status` None: cut off. `compensation`: its registered command; `compensated`: its outcome (None: not run; UNKNOWN:
    it began, and its end was not recorded)."""

    trajectory: TrajectoryID
    entry: JournalEntry
    compensation: tuple[str, ...] | None
    compensated: CallStatus | None


@dataclass(frozen=True, slots=True)
class RewindPreview:
    """The effect of a rewind, before it runs. `files`: at most as many changes as the caller asked for, `file_count`:
    the number of all changes; `messages`: the messages that the rewind removes; `effects`: newest first; `left`: in a
    user's own folder, a sentence for each path that stays though an agent has changed it since."""

    head: SnapshotID
    target: SnapshotID
    mode: RewindMode
    files: tuple[Change, ...]
    file_count: int
    messages: tuple[Message, ...]
    effects: tuple[Effect, ...]
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FileEdit:
    """`content` None: remove the path. `mode` None: the present file's mode, or 0644."""

    path: bytes
    content: bytes | None
    mode: int | None = None


@dataclass(frozen=True, slots=True)
class Merged:
    """The effect of a merge. `items` are the changes to `head`; with `conflicts` nothing was merged. `same`: changes that
    the head had already. `snapshot`: None where nothing was merged."""

    source: SnapshotID
    head: SnapshotID
    base: SnapshotID
    dry_run: bool
    items: tuple[Item[Present], ...]
    conflicts: tuple[TreeConflict, ...]
    same: int
    warnings: tuple[str, ...]
    snapshot: Snapshot | None


@dataclass(frozen=True, slots=True)
class EditRequest:
    """The differences between the new snapshot and its source. `messages`: whole conversation in place of the old one
    (None: as it is); `drop_messages`: how many to leave out at its end; `add_messages`: to append. `result`: a
    one-element tuple, another result of its tool call. `state`: keys to set (a value of None removes one). `env`: to
    set for all commands and the agent."""

    files: tuple[FileEdit, ...] = ()
    messages: tuple[Message, ...] | None = None
    drop_messages: int = 0
    add_messages: tuple[Message, ...] = ()
    result: tuple[Any] | None = None
    state: tuple[tuple[str, Any], ...] = ()
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ApprovalView:
    """An approval, with the facts that a person needs for a decision: the files that changed since the trajectory's
    last approval (or its beginning)."""

    approval: Approval
    trajectory: Trajectory
    files: tuple[Change, ...]
    since: SnapshotID | None


@dataclass(frozen=True, slots=True)
class Imported:
    trajectories: tuple[Trajectory, ...]
    snapshots: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Connection:
    """A TCP connection to a server inside a sandbox. Its owner calls `close` once, which closes `socket`."""

    socket: socket.socket
    close: Callable[[], None]


@dataclass(frozen=True, slots=True)
class CommandInfo:
    """A command in the background, or one that a client has in the foreground and that runs. Its id is that of the call in
    the snapshot that it ends with. `status`: None while it runs. `snapshot`: None while it runs, if none could be taken,
    and for a service (engine/runs/services/starts.py)."""

    id: CallID
    trajectory: TrajectoryID
    argv: tuple[str, ...]
    cwd: str
    began_at_ns: int
    stdin: bool = False
    timeout_s: float | None = None
    status: CallStatus | None = None
    exit_code: int | None = None
    ended_at_ns: int | None = None
    snapshot: SnapshotID | None = None
    error: str | None = None
    background: bool = True
    service: str | None = None
    port: int | None = None
    restarts: int = 0
    ready: bool = False

    @property
    def running(self) -> bool:
        return self.status is None

    @property
    def service_state(self) -> str | None:
        """As in the API."""
        if self.service is None:
            return None
        if self.status is None:
            return "ready" if self.ready else "starting"
        return {CallStatus.DONE: "ended", CallStatus.INTERRUPTED: "stopped"}.get(self.status, "failed")
