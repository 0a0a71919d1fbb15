"""The client's results: the API's JSON as typed, frozen records. Times are ISO 8601 text in UTC, durations
milliseconds.

Unknown members are ignored, so that a daemon may say more than its client knows.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import field, fields
from functools import cache
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from snapshotd.client.records import record

Json = dict[str, Any]
_Make = Callable[[Any], Any]


def path_of(data: Json) -> str:
    """A sandbox path from its root, as every method takes it. A byte that is not UTF-8 is a lone surrogate, as in
    Python's own paths; `os.fsencode` gives all bytes back."""
    raw = base64.b64decode(data["path_b64"]) if data.get("path_b64") is not None else str(data["path"]).encode()
    return "/" + raw.decode(errors="surrogateescape")


class ApiRecord:
    """A dataclass that is made from the API's JSON by the types of its fields."""

    __slots__ = ()

    @classmethod
    def of(cls, data: Json) -> Self:
        """From the members of `data` with the fields' names. A `path` is the sandbox's (`path_of`)."""
        made = {
            name: data[name] if make is None else make(data[name])
            for name, make in _makers(cls).items()  # type: ignore[arg-type]
            if name in data
        }
        if made.get("path") is not None:
            made["path"] = path_of(data)
        return cls(**made, **cls._more(data))

    @classmethod
    def _more(cls, data: Json) -> Json:
        """The fields that the JSON has in another form, or under another name."""
        return {}


@cache
def _makers(cls: type[ApiRecord]) -> dict[str, _Make | None]:
    hints = get_type_hints(cls)
    return {field.name: _maker(hints[field.name]) for field in fields(cls)}  # type: ignore[arg-type]


def _maker(hint: Any) -> _Make | None:
    """Makes a field of this type from its JSON; None: the JSON itself is the field."""
    if hint is bytes:
        return str.encode
    made = next(filter(None, map(_maker, get_args(hint))), None)
    if get_origin(hint) is tuple:
        return tuple if made is None else lambda values: tuple(map(made, values))
    if get_origin(hint) is UnionType:
        return None if made is None else lambda value: None if value is None else made(value)
    return hint.of if isinstance(hint, type) and issubclass(hint, ApiRecord) else None


@record(frozen=True)
class FileCounts(ApiRecord):
    """The differences between a snapshot's files and its parent's."""

    added: int
    changed: int
    deleted: int
    bytes: int


@record(frozen=True)
class DamagedOutput(ApiRecord):
    """An output that was damaged on disk and is gone: stdout, stderr or output; its length (None: unknown) and the hash
    of its content."""

    output: str
    bytes: int | None
    hash: str


@record(frozen=True)
class Tool(ApiRecord):
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


@record(frozen=True)
class SnapshotInfo(ApiRecord):
    """`files` is None until the daemon has counted the changes, in the background. `state` is captured, stored, lost or
    pruned."""

    id: str
    parent: str | None
    trajectory: str
    seq: int
    tool: Tool
    files: FileCounts | None
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
    reused: str | None = None
    """The snapshot of an earlier run that its call was answered from."""


@record(frozen=True)
class LimitsInfo(ApiRecord):
    memory_bytes: int
    cpus: float
    pids: int
    disk_bytes: int
    """0: half of the file system that holds the layers."""


@record(frozen=True)
class AgentInfo(ApiRecord):
    """`program` is how many leading items of `argv` are the program; a fork may replace the rest."""

    argv: tuple[str, ...]
    program: int
    cwd: str


@record(frozen=True)
class TrajectoryInfo(ApiRecord):
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


@record(frozen=True)
class SandboxInfo(ApiRecord):
    """A live sandbox."""

    trajectory: TrajectoryInfo
    container: str
    pid: int
    started_at: str
    agent_running: bool


@record(frozen=True)
class ExecInfo(ApiRecord):
    """The result of a command. `snapshot` is None for one in a throw-away fork."""

    exit_code: int
    snapshot: SnapshotInfo | None
    call: Tool

    @property
    def timed_out(self) -> bool:
        """True if its `timeout` ended it. An exit code of 124 alone may be the command's own."""
        return self.call.status == "timed-out"


@record(frozen=True)
class CommandInfo(ApiRecord):
    """A command in the background, or one that a client runs in the foreground. `status` is running, or how its call
    ended: done, failed, interrupted, timed-out or unknown. `snapshot` is the id of the one that was taken when it
    ended."""

    id: str
    trajectory: str
    argv: tuple[str, ...]
    cwd: str
    stdin: bool
    timeout_s: float | None
    started_at: str
    status: str
    exit_code: int | None
    ended_at: str | None
    snapshot: str | None
    error: str | None
    background: bool = True


@record(frozen=True)
class ForkInfo(ApiRecord):
    experiment: str
    trajectories: tuple[TrajectoryInfo, ...]


@record(frozen=True)
class EntryInfo(ApiRecord):
    """One side of a change. `mode` is octal text."""

    kind: str
    mode: str
    uid: int
    gid: int
    size: int


@record(frozen=True)
class FileStatus(ApiRecord):
    """The entry at a path. `mode` is octal text; `target` is where a symbolic link leads, None for anything else."""

    kind: str
    mode: str
    uid: int
    gid: int
    size: int
    target: bytes | None

    @classmethod
    def _more(cls, data: Json) -> Json:
        return {"target": None if data["target_b64"] is None else base64.b64decode(data["target_b64"])}


