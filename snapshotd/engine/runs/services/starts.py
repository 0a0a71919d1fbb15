"""Services in sandboxes: they are declared in a file of the sandbox (snapshotd/service.py), and started again wherever one
begins on files that declare them.

A service is started as a command in the background, in the order of its declaration, and awaited, before whatever the
sandbox was started for. It is no tool call: it leaves no snapshot and does not own its sandbox. So the sandbox may idle,
and another root ends its services; those of the new root are started then. Its files are those of a power cut at the
moment of the snapshot, at which all processes stand still.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from snapshotd.api.commands import BackgroundRequest, CommandFields
from snapshotd.engine.base import CommandInfo
from snapshotd.engine.caller import Caller, Stream
from snapshotd.engine.context import Context
from snapshotd.engine.runs import folder_mode, ports
from snapshotd.engine.runs.commands import Commands
from snapshotd.engine.runs.services.declarations import (
    REMOVED,
    Declarations,
    encode_services,
    service_of,
    unknown_service,
)
from snapshotd.engine.sandbox.sandbox import ClientCommand, Sandbox
from snapshotd.engine.sandbox.signals import end_rest, end_service, end_services
from snapshotd.engine.sandbox.step import StepListener
from snapshotd.errors import Conflict, SandboxFailed, SnapshotdError
from snapshotd.failpoints import hit
from snapshotd.service import DeclaredService
from snapshotd.types import Snapshot, TrajectoryID, short

_LOOK_S, _LOOK_MOST_S, _RISE = 0.02, 0.5, 1.5
"""Seconds between two looks whether a service is ready: at first, at most, and the factor from one to the next."""
_CHECK_S = 10.0
"""Limit of one run of a ready command: one that hangs is run again."""
_RESTART_S, _RESTART_MOST_S = 0.2, 30.0
"""Seconds before a service is started again: the first time, doubled each time, and at most."""
_TAIL_BYTES = 400
_log = logging.getLogger(__name__)


class _Tail:
    """The last of what a service and its checks have printed, for a message."""

    def __init__(self) -> None:
        self._data = b""

    def take(self, _stream: Stream, data: bytes) -> None:
        self._data = (self._data + data)[-_TAIL_BYTES:]

    def __str__(self) -> str:
        said = self._data.decode(errors="replace").strip().replace("\n", " / ")
        return f"; it said: {said}" if said else ""


Serve = Callable[[DeclaredService, _Tail], ClientCommand]
"""Starts a service whose output may go to the tail."""


class _Patience:
    """The time that a caller has for services to get ready."""

    def __init__(self, timeout_s: float | None = None, caller: Caller | None = None) -> None:
        self._timeout_s, self._caller = timeout_s, caller
        self._until = math.inf if timeout_s is None else time.monotonic() + timeout_s

    def before(self, deadline: float) -> float:
        """This deadline, or the caller's own if that is earlier."""
        return min(deadline, self._until)

    def check(self) -> None:
        """Check that the caller still waits. SandboxFailed: it has no more time, or is gone."""
        if self._caller is not None and self._caller.gone:
            raise SandboxFailed("its caller was gone before it was ready")
        if time.monotonic() >= self._until:
            raise SandboxFailed(f"it was not ready within the {self._timeout_s:g} s that its caller allows")


_ANY_TIME = _Patience()


def _output_hint(sandbox: Sandbox, service: DeclaredService | None) -> str:
    """The end of a sentence about a service that did not come back: it tells where the service's output is."""
    name = sandbox.trajectory.shown_name
    return "" if service is None else f"; `snapshotd logs {name} {service.name}` has its output"


