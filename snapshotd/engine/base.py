"""What the product means: the requests and answers of the engine, and the engine itself as a specification.

The daemon's API is a thin skin over `Engine`; the CLI and the client say the same words over HTTP.
`ref` is what a person types: a tag, a name, or a unique prefix of an id. Snapshot refs accept trajectories (their head).

Errors: those of `errors.py`; every method may raise NotFound/Ambiguous for a ref. Nothing has changed when a method raises, unless it
says so.
Concurrency: every method may be called from any thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from snapshotd.layers.base import Change, RestoreReport
from snapshotd.types import ExperimentID, Image, Limits, Message, Network, Snapshot, SnapshotID, ToolCall, Trajectory, TrajectoryID

Stream = Literal["stdout", "stderr"]
OutputSink = Callable[[Stream, bytes], None]
"""Receives raw output as it comes, from several threads but never two at once. May block (that slows the command down)."""
ProgressSink = Callable[[str], None]
"""Receives one line of progress for people."""
Event = dict[str, Any]
"""One event of a run, JSON-ready. `event` is one of:

    started   trajectory, snapshot, runtime, image
    output    stream ("stdout"/"stderr"), data_b64 (raw bytes, base64)
    snapshot  id, seq, tool, status, files (added, changed, deleted, bytes), pause_ms, method
    warning   message
    finished  trajectory, exit_code, snapshots (how many), status; always last
"""


@dataclass(frozen=True, slots=True)
class SandboxRequest:
    """What every new sandbox needs. `workspace` is a host folder whose content is copied to /workspace."""

    image: str = "default"
    runtime: str = "auto"
    workspace: Path | None = None
    env: tuple[tuple[str, str], ...] = ()
    network: Network = Network.NONE
    limits: Limits = field(default_factory=Limits)
    name: str | None = None


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Run an agent: either `agent` (a Python file on the host, with `args`) or `command` (argv inside the sandbox)."""

    sandbox: SandboxRequest
    agent: Path | None = None
    args: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    requirements: Path | None = None


@dataclass(frozen=True, slots=True)
class ExecResult:
    """`snapshot` is None for a command in a throw-away fork."""

    exit_code: int
    snapshot: Snapshot | None
    call: ToolCall


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
class RetentionPolicy:
    """Which snapshots keep their files. A snapshot is kept if any rule keeps it; a field that is None keeps nothing by itself, and a policy
    in which all are None keeps everything. Heads, tagged and named ones, the first of a trajectory, what a fork began from and what a
    running sandbox stands on are always kept.

    `keep_last`: the newest N of each trajectory. `keep_within_s`: those younger than this. `keep_every`: milestones, every K-th (`seq`
    divisible by K). `keep_failed`: the newest N of each trajectory whose call failed. `max_bytes` is a limit, not a rule, and only that of
    the global policy counts: of what only rules keep, the oldest go until the repository fits.
    """

    keep_last: int | None = None
    keep_within_s: float | None = None
    keep_every: int | None = None
    keep_failed: int | None = None
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PrunedSnapshot:
    """One line of a prune: what goes and why."""

    snapshot: SnapshotID
    trajectory: TrajectoryID
    seq: int
    created_at_ns: int
    reason: str


@dataclass(frozen=True, slots=True)
class PruneReport:
    """`freed_bytes`: what the packs shrink by (also counts rubbish of earlier removals). With `dry_run` nothing has changed."""

    dry_run: bool
    snapshots: tuple[PrunedSnapshot, ...]
    kept: int
    freed_bytes: int
    evicted_layer_bytes: int
    repository_bytes: int
    """Of all packs, after (or before, if dry) the prune."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong. `snapshot` and `path` name the first that needs the damaged object; None if nothing does."""

    pack: str | None
    object_id: str | None
    what: str
    snapshot: SnapshotID | None = None
    path: bytes | None = None


