"""What the client answers with: the API's JSON as typed, frozen records. Times are ISO 8601 text in UTC, durations
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
    """`cls` from the members of `data` with its fields' names; `made` holds those that are records themselves."""
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    return cls(**{name: made[name] if name in made else data[name] for name in names})


def path_of(data: Json) -> bytes:
    """A sandbox path, every byte of it."""
    return base64.b64decode(data["path_b64"]) if "path_b64" in data else str(data["path"]).encode()


@dataclass(frozen=True, slots=True)
class Files:
    """How a snapshot's files differ from its parent's."""

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
    of what it held."""

    output: str
    bytes: int | None
    hash: str

    @classmethod
    def of(cls, data: Json) -> DamagedOutput:
        return plain(cls, data)


@dataclass(frozen=True, slots=True)
class Tool:
    """A recorded tool call. `status` is done, failed, interrupted or unknown; `outputs` names what can be had from
    `Snapshotd.output`, `damaged` what was there and cannot."""

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
    """`files` is None until the daemon has counted what changed, in the background. `state` is captured, stored, lost
    or pruned."""

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
    """Whose conversation, journal and state it continues, where that is not its parent: after a rewind or an edit."""
    warnings: tuple[str, ...]
    """What its stored files lack of those that the sandbox had, one sentence each."""

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
    """How a command ended. `snapshot` is None for one in a throw-away fork."""

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
    """What lies at a path. `mode` is octal text; `target` is where a symbolic link leads, None for anything else."""

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
    """One path that differs: `change` is added, changed or deleted; `path` is the sandbox's bytes, without a leading
    slash."""

    change: str
    path: bytes
    before: EntryInfo | None
    after: EntryInfo | None

    @classmethod
    def of(cls, data: Json) -> ChangeInfo:
        return cls(data["change"], path_of(data), EntryInfo.of(data["before"]), EntryInfo.of(data["after"]))


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
    """What a restore wrote. `warnings` names everything the target could not hold."""

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
    """Which snapshots keep their files: those that any rule keeps; without any rule, all. What each field means is said
    in the engine's `RetentionPolicy`."""

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
    """What takes space, in bytes. `states` is how many snapshots are captured, stored, lost and pruned."""

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
    """A snapshot whose files go, or went, and why."""

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
    """What a prune did, or with `dry_run` would do."""

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
    """One thing that is wrong. `snapshot` and `path` (bytes, without a leading slash) name the first that needs it."""

    pack: str | None
    object: str | None
    what: str
    snapshot: str | None
    path: bytes | None

    @classmethod
    def of(cls, data: Json) -> DamageInfo:
        return plain(cls, data, path=None if data["path"] is None else path_of(data))


@dataclass(frozen=True, slots=True)
class CheckInfo:
    """What a check read and found. `snapshots` are all that cannot be read in full."""

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
    """What a repair did, and the snapshots it could not bring back."""

    actions: tuple[str, ...]
    lost: tuple[str, ...]

    @classmethod
    def of(cls, data: Json) -> RepairInfo:
        return cls(tuple(data["actions"]), tuple(data["lost"]))


@dataclass(frozen=True, slots=True)
class ExportInfo:
    """What an export wrote. `warnings` names what its form cannot hold."""

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
    """What an apply did, or with `dry_run` would do. With `conflicts`, nothing was written.

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
