"""`Snapshotd`: every verb of the daemon as a method. The CLI is built on it, and so is the object-shaped API in sandbox.py."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from snapshotd.client.results import (
    ChangeInfo,
    ExecInfo,
    ForkInfo,
    ImageInfo,
    MessageInfo,
    RestoreInfo,
    SandboxInfo,
    SnapshotInfo,
    TrajectoryInfo,
    VersionInfo,
)  # fmt: skip
from snapshotd.client.transport import Transport, segment
from snapshotd.daemon.wire import DEFAULT_STATE_DIR, FORK_MAX, SOCKET_VARIABLE, STATE_DIR_VARIABLE, check_ref, socket_path_of
from snapshotd.errors import DaemonUnavailable, UsageError

OutputSink = Callable[[Literal["stdout", "stderr"], bytes], object]
Which = Literal["stdout", "stderr", "output"]


class Snapshotd:
    """One daemon. Cheap to make, holds no connection, may be used from any thread.

    `state_dir` and `socket` default to SNAPSHOTD_STATE_DIR and SNAPSHOTD_SOCKET, then to /var/lib/snapshotd and its snapshotd.sock.
    With `autostart` (the default) and as root, the first request starts a daemon when none answers; never when only a socket was named,
    since its daemon then lives elsewhere (a container, a service) and would find its place taken.

    Every method may raise DaemonUnavailable, VersionMismatch and NotPermitted besides what it says, and NotFound or Ambiguous for a
    ref: a tag, a name, or a unique prefix of an id. Local paths may be relative to the working directory.
    """

    def __init__(self, state_dir: str | Path | None = None, socket: str | Path | None = None, *, autostart: bool = True) -> None:
        self.state_dir = _path(state_dir or os.environ.get(STATE_DIR_VARIABLE) or DEFAULT_STATE_DIR)
        named = socket or (os.environ.get(SOCKET_VARIABLE) if state_dir is None else None)
        self.socket_path = _path(named) if named else socket_path_of(self.state_dir)
        elsewhere = bool(named) and not (state_dir or os.environ.get(STATE_DIR_VARIABLE))
        self._transport = Transport(self.socket_path, self._start if autostart and not elsewhere else None)

    def _start(self) -> None:
        from snapshotd.client.autostart import start_daemon  # only then: subprocess costs 10 ms to import

        start_daemon(self.state_dir, self.socket_path)

    # -- sandboxes and runs ------------------------------------------------------------------------------------------------

    def create(self, **sandbox: Any) -> tuple[TrajectoryInfo, SnapshotInfo]:
        """A sandbox without an agent, running, and its first snapshot. Takes the keywords of `sandbox_fields`."""
        answer = self._transport.request("POST", "/sandboxes", body=sandbox_fields(**sandbox))
        return TrajectoryInfo.of(answer["trajectory"]), SnapshotInfo.of(answer["snapshot"])

    def run(
        self, *, agent: str | Path | None = None, args: Sequence[str] = (), command: Sequence[str] = (),
        requirements: str | Path | None = None, detach: bool = False, **sandbox: Any,
    ) -> TrajectoryInfo:  # fmt: skip
        """Start an agent file with `args`, or a `command`; `events` follows it. More keywords are those of `sandbox_fields`.

        If this process goes away before the answer, the run is stopped again unless `detach`.
        """
        body = {
            **sandbox_fields(**sandbox), "agent": _absolute(agent), "args": list(args), "command": list(command),
            "requirements": _absolute(requirements), "detach": detach,
        }  # fmt: skip
        return TrajectoryInfo.of(self._transport.request("POST", "/runs", body=body))

    def events(self, ref: str, *, follow: bool = True) -> Iterator[dict[str, Any]]:
        """The events of a run from its beginning; with `follow`, until `finished`."""
        path = f"/trajectories/{_ref(ref, 'trajectory')}/events"
        return self._transport.lines("GET", path, query={"follow": "true" if follow else "false"})

    def exec(
        self, ref: str, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None, user: str | None = None,
        on_output: OutputSink | None = None,
    ) -> ExecInfo:  # fmt: skip
        """Run a command as a tool call and take the snapshot. It goes on, and is captured, even if this process goes away.

        CommandNotFound and CommandNotRunnable leave no snapshot. `on_output` gets raw output as it comes.
        """
        return self._exec(f"/trajectories/{_ref(ref, 'trajectory')}/exec", argv, cwd, env, user, on_output, f"of {ref}")

    def exec_snapshot(
        self, ref: str, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None, user: str | None = None,
        on_output: OutputSink | None = None,
    ) -> ExecInfo:  # fmt: skip
        """Run a command in a throw-away fork of a snapshot; nothing of it is kept."""
        return self._exec(f"/snapshots/{_ref(ref)}/exec", argv, cwd, env, user, on_output, f"in a fork of {ref}")

    def _exec(
        self, path: str, argv: Sequence[str], cwd: str | None, env: Mapping[str, str] | None, user: str | None,
        on_output: OutputSink | None, where: str,
    ) -> ExecInfo:  # fmt: skip
        if not argv:
            raise UsageError("there is no command to execute; give one after `--`")
        body = {"argv": list(argv), "cwd": cwd, "env": dict(env or {}), "user": user}
        for event in self._transport.lines("POST", path, body=body):
            if event["event"] == "output" and on_output is not None:
                on_output(event["stream"], base64.b64decode(event["data_b64"]))
            elif event["event"] == "result":
                return ExecInfo.of(event)
        raise DaemonUnavailable(f"the daemon ended the command {where} without a result; `snapshotd log` shows whether it was captured")

    def fork(self, ref: str, n: int = 1, *, args: Sequence[str] | None = None, name: str | None = None) -> ForkInfo:
        """`n` (1..256) new trajectories from one snapshot, each with a running sandbox, all or none. With `args` the program starts in
        each; `{index}` in an argument is the fork's number from 0. UsageError before anything starts."""
        if not 1 <= n <= FORK_MAX:
            raise UsageError(f"{n} forks were asked for, but one fork makes 1 to {FORK_MAX}; nothing was started")
        body = {"n": n, "args": None if args is None else list(args), "name": name}
        return ForkInfo.of(self._transport.request("POST", f"/snapshots/{_ref(ref)}/fork", body=body))

    def rewind(self, ref: str, to: str) -> SnapshotInfo:
        """Give a running sandbox the files of snapshot `to`, in place; the conversation goes on. Returns the new snapshot that records it.
        Conflict while a process of the sandbox's own lives."""
        answer = self._transport.request("POST", f"/trajectories/{_ref(ref, 'trajectory')}/rewind", body={"to": to})
        return SnapshotInfo.of(answer)

    def stop(self, ref: str) -> TrajectoryInfo:
        """Take a last snapshot if anything changed and end the sandbox. Not an error when it is not running."""
        return TrajectoryInfo.of(self._transport.request("POST", f"/trajectories/{_ref(ref, 'trajectory')}/stop"))

    def remove(self, ref: str, *, force: bool = False) -> None:
        """Forget a trajectory and free what only it used. Conflict when it runs (unless `force`) or has forks."""
        self._transport.request("DELETE", f"/trajectories/{_ref(ref, 'trajectory')}", query={"force": "true" if force else None})

    # -- looking -----------------------------------------------------------------------------------------------------------

    def trajectories(self) -> list[TrajectoryInfo]:
        return [TrajectoryInfo.of(item) for item in self._transport.request("GET", "/trajectories")]

    def sandboxes(self) -> list[SandboxInfo]:
        return [SandboxInfo.of(item) for item in self._transport.request("GET", "/sandboxes")]

    def trajectory(self, ref: str) -> TrajectoryInfo:
        return TrajectoryInfo.of(self._transport.request("GET", f"/trajectories/{_ref(ref, 'trajectory')}"))

    def snapshot(self, ref: str) -> SnapshotInfo:
        return SnapshotInfo.of(self._transport.request("GET", f"/snapshots/{_ref(ref)}"))

    def log(self, ref: str) -> list[SnapshotInfo]:
        """A trajectory's own snapshots, oldest first."""
        return [SnapshotInfo.of(item) for item in self._transport.request("GET", f"/trajectories/{_ref(ref, 'trajectory')}/log")]

    def all_snapshots(self) -> list[SnapshotInfo]:
        return [SnapshotInfo.of(item) for item in self._transport.request("GET", "/snapshots")]

    def conversation(self, ref: str) -> list[MessageInfo]:
        """The conversation up to a snapshot."""
        return [MessageInfo.of(item) for item in self._transport.request("GET", f"/snapshots/{_ref(ref)}/conversation")]

    def output(self, ref: str, which: Which = "output") -> Iterator[bytes]:
        """A tool call's recorded output in pieces."""
        return self._transport.pieces("GET", f"/snapshots/{_ref(ref)}/output/{which}")

    def diff(self, a: str, b: str | None = None) -> Iterator[ChangeInfo]:
        """What changed from `a` to `b`; with one ref, from its parent to it."""
        for event in self._transport.lines("GET", "/diff", query=_pair(a, b)):
            if event.get("event") == "end":
                return
            yield ChangeInfo.of(event)
        raise DaemonUnavailable("the daemon ended the list of changes early; repeat the command")

    def patch(self, a: str, b: str | None = None, *, write: Callable[[bytes], object], root: str | bytes = b"workspace") -> int:
        """Write the changes below `root` as a patch that `git apply` and `patch -p1` take. Returns how many changes lie elsewhere."""
        query = {**_pair(a, b), "root_b64": _b64(root)}
        for event in self._transport.lines("GET", "/patch", query=query):
            if event["event"] == "end":
                return int(event["outside"])
            write(base64.b64decode(event["data_b64"]))
        raise DaemonUnavailable("the daemon ended the patch early, so what was written is not complete; repeat the command")

    def cat(self, ref: str, path: str | bytes) -> Iterator[bytes]:
        """A regular file's content in pieces. NotFound; UsageError for anything but a regular file."""
        return self._transport.pieces("GET", f"/snapshots/{_ref(ref)}/file", query={"path_b64": _b64(path)})

    def restore(self, ref: str, to: str | Path, *, path: str = "") -> RestoreInfo:
        """Write a snapshot's tree, or the part below `path`, into the local folder `to`, which must not exist or be empty."""
        body = {"to": _absolute(to), "path": path}
        return RestoreInfo.of(self._transport.request("POST", f"/snapshots/{_ref(ref)}/restore", body=body))

    def tag(self, ref: str, name: str, *, move: bool = False) -> str:
        """Give a snapshot a tag; returns the snapshot's id. Conflict when another snapshot has the tag, unless `move`."""
        check_ref(ref)
        answer = self._transport.request("PUT", f"/tags/{segment(name)}", body={"ref": ref, "move": move})
        return str(answer["snapshot"])

    def untag(self, name: str) -> None:
        self._transport.request("DELETE", f"/tags/{_ref(name, 'tag')}")

    # -- images ------------------------------------------------------------------------------------------------------------

    def images(self) -> list[ImageInfo]:
        return [ImageInfo.of(item) for item in self._transport.request("GET", "/images")]

    def build_image(self, recipe: str, *, name: str | None = None, progress: Callable[[str], object] | None = None) -> ImageInfo:
        """From a recipe folder, or the name of one that comes with snapshotd (`default`, `minimal`)."""
        return self._make_image("build", _local_or_name(recipe), name, progress)

    def import_image(self, source: str, *, name: str | None = None, progress: Callable[[str], object] | None = None) -> ImageInfo:
        """From a folder, a tar of a root file system, a `docker save` or OCI archive, or a Docker image name."""
        return self._make_image("import", _local_or_name(source), name, progress)

    def _make_image(self, verb: str, source: str, name: str | None, progress: Callable[[str], object] | None) -> ImageInfo:
        for event in self._transport.lines("POST", f"/images/{verb}", body={"source": source, "name": name}):
            if event["event"] == "progress" and progress is not None:
                progress(event["message"])
            elif event["event"] == "result":
                return ImageInfo.of(event["image"])
        raise DaemonUnavailable(f"the daemon ended the {verb} of {source} without a result; `snapshotd image ls` shows what is there")

    def remove_image(self, ref: str) -> None:
        self._transport.request("DELETE", f"/images/{segment(ref)}")

    # -- the daemon --------------------------------------------------------------------------------------------------------

    def version(self) -> VersionInfo:
        return VersionInfo.of(self._transport.request("GET", "/version"))

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._transport.request("GET", "/status")
        return answer

    def flush(self, trajectory: str | None = None) -> None:
        """Return when every snapshot so far (of one trajectory, or all) survives power loss."""
        self._transport.request("POST", "/flush", query={"trajectory": trajectory})


