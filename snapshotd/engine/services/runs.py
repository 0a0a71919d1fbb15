"""Sandboxes and what runs in them: agents, commands, their ends."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from snapshotd.api.commands import BackgroundRequest, CommandFields, ExecRequest
from snapshotd.api.history import DecisionFields
from snapshotd.api.record import Bounds
from snapshotd.api.snapshots import SnapshotRequest
from snapshotd.api.trajectories import CreateRequest, NetworkInfo, RemoveQuery, RunAgentRequest, StopQuery
from snapshotd.engine.base import CommandInfo, Connection, Event, ExecResult, OutputSink, SandboxInfo
from snapshotd.engine.caller import Caller
from snapshotd.engine.context import Context
from snapshotd.engine.events import Wait, with_whole_output
from snapshotd.engine.journal.reuse import REPLIES, REUSE
from snapshotd.engine.runs import folder_mode, inputs, ports, snapshot_now
from snapshotd.engine.runs.creation import Creation, throw_away
from snapshotd.engine.runs.launched import renew_network
from snapshotd.engine.runs.resume import Resumes
from snapshotd.engine.runs.sessions import Sessions, check_not_running
from snapshotd.engine.sandbox.background import Background
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.storage import reserve
from snapshotd.engine.storage.archive_queue import Archive
from snapshotd.engine.storage.evict import Disposal
from snapshotd.errors import Ambiguous, Conflict, NotFound, SandboxFailed, UsageError
from snapshotd.network import HostRules, Network
from snapshotd.types import NO_ISOLATION, ExperimentID, Snapshot, Trajectory, TrajectoryID, short


class RunService:
    """Every method may raise NotFound or Ambiguous for a `ref`."""

    def __init__(
        self,
        context: Context,
        sessions: Sessions,
        resumes: Resumes,
        background: Background,
        archive: Archive,
        disposal: Disposal,
    ) -> None:
        self._context, self._catalog, self._sessions, self._resumes = context, context.catalog, sessions, resumes
        self._background, self._archive, self._disposal = background, archive, disposal
        self._creation = Creation(context, sessions)
        self._changing_network = threading.Lock()
        """Held while rules are changed in the catalog."""

    def create(
        self, request: CreateRequest, *, namespace_pid: int = 0, experiment: ExperimentID | None = None
    ) -> tuple[Trajectory, Snapshot]:
        """A sandbox without an agent, running, with its first snapshot. `namespace_pid`: process in whose view of the files the
        request's paths are meant; 0: the daemon. `experiment`: the one that it is made for."""
        trajectory, snapshot, sandbox, calls = self._creation.begin(request, None, namespace_pid, experiment=experiment)
        sandbox.use.end_when_idle(request.idle_timeout_s)
        try:
            self._sessions.adopt(sandbox, calls)
            self._start_services(sandbox)
        except BaseException:
            self._sessions.discard(sandbox)
            self._disposal.forget(trajectory.id)
            raise
        self._background.submit(snapshot)
        return trajectory, snapshot

    def run(self, request: RunAgentRequest, *, namespace_pid: int = 0) -> Trajectory:
        """Start an agent and return; `events` follows it. `namespace_pid`: as `create`."""
        if (request.agent is None) == (not request.command):
            raise UsageError("give either an agent file or a command, not both or neither")
        if request.agent is not None:
            os.close(inputs.open_agent(Path(request.agent), namespace_pid))
        isolated = self._context.runtime(request.runtime).name != NO_ISOLATION
        if request.user is not None and not isolated:
            raise folder_mode.refusal("another user", "leave it out; commands run as the daemon's own")
        agent = inputs.agent_spec(request, namespace_pid, isolated=isolated)
        reuse = _reuse_arguments(request)
        trajectory, snapshot, sandbox, calls = self._creation.begin(request, agent, namespace_pid, reuse=reuse)
        try:
            self._sessions.adopt(sandbox, calls)
            self._start_services(sandbox)
            assert trajectory.agent is not None
            self._sessions.start_agent(sandbox, trajectory.agent, first=snapshot)
        except BaseException:
            self._sessions.discard(sandbox)
            self._disposal.forget(trajectory.id)
            raise
        return trajectory

    def _start_services(self, sandbox: Sandbox) -> None:
        """Start the services that a new sandbox declares. SandboxFailed: one does not get ready."""
        failures = self._sessions.services.start(sandbox)
        if failures:
            raise SandboxFailed(f"the sandbox is not made: {failures[0]}")

    def sandboxes(self) -> list[SandboxInfo]:
        """The live sandboxes."""
        return [
            SandboxInfo(
                self._catalog.trajectories.get(s.trajectory.id),
                s.container.id,
                s.container.pid,
                s.started_at_ns,
                s.use.agent_running,
            )
            for s in self._sessions.live()
            if not s.closed
        ]

    def events(self, ref: str, *, follow: Wait) -> Iterator[Event]:
        """The events of a trajectory's run from its beginning. With `follow`, waits for more until `finished`, or until it
        is false."""
        trajectory = self._catalog.refs.find_trajectory(ref)
        last: Event | None = None
        for last in with_whole_output(self._context.events.follow(trajectory.id, wait=follow), self._output):
            yield last
        if follow is not False and last is not None and last["event"] != "finished":
            yield {
                "event": "finished",
                "trajectory": trajectory.id,
                "exit_code": trajectory.exit_code,
                "snapshots": self._catalog.snapshots.count(trajectory.id),
                "status": trajectory.status,
            }

    def exec(self, ref: str, request: ExecRequest, *, sink: OutputSink, caller: Caller | None = None) -> ExecResult:
        """Run a command as a tool call in a trajectory's sandbox (started from its head if it is stopped) and take the
        snapshot. CommandNotFound and CommandNotRunnable leave no snapshot. A command whose sandbox is ended under it
        (`stop`, or its program's end) is killed and recorded as interrupted, with what it has printed and written. With
        `if_head`, Conflict (naming the head) when the head is another one, before the command runs: if several
        writers saw one head, one wins. The command goes on when the `caller` is gone. After `timeout_s` seconds the
        command is ended with everything that it started, and recorded as timed-out with exit code 124.
        `idle_timeout_s`: as in `CreateRequest`, for the sandbox from now on; None: as it is, or the daemon's default
        if it was started again."""
        trajectory = self._catalog.refs.find_trajectory(ref)
        head = None if request.if_head is None else self._catalog.refs.find_snapshot(request.if_head).id
        sandbox = self._sessions.ensure_running(trajectory, request.idle_timeout_s)
        return self._sessions.commands.exec(sandbox, request, sink=sink, record=True, expected_head=head, caller=caller)

    def exec_snapshot(
        self, ref: str, request: CommandFields, *, sink: OutputSink, caller: Caller | None = None
    ) -> ExecResult:
        """Run a command in a throw-away fork of a snapshot; nothing of it is kept. It ends when the `caller` is
        gone, or after `timeout_s` seconds, as in `exec`. The services of the fork have as much time before it."""
        with self._context.pins.pinned(self._catalog.refs.find_snapshot(ref).id) as source:
            owner = self._catalog.trajectories.get(source.trajectory)
            trajectory, _ = throw_away(self._context.sandbox_spec(owner.spec), source.stack, env=owner.env)
            trajectory = replace(trajectory, head=source.id, forked_from=source.id)  # it may see its ancestors' secrets
            throw_aways, services = self._sessions.throw_aways, self._sessions.services
            with throw_aways.start(trajectory, source) as sandbox, services.beside(sandbox, request.timeout_s, caller):
                return self._sessions.commands.exec(sandbox, request, sink=sink, record=False, caller=caller)

    def exec_in_background(self, ref: str, request: BackgroundRequest) -> CommandInfo:
        """Start a command as `exec` does and return at once. Steps go on beside it; its own snapshot is taken when it
        ends. It needs no client, and goes on at the next daemon. `stop`, a rewind and the end of its sandbox's program
        end it as `interrupted`. LimitExceeded: too many run in the sandbox. With `stdin` its standard input is what
        `write_command` writes, otherwise empty. With `service` it is declared to be one: see `SandboxServices.declare`."""
        sandbox = self._sessions.ensure_running(self._trajectory(ref), request.idle_timeout_s)
        if request.service is not None:
            self._sessions.check_place(sandbox)
            return self._sessions.services.declare(sandbox, request)
        return self._sessions.commands.begin(sandbox, request)

    def remove_service(self, ref: str, name: Annotated[str, Bounds(max_length=64)]) -> Snapshot:
        """End a service, and take a snapshot that does not declare it any more. A stopped sandbox is started for that.

        Both in one step. NotFound: the sandbox's files declare no service of that name."""
        trajectory = self._trajectory(ref)
        sandbox = self._sessions.ensure_running(trajectory, services=False)
        try:
            self._sessions.check_place(sandbox)
            return self._sessions.services.remove(sandbox, name)
        finally:
            self._sessions.services.revive(sandbox)

    def commands(self, ref: str) -> list[CommandInfo]:
        """Its background commands: those that run, and the newest of those that have ended, oldest first.

        Also those that run in the foreground and whose client has gone away."""
        return self._sessions.commands.known.all_of(self._trajectory(ref).id)

    def command(self, ref: str, command: str) -> CommandInfo:
        """A command of a trajectory, by a unique prefix of its id.

        NotFound, Ambiguous; so do all that take `command`."""
        return self._sessions.commands.known.find(self._trajectory(ref), command)

    def command_events(self, ref: str, command: str, *, follow: Wait) -> Iterator[Event]:
        """The events of a command from its beginning: `started`, `output`, `finished` (with `status`, `exit_code`,
        `snapshot`). `follow` is that of `events`. UsageError: it runs in the foreground, so its client
        has its input and output; `write_command` alike."""
        return self._sessions.commands.known.events(self._trajectory(ref), command, follow=follow)

    def signal_command(self, ref: str, command: str, signal: int) -> CommandInfo:
        """Send a signal to a command's process group; the one that kills, to all that it started.

        Conflict: it has ended."""
        return self._sessions.commands.known.signal(self._trajectory(ref), command, signal)

    def write_command(self, ref: str, command: str, data: bytes, *, end: bool) -> int:
        """Write to a command's standard input, and with `end` close it behind the data. Returns the number of bytes that
        the command took within some seconds; its input is closed only if that is all. UsageError: it has no input;
        Conflict: it has ended, or its input has."""
        return self._sessions.commands.known.write(self._trajectory(ref), command, data, end=end)

    def take_snapshot(self, ref: str, request: SnapshotRequest) -> Snapshot:
        """Take a snapshot of a running sandbox as it is now. Processes in it run on. `Conflict`: it does not run, its
        program is being replayed, or the name is taken.

        `name` is its tag. It is a marker `snapshot` without a call. In the middle of tool calls of its program it names
        them (`during`); a program that is resumed from there makes such a call again on the files from before the call.
        With `if_changed`, no snapshot is taken if no file was written since the head, which is then the answer; where
        something was alive at the head, one may be taken all the same. UsageError: `name` and `if_changed` exclude each
        other."""
        trajectory = self._catalog.refs.find_trajectory(ref)
        taken = snapshot_now.take_snapshot(self._context, self._sessions, self._background.submit, trajectory, request)
        if request.name is not None:
            self._archive.save_tags_soon()
        return taken

    def network(self, ref: str) -> NetworkInfo:
        """The network of a trajectory's sandboxes, and what it refused since the last snapshot."""
        trajectory = self._catalog.refs.find_trajectory(ref)
        sandbox, network = self._sessions.find(trajectory.id), trajectory.spec.network
        refused = () if sandbox is None else sandbox.refused
        return NetworkInfo(trajectory.id, str(network), network.rules, refused)

    def change_network(
        self, ref: str, *, allow: tuple[str, ...] = (), deny: tuple[str, ...] = (), only: tuple[str, ...] | None = None
    ) -> NetworkInfo:
        """Change the hosts that a trajectory's sandboxes reach: one that runs from now on, and those of later starts and
        forks. Connections that are not allowed any more are cut. Conflict: its network is not one of rules; UsageError,
        LimitExceeded: a rule is malformed, or there are too many; SandboxFailed: they are recorded, and not in force in
        the sandbox, which reaches nothing then. Waits for no start: a sandbox that is started meanwhile gets them."""
        found = self._catalog.refs.find_trajectory(ref)
        with self._changing_network:
            before = self._catalog.trajectories.get(found.id).spec.network
            if not before.allows_names:
                raise Conflict(
                    f"the network of {found.shown_name} is {before}, which has no rules for hosts: make a sandbox with "
                    "one, or fork this one, with the network allow:HOST"
                )
            rules = HostRules(before.rules if only is None else only).with_changes(allow, deny)
            self._catalog.trajectories.set_network(found.id, Network.allowing(rules.texts))
        mine = [one for one in self._sessions.launched() if one.trajectory.id == found.id]
        renew_network(self._catalog, mine, lambda _: None)
        return self.network(found.id)

    def connect(self, ref: str, port: int, ended: Callable[[], object]) -> Connection:
        """Connect to a TCP server on a port of a sandbox's loopback, whatever its network; nothing else can be reached.
        `ended` is called, from any thread, when the sandbox ends before the connection is closed; it returns at once.
        Conflict: the trajectory is not running (it is not started), or nothing listens there; SandboxFailed: the server
        takes no connection. The caller waits up to 10 s."""
        trajectory = self._catalog.refs.find_trajectory(ref)
        return ports.connect(self._sessions.find(trajectory.id), trajectory, port, ended)

    def resume(self, ref: str, *, decisions: tuple[DecisionFields, ...] = ()) -> Trajectory:
        """Start its program again from the top, replay its journal, and let it run on. Answers when it is started; its
        events follow under /trajectories/{ref}/events. `Undecided`: an irreversible call may or may not have happened, and
        `decisions` does not cover it.

        The message names each such call. Conflict: it runs, or has finished; UsageError: it has no program.
        A trajectory without a program has its calls decided, and nothing starts."""
        return self._resumes.resume(self._catalog.refs.find_trajectory(ref), decisions)

    def stop(self, ref: str, query: StopQuery | None = None) -> Trajectory:
        """Take a last snapshot if anything changed and end the sandbox. `discard`: without one.

        Commands that `exec` runs in it are cut off. Not an error when it is not running. OutOfSpace: there is no room for
        the snapshot; the sandbox goes on."""
        trajectory, discard = self._catalog.refs.find_trajectory(ref), query is not None and query.discard
        if discard:
            reserve.adjust(self._context.state_dir)
        self._sessions.stop(trajectory, keep=not discard)
        return self._catalog.trajectories.get(trajectory.id)

    def keep_alive(self, trajectories: Sequence[str]) -> None:
        """Let their running sandboxes idle from now on anew, as if a command had just ended in each.

        Not an error where none runs, or the trajectory is not there any more."""
        for ref in trajectories:
            with contextlib.suppress(NotFound, Ambiguous):
                sandbox = self._sessions.find(self._trajectory(ref).id)
                if sandbox is not None:
                    sandbox.use.keep_alive()

    def remove(self, ref: str, query: RemoveQuery | None = None) -> None:
        """Forget a trajectory and free what only it used. A tag or a snapshot is refused: it names one of them, not all.

        Conflict when it runs (unless `force`) or has forks; UsageError: `ref` is a tag or a snapshot."""
        trajectory = self._catalog.refs.find_trajectory(ref)
        self._check_whole(ref, trajectory)
        if query is None or not query.force:
            check_not_running(self._sessions.find(trajectory.id), trajectory)
        self._catalog.trajectories.check_removable(trajectory.id)  # before anything ends that would stay
        reserve.adjust(self._context.state_dir)
        self._sessions.stop(trajectory, keep=False)
        self._disposal.forget(trajectory.id)
        reserve.adjust(self._context.state_dir)

    def check_removable(self, lines: Iterable[TrajectoryID]) -> None:
        """Raises the Conflict that `remove` would raise if it removed these by force, one after the other; changes
        nothing."""
        gone: set[TrajectoryID] = set()
        for line in lines:
            self._catalog.trajectories.check_removable(line, gone)
            gone.add(line)

    def _check_whole(self, ref: str, trajectory: Trajectory) -> None:
        """Check that `ref` names the whole trajectory. UsageError: it names one of its snapshots."""
        if ref in (trajectory.name, trajectory.id):
            return
        snapshot = self._catalog.refs.find_snapshot(ref)
        whole = f"`snapshotd rm {trajectory.shown_name}` forgets the whole trajectory"
        if ref in snapshot.tags:
            raise UsageError(
                f"{ref} is a tag of snapshot {short(snapshot.id)}: `snapshotd tag --delete {ref}` takes it away, {whole}"
            )
        if not trajectory.id.startswith(ref):
            raise UsageError(
                f"{ref} is a snapshot of trajectory {short(trajectory.id)}, and goes only with all of it: {whole}"
            )

    def _trajectory(self, ref: str) -> Trajectory:
        return self._catalog.refs.find_trajectory(ref)

    def _output(self, ref: str, which: Literal["stdout", "stderr", "output"]) -> Iterator[bytes]:
        return self._context.recorded_output(self._catalog.refs.find_snapshot(ref), which) or iter(())


def _reuse_arguments(request: RunAgentRequest) -> dict[str, bool]:
    """The arguments of a `start` that asks for reuse. UsageError: replies are to be reused, and calls not."""
    if request.reuse_replies and not request.reuse:
        raise UsageError("the replies of earlier runs are reused together with their calls only; ask for `reuse`, too")
    asked = {REUSE: request.reuse, REPLIES: request.reuse_replies}
    return {name: True for name, wanted in asked.items() if wanted}
