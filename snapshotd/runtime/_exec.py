"""Commands in a container that runc made, for this daemon or for a Docker engine.

The command gets two pipes of the daemon as its very own standard output and error (`runc exec --detach` keeps
descriptors), and becomes a child of the daemon, which is a child subreaper; its exit code comes from waitid on a pidfd.
A command that is to outlive the daemon becomes a child of the keeper in the same way.

Docker containers go this way too, because the engine's own exec cuts a command's output 2 s after the command has
ended: a background server that a tool call started then dies of SIGPIPE at its next line of log, and what a slow reader
has not taken is lost (Docker 20.10, moby's `StreamConfig.Wait`). It also takes 20 ms instead of 65.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from snapshotd.errors import NO_ROOM, OutOfSpace, SandboxFailed, SnapshotdError, Unsupported
from snapshotd.kernel import passing
from snapshotd.kernel.rootless import as_its_root
from snapshotd.runtime import _oci, failure
from snapshotd.runtime._checks import check_exec, check_ids
from snapshotd.runtime._process import CHILDREN, ChildProcess, StartedCommand, become_subreaper, run_bounded
from snapshotd.runtime.base import STDIN, Container, ExecSpec, Process
from snapshotd.runtime.keeper import KeeperClient
from snapshotd.runtime.starter import RefusedError, Starter
from snapshotd.types import IdMap, short

_log = logging.getLogger(__name__)
_START_DEADLINE_S = 60.0
"""A sandbox can make `runc exec` wait for ever (a fifo as /etc/passwd); a frozen one keeps it waiting until it is
thawed."""
_END_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class RuncContainer:
    """A container as runc knows it: its program, its state directory (`--root`), and the name in there. `rootless`: runc is
    to be root of this process's user namespace, and to do without cgroups."""

    runc: str
    state_dir: Path
    name: str
    rootless: bool = False

    def command(self, log: Path, *args: str) -> list[str]:
        """A runc command line that writes its errors to `log`."""
        program = [*as_its_root(), self.runc, "--rootless", "true"] if self.rootless else [self.runc]
        return [*program, "--root", str(self.state_dir), "--log", str(log), "--log-format", "json", *args]

    @property
    def is_known(self) -> bool:
        """True if runc has state of the container: it was made and not removed."""
        return (self.state_dir / self.name / "state.json").exists()


@dataclass(frozen=True, slots=True)
class _Order:
    """A command to be started. `stem`: path of short-lived files, to which a suffix is added; `keep`: as `Runtime.exec`."""

    container: Container
    known_as: RuncContainer
    spec: ExecSpec
    stem: Path
    keep: str | None
    pipes: _Pipes | _Terminal


