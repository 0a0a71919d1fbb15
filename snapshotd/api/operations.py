"""The operations of the API: one row for each. The daemon registers its handlers by them, and both clients send what
they say; docs/openapi.json is made of them."""

from __future__ import annotations

import re
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote

from snapshotd.api.access import AuditInfo, CreatedTokenInfo, CreateTokenRequest, Scope, TokenInfo
from snapshotd.api.approvals import ApprovalInfo, ApprovalView, ApproveRequest, AskRequest, DenyRequest
from snapshotd.api.commands import BackgroundRequest, CommandInfo, ExecRequest, InputInfo, InputRequest, SignalRequest
from snapshotd.api.experiments import (
    BisectRequest,
    CompareInfo,
    CompareRequest,
    ExperimentRequest,
    ExperimentState,
    ScoreRequest,
)
from snapshotd.api.files import FileInfo, MakeDirRequest, RemoveFileRequest, RenameFileRequest
from snapshotd.api.find import FindInfo
from snapshotd.api.fleet import (
    DrainRequest,
    EndReservationRequest,
    FleetNodeInfo,
    FleetSnapshotInfo,
    ForgetRequest,
    ReservationInfo,
    ReserveRequest,
)
from snapshotd.api.history import (
    CompensateRequest,
    EditRequest,
    EffectInfo,
    MergeInfo,
    MergeRequest,
    PromoteRequest,
    ResumeRequest,
    RetryRequest,
    RewindPreview,
    RewindRequest,
    TaskInfo,
)
from snapshotd.api.record import Json, Request
from snapshotd.api.service import VersionInfo
from snapshotd.api.snapshots import (
    FileStatus,
    MessageInfo,
    RestoreInfo,
    RestoreRequest,
    SnapshotInfo,
    SnapshotRequest,
    TaggedInfo,
    TagRequest,
)
from snapshotd.api.stats import NodeStats, StatsInfo
from snapshotd.api.storage import (
    CheckRequest,
    EnsureImageRequest,
    ImageInfo,
    ImageRequest,
    MountRequest,
    Policy,
    PruneRequest,
    UsageInfo,
)
from snapshotd.api.trajectories import (
    CreatedInfo,
    CreateRequest,
    ForkInfo,
    ForkQueueRequest,
    ForkRequest,
    KeepAliveRequest,
    NetworkInfo,
    NetworkRequest,
    OverviewInfo,
    RunAgentRequest,
    SandboxInfo,
    TrajectoryInfo,
)
from snapshotd.api.values import PutValueRequest, SearchRequest, ValueInfo
from snapshotd.api.wire import BYTES, FRAMES, LINES, TEXT, check_ref

A = TypeVar("A")
READ: Final = "read"
"""Looking. The others: what changes trajectories and values; deciding for a person; the daemon, its storage and images, and
all that names a path of its machine."""
RUN: Final = "run"
APPROVE: Final = "approve"
ADMIN: Final = "admin"
_PLACE = re.compile(r"\{(\w+)(:path)?\}")


class Operation(Generic[A]):
    """One operation. `body`: the record that it takes, or the media type of what is streamed to the daemon. `answer`: the
    type of its JSON, or the media type of what comes piece by piece. `once`: it makes something, and has a key, under
    which that is made once. `scope`: what its caller may do. `subject`: its group in docs/openapi.json. `by`: the
    engine's service whose method of the same name (or SERVICE.METHOD) answers it with what the request says, where nothing
    else is to do. `own`: its list has the things of the caller's tenant alone."""

    __slots__ = ("answer", "body", "by", "method", "name", "once", "own", "path", "scope", "status", "subject")

    def __init__(
        self,
        method: str,
        path: str,
        answer: type[A] | str | None,
        scope: Scope,
        subject: str,
        *,
        body: type[Request] | str | None = None,
        once: bool = False,
        status: int = 200,
        by: str | None = None,
        own: bool = False,
    ) -> None:
        self.name = ""
        self.method, self.path, self.answer, self.scope, self.subject = method, path, answer, scope, subject
        self.body, self.once, self.by, self.own = body, once, by, own
        self.status = 204 if answer is None else status

    @property
    def is_upload(self) -> bool:
        """Its body has any size, and is read as it comes."""
        return isinstance(self.body, str)

    def at(self, *names: str) -> tuple[str, str]:
        """Its method, and `to`."""
        return self.method, self.to(*names)

    def to(self, *names: str) -> str:
        """Its path with these names in their places. NotFound for a text that cannot be such a name."""
        parts = iter(names)
        return _PLACE.sub(lambda place: quote(self._check_name(place, next(parts)), safe=""), self.path)

    def _check_name(self, place: re.Match[str], name: str) -> str:
        if place[2] or place[1] == "name":
            return name  # any text: the daemon says what is wrong with it
        if place[1] == "ref":
            return check_ref(name, "trajectory" if self.path.startswith("/trajectories/") else "snapshot or trajectory")
        return check_ref(name, place[1])


