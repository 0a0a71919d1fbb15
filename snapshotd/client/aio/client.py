"""Made by `snapshotd/client/aio/generate.py` from `snapshotd/client/client.py`: change that one."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapshotd.api import operations
from snapshotd.api.commands import ExecInfo, ExecRequest, TerminalSize
from snapshotd.api.operations import Operation
from snapshotd.api.record import UNSET, Json, Request
from snapshotd.api.service import VersionInfo
from snapshotd.api.snapshots import (
    ChangeInfo,
    FileStatus,
    MessageInfo,
    RestoreInfo,
    RestoreRequest,
    SnapshotInfo,
    SnapshotRequest,
    TagRequest,
)
from snapshotd.api.storage import (
    CheckInfo,
    CheckRequest,
    EnsureImageRequest,
    ImageInfo,
    ImageRequest,
    MountRequest,
    Policy,
    PruneInfo,
    PruneRequest,
    RepairInfo,
    UsageInfo,
)
from snapshotd.api.trajectories import (
    CreateRequest,
    ForkInfo,
    ForkQueueRequest,
    ForkRequest,
    QueuedFork,
    QueueInfo,
    RunAgentRequest,
    SandboxInfo,
    TrajectoryInfo,
)
from snapshotd.api.wire import FORK_MAX, QUEUE_MAX, check_ref, socket_path_of
from snapshotd.client.aio.apart import whole_verb
from snapshotd.client.aio.approvals import AsyncApprovals
from snapshotd.client.aio.commands import AsyncCommandVerbs
from snapshotd.client.aio.experiments import AsyncExperiments
from snapshotd.client.aio.feeding import AsyncFeeder, AsyncTerminal
from snapshotd.client.aio.files import AsyncFileVerbs
from snapshotd.client.aio.following import AsyncFollowing
from snapshotd.client.aio.mind import AsyncMind
from snapshotd.client.aio.ports import AsyncPorts
from snapshotd.client.aio.sharing import AsyncSharing
from snapshotd.client.aio.transport import AsyncTransport
from snapshotd.client.aio.values import AsyncValues
from snapshotd.client.aio.verbs import result_of
from snapshotd.client.client import Snapshotd as SnapshotdOfThreads
from snapshotd.client.client import Which, _command, _line, _local_or_name, _pair, sandbox_fields
from snapshotd.client.commands import OutputSink, ShownOutput
from snapshotd.client.exchange import AGAIN_S, AnswerLost, new_key
from snapshotd.client.feeding import Readable
from snapshotd.client.local.arguments import (
    absolute,
    argv_of,
    check_count,
    check_flag,
    check_seconds,
    flag_of,
    local_path,
    sandbox_path,
    texts_of,
    words_of,
)
from snapshotd.client.results import ApplyInfo
from snapshotd.client.verbs import Progress, Wait, b64, check_wait
from snapshotd.config import CLIENT, read
from snapshotd.errors import DaemonUnavailable, UsageError
from snapshotd.terms import PRUNE_GRACE_S

if TYPE_CHECKING:
    from snapshotd.api.experiments import CompareInfo, Tried
    from snapshotd.client.branching.results import BisectInfo, ScoreInfo
    from snapshotd.scores import ScoredRun


class AsyncSnapshotd(
    AsyncMind,
    AsyncApprovals,
    AsyncValues,
    AsyncFileVerbs,
    AsyncPorts,
    AsyncSharing,
    AsyncCommandVerbs,
    AsyncExperiments,
):
    """One daemon. Cheap to make, and holds no connection: one serves any number of threads, or tasks.

    `state_dir` and `socket` default to SNAPSHOTD_STATE_DIR and SNAPSHOTD_SOCKET, then to /var/lib/snapshotd (for
    another user than root, to `$XDG_STATE_HOME/snapshotd`) and its snapshotd.sock. With `autostart` (the default), the first
    request starts a daemon when none answers;
    never when only a socket was named, since its daemon then lives elsewhere (a container, a service) and would find
    its place taken.

    A request that makes something is made once. Where its answer is lost, because the daemon was killed or the connection
    cut, it is asked for again, at most three times, for up to 10 seconds (SNAPSHOTD_RECONNECT_S, if that is less)
    without a daemon.

    `request_timeout`: seconds within which the daemon answers a request, or DaemonUnavailable is raised; None, the
    default: no limit. Commands, transfers and what is followed take as long as they take; `exec` has a `timeout` of its
    own.

    Every method may raise DaemonUnavailable, VersionMismatch and NotPermitted besides its own errors, and NotFound or
    Ambiguous for a ref: a tag, a name, or a unique prefix of an id. Local paths may be relative to the working
    directory.

    Methods that make a snapshot take `wait`. With "stored" they return when the snapshot survives power loss, and raise
    OutOfSpace, DataLoss or InternalError when it cannot be stored; it is captured all the same.
    """

    def __init__(
        self,
        state_dir: str | Path | None = None,
        socket: str | Path | None = None,
        *,
        autostart: bool = True,
        request_timeout: float | None = None,
        isolation: str | None = None,
    ) -> None:
        """UsageError for settings in the environment that make no sense."""
        config = read(CLIENT)
        self.state_dir, self._reconnect_s = (local_path(state_dir or config.state_dir), config.reconnect_s)
        self._isolation = isolation
        named = socket or (config.socket if state_dir is None else None)
        self.socket_path = local_path(named) if named else socket_path_of(self.state_dir)
        elsewhere = bool(named) and (not (state_dir or "state_dir" in config.given))
        start = self._start if autostart and (not elsewhere) else None
        patience_s = min(self._reconnect_s, AGAIN_S)
        self._transport = AsyncTransport(self.socket_path, start, timeout_s=request_timeout, patience_s=patience_s)

    @classmethod
    def _over(cls, transport: AsyncTransport) -> AsyncSnapshotd:
        """A client of the daemon at the end of this transport."""
        client = cls(socket=transport.socket_path, autostart=False)
        client._transport = transport
        return client

    def _start(self) -> None:
        from snapshotd.client.autostart import start_daemon

        start_daemon(self.state_dir, self.socket_path, isolation=self._isolation)

    def _note_isolation(self, sandbox: Mapping[str, Any]) -> None:
        if sandbox.get("runtime") == "none":
            self._isolation = "none"

    async def create(
        self, *, wait: Wait = "captured", idle_timeout: float = 0, **sandbox: Any
    ) -> tuple[TrajectoryInfo, SnapshotInfo]:
        """A sandbox without an agent, running, and its first snapshot. It ends with a last one after `idle_timeout`
        seconds without a command (0: never). More keywords are those of `sandbox_fields`."""
        check_wait(wait)
        check_seconds("idle_timeout", idle_timeout, zero=True)
        self._note_isolation(sandbox)
        body = CreateRequest(**sandbox_fields(**sandbox), idle_timeout_s=idle_timeout)
        made = await self._transport.call(operations.CREATE, body=body)
        return (made.trajectory, await self._settled(made.snapshot, wait))

    async def run(
        self,
        *,
        agent: str | Path | None = None,
        args: Sequence[str] = (),
        command: Sequence[str] = (),
        user: str | None = None,
        detach: bool = False,
        reuse: bool = False,
        reuse_replies: bool = False,
        wait: Wait = "captured",
        **sandbox: Any,
    ) -> TrajectoryInfo:
        """Start an agent file with `args`, or a `command`; `events` follows it. `user`: who runs it in
        the sandbox, as `USER[:GROUP]`; else root. `reuse`: its tool calls are answered from earlier runs that began in the
        same way, as long as it does the same; the event `finished` counts them, under "reused". `reuse_replies`: its model
        requests are, too. Further keywords: see `sandbox_fields`.

        If this process goes away before the answer, the run is stopped again unless `detach`. `wait` is for the
        snapshots so far, the first at least; for the others, call `flush` when the run has finished.
        """
        check_wait(wait)
        self._note_isolation(sandbox)
        body = RunAgentRequest(
            **sandbox_fields(**sandbox),
            agent=absolute(agent, "agent"),
            args=tuple(words_of("args", args)),
            command=tuple(words_of("command", command)),
            user=user,
            detach=detach,
            reuse=reuse,
            reuse_replies=reuse_replies,
        )
        started = await self._transport.call(operations.RUN_AGENT, body=body)
        if wait == "stored":
            await self.flush(started.id)
        return started

    def events(
        self, ref: str, *, follow: bool = True, on_lost: Callable[[], object] | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """The events of a run from its beginning; with `follow`, until `finished`.

        A follower outlives the daemon: when the daemon goes away, `on_lost` is called, and the next daemon (the first
        request starts it, where a daemon may be started) goes on behind the last event. DaemonUnavailable when for
        SNAPSHOTD_RECONNECT_S seconds (600 if not set; with 0 at once) no daemon could be followed, or the error that
        keeps one from starting; Conflict when another run of the trajectory has begun in the meantime. An agent that
        did not outlive its daemon has a `finished` whose status is `interrupted`.
        """
        if not follow:
            return self._transport.lines(*operations.EVENTS.at(ref), query={"follow": False})
        return self._followed(ref, ref, on_lost, None)

    def _followed(
        self, ref: str, what: str, on_lost: Callable[[], object] | None, timeout: float | None
    ) -> AsyncIterator[dict[str, Any]]:
        return AsyncFollowing(
            self._transport,
            operations.TRAJECTORY.to(ref),
            what=what,
            patience_s=self._reconnect_s,
            on_lost=on_lost,
            timeout=timeout,
        ).events()

    async def wait(
        self, ref: str, *, on_output: OutputSink | None = None, timeout: float | None = None
    ) -> TrajectoryInfo:
        """Wait until the run of a trajectory, or of a fork's program, has ended, as `events` follows it; the trajectory
        then has its `status` and `exit_code`. All output from the beginning goes to `on_output`. UsageError: no program
        ever ran in it. StillRunning (a TimeoutError): it has not ended after `timeout` seconds, and runs on."""
        check_seconds("timeout", timeout)
        identity, ended = ((await self.trajectory(ref)).id, False)
        shown = ShownOutput(on_output)
        async for event in self._followed(identity, ref, None, timeout):
            if event["event"] == "output":
                shown.show(event)
            ended = event["event"] == "finished"
        if not ended:
            raise UsageError(f"no program ever ran in {ref}, so there is no run to wait for")
        return await self.trajectory(identity)

    async def exec(
        self,
        ref: str,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        on_output: OutputSink | None = None,
        wait: Wait = "captured",
        if_head: str | None = None,
        stdin: Readable | None = None,
        timeout: float | None = None,
        idle_timeout: float | None = None,
        terminal: AsyncTerminal | None = None,
    ) -> ExecInfo:
        """Run a command as a tool call and take the snapshot. It goes on, and is captured, even if this process goes
        away. It runs once: if the answer is lost, the daemon, or the next one, is asked what became of it, and
        DaemonUnavailable means that nothing is recorded.

        CommandNotFound and CommandNotRunnable leave no snapshot. `on_output` gets raw output as it comes; if it raises
        BrokenPipeError, this process stops reading that stream, and the command meets a broken pipe when it writes
        again. `stdin` is read as far as the command takes it, in a thread where reading may wait; unbuffered input
        (`read` returns the bytes at hand) reaches the command at once.

        With `if_head` the command runs only if that snapshot is the trajectory's head: of several such requests at one
        time one runs, and the others get a Conflict that names the head.

        After `timeout` seconds the command is ended with everything that it started: the exit code is 124, the result
        `timed_out`, and what it has printed and written until then is there. `idle_timeout`: as `create`, for
        the sandbox from now on; None: as it is, or the daemon's default (half an hour) if it was stopped.

        With `terminal` the command has a terminal in place of pipes: all that it prints comes as "stdout", `stdin` is
        typed into it, and the command ends when this process goes away.
        """
        check_wait(wait)
        head = None if if_head is None else check_ref(if_head)
        request = exec_request(argv, cwd, env, user, timeout, terminal, if_head=head, idle_timeout=idle_timeout)
        paths = (operations.EXEC.to(ref), operations.EXEC_ATTENDED.to(ref))
        done = await self._exec(paths, request, on_output, stdin, terminal, f"of {ref}", new_key())
        return (
            done
            if done.snapshot is None
            else dataclasses.replace(done, snapshot=await self._settled(done.snapshot, wait))
        )

    async def exec_snapshot(
        self,
        ref: str,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        on_output: OutputSink | None = None,
        stdin: Readable | None = None,
        timeout: float | None = None,
        terminal: AsyncTerminal | None = None,
    ) -> ExecInfo:
        """Run a command in a throw-away fork of a snapshot; nothing of it is kept, and it ends when this process goes
        away. `on_output`, `stdin`, `timeout`, `terminal`: as `exec`."""
        request = exec_request(argv, cwd, env, user, timeout, terminal)
        paths = (operations.EXEC_SNAPSHOT.to(ref), operations.EXEC_SNAPSHOT_ATTENDED.to(ref))
        return await self._exec(paths, request, on_output, stdin, terminal, f"in a fork of {ref}", None)

    async def exec_junit(
        self,
        ref: str,
        argv: Sequence[str],
        report: str | Path,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        on_output: OutputSink | None = None,
        stdin: Readable | None = None,
        timeout: float | None = None,
    ) -> ExecInfo:
        """As `exec_snapshot`, and the local file `report` gets a JUnit report: the one that the command leaves at
        $SNAPSHOTD_JUNIT, else one that tells of the command as of one test. It is there whole or not at all. The shell in
        the image starts the command."""
        return await whole_verb(
            self._transport,
            SnapshotdOfThreads.exec_junit,
            ref,
            argv,
            report,
            cwd=cwd,
            env=env,
            user=user,
            on_output=on_output,
            stdin=stdin,
            timeout=timeout,
        )

    async def _exec(
        self,
        paths: tuple[str, str],
        request: ExecRequest,
        on_output: OutputSink | None,
        stdin: Readable | None,
        terminal: AsyncTerminal | None,
        where: str,
        key: str | None,
    ) -> ExecInfo:
        """`paths`: of the operation, and of the one for a client that attends to the command. `key` None: nothing is
        recorded of it."""
        shown = ShownOutput(on_output)
        async with await self._transport.converse(
            paths[1], request, query={"stdin": stdin is not None or None}, key=key
        ) as talk:
            feeder = None if stdin is None else AsyncFeeder(talk, stdin)
            if terminal is not None:
                terminal.used_in(talk)
            try:
                async for event in talk.events():
                    if event["event"] == "output":
                        if not shown.show(event):
                            await talk.say(json.dumps({"event": "unread", "stream": event["stream"]}).encode())
                    elif event["event"] == "taken" and feeder is not None:
                        await feeder.taken(event["bytes"])
                    elif event["event"] == "result":
                        return ExecInfo.of(event)
                raise DaemonUnavailable(
                    f"the daemon ended the command {where} without a result; `snapshotd log` shows whether it was captured"
                )
            except DaemonUnavailable as exc:
                if feeder is not None and feeder.failure is not None:
                    raise feeder.failure from None
                if key is None or not isinstance(exc, AnswerLost):
                    raise
                lost = exc
            finally:
                if terminal is not None:
                    terminal.used_in(None)
                if feeder is not None:
                    talk.break_off()
                    await feeder.end()
        shown.begin_again()
        *again, result = await self._transport.recall(paths[0], key, lost, body=request)
        for event in again:
            shown.show(event)
        return ExecInfo.of(result)

    async def fork(
        self,
        ref: str,
        n: int = 1,
        *,
        args: Sequence[str] | None = None,
        name: str | None = None,
        resume: bool = False,
        variants: Mapping[str, Mapping[str, Any]] | None = None,
        wait: Wait = "captured",
        idle_timeout: float | None = None,
    ) -> ForkInfo:
        """`n` (1..256) new trajectories from one snapshot, each with a running sandbox, all or none. With `args` the
        program starts in each; `{index}` in an argument is the fork's number from 0. With `resume` it is replayed up to
        the snapshot (with `args`, if given) and goes on from there.

        `variants` makes one child for each, in their order: a label, and the keywords in which it differs. `name` and
        `args` go before those of the fork; `env` and `secrets` are added to the source's; `network`, `memory`, `cpus`,
        `pids` and `disk` are as in `create`; `files`, `messages`, `drop_messages`, `add_messages`, `result` and `state`
        as in `edit`; every model request through the child's gateway asks for `model`. `{index}` and `{variant}` in
        names, arguments and values of the environment become the child's number and label. `n` is left out then.

        `wait` covers the snapshot that they begin at and their snapshots so far. `idle_timeout`: as `create`; None: the
        daemon's default (half an hour). UsageError before anything starts."""
        check_wait(wait)
        check_count("n", n, 1, FORK_MAX)
        check_seconds("idle_timeout", idle_timeout, zero=True)
        children: Any = ()
        if variants is not None:
            if n != 1:
                raise UsageError("a fork with variants has one child for each; leave the number out")
            from snapshotd.client.branching.variants import variant_fields

            children = variant_fields(variants)
        body = ForkRequest(
            n=n if variants is None else UNSET,
            args=None if args is None else tuple(words_of("args", args)),
            name=name,
            resume=resume,
            idle_timeout_s=idle_timeout,
            variants=children,
        )
        forked = await self._transport.call(operations.FORK, ref, body=body)
        if wait == "stored":
            origins = {item.forked_from for item in forked.trajectories if item.forked_from is not None}
            for line in (
                *[(await self.snapshot(origin)).trajectory for origin in origins],
                *(item.id for item in forked.trajectories),
            ):
                await self.flush(line)
        return forked

    async def fork_queue(
        self,
        ref: str,
        n: int = 1,
        *,
        parallel: int | None = None,
        keep_going: bool = False,
        args: Sequence[str] | None = None,
        name: str | None = None,
        resume: bool = False,
        variants: Mapping[str, Mapping[str, Any]] | None = None,
        on_child: Callable[[QueuedFork], object] = lambda _: None,
    ) -> QueueInfo:
        """`n` (1..10,000) forks, `parallel` at once (None: as many as fit into the free memory): each runs its program
        to the end, then another begins. Returns when all have ended. `args`, `name`, `resume`, `variants`:
        as `fork`; one of them has to give the forks a program. `on_child` is told of each that has ended.

        When one does not start, those that did are removed, and its error is raised; with `keep_going` it carries the
        error, and the rest goes on. UsageError before anything starts."""
        children: Any = ()
        if variants is not None:
            from snapshotd.client.branching.variants import variant_fields

            children = variant_fields(variants, QUEUE_MAX)
        check_flag("keep_going", keep_going)
        body = ForkQueueRequest(
            n, parallel, keep_going, None if args is None else tuple(words_of("args", args)), name, resume, children
        )
        async for event in self._transport.lines(*operations.FORK_QUEUE.at(ref), body=body):
            if event["event"] == "result":
                return QueueInfo.of(event)
            on_child(QueuedFork.of(event))
        raise DaemonUnavailable(
            "the daemon ended the queue without a result; forks that run go on, and `snapshotd ls` lists them"
        )

    async def take_snapshot(
        self, ref: str, name: str | None = None, *, if_changed: bool = False, wait: Wait = "captured"
    ) -> SnapshotInfo:
        """Take a snapshot of a running sandbox as it is now, with `name` as its tag. Processes in it run on. With
        `if_changed`, the answer is the head if no file was written since; where processes were alive at the head, a
        snapshot may be taken all the same. Conflict: the trajectory does not run, its program is being replayed, or the
        name is taken."""
        return await self._step(operations.TAKE_SNAPSHOT, ref, SnapshotRequest(name, if_changed), wait)

    async def stop(self, ref: str, *, discard: bool = False, wait: Wait = "captured") -> TrajectoryInfo:
        """Take a last snapshot if anything changed and end the sandbox. Not an error when it is not running. With
        `discard` there is no last snapshot, and what changed since the head is lost. OutOfSpace: there is no room for the
        snapshot; the sandbox goes on."""
        check_wait(wait)
        stopped = await self._transport.call(operations.STOP, ref, query={"discard": flag_of("discard", discard)})
        if wait == "stored":
            await self.flush(stopped.id)
        return stopped

    async def remove(self, ref: str, *, force: bool = False) -> None:
        """Forget a trajectory and free what only it used. Conflict when it runs (unless `force`) or has forks;
        UsageError: `ref` is a tag or a snapshot."""
        await self._transport.call(operations.REMOVE, ref, query={"force": flag_of("force", force)})

    async def trajectories(self) -> list[TrajectoryInfo]:
        return await self._transport.call(operations.TRAJECTORIES)

    async def sandboxes(self) -> list[SandboxInfo]:
        return await self._transport.call(operations.SANDBOXES)

    async def trajectory(self, ref: str) -> TrajectoryInfo:
        return await self._transport.call(operations.TRAJECTORY, ref)

    async def log(self, ref: str, last: int | None = None) -> list[SnapshotInfo]:
        """A trajectory's own snapshots, oldest first; with `last` (1 or more), only this number of the newest."""
        return await self._transport.call(operations.LOG, ref, query={"last": last})

    async def all_snapshots(self) -> list[SnapshotInfo]:
        return await self._transport.call(operations.ALL_SNAPSHOTS)

    async def conversation(self, ref: str) -> list[MessageInfo]:
        """The conversation up to a snapshot."""
        return await self._transport.call(operations.CONVERSATION, ref)

    def output(self, ref: str, which: Which = "output") -> AsyncIterator[bytes]:
        """A tool call's recorded output in pieces. DataLoss: it is damaged, or gone since it was."""
        return self._transport.pieces(*operations.OUTPUT.at(ref, which))

    async def diff(self, a: str, b: str | None = None) -> AsyncIterator[ChangeInfo]:
        """The changes from `a` to `b`; with one ref, from its parent to it."""
        async for event in self._transport.lines(*operations.DIFF.at(), query=_pair(a, b)):
            if event.get("event") == "end":
                return
            yield ChangeInfo.of(event)
        raise DaemonUnavailable("the daemon ended the list of changes early; repeat the command")

    async def patch(
        self, a: str, b: str | None = None, *, write: Callable[[bytes], object], root: str | bytes = "/workspace"
    ) -> int:
        """Write the changes below `root` as a patch that `git apply` and `patch -p1` take. Returns how many changes lie
        elsewhere."""
        query = {**_pair(a, b), "root_b64": b64(sandbox_path(root))}
        async for event in self._transport.lines(*operations.PATCH.at(), query=query):
            if event["event"] == "end":
                return int(event["outside"])
            write(base64.b64decode(event["data_b64"]))
        raise DaemonUnavailable(
            "the daemon ended the patch early, so what was written is not complete; repeat the command"
        )

    async def compare(self, *refs: str) -> CompareInfo:
        """Two or more trajectories or snapshots, call by call from the last snapshot that all have, each against the
        first; and how each came out."""
        body = {"refs": [check_ref(ref) for ref in refs]}
        return await self._transport.call(operations.COMPARE, body=body)

    async def bisect(
        self,
        ref: str,
        argv: Sequence[str],
        *,
        good: str | None = None,
        bad: str | None = None,
        parallel: int = 1,
        repeat: int = 1,
        on_tried: Callable[[Tried], object] = lambda _: None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> BisectInfo:
        """The first snapshot of a line at which a command fails, by runs in throw-away forks, `parallel` at once. Exit
        code 0 passes, 125 cannot tell, everything else fails. `good` is the line's first snapshot unless named, `bad`
        its head. The border runs `repeat` times again, to find a flaky command. `on_tried` is told of each run. It ends
        when this process goes away.

        UsageError: the command fails at the good end, or passes at the bad one.
        """
        from snapshotd.api.experiments import Tried
        from snapshotd.client.branching.results import BisectInfo

        body = {
            **_command(argv, cwd, env, user),
            "ref": check_ref(ref),
            "good": None if good is None else check_ref(good),
            "bad": None if bad is None else check_ref(bad),
            "parallel": parallel,
            "repeat": repeat,
        }
        tried: list[Json] = []
        async for event in self._transport.lines(*operations.BISECT.at(), body=body):
            if event["event"] == "result":
                return BisectInfo.of({**event, "tried": tried})
            tried.append(event)
            on_tried(Tried.of(event))
        raise DaemonUnavailable("the daemon ended the bisection without a result; repeat it")

    async def score(
        self,
        refs: Sequence[str],
        argv: Sequence[str],
        *,
        each: bool = False,
        number: bool = False,
        junit: str | None = None,
        with_files: str | Path | None = None,
        with_path: str | None = None,
        repeat: int = 1,
        parallel: int | None = None,
        on_run: Callable[[ScoreInfo, ScoredRun], object] = lambda _row, _run: None,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> tuple[ScoreInfo, ...]:
        """Run a command in a throw-away fork of each snapshot (of a trajectory: its head; with `each`: all of its own),
        `repeat` times each, `parallel` at once (None: as many as there are processors), and rank them. It ends when this
        process goes away.

        The score is 1 for exit code 0, else 0; with `number` the last line of standard output that is a number; with
        `junit` the share of tests that passed, from a report that the run leaves at that path in the fork. The fork
        alone gets the content of the local folder `with_files` (16 MiB at most), at `with_path` (/tmp/score unless
        given), in place of anything there; it needs `sh` and `tar` in the image for that. `on_run` is told of each run
        as it ends, with the row that it belongs to.

        A run without a score, or of more than `timeout` seconds, carries its error, and the rest goes on. UsageError
        and LimitExceeded before anything runs.
        """
        from snapshotd.client.branching.results import ScoreInfo
        from snapshotd.client.local.scorer_files import folder_b64
        from snapshotd.scores import ScoredRun

        check_seconds("timeout", timeout)
        body = {
            **_command(argv, cwd, env, user),
            "refs": words_of("refs", refs),
            "each": each,
            "number": number,
            "junit": junit,
            "files_b64": None if with_files is None else folder_b64(local_path(with_files, "with_files")),
            "files_path": None if with_files is None else with_path,
            "repeat": repeat,
            "parallel": parallel,
            "timeout_s": timeout,
        }
        async for event in self._transport.lines(*operations.SCORE.at(), body=body):
            if event["event"] == "result":
                return tuple(map(ScoreInfo.from_json, event["rows"]))
            on_run(ScoreInfo.from_json(event), ScoredRun.from_json(event["run"]))
        raise DaemonUnavailable("the daemon ended the scores without a result; repeat them")

    def cat(self, ref: str, path: str | bytes) -> AsyncIterator[bytes]:
        """A regular file's content in pieces. NotFound; UsageError for anything but a regular file."""
        return self._transport.pieces(*operations.CAT.at(ref), query={"path_b64": b64(sandbox_path(path))})

    async def lstat(self, ref: str, path: str | bytes) -> FileStatus:
        """The entry at a path of a snapshot, links not followed. NotFound."""
        return await self._transport.call(operations.FILE_STATUS, ref, query={"path_b64": b64(sandbox_path(path))})

    async def restore(self, ref: str, to: str | Path, *, path: str = "") -> RestoreInfo:
        """Write a snapshot's tree, or the part below `path`, into the local folder `to`, which must not exist or be
        empty."""
        body = RestoreRequest(str(local_path(to, "to")), os.fsdecode(sandbox_path(path)) if path else "")
        return await self._transport.call(operations.RESTORE, ref, body=body)

    async def apply(
        self,
        snapshot: str,
        to: str | Path,
        base: str | None = None,
        path: str | bytes | None = None,
        dry_run: bool = False,
        *,
        commit: str | bool = False,
        hooks: bool = False,
    ) -> ApplyInfo:
        """Bring what changed from `base` to `snapshot` below the directory `path` (/workspace) to the local folder
        `to`, all or nothing; with `dry_run`, only say what that would be. `base` is the snapshot from right after the
        workspace was copied in, unless given. With `commit` (True, or a message), make a git commit of it; hooks of the
        folder's repository, and programs that its settings name, run only with `hooks`.

        Three-way: the folder's own changes are kept. Where both exclude each other, nothing is written and the answer
        names the conflicts. UsageError (the folder cannot be read or written; no commit can be made there, or none
        without a program of its repository), Conflict
        (the folder changed meanwhile; another apply is at work; git refused the commit of what is applied), OutOfSpace,
        Unsupported (there is no git, and it is needed)."""
        return await whole_verb(
            self._transport, SnapshotdOfThreads.apply, snapshot, to, base, path, dry_run, commit=commit, hooks=hooks
        )

    async def tag(self, ref: str, name: str, *, move: bool = False) -> str:
        """Give a snapshot a tag; returns the snapshot's id. Conflict when another snapshot has the tag, unless
        `move`."""
        check_ref(ref)
        return (await self._transport.call(operations.TAG, name, body=TagRequest(ref, move))).snapshot

    async def tag_if(
        self,
        ref: str,
        name: str,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        on_output: OutputSink | None = None,
    ) -> ExecInfo:
        """Run a command in a throw-away fork of a snapshot (of a trajectory: of its head, as it is now), and move the
        tag to that snapshot if it ends with exit code 0. Returns how it ended."""
        snapshot = (await self.snapshot(ref)).id
        done = await self.exec_snapshot(snapshot, argv, cwd=cwd, env=env, user=user, on_output=on_output)
        if done.exit_code == 0:
            await self.tag(snapshot, name, move=True)
        return done

    async def untag(self, name: str) -> None:
        await self._transport.call(operations.UNTAG, check_ref(name, "tag"))

    async def usage(self) -> UsageInfo:
        """Disk use."""
        return await self._transport.call(operations.USAGE)

    async def policy(self, trajectory: str | None = None) -> Policy:
        """The global retention policy, or the one that holds for a trajectory."""
        return await self._transport.call(operations.POLICY, query=_line(trajectory))

    async def set_policy(self, policy: Policy | None, trajectory: str | None = None) -> Policy:
        """Set the global policy, or a trajectory's own; None removes it. No files go before the next prune, which a
        user's folder has every hour. Returns the
        policy that holds now. UsageError for a number out of range."""
        if policy is not None:
            return await self._transport.call(operations.SET_POLICY, query=_line(trajectory), body=policy)
        await self._transport.call(operations.CLEAR_POLICY, query=_line(trajectory))
        return await self.policy(trajectory)

    async def prune(
        self,
        policy: Policy | None = None,
        *,
        dry_run: bool = False,
        grace_s: float = PRUNE_GRACE_S,
        progress: Progress | None = None,
    ) -> PruneInfo:
        """Give up the files of snapshots that no rule keeps, and collect objects that nothing refers to. `policy`
        replaces the stored policies. Packs younger than `grace_s` stay as they are, until a later prune. Goes on when
        this process goes away."""
        body = PruneRequest(policy, dry_run, grace_s)
        done = await self._work(operations.PRUNE, body, progress, "the prune", "`snapshotd df` shows what there is")
        return PruneInfo.of(done["report"])

    async def check(self, *, read_data: bool = False, progress: Progress | None = None) -> CheckInfo:
        """Verify the repository; with `read_data` also every object against its id. Damage is in the answer and not
        raised."""
        body = CheckRequest(read_data)
        done = await self._work(operations.CHECK, body, progress, "the check", "it changes nothing: repeat it")
        return CheckInfo.of(done["report"])

    async def repair(self, *, progress: Progress | None = None) -> RepairInfo:
        """Rebuild damaged parts from intact ones. Does nothing to a healthy repository. Goes on when this process goes
        away."""
        done = await self._work(
            operations.REPAIR, None, progress, "the repair", "`snapshotd check` shows how it stands"
        )
        return RepairInfo.of(done["report"])

    async def mount(self, directory: str | Path) -> None:
        """Show every stored snapshot below a local directory, read-only, as `trajectories/`, `snapshots/` and `tags/`.
        UsageError, Unsupported."""
        await self._transport.call(operations.MOUNT, body=MountRequest(str(local_path(directory))))

    async def unmount(self, directory: str | Path) -> None:
        """End it. NotFound when nothing of the daemon's is mounted there."""
        await self._transport.call(operations.UNMOUNT, body=MountRequest(str(local_path(directory))))

    async def _work(
        self, operation: Operation[Any], body: Request | None, progress: Progress | None, what: str, then: str
    ) -> dict[str, Any]:
        return await result_of(self._transport.lines(*operation.at(), body=body), progress, what, then)

    async def images(self) -> list[ImageInfo]:
        return await self._transport.call(operations.IMAGES)

    async def ensure_image(self, name: str, *, progress: Progress | None = None) -> ImageInfo:
        """The image that a sandbox of this name would start from. One that is not there is built or imported, as it
        would be by `create` and `run`, which say nothing meanwhile."""
        return await self._make_image(operations.ENSURE_IMAGE, EnsureImageRequest(name), progress, f"the image {name}")

    async def build_image(self, recipe: str, *, name: str | None = None, progress: Progress | None = None) -> ImageInfo:
        """From a recipe folder, or the name of one that comes with snapshotd (`default`, `minimal`)."""
        body = ImageRequest(_local_or_name(recipe), name)
        return await self._make_image(operations.BUILD_IMAGE, body, progress, f"the build of {body.source}")

    async def import_image(
        self, source: str, *, name: str | None = None, progress: Progress | None = None
    ) -> ImageInfo:
        """From a folder, a tar of a root file system, a `docker save` or OCI archive, or a Docker image name."""
        body = ImageRequest(_local_or_name(source), name)
        return await self._make_image(operations.IMPORT_IMAGE, body, progress, f"the import of {body.source}")

    async def _make_image(
        self, operation: Operation[Any], body: Request, progress: Progress | None, what: str
    ) -> ImageInfo:
        done = await self._work(operation, body, progress, what, "`snapshotd image ls` shows what is there")
        return ImageInfo.of(done["image"])

    async def remove_image(self, ref: str) -> None:
        await self._transport.call(operations.REMOVE_IMAGE, ref)

    async def version(self) -> VersionInfo:
        return await self._transport.call(operations.VERSION)

    async def status(self) -> dict[str, Any]:
        return await self._transport.call(operations.STATUS)


def exec_request(
    argv: Sequence[str],
    cwd: str | None,
    env: Mapping[str, str] | None,
    user: str | None,
    timeout: float | None,
    terminal: AsyncTerminal | None,
    *,
    if_head: str | None = None,
    idle_timeout: float | None = None,
) -> ExecRequest:
    """The request for a command. UsageError for arguments that make no sense."""
    check_seconds("timeout", timeout)
    check_seconds("idle_timeout", idle_timeout, zero=True)
    return ExecRequest(
        argv=tuple(argv_of(argv)),
        cwd=cwd,
        env=texts_of("env", env),
        user=user,
        timeout_s=timeout,
        idle_timeout_s=idle_timeout,
        if_head=if_head,
        terminal=None if terminal is None else TerminalSize(terminal.rows, terminal.columns),
    )
