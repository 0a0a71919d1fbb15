"""The driver for machines that give nothing: a sandbox is a plain folder, and its commands are ordinary processes with
the rights of the daemon's user. There is no isolation: only writing is limited, to the folder, and where the kernel has
Landlock.

A *container* is here the process that starts the commands (folder_main.py), and the folder that stands for its root
(`Container.root`). Paths of an `ExecSpec` that lie in the sandbox (its working directory, and `RUN_DIR` in values of its
environment) become the machine's. It ends with the daemon, `keep` notwithstanding: `attach` finds none, and the engine
goes on by `resume`.

Files in the driver's run directory:
    <id>/first          process id and start time of the container's first process
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import posixpath
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from snapshotd.errors import SandboxFailed, Unsupported
from snapshotd.kernel import passing
from snapshotd.kernel.holding.attempts import attempts
from snapshotd.kernel.holding.process_tree import ProcessTree
from snapshotd.kernel.processes import SANDBOX, descendants, runs, start_time, variable_of, wait_readable
from snapshotd.runtime import failure, folder_main
from snapshotd.runtime._checks import check_exec
from snapshotd.runtime._process import StartedCommand, kill_and_reap
from snapshotd.runtime._teardown import remove_files
from snapshotd.runtime.base import RUN_DIR, SHARE_DIR, STDIN, Container, ContainerSpec, ExecSpec, Process, Runtime
from snapshotd.runtime.keeper import KeeperClient
from snapshotd.types import NO_ISOLATION, ContainerID, short

ROOT_VARIABLE = "SNAPSHOTD_ROOT"
"""Environment name of the folder's path, where `/` of the snapshots is."""
_START_DEADLINE_S, _END_DEADLINE_S = 30.0, 10.0


class FolderRuntime(Runtime):
    """See the module's text."""

    name = NO_ISOLATION

    def __init__(self, run_dir: Path, keeper: KeeperClient, *, leaves_rights: bool = False) -> None:
        """`keeper`: holds the inputs of kept commands. `leaves_rights`: commands have no rights over the user namespace that
        the daemon has entered."""
        self._run_dir, self._keeper, self._leaves_rights = run_dir, keeper, leaves_rights
        self._first: dict[ContainerID, _First] = {}
        self._lock = threading.Lock()

    def unavailable(self) -> str | None:
        return None

    def create(self, spec: ContainerSpec) -> Container:
        if spec.root is None:
            raise Unsupported("a container without isolation needs the folder that it is to be")
        directory = self._run_dir / spec.id
        directory.mkdir(mode=0o700, parents=True)
        try:
            first = _First.launch(spec, directory, self._leaves_rights)
        except BaseException:
            self.destroy(spec.id)
            raise
        with self._lock:
            self._first[spec.id] = first
        return Container(spec.id, first.process.pid, None, spec.root)

    def exec(self, container: Container, spec: ExecSpec, *, keep: str | None = None) -> Process:
        check_exec(spec)
        if (spec.user, spec.group, spec.groups) != (0, 0, ()):
            raise Unsupported("without isolation every command runs as the daemon's own user; leave the user out")
        with self._lock:
            first = self._first.get(container.id)
        if first is None:
            raise SandboxFailed(f"container {short(container.id)} is gone")
        return first.start(spec, None if keep is None else partial(self._keeper.hold, keep + STDIN))

    def attach(self, container_id: ContainerID) -> Container | None:
        return None

    def rename(self, container: Container, hostname: str) -> None:
        """Does nothing: the hostname is the machine's."""

    def destroy(self, container_id: ContainerID) -> None:
        with self._lock:
            first = self._first.pop(container_id, None)
        directory = self._run_dir / container_id
        if first is not None:
            first.close()
        with contextlib.suppress(FileNotFoundError, ValueError):
            pid, started = map(int, (directory / "first").read_text().split())
            _end(pid, started)
        if first is not None:
            first.process.wait()
        for name in filter(str.isdigit, os.listdir("/proc")):  # left, where the first process was killed from inside
            if variable_of(int(name), SANDBOX) == container_id:
                kill_and_reap(int(name))
        remove_files(directory)

    def list(self) -> list[ContainerID]:
        return [ContainerID(name) for name in sorted(os.listdir(self._run_dir))] if self._run_dir.is_dir() else []

    def members(self, container: Container) -> ProcessTree:
        return ProcessTree(container.pid)

    def admission(self, container: Container) -> Callable[[int], bool]:
        return ProcessTree(container.pid).has