class ContainerCommands:
    """Starts the commands in a driver's containers: the starter what it can, runc the rest. Thread-safe."""

    def __init__(self, keeper: KeeperClient, starter: Starter) -> None:
        """`keeper`: the parent of commands that are to outlive the daemon."""
        self._keeper = keeper
        self._starter = starter

    def start(
        self, container: Container, known_as: RuncContainer, directory: Path, spec: ExecSpec, keep: str | None
    ) -> Process:
        """`Runtime.exec`. `directory` is for short-lived files; it exists and only root can read it."""
        check_exec(spec)
        check_ids(spec, container.id_map)
        if keep is not None and spec.terminal:
            raise Unsupported("a command that outlives the daemon cannot have a terminal from it")
        become_subreaper()
        stem = directory / f"exec-{secrets.token_hex(8)}"
        try:
            pipes = _Pipes(container.id_map, spec) if spec.terminal is None else _Terminal(stem.with_suffix(".tty"))
            try:
                order = _Order(container, known_as, spec, stem, keep, pipes)
                process = (self._run_started(order) if keep is None else None) or self._run_by_runc(order)
            finally:
                pipes.close()
            self._make_sure(order, process)
        except OSError as exc:
            if exc.errno in NO_ROOM:
                raise OutOfSpace(
                    f"a command cannot be started, since the disk of {directory} is full: free some space"
                ) from exc
            raise SandboxFailed(f"container {short(container.id)} is gone: {exc}") from exc
        return process

    def prepare(self, container: Container, known_as: RuncContainer) -> None:
        """`Runtime.prepare`."""
        become_subreaper()
        try:
            with CHILDREN.starting():
                self._starter.enter(container, known_as.name)
        except (OSError, SandboxFailed) as exc:  # the first command tells why
            _log.info("container %s is not ready for commands: %s", short(container.id), exc)

    def _run_started(self, order: _Order) -> StartedCommand | None:
        """Have the starter start the command as a child of the daemon. None: runc has to."""
        container, spec = order.container, order.spec
        try:
            with CHILDREN.starting(), open(os.devnull, "rb") as empty:
                standard = order.pipes.for_starter(empty.fileno())
                pid = self._starter.start(container, order.known_as.name, _oci.process(spec), standard)
                if pid is None:
                    return None
                process = order.pipes.process(pid)
                CHILDREN.add(container.id, process)
                return process
        except RefusedError as exc:
            raise failure.command_failure(str(exc), spec.argv[0], spec.cwd) from exc
        except SandboxFailed:
            CHILDREN.sweep()  # a resident that is killed may leave a process that it did not tell of
            raise

    def _run_by_runc(self, order: _Order) -> StartedCommand:
        """Have runc start the command."""
        request, pid_file, log = (order.stem.with_suffix(suffix) for suffix in (".json", ".pid", ".log"))
        try:
            request.write_text(json.dumps(_oci.process(order.spec)))
            argv = order.known_as.command(
                log, "exec", "--ignore-paused", "--detach", "--process", str(request), "--pid-file", str(pid_file)
            )
            with CHILDREN.starting():
                if order.keep is not None:
                    code, process = self._run_kept(argv, pid_file, order, order.keep)
                else:  # as a child of the daemon
                    with open(os.devnull, "rb") as empty:
                        stdin, stdout, stderr = order.pipes.standard(empty.fileno())
                        argv += [*order.pipes.for_runc(), order.known_as.name]
                        code = run_bounded(argv, _START_DEADLINE_S, stdin=stdin, stdout=stdout, stderr=stderr)
                    process = order.pipes.process(int(pid_file.read_text())) if code == 0 else None
                if process is not None:
                    CHILDREN.add(order.container.id, process)
            if process is None:
                CHILDREN.sweep()
                raise _refusal(order, log, code)
            return process
        finally:
            for file in (request, pid_file, log):
                file.unlink(missing_ok=True)

    def _run_kept(
        self, argv: Sequence[str], pid_file: Path, order: _Order, key: str
    ) -> tuple[int | None, StartedCommand | None]:
        """Have runc start the command as a child of the keeper: runc's exit code, and the command if that is 0."""
        pipes = order.pipes
        assert isinstance(pipes, _Pipes)
        process = None
        try:
            if pipes.stdin_w is not None:
                self._keeper.hold(key + STDIN, pipes.stdin_w)
            ends = pipes.stdout_r, pipes.stdout_w, pipes.stderr_r, pipes.stderr_w
            stdin = () if pipes.stdin_r is None else (pipes.stdin_r,)
            argv = [*argv, order.known_as.name]
            code = self._keeper.run(key, argv, pid_file, (*ends, *stdin), _START_DEADLINE_S)
            process = self._keeper.process(key) if code == 0 else None
            if code == 0 and process is None:
                raise SandboxFailed("the keeper was killed while it started a command; try again")
            return code, process
        finally:
            if process is None:
                self._drop(key)

    def _make_sure(self, order: _Order, process: StartedCommand) -> None:
        """Make sure that the command has begun, or end what there is of it."""
        try:
            if not process.executes(_START_DEADLINE_S):
                raise _execve_failure(order, process)
        except BaseException:
            for fd in (process.stdout_fd, process.stderr_fd, process.stdin_fd):
                if fd is not None:
                    os.close(fd)
            if order.keep is not None:
                self._drop(order.keep)
            raise

    def _drop(self, key: str) -> None:
        for kept in (key, key + STDIN):
            self._keeper.drop(kept)


def _refusal(order: _Order, log: Path, code: int | None) -> SnapshotdError:
    name, reason = short(order.container.id), failure.log_reason(log)
    if code is None:
        return SandboxFailed(f"runc could not enter container {name} within {_START_DEADLINE_S:.0f} s; stop it")
    if not os.path.exists(f"/proc/{order.container.pid}/ns/mnt") or not order.known_as.is_known:
        return SandboxFailed(f"container {name} is gone: {reason}")
    return failure.command_failure(reason, order.spec.argv[0], order.spec.cwd)


