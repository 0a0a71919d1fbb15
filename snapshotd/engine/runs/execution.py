"""Running commands in live sandboxes: a client's, from its start to its snapshot, and the start of a program."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

from snapshotd.api.commands import CommandFields
from snapshotd.engine import requests
from snapshotd.engine.base import CommandInfo, ExecResult, OutputSink, Stream
from snapshotd.engine.caller import Caller
from snapshotd.engine.context import Context
from snapshotd.engine.mind.gateways import Gateways
from snapshotd.engine.runs import folder_mode
from snapshotd.engine.sandbox import users
from snapshotd.engine.sandbox.pump import CommandOutcome, Shown, pump
from snapshotd.engine.sandbox.sandbox import ClientCommand, Sandbox
from snapshotd.engine.sandbox.step import StepListener, commit_step, marker
from snapshotd.engine.sandbox.timeout import EXIT_CODE as TIMED_OUT
from snapshotd.engine.sandbox.timeout import Timeout
from snapshotd.errors import Conflict, LimitExceeded, SandboxFailed
from snapshotd.kernel import turns
from snapshotd.kernel.limits import Hits
from snapshotd.kernel.processes import MARK
from snapshotd.runtime.base import DEFAULT_PATH, LIBRARY_DIR, ExecSpec, Process
from snapshotd.types import CallStatus, Trajectory, short

KILLED = 128 + signal.SIGKILL
"""Exit code of a command that was killed."""


class Execution:
    """See the module's text. `listener` is told of every step. Thread-safe."""

    def __init__(self, context: Context, gateways: Gateways, listener: StepListener) -> None:
        self._context, self._gateways, self._listener = context, gateways, listener

    def run(
        self,
        sandbox: Sandbox,
        command: ClientCommand,
        request: CommandFields,
        *,
        sink: OutputSink,
        record: bool,
        save: bool,
        caller: Caller | None,
    ) -> ExecResult:
        """See `Sessions.exec`."""
        spec, timeout_s = self.requested(sandbox, request), request.timeout_s
        if caller is not None and caller.gives_input:
            spec = replace(spec, stdin=True)
        if caller is not None and caller.terminal is not None:
            kind = request.env.get("TERM", "xterm")
            spec = replace(spec, terminal=caller.terminal, env={**spec.env, "TERM": kind})
        funnel = self._context.secrecy.of(sandbox.trajectory)
        call = marker("exec", funnel.conceal({"argv": list(request.argv), "cwd": spec.cwd}))
        command.mark = call.id
        spec = replace(spec, env={**spec.env, MARK: call.id})
        show = self.logging(sandbox, lambda stream, data, _: sink(stream, data))
        sandbox.use.ended_for.clear()
        timeout = Timeout(sandbox, command, timeout_s)
        process, before = self.start(sandbox, spec, command=command)
        command.info = CommandInfo(
            call.id,
            sandbox.trajectory.id,
            tuple(call.arguments["argv"]),
            call.arguments["cwd"],
            call.started_at_ns,
            stdin=spec.stdin,
            timeout_s=timeout_s,
            background=False,
        )
        with timeout.over(process):
            outcome = pump(
                process,
                funnel,
                show,
                spool=self._context.spool,
                max_bytes=self._context.config.output_bytes,
                caller=caller,
                abandon=not record or process.terminal,
                save=record or save,
            )
        for sentence in sandbox.use.ended_for:
            sink("stderr", f"snapshotd: {sentence}\n".encode())
        call = replace(
            marker(
                call.name,
                call.arguments,
                stdout=outcome.stdout,
                stderr=outcome.stderr,
                started_at_ns=call.started_at_ns,
                **ended_as(sandbox, command, outcome, before, timeout_s),
            ),
            id=call.id,
        )
        snapshot = None
        if record:
            snapshot = commit_step(self._context.catalog, sandbox, call, self._listener, request=requests.present())
        if call.exit_code is None:
            raise SandboxFailed(
                "the command has ended and its exit code is lost; its output and files are with its snapshot"
            )
        return ExecResult(call.exit_code, snapshot, call)

    def start(
        self, sandbox: Sandbox, spec: ExecSpec, *, command: ClientCommand | None = None, keep: str | None = None
    ) -> tuple[Process, Hits]:
        """Start a command, never in the middle of a step: between the look at the live processes and the pivot none may
        come in. `command`: a client's; `keep`: as `Runtime.exec`. Also the hits at the sandbox's limits before."""
        with sandbox.lock, turns.first():
            if command is not None and command.cut_off:
                raise Conflict(
                    f"the sandbox of {short(sandbox.trajectory.id)} ended before the command began; try again"
                )
            sandbox.root.revive()
            before = sandbox.hits()
            try:
                process = sandbox.runtime.exec(sandbox.container, spec, keep=keep)
            except SandboxFailed as exc:
                reached = reached_limit(sandbox, before)
                if reached is None:
                    raise
                raise LimitExceeded(
                    f"{spec.argv[0]!r} could not be started in {short(sandbox.trajectory.id)}: {reached}"
                ) from exc
            if command is not None:
                command.process = process
            return process, before

    def logging(self, sandbox: Sandbox, show: Shown) -> Shown:
        """Show a command's output also in the container's own log."""

        def both(stream: Stream, data: bytes, shown_bytes: int) -> None:
            sandbox.runtime.log(sandbox.container, data)
            show(stream, data, shown_bytes)

        return both

    def workdir(self, trajectory: Trajectory) -> str:
        return trajectory.agent.cwd if trajectory.agent is not None else "/workspace"

    def requested(self, sandbox: Sandbox, request: CommandFields) -> ExecSpec:
        """The command that a client asks for."""
        cwd = request.cwd or self.workdir(sandbox.trajectory)
        return self.spec(sandbox, request.argv, cwd, tuple(request.env.items()), request.user)

    def spec(
        self, sandbox: Sandbox, argv: tuple[str, ...], cwd: str, env: tuple[tuple[str, str], ...], user: str | None
    ) -> ExecSpec:
        """The specification of a command in the sandbox, with the whole environment. Errors: as `users.look_up`."""
        root = sandbox.container.root
        if user and root is not None:
            raise folder_mode.refused("another user", "leave it out; commands run as the daemon's own")
        who = users.look_up(sandbox.container, user) if user else users.ROOT
        image = self._context.image(sandbox.trajectory.spec.image)
        environment = {
            "PATH": DEFAULT_PATH,
            "HOME": who.home,
            **(folder_mode.environment(str(root)) if root is not None else {}),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "PYTHONUNBUFFERED": "1",
            # Python takes a .pyc for valid by whole seconds and size: a quick patch, or a fork's, would not be seen.
            "PYTHONDONTWRITEBYTECODE": "1",
            "SNAPSHOTD_TRAJECTORY": sandbox.trajectory.id,
            **dict(image.env if image else ()),
            **self._gateways.environment(sandbox),
            **self._context.secrecy.inside(sandbox.trajectory),
            **dict(env),
        }
        packages = ["/opt/agent-packages"] if root is None else []
        paths = [LIBRARY_DIR, *packages, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = ":".join(paths)
        environment["PATH"] = (
            f"{environment['PATH']}:{LIBRARY_DIR}/snapshotd/agent/bin"  # last: an image's own programs come first
        )
        return ExecSpec(list(argv), cwd, environment, who.user, who.group, who.groups)


def reached_limit(sandbox: Sandbox, before: Hits) -> str | None:
    """The limit of the sandbox that was reached since `before`: how it shows, and the next step. None: no limit was."""
    now, limits = sandbox.hits().since(before), sandbox.trajectory.spec.limits
    if now.killed > 0:
        return (
            f"out of memory: the kernel killed {now.killed} of the sandbox's processes at its limit of "
            f"{limits.memory_bytes / 2**20:.0f} MiB; run it in a sandbox with more memory"
        )
    if now.refused > 0:
        return (
            f"the sandbox has reached its limit of {limits.pids} processes; end some of them, end all with `snapshotd stop`, or run it in "
            "a sandbox with more processes"
        )
    return None


def ended_as(
    sandbox: Sandbox, command: ClientCommand, outcome: CommandOutcome, before: Hits, timeout_s: float | None
) -> dict[str, Any]:
    """The outcome of a client's command, as `status`, `exit_code` and `error` of its call."""
    status, exit_code = status_of(outcome), outcome.exit_code
    error = None if exit_code == 0 else reached_limit(sandbox, before)
    if command.timed_out and exit_code == KILLED:  # else it had ended before
        status, exit_code = CallStatus.TIMED_OUT, TIMED_OUT
        error = (
            f"the command was ended with all that it started, since it took longer than its timeout of {timeout_s:g} s"
        )
    elif command.cut_off and exit_code == KILLED:
        status = CallStatus.INTERRUPTED
    return {"status": status, "exit_code": exit_code, "error": error}


def status_of(outcome: CommandOutcome) -> CallStatus:
    """The status of a call that has ended on its own."""
    if outcome.exit_code is None:
        return CallStatus.UNKNOWN
    return CallStatus.DONE if outcome.exit_code == 0 else CallStatus.FAILED