class _First:
    """The daemon's side of a container's first process."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket, spec: ContainerSpec) -> None:
        self.process, self._connection, self._spec = process, connection, spec
        self._lock = threading.Lock()

    @staticmethod
    def launch(spec: ContainerSpec, directory: Path, leaves_rights: bool) -> _First:
        """Start the first process of a container, and wait until it serves. SandboxFailed."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [sys.executable, "-I", "-S", folder_main.__file__, str(theirs.fileno()), str(spec.root)]
        with theirs:
            process = subprocess.Popen(
                [*argv, "user"] if leaves_rights else argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={SANDBOX: spec.id},
            )
        (directory / "first").write_text(f"{process.pid} {start_time(process.pid)}")
        ours.settimeout(_START_DEADLINE_S)
        assert process.stderr is not None
        with process.stderr as stderr:
            try:
                ready = ours.recv(folder_main.ANSWER_MAX_BYTES)
            except TimeoutError:
                ready = b""
            if ready:
                return _First(process, ours, spec)
            process.kill()
            words = failure.shorten(stderr.read().decode(errors="replace").rstrip().rpartition("\n")[2])
        ours.close()
        process.wait()
        raise SandboxFailed(f"container {short(spec.id)} could not be started: {words or 'it gave no reason'}")

    def close(self) -> None:
        """Have it end everything below it, and itself."""
        self._connection.close()

    def start(self, spec: ExecSpec, hold_input: Callable[[int], None] | None) -> FolderProcess:
        """Errors as `Runtime.exec`. `hold_input`: is given the end to write to of the command's input, if there is one."""
        assert self._spec.root is not None
        cwd = f"{self._spec.root}{posixpath.normpath('/' + spec.cwd.lstrip('/'))}"
        env = {name: self._outside(value) for name, value in spec.env.items()}
        env |= {SANDBOX: self._spec.id, ROOT_VARIABLE: str(self._spec.root)}
        request = {"argv": list(spec.argv), "cwd": cwd, "env": env, "terminal": spec.terminal is not None}
        with contextlib.ExitStack() as theirs:
            ends = _Ends(spec, theirs)
            try:
                answer = self._ask(request, ends.of_command)
                if "pid" not in answer:
                    reason = _reason(answer, os.path.join(cwd, spec.argv[0]) if "/" in spec.argv[0] else None)
                    raise failure.command_failure(reason, spec.argv[0], spec.cwd)
                if hold_input is not None and ends.stdin is not None:
                    hold_input(ends.stdin)
                    os.close(ends.stdin)
                    ends.stdin = None
                return FolderProcess(answer["pid"], ends)
            except BaseException:
                ends.close()
                raise

    def _ask(self, request: dict[str, Any], ends: list[int]) -> dict[str, Any]:
        try:
            with passing.in_memory(request) as memory, self._lock:
                socket.send_fds(self._connection, [b"x"], [memory, *ends])
                data = self._connection.recv(folder_main.ANSWER_MAX_BYTES)
        except OSError as exc:
            raise SandboxFailed(f"container {short(self._spec.id)} is gone: {exc.strerror or exc}") from exc
        if not data:
            raise SandboxFailed(f"container {short(self._spec.id)} is gone: its first process was killed")
        answer: dict[str, Any] = json.loads(data)
        return answer

    def _outside(self, value: str) -> str:
        """A value in which places of the run directory are the machine's."""
        return value.replace(SHARE_DIR, str(self._spec.share_dir)).replace(RUN_DIR, str(self._spec.run_dir))


class _Ends:
    """The pipes or the terminal of a command: `of_command` go to it, the other ends stay."""

    def __init__(self, spec: ExecSpec, theirs: contextlib.ExitStack) -> None:
        pipe = partial(os.pipe2, os.O_CLOEXEC)

        def close_later(fd: int) -> int:
            theirs.callback(os.close, fd)
            return fd

        self.stdin: int | None = None
        if spec.terminal is not None:
            self.stdout, slave = os.openpty()
            termios.tcsetwinsize(slave, spec.terminal)
            self.stdin = os.dup(self.stdout)
            self.stderr, nothing = pipe()
            os.close(nothing)
            standard = [close_later(slave)] * 3
        else:
            self.stdout, stdout = pipe()
            self.stderr, stderr = pipe()
            if spec.stdin:
                stdin, self.stdin = pipe()
            else:
                stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            standard = [close_later(stdin), close_later(stdout), close_later(stderr)]
        self.end, end = pipe()
        self.of_command = [*standard, close_later(end)]
        self.terminal = spec.terminal is not None

    def close(self) -> None:
        """Close the ends that stay."""
        for fd in (self.stdin, self.stdout, self.stderr, self.end):
            if fd is not None:
                os.close(fd)


class FolderProcess(StartedCommand):
    """A command below a container's first process, which tells its exit code through a pipe."""

    parent = "the process that started it was killed"

    def __init__(self, pid: int, ends: _Ends) -> None:
        super().__init__(pid, ends.end, ends.stdout, ends.stderr, ends.stdin, terminal=ends.terminal)
        self._pipe, self._started = ends.end, start_time(pid)

    def ask_exit_code(self) -> int | None:
        said = os.read(self._pipe, 16)
        return int(said) if said else None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if start_time(self.pid) == self._started and not wait_readable(self._pipe, 0):
                os.kill(self.pid, signal.SIGKILL)


def _reason(answer: dict[str, Any], program: str | None) -> str:
    """The reason why a command did not start, in the words of runc (failure.py). `program`: its path; None: it was
    looked for."""
    text = os.strerror(answer["error"]).lower()
    if answer["directory"]:
        return f'chdir to cwd ("): {text}'
    if answer["error"] == errno.ENOENT and program is None:
        return "executable file not found in $PATH"
    if answer["error"] == errno.ENOENT and program is not None and os.path.lexists(program):
        return f"exec /: {text}"  # its interpreter is missing
    return f"exec: {text}"


def _end(pid: int, started: int) -> None:
    """Wait until a first process has ended everything and itself, which it does by itself; after a limit, do it here: it
    may have been stopped from inside. SandboxFailed."""
    late = time.monotonic() + _END_DEADLINE_S / 2
    below = list[int]()
    for _ in attempts(_END_DEADLINE_S):  # no event tells of the end of another daemon's child
        if not runs((pid, started)):
            return
        if time.monotonic() > late:
            below = descendants(pid) or below
            for each in (*below, pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
    raise SandboxFailed(f"process {pid} of a sandbox does not end (stuck in the kernel)")
