"""Children of the daemon: bounded helper commands, and commands inside containers that were handed over by `runc exec
--detach`.

Nothing here reaps a child that it does not know by number, so any other part of the daemon may have children of its
own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

from snapshotd.errors import SandboxFailed
from snapshotd.kernel import syscalls as sc
from snapshotd.kernel.files import closing_fd
from snapshotd.kernel.holding.attempts import attempts
from snapshotd.kernel.processes import descendants, never_executed, start_time, stat_fields, wait_readable, wait_status
from snapshotd.runtime.base import Process
from snapshotd.types import ContainerID

_REAP_DEADLINE_S = 10.0
_TOLD_DEADLINE_S = 5.0


def become_subreaper() -> None:
    """Make orphans of this process's children its own children. Process-wide; idempotent. Without it they would go to
    pid 1."""
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)


def run_bounded(
    argv: Sequence[str],
    timeout_s: float,
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
    stderr: int = subprocess.DEVNULL,
) -> int | None:
    """Run a helper and return its exit code, or None if it was killed after `timeout_s`.

    Waits on a pidfd: Popen.wait with a timeout sleeps in growing steps of up to 50 ms. A helper that is killed takes
    its children along. Raises OSError when the program is missing.
    """
    child = subprocess.Popen(argv, stdin=stdin, stdout=stdout, stderr=stderr)
    with closing_fd(os.pidfd_open(child.pid)) as pidfd:
        if wait_readable(pidfd, timeout_s):
            return child.wait()
        helpers = descendants(child.pid)
        child.kill()
        child.wait()
        for pid in helpers:
            kill_and_reap(pid)
        return None


def kill_and_reap(pid: int, started: int | None = None) -> None:
    """SIGKILL a process and, where it has become a child of this one, reap it. `started`: its start time, which tells it
    from another process that has got its number since."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if started in (None, start_time(pid)):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            reap(pidfd, _REAP_DEADLINE_S)
    except ProcessLookupError:
        pass  # ended by itself
    finally:
        os.close(pidfd)


def wait_for_execve(pid: int, timeout_s: float) -> bool:
    """Wait until a process that a runtime made runs its program. False when it ended without, or `timeout_s` passed.

    runc reports success before the last step: a failing execve(2) looks like a command that ended with code 1, but for
    the kernel's mark. No event exists for it; it takes well under 1 ms.
    """
    for _ in attempts(timeout_s):
        try:
            fields = stat_fields(pid)
        except (FileNotFoundError, ProcessLookupError):
            return True  # another process has reaped it: its exit code cannot be learnt here
        if not never_executed(fields):
            return True
        if fields[0] in (b"Z", b"X"):
            break
    return False


def reap(pidfd: int, timeout_s: float) -> int | None:
    """Wait for the end of a process. Its exit code (128+N for signal N); None when it is not a child of this one or
    still runs."""
    if not wait_readable(pidfd, timeout_s):
        return None
    try:
        info = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    except ChildProcessError:
        return None  # not ours, or reaped already
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else 128 + info.si_status


def exit_code(pid: int, pidfd: int) -> int | None:
    """The exit code of a process that has ended, with any parent; None when the code is lost."""
    code = reap(pidfd, 0)
    if code is not None:
        return code
    for _ in attempts(_TOLD_DEADLINE_S):  # the kernel tells for a moment nothing while its parent reaps it
        if (status := wait_status(pid, pidfd)) is not None:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
    return None


class StartedCommand(Process):
    """A command with any parent, which is known by a descriptor that is readable once it has ended. Thread-safe."""

    parent: str
    """The parent, with what must have happened to it where an exit code is lost."""

    def __init__(
        self,
        pid: int,
        end: int | None,
        stdout_fd: int,
        stderr_fd: int,
        stdin_fd: int | None = None,
        *,
        terminal: bool = False,
    ) -> None:
        """Takes over the descriptors. `end`: a pidfd, or what stands for it; None: it had ended before there was one."""
        self.pid = pid
        self.stdout_fd, self.stderr_fd, self.stdin_fd, self.terminal = stdout_fd, stderr_fd, stdin_fd, terminal
        self._end = end
        if end is not None:
            weakref.finalize(self, os.close, end)  # not earlier: another thread may be waiting on it
        self._lock = threading.Lock()
        self._exit_code: int | None = None
        self._lost = False

    def end_fd(self) -> int | None:
        return self._end

    def wait(self, timeout_s: float | None = None) -> int | None:
        if self._exit_code is None and self._end is not None and not wait_readable(self._end, timeout_s):
            return None
        with self._lock:
            if self._exit_code is None and not self._lost:
                self._exit_code = self.ask_exit_code()
                self._lost = self._exit_code is None
            if self._exit_code is None:
                raise SandboxFailed(f"process {self.pid} of a sandbox ended and its exit code is lost: {self.parent}")
            return self._exit_code

    @abstractmethod
    def ask_exit_code(self) -> int | None:
        """The exit code of the command, which has ended; None: it is lost."""

    @property
    def is_reaped(self) -> bool:
        """True if nothing is left to wait for."""
        return self._exit_code is not None or self._lost

    def executes(self, timeout_s: float) -> bool:
        """Wait until it runs its program. False when it ended without, or `timeout_s` passed."""
        return wait_for_execve(self.pid, timeout_s)

    def kill(self) -> None:
        if self._end is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                signal.pidfd_send_signal(self._end, signal.SIGKILL)


