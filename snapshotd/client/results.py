"""The client's results: the API's JSON as typed, frozen records. Times are ISO 8601 text in UTC, durations
milliseconds.

Unknown members are ignored, so that a daemon may say more than its client knows.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

T = TypeVar("T")
Json = dict[str, Any]


def plain(cls: type[T], data: Json, **made: Any) -> T:
    """`cls` from the members of `data` with its fields' names; `made`: the fields that are records themselves."""
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    return cls(**{name: made[name] if name in made else data[name] for name in names})


def path_of(data: Json) -> str:
    """A sandbox path from its root, as every method takes it. A byte that is not UTF-8 is a lone surrogate, as in
    Python's own paths; `os.fsencode` gives all bytes back."""
    raw = base64.b64decode(data["path_b64"]) if data.get("path_b64") is not None else str(data["path"]).encode()
    return "/" + raw.decode(errors="surrogateescape")


@dataclass(frozen=True, slots=True)
class Files:
    """The differences between a snapshot's files and its parent's."""

    added: int
    changed: int
    deleted: int
    bytes: int

    @classmethod
    def of(cls, data: Json | None) -> Files | None:
        return None if data is None else plain(cls, data)


@dataclass(frozen=True, slots=True)
class DamagedOutput:
    """An output that was damaged on disk and is gone: stdout, stderr or output; its length (None: unknown) and the hash
    of its content."""

    output: str
    bytes: int | None
    hash: str

    @classmethod
    def of(cls, data: Json) -> DamagedOutput:
        return plain(cls, data)


@dataclass(frozen=True, slots=True)
class Tool:
    """A recorded tool call. `status` is done, failed, interrupted, timed-out or unknown; `outputs` names the ones that
    `Snapshotd.output` returns, `damaged` the ones that are gone."""

    name: str
    arguments: Any
    status: str
    exit_code: int | None
    duration_ms: float
    started_at: str
    error: str | None
    outputs: tuple[str, ...]
    damaged: tuple[DamagedOutput, ...]

    @classmethod
    def of(cls, data: Json) -> Tool:
        return plain(
            cls, data, outputs=tuple(data["outputs"]), damaged=tuple(DamagedOutput.of(item) for item in data["damaged"])
        )


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """`files` is None until the daemon has counted the changes, in the background. `state` is captured, stored, lost or
    pruned."""

    id: str
    parent: str | None
    trajectory: str
    seq: int
    tool: Tool
    files: Files | None
    state: str
    pause_ms: float
    created_at: str
    tags: tuple[str, ...]
    method: str
    messages: int
    image: str
    layers: int
    follows: str | None
    """The snapshot whose conversation, journal and state it continues, if that is not its parent: after a rewind or an
    edit."""
    warnings: tuple[str, ...]
    """Parts of the sandbox's files that the stored ones lack, one sentence each."""

    @classmethod
    def of(cls, data: Json) -> SnapshotInfo:
        tool, files, tags, warnings = (
            Tool.of(data["tool"]),
            Files.of(data["files"]),
            tuple(data["tags"]),
            tuple(data["warnings"]),
        )
        return plain(cls, data, tool=tool, files=files, tags=tags, warnings=warnings)


@dataclass(frozen=True, slots=True)
class LimitsInfo:
    memory_bytes: int
    cpus: float
    pids: int
    disk_bytes: int
    """0: half of the file system that holds the layers."""

    @classmethod
    def of(cls, data: Json) -> LimitsInfo:
        return plain(cls, data)


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """`program` is how many leading items of `argv` are the program; a fork may replace the rest."""

    argv: tuple[str, ...]
    program: int
    cwd: str

    @classmethod
    def of(cls, data: Json | None) -> AgentInfo | None:
        return None if data is None else plain(cls, data, argv=tuple(data["argv"]))