class SandboxServices:
    """See the module's text. Thread-safe."""

    def __init__(
        self,
        context: Context,
        commands: Commands,
        listener: StepListener,
        start_lock: Callable[[TrajectoryID], AbstractContextManager[object]],
    ) -> None:
        """`listener` is told of every step. `start_lock`: held while a trajectory's sandbox is started."""
        self._context, self._commands, self._start_lock = context, commands, start_lock
        self._declared = Declarations(context, listener)

    # -- declarations --------------------------------------------------------------------------------------------------

    def declare(self, sandbox: Sandbox, request: BackgroundRequest) -> CommandInfo:
        """Start a service, and declare it once it is ready, in one step. If it does not get ready, or the step cannot be
        taken, it is ended and nothing is declared. The same declaration once more (a daemon may have died within the step)
        starts it if it does not run. UsageError; Conflict: there is another one of that name; LimitExceeded: there are too
        many; SandboxFailed: it does not get ready; and the errors of `Commands.begin` and `commit_step`."""
        service = service_of(request)
        self._check_kind(sandbox, service)
        concealed = service.with_texts(self._context.secrecy.of(sandbox.trajectory).conceal_text)
        with sandbox.use.starting_services:
            declared = self._declared.read(sandbox)
            command = next((one for one in sandbox.use.services if one.service == service.name), None)
            if concealed not in declared:
                self._declared.check_new(sandbox, service.name, declared, runs=command is not None)
                declared = [*declared, concealed]
            text = encode_services(sandbox, declared)
            if command is None:
                info, command = self._serve(sandbox, service, 0)
            else:
                info = self._commands.known.find(sandbox.trajectory, service.name)
            try:
                self._await(sandbox, service, command, _Tail())
                hit("engine.service.ready")
                call = {
                    "argv": list(service.argv),
                    "service": service.name,
                    "ready": service.ready,
                    "port": service.port,
                }
                self._declared.commit(sandbox, text, {name: value for name, value in call.items() if value is not None})
            except BaseException as exc:
                self._end(sandbox, command, _error_text(exc))
                if isinstance(exc, SandboxFailed):
                    raise SandboxFailed(f"the service {service.name} is not declared: {exc.message}") from exc
                raise
            hit("engine.service.declared")
        return replace(info, ready=True)

    def remove(self, sandbox: Sandbox, name: str) -> Snapshot:
        """End a service and take its declaration away, in one step. NotFound: there is none of that name."""
        with sandbox.use.starting_services:
            declared = self._declared.read(sandbox)
            left = [service for service in declared if service.name != name]
            if len(left) == len(declared):
                raise unknown_service(sandbox, name, declared)
            with sandbox.lock:
                for command in list(sandbox.use.services):
                    if command.service == name:
                        end_service(sandbox, command)
                return self._declared.commit(sandbox, encode_services(sandbox, left), {"service": name, REMOVED: True})

    def _check_kind(self, sandbox: Sandbox, service: DeclaredService) -> None:
        if service.port is not None and not sandbox.isolated:
            raise folder_mode.refusal(
                "a service with a port", "leave the port out, and give it a ready command that connects to its server"
            )

    # -- starts --------------------------------------------------------------------------------------------------------

    def start(self, sandbox: Sandbox, *, strict: bool = False) -> list[str]:
        """Start the declared services that do not run, in their order, each awaited. Returns a sentence for each that did not
        come back; the sandbox's next user is told the same. SandboxFailed: with `strict`, a required one did not."""
        with sandbox.use.starting_services:
            failures = self._start_all(sandbox, self._starter(sandbox, 0))
        sentences = [sentence + _output_hint(sandbox, service) for service, sentence in failures]
        self._tell(sandbox, sentences)
        lacking = [sentence for service, sentence in failures if strict and service is not None and service.required]
        if lacking:
            raise SandboxFailed(f"the sandbox is not started without a service that is required: {lacking[0]}")
        return sentences

    def revive(self, sandbox: Sandbox) -> None:
        """As `start`, in a sandbox that is in use: clients who want to run something in it wait meanwhile."""
        with self._start_lock(sandbox.trajectory.id):
            if not sandbox.closed:
                self.start(sandbox)

    @contextlib.contextmanager
    def beside(self, sandbox: Sandbox, timeout_s: float | None, caller: Caller | None) -> Iterator[None]:
        """Inside, the services run in a throw-away sandbox. SandboxFailed: one of them did not come back, not within
        `timeout_s` for all of them, or not before the `caller` was gone; nobody would see that what runs there lacks it."""
        try:
            failures = self._start_all(
                sandbox,
                lambda service, tail: self._commands.serve_unrecorded(sandbox, service, tail.take),
                _Patience(timeout_s, caller),
            )
            if failures:
                raise SandboxFailed(f"nothing was run in the throw-away fork: {failures[0][1]}")
            yield
        finally:
            with sandbox.lock, contextlib.suppress(SandboxFailed):
                end_services(sandbox)

    def go_on(self, sandbox: Sandbox) -> None:
        """Go on with the services of an earlier daemon. A service that it had not declared yet is ended: no client knows it."""
        try:
            declared = {service.name for service in self._declared.read(sandbox)}
        except Exception:  # noqa: BLE001 - the file is a sandbox's, and the daemon has to start
            _log.warning("the services of %s cannot be read", short(sandbox.trajectory.id), exc_info=True)
            declared = {command.service for command in sandbox.use.services}
        for command in list(sandbox.use.services):
            command.ready = True
            if command.service not in declared:
                self._end(sandbox, command, "the daemon ended before it was declared")

    def restart(self, sandbox: Sandbox, info: CommandInfo) -> None:
        """Start a service again that has ended by itself, if its declaration says so."""
        restarts = info.restarts
        pause_s = min(_RESTART_MOST_S, _RESTART_S * 2 ** min(restarts, 8))
        while not sandbox.use.wait_for_end(pause_s):
            with sandbox.use.starting_services:
                service = self._find_restart(sandbox, info, restarts)
                if service is None:
                    return
                restarts += 1
                try:
                    end_rest(sandbox, info.id)  # it may have the port still, or a lock
                    self._start(sandbox, service, self._starter(sandbox, restarts))
                    return
                except (SnapshotdError, OSError) as exc:
                    self._tell(sandbox, [self._failure(sandbox, service, exc) + _output_hint(sandbox, service)])
            pause_s = min(_RESTART_MOST_S, pause_s * 2)

    def _starter(self, sandbox: Sandbox, restarts: int) -> Serve:
        return lambda service, _: self._serve(sandbox, service, restarts)[1]

    def _find_restart(self, sandbox: Sandbox, info: CommandInfo, restarts: int) -> DeclaredService | None:
        try:
            declared = {service.name: service for service in self._declared.read(sandbox)}
        except (SnapshotdError, OSError):
            return None
        found = declared.get(info.service or "")
        runs = any(command.service == info.service for command in sandbox.use.services)
        return None if found is None or runs or restarts >= found.restarts or sandbox.use.ending else found

    def _start_all(
        self, sandbox: Sandbox, serve: Serve, patience: _Patience = _ANY_TIME
    ) -> list[tuple[DeclaredService | None, str]]:
        try:
            declared = self._declared.read(sandbox)
        except (SnapshotdError, OSError) as exc:
            return [(None, f"no service is started: {_error_text(exc)}")]
        failures: list[tuple[DeclaredService | None, str]] = []
        running = {command.service for command in sandbox.use.services}
        for service in declared:
            if sandbox.use.ending:
                break
            if service.name in running:
                continue
            try:
                self._start(sandbox, service, serve, patience)
            except (SnapshotdError, OSError) as exc:
                failures.append((service, self._failure(sandbox, service, exc)))
        return failures

    def _start(self, sandbox: Sandbox, service: DeclaredService, serve: Serve, patience: _Patience = _ANY_TIME) -> None:
        self._check_kind(sandbox, service)
        reveal, trajectory, tail = self._context.secrecy.reveal_inside, sandbox.trajectory, _Tail()
        service = service.with_texts(lambda text: reveal(trajectory, text))
        command = serve(service, tail)
        try:
            self._await(sandbox, service, command, tail, patience)
        except BaseException as exc:
            self._end(sandbox, command, _error_text(exc))
            raise

    def _serve(self, sandbox: Sandbox, service: DeclaredService, restarts: int) -> tuple[CommandInfo, ClientCommand]:
        return self._commands.serve(sandbox, service, restarts, self.restart)

    def _end(self, sandbox: Sandbox, command: ClientCommand, failure: str) -> None:
        command.failure = self._context.secrecy.of(sandbox.trajectory).conceal_text(failure)
        with sandbox.lock, contextlib.suppress(SandboxFailed):
            end_service(sandbox, command)

    def _failure(self, sandbox: Sandbox, service: DeclaredService, exc: Exception) -> str:
        name = sandbox.trajectory.shown_name
        said = self._context.secrecy.of(sandbox.trajectory).conceal_text(_error_text(exc))
        return f"the service {service.name} of {name} did not come back: {said}"

    def _tell(self, sandbox: Sandbox, sentences: Sequence[str]) -> None:
        if not sentences:
            return
        log = self._context.events.live(sandbox.trajectory.id)
        for sentence in sentences:
            _log.warning("%s: %s", short(sandbox.trajectory.id), sentence)
            if log is not None:
                log.append({"event": "warning", "message": sentence})
        if log is None:
            sandbox.use.tell(sentences)

    # -- readiness -----------------------------------------------------------------------------------------------------

    def _await(
        self,
        sandbox: Sandbox,
        service: DeclaredService,
        command: ClientCommand,
        tail: _Tail,
        patience: _Patience = _ANY_TIME,
    ) -> None:
        """Return when a service that was just started is ready. SandboxFailed: it is not, after its time, or has ended."""
        deadline, pause_s = patience.before(time.monotonic() + service.ready_timeout_s), _LOOK_S
        process = command.process
        assert process is not None
        while True:
            if process.wait(0) is not None:
                raise SandboxFailed(
                    f"its command ended (exit code {process.wait(0)}) before it was ready, and a service's command has to "
                    f"stay in the foreground{tail}"
                )
            if self._is_ready(sandbox, service, deadline - time.monotonic(), tail) and process.wait(0) is None:
                command.ready = True
                return
            if sandbox.use.ending:
                raise SandboxFailed("its sandbox ended before it was ready")
            patience.check()
            if time.monotonic() >= deadline:
                raise SandboxFailed(
                    f"it was not ready within {service.ready_timeout_s:g} s ({_check_of(service)}){tail}"
                )
            process.wait(min(pause_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(_LOOK_MOST_S, pause_s * _RISE)

    def _is_ready(self, sandbox: Sandbox, service: DeclaredService, left_s: float, tail: _Tail) -> bool:
        try:
            if service.port is not None:
                ports.connect(sandbox, sandbox.trajectory, service.port, lambda: None).close()
            if service.ready is None:
                return True
            argv, timeout_s = ("/bin/sh", "-c", service.ready), max(0.05, min(_CHECK_S, left_s))
            check = CommandFields(argv, service.cwd, dict(service.env), service.user, timeout_s)
            return self._commands.exec(sandbox, check, sink=tail.take, record=False).exit_code == 0
        except (Conflict, SandboxFailed):
            return False


def _check_of(service: DeclaredService) -> str:
    checks = [] if service.port is None else [f"nothing listens on port {service.port}"]
    return " or ".join(checks if service.ready is None else [*checks, f"{service.ready!r} fails"])


def _error_text(exc: BaseException) -> str:
    return exc.message if isinstance(exc, SnapshotdError) else str(exc) or type(exc).__name__
