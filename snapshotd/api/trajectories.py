"""Trajectories and their sandboxes: create, run, fork."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from snapshotd.api.history import EditFields, EditRequest, ResumeRequest
from snapshotd.api.operation import READ, RUN, Operation
from snapshotd.api.record import UNSET, ApiRecord, Bounds, OneOf, Request, Secret, field, record, unset
from snapshotd.api.snapshots import ModelUseInfo, SnapshotInfo
from snapshotd.api.wire import BYTES, FORK_MAX, FRAMES, LINES, PROVIDER_URLS, QUEUE_MAX, TIMEOUT_MAX_S
from snapshotd.terms import DEFAULT_TENANT, MOST_RULES, NETWORK_MAX, SERVICES_MAX_BYTES

Network = Annotated[str, Bounds(max_length=NETWORK_MAX)]
HostRule = Annotated[str, Bounds(max_length=300)]
ProviderKind = Annotated[str, OneOf("openai", "anthropic", "gemini")]
Idle = Annotated[float, Bounds(ge=0, le=TIMEOUT_MAX_S, allow_inf_nan=False)]


@record(frozen=True)
class LimitsInfo(ApiRecord):
    memory_bytes: int
    cpus: float
    pids: int
    disk_bytes: int
    """Most disk. 0: half of the file system that holds the layers."""


@record(frozen=True)
class AgentInfo(ApiRecord):
    argv: tuple[str, ...]
    program: int
    """How many leading items of argv are the program; a fork may replace the rest."""
    cwd: str


@record(frozen=True)
class TrajectoryInfo(ApiRecord):
    id: str
    name: str | None
    status: Annotated[str, OneOf("running", "stopped", "finished", "failed", "interrupted")]
    """`running`: its sandbox is up. `stopped`: no sandbox, goes on from its head. `finished`, `failed`: its agent ended.
    `interrupted`: its sandbox went away without a request (crash of daemon or machine)."""
    head: str
    """Its newest snapshot; a fresh fork's is the snapshot it began at."""
    image: str
    runtime: str
    network: str
    """The network that its sandbox reaches: `none`; `bridge`, the outside through NAT; `allow:` and the hosts that it reaches,
    with commas between them (docs/network.md); or `host`, without isolation, the machine's own."""
    limits: LimitsInfo
    """Most that a sandbox may use."""
    agent: AgentInfo | None
    """The program of a trajectory."""
    created_at: str
    forked_from: str | None
    """The snapshot that a trajectory began at."""
    experiment: str | None
    exit_code: int | None
    """The agent's, when it has ended."""


@record(frozen=True)
class OverviewInfo(ApiRecord):
    """A trajectory as a list or a tree of all shows it."""

    trajectory: TrajectoryInfo
    snapshots: int
    """Number of its own."""
    newest: SnapshotInfo | None
    """The one taken last, which is not its head after a rewind."""
    origin: SnapshotInfo | None
    """The snapshot that it was forked from."""
    file_bytes: int
    """Content of the files that its snapshots added or changed, as far as it is counted. The repository holds equal content
    once, and compressed."""
    layer_bytes: int
    """Disk use of the layers that its snapshots added. Layers of stored snapshots go when the budget is used up."""
    model_use: ModelUseInfo


@record(frozen=True)
class CreatedInfo(ApiRecord):
    trajectory: TrajectoryInfo
    snapshot: SnapshotInfo


@record(frozen=True)
class NetworkInfo(ApiRecord):
    """The network of a trajectory's sandboxes."""

    trajectory: str
    network: str
    rules: tuple[str, ...]
    """The rules of a network `allow:`, in their one form."""
    refused: tuple[str, ...]
    """Connections of the running sandbox that they refused since its last snapshot, one sentence each; the snapshots have
    the earlier ones."""


class NetworkChange(TypedDict, total=False):
    """The keywords by which the client takes a `NetworkRequest`."""

    allow: Sequence[str]
    deny: Sequence[str]
    only: Sequence[str] | None


@record(frozen=True)
class NetworkRequest(Request):
    """A change of the hosts that a trajectory's sandboxes reach. First `only`, then `deny`, then `allow`."""

    allow: Annotated[tuple[HostRule, ...], Bounds(max_length=MOST_RULES)] = ()
    """Hosts that are reached from now on, too."""
    deny: Annotated[tuple[HostRule, ...], Bounds(max_length=MOST_RULES)] = ()
    """Hosts that are not reached any more; `*`: none is."""
    only: Annotated[tuple[HostRule, ...], Bounds(max_length=MOST_RULES)] | None = None
    """All rules, in the place of those so far. Null: those so far."""