@dataclass(frozen=True, slots=True)
class CheckReport:
    """`snapshots` are all whose files (or outputs) cannot be read in full."""

    objects: int
    packs: int
    bytes_read: int
    damages: tuple[Damage, ...]
    snapshots: tuple[SnapshotID, ...]


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What a repair did, one sentence each (none: nothing was wrong), and what it could not bring back."""

    actions: tuple[str, ...]
    lost: tuple[SnapshotID, ...]


@dataclass(frozen=True, slots=True)
class Imported:
    trajectories: tuple[Trajectory, ...]
    snapshots: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """What takes space, in bytes: sealed layers, images, packs, spool; and how many snapshots are in each state."""

    layer_bytes: int
    layer_budget_bytes: int
    repository_bytes: int
    spool_bytes: int
    states: tuple[tuple[str, int], ...]
    unarchived: int


class Engine(ABC):
    # -- sandboxes and runs --------------------------------------------------------------------------------------------------

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
    def exec(self, ref: str, argv: tuple[str, ...], *, cwd: str | None, env: tuple[tuple[str, str], ...], user: str | None,
             sink: OutputSink) -> ExecResult:
        """Run a command as a tool call in a trajectory's sandbox (started from its head if it is stopped) and take the snapshot.
        CommandNotFound and CommandNotRunnable leave no snapshot."""

    @abstractmethod
    def exec_snapshot(self, ref: str, argv: tuple[str, ...], *, cwd: str | None, env: tuple[tuple[str, str], ...],
                      user: str | None, sink: OutputSink) -> ExecResult:
        """Run a command in a throw-away fork of a snapshot; nothing of it is kept."""

    @abstractmethod
    def fork(self, ref: str, n: int, *, args: tuple[str, ...] | None, name: str | None) -> Forked:
        """`n` (1..256) new trajectories from one snapshot, each with a running sandbox, all or none. With `args`, the trajectory's program
        (or, where it has none, `args` as a command) is started in each; `{index}` in an argument is the fork's number from 0."""

    @abstractmethod
    def rewind(self, ref: str, to: str) -> Snapshot:
        """Give a trajectory's running sandbox the files of snapshot `to`, in place; recorded as a new snapshot, nothing is destroyed.
        The conversation goes on. Conflict while a process other than init lives in the sandbox."""

    @abstractmethod
    def stop(self, ref: str) -> Trajectory:
        """Take a last snapshot if anything changed and end the sandbox. Not an error when it is not running."""

    @abstractmethod
    def remove(self, ref: str, *, force: bool) -> None:
        """Forget a trajectory and free what only it used. Conflict when it runs (unless `force`) or has forks."""

    # -- looking -------------------------------------------------------------------------------------------------------------

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
        """A trajectory's own snapshots, oldest first, with `files` filled in; with `last`, only so many of the newest."""

    @abstractmethod
    def all_snapshots(self) -> list[Snapshot]: ...

    @abstractmethod
    def conversation(self, ref: str) -> list[Message]: ...

    @abstractmethod
    def output(self, ref: str, which: Literal["stdout", "stderr", "output"]) -> Iterator[bytes]:
        """A tool call's recorded output in pieces; empty if it has none."""

    @abstractmethod
    def diff(self, a: str, b: str | None) -> Iterator[Change]:
        """From `a` to `b`; with one ref, from its parent to it."""

    @abstractmethod
    def patch(self, a: str, b: str | None, *, root: bytes, write: Callable[[bytes], object]) -> int:
        """Write the changes below `root` (b"workspace") as a patch with paths relative to it. Returns how many lie outside of it."""

    @abstractmethod
    def cat(self, ref: str, path: bytes) -> Iterator[bytes]:
        """A regular file's content in pieces. NotFound (naming the path); UsageError for anything that is not a regular file."""

    @abstractmethod
    def restore(self, ref: str, to: Path, *, path: bytes) -> RestoreReport:
        """Write a snapshot's tree (or the part below `path`) into `to`, which must not exist or be empty."""

    @abstractmethod
    def tag(self, ref: str, name: str, *, move: bool) -> SnapshotID: ...

    @abstractmethod
    def untag(self, name: str) -> None: ...

    # -- durable storage -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def usage(self) -> Usage: ...

    @abstractmethod
    def policy(self, ref: str | None) -> RetentionPolicy:
        """The global policy, or a trajectory's own (the global one where it has none)."""

    @abstractmethod
    def set_policy(self, ref: str | None, policy: RetentionPolicy | None) -> None:
        """Set the global policy, or a trajectory's own; None removes it. UsageError (a number that makes no sense)."""

    @abstractmethod
    def prune(self, policy: RetentionPolicy | None, *, dry_run: bool, grace_s: float, progress: ProgressSink) -> PruneReport:
        """Give up the files of snapshots that no rule keeps, and collect what nothing refers to. `policy` instead of the ones set. Packs
        younger than the grace period stay as they are. DataLoss: the repository is damaged; nothing was collected."""

    @abstractmethod
    def check(self, *, read_data: bool, progress: ProgressSink) -> CheckReport:
        """Verify index, packs, trees and the catalog's references; with `read_data` every byte. Changes nothing."""

    @abstractmethod
    def repair(self, progress: ProgressSink) -> RepairReport:
        """Rebuild the index and the catalog's rows from packs where they are damaged, store again what the layers still hold, and mark what
        is gone as lost. On a healthy repository it does nothing."""

    @abstractmethod
    def export(self, ref: str, *, form: Literal["bundle", "oci", "tar"], whole: bool, since: str | None, write: Callable[[bytes], object],
               progress: ProgressSink) -> tuple[str, ...]:
        """Write a snapshot (with `whole`: its trajectory up to it) as one file. `bundle` is for `import_bundle`; with `since` it holds only
        what came after that snapshot. `oci` is an image for `docker load`, `tar` the plain tree. Returns warnings (what the form cannot
        hold). UsageError for a combination that makes no sense."""

    @abstractmethod
    def import_bundle(self, read: Callable[[int], bytes], name: str | None, progress: ProgressSink) -> Imported:
        """Take a bundle in, all or nothing. The bundle is hostile. UsageError (malformed), NotFound (the snapshot it builds on is not
        here), Conflict (it is here already), LimitExceeded, VersionMismatch."""

    @abstractmethod
    def mount(self, directory: Path, namespace_pid: int) -> None:
        """Show every stored snapshot below `directory`, read-only, in the mount namespace of a process. UsageError, Unsupported."""

    @abstractmethod
    def unmount(self, directory: Path, namespace_pid: int) -> None:
        """End it. NotFound."""

    # -- images --------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def images(self) -> list[Image]: ...

    @abstractmethod
    def build_image(self, recipe: str, name: str | None, progress: ProgressSink) -> Image:
        """From a recipe folder, or the name of one that comes with snapshotd (`default`, `minimal`). Reuses an unchanged one."""

    @abstractmethod
    def import_image(self, source: str, name: str | None, progress: ProgressSink) -> Image:
        """From a folder, a tar of a root file system, a `docker save` or OCI archive, or a Docker image name."""

    @abstractmethod
    def remove_image(self, ref: str) -> None: ...

    # -- lifecycle -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """Facts for `doctor` and `daemon --status`: versions, state directory, layer file system, runtimes, counts."""

    @abstractmethod
    def flush(self, ref: TrajectoryID | None = None) -> None:
        """Return when every snapshot so far is stored and its files are counted. OutOfSpace, DataLoss, InternalError: one cannot be."""

    @abstractmethod
    def close(self) -> None:
        """Stop every sandbox (with a last snapshot each) and release everything. Idempotent."""