class ChildProcess(StartedCommand):
    """A process that is, or is about to become, a child of the daemon."""

    parent = "something else reaped it"

    def ask_exit_code(self) -> int | None:
        assert self._end is not None
        return exit_code(self.pid, self._end)


class Children:
    """Every command that has not been reaped, by container. One for the whole daemon, because children belong to the
    process.

    It is needed because a container's init cannot end before all processes of its pid namespace have been reaped, also
    the ones whose parent is outside of it (the kernel's zap_pid_ns_processes waits for them); callers may never call
    `wait`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[ContainerID, list[StartedCommand]] = {}
        self._starting: set[object] = set()
        self._suspects: dict[tuple[int, bytes], frozenset[object]] = {}

    def add(self, container_id: ContainerID, process: StartedCommand) -> None:
        """Remember a command; forget ended ones."""
        with self._lock:
            known = self._of.setdefault(container_id, [])
            known[:] = [p for p in known if not _has_ended(p)]
            known.append(process)

    def reap_all(self, container_id: ContainerID) -> bool:
        """Reap the commands of a container that have ended; False when some still run. Exit codes stay with the holders
        of the commands."""
        with self._lock:
            left = [p for p in self._of.pop(container_id, []) if not _has_ended(p)]
            if left:
                self._of[container_id] = left
            return not left

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Around everything between the start of runc and `add`: `sweep` spares the processes that runc makes
        meanwhile."""
        token = object()
        with self._lock:
            self._starting.add(token)
        try:
            yield
        finally:
            with self._lock:
                self._starting.discard(token)

    def sweep(self) -> None:
        """Reap the leftovers of failed starts: zombies of runc's own stages that never became a command, and commands
        whose resident was killed before it told of them.

        Stage 1 of runc is never a command. Others may be one that a thread is about to `add`: they are reaped once all
        starts that were under way when they were first seen are over.
        """
        with self._lock:
            known = {process.pid for processes in self._of.values() for process in processes}
            seen: dict[tuple[int, bytes], frozenset[object]] = {}
            for pid, is_command, started in _unknown_zombies():
                key = (pid, started)
                suspected = self._suspects.get(key, frozenset(self._starting))
                if not is_command or (pid not in known and not suspected & self._starting):
                    with contextlib.suppress(ChildProcessError):  # another thread was faster
                        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
                elif pid not in known:
                    seen[key] = suspected
            self._suspects = seen


def _unknown_zombies() -> Iterator[tuple[int, bool, bytes]]:
    """Children of this process that have ended and may be leftovers: process id, False if it is certainly no command,
    start time."""
    for children in Path("/proc/self/task").glob("*/children"):
        try:
            pids = [int(word) for word in children.read_bytes().split()]
        except OSError:
            continue  # the thread has ended
        for pid in pids:
            try:
                head, _, tail = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")
                fields, name = tail.split(), head.partition(b"(")[2]
                if fields[0] != b"Z":
                    continue
                is_stage = never_executed(fields) and name.startswith(b"runc:[")
                if is_stage or _is_in_sandbox(pid):
                    yield pid, not name.startswith(b"runc:[1:") or not is_stage, fields[19]
            except OSError:
                continue  # reaped meanwhile


def _is_in_sandbox(pid: int) -> bool:
    """True for a process of a pid namespace below this one, other than the namespace's first."""
    status = Path(f"/proc/{pid}/status").read_bytes()
    numbers = next((line.split()[1:] for line in status.splitlines() if line.startswith(b"NSpid:")), [])
    return len(numbers) > 1 and numbers[-1] != b"1"


def _has_ended(process: StartedCommand) -> bool:
    try:
        return process.is_reaped or process.wait(0) is not None
    except SandboxFailed:
        return True  # the exit code is lost; the waiting thread gets that answer


CHILDREN = Children()
