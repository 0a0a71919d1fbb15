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
from snapshotd.runtime._process import CHILDREN, ChildProcess, RuncCommand, become_subreaper, run_bounded
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
    def known(self) -> bool:
        """True if runc has state of the container: it was made and not removed."""
        return (self.state_dir / self.name / "state.json").exists()


def start(
    container: Container,
    known_as: RuncContainer,
    directory: Path,
    spec: ExecSpec,
    keeper: KeeperClient | None,
    keep: str | None,
    starter: Starter | None = None,
) -> Process:
    """`Runtime.exec`. `directory` is for short-lived files; it exists and only root can read it. The starter does what
    it can, runc the rest."""
    check_exec(spec)
    check_ids(spec, container.id_map)
    if keep is not None and keeper is None:
        raise Unsupported("a command cannot outlive the daemon here: the runtime has no keeper")
    if keep is not None and spec.terminal:
        raise Unsupported("a command that outlives the daemon cannot have a terminal from it")
    become_subreaper()
    stem = directory / f"exec-{secrets.token_hex(8)}"
    pipes = _Pipes(container.id_map, spec) if spec.terminal is None else _Terminal(stem.with_suffix(".tty"))
    try:
        process = None
        if starter is not None and keep is None:
            process = _run_started(starter, container, known_as, spec, pipes)
        if process is None:
            process = _run_by_runc(container, known_as, stem, spec, keeper, keep, pipes)
        if not process.executes(_START_DEADLINE_S):
            if keeper is not None and keep is not None:
                _drop(keeper, keep)
            raise _execve_failure(container, spec, process)
        pipes.hand_over()
    except OSError as exc:
        if exc.errno in NO_ROOM:
            raise OutOfSpace(
                f"a command cannot be started, since the disk of {directory} is full: free some space"
            ) from exc
        raise SandboxFailed(f"container {short(container.id)} is gone: {exc}") from exc
    finally:
        pipes.close()
    return process


def ready(container: Container, known_as: RuncContainer, starter: Starter | None) -> None:
    """`Runtime.ready`."""
    if starter is None:
        return
    become_subreaper()
    try:
        with CHILDREN.starting():
            starter.enter(container, known_as.name, _oci.process(ExecSpec(argv=("true",), cwd="/", env={})))
    except (OSError, SandboxFailed) as exc:
        _log.info("container %s is not ready for commands: %s", short(container.id), exc)  # its first command tells why


def _run_started(
    starter: Starter, container: Container, known_as: RuncContainer, spec: ExecSpec, pipes: _Pipes | _Terminal
) -> RuncCommand | None:
    """Have the starter start the command as a child of the daemon. None: runc has to."""
    try:
        with CHILDREN.starting(), open(os.devnull, "rb") as empty:
            pid = starter.start(container, known_as.name, _oci.process(spec), pipes.for_starter(empty.fileno()))
            if pid is None:
                return None
            process = pipes.process(pid)
            CHILDREN.add(container.id, process)
            return process
    except RefusedError as exc:
        raise failure.command_failure(str(exc), spec.argv[0], spec.cwd) from exc
    except SandboxFailed:
        CHILDREN.sweep()  # a resident that is killed may leave a process that it did not tell of
        raise


def _run_by_runc(
    container: Container,
    known_as: RuncContainer,
    stem: Path,
    spec: ExecSpec,
    keeper: KeeperClient | None,
    keep: str | None,
    pipes: _Pipes | _Terminal,
) -> RuncCommand:
    """Have runc start the command. `stem`: path of short-lived files, to which a suffix is added."""
    request, pid_file, log = (stem.with_suffix(suffix) for suffix in (".json", ".pid", ".log"))
    try:
        request.write_text(json.dumps(_oci.process(spec)))
        argv = known_as.command(
            log, "exec", "--ignore-paused", "--detach", "--process", str(request), "--pid-file", str(pid_file)
        )
        with CHILDREN.starting():
            if keep is None or keeper is None:
                code, process = _run([*argv, *pipes.for_runc(), known_as.name], pid_file, pipes)
            else:
                assert isinstance(pipes, _Pipes)
                code, process = _run_kept([*argv, known_as.name], pid_file, pipes, keeper, keep)
            if process is not None:
                CHILDREN.add(container.id, process)
        if process is None:
            CHILDREN.sweep()
            raise _refusal(container, known_as, spec, log, code)
        return process
    finally:
        for file in (request, pid_file, log):
            file.unlink(missing_ok=True)


def _run(argv: Sequence[str], pid_file: Path, pipes: _Pipes | _Terminal) -> tuple[int | None, RuncCommand | None]:
    """Have runc start the command as a child of the daemon: runc's exit code, and the command if that is 0."""
    with open(os.devnull, "rb") as empty:
        stdin, stdout, stderr = pipes.standard(empty.fileno())
        code = run_bounded(argv, timeout_s=_START_DEADLINE_S, stdin=stdin, stdout=stdout, stderr=stderr)
    return code, pipes.process(int(pid_file.read_text())) if code == 0 else None


