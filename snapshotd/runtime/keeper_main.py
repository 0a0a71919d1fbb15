"""The keeper's process: parent of commands, holder of descriptors. Started by keeper.py, which is also the only one to
speak to it.

    python -I -S keeper_main.py SOCKET LISTENER DIRECTORY [MOUNTS]

SOCKET is the path of its socket, the others are inherited descriptors: the listening socket, already with one
connection waiting; the directory of the socket, which only root can enter; the mount namespace to live in.

One thread. A child subreaper in a session of its own: processes that `runc exec --detach` leaves behind become its
children and are reaped at once, because a pid namespace can only end when all its processes are reaped. Exit codes of
commands stay until their key is dropped, those of unknown processes while they are among the newest thousand.

Requests are one JSON object per packet, descriptors beside it; one answer each: an object with `error` (a sentence) or
`none` (no such key), or what the method of the request's name says. An open connection keeps the process alive, as does
everything held. When neither is left it removes its socket and ends. A client connects under a lock on the directory,
and the end is decided under the same lock: a connection that came in time is always served.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":  # -I and -S leave nothing but the standard library to import from
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))))

from snapshotd.kernel import passing
from snapshotd.kernel import syscalls as sc
from snapshotd.kernel.processes import descendants, never_executed, stat_fields

MESSAGE_MAX_BYTES = 1 << 16
KEY_MAX_CHARS = 128
KEYS_PER_ANSWER = 256
"""So that an answer fits into a packet."""
_KEYS_MAX = 4096
_CONNECTIONS_MAX = 512
"""More wait to be accepted."""
_DESCRIPTORS_MAX = 5
"""In one packet."""
_ENDED_MAX = 1000

Answer = tuple[dict[str, Any], list[int]]


class _Kept:
    """The descriptors under one key: a command with the read ends of its pipes and, unless it had ended before, its
    pidfd; or a single descriptor."""

    __slots__ = ("code", "executed", "fds", "pid")

    def __init__(self, fds: list[int], pid: int = 0) -> None:
        self.fds = fds
        self.pid = pid
        """0: just a descriptor."""
        self.code: int | None = None
        self.executed = True

    @property
    def runs(self) -> bool:
        """True if it is a command that has not ended."""
        return self.pid != 0 and self.code is None

    def status(self) -> dict[str, Any]:
        return {"pid": self.pid, "code": self.code, "executed": self.executed}


class _Run:
    """A helper (`runc exec`) under way, and the work at its end."""

    __slots__ = ("client", "deadline", "fds", "key", "killed", "pid_file")

    def __init__(self, client: socket.socket, key: str, pid_file: str, fds: list[int], deadline: float) -> None:
        self.client: socket.socket | None = client
        self.key = key
        self.pid_file = pid_file
        self.fds = fds
        self.deadline = deadline
        self.killed = False


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One packet and the descriptors beside it."""
    return passing.receive(connection, MESSAGE_MAX_BYTES, _DESCRIPTORS_MAX)