CREATE = Operation("POST", "/sandboxes", CreatedInfo, RUN, "runs", body=CreateRequest, once=True, status=201)
SANDBOXES = Operation("GET", "/sandboxes", list[SandboxInfo], READ, "runs", by="runs", own=True)
RUN_AGENT = Operation("POST", "/runs", TrajectoryInfo, RUN, "runs", body=RunAgentRequest, once=True, status=201)
STOP = Operation("POST", "/trajectories/{ref}/stop", TrajectoryInfo, RUN, "runs", by="runs")
KEEP_ALIVE = Operation[None]("POST", "/keep_alive", None, RUN, "runs", body=KeepAliveRequest, by="runs")
TAKE_SNAPSHOT = Operation(
    "POST", "/trajectories/{ref}/snapshot", SnapshotInfo, RUN, "runs", body=SnapshotRequest, once=True, by="runs"
)
EVENTS = Operation[Any]("GET", "/trajectories/{ref}/events", LINES, READ, "runs")
EXEC = Operation[Any]("POST", "/trajectories/{ref}/exec", LINES, RUN, "runs", body=ExecRequest, once=True)
EXEC_ATTENDED = Operation[Any]("POST", "/trajectories/{ref}/exec/attended", LINES, RUN, "runs", body=LINES, once=True)
EXEC_SNAPSHOT = Operation[Any]("POST", "/snapshots/{ref}/exec", LINES, RUN, "runs", body=ExecRequest)
EXEC_SNAPSHOT_ATTENDED = Operation[Any]("POST", "/snapshots/{ref}/exec/attended", LINES, RUN, "runs", body=LINES)
CONNECT = Operation[Any]("POST", "/trajectories/{ref}/ports/{port}", FRAMES, RUN, "runs", body=BYTES)
NETWORK = Operation("GET", "/trajectories/{ref}/network", NetworkInfo, READ, "runs", by="runs")
CHANGE_NETWORK = Operation(
    "PUT", "/trajectories/{ref}/network", NetworkInfo, RUN, "runs", body=NetworkRequest, by="runs"
)
FORK = Operation("POST", "/snapshots/{ref}/fork", ForkInfo, RUN, "runs", body=ForkRequest, once=True, status=201)
FORK_QUEUE = Operation[Any]("POST", "/snapshots/{ref}/fork_queue", LINES, RUN, "branching", body=ForkQueueRequest)

START_COMMAND = Operation(
    "POST", "/trajectories/{ref}/commands", CommandInfo, RUN, "runs", body=BackgroundRequest, once=True, status=201
)
COMMANDS = Operation("GET", "/trajectories/{ref}/commands", list[CommandInfo], READ, "runs", by="runs")
COMMAND = Operation("GET", "/trajectories/{ref}/commands/{command}", CommandInfo, READ, "runs", by="runs")
COMMAND_EVENTS = Operation[Any]("GET", "/trajectories/{ref}/commands/{command}/events", LINES, READ, "runs")
SIGNAL_COMMAND = Operation(
    "POST", "/trajectories/{ref}/commands/{command}/signal", CommandInfo, RUN, "runs", body=SignalRequest, by="runs"
)
REMOVE_SERVICE = Operation(
    "DELETE", "/trajectories/{ref}/services/{name}", SnapshotInfo, RUN, "runs", once=True, by="runs"
)
WRITE_COMMAND = Operation(
    "POST", "/trajectories/{ref}/commands/{command}/stdin", InputInfo, RUN, "runs", body=InputRequest
)

TRAJECTORIES = Operation("GET", "/trajectories", list[TrajectoryInfo], READ, "trajectories", by="snapshots", own=True)
TRAJECTORY = Operation("GET", "/trajectories/{ref}", TrajectoryInfo, READ, "trajectories", by="snapshots")
REMOVE = Operation[None]("DELETE", "/trajectories/{ref}", None, RUN, "trajectories", by="runs")
OVERVIEW = Operation("GET", "/overview", list[OverviewInfo], READ, "trajectories", by="snapshots", own=True)
FIND = Operation("GET", "/find", FindInfo, READ, "trajectories", by="find")
LOG = Operation("GET", "/trajectories/{ref}/log", list[SnapshotInfo], READ, "trajectories")