@record(frozen=True)
class SandboxInfo(ApiRecord):
    """A live sandbox."""

    trajectory: TrajectoryInfo
    container: str
    """The container of a live sandbox."""
    pid: int
    """Its init, in the daemon's pid namespace."""
    started_at: str
    agent_running: bool


@record(frozen=True)
class ForkInfo(ApiRecord):
    experiment: str
    trajectories: tuple[TrajectoryInfo, ...]
    warnings: tuple[str, ...] = ()
    """A sentence for each service that did not come back."""


@record(frozen=True)
class LimitsRequest(Request):
    """Limits of a sandbox. One that is left out is the default, or in a variant the source's."""

    memory_bytes: Annotated[int, Bounds(ge=16 << 20, le=1 << 50)] = unset()
    """Swap included; at least 16 MiB. By default 2 GiB."""
    cpus: Annotated[float, Bounds(ge=0.01, le=4096, allow_inf_nan=False)] = unset()
    """By default 2."""
    pids: Annotated[int, Bounds(ge=8, le=4 << 20)] = unset()
    """By default 1024."""
    disk_bytes: Annotated[int, Bounds(ge=16 << 20, le=1 << 50)] | None = unset()
    """Limit of all its layers above the image together; at least 16 MiB. Else half of the file system that holds them."""

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are given, as those of `snapshotd.types.Limits`."""
        given = {name: value for name, value in vars(self).items() if value is not UNSET}
        return given | ({"disk_bytes": given["disk_bytes"] or 0} if "disk_bytes" in given else {})


@record(frozen=True)
class Provider(Request):
    """A model provider for the recording gateway, which forwards requests of one API to it. The key stays in the daemon:
    it never enters a sandbox."""

    kind: ProviderKind
    base_url: Annotated[str, Bounds(max_length=4096)] | None = None
    """Else the provider's own."""
    api_key: Annotated[Secret, Bounds(max_length=4096)] | None = field(default=None, repr=False)
    """Stays in the daemon."""

    @property
    def url(self) -> str:
        """Its address."""
        return self.base_url or PROVIDER_URLS[self.kind]


class LimitOptions(TypedDict, total=False):
    """The keywords by which the client takes the limits of a sandbox. `memory` and `disk` are in bytes, or text such as "512m";
    None means the daemon's default."""

    memory: int | str | None
    cpus: float | None
    pids: int | None
    disk: int | str | None


class SandboxOptions(LimitOptions, total=False):
    """The keywords by which the client takes a new sandbox. `secrets` are environment whose values are recorded nowhere in plain;
    `providers` are the model providers that the recording gateway forwards to, and with `capture_tokens` it asks them for
    token ids and log probabilities (docs/agents/training.md); `tenant` is the tenant of the key-value store that its agents
    read and write. `network` is none (the default), bridge, or `allow:` and the hosts that are reached (docs/network.md); `runtime`
    "none" means a plain folder without isolation. `requirements` is a file of Python packages that its programs find,
    and `program` a folder of this machine that it has at /opt/agent-program. `services` is a TOML file of services,
    which are ready before the answer, or the agent, comes (docs/services.md)."""

    image: str
    runtime: str
    workspace: str | Path | None
    env: Mapping[str, str] | None
    network: str | None
    name: str | None
    secrets: Mapping[str, str] | None
    providers: Sequence[Provider]
    capture_tokens: bool
    tenant: str
    requirements: str | Path | None
    program: str | Path | None
    services: str | Path | None


