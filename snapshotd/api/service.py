"""The daemon itself: its version, its errors, and figures of the moment: disk, sandboxes, pauses of the last hour, requests."""

from __future__ import annotations

from typing import Annotated, Any

from snapshotd.api.operation import ADMIN, READ, Operation
from snapshotd.api.record import ApiRecord, Json, OneOf, record
from snapshotd.api.storage import UsageInfo
from snapshotd.api.wire import TEXT


@record(frozen=True)
class VersionInfo(ApiRecord):
    version: str
    """The version of the package snapshotd."""
    api_version: str
    """Version of the HTTP API."""
    pid: int
    state_dir: str
    """The daemon's state directory."""


@record(frozen=True)
class ErrorDetail(ApiRecord):
    code: str
    """Name of the error's class, stable: NotFound, Conflict, ..."""
    message: str
    """One sentence: what failed, on which thing, why, and the next step."""


@record(frozen=True)
class ErrorAnswer(ApiRecord):
    error: ErrorDetail


DISK_MAX = 10_000
"""Most trajectories whose disk use is told."""


@record(frozen=True)
class SandboxStats(ApiRecord):
    """A live sandbox."""

    trajectory: str
    name: str | None
    runtime: str
    agent_running: bool
    started_at: str
    cpu_ms: float
    """Processor time since it started, of all its processes. Its rate is the load."""
    used_memory_bytes: int
    """Memory in use, without what the kernel keeps of files and can drop."""
    process_count: int
    """Number of processes."""
    cpus: float
    """Most processors that it may use."""
    memory_bytes: int
    """Most memory that it may use."""


@record(frozen=True)
class TrajectoryDisk(ApiRecord):
    trajectory: str
    name: str | None
    layer_bytes: int
    """Disk use of the layers that its snapshots added."""
    file_bytes: int
    """Content of the files that its snapshots added or changed."""


@record(frozen=True)
class PauseMinute(ApiRecord):
    """The pauses of sandboxes within one minute."""

    began_at: str
    counts: tuple[int, ...]
    """By the classes of `PauseStats`."""
    sum_ms: float
    longest_ms: float
    """The longest duration."""


@record(frozen=True)
class PauseStats(ApiRecord):
    """Pauses of sandboxes for their snapshots, by classes of duration."""

    bounds_ms: tuple[float, ...]
    """Longest pause of each class; one more class, the last, has no bound."""
    counts: tuple[int, ...]
    """Number in each class since the daemon began."""
    sum_ms: float
    minutes: tuple[PauseMinute, ...]
    """The minutes of the last hour in which there were any, oldest first."""


@record(frozen=True)
class RequestStats(ApiRecord):
    """Requests of one operation that had one HTTP status, since the daemon began."""

    operation: str
    """Method and path, as in the API's description."""
    status: str
    count: int
    """Number of requests."""
    sum_ms: float
    """Their durations added up, those of streams included."""


@record(frozen=True)
class NodeStats(ApiRecord):
    """A node of a fleet, as its database has it since the node's last renewal."""

    node: str
    state: Annotated[str, OneOf("leased", "draining", "lost")]
    """`lost`: its lease has run out, and others may take its trajectories over."""
    lease_s: float
    """Seconds that are left of the node's lease; 0: it has run out."""
    trajectory_count: int
    free_memory_bytes: int
    starting_count: int
    starting_max: int
    unpublished_count: int
    """Snapshots that it has captured and not published: its lag."""
    architecture: str


@record(frozen=True)
class StatsInfo(ApiRecord):
    measured_at: str
    """Time at which the figures were taken."""
    began_at: str
    """Start of the daemon."""
    sandboxes: tuple[SandboxStats, ...]
    """Live sandboxes."""
    disk: tuple[TrajectoryDisk, ...]
    """The trajectories with most layers on disk, at most as many as were asked for."""
    usage: UsageInfo
    """Disk use, as `df` has it."""
    pauses: PauseStats
    """Pauses of sandboxes for their snapshots."""
    requests: tuple[RequestStats, ...]
    """Requests by operation and status."""
    watchers: int
    """Clients that follow events of all trajectories."""
    nodes: tuple[NodeStats, ...] = ()
    """All nodes of the fleet that the daemon belongs to; empty where there is none."""


STATS = Operation("GET", "/stats", StatsInfo, READ, "service")
VERSION = Operation("GET", "/version", VersionInfo, READ, "service")
STATUS = Operation[Json]("GET", "/status", dict[str, Any], READ, "service")
METRICS = Operation[Any]("GET", "/metrics", TEXT, READ, "service")
FLUSH = Operation[None]("POST", "/flush", None, READ, "service")
SHUTDOWN = Operation[Json]("POST", "/shutdown", dict[str, int], ADMIN, "service", status=202)
