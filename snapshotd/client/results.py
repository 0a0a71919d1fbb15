"""What the client answers with: the API's JSON as typed, frozen records. Times are ISO 8601 text in UTC, durations
milliseconds.

Unknown members are ignored, so that a daemon may say more than its client knows.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

Json = dict[str, Any]
_Make = Callable[[Any], Any]


class ApiRecord:
    """A dataclass that is made from the API's JSON by the types of its fields."""

    __slots__ = ()

    @classmethod
    def of(cls, data: Json) -> Self:
        """From the members of `data` with the fields' names. A `path` is the sandbox's, every byte of it."""
        made = {name: data[name] if make is None else make(data[name]) for name, make in _makers(cls).items()}  # type: ignore[arg-type]
        if "path_b64" in data and "path" in made:
            made["path"] = base64.b64decode(data["path_b64"])
        return cls(**made)


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


@dataclass(frozen=True, slots=True)
class FileCounts(ApiRecord):
    """How a snapshot's files differ from its parent's."""

    added: int
    changed: int
    deleted: int
    bytes: int


@dataclass(frozen=True, slots=True)
class DamagedOutput(ApiRecord):
    """An output that was damaged on disk and is gone: stdout, stderr or output; its length (None: unknown) and the hash
    of what it held."""

    output: str
    bytes: int | None
    hash: str


@dataclass(frozen=True, slots=True)
class Tool(ApiRecord):
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


@dataclass(frozen=True, slots=True)
class SnapshotInfo(ApiRecord):
    """`files` is None until the daemon has counted what changed, in the background. `state` is captured, stored, lost
    or pruned."""

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
    """Whose conversation, journal and state it continues, where that is not its parent: after a rewind or an edit."""
    warnings: tuple[str, ...]
    """What its stored files lack of those that the sandbox had, one sentence each."""


@dataclass(frozen=True, slots=True)
class LimitsInfo(ApiRecord):
    memory_bytes: int
    cpus: float
    pids: int
    disk_bytes: int
    """0: half of the file system that holds the layers."""


@dataclass(frozen=True, slots=True)
class AgentInfo(ApiRecord):
    """`program` is how many leading items of `argv` are the program; a fork may replace the rest."""

    argv: tuple[str, ...]
    program: int
    cwd: str


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class SandboxInfo(ApiRecord):
    """A live sandbox."""

    trajectory: TrajectoryInfo
    container: str
    pid: int
    started_at: str
    agent_running: bool


@dataclass(frozen=True, slots=True)
class ExecInfo(ApiRecord):
    """How a command ended. `snapshot` is None for one in a throw-away fork."""

    exit_code: int
    snapshot: SnapshotInfo | None
    call: Tool


@dataclass(frozen=True, slots=True)
class ForkInfo(ApiRecord):
    experiment: str
    trajectories: tuple[TrajectoryInfo, ...]


@dataclass(frozen=True, slots=True)
class EntryInfo(ApiRecord):
    """One side of a change. `mode` is octal text."""

    kind: str
    mode: str
    uid: int
    gid: int
    size: int


@dataclass(frozen=True, slots=True)
class ChangeInfo(ApiRecord):
    """One path that differs: `change` is added, changed or deleted; `path` is the sandbox's bytes, without a leading
    slash."""

    change: str
    path: bytes
    before: EntryInfo | None
    after: EntryInfo | None


@dataclass(frozen=True, slots=True)
class MessageInfo(ApiRecord):
    """One entry of a conversation."""

    role: str
    content: Any


@dataclass(frozen=True, slots=True)
class RestoreInfo(ApiRecord):
    """What a restore wrote. `warnings` names everything the target could not hold."""

    files: int
    directories: int
    bytes: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ImageInfo(ApiRecord):
    id: str
    name: str
    source: str
    bytes: int
    files: int
    created_at: str


@dataclass(frozen=True, slots=True)
class Policy(ApiRecord):
    """Which snapshots keep their files: those that any rule keeps; without any rule, all. What each field means is said
    in the engine's `RetentionPolicy`."""

    keep_last: int | None = None
    keep_within_s: float | None = None
    keep_every: int | None = None
    keep_failed: int | None = None
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Provider:
    """A model provider for the recording gateway: `kind` is openai or anthropic, `base_url` its own API if None. The
    key stays in the daemon: it never enters a sandbox."""

    kind: str
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class UsageInfo(ApiRecord):
    """What takes space, in bytes. `states` is how many snapshots are captured, stored, lost and pruned."""

    layer_bytes: int
    layer_budget_bytes: int
    repository_bytes: int
    spool_bytes: int
    states: dict[str, int]
    unarchived: int


@dataclass(frozen=True, slots=True)
class PrunedInfo(ApiRecord):
    """A snapshot whose files go, or went, and why."""

    snapshot: str
    trajectory: str
    seq: int
    created_at: str
    reason: str


@dataclass(frozen=True, slots=True)
class PruneInfo(ApiRecord):
    """What a prune did, or with `dry_run` would do."""

    dry_run: bool
    snapshots: tuple[PrunedInfo, ...]
    kept: int
    freed_bytes: int
    evicted_layer_bytes: int
    repository_bytes: int


@dataclass(frozen=True, slots=True)
class DamageInfo(ApiRecord):
    """One thing that is wrong. `snapshot` and `path` (bytes, without a leading slash) name the first that needs it."""

    pack: str | None
    object: str | None
    what: str
    snapshot: str | None
    path: bytes | None


@dataclass(frozen=True, slots=True)
class CheckInfo(ApiRecord):
    """What a check read and found. `snapshots` are all that cannot be read in full."""

    objects: int
    packs: int
    bytes_read: int
    damages: tuple[DamageInfo, ...]
    snapshots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RepairInfo(ApiRecord):
    """What a repair did, and the snapshots it could not bring back."""

    actions: tuple[str, ...]
    lost: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExportInfo:
    """What an export wrote. `warnings` names what its form cannot hold."""

    bytes: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ImportInfo(ApiRecord):
    trajectories: tuple[TrajectoryInfo, ...]
    snapshots: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VersionInfo(ApiRecord):
    version: str
    api_version: str
    pid: int
    state_dir: str