def _run_kept(
    argv: Sequence[str], pid_file: Path, pipes: _Pipes, keeper: KeeperClient, key: str
) -> tuple[int | None, RuncCommand | None]:
    """The same as a child of the keeper."""
    ends = (pipes.stdout_r, pipes.stdout_w), (pipes.stderr_r, pipes.stderr_w)
    if pipes.stdin_w is not None:
        keeper.hold(key + STDIN, pipes.stdin_w)
    try:
        code = keeper.run(key, argv, pid_file, *ends, _START_DEADLINE_S, stdin=pipes.stdin_r)
        process = keeper.command(key) if code == 0 else None
        if code == 0 and process is None:
            raise SandboxFailed("the keeper was killed while it started a command; try again")
    except BaseException:
        _drop(keeper, key)
        raise
    if process is None:
        _drop(keeper, key)
        return code, None
    pipes.read_from(process.stdout_fd, process.stderr_fd)
    return code, process


def _drop(keeper: KeeperClient, key: str) -> None:
    for kept in (key, key + STDIN):
        keeper.drop(kept)


def _refusal(
    container: Container, known_as: RuncContainer, spec: ExecSpec, log: Path, code: int | None
) -> SnapshotdError:
    if code is None:
        return SandboxFailed(
            f"runc could not enter container {short(container.id)} within {_START_DEADLINE_S:.0f} s; stop it"
        )
    reason = failure.log_reason(log.read_bytes() if log.exists() else b"")
    if not os.path.exists(f"/proc/{container.pid}/ns/mnt") or not known_as.known:
        return SandboxFailed(f"container {short(container.id)} is gone: {reason}")
    return failure.command_failure(reason, spec.argv[0], spec.cwd)


def _execve_failure(container: Container, spec: ExecSpec, process: RuncCommand) -> SnapshotdError:
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
        return SandboxFailed(f"container {short(container.id)} ended while a command was started in it")
    return failure.command_failure(reason, spec.argv[0], spec.cwd)


class _Pipes:
    """Pipes for a command's output and, if it is to have one, its input. The command's ends belong to its user, or
    /dev/stdout could not be opened inside."""

    def __init__(self, id_map: IdMap | None, spec: ExecSpec) -> None:
        self.stdout_r, self.stdout_w = os.pipe2(os.O_CLOEXEC)
        self.stderr_r, self.stderr_w = os.pipe2(os.O_CLOEXEC)
        self._open = {self.stdout_r, self.stdout_w, self.stderr_r, self.stderr_w}
        self._kept = False
        """True if the keeper has the end of the input to write to."""
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

    def for_starter(self, empty: int) -> tuple[int, ...]:
        return self.standard(empty)

    def for_runc(self) -> tuple[str, ...]:
        """Further options of `runc exec`."""
        return ()

    def process(self, pid: int) -> ChildProcess:
        return ChildProcess(pid, self.stdout_r, self.stderr_r, self.stdin_w)

    def read_from(self, stdout_r: int, stderr_r: int) -> None:
        """Other descriptors of the read ends in place of the present ones, from the keeper."""
        for fd in (self.stdout_r, self.stderr_r):
            os.close(fd)
        self._open ^= {self.stdout_r, self.stderr_r, stdout_r, stderr_r}
        self.stdout_r, self.stderr_r = stdout_r, stderr_r
        self._kept = True

    def hand_over(self) -> None:
        """The daemon's ends have a new owner; `close` leaves them alone from now on."""
        self._open -= {self.stdout_r, self.stderr_r}
        if not self._kept:
            self._open -= {self.stdin_w}

    def close(self) -> None:
        for fd in self._open:
            os.close(fd)
        self._open = set()


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
        master = self._received()
        os.set_blocking(master, True)
        keyboard = os.dup(master)
        self._open |= {master, keyboard}
        self._master, self._keyboard = master, keyboard
        return ChildProcess(pid, master, self._errors_r, keyboard, terminal=True)

    def _received(self) -> int:
        connection = self._here
        if self._listener is not None:
            self._listener.settimeout(_END_DEADLINE_S)
            connection, _ = self._listener.accept()
        connection.settimeout(_END_DEADLINE_S)
        _, fds = passing.receive(connection, 4096, 1)
        if connection is not self._here:
            connection.close()
        if not fds:
            raise SandboxFailed("the terminal of a command did not come from its sandbox; try again")
        return fds[0]

    def hand_over(self) -> None:
        self._open -= {self._master, self._keyboard, self._errors_r}

    def close(self) -> None:
        for fd in self._open:
            os.close(fd)
        self._open = set()
        for connection in (self._here, self._there, self._listener):
            if connection is not None:
                connection.close()
        if self._listener is not None:
            self._console.unlink(missing_ok=True)
