"""Durable storage and images: policies, usage, prune, check, repair, imports."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from snapshotd.api.operation import ADMIN, READ, RUN, Operation
from snapshotd.api.record import ApiRecord, Bounds, Request, SandboxPath, field, record
from snapshotd.api.trajectories import LimitsRequest, TrajectoryInfo
from snapshotd.api.wire import BYTES, FRAMES, LINES
from snapshotd.terms import PRUNE_GRACE_S, SECONDS_MOST

COUNT_MAX = 1 << 53
"""Largest integer that every reader of JSON keeps exactly."""


@record(frozen=True)
class Policy(Request):
    """The rules that decide which snapshots keep their files: a snapshot keeps them if any rule keeps it. Without
    rules, all of them do. Some snapshots are always kept: heads, tagged and named ones, the first of a trajectory, the
    origin of a fork, and the snapshot that a running sandbox stands on."""

    keep_last: Annotated[int, Bounds(ge=0, le=COUNT_MAX)] | None = None
    """The newest of each trajectory."""
    keep_within_s: Annotated[float, Bounds(gt=0, le=SECONDS_MOST, allow_inf_nan=False)] | None = None
    """Snapshots younger than this, in seconds."""
    keep_every: Annotated[int, Bounds(ge=1, le=COUNT_MAX)] | None = None
    """Milestones: those whose seq it divides."""
    keep_failed: Annotated[int, Bounds(ge=1, le=COUNT_MAX)] | None = None
    """The newest whose tool call failed."""
    max_bytes: Annotated[int, Bounds(ge=1, le=COUNT_MAX)] | None = None
    """The oldest of the snapshots that the rules keep go until the repository fits."""


@record(frozen=True)
class UsageInfo(ApiRecord):
    """Disk use in bytes, and the number of snapshots in each state."""

    layer_bytes: int
    layer_budget_bytes: int
    """Most that layers of stored snapshots may use."""
    repository_bytes: int
    spool_bytes: int
    """Disk use of outputs that are not stored yet."""
    states: dict[str, int]
    """Number of snapshots in each state of durability."""
    unarchived: int
    """Captured snapshots that are not stored yet."""
    cache_bytes: int = 0
    """Disk use of the parts of packs that a node of a fleet keeps."""
    cache_budget_bytes: int = 0
    """Most that `cache_bytes` may be."""


class PruneOptions(TypedDict, total=False):
    """The keywords by which the client takes a `PruneRequest`, besides `policy`."""

    dry_run: bool
    grace_s: float


@record(frozen=True)
class PruneRequest(Request):
    policy: Policy | None = None
    """Instead of the policies that are set."""
    dry_run: bool = False
    """Only say what would go."""
    grace_s: Annotated[float, Bounds(ge=0, le=SECONDS_MOST, allow_inf_nan=False)] = PRUNE_GRACE_S
    """Packs younger than this stay as they are."""


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
    """Snapshots that lose their files."""
    kept: int
    """Number of snapshots that keep their files."""
    freed_bytes: int
    """Disk use that is gone."""
    evicted_layer_bytes: int
    """Disk use of layers that is gone."""
    repository_bytes: int


class CheckOptions(TypedDict, total=False):
    """The keywords by which the client takes a `CheckRequest`."""

    read_data: bool


@record(frozen=True)
class CheckRequest(Request):
    read_data: bool = False
    """Also decode every object and compare it with its id."""


@record(frozen=True)
class DamageInfo(ApiRecord):
    """One thing that is wrong. `snapshot` and `path` name the first that needs it."""

    pack: str | None
    """The damaged pack."""
    object: str | None
    """The damaged object."""
    what: str
    """The fault, in words."""
    snapshot: str | None
    path: SandboxPath | None


@record(frozen=True)
class CheckInfo(ApiRecord):
    """The result of a check. `unreadable` are the snapshots that cannot be read in full."""

    objects: int
    """Number of objects in the repository."""
    packs: int
    """Number of packs in the repository."""
    bytes_read: int
    """Bytes that were read."""
    damages: tuple[DamageInfo, ...]
    """Damages that were found."""
    unreadable: tuple[str, ...]
    """Snapshots that cannot be read in full."""


ExportForm = Literal["bundle", "oci", "tar", "atif", "jsonl"]
"""A bundle, an image, a plain tree; the last two hold what was said and done, and no files."""


class ExportOptions(TypedDict, total=False):
    """The keywords by which the client takes an `ExportQuery`, besides `since`."""

    form: ExportForm
    whole: bool
    forks: bool


@record(frozen=True)
class ExportQuery(Request):
    form: ExportForm = "bundle"
    whole: bool = False
    """The trajectory up to the snapshot."""
    since: str | None = None
    """Only what came after this snapshot."""
    forks: bool = False
    """The trajectories that were forked from it, too; for atif and jsonl."""


@record(frozen=True)
class RepairInfo(ApiRecord):
    """The result of a repair, and the snapshots that it could not bring back."""

    actions: tuple[str, ...]
    """Steps that the repair took, one sentence each."""
    lost: tuple[str, ...]
    """Snapshots whose files are gone."""


@record(frozen=True)
class ImportInfo(ApiRecord):
    trajectories: tuple[TrajectoryInfo, ...]
    snapshot_count: int
    warnings: tuple[str, ...]


@record(frozen=True)
class MountRequest(Request):
    directory: str
    """Absolute path of a directory, in the mount namespace of the process that asks."""


@record(frozen=True)
class ImageInfo(ApiRecord):
    id: str
    name: str
    source: str
    bytes: int
    file_count: int
    created_at: str


@record(frozen=True)
class EnsureImageRequest(Request):
    image: Annotated[str, Bounds(min_length=1, max_length=1024)]
    """As a sandbox names its image."""
    limits: LimitsRequest = field(default_factory=lambda: LimitsRequest())
    """Limits of the sandbox. Nothing is made where nothing keeps it to them."""


@record(frozen=True)
class ImageRequest(Request):
    source: Annotated[str, Bounds(min_length=1)]
    """Recipe folder or shipped recipe; for an import: path or Docker image name."""
    name: str | None = None


IMAGES = Operation("GET", "/images", list[ImageInfo], READ, "images")
ENSURE_IMAGE = Operation[Any]("POST", "/images/ensure", LINES, RUN, "images", body=EnsureImageRequest)
BUILD_IMAGE = Operation[Any]("POST", "/images/build", LINES, ADMIN, "images", body=ImageRequest)
IMPORT_IMAGE = Operation[Any]("POST", "/images/import", LINES, ADMIN, "images", body=ImageRequest)
REMOVE_IMAGE = Operation[None]("DELETE", "/images/{ref:path}", None, ADMIN, "images", by="images.remove")
USAGE = Operation("GET", "/usage", UsageInfo, ADMIN, "storage", by="storage")
POLICY = Operation("GET", "/policy", Policy, READ, "storage")
SET_POLICY = Operation("PUT", "/policy", Policy, ADMIN, "storage", body=Policy)
CLEAR_POLICY = Operation[None]("DELETE", "/policy", None, ADMIN, "storage")
PRUNE = Operation[Any]("POST", "/prune", LINES, ADMIN, "storage", body=PruneRequest)
CHECK = Operation[Any]("POST", "/check", LINES, ADMIN, "storage", body=CheckRequest)
REPAIR = Operation[Any]("POST", "/repair", LINES, ADMIN, "storage")
EXPORT = Operation[Any]("GET", "/snapshots/{ref}/export", FRAMES, READ, "storage", query=ExportQuery)
IMPORT_BUNDLE = Operation[Any]("POST", "/import", LINES, ADMIN, "storage", body=BYTES)
MOUNT = Operation[None]("POST", "/mount", None, ADMIN, "storage", body=MountRequest)
UNMOUNT = Operation[None]("POST", "/umount", None, ADMIN, "storage", body=MountRequest)
