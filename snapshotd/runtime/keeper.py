"""The daemon's side of the keeper (keeper_main.py): starts it, finds the one that an earlier daemon started, asks it.

Every request has a connection of its own, so threads do not wait for each other; one more stays open as the lifeline.
A process that connects, or makes the socket, holds a lock on the socket's directory, as the keeper does when it ends
(see there).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from snapshotd.config import read_variables
from snapshotd.errors import SandboxFailed
from snapshotd.kernel.files import closing_fd
from snapshotd.kernel.processes import wait_readable
from snapshotd.runtime import failure, keeper_main
from snapshotd.runtime._process import StartedCommand, exit_code, reap, wait_for_execve
from snapshotd.runtime.base import DEFAULT_PATH

_ANSWER_DEADLINE_S = 30.0
_END_DEADLINE_S = 10.0
_BACKLOG = 1024


class KeeperClient:
    """See `base.Keeper`. Nothing is started before the first `run` or `hold`."""

    def __init__(self, socket_path: Path, mounts_fd: int | None = None) -> None:
        """The socket's directory is made (0700) where missing, and belongs to the keeper alone; `keeper.log` beside it
        has its last words.

        `mounts_fd`: the mount namespace to live in. It must not be a daemon's own, whose mounts would outlive the
        daemon.
        """
        self._path, self._mounts_fd = socket_path, mounts_fd
        self._lock = threading.Lock()
        self._lifeline: socket.socket | None = None
        self._child_fd: int | None = None
        """A pidfd of the keeper, if it is a child of this process."""

    def run(self, key: str, argv: Sequence[str], pid_file: Path, ends: Sequence[int], timeout_s: float) -> int | None:
        """Run a helper that leaves a command behind (`runc exec --detach --pid-file`); the command is kept when the
        helper ends with 0.

        `ends`: of two pipes for its output and its errors, each as read end and write end; the helper gets the write ends,
        the read ends are kept; then perhaps its standard input, which is empty otherwise. All stay the caller's. Returns the
        helper's exit code, or None if it was killed after `timeout_s`; then nothing is kept. SandboxFailed when the keeper
        refuses (a command runs under that key) or ends meanwhile.
        """
        request = {"do": "run", "key": key, "argv": list(argv), "pid_file": str(pid_file), "timeout_s": timeout_s}
        answer, _ = self._must(request, ends, timeout_s + _ANSWER_DEADLINE_S)
        code: int | None = answer["code"]
        return code

    def process(self, key: str) -> KeptCommand | None:
        found = self._look({"do": "process", "key": key})
        return None if found is None else KeptCommand(self, key, *found)

    def hold(self, key: str, fd: int) -> None:
        self._must({"do": "hold", "key": key}, (fd,), _ANSWER_DEADLINE_S)

    def open_held(self, key: str) -> int | None:
        found = self._look({"do": "held", "key": key})
        return None if found is None else found[1][0]

    def keys(self) -> set[str]:
        keys: set[str] = set()
        while found := self._look({"do": "keys", "after": max(keys, default="")}):
            if not found[0]["keys"]:
                break
            keys.update(found[0]["keys"])
        return keys

    def drop(self, key: str) -> None:
        self._look({"do": "drop", "key": key})

    def status(self, key: str, pid: int) -> tuple[int, bool] | None:
        """The exit code of a command that has ended, and True if it ever ran its program. None when the keeper does not
        know."""
        found = self._look({"do": "status", "key": key, "pid": pid})
        return None if found is None or found[0]["code"] is None else (found[0]["code"], found[0]["executed"])

    def close(self) -> None:
        with self._lock:
            if self._lifeline is None:
                return
            with contextlib.suppress(OSError):  # it was killed
                self._lifeline.send(json.dumps({"do": "bye"}).encode())
                self._lifeline.recv(keeper_main.MESSAGE_MAX_BYTES)  # it stays, or its end
            self._forget_lifeline()

    # -- asking --------------------------------------------------------------------------------------------------------

    def _look(self, request: dict[str, Any]) -> keeper_main.Answer | None:
        """The answer; None when there is no keeper, it ends meanwhile, or has nothing under that key. SandboxFailed if
        it is stuck."""
        connection = self._connect(start=False)
        answer = None if connection is None else self._ask(connection, request, (), _ANSWER_DEADLINE_S)
        return None if answer is None or "none" in answer[0] else answer

    def _must(self, request: dict[str, Any], fds: Sequence[int], timeout_s: float) -> keeper_main.Answer:
        connection = self._connect(start=True)
        answer = None if connection is None else self._ask(connection, request, fds, timeout_s)
        if answer is None:
            raise SandboxFailed(
                f"the keeper of this daemon's commands ended while it was asked ({self._last_words()}); try again"
            )
        return answer

    def _ask(
        self, connection: socket.socket, request: dict[str, Any], fds: Sequence[int], timeout_s: float
    ) -> keeper_main.Answer | None:
        """One request over a fresh connection. None when the keeper ends before it answers."""
        with connection:
            connection.settimeout(timeout_s)
            try:
                socket.send_fds(connection, [json.dumps(request).encode()], fds)
                data, received = keeper_main.receive(connection)
            except TimeoutError as exc:
                raise SandboxFailed(
                    f"the keeper at {self._path} does not answer; is it stopped, or the machine overloaded?"
                ) from exc
            except ConnectionError:
                return None
        if not data:
            return None
        answer: dict[str, Any] = json.loads(data)
        if answer.get("descriptors", 0) != len(received):
            for fd in received:
                os.close(fd)
            raise SandboxFailed(
                "this daemon has too many files open to take what the keeper holds; raise its limit (LimitNOFILE)"
            )
        if "error" in answer:
            raise SandboxFailed(f"the command or descriptor cannot be kept: {failure.shorten(answer['error'])}")
        return answer, received

    def _last_words(self) -> str:
        log = self._path.parent / "keeper.log"
        text = log.read_text("utf-8", "replace") if log.exists() else ""
        return failure.shorten(text.rstrip().rpartition("\n")[2]) or "it was killed"

    # -- connecting and starting ---------------------------------------------------------------------------------------

    def _connect(self, *, start: bool) -> socket.socket | None:
        """A connection to the keeper, which is started if need be and allowed; None when there is none.
        SandboxFailed."""
        try:
            with self._lock, self._directory(make=start) as directory_fd:
                if self._lifeline is not None and wait_readable(self._lifeline.fileno(), 0):
                    self._forget_lifeline()  # that keeper was killed
                connection = None if directory_fd is None else self._try()
                if connection is None and start and directory_fd is not None:
                    self._start(directory_fd)
                    connection = self._try()
                if connection is not None and self._lifeline is None:
                    self._lifeline = self._try()
                return connection
        except OSError as exc:
            raise SandboxFailed(f"the keeper at {self._path} cannot be reached or started: {exc}") from exc

    @contextlib.contextmanager
    def _directory(self, *, make: bool) -> Iterator[int | None]:
        """The socket's directory, locked. None when it is missing and not to be made."""
        if make:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            fd = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        with closing_fd(fd):
            info = os.fstat(fd)
            if info.st_uid != os.geteuid() or info.st_mode & 0o077:
                raise SandboxFailed(
                    f"the directory {self._path.parent} of the keeper is open to others; remove it, it is made anew"
                )
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                yield fd
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a process that is just starting may have a copy of the descriptor

    def _try(self) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            connection.connect(str(self._path))
            connection.settimeout(_ANSWER_DEADLINE_S)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise
        return connection

    def _start(self, directory_fd: int) -> None:
        """Make the socket and the process behind it. The lifeline is connected before: should this daemon die now, its
        end is seen."""
        if self._lifeline is not None:
            self._forget_lifeline()  # a process removed the socket of a living keeper
        self._path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as listener:
            listener.bind(str(self._path))
            listener.listen(_BACKLOG)
            self._lifeline = self._try()
            descriptors = [listener.fileno(), directory_fd, *([] if self._mounts_fd is None else [self._mounts_fd])]
            program = [sys.executable, "-I", "-S", keeper_main.__file__]
            with open(self._path.parent / "keeper.log", "wb") as log:
                child = subprocess.Popen(
                    [*program, str(self._path), *map(str, descriptors)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    pass_fds=descriptors,
                    start_new_session=True,
                    env={"PATH": DEFAULT_PATH, **read_variables(["PATH"])},
                )
        self._child_fd = os.pidfd_open(child.pid)
        child.returncode = 0  # the object has no further use: `_forget_lifeline` waits by descriptor

    def _forget_lifeline(self) -> None:
        """Close it; if the keeper has ended or is about to, and is a child of this process, reap it."""
        assert self._lifeline is not None
        hung_up = wait_readable(self._lifeline.fileno(), 0)
        self._lifeline.close()
        self._lifeline = None
        if self._child_fd is not None:
            reap(self._child_fd, _END_DEADLINE_S if hung_up else 0)
            os.close(self._child_fd)
            self._child_fd = None


class KeptCommand(StartedCommand):
    """A command whose parent is the keeper."""

    parent = "the keeper was killed meanwhile"

    def __init__(self, keeper: KeeperClient, key: str, status: dict[str, Any], fds: list[int]) -> None:
        """From the keeper's answer to `process`. Takes over the descriptors."""
        stdout_fd, stderr_fd, *pidfd = fds
        super().__init__(status["pid"], pidfd[0] if pidfd else None, stdout_fd, stderr_fd)
        self._keeper, self._key = keeper, key
        self._exit_code, self._executed = status["code"], status["executed"]

    def ask_exit_code(self) -> int | None:
        """From the keeper; if it was killed, from the kernel."""
        status = self._keeper.status(self._key, self.pid)
        if status is not None:
            code, self._executed = status
            return code
        return None if self._end is None else exit_code(self.pid, self._end)

    def executes(self, timeout_s: float) -> bool:
        if self._exit_code is None and not wait_for_execve(self.pid, timeout_s):
            return False
        if self._end is None or wait_readable(self._end, 0):
            self.wait(timeout_s)  # reaped as soon as it ended, but the keeper has looked
        return bool(self._executed)