class KeeperProcess:
    """See the module's text."""

    def __init__(self, path: str, listener: socket.socket, directory_fd: int) -> None:
        self._name = os.path.basename(path)
        self._listener = listener
        self._directory_fd = directory_fd
        self._inode = os.stat(self._name, dir_fd=directory_fd).st_ino
        self._clients: set[socket.socket] = set()
        self._kept: dict[str, _Kept] = {}
        self._commands: dict[int, _Kept] = {}
        """Commands that have not ended, by process id."""
        self._runs: dict[int, _Run] = {}
        self._ended: dict[int, tuple[int, bool]] = {}
        methods = self._process, self._status, self._hold, self._held, self._keys, self._drop
        self._methods: dict[str, Callable[[dict[str, Any], list[int]], Answer]] = {m.__name__[1:]: m for m in methods}
        self._selector = selectors.DefaultSelector()
        self._wake_on_child()
        self._listen()

    def run(self) -> None:
        """Serve until no daemon is connected and nothing is held."""
        while not (self._idle() and self._leave()):
            for key, _ in self._selector.select(self._until_deadline()):
                key.data()
            self._reap()
            self._kill_late()

    # -- life ----------------------------------------------------------------------------------------------------------

    def _wake_on_child(self) -> None:
        read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(read_end, selectors.EVENT_READ, lambda: os.read(read_end, 4096))

    def _idle(self) -> bool:
        return not (self._clients or self._kept or self._runs)

    def _leave(self) -> bool:
        """Decide on the end under the lock. False when a daemon has connected meanwhile."""
        fcntl.flock(self._directory_fd, fcntl.LOCK_EX)
        self._accept()
        if self._clients:
            fcntl.flock(self._directory_fd, fcntl.LOCK_UN)
            return False
        with contextlib.suppress(FileNotFoundError):  # the whole directory may have been removed
            if os.stat(self._name, dir_fd=self._directory_fd).st_ino == self._inode:
                os.unlink(self._name, dir_fd=self._directory_fd)
        return True  # the lock ends with the process

    def _until_deadline(self) -> float | None:
        deadlines = [run.deadline for run in self._runs.values() if not run.killed]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    # -- connections ---------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Accept connections as long as there is room for more."""
        wanted = len(self._clients) < _CONNECTIONS_MAX
        if wanted and self._listener not in self._selector.get_map():
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        elif not wanted and self._listener in self._selector.get_map():
            self._selector.unregister(self._listener)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return  # the client has gone
        client.setblocking(False)
        self._adopt(client)

    def _adopt(self, client: socket.socket) -> None:
        self._clients.add(client)
        self._selector.register(client, selectors.EVENT_READ, lambda: self._receive(client))
        self._listen()

    def _forget(self, client: socket.socket) -> None:
        if client not in self._clients:
            return
        self._clients.discard(client)
        self._selector.unregister(client)
        for run in self._runs.values():
            if run.client is client:
                run.client = None  # its command is kept all the same: the next daemon finds it
        client.close()
        self._listen()

    def _receive(self, client: socket.socket) -> None:
        if client not in self._clients:
            return  # forgotten since the selector saw it
        fds: list[int] = []
        try:
            data, fds = receive(client)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._forget(client)
            return
        try:
            answer = self._answer(client, data, fds)
        except (ValueError, KeyError, TypeError, RecursionError, OSError) as exc:
            answer = {"error": f"the keeper refused: {exc}"}, []
        finally:
            _close(fds)  # the descriptors that no request has taken
        if answer is not None:
            self._send(client, answer)

    def _send(self, client: socket.socket, answer: Answer) -> None:
        try:
            socket.send_fds(client, [json.dumps({**answer[0], "descriptors": len(answer[1])}).encode()], answer[1])
        except OSError:
            self._forget(client)  # gone, or it does not read its answers

    def _answer(self, client: socket.socket, data: bytes, fds: list[int]) -> Answer | None:
        """Carry out the request. Takes descriptors that it keeps out of `fds`. None: the answer comes later, or
        never."""
        request = json.loads(data)
        name = request["do"]
        if name == "run":
            self._start(client, request, fds)
            return None
        if name == "bye":
            return self._bye(client)
        return self._methods[name](request, fds)

    def _bye(self, client: socket.socket) -> Answer | None:
        """Not counted any more. The answer is that this process stays; its end, which closes the connection, is one
        too."""
        self._clients.discard(client)
        if self._idle() and self._leave():
            return None
        self._clients.add(client)
        return {}, []

    # -- commands ------------------------------------------------------------------------------------------------------

    def _start(self, client: socket.socket, request: dict[str, Any], fds: list[int]) -> None:
        key, argv, deadline = self._new_key(request), request["argv"], time.monotonic() + float(request["timeout_s"])
        if len(fds) not in (4, 5):
            raise ValueError("a command comes with two pipes, and perhaps an input")
        under_way = any(run.key == key for run in self._runs.values())
        kept = self._kept.get(key)
        if under_way or (kept is not None and kept.runs):
            raise ValueError(f"a command runs under the key {key} already")
        stdout_r, stdout_w, stderr_r, stderr_w, *stdin = fds
        empty = (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)
        actions: list[tuple[Any, ...]] = [
            (os.POSIX_SPAWN_DUP2, stdin[0], 0) if stdin else empty,
            (os.POSIX_SPAWN_DUP2, stdout_w, 1),
            (os.POSIX_SPAWN_DUP2, stderr_w, 2),
        ]
        restored = [signal.SIGPIPE, signal.SIGXFSZ]  # Python ignores them
        pid = os.posix_spawnp(argv[0], argv, os.environ, file_actions=actions, setsigdef=restored)
        self._runs[pid] = _Run(client, key, str(request["pid_file"]), [stdout_r, stderr_r], deadline)
        fds[:] = [stdout_w, stderr_w, *stdin]

    def _kill_late(self) -> None:
        """End helpers that take too long, with what they have started."""
        now = time.monotonic()
        for pid, run in self._runs.items():
            if now >= run.deadline and not run.killed:
                run.killed = True
                for each in (*descendants(pid), pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(each, signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return  # no children
            if info is None:
                return  # none that has ended
            pid = info.si_pid
            executed = not never_executed(stat_fields(pid))  # the kernel forgets it when the process is reaped
            os.waitid(os.P_PID, pid, os.WEXITED)
            self._note_end(pid, info.si_status if info.si_code == os.CLD_EXITED else 128 + info.si_status, executed)

    def _note_end(self, pid: int, code: int, executed: bool) -> None:
        if pid in self._runs:
            self._finish(self._runs.pop(pid), code)
        elif pid in self._commands:
            kept = self._commands.pop(pid)
            kept.code, kept.executed = code, executed
        else:
            self._remember(pid, code, executed)

    def _remember(self, pid: int, code: int, executed: bool) -> None:
        self._ended.pop(pid, None)  # the newest stand last
        self._ended[pid] = code, executed
        while len(self._ended) > _ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    def _finish(self, run: _Run, code: int) -> None:
        answer: dict[str, Any] = {"code": None if run.killed else code}
        if code == 0 and not run.killed:
            try:
                self._take(run)
            except (OSError, ValueError) as exc:
                answer = {"error": f"the command that was started cannot be kept: {exc}"}
        _close(run.fds)
        if run.client is not None:
            self._send(run.client, (answer, []))

    def _take(self, run: _Run) -> None:
        """Keep the command whose process id a helper has written. It may have ended already."""
        with open(run.pid_file) as f:
            pid = int(f.read())
        kept = _Kept([], pid)
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            if pid not in self._ended:
                raise ValueError(f"process {pid} is not a child of the keeper") from None
            kept.code, kept.executed = self._ended.pop(pid)
        else:
            run.fds.append(os.pidfd_open(pid))
            self._commands[pid] = kept
        kept.fds, run.fds = run.fds, []
        self._keep(run.key, kept)

    # -- what is held --------------------------------------------------------------------------------------------------

    def _new_key(self, request: dict[str, Any]) -> str:
        key = str(request["key"])
        if not 0 < len(key) <= KEY_MAX_CHARS:
            raise ValueError(f"a key has 1 to {KEY_MAX_CHARS} characters")
        if len(self._kept) + len(self._runs) >= _KEYS_MAX and key not in self._kept:
            raise ValueError(f"{_KEYS_MAX} things are held already")
        return key

    def _keep(self, key: str, kept: _Kept) -> None:
        self._let_go(key)
        self._kept[key] = kept

    def _let_go(self, key: str) -> None:
        kept = self._kept.pop(key, None)
        if kept is None:
            return
        _close(kept.fds)
        if kept.runs:
            del self._commands[kept.pid]  # its end will be an unknown process's
        elif kept.code is not None:
            self._remember(kept.pid, kept.code, kept.executed)

    def _process(self, request: dict[str, Any], _: list[int]) -> Answer:
        """`pid`, `code` (null while it runs), `executed`; read ends of its output and error, and its pidfd unless it
        ended at once."""
        kept = self._kept.get(request["key"])
        return (kept.status(), kept.fds) if kept is not None and kept.pid else ({"none": True}, [])

    def _status(self, request: dict[str, Any], _: list[int]) -> Answer:
        """As `process`, without descriptors; known for a while after `drop`."""
        self._reap()  # the asking daemon has seen the end
        kept, pid = self._kept.get(request["key"]), int(request["pid"])
        if kept is not None and kept.pid == pid:
            return kept.status(), []
        if pid not in self._ended:
            return {"none": True}, []
        code, executed = self._ended[pid]
        return {"pid": pid, "code": code, "executed": executed}, []

    def _hold(self, request: dict[str, Any], fds: list[int]) -> Answer:
        """Keep the descriptor under the key, in place of an earlier one."""
        key = self._new_key(request)
        if len(fds) != 1:
            raise ValueError("one descriptor is held under a key")
        kept = self._kept.get(key)
        if kept is not None and kept.pid:
            raise ValueError(f"a command is kept under the key {key}")
        self._keep(key, _Kept([fds.pop()]))
        return {}, []

    def _held(self, request: dict[str, Any], _: list[int]) -> Answer:
        """The descriptor."""
        kept = self._kept.get(request["key"])
        return ({}, kept.fds) if kept is not None and not kept.pid else ({"none": True}, [])

    def _keys(self, request: dict[str, Any], _: list[int]) -> Answer:
        """`keys`: the next after `after`, in order; none left: an empty list."""
        after = str(request["after"])
        return {"keys": sorted(key for key in self._kept if key > after)[:KEYS_PER_ANSWER]}, []

    def _drop(self, request: dict[str, Any], _: list[int]) -> Answer:
        """Close the descriptors under a key. A command goes on, and its exit code stays among those of unknown
        processes."""
        self._let_go(request["key"])
        return {}, []


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()


def main(path: str, *descriptors: str) -> None:
    """Become the keeper, until it is not needed any more. See the module's text."""
    inherited = [int(word) for word in descriptors]
    passing.close_all_but(*inherited)
    for fd in inherited:
        os.set_inheritable(fd, False)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    listener_fd, directory_fd, *mounts_fd = inherited
    # A lock belongs to an open file: one of its own, not the one that the client's lock is on.
    directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory_fd)
    for fd in mounts_fd:
        sc.call("setns", fd, sc.CLONE_NEWNS)
    _close([directory_fd, *mounts_fd])
    os.chdir("/")
    listener = socket.socket(fileno=listener_fd)
    listener.setblocking(False)
    KeeperProcess(path, listener, directory).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # a daemon waits for the end, and there is nothing to clean up