@record(frozen=True)
class ChangeInfo(ApiRecord):
    """One path that differs: `change` is added, changed or deleted; `path` begins with a slash (`path_of`)."""

    change: str
    path: str
    before: EntryInfo | None
    after: EntryInfo | None


@record(frozen=True)
class FileInfo(ApiRecord):
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
    def _more(cls, data: Json) -> Json:
        target = None if data["target_b64"] is None else base64.b64decode(data["target_b64"])
        return {
            "name": path_of(data).rpartition("/")[2] or "/",
            "target": None if target is None else target.decode(errors="surrogateescape"),
        }

    @property
    def is_dir(self) -> bool:
        return self.kind == "directory"


@record(frozen=True)
class WriteInfo(ApiRecord):
    """The effect of a write, and the snapshot after it. `warnings` names what was left out."""

    snapshot: SnapshotInfo
    file_count: int
    directories: int
    bytes: int
    warnings: tuple[str, ...]


@record(frozen=True)
class MessageInfo(ApiRecord):
    """One entry of a conversation."""

    role: str
    content: Any


@record(frozen=True)
class RestoreInfo(ApiRecord):
    """The result of a restore. `warnings` names everything the target could not hold."""

    file_count: int
    directories: int
    bytes: int
    warnings: tuple[str, ...]


@record(frozen=True)
class ImageInfo(ApiRecord):
    id: str
    name: str
    source: str
    bytes: int
    file_count: int
    created_at: str


@record(frozen=True)
class Policy(ApiRecord):
    """The rules that decide which snapshots keep their files: a snapshot keeps them if any rule keeps it; without
    rules, all do. The engine's `RetentionPolicy` explains each field."""

    keep_last: int | None = None
    keep_within_s: float | None = None
    keep_every: int | None = None
    keep_failed: int | None = None
    max_bytes: int | None = None


@record(frozen=True)
class Provider:
    """A model provider for the recording gateway: `kind` is openai, anthropic or gemini, `base_url` its own API if None. The
    key stays in the daemon: it never enters a sandbox."""

    kind: str
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)


@record(frozen=True)
class UsageInfo(ApiRecord):
    """Disk use in bytes. `states`: number of snapshots that are captured, stored, lost and pruned."""

    layer_bytes: int
    layer_budget_bytes: int
    repository_bytes: int
    spool_bytes: int
    states: dict[str, int]
    unarchived: int


@record(frozen=True)
class PrunedInfo(ApiRecord):
    """A snapshot that loses, or lost, its files, and why."""

    snapshot: str
    trajectory: str
    seq: int
    created_at: str
    reason: str


@record(frozen=True)
class PruneInfo(ApiRecord):
    """The result of a prune, or with `dry_run` its plan."""

    dry_run: bool
    pruned: tuple[PrunedInfo, ...]
    kept: int
    freed_bytes: int
    evicted_layer_bytes: int
    repository_bytes: int


@record(frozen=True)
class DamageInfo(ApiRecord):
    """One thing that is wrong. `snapshot` and `path` (from the root, as in `ChangeInfo`) name the first that needs
    it."""

    pack: str | None
    object: str | None
    what: str
    snapshot: str | None
    path: str | None


@record(frozen=True)
class CheckInfo(ApiRecord):
    """The result of a check. `unreadable` are the snapshots that cannot be read in full."""

    objects: int
    packs: int
    bytes_read: int
    damages: tuple[DamageInfo, ...]
    unreadable: tuple[str, ...]


@record(frozen=True)
class RepairInfo(ApiRecord):
    """The result of a repair, and the snapshots that it could not bring back."""

    actions: tuple[str, ...]
    lost: tuple[str, ...]


@record(frozen=True)
class ExportInfo:
    """The result of an export. `warnings` names everything that its form cannot hold."""

    bytes: int
    warnings: tuple[str, ...]


@record(frozen=True)
class ImportInfo(ApiRecord):
    trajectories: tuple[TrajectoryInfo, ...]
    snapshot_count: int
    warnings: tuple[str, ...]


@record(frozen=True)
class VersionInfo(ApiRecord):
    version: str
    api_version: str
    pid: int
    state_dir: str


@record(frozen=True)
class AppliedInfo:
    """One path of the folder (relative to it) that `apply` changes. `change` is added, changed or deleted; `merged`:
    the folder's own changes of the text are kept."""

    change: str
    path: bytes
    kind: str
    merged: bool


@record(frozen=True)
class ConflictInfo:
    """One path that the snapshot and the folder changed in ways that exclude each other."""

    path: bytes
    reason: str


@record(frozen=True)
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


@record(frozen=True)
class MergeInfo:
    """The effect of a merge, or with `dry_run` the effect that it would have. `source` and `head` are the snapshots that
    were compared with `base`; `snapshot` is the new one, None where nothing was merged. The rest is as in
    `ApplyInfo`."""

    source: str
    head: str
    base: str
    dry_run: bool
    changes: tuple[AppliedInfo, ...]
    conflicts: tuple[ConflictInfo, ...]
    same: int
    warnings: tuple[str, ...]
    snapshot: SnapshotInfo | None