def _execve_failure(order: _Order, process: StartedCommand) -> SnapshotdError:
    """The command's process ended (or hangs) before it became the command; runc's last words are in its standard
    error."""
    process.kill()
    process.wait(_END_DEADLINE_S)
    os.set_blocking(process.stderr_fd, False)
    try:
        reason = os.read(process.stderr_fd, 1 << 16).decode("utf-8", "replace").strip().rpartition("\n")[2]
    except BlockingIOError:
        reason = ""
    if not reason:
        return SandboxFailed(f"container {short(order.container.id)} ended while a command was started in it")
    return failure.command_failure(reason, order.spec.argv[0], order.spec.cwd)


class _Pipes:
    """Pipes for a command's output and, if it is to have one, its input. The command's ends belong to its user, or
    /dev/stdout could not be opened inside."""

    def __init__(self, id_map: IdMap | None, spec: ExecSpec) -> None:
        self.stdout_r, self.stdout_w = os.pipe2(os.O_CLOEXEC)
        self.stderr_r, self.stderr_w = os.pipe2(os.O_CLOEXEC)
        self._open = {self.stdout_r, self.stdout_w, self.stderr_r, self.stderr_w}
        self.stdin_r: int | None = None
        self.stdin_w: int | None = None
        if spec.stdin:
            self.stdin_r, self.stdin_w = os.pipe2(os.O_CLOEXEC)
            self._open |= {self.stdin_r, self.stdin_w}
        owner = spec.user if id_map is None else id_map.base + spec.user
        for fd in (self.stdout_w, self.stderr_w, self.stdin_r):
            if fd is not None:
                os.fchown(fd, owner, -1)

    def standard(self, empty: int) -> tuple[int, int, int]:
        """The command's standard input, output and error. `empty`: an input without anything."""
        return empty if self.stdin_r is None else self.stdin_r, self.stdout_w, self.stderr_w

    for_starter = standard

    def for_runc(self) -> tuple[str, ...]:
        """Further options of `runc exec`."""
        return ()

    def process(self, pid: int) -> ChildProcess:
        """The command that was started, which takes over the daemon's ends."""
        process = ChildProcess(pid, os.pidfd_open(pid), self.stdout_r, self.stderr_r, self.stdin_w)
        self._open -= {self.stdout_r, self.stderr_r, self.stdin_w}
        return process

    def close(self) -> None:
        for fd in self._open:
            os.close(fd)


class _Terminal:
    """The master of a command's terminal, in place of its pipes. It comes over a socket: from the starter over a pair,
    from runc to the socket file `console`."""

    def __init__(self, console: Path) -> None:
        self._console = console
        self._here, self._there = socket.socketpair()
        self._listener: socket.socket | None = None
        self._errors_r, self._errors_w = os.pipe2(os.O_CLOEXEC)
        """The words of a failing runc."""
        self._open = {self._errors_r, self._errors_w}

    def standard(self, empty: int) -> tuple[int, int, int]:
        return empty, self._errors_w, self._errors_w

    def for_starter(self, empty: int) -> tuple[int, ...]:
        return (self._there.fileno(),)

    def for_runc(self) -> tuple[str, ...]:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._console))
        self._listener.listen(1)
        return "--tty", "--console-socket", str(self._console)

    def process(self, pid: int) -> ChildProcess:
        """SandboxFailed when no terminal came."""
        if self._listener is not None:
            self._listener.settimeout(_END_DEADLINE_S)
            self._here.close()
            self._here, _ = self._listener.accept()
        self._here.settimeout(_END_DEADLINE_S)
        _, fds = passing.receive(self._here, 4096, 1)
        if not fds:
            raise SandboxFailed("the terminal of a command did not come from its sandbox; try again")
        (master,) = fds
        os.set_blocking(master, True)
        keyboard = os.dup(master)
        self._open |= {master, keyboard}
        process = ChildProcess(pid, os.pidfd_open(pid), master, self._errors_r, keyboard, terminal=True)
        self._open -= {master, keyboard, self._errors_r}
        return process

    def close(self) -> None:
        for fd in self._open:
            os.close(fd)
        for connection in (self._here, self._there, self._listener):
            if connection is not None:
                connection.close()
        if self._listener is not None:
            self._console.unlink(missing_ok=True)
