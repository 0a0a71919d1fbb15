"""The specification of the engine: its requests, its answers and `Engine` itself.

The daemon's API is a thin skin over `Engine`; the CLI and the client say the same words over HTTP.
`ref` is a user's name for a thing: a tag, a name, or a unique prefix of an id. Snapshot refs accept trajectories (their
head).

Errors: the classes of `errors.py`; every method may raise NotFound/Ambiguous for a ref. Nothing has changed when a
method raises, unless it says so.
Concurrency: every method may be called from any thread.
"""

from __future__ import annotations

import base64
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from snapshotd.api.commands import BackgroundRequest, CommandFields, ExecRequest
from snapshotd.api.storage import CheckInfo, Policy, PruneInfo, RepairInfo, UsageInfo
from snapshotd.api.trajectories import ForkPlace
from snapshotd.engine.caller import Caller as Caller
from snapshotd.engine.caller import Stream as Stream
from snapshotd.kernel.identity import HostUser
from snapshotd.trees.base import Change, RestoreReport
from snapshotd.trees.base import Entry as TreeEntry
from snapshotd.types import (
    DEFAULT_TENANT,
    Approval,
    ApprovalStatus,
    CallID,
    CallStatus,
    ExperimentID,
    Image,
    JournalEntry,
    Limits,
    Message,
    Network,
    RequestKey,
    SideEffect,
    Snapshot,
    SnapshotID,
    StoredValue,
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
ProviderKind = Literal["openai", "anthropic", "gemini"]


@dataclass(frozen=True, slots=True)
class Provider:
    """The provider to which the gateway forwards requests of one API. `api_key` stays in the daemon, encrypted at
    rest."""

    kind: ProviderKind
    base_url: str
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class SandboxRequest:
    """The request for a new sandbox. `workspace` is a host folder whose content is copied to /workspace."""

    image: str = "default"
    runtime: str = "auto"
    workspace: Path | None = None
    namespace_pid: int = 0
    """Process whose view of the files the host paths of a request are meant in (the client); 0: the daemon."""
    env: tuple[tuple[str, str], ...] = ()
    network: Network | None = None
    """None: none, or the machine's own where there is no isolation."""
    limits: Limits | None = None
    """None: the default ones, where limits can be kept."""
    name: str | None = None
    secrets: tuple[tuple[str, str], ...] = ()
    """Environment like `env`, whose values are recorded nowhere in plain."""
    providers: tuple[Provider, ...] = ()
    """Model providers that the recording gateway forwards to; none: no gateway."""
    capture_tokens: bool = False
    """The gateway asks for token ids and log probabilities, and keeps them with the model calls."""
    tenant: str = DEFAULT_TENANT
    """Tenant of the key-value store that the sandbox's agents, and the agents of its forks, read and write."""
    idle_timeout_s: float = 0.0
    """Seconds without a command, and with the same head, after which the sandbox ends, with a last snapshot. 0: never.
    A sandbox in which an agent runs is not idle."""
    requirements: Path | None = None
    """Host file with Python packages that its programs find."""
    program: Path | None = None
    """Host folder with an agent's program, which the sandbox has at /opt/agent-program, below the workspace's layer."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Run an agent: either `agent` (a Python file on the host, with `args`) or `command` (argv inside the sandbox)."""

    sandbox: SandboxRequest
    agent: Path | None = None
    args: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    user: str | None = None
    """The user that runs it in the sandbox, as `USER[:GROUP]`; None: root."""
    reuse: bool = False
    """Answer its tool calls from earlier runs that began in the same way, as long as it does the same."""
    reuse_replies: bool = False
    """Answer its model requests from them, too."""


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
    secrets: tuple[tuple[str, str], ...] = ()
    edit: EditRequest | None = None
    """Changes of files and mind, without an environment: the child's first own snapshot (marker `edit`)."""
    model: str | None = None
    network: Network | None = None
    limits: tuple[tuple[str, Any], ...] = ()


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
    experiment: ExperimentID
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A live sandbox, for `ps`."""

    trajectory: Trajectory
    container: str
    pid: int
    started_at_ns: int
    agent_running: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """A person's answer about a call whose outcome is unknown. `call`: its id, or a unique prefix. `retry`: run it
    again; `skip`: go on as if it had returned null; `result`: it happened, and this is its result."""

    call: str
    action: Literal["retry", "skip", "result"]
    result: Any = None


ExportForm = Literal["bundle", "oci", "tar", "atif", "jsonl"]
"""A bundle, an image, a plain tree; the last two hold what was said and done, and no files."""
RewindMode = Literal["files", "conversation", "both"]
"""`conversation` stands for the whole of the agent's mind: conversation, journal and state."""


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
class MergeRequest:
    """The changes to the head `head` of a trajectory. Paths of `take` become as they are in the merged snapshot, with all
    metadata (a directory without its content); those of `delete` go with all that is in them; `edits` are files that get
    a content, `modes` permissions. `base` is for the record."""

    head: SnapshotID
    base: SnapshotID
    take: tuple[bytes, ...] = ()
    delete: tuple[bytes, ...] = ()
    edits: tuple[FileEdit, ...] = ()
    modes: tuple[tuple[bytes, int], ...] = ()

    @property
    def paths(self) -> int:
        """Number of paths that it changes."""
        return len({*self.take, *self.delete, *(edit.path for edit in self.edits), *(path for path, _ in self.modes)})


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
class Task:
    """A subtask of an agent. `status`: pending, in-progress, completed, failed, skipped. `began`: the snapshot before
    its first call."""

    name: str
    status: str
    depends: tuple[str, ...]
    note: str | None
    began: SnapshotID | None
    ended: SnapshotID | None


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
    the snapshot that it ends with. `status`: None while it runs. `snapshot`: None while it runs, and if none could be
    taken."""

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

    @property
    def running(self) -> bool:
        return self.status is None


class Asking(ABC):
    """A request, as long as its client waits for the answer."""

    @abstractmethod
    def once(self, make: Callable[[], T], recall: Callable[[tuple[str, ...]], T], *, recall_only: bool = False) -> T:
        """The answer: of `make`, or if an earlier request under the key has made it, of `recall`, which gets the ids of
        what was made. Waits while another one under the key is at work. The work of `make` and the key become durable
        together; a key whose request failed is free again. Conflict: the key is another request's. With `recall_only`
        NotFound if nothing was made. A request without a key is made."""

    @abstractmethod
    def asked_again(self) -> bool:
        """True if the client, which went away before the answer, has asked again under its key. Waits some seconds for
        that."""


class Engine(ABC):
    @abstractmethod
    def asking(self, request: RequestKey | None) -> AbstractContextManager[Asking]:
        """For the time of a request; `request`: its key, if it has one. The verbs that are called in `Asking.once` belong
        to it."""

    # -- sandboxes and runs --------------------------------------------------------------------------------------------

    @abstractmethod
    def create(self, request: SandboxRequest) -> tuple[Trajectory, Snapshot]:
        """A sandbox without an agent, running, with its first snapshot."""

    @abstractmethod
    def run(self, request: RunRequest) -> Trajectory:
        """Start an agent and return; `events` follows it."""

    @abstractmethod
    def events(self, ref: str, *, follow: bool) -> Iterator[Event]:
        """The events of a trajectory's run from its beginning. With `follow`, waits for more until `finished`."""

    @abstractmethod
    def exec(self, ref: str, request: ExecRequest, *, sink: OutputSink, caller: Caller | None = None) -> ExecResult:
        """Run a command as a tool call in a trajectory's sandbox (started from its head if it is stopped) and take the
        snapshot. CommandNotFound and CommandNotRunnable leave no snapshot. A command whose sandbox is ended under it
        (`stop`, or its program's end) is killed and recorded as interrupted, with what it has printed and written. With
        `if_head`, Conflict (naming the head) when the head is another one, before the command runs: if several
        writers saw one head, one wins. The command goes on when the `caller` is gone. After `timeout_s` seconds the
        command is ended with everything that it started, and recorded as timed-out with exit code 124.
        `idle_timeout_s`: as in `SandboxRequest`, for the sandbox from now on; None: as it is, or the daemon's default
        if it was started again."""

    @abstractmethod
    def exec_snapshot(
        self, ref: str, request: CommandFields, *, sink: OutputSink, caller: Caller | None = None
    ) -> ExecResult:
        """Run a command in a throw-away fork of a snapshot; nothing of it is kept. It ends when the `caller` is
        gone, or after `timeout_s` seconds, as in `exec`."""

    @abstractmethod
    def exec_in_background(self, ref: str, request: BackgroundRequest) -> CommandInfo:
        """Start a command as `exec` does and return at once. Steps go on beside it; its own snapshot is taken when it
        ends. It needs no client, and goes on at the next daemon. `stop`, a rewind and the end of its sandbox's program
        end it as `interrupted`. LimitExceeded: too many run in the sandbox. With `stdin` its standard input is what
        `write_command` writes, otherwise empty."""

    @abstractmethod
    def commands(self, ref: str) -> list[CommandInfo]:
        """A trajectory's commands that run, also those in the foreground whose client has gone away, and the newest
        background commands that have ended."""

    @abstractmethod
    def command(self, ref: str, command: str) -> CommandInfo:
        """One of them, by a unique prefix of its id. NotFound, Ambiguous; so do all that take `command`."""

    @abstractmethod
    def command_events(self, ref: str, command: str, *, follow: bool) -> Iterator[Event]:
        """The events of a command from its beginning: `started`, `output`, `finished` (with `status`, `exit_code`,
        `snapshot`). With `follow`, waits for more until `finished`. UsageError: it runs in the foreground, so its client
        has its input and output; `write_command` alike."""

    @abstractmethod
    def signal_command(self, ref: str, command: str, number: int) -> CommandInfo:
        """Send a signal to a command's process group; SIGKILL, to all that it started. Conflict: it has ended."""

    @abstractmethod
    def write_command(self, ref: str, command: str, data: bytes, *, end: bool) -> int:
        """Write to a command's standard input, and with `end` close it behind the data. Returns the number of bytes that
        the command took within some seconds; its input is closed only if that is all. UsageError: it has no input;
        Conflict: it has ended, or its input has."""

    @abstractmethod
    def take_snapshot(self, ref: str, *, name: str | None = None, if_changed: bool = False) -> Snapshot:
        """Take a snapshot of a running sandbox as it is now, with `name` as its tag: a marker `snapshot` without a call. Processes
        in it run on. In the middle of tool calls of its program it names them (`during`); a program that is resumed from
        there makes such a call again on the files from before the call. With `if_changed`, no snapshot is taken if no file
        was written since the head, which is then the answer; where something was alive at the head, one may be taken all
        the same. Conflict: the trajectory does not run, its program is being replayed, or the name is taken; UsageError:
        `name` and `if_changed` exclude each other."""

    @abstractmethod
    def connect(self, ref: str, port: int, ended: Callable[[], object]) -> Connection:
        """Connect to a TCP server on a port of a sandbox's loopback, whatever its network; nothing else can be reached.
        `ended` is called, from any thread, when the sandbox ends before the connection is closed; it returns at once.
        Conflict: the trajectory is not running (it is not started), or nothing listens there; SandboxFailed: the server
        takes no connection. The caller waits up to 10 s."""

    @abstractmethod
    def fork(
        self,
        ref: str,
        n: int,
        *,
        args: tuple[str, ...] | None,
        name: str | None,
        resume: bool = False,
        variants: tuple[Variant, ...] = (),
        idle_timeout_s: float | None = None,
        part: ForkPlace | None = None,
    ) -> Forked:
        """`n` (1..256) new trajectories from one snapshot, each with a running sandbox, all or none. With `args`, the
        trajectory's program (or, where it has none, `args` as a command) is started in each; `{index}` in an argument
        is the fork's number from 0. With `resume` the program (with `args`, if given) is replayed up to the snapshot
        and goes on from there; if it leaves the recorded path, it goes on live from the last snapshot that matched.
        With `variants` there is one child for each, and `n` is their number. Several children are called NAME-0,
        NAME-1, ..., or by the labels of their variants, unless `{index}` or `{variant}` in the name tells them apart.
        `idle_timeout_s`: as in `SandboxRequest`; None: the daemon's default. `part`: these are some of more children.
        With `resume`, the program of a child with an `edit` may not leave the recorded path before the snapshot: its run
        is interrupted then, as one that `resume` starts. UsageError: there is no program to resume, two variants have
        one label or name, an edit cannot be made, or a model is named where there is no gateway."""

    @abstractmethod
    def resume(self, ref: str, *, decisions: tuple[Decision, ...] = ()) -> Trajectory:
        """Go on with a trajectory whose program is not running: start it again from the top, replay the journal up to
        the head, and let it run on. Returns when it is started; `events` follows it. Conflict: it runs, or has
        finished; UsageError: it has no program; Undecided: the outcome of irreversible calls is unknown and `decisions`
        does not say (the message names each)."""

    @abstractmethod
    def rewind(
        self,
        ref: str,
        to: str,
        *,
        mode: RewindMode = "both",
        compensate: bool = False,
        session: str | None = None,
        opener: Opener = ITSELF,
    ) -> Snapshot:
        """Go back to snapshot `to`, in place: the rewind is recorded as a new snapshot, nothing is destroyed, and
        `undo` takes it back. Commands in the background are ended, as `interrupted`; changes since the head are captured
        first. With `compensate` the registered compensations
        of the irreversible calls that are left behind run before the rewind, newest first, each at most once. Conflict
        while a process other than init lives in the sandbox, or `to` is not of this trajectory's history;
        SandboxFailed: a compensation failed (what ran stays recorded, nothing was rewound).

        In a user's own folder a path is changed only if all changes since are an agent's, and what is there is what they
        left; the others are named (`left` in the call's arguments). `session`: take the changes of this session of the
        agent back alone, and of those that it continues ("all": of all). Conflict: it is None, and several have changed
        files since; NotFound: it has changed none; UsageError: the trajectory is no folder's. `opener`: who opens that
        folder. NotFound: there is none at its path; Conflict: another one is there; Unsupported: the opener cannot be
        seen."""

    @abstractmethod
    def preview_rewind(
        self,
        ref: str,
        to: str,
        *,
        mode: RewindMode = "both",
        max_files: int = 1000,
        session: str | None = None,
        opener: Opener = ITSELF,
    ) -> RewindPreview:
        """Returns the effect that `rewind` would have; changes nothing."""

    @abstractmethod
    def undo(self, ref: str, *, opener: Opener = ITSELF) -> Snapshot:
        """Take the last rewind (or promotion, or undo) of a trajectory back, files and mind, in place; recorded as a new snapshot.
        Conflict: its head is no rewind (steps were taken since), or as `rewind`."""

    @abstractmethod
    def promote(
        self, ref: str, *, into: str | None = None, leave_behind: bool = False, compensate: bool = False
    ) -> Snapshot:
        """Make a fork's head the head of the trajectory that it was forked from (`into`: of one further up), files and
        mind, in place; recorded as a new snapshot of that trajectory, and `undo` takes it back. Its program, arguments
        and environment stay its own; the fork stays as it is. Conflict: it is no fork of it, or took no step; something
        runs in either sandbox; the trajectory took steps since the fork, unless `leave_behind` or `compensate`, which
        runs compensations first, as `rewind` does. LimitExceeded: the mind is too large to be copied."""

    @abstractmethod
    def merge(self, ref: str, source: str, request: MergeRequest) -> Snapshot:
        """Change files of a trajectory, in place, to what they are in the snapshot `source` or to what the request says;
        all in one step, which is recorded as a new snapshot, and `undo` takes it back. The mind goes on. Conflict: the
        trajectory's head is another than the request's, or as `rewind`; NotFound: a path is not in the snapshot."""

    @abstractmethod
    def edit(self, ref: str, request: EditRequest, *, name: str | None = None, resume: bool = False) -> Trajectory:
        """A new trajectory whose first snapshot is that one, edited; with `resume` its program goes on from there.
        UsageError: an edit that cannot be made (the message says which)."""

    @abstractmethod
    def retry(self, ref: str, task: str, *, compensate: bool = True, resume: bool = True) -> Snapshot:
        """Go back to before a task began (files and mind), compensate what it did, and with `resume` let the program go
        on from there. Tasks that completed after it and do not depend on it stay completed, with their files. NotFound:
        no such task."""

    @abstractmethod
    def effects(self, ref: str) -> list[Effect]:
        """The irreversible calls of a trajectory that its present history does not hold: left behind by rewinds. Newest
        first."""

    @abstractmethod
    def compensate(self, ref: str, calls: tuple[str, ...]) -> list[Effect]:
        """Run the compensations of calls that were left behind (all, if none is named), newest first, each at most
        once."""

    @abstractmethod
    def stop(self, ref: str, *, discard: bool = False) -> Trajectory:
        """Cut off the commands that `exec` runs in it, take a last snapshot if anything changed, and end the sandbox.
        Not an error when it is not running. With `discard` there is no last snapshot, and what changed since the head is
        lost. OutOfSpace: there is no room for the snapshot; the sandbox goes on."""

    @abstractmethod
    def remove(self, ref: str, *, force: bool) -> None:
        """Forget a trajectory and free what only it used. Conflict when it runs (unless `force`) or has forks;
        UsageError: `ref` is a tag or a snapshot."""

    # -- looking -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def trajectories(self) -> list[Trajectory]: ...

    @abstractmethod
    def sandboxes(self) -> list[SandboxInfo]: ...

    @abstractmethod
    def trajectory(self, ref: str) -> Trajectory: ...

    @abstractmethod
    def snapshot(self, ref: str) -> Snapshot: ...

    @abstractmethod
    def log(self, ref: str, last: int | None = None) -> list[Snapshot]:
        """A trajectory's own snapshots, oldest first; with `last`, only this number of the newest. Here and in
        `snapshot`, `files` is None until a background thread has counted the changes; no call waits for that."""

    @abstractmethod
    def all_snapshots(self) -> list[Snapshot]: ...

    @abstractmethod
    def journal(self, ref: str) -> Iterable[JournalEntry]:
        """The journal up to a snapshot (of a trajectory: with the entries that its head does not bind yet), from the
        program's beginning, with the results of calls. A result that is longer than 1 MiB, or damaged, is None."""

    @abstractmethod
    def state(self, ref: str) -> dict[str, Any]:
        """The agent's own JSON state as it was saved with a snapshot."""

    @abstractmethod
    def tasks(self, ref: str) -> list[Task]:
        """The subtasks as they were at a snapshot, in the order in which they were declared."""

    @abstractmethod
    def conversation(self, ref: str) -> list[Message]: ...

    @abstractmethod
    def output(self, ref: str, which: Literal["stdout", "stderr", "output"]) -> Iterator[bytes]:
        """A tool call's recorded output in pieces; empty if it has none. DataLoss: it is damaged, or a repair gave it
        up."""

    @abstractmethod
    def diff(self, a: str, b: str | None) -> Iterator[Change]:
        """From `a` to `b`; with one ref, from its parent to it."""

    @abstractmethod
    def patch(self, a: str, b: str | None, *, root: bytes, write: Callable[[bytes], object]) -> int:
        """Write the changes below `root` (b"workspace") as a patch with paths relative to it. Returns how many lie
        outside of it."""

    @abstractmethod
    def cat(self, ref: str, path: bytes) -> Iterator[bytes]:
        """A regular file's content in pieces. NotFound (naming the path); UsageError for anything that is not a regular
        file."""

    @abstractmethod
    def lstat(self, ref: str, path: bytes) -> tuple[TreeEntry, bytes | None]:
        """The entry at a path, links not followed, and a symbolic link's target. NotFound (naming the path)."""

    @abstractmethod
    def restore(self, ref: str, to: Path, *, path: bytes, namespace_pid: int = 0) -> RestoreReport:
        """Write a snapshot's tree (or the part below `path`) into `to`, which must not exist or be empty. `to` is a path
        as the process `namespace_pid` sees it; 0: as the daemon does."""

    @abstractmethod
    def tag(self, ref: str, name: str, *, move: bool) -> SnapshotID: ...

    @abstractmethod
    def untag(self, name: str) -> None: ...

    # -- approvals -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def ask(
        self,
        ref: str,
        call: str,
        tool: str,
        arguments: Any,
        *,
        side_effect: SideEffect = SideEffect.LOCAL,
        question: str | None = None,
        expires_s: float | None = None,
    ) -> Approval | None:
        """Ask a person about a call of a program outside of the sandbox, named `call` by it. Returns at once, and again with
        the same call what has been decided by now. Without a question the policy decides; None: it lets the call run.

        The approval is bound to the call's name and arguments, not to files: the program that asked sees to those.
        Denied: the policy does not let it run; Conflict: another call has the name; UsageError: the name is malformed."""

    @abstractmethod
    def approvals(self, status: ApprovalStatus | None = None) -> list[Approval]:
        """Oldest first; by default all."""

    @abstractmethod
    def approval(self, ref: str, *, max_files: int = 1000) -> ApprovalView: ...

    @abstractmethod
    def approve(self, ref: str, *, by: str, reason: str | None = None, arguments: tuple[Any] | None = None) -> Approval:
        """Let the call run, with other `arguments` if given. Conflict: decided already, or its trajectory has moved on
        from the snapshot that the approval is bound to (it is stale then)."""

    @abstractmethod
    def deny(self, ref: str, *, by: str, reason: str | None = None) -> Approval: ...

    @abstractmethod
    def watch(self) -> Iterator[Event]:
        """Events for outside tools, from now on, of all trajectories: `approval` (with `trajectory`) and `finished`.
        The iterator never ends by itself. A consumer that does not keep up loses the oldest events; an event `lost`
        says how many."""

    # -- key-value store -----------------------------------------------------------------------------------------------

    @abstractmethod
    def put_value(
        self,
        tenant: str,
        namespace: str,
        key: str,
        value: Any,
        *,
        ttl_s: float | None = None,
        expected_version: int | None = None,
    ) -> StoredValue:
        """UsageError: malformed names; LimitExceeded; Conflict: another version is there."""

    @abstractmethod
    def get_value(self, tenant: str, namespace: str, key: str, version: int | None = None) -> StoredValue: ...

    @abstractmethod
    def delete_value(self, tenant: str, namespace: str, key: str, *, expected_version: int | None = None) -> None: ...

    @abstractmethod
    def search_values(
        self,
        tenant: str,
        namespace: str,
        *,
        prefix: str = "",
        where: dict[str, Any] | None = None,
        limit: int = 100,
        after: str = "",
    ) -> list[StoredValue]: ...

    @abstractmethod
    def value_history(self, tenant: str, namespace: str, key: str) -> list[StoredValue]: ...

    # -- files of sandboxes --------------------------------------------------------------------------------------------
    # Paths are bytes from the root, without a leading slash. For those that read, `ref` names a snapshot by its id or a
    # tag, and by a trajectory's name or id its files as they are now: of the live sandbox, or of the head if none runs.
    # Links are followed and stay inside. NotFound: there is nothing; UsageError: the path leads through what is no
    # directory, or is of the wrong kind.

    @abstractmethod
    def read_file(self, ref: str, path: bytes) -> Iterator[bytes]:
        """A regular file's content in pieces; of a live one as much as it had when it was opened."""

    @abstractmethod
    def stat_file(self, ref: str, path: bytes) -> FileEntry:
        """The entry at a path, behind all links."""

    @abstractmethod
    def list_files(self, ref: str, path: bytes) -> Iterator[FileEntry]:
        """The entries of a directory, sorted by the bytes of their names; links are not followed."""

    @abstractmethod
    def read_archive(self, ref: str, path: bytes, write: Callable[[bytes], object]) -> tuple[str, ...]:
        """Write what is there, with everything below it, as a tar whose members' paths begin with its last name (the
        root's with `./`). Returns warnings: what the form cannot hold."""

    # The others are each one tool call with one snapshot in a trajectory's sandbox, which is started if it is not up.
    # The daemon makes the change itself. New files belong to root, or to `user`. Where something is mounted, nothing is
    # written (UsageError). One that fails before it has changed anything leaves no snapshot; else it is recorded as
    # failed.

    @abstractmethod
    def write_file(
        self, ref: str, path: bytes, read: Callable[[int], bytes], *, user: str | None = None, mode: int | None = None
    ) -> Written:
        """Fill a file with what `read(count)` gives until it gives nothing, and put it in place in one instant: until
        then the old one is there, and it stays when anything fails. Missing directories are made. A file that is
        overwritten keeps its owner, and its mode unless `mode` is given (0644 for a new file)."""

    @abstractmethod
    def write_archive(
        self, ref: str, path: bytes, read: Callable[[int], bytes], *, user: str | None = None, attributes: bool = True
    ) -> Written:
        """Put the members of a tar below the directory `path`, each as `write_file`. With `attributes` modes and times
        are the archive's. Other files stay."""

    @abstractmethod
    def make_dir(self, ref: str, path: bytes, *, user: str | None = None) -> Snapshot:
        """A directory, with those above it. Not an error when it is there."""

    @abstractmethod
    def remove_file(self, ref: str, path: bytes) -> Snapshot:
        """Remove a file, a link, or a directory with everything in it."""

    @abstractmethod
    def rename_file(self, ref: str, path: bytes, to: bytes) -> Snapshot:
        """As rename(2): in place of a file, or of an empty directory."""

    # -- folders of this machine ---------------------------------------------------------------------------------------

    @abstractmethod
    def folder_hook(
        self, user: HostUser, folder: int, agent: str, payload: dict[str, Any], hook: int | None = None
    ) -> Snapshot | None:
        """Take the snapshot that a hook of an agent calls for, of the folder of the descriptor, with the rights of
        `user`. None: there is none to take. `hook`: the process that told of it, which lives until the answer.
        UsageError: the payload; LimitExceeded, NotPermitted: no snapshots are taken of such a folder."""

    @abstractmethod
    def folder_checkpoint(self, user: HostUser, folder: int, name: str) -> Snapshot:
        """A snapshot of the folder as it is, with a tag. Conflict, UsageError: the name."""

    @abstractmethod
    def folder_trajectory(self, user: HostUser, folder: int) -> Trajectory:
        """The user's trajectory of the folder. NotFound: no hook has told of it."""

    @abstractmethod
    def folder_snapshot(self, user: HostUser, folder: int, ref: str) -> Snapshot:
        """A snapshot of the user's folder. NotFound, also for a snapshot of another: neither the answer nor its time
        tells of any."""

    @abstractmethod
    def folder_session(self, user: HostUser, folder: int, hook: int, to: str) -> str | None:
        """The session of the agent below which the process `hook` runs, if it and others have changed files since the
        snapshot `to`; else None."""

    # -- durable storage -----------------------------------------------------------------------------------------------

    @abstractmethod
    def usage(self) -> UsageInfo: ...

    @abstractmethod
    def policy(self, ref: str | None) -> Policy:
        """The global policy, or a trajectory's own (the global one where it has none)."""

    @abstractmethod
    def set_policy(self, ref: str | None, policy: Policy | None) -> None:
        """Set the global policy, or a trajectory's own; None removes it. UsageError (a number that makes no sense)."""

    @abstractmethod
    def prune(self, policy: Policy | None, *, dry_run: bool, grace_s: float, progress: ProgressSink) -> PruneInfo:
        """Give up the files of snapshots that no rule keeps, and collect objects that nothing refers to. `policy`
        replaces the stored policies. Packs younger than the grace period stay as they are. DataLoss: the repository is
        damaged; nothing was collected."""

    @abstractmethod
    def check(self, *, read_data: bool, progress: ProgressSink) -> CheckInfo:
        """Verify index, packs, trees and the catalog's references; with `read_data` also every object against its id.
        Changes nothing."""

    @abstractmethod
    def repair(self, progress: ProgressSink) -> RepairInfo:
        """Rebuild the index and the catalog's rows from packs where they are damaged, store again the contents that
        layers still hold, and mark snapshots that are gone as lost. On a healthy repository it does nothing."""

    @abstractmethod
    def export(
        self,
        ref: str,
        *,
        form: ExportForm,
        whole: bool,
        since: str | None,
        forks: bool,
        write: Callable[[bytes], object],
        progress: ProgressSink,
    ) -> tuple[str, ...]:
        """Write a snapshot (with `whole`: its trajectory up to it) as one file. `bundle` is for `import_bundle`; with
        `since` it holds only the snapshots after that one. `oci` is an image for `docker load`, `tar` the plain tree.
        `atif` and `jsonl` are the trajectory up to the snapshot, for evaluation and training (docs/agents/training.md); with
        `forks` all that were forked from it follow. Returns warnings (what the form cannot hold). UsageError for
        a combination that makes no sense."""

    @abstractmethod
    def import_bundle(self, read: Callable[[int], bytes], name: str | None, progress: ProgressSink) -> Imported:
        """Take a bundle in, all or nothing. The bundle is hostile. If all its snapshots are here, only tags are taken,
        and `snapshots` is 0. UsageError (malformed), NotFound (the snapshot it builds on is not here), Conflict (parts
        of it are here already), LimitExceeded, VersionMismatch."""

    @abstractmethod
    def mount(self, directory: Path, namespace_pid: int) -> None:
        """Show every stored snapshot below `directory`, read-only, in the mount namespace of a process. UsageError,
        Unsupported."""

    @abstractmethod
    def unmount(self, directory: Path, namespace_pid: int) -> None:
        """End it. NotFound."""

    # -- images --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def images(self) -> list[Image]: ...

    @abstractmethod
    def ensure_image(self, name: str, progress: ProgressSink) -> Image:
        """The image that a sandbox of this image name would start from, made first if need be. NotFound."""

    @abstractmethod
    def build_image(self, recipe: str, name: str | None, progress: ProgressSink) -> Image:
        """From a recipe folder, or the name of one that comes with snapshotd (`default`, `minimal`, ...). Reuses an
        unchanged one."""

    @abstractmethod
    def import_image(self, source: str, name: str | None, progress: ProgressSink) -> Image:
        """From a folder, a tar of a root file system, a `docker save` or OCI archive, or a Docker image name."""

    @abstractmethod
    def remove_image(self, ref: str) -> None: ...

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """Facts for `doctor` and `daemon --status`: versions, state directory, layer file system, runtimes, counts."""

    @abstractmethod
    def flush(self, ref: TrajectoryID | None = None) -> None:
        """Return when every snapshot so far is stored and its files are counted. OutOfSpace, DataLoss, InternalError:
        one cannot be."""

    @abstractmethod
    def close(self) -> None:
        """Stop every sandbox (with a last snapshot each) and release everything. Idempotent."""