@dataclass(frozen=True, slots=True)
class TrajectoryInfo:
    """`status` is running, stopped, finished, failed or interrupted."""

    id: str
    name: str | None
    status: str
    head: str
    image: str
    runtime: str
    network: str
    limits: LimitsInfo
    agent: AgentInfo | None
    created_at: str
    forked_from: str | None
    experiment: str | None
    exit_code: int | None

    @classmethod
    def of(cls, data: Json) -> TrajectoryInfo:
        return plain(cls, data, limits=LimitsInfo.of(data["limits"]), agent=AgentInfo.of(data["agent"]))


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A live sandbox."""

    trajectory: TrajectoryInfo
    container: str
    pid: int
    started_at: str
    agent_running: bool

    @classmethod
    def of(cls, data: Json) -> SandboxInfo:
        return plain(cls, data, trajectory=TrajectoryInfo.of(data["trajectory"]))


@dataclass(frozen=True, slots=True)
class ExecInfo:
    """The result of a command. `snapshot` is None for one in a throw-away fork."""

    exit_code: int
    snapshot: SnapshotInfo | None
    call: Tool

    @classmethod
    def of(cls, data: Json) -> ExecInfo:
        snapshot = data["snapshot"]
        return plain(
            cls, data, snapshot=None if snapshot is None else SnapshotInfo.of(snapshot), call=Tool.of(data["call"])
        )


@dataclass(frozen=True, slots=True)
class ForkInfo:
    experiment: str
    trajectories: tuple[TrajectoryInfo, ...]

    @classmethod
    def of(cls, data: Json) -> ForkInfo:
        return plain(cls, data, trajectories=tuple(TrajectoryInfo.of(item) for item in data["trajectories"]))


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One side of a change. `mode` is octal text."""

    kind: str
    mode: str
    uid: int
    gid: int
    size: int

    @classmethod
    def of(cls, data: Json | None) -> EntryInfo | None:
        return None if data is None else plain(cls, data)


@dataclass(frozen=True, slots=True)
class FileStatus:
    """The entry at a path. `mode` is octal text; `target` is where a symbolic link leads, None for anything else."""

    kind: str
    mode: str
    uid: int
    gid: int
    size: int
    target: bytes | None

    @classmethod
    def of(cls, data: Json) -> FileStatus:
        target = data["target_b64"]
        return plain(cls, data, target=None if target is None else base64.b64decode(target))


@dataclass(frozen=True, slots=True)
class ChangeInfo:
    """One path that differs: `change` is added, changed or deleted; `path` begins with a slash (`path_of`)."""

    change: str
    path: str
    before: EntryInfo | None
    after: EntryInfo | None

    @classmethod
    def of(cls, data: Json) -> ChangeInfo:
        return cls(data["change"], path_of(data), EntryInfo.of(data["before"]), EntryInfo.of(data["after"]))


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Something in a sandbox's tree. `kind` is file, directory, symlink, fifo, socket, char-device or block-device;
    `path` is as in `ChangeInfo`, `name` its last part; `mode` is octal text; `target` is where a link leads that was
    listed."""

    path: str
    name: str
    kind: str
    mode: str
    uid: int
    gid: int
    size: int
    modified_at: str
    target: str | None

    @classmethod
    def of(cls, data: Json) -> FileInfo:
        path, target = path_of(data), data["target_b64"]
        shown = None if target is None else base64.b64decode(target).decode(errors="surrogateescape")
        return plain(cls, data, path=path, name=path.rpartition("/")[2] or "/", target=shown)

    @property
    def is_dir(self) -> bool:
        return self.kind == "directory"


@dataclass(frozen=True, slots=True)
class WriteInfo:
    """The effect of a write, and the snapshot after it. `warnings` names what was left out."""

    snapshot: SnapshotInfo
    files: int
    directories: int
    bytes: int
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, data: Json) -> WriteInfo:
        return plain(cls, data, snapshot=SnapshotInfo.of(data["snapshot"]), warnings=tuple(data["warnings"]))


@dataclass(frozen=True, slots=True)
class MessageInfo:
    """One entry of a conversation."""

    role: str
    content: Any

    @classmethod
    def of(cls, data: Json) -> MessageInfo:
        return plain(cls, data)


@dataclass(frozen=True, slots=True)
class RestoreInfo:
    """The result of a restore. `warnings` names everything the target could not hold."""

    files: int
    directories: int
    bytes: int
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, data: Json) -> RestoreInfo:
        return plain(cls, data, warnings=tuple(data["warnings"]))


@dataclass(frozen=True, slots=True)
class ImageInfo:
    id: str
    name: str
    source: str
    bytes: int
    files: int
    created_at: str

    @classmethod
    def of(cls, data: Json) -> ImageInfo:
        return plain(cls, data)


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules that decide which snapshots keep their files: a snapshot keeps them if any rule keeps it; without
    rules, all do. The engine's `RetentionPolicy` explains each field."""

    keep_last: int | None = None
    keep_within_s: float | None = None
    keep_every: int | None = None
    keep_failed: int | None = None
    max_bytes: int | None = None

    @classmethod
    def of(cls, data: Json) -> Policy:
        return plain(cls, data)


