"""Commands in sandboxes: those that a client waits for, and those in the background."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypedDict

from snapshotd.api.operation import READ, RUN, Operation
from snapshotd.api.record import ApiRecord, Bounds, OneOf, Request, field, record
from snapshotd.api.snapshots import SnapshotInfo, Tool
from snapshotd.api.trajectories import Idle
from snapshotd.api.wire import LINES, STDIN_WINDOW_BYTES, TIMEOUT_MAX_S
from snapshotd.terms import READY_TIMEOUT_MAX_S, READY_TIMEOUT_S, RESTARTS_MAX


@record(frozen=True)
class TerminalSize(Request):
    rows: Annotated[int, Bounds(ge=1, le=0xFFFF)]
    columns: Annotated[int, Bounds(ge=1, le=0xFFFF)]


class TrialOptions(TypedDict, total=False):
    """The keywords by which the client's methods take the fields of a command: without the unit in a name."""

    cwd: str | None
    env: Mapping[str, str] | None
    user: str | None


class CommandOptions(TrialOptions, total=False):
    """With a time after which the command is ended."""

    timeout: float | None


class ExecOptions(CommandOptions, total=False):
    """The same for a command in a trajectory."""

    idle_timeout: float | None


@record(frozen=True)
class CommandFields(Request):
    """A command, and the user that runs it."""

    argv: Annotated[tuple[str, ...], Bounds(min_length=1)]
    cwd: str | None = None
    """Absolute path in the sandbox; its working directory if null."""
    env: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    """Name or number, optionally with `:group`; looked up in the sandbox's own files."""
    timeout_s: Annotated[float, Bounds(gt=0, le=TIMEOUT_MAX_S, allow_inf_nan=False)] | None = None
    """After so many seconds the command is ended with everything that it started: status `timed-out`, exit code 124."""
    idle_timeout_s: Idle | None = None
    """The sandbox ends, with a last snapshot, after so many seconds without a command; 0: never. Null: as it is; the
    daemon's default if it was stopped."""


@record(frozen=True)
class ExecRequest(CommandFields):
    if_head: str | None = None
    """Only while this snapshot is the trajectory's head; else a Conflict that names the head."""
    terminal: TerminalSize | None = None
    """Give the command a terminal of this size in place of pipes; all that it prints is `stdout`. Only for an attended
    command, which then ends when its client goes away."""


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
class ServiceOptions(Request):
    """The declaration that a command is a service: it is started again wherever a sandbox begins from a later snapshot."""

    name: Annotated[str, Bounds(min_length=1, max_length=64)]
    ready: Annotated[str, Bounds(max_length=32 << 10)] | None = None
    """A shell's command line whose success in the sandbox says that the service is ready."""
    port: Annotated[int, Bounds(ge=1, le=65535)] | None = None
    """A TCP port of the sandbox's loopback, on which it listens when it is ready. Without both it is ready at once."""
    ready_timeout_s: Annotated[float, Bounds(gt=0, le=READY_TIMEOUT_MAX_S, allow_inf_nan=False)] = READY_TIMEOUT_S
    """A service that is not ready after so many seconds is ended."""
    required: bool = False
    """Where it does not come back, the sandbox does not start; else it starts without it."""
    restarts: Annotated[int, Bounds(ge=0, le=RESTARTS_MAX)] = 0
    """How often it is started again in one sandbox after it has ended by itself."""


@record(frozen=True)
class BackgroundRequest(CommandFields):
    stdin: bool = False
    """Its standard input is what is written to it; else it is empty."""
    service: ServiceOptions | None = None
    """The command is a service, and the answer comes when it is ready. It has neither `stdin` nor `timeout_s`."""


@record(frozen=True)
class SignalRequest(Request):
    signal: Annotated[int, Bounds(ge=1, le=64)] = 15
    """Number of the signal; 15 is SIGTERM."""


@record(frozen=True)
class InputRequest(Request):
    """Standard input for a command in the background."""

    data_b64: Annotated[str, Bounds(max_length=STDIN_WINDOW_BYTES * 4 // 3 + 4)] = ""
    end: bool = False
    """Close the input behind the data."""


@record(frozen=True)
class InputInfo(ApiRecord):
    bytes: int
    """Bytes that the command has taken. Fewer than were sent: it does not read just now; send the rest again."""


@record(frozen=True)
class CommandInfo(ApiRecord):
    """A command in the background, or one that a client runs in the foreground."""

    id: str
    trajectory: str
    argv: tuple[str, ...]
    cwd: str
    stdin: bool
    """True: the command has a standard input."""
    timeout_s: float | None
    started_at: str
    status: Annotated[str, OneOf("running", "done", "failed", "interrupted", "timed-out", "unknown")]
    """`running`, or how its call ended."""
    exit_code: int | None
    ended_at: str | None
    snapshot: str | None
    """Taken when it ended; null while it runs, if none could be taken, and for a service."""
    error: str | None
    """Why it ended, where its exit code does not say it."""
    background: bool = True
    """True: the command runs on without a client. False: a client runs it, which may have gone away. It is listed while it runs."""
    service: str | None = None
    """The service that the command is."""
    service_state: Annotated[str, OneOf("starting", "ready", "ended", "failed", "stopped")] | None = None
    """The state of a service: `starting`, `ready`; `ended` and `failed` by itself, `stopped` with its sandbox, or for a rewind."""
    restarts: int = 0
    """How often the service was started again in this sandbox."""
    port: int | None = None
    """The port that the service has declared."""


EXEC = Operation[Any]("POST", "/trajectories/{ref}/exec", LINES, RUN, "runs", body=ExecRequest, once=True)
EXEC_ATTENDED = Operation[Any]("POST", "/trajectories/{ref}/exec/attended", LINES, RUN, "runs", body=LINES, once=True)
EXEC_SNAPSHOT = Operation[Any]("POST", "/snapshots/{ref}/exec", LINES, RUN, "runs", body=ExecRequest)
EXEC_SNAPSHOT_ATTENDED = Operation[Any]("POST", "/snapshots/{ref}/exec/attended", LINES, RUN, "runs", body=LINES)
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
