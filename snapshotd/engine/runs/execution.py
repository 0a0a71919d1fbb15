"""Running programs in live sandboxes: what each is started with, its start, and its output up to its end."""

from __future__ import annotations

import signal

from snapshotd.engine.base import OutputSink, Stream, output_event
from snapshotd.engine.caller import Caller
from snapshotd.engine.context import Context
from snapshotd.engine.events import EventLog
from snapshotd.engine.journal.gateways import Gateways
from snapshotd.engine.runs import folder_mode
from snapshotd.engine.sandbox import users
from snapshotd.engine.sandbox.kept import KeptProcess
from snapshotd.engine.sandbox.pump import CommandOutcome, printed_output, pump
from snapshotd.engine.sandbox.sandbox import ClientCommand, Sandbox
from snapshotd.errors import Conflict, LimitExceeded, SandboxFailed
from snapshotd.kernel import turns
from snapshotd.kernel.limits import Hits
from snapshotd.runtime.base import DEFAULT_PATH, LIBRARY_DIR, ExecSpec, Process
from snapshotd.scores import REPORT_VARIABLE
from snapshotd.types import CallStatus, short

KILLED = 128 + signal.SIGKILL
"""Exit code of a command that was killed."""


class Execution:
    """See the module's text. Thread-safe."""

    def __init__(self, context: Context, gateways: Gateways) -> None:
        self._context, self._gateways = context, gateways

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

    def spec(
        self, sandbox: Sandbox, argv: tuple[str, ...], cwd: str, env: tuple[tuple[str, str], ...], user: str | None
    ) -> ExecSpec:
        """The specification of a command in the sandbox, with the whole environment. Errors: as `users.look_up`."""
        root = sandbox.container.root
        if user and root is not None:
            raise folder_mode.refusal("another user", "leave it out; commands run as the daemon's own")
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
        report = environment.get(REPORT_VARIABLE, "")
        if root is not None and report.startswith("/"):
            environment[REPORT_VARIABLE] = folder_mode.place(str(root), report)
        packages = ["/opt/agent-packages"] if root is None else []
        paths = [LIBRARY_DIR, *packages, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = ":".join(paths)
        environment["PATH"] = (
            f"{environment['PATH']}:{LIBRARY_DIR}/snapshotd/agent/bin"  # last: an image's own programs come first
        )
        return ExecSpec(list(argv), cwd, environment, who.user, who.group, who.groups)

    def follow(
        self,
        sandbox: Sandbox,
        process: Process,
        *,
        sink: OutputSink | None = None,
        log: EventLog | None = None,
        kept: KeptProcess | None = None,
        caller: Caller | None = None,
        abandon: bool = False,
        save: bool = True,
    ) -> CommandOutcome:
        """Pass on the output of a process until it has ended: to the container's own log, to `sink` and to `log`, which
        has what an earlier daemon has shown of it. `kept`: it outlives this daemon. The other arguments and errors are
        those of `pump`."""

        def show(stream: Stream, data: bytes, shown_bytes: int) -> None:
            sandbox.runtime.log(sandbox.container, data)
            if sink is not None:
                sink(stream, data)
            if log is not None:
                log.append({**output_event(stream, data), "shown_bytes": shown_bytes})

        return pump(
            process,
            self._context.secrecy.of(sandbox.trajectory),
            show,
            spool=self._context.spool,
            max_bytes=self._context.config.output_bytes,
            intakes=None if kept is None else kept.intakes,
            earlier=() if log is None else printed_output(log.follow(wait=False)),
            caller=caller,
            abandon=abandon,
            save=save,
        )


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


def status_of(outcome: CommandOutcome) -> CallStatus:
    """The status of a call that has ended on its own."""
    if outcome.exit_code is None:
        return CallStatus.UNKNOWN
    return CallStatus.DONE if outcome.exit_code == 0 else CallStatus.FAILED