@record(frozen=True)
class SandboxFields(Request):
    """The request for a new sandbox."""

    image: Annotated[str, Bounds(min_length=1, max_length=1024)] = "default"
    """Name or id of an image, or a Docker image name."""
    runtime: Literal["auto", "runc", "docker", "none"] = "auto"
    """`none`: a plain folder, without isolation (docs/folder-mode.md)."""
    workspace: str | None = None
    """Absolute path of a folder on the daemon's machine, copied to /workspace."""
    env: dict[str, str] = field(default_factory=dict)
    network: Network | None = None
    """`none`, `bridge`, or `allow:` and rules with commas between them (docs/network.md). Null: none; without isolation,
    the machine's own."""
    limits: LimitsRequest = field(default_factory=lambda: LimitsRequest())
    name: str | None = None
    secrets: dict[str, Secret] = field(default_factory=dict, repr=False)
    """Environment whose values are recorded nowhere in plain."""
    providers: Annotated[tuple[Provider, ...], Bounds(max_length=8)] = ()
    """Model providers that the recording gateway forwards to; none: no gateway."""
    capture_tokens: bool = False
    """The gateway asks for token ids and log probabilities, and keeps them with the model calls."""
    tenant: Annotated[str, Bounds(max_length=64)] = DEFAULT_TENANT
    """Tenant of the store that its agents, and the agents of its forks, read and write."""
    requirements: str | None = None
    """Absolute path of a requirements file on the daemon's machine."""
    program: str | None = None
    """Absolute path of a folder with an agent's program, for /opt/agent-program in the sandbox."""
    services: Annotated[str, Bounds(max_length=SERVICES_MAX_BYTES)] | None = None
    """TOML with tables `[services.NAME]` (docs/services.md); they are ready before the answer, or the agent, comes."""


@record(frozen=True)
class CreateRequest(SandboxFields):
    """A sandbox without an agent."""

    idle_timeout_s: Idle = 0
    """The sandbox ends, with a last snapshot, after so many seconds without a command; 0: never."""


class RunOptions(SandboxOptions, total=False):
    """The keywords by which the client takes a `RunAgentRequest`, besides `agent` and `detach`."""

    args: Sequence[str]
    command: Sequence[str]
    user: str | None
    reuse: bool
    reuse_replies: bool


@record(frozen=True)
class RunAgentRequest(SandboxFields):
    """Either `agent` (a Python file, with `args`) or `command` (argv inside the sandbox)."""

    agent: str | None = None
    """Absolute path of a Python file on the daemon's machine."""
    args: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    user: str | None = None
    """The user that runs it in the sandbox, as USER[:GROUP]; else root."""
    detach: bool = False
    """Keep the run when the client goes away before it has the answer."""
    reuse: bool = False
    """Answer its tool calls from earlier runs that began in the same way, as long as it does the same."""
    reuse_replies: bool = False
    """With `reuse`: answer its model requests from them, too."""


@record(frozen=True)
class VariantFields(Request):
    """One child of a fork. `{index}` and `{variant}` in its name, its arguments and the values of its environment
    become its number from 0 and its label."""

    label: str
    name: str | None = None
    """Its name, in place of the fork's."""
    args: tuple[str, ...] | None = None
    """Its program's arguments, in place of the fork's."""
    env: dict[str, str] = field(default_factory=dict)
    """Added to the environment of the source."""
    secrets: dict[str, Secret] = field(default_factory=dict, repr=False)
    """Environment whose values are recorded nowhere in plain."""
    edit: EditFields | None = None
    """Changes of files and mind: its first snapshot."""
    model: Annotated[str, Bounds(min_length=1, max_length=256)] | None = None
    """Every model request through its gateway asks for this model."""
    network: Network | None = None
    """Null: the source's."""
    limits: LimitsRequest | None = None
    """The fields that are given go before the source's limits."""


class _ForkedOptions(TypedDict, total=False):
    args: Sequence[str] | None
    name: str | None
    resume: bool
    variants: Mapping[str, Mapping[str, Any]] | None


class ForkOptions(_ForkedOptions, total=False):
    """The keywords by which the client takes a `ForkRequest`, besides `n`. `variants` are the keywords in which each child
    differs, by its label."""

    idle_timeout: float | None


class ForkQueueOptions(_ForkedOptions, total=False):
    """The same for a `ForkQueueRequest`."""

    parallel: int | None
    keep_going: bool


@record(frozen=True)
class ForkRequest(Request):
    n: Annotated[int, Bounds(ge=1, le=FORK_MAX)] = unset()
    """By default 1, or the number of variants."""
    args: tuple[str, ...] | None = None
    """Start the program in each with these; `{index}` is the fork's number from 0."""
    name: str | None = None
    resume: bool = False
    """Replay the program up to the snapshot; it goes on from there."""
    idle_timeout_s: Idle | None = None
    """A fork ends, with a last snapshot, after so many seconds without a command; 0: never; null: the daemon's default."""
    variants: Annotated[tuple[VariantFields, ...], Bounds(max_length=FORK_MAX)] = ()
    """One fork for each; `n` may be left out then."""

    @property
    def count(self) -> Any:
        """The number of forks."""
        return len(self.variants) or 1 if not isinstance(self.n, int) else self.n