ALL_SNAPSHOTS = Operation("GET", "/snapshots", list[SnapshotInfo], READ, "snapshots", by="snapshots.all", own=True)
SNAPSHOT = Operation("GET", "/snapshots/{ref}", SnapshotInfo, READ, "snapshots")
CONVERSATION = Operation("GET", "/snapshots/{ref}/conversation", list[MessageInfo], READ, "snapshots", by="journal")
OUTPUT = Operation[Any]("GET", "/snapshots/{ref}/output/{which}", BYTES, READ, "snapshots")
CAT = Operation[Any]("GET", "/snapshots/{ref}/file", BYTES, READ, "snapshots", by="snapshots")
FILE_STATUS = Operation("GET", "/snapshots/{ref}/status", FileStatus, READ, "snapshots", by="snapshots.lstat")
RESTORE = Operation("POST", "/snapshots/{ref}/restore", RestoreInfo, ADMIN, "snapshots", body=RestoreRequest)
DIFF = Operation[Any]("GET", "/diff", LINES, READ, "snapshots")
PATCH = Operation[Any]("GET", "/patch", LINES, READ, "snapshots")
TAG = Operation("PUT", "/tags/{name}", TaggedInfo, RUN, "snapshots", body=TagRequest, once=True)
UNTAG = Operation[None]("DELETE", "/tags/{name}", None, RUN, "snapshots", by="snapshots")

READ_FILE = Operation[Any]("GET", "/files/{ref}/content", BYTES, READ, "files", by="files.read")
STAT_FILE = Operation("GET", "/files/{ref}/stat", FileInfo, READ, "files", by="files.stat")
LIST_FILES = Operation[Any]("GET", "/files/{ref}/list", LINES, READ, "files")
READ_ARCHIVE = Operation[Any]("GET", "/files/{ref}/archive", FRAMES, READ, "files")
WRITE_FILE = Operation[Any]("POST", "/files/{ref}/content", LINES, RUN, "files", body=BYTES, once=True)
WRITE_ARCHIVE = Operation[Any]("POST", "/files/{ref}/archive", LINES, RUN, "files", body=BYTES, once=True)
MAKE_DIR = Operation(
    "POST", "/files/{ref}/make_dir", SnapshotInfo, RUN, "files", body=MakeDirRequest, once=True, by="files"
)
REMOVE_FILE = Operation(
    "POST", "/files/{ref}/remove", SnapshotInfo, RUN, "files", body=RemoveFileRequest, once=True, by="files.remove"
)
RENAME_FILE = Operation(
    "POST", "/files/{ref}/rename", SnapshotInfo, RUN, "files", body=RenameFileRequest, once=True, by="files.rename"
)

JOURNAL = Operation[Any]("GET", "/snapshots/{ref}/journal", LINES, READ, "history")
STATE = Operation[Json]("GET", "/snapshots/{ref}/state", dict[str, Any], READ, "history", by="journal")
TASKS = Operation("GET", "/snapshots/{ref}/tasks", list[TaskInfo], READ, "history", by="journal")
RESUME = Operation("POST", "/trajectories/{ref}/resume", TrajectoryInfo, RUN, "history", body=ResumeRequest, by="runs")
PREVIEW_REWIND = Operation("GET", "/trajectories/{ref}/rewind", RewindPreview, READ, "history", by="branching")
REWIND = Operation(
    "POST", "/trajectories/{ref}/rewind", SnapshotInfo, RUN, "history", body=RewindRequest, once=True, by="branching"
)
UNDO = Operation("POST", "/trajectories/{ref}/undo", SnapshotInfo, RUN, "history", once=True, by="branching")
PROMOTE = Operation(
    "POST", "/trajectories/{ref}/promote", SnapshotInfo, RUN, "history", body=PromoteRequest, once=True, by="branching"
)
MERGE = Operation("POST", "/trajectories/{ref}/merge", MergeInfo, RUN, "history", body=MergeRequest, once=True)
RETRY = Operation(
    "POST", "/trajectories/{ref}/retry", SnapshotInfo, RUN, "history", body=RetryRequest, once=True, by="branching"
)
EFFECTS = Operation("GET", "/trajectories/{ref}/effects", list[EffectInfo], READ, "history", by="branching")
COMPENSATE = Operation(
    "POST", "/trajectories/{ref}/compensate", list[EffectInfo], RUN, "history", body=CompensateRequest, by="branching"
)
EDIT = Operation(
    "POST", "/snapshots/{ref}/edit", TrajectoryInfo, RUN, "history", body=EditRequest, once=True, status=201
)

APPROVALS = Operation("GET", "/approvals", list[ApprovalInfo], READ, "approvals", by="approvals.list", own=True)
ASK = Operation[ApprovalInfo | None](
    "POST",
    "/approvals",
    ApprovalInfo | None,  # type: ignore[arg-type]  # a union is no class
    RUN,
    "approvals",
    body=AskRequest,
    once=True,  # the call's name makes it the same question
)
APPROVAL = Operation("GET", "/approvals/{approval}", ApprovalView, READ, "approvals")
APPROVE_CALL = Operation(
    "POST", "/approvals/{approval}/approve", ApprovalInfo, APPROVE, "approvals", body=ApproveRequest
)
DENY_CALL = Operation("POST", "/approvals/{approval}/deny", ApprovalInfo, APPROVE, "approvals", body=DenyRequest)
WATCH = Operation[Any]("GET", "/watch", LINES, READ, "approvals")