@dataclass(frozen=True, slots=True)
class Provider:
    """A model provider for the recording gateway: `kind` is openai or anthropic, `base_url` its own API if None. The
    key stays in the daemon: it never enters a sandbox."""

    kind: str
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class UsageInfo:
    """Disk use in bytes. `states`: number of snapshots that are captured, stored, lost and pruned."""

    layer_bytes: int
    layer_budget_bytes: int
    repository_bytes: int
    spool_bytes: int
    states: dict[str, int]
    unarchived: int

    @classmethod
    def of(cls, data: Json) -> UsageInfo:
        return plain(cls, data)


@dataclass(frozen=True, slots=True)
class PrunedInfo:
    """A snapshot that loses, or lost, its files, and why."""

    snapshot: str
    trajectory: str
    seq: int
    created_at: str
    reason: str

    @classmethod
    def of(cls, data: Json) -> PrunedInfo:
        return plain(cls, data)


@dataclass(frozen=True, slots=True)
class PruneInfo:
    """The result of a prune, or with `dry_run` its plan."""

    dry_run: bool
    snapshots: tuple[PrunedInfo, ...]
    kept: int
    freed_bytes: int
    evicted_layer_bytes: int
    repository_bytes: int

    @classmethod
    def of(cls, data: Json) -> PruneInfo:
        return plain(cls, data, snapshots=tuple(PrunedInfo.of(item) for item in data["snapshots"]))


@dataclass(frozen=True, slots=True)
class DamageInfo:
    """One thing that is wrong. `snapshot` and `path` (from the root, as in `ChangeInfo`) name the first that needs
    it."""

    pack: str | None
    object: str | None
    what: str
    snapshot: str | None
    path: str | None

    @classmethod
    def of(cls, data: Json) -> DamageInfo:
        return plain(cls, data, path=None if data["path"] is None else path_of(data))


@dataclass(frozen=True, slots=True)
class CheckInfo:
    """The result of a check. `snapshots` are all that cannot be read in full."""

    objects: int
    packs: int
    bytes_read: int
    damages: tuple[DamageInfo, ...]
    snapshots: tuple[str, ...]

    @classmethod
    def of(cls, data: Json) -> CheckInfo:
        return plain(
            cls,
            data,
            damages=tuple(DamageInfo.of(item) for item in data["damages"]),
            snapshots=tuple(data["snapshots"]),
        )


@dataclass(frozen=True, slots=True)
class RepairInfo:
    """The result of a repair, and the snapshots that it could not bring back."""

    actions: tuple[str, ...]
    lost: tuple[str, ...]

    @classmethod
    def of(cls, data: Json) -> RepairInfo:
        return cls(tuple(data["actions"]), tuple(data["lost"]))


@dataclass(frozen=True, slots=True)
class ExportInfo:
    """The result of an export. `warnings` names everything that its form cannot hold."""

    bytes: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ImportInfo:
    trajectories: tuple[TrajectoryInfo, ...]
    snapshots: int
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, data: Json) -> ImportInfo:
        lines = tuple(TrajectoryInfo.of(item) for item in data["trajectories"])
        return plain(cls, data, trajectories=lines, warnings=tuple(data["warnings"]))


@dataclass(frozen=True, slots=True)
class VersionInfo:
    version: str
    api_version: str
    pid: int
    state_dir: str

    @classmethod
    def of(cls, data: Json) -> VersionInfo:
        return plain(cls, data)


@dataclass(frozen=True, slots=True)
class AppliedInfo:
    """One path of the folder (relative to it) that `apply` changes. `change` is added, changed or deleted; `merged`:
    the folder's own changes of the text are kept."""

    change: str
    path: bytes
    kind: str
    merged: bool


@dataclass(frozen=True, slots=True)
class ConflictInfo:
    """One path that the snapshot and the folder changed in ways that exclude each other."""

    path: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class ApplyInfo:
    """The effect of an apply, or with `dry_run` the effect that it would have. With `conflicts`, nothing was written.

    `same` is how many changes the folder had already; `warnings` names what is never brought; `commit` is the id of the
    git commit, None when none was asked for or git saw no change.
    """

    snapshot: str
    base: str
    dry_run: bool
    changes: tuple[AppliedInfo, ...]
    conflicts: tuple[ConflictInfo, ...]
    same: int
    warnings: tuple[str, ...]
    commit: str | None
