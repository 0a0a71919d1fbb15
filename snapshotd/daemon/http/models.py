"""The API's words: requests and answers as JSON, and their conversion from the engine's values.

Times are ISO 8601 in UTC, durations milliseconds, sizes bytes. Sandbox paths are bytes: `path` is their text with
U+FFFD for bytes that are not UTF-8, and `path_b64` (base64) is there exactly when that lost something.
"""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from snapshotd import types as t
from snapshotd.daemon.http.wire import PROVIDER_URLS, TIMEOUT_MAX_S
from snapshotd.engine.base import Forked, Provider, ProviderKind, RunRequest, SandboxInfo, SandboxRequest
from snapshotd.errors import UsageError
from snapshotd.trees.base import Change, Entry, RestoreReport

_URL = re.compile(r"https?://[A-Za-z0-9._~\[\]:-]{1,255}(/[!-~]{0,2048})?")
_LATEST_NS = 253_402_300_799_999_999_999
"""The last instant that ISO 8601 with four digits can say."""


def iso_time(at_ns: int) -> str:
    """Nanoseconds since the epoch as `2025-01-31T12:00:00.123456Z`."""
    seconds, rest = divmod(min(at_ns, _LATEST_NS), 1_000_000_000)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S") + f".{rest // 1000:06d}Z"


def milliseconds(duration_ns: int) -> float:
    return round(duration_ns / 1e6, 3)


class Answer(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(frozen=True)


class Request(BaseModel):
    """Base of all requests: unknown members are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# -- answers -----------------------------------------------------------------------------------------------------------


class ErrorDetail(Answer):
    code: str = Field(description="Name of the error's class, stable: NotFound, Conflict, ...")
    message: str = Field(description="One sentence: what failed, on which thing, why, and the next step.")


class ErrorAnswer(Answer):
    error: ErrorDetail


class FileCounts(Answer):
    added: int
    changed: int
    deleted: int
    bytes: int = Field(description="Content size of added and changed regular files.")

    @staticmethod
    def of(files: t.FileChanges) -> FileCounts:
        return FileCounts(added=files.added, changed=files.changed, deleted=files.deleted, bytes=files.bytes)


class DamagedOutput(Answer):
    output: t.OutputKind
    bytes: int | None = Field(description="Its length, if it is known.")
    hash: str = Field(description="Of its content, under this repository's key.")


class Tool(Answer):
    """One recorded tool call."""

    name: str
    arguments: Any = Field(description="Any JSON value.")
    status: t.CallStatus
    exit_code: int | None = Field(description="Of a command; null for a function.")
    duration_ms: float
    started_at: str
    error: str | None = Field(description="What a failed call raised.")
    outputs: list[Literal["stdout", "stderr", "output"]] = Field(description="Which outputs were recorded.")
    damaged: list[DamagedOutput] = Field(
        description="Outputs that were recorded, and that were damaged on disk and are gone."
    )

    @staticmethod
    def of(call: t.ToolCall) -> Tool:
        outputs: list[Literal["stdout", "stderr", "output"]] = []
        if call.stdout is not None:
            outputs.append("stdout")
        if call.stderr is not None:
            outputs.append("stderr")
        if call.output is not None:
            outputs.append("output")
        return Tool(
            name=call.name,
            arguments=call.arguments,
            status=call.status,
            exit_code=call.exit_code,
            duration_ms=milliseconds(call.duration_ns),
            started_at=iso_time(call.started_at_ns),
            error=call.error,
            outputs=outputs,
            damaged=[DamagedOutput(output=lost.which, bytes=lost.bytes, hash=lost.hash) for lost in call.damaged],
        )


class Snapshot(Answer):
    id: str
    parent: str | None
    trajectory: str
    seq: int = Field(description="Position in its trajectory.")
    tool: Tool
    files: FileCounts | None = Field(
        description="What differs from the parent; null until the background has counted it."
    )
    state: t.SnapshotState = Field(
        description="captured: survives a crash of the daemon; stored: survives power loss; lost, pruned: its files are gone."
    )
    pause_ms: float = Field(description="How long the sandbox stood still for it.")
    created_at: str
    tags: list[str]
    method: str = Field(description="How it was captured: pivot, copy, unchanged, build or reused.")
    messages: int = Field(description="Length of the conversation up to it.")
    image: str
    layers: int = Field(description="Sealed layers over the image.")
    follows: str | None = Field(
        description="Whose conversation, journal and state it continues, where that is not its parent: after a rewind or an edit."
    )
    warnings: list[str] = Field(
        description="Parts of the sandbox's files that the stored ones lack, one sentence each."
    )
    reused: str | None = Field(description="The snapshot of an earlier run that its call was answered from.")

    @staticmethod
    def of(s: t.Snapshot) -> Snapshot:
        return Snapshot(
            id=s.id,
            parent=s.parent,
            trajectory=s.trajectory,
            seq=s.seq,
            tool=Tool.of(s.call),
            files=None if s.files is None else FileCounts.of(s.files),
            state=s.state,
            pause_ms=milliseconds(s.pause_ns),
            created_at=iso_time(s.created_at_ns),
            tags=list(s.tags),
            method=s.method,
            messages=s.messages,
            image=s.stack.image,
            layers=len(s.stack.layers),
            follows=s.follows,
            warnings=list(s.warnings),
            reused=s.reused,
        )


class Limits(Answer):
    memory_bytes: int
    cpus: float
    pids: int
    disk_bytes: int = Field(description="0: half of the file system that holds the layers.")

    @staticmethod
    def of(limits: t.Limits) -> Limits:
        return Limits(
            memory_bytes=limits.memory_bytes, cpus=limits.cpus, pids=limits.pids, disk_bytes=limits.disk_bytes
        )


class Agent(Answer):
    argv: list[str]
    program: int = Field(description="How many leading items of argv are the program; a fork may replace the rest.")
    cwd: str


class Trajectory(Answer):
    id: str
    name: str | None
    status: t.TrajectoryStatus
    head: str = Field(description="Its newest snapshot; a fresh fork's is the snapshot it began at.")
    image: str
    runtime: str
    network: t.Network
    limits: Limits
    agent: Agent | None
    created_at: str
    forked_from: str | None
    experiment: str | None
    exit_code: int | None = Field(description="The agent's, when it has ended.")

    @staticmethod
    def of(item: t.Trajectory) -> Trajectory:
        limits = item.spec.limits
        agent = item.agent
        return Trajectory(
            id=item.id,
            name=item.name,
            status=item.status,
            head=item.head,
            image=item.spec.image,
            runtime=item.spec.runtime,
            network=item.spec.network,
            limits=Limits.of(limits),
            agent=None if agent is None else Agent(argv=list(agent.argv), program=agent.program, cwd=agent.cwd),
            created_at=iso_time(item.created_at_ns),
            forked_from=item.forked_from,
            experiment=item.experiment,
            exit_code=item.exit_code,
        )


class Created(Answer):
    trajectory: Trajectory
    snapshot: Snapshot


class Sandbox(Answer):
    """A live sandbox."""

    trajectory: Trajectory
    container: str
    pid: int = Field(description="Its init, in the daemon's pid namespace.")
    started_at: str
    agent_running: bool

    @staticmethod
    def of(info: SandboxInfo) -> Sandbox:
        return Sandbox(
            trajectory=Trajectory.of(info.trajectory),
            container=info.container,
            pid=info.pid,
            started_at=iso_time(info.started_at_ns),
            agent_running=info.agent_running,
        )


class ForkAnswer(Answer):
    experiment: str
    trajectories: list[Trajectory]

    @staticmethod
    def of(forked: Forked) -> ForkAnswer:
        return ForkAnswer(
            experiment=forked.experiment, trajectories=[Trajectory.of(item) for item in forked.trajectories]
        )


class Message(Answer):
    role: str
    content: Any

    @staticmethod
    def of(message: t.Message) -> Message:
        return Message(role=message.role, content=message.content)


class RestoreAnswer(Answer):
    file_count: int
    directories: int
    bytes: int
    warnings: list[str] = Field(description="Everything the target could not hold, one sentence each.")

    @staticmethod
    def of(report: RestoreReport) -> RestoreAnswer:
        return RestoreAnswer(
            file_count=report.files, directories=report.directories, bytes=report.bytes, warnings=list(report.warnings)
        )


class Tagged(Answer):
    snapshot: str
    name: str


class Image(Answer):
    id: str
    name: str
    source: str
    bytes: int
    file_count: int
    created_at: str

    @staticmethod
    def of(image: t.Image) -> Image:
        return Image(
            id=image.id,
            name=image.name,
            source=image.source,
            bytes=image.bytes,
            file_count=image.files,
            created_at=iso_time(image.created_at_ns),
        )


class Version(Answer):
    version: str = Field(description="Of the package snapshotd.")
    api_version: str
    pid: int
    state_dir: str


class FileStatus(Answer):
    kind: str
    mode: str = Field(description="Permission bits, octal text.")
    uid: int
    gid: int
    size: int
    target_b64: str | None = Field(description="Where a symbolic link leads, base64; null for anything else.")

    @staticmethod
    def of(entry: Entry, target: bytes | None) -> FileStatus:
        encoded = None if target is None else base64.b64encode(target).decode()
        return FileStatus(**_entry_json(entry), target_b64=encoded)


def change_json(change: Change) -> dict[str, Any]:
    """One line of a diff: kind, path (and path_b64), and of each side its kind, mode (octal text), uid, gid and
    size."""
    item: dict[str, Any] = {"change": change.kind.value, **path_json(change.path)}
    for side, entry in (("before", change.before), ("after", change.after)):
        item[side] = None if entry is None else _entry_json(entry)
    return item


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _entry_json(entry: Entry) -> dict[str, Any]:
    return {
        "kind": entry.kind.value,
        "mode": f"{entry.mode:04o}",
        "uid": entry.uid,
        "gid": entry.gid,
        "size": entry.size,
    }


def path_json(path: bytes) -> dict[str, str]:
    """A sandbox path for JSON, without losing a byte."""
    try:
        return {"path": path.decode()}
    except UnicodeDecodeError:
        return {"path": path.decode(errors="replace"), "path_b64": b64(path)}


# -- requests ----------------------------------------------------------------------------------------------------------


IDLE = "The sandbox ends, with a last snapshot, after so many seconds without a command; 0: never."


class LimitsRequest(Request):
    memory_bytes: int = Field(
        t.Limits().memory_bytes, ge=16 << 20, le=1 << 50, description="Swap included; at least 16 MiB."
    )
    cpus: float = Field(t.Limits().cpus, ge=0.01, le=4096, allow_inf_nan=False)
    pids: int = Field(t.Limits().pids, ge=8, le=4 << 20)
    disk_bytes: int | None = Field(
        None,
        ge=16 << 20,
        le=1 << 50,
        description="What all its layers above the image may take together; at least 16 MiB. Else half of the file system that holds them.",
    )

    def limits(self) -> t.Limits:
        return t.Limits(memory_bytes=self.memory_bytes, cpus=self.cpus, pids=self.pids, disk_bytes=self.disk_bytes or 0)


class ProviderFields(Request):
    """The provider to which requests of one model API are forwarded."""

    kind: ProviderKind
    base_url: str | None = Field(None, max_length=4096, description="Else the provider's own.")
    api_key: SecretStr | None = Field(None, max_length=4096, description="Stays in the daemon.")

    def provider(self) -> Provider:
        """UsageError names the malformed part, and never the key."""
        url = self.base_url or PROVIDER_URLS[self.kind]
        if not _URL.fullmatch(url):
            raise UsageError(
                f"the address of the provider {self.kind} is malformed: write http:// or https://, a host and a path, without a password"
            )
        return Provider(self.kind, url, None if self.api_key is None else self.api_key.get_secret_value())


class SandboxFields(Request):
    """The request for a new sandbox."""

    image: str = Field(
        "default", min_length=1, max_length=1024, description="Name or id of an image, or a Docker image name."
    )
    runtime: Literal["auto", "runc", "docker", "none"] = Field(
        "auto", description="`none`: a plain folder, without isolation (docs/folder-mode.md)."
    )
    workspace: str | None = Field(
        None, description="Absolute path of a folder on the daemon's machine, copied to /workspace."
    )
    env: dict[str, str] = Field(default_factory=dict)
    network: t.Network | None = Field(None, description="Null: none; without isolation, the machine's own.")
    limits: LimitsRequest = Field(default_factory=lambda: LimitsRequest())  # type: ignore[call-arg]
    name: str | None = None
    secrets: dict[str, SecretStr] = Field(
        default_factory=dict, description="Environment whose values are recorded nowhere in plain."
    )
    providers: list[ProviderFields] = Field(
        default_factory=list,
        max_length=8,
        description="Model providers that the recording gateway forwards to; none: no gateway.",
    )
    capture_tokens: bool = Field(
        False, description="The gateway asks for token ids and log probabilities, and keeps them with the model calls."
    )
    tenant: str = Field(
        t.DEFAULT_TENANT,
        max_length=64,
        description="Tenant of the store that its agents, and the agents of its forks, read and write.",
    )
    requirements: str | None = Field(None, description="Absolute path of a requirements file on the daemon's machine.")
    program: str | None = Field(
        None, description="Absolute path of a folder with an agent's program, for /opt/agent-program in the sandbox."
    )

    def sandbox(self) -> SandboxRequest:
        """UsageError names the malformed part."""
        if self.name is not None and not t.NAME_PATTERN.fullmatch(self.name):
            raise UsageError(
                f"{self.name!r} cannot be a name: use up to 64 letters, digits and ._- , starting with a letter or digit"
            )
        secrets = environment({key: value.get_secret_value() for key, value in self.secrets.items()})
        twice = next((key for key in self.secrets if key in self.env), None)
        if twice is not None:
            raise UsageError(
                f"{twice} is given as a variable and as a secret, so its value would be recorded; leave one of them out"
            )
        kinds = [item.kind for item in self.providers]
        if len(set(kinds)) < len(kinds):
            raise UsageError(
                "two providers of one kind were given, but a sandbox has at most one of each; leave one of them out"
            )
        return SandboxRequest(
            image=self.image,
            runtime=self.runtime,
            workspace=absolute(self.workspace, "workspace"),
            env=environment(self.env),
            network=self.network,
            name=self.name,
            secrets=secrets,
            providers=tuple(item.provider() for item in self.providers),
            capture_tokens=self.capture_tokens,
            tenant=self.tenant,
            limits=self.limits.limits() if self.limits.model_fields_set else None,
            requirements=absolute(self.requirements, "requirements file"),
            program=absolute(self.program, "folder of the program"),
        )


class CreateRequest(SandboxFields):
    """A sandbox without an agent."""

    idle_timeout_s: float = Field(0, ge=0, le=TIMEOUT_MAX_S, allow_inf_nan=False, description=IDLE)

    def sandbox(self) -> SandboxRequest:
        return replace(super().sandbox(), idle_timeout_s=self.idle_timeout_s)


class RunAgentRequest(SandboxFields):
    """Either `agent` (a Python file, with `args`) or `command` (argv inside the sandbox)."""

    agent: str | None = Field(None, description="Absolute path of a Python file on the daemon's machine.")
    args: list[str] = Field(default_factory=list)
    command: list[str] = Field(default_factory=list)
    user: str | None = Field(None, description="Who runs it in the sandbox, as USER[:GROUP]; else root.")
    detach: bool = Field(False, description="Keep the run when the client goes away before it has the answer.")
    reuse: bool = Field(
        False,
        description="Answer its tool calls from earlier runs that began in the same way, as long as it does the same.",
    )
    reuse_replies: bool = Field(False, description="With `reuse`: answer its model requests from them, too.")

    def run(self) -> RunRequest:
        if (self.agent is None) == (not self.command):
            raise UsageError("a run needs either an agent file or a command; give exactly one of them")
        if self.command and self.args:
            raise UsageError("`args` belong to an agent file; put a command's arguments into `command`")
        check_argv((*self.args, *self.command))
        return RunRequest(
            sandbox=self.sandbox(),
            agent=absolute(self.agent, "agent file"),
            args=tuple(self.args),
            command=tuple(self.command),
            user=self.user,
            reuse=self.reuse,
            reuse_replies=self.reuse_replies,
        )


class TerminalSize(Request):
    rows: int = Field(ge=1, le=0xFFFF)
    columns: int = Field(ge=1, le=0xFFFF)


class ExecRequest(Request):
    argv: list[str] = Field(min_length=1)
    cwd: str | None = Field(None, description="Absolute path in the sandbox; its working directory if null.")
    env: dict[str, str] = Field(default_factory=dict)
    user: str | None = Field(
        None, description="Name or number, optionally with `:group`; looked up in the sandbox's own files."
    )
    if_head: str | None = Field(
        None, description="Only while this snapshot is the trajectory's head; else a Conflict that names the head."
    )
    timeout_s: float | None = Field(
        None,
        gt=0,
        le=TIMEOUT_MAX_S,
        allow_inf_nan=False,
        description="After so many seconds the command is ended with everything that it started: status `timed-out`, exit code 124.",
    )
    terminal: TerminalSize | None = Field(
        None,
        description="Give the command a terminal of this size in place of pipes; all that it prints is `stdout`. "
        "Only for an attended command, which then ends when its client goes away.",
    )
    idle_timeout_s: float | None = Field(
        None,
        ge=0,
        le=TIMEOUT_MAX_S,
        allow_inf_nan=False,
        description=f"{IDLE} Null: as it is; the daemon's default if it was stopped.",
    )


class RestoreRequest(Request):
    to: str = Field(description="Absolute path on the daemon's machine; must not exist or be empty.")
    path: str = Field("", description="Only what lies below this path.")


class SnapshotRequest(Request):
    name: str | None = Field(None, description="The new snapshot's tag; not together with `if_changed`.")
    if_changed: bool = Field(False, description="Answer with the head if no file was written since.")


class TagRequest(Request):
    ref: str
    move: bool = Field(False, description="Take the tag away from the snapshot that has it.")


class ImageName(Request):
    image: str = Field(min_length=1, max_length=1024, description="As a sandbox names its image.")


class ImageRequest(Request):
    source: str = Field(
        min_length=1, description="Recipe folder or shipped recipe; for an import: path or Docker image name."
    )
    name: str | None = None


def absolute(path: str | None, what: str) -> Path | None:
    """UsageError for a relative path: the daemon's working directory is not the client's."""
    if path is None:
        return None
    if "\0" in path or not path.startswith("/"):
        raise UsageError(
            f"the {what} {path!r} is not an absolute path; the daemon does not know the client's working directory"
        )
    return Path(path)


def environment(env: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """UsageError names a variable that no process can have."""
    for key, value in env.items():
        if not key or "=" in key or "\0" in key + value:
            raise UsageError(
                f"{key!r} cannot be an environment variable: names have no `=` and neither part a zero byte"
            )
    return tuple(env.items())


def check_argv(argv: tuple[str, ...]) -> None:
    """UsageError for an argument that no process can get."""
    for item in argv:
        if "\0" in item:
            raise UsageError(f"the argument {item[:40]!r} contains a zero byte, which no command can receive")


def event_json(event: dict[str, Any]) -> dict[str, Any]:
    """An event of a run in the API's words. Event logs of earlier versions are read, too, so the engine keeps its own."""
    words = _EVENT_WORDS.get(event["event"], {})
    return {words.get(key, key): value for key, value in event.items()}


_EVENT_WORDS = {
    "started": {"image": "image_name"},
    "snapshot": {"tool": "name"},
    "approval": {"tool": "name"},
    "replayed": {"tool": "name"},
    "finished": {"snapshots": "snapshot_count", "reused": "reuse"},
}
"""Event to the words of the engine that mean something else elsewhere in the API."""