COMPARE = Operation("POST", "/compare", CompareInfo, READ, "branching", body=CompareRequest, by="experiments")
SCORE = Operation[Any]("POST", "/score", LINES, RUN, "branching", body=ScoreRequest)
BISECT = Operation[Any]("POST", "/bisect", LINES, RUN, "branching", body=BisectRequest)
CREATE_EXPERIMENT = Operation(
    "POST", "/experiments", ExperimentState, RUN, "branching", body=ExperimentRequest, once=True, status=201
)
EXPERIMENTS = Operation("GET", "/experiments", list[ExperimentState], READ, "branching", by="experiments.list")
EXPERIMENT = Operation("GET", "/experiments/{experiment}", ExperimentState, READ, "branching", by="experiments.get")
EXPERIMENT_EVENTS = Operation[Any]("GET", "/experiments/{experiment}/events", LINES, READ, "branching")
STOP_EXPERIMENT = Operation(
    "POST", "/experiments/{experiment}/stop", ExperimentState, RUN, "branching", by="experiments.stop"
)
REMOVE_EXPERIMENT = Operation[None](
    "DELETE", "/experiments/{experiment}", None, RUN, "branching", by="experiments.remove"
)

GET_VALUE = Operation("GET", "/store/value", ValueInfo, READ, "store")
PUT_VALUE = Operation("PUT", "/store/value", ValueInfo, RUN, "store", body=PutValueRequest)
DELETE_VALUE = Operation[None]("DELETE", "/store/value", None, RUN, "store")
VALUE_HISTORY = Operation("GET", "/store/history", list[ValueInfo], READ, "store")
SEARCH_VALUES = Operation("POST", "/store/search", list[ValueInfo], READ, "store", body=SearchRequest)

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
EXPORT = Operation[Any]("GET", "/snapshots/{ref}/export", FRAMES, READ, "storage")
IMPORT_BUNDLE = Operation[Any]("POST", "/import", LINES, ADMIN, "storage", body=BYTES)
MOUNT = Operation[None]("POST", "/mount", None, ADMIN, "storage", body=MountRequest)
UNMOUNT = Operation[None]("POST", "/umount", None, ADMIN, "storage", body=MountRequest)

FLEET_NODES = Operation("GET", "/fleet/nodes", list[FleetNodeInfo], RUN, "fleet", by="fleet")
FLEET_SNAPSHOT = Operation("GET", "/fleet/snapshots/{ref}", FleetSnapshotInfo, RUN, "fleet", by="fleet")
FLEET_STATUS = Operation("GET", "/fleet/status", list[NodeStats], ADMIN, "fleet", by="fleet")
DRAIN_NODE = Operation[None]("POST", "/fleet/drain", None, ADMIN, "fleet", body=DrainRequest, by="fleet")
FORGET_NODE = Operation[None]("POST", "/fleet/forget", None, ADMIN, "fleet", body=ForgetRequest, by="fleet")
RESERVE = Operation("POST", "/fleet/reservations", ReservationInfo, RUN, "fleet", body=ReserveRequest, by="fleet")
END_RESERVATION = Operation[None](
    "POST", "/fleet/reservations/end", None, RUN, "fleet", body=EndReservationRequest, by="fleet"
)

VERSION = Operation("GET", "/version", VersionInfo, READ, "service")
STATUS = Operation[Json]("GET", "/status", dict[str, Any], READ, "service")
STATS = Operation("GET", "/stats", StatsInfo, READ, "service")
METRICS = Operation[Any]("GET", "/metrics", TEXT, READ, "service")
FLUSH = Operation[None]("POST", "/flush", None, READ, "service")
SHUTDOWN = Operation[Json]("POST", "/shutdown", dict[str, int], ADMIN, "service", status=202)

TOKENS = Operation("GET", "/tokens", list[TokenInfo], ADMIN, "access")
CREATE_TOKEN = Operation("POST", "/tokens", CreatedTokenInfo, ADMIN, "access", body=CreateTokenRequest, status=201)
REVOKE_TOKEN = Operation[None]("DELETE", "/tokens/{token}", None, ADMIN, "access")
AUDIT = Operation("GET", "/audit", list[AuditInfo], ADMIN, "access")

OPERATIONS: dict[str, Operation[Any]] = {
    name.lower(): row for name, row in list(globals().items()) if isinstance(row, Operation)
}
"""Name to row."""
for _name, _row in OPERATIONS.items():
    _row.name = _name