class StopOptions(TypedDict, total=False):
    """The keywords by which the client takes a `StopQuery`."""

    discard: bool


@record(frozen=True)
class StopQuery(Request):
    discard: bool = False


class RemoveOptions(TypedDict, total=False):
    """The keywords by which the client takes a `RemoveQuery`."""

    force: bool


@record(frozen=True)
class RemoveQuery(Request):
    force: bool = False


@record(frozen=True)
class KeepAliveRequest(Request):
    trajectories: Annotated[tuple[str, ...], Bounds(max_length=QUEUE_MAX)]


@record(frozen=True)
class ForkQueueRequest(Request):
    n: Annotated[int, Bounds(ge=1, le=QUEUE_MAX)] = 1
    """Does not count where there are variants."""
    parallel: Annotated[int, Bounds(ge=1, le=QUEUE_MAX)] | None = None
    """Forks that run at once; null: as many as fit into the free memory."""
    keep_going: bool = False
    """A fork that does not start carries its error, and the others go on; else those that started are removed."""
    args: tuple[str, ...] | None = None
    """As in a fork, and so are the others. They have to give each fork a program."""
    name: str | None = None
    resume: bool = False
    variants: Annotated[tuple[VariantFields, ...], Bounds(max_length=QUEUE_MAX)] = ()


@record(frozen=True)
class QueuedFork(ApiRecord):
    """One fork of a queue after its program has ended."""

    index: int
    """Place of the fork among its siblings."""
    label: str
    trajectory: TrajectoryInfo | None
    """Null where it did not start."""
    error: str | None = None
    """Why it did not start, or its program did not run to its end."""


@record(frozen=True)
class QueueInfo(ApiRecord):
    """A fork that was made piece by piece. `children` in the order of their numbers."""

    experiment: str
    children: tuple[QueuedFork, ...]
    """Forks that were made one after the other."""

    @property
    def failed(self) -> tuple[QueuedFork, ...]:
        """The children that did not start, or whose program did not run to its end."""
        return tuple(child for child in self.children if child.error is not None)


CREATE = Operation("POST", "/sandboxes", CreatedInfo, RUN, "runs", body=CreateRequest, once=True, status=201)
SANDBOXES = Operation("GET", "/sandboxes", list[SandboxInfo], READ, "runs", by="runs", own=True)
RUN_AGENT = Operation("POST", "/runs", TrajectoryInfo, RUN, "runs", body=RunAgentRequest, once=True, status=201)
STOP = Operation("POST", "/trajectories/{ref}/stop", TrajectoryInfo, RUN, "runs", query=StopQuery, by="runs")
KEEP_ALIVE = Operation[None]("POST", "/keep_alive", None, RUN, "runs", body=KeepAliveRequest, by="runs")
EVENTS = Operation[Any]("GET", "/trajectories/{ref}/events", LINES, READ, "runs")
CONNECT = Operation[Any]("POST", "/trajectories/{ref}/ports/{port}", FRAMES, RUN, "runs", body=BYTES)
NETWORK = Operation("GET", "/trajectories/{ref}/network", NetworkInfo, READ, "runs", by="runs")
CHANGE_NETWORK = Operation(
    "PUT", "/trajectories/{ref}/network", NetworkInfo, RUN, "runs", body=NetworkRequest, by="runs"
)
FORK = Operation("POST", "/snapshots/{ref}/fork", ForkInfo, RUN, "runs", body=ForkRequest, once=True, status=201)
FORK_QUEUE = Operation[Any]("POST", "/snapshots/{ref}/fork_queue", LINES, RUN, "branching", body=ForkQueueRequest)
TRAJECTORIES = Operation("GET", "/trajectories", list[TrajectoryInfo], READ, "trajectories", by="snapshots", own=True)
TRAJECTORY = Operation("GET", "/trajectories/{ref}", TrajectoryInfo, READ, "trajectories", by="snapshots")
REMOVE = Operation[None]("DELETE", "/trajectories/{ref}", None, RUN, "trajectories", query=RemoveQuery, by="runs")
OVERVIEW = Operation("GET", "/overview", list[OverviewInfo], READ, "trajectories", by="snapshots", own=True)
RESUME = Operation("POST", "/trajectories/{ref}/resume", TrajectoryInfo, RUN, "history", body=ResumeRequest, by="runs")
EDIT = Operation(
    "POST", "/snapshots/{ref}/edit", TrajectoryInfo, RUN, "history", body=EditRequest, once=True, status=201
)