def sandbox_fields(
    *, image: str = "default", runtime: str = "auto", workspace: str | Path | None = None, env: Mapping[str, str] | None = None,
    network: str = "none", memory: int | None = None, cpus: float | None = None, pids: int | None = None, name: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What a new sandbox is made of, as the API takes it. `memory` in bytes; None means the daemon's default."""
    limits = {"memory_bytes": memory, "cpus": cpus, "pids": pids}
    return {
        "image": image, "runtime": runtime, "workspace": _absolute(workspace), "env": dict(env or {}), "network": network, "name": name,
        "limits": {key: value for key, value in limits.items() if value is not None},
    }  # fmt: skip


def _path(path: str | Path) -> Path:
    return Path(os.path.abspath(path))


def _absolute(path: str | Path | None) -> str | None:
    return None if path is None else os.path.abspath(path)


def _local_or_name(source: str) -> str:
    """A path as an absolute one, since the daemon's working directory is another; a name as it is."""
    return os.path.abspath(source) if os.path.exists(source) else source


def _ref(ref: str, what: str = "snapshot or trajectory") -> str:
    return segment(check_ref(ref, what))


def _pair(a: str, b: str | None) -> dict[str, str | None]:
    return {"a": check_ref(a), "b": None if b is None else check_ref(b)}


def _b64(path: str | bytes) -> str:
    return base64.urlsafe_b64encode(os.fsencode(path)).decode()
