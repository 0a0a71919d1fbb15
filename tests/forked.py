"""Commands and daemons without a new interpreter: a process that has imported all of snapshotd forks one on request.

Imports are most of what a command costs, and nearly all of a daemon's start: a second. Commands are forked from a
process that has imported the command line alone: a fork copies the table of its parent's memory, so it costs 3 ms
there, and 8 ms where all is imported. A process made here is a process
like any other: environment, working directory, mounts, standard streams, exit code, signals. It differs in its memory,
part of which it shares with its parent, and in being that one's child. Its command line in /proc is the one that it
would have.

What Python or a module reads once, when it starts, cannot be given to a fork: `can_be_forked` says whether an
environment has any of it. Tests of how a process starts, of its pipes and of its memory start it themselves.

This file is also the program that forks; it imports nothing of the tests then, but for the programs that it
forks: the daemon over the smallest runtime, and what tests name.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import inspect
import json
import logging
import os
import pkgutil
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

ROOT = Path(__file__).parents[1]
SMALL_DAEMON = "tests.small_daemon"
_READ_AT_START = ("PATH", "TMPDIR", "TZ", "LANG")
_READ_AT_START_BEGIN = ("PYTHON", "LC_")
_COMMANDS = "/commands"
"""Comes after the address of the process that has all, in the address of the one that forks commands."""
_LATER_IN_COMMANDS = ("rich.live", "rich.progress", "rich.table", "rich.tree")
"""Imported by a command when they are needed."""
_OF_EXTRAS = ("snapshotd.client.fleet.database", "snapshotd.client.fleet.ray")
"""They need what an installation may lack."""
_LATER = (
    "snapshotd.gateway.server",
    "uvicorn.protocols.http.h11_impl",
    "uvicorn.lifespan.on",
    "uvicorn.loops.uvloop",
    "uvloop",
    "anyio._backends._asyncio",
    "sqlite3",
    "snapshotd.engine.storage.archiver",
    "snapshotd.engine.storage.cold_worker",
    "snapshotd.fuse.server",
    "snapshotd.repo.upkeep.maintenance",
)
"""Imported by a daemon or its children when they are needed."""
_CHILDREN = ("snapshotd.daemon.children", "snapshotd.engine.storage.worker")
"""Programs that a daemon starts as `python -m`."""
FUSE_CHILD = "tests.fuse_child"
_COMMAND_LINE_BYTES = 4000
_HIGH_FD = 500
_LENGTH = struct.Struct("=I")
_MAX_FDS = 16
_MAX_REQUEST_BYTES = 1 << 17
CLONE_NEWNS = 0x20000
_EXECUTE_CHILD = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]
"""Names of what `subprocess.Popen` gives to its method that starts the program."""
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in env.items() if name in _READ_AT_START or name.startswith(_READ_AT_START_BEGIN)
    }


# -- for tests ---------------------------------------------------------------------------------------------------------


class Process:
    """What is used of `subprocess.Popen`."""

    def __init__(self, args: Sequence[str], connection: socket.socket, pid: int, pidfd: int) -> None:
        self.args, self.pid = list(args), pid
        self.returncode: int | None = None
        self.stderr: IO[bytes] | None = None
        self._connection, self._pidfd = connection, pidfd
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.returncode is None:
                poll = select.poll()
                poll.register(self._connection, select.POLLIN)
                if not poll.poll(None if timeout is None else timeout * 1000):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                told = self._connection.recv(_LENGTH.size)
                assert told, "the process that forks has died"
                self.returncode = os.waitstatus_to_exitcode(_LENGTH.unpack(told)[0])
                self._close()
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _close(self) -> None:
        self._connection.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def __del__(self) -> None:
        self._close()


class Piped(subprocess.Popen[str]):
    """`subprocess.Popen` of `python -m snapshotd ARGS` with nothing to read, and pipes for what it prints."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str]) -> None:
        super().__init__(
            [sys.executable, "-m", "snapshotd", *args],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _execute_child(self, *given: Any) -> None:
        of = dict(zip(_EXECUTE_CHILD, given, strict=True))
        fds = {0: of["p2cread"], 1: of["c2pwrite"], 2: of["errwrite"]}
        self._process = start(of["args"][3:], fds, env=of["env"], cwd=os.getcwd())
        self.pid, self._child_created = self._process.pid, True
        for fd in fds.values():
            os.close(fd)

    def _internal_poll(self, **_: object) -> int | None:
        self.returncode = self._process.poll()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        self.returncode = self._process.wait(timeout)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        self._process.send_signal(sig)


class _Child(subprocess.Popen[bytes]):
    """`subprocess.Popen` of one of `_CHILDREN`, or of `FUSE_CHILD`."""

    def _execute_child(self, *given: Any) -> None:
        of = dict(zip(_EXECUTE_CHILD, given, strict=True))
        argv, streams = of["args"], (of["p2cread"], of["c2pwrite"], of["errwrite"])
        fds = {number: number if fd == -1 else fd for number, fd in enumerate(streams)}
        self._process = start(
            argv[3:], fds, env=os.environ, cwd=os.getcwd(), module=argv[2], new_session=of["start_new_session"]
        )
        self.pid, self._child_created = self._process.pid, True
        self._close_pipe_fds(*(of[name] for name in _PIPES))  # type: ignore[attr-defined]

    _internal_poll, _wait, send_signal = Piped._internal_poll, Piped._wait, Piped.send_signal


class _Parent:
    """The process that forks, started when it is first needed and ended with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._address = ""
        self._at_start: dict[str, str] = {}
        self._owner = 0

    def address(self) -> str:
        with self._lock:
            if self._owner != os.getpid():
                self._start()
            return self._address

    def at_start(self) -> dict[str, str]:
        self.address()
        return self._at_start

    def _start(self) -> None:
        self._address = f"\0snapshotd-tests-{os.getpid()}-{os.urandom(8).hex()}"
        env = {**os.environ}
        self._at_start = _at_start(env)
        with _listening(self._address) as all_, _listening(self._address + _COMMANDS) as commands:
            ends, self._ours = os.pipe()
            fds = [all_.fileno(), commands.fileno(), ends]
            argv = [sys.executable, "-P", __file__, *map(str, fds), "x" * _COMMAND_LINE_BYTES]
            subprocess.Popen(argv, env=env, pass_fds=fds, stdin=subprocess.DEVNULL, cwd="/").returncode = 0
            os.close(ends)
        self._owner = os.getpid()


_parent = _Parent()


def _listening(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(64)
    return listener


def commands_address() -> str:
    """Where commands are asked for."""
    return _parent.address() + _COMMANDS


def can_be_forked(env: Mapping[str, str]) -> bool:
    """Whether a fork can have this environment."""
    return _at_start(env) == _parent.at_start()


def start(
    args: Sequence[str],
    fds: Mapping[int, int],
    *,
    env: Mapping[str, str],
    cwd: str,
    module: str = "snapshotd",
    new_session: bool = False,
) -> Process:
    """Fork `python -m MODULE ARGS`. `fds`: its descriptors to those of this process. Standard streams
    that are not among them are those of the first test: nothing to read, and wherever pytest prints to."""
    is_command = module == "snapshotd" and list(args[:1]) != ["daemon"]
    address = commands_address() if is_command else _parent.address()
    return _ask(address, args, fds, env, cwd, module, new_session)


def run(
    args: Sequence[str], *, env: Mapping[str, str], timeout_s: float, module: str = "snapshotd"
) -> tuple[int, bytes, bytes]:
    """The exit code of a command, or of another program (`module`), and what it printed. TimeoutExpired, and it is
    killed."""
    with _nothing() as nothing, _memory() as out, _memory() as err:
        process = start(args, {0: nothing, 1: out, 2: err}, env=env, cwd=os.getcwd(), module=module)
        try:
            code = process.wait(timeout_s)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return code, _all_of(out), _all_of(err)


@contextlib.contextmanager
def daemons() -> Iterator[None]:
    """Daemons that a client of this process starts are forked meanwhile."""
    from snapshotd.client import autostart

    ordinary, forks = autostart._spawn, _spawner(_parent.address)

    def spawn(state_dir: Path, socket_path: Path, ready_fd: int, isolation: str | None) -> Any:
        return (forks if can_be_forked(os.environ) else ordinary)(state_dir, socket_path, ready_fd, isolation)

    autostart._spawn = spawn
    try:
        yield
    finally:
        autostart._spawn = ordinary


@contextlib.contextmanager
def children() -> Iterator[None]:
    """Child processes of an engine in this process, and of mounts, are forked meanwhile."""
    from snapshotd.engine.storage import child
    from snapshotd.fuse import child as mount

    def popen(argv: list[str], **more: Any) -> subprocess.Popen[bytes]:
        is_ours = argv[1:2] == ["-m"] and argv[2] in (*_CHILDREN, FUSE_CHILD) and can_be_forked(os.environ)
        return (_Child if is_ours else subprocess.Popen)(argv, **more)

    before = child.subprocess  # type: ignore[attr-defined]
    child.subprocess = mount.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": popen})  # type: ignore
    try:
        yield
    finally:
        child.subprocess = mount.subprocess = before  # type: ignore[attr-defined]


@contextlib.contextmanager
def _nothing() -> Iterator[int]:
    fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _memory() -> Iterator[int]:
    fd = os.memfd_create("output")
    try:
        yield fd
    finally:
        os.close(fd)


def _all_of(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _ask(
    address: str,
    args: Sequence[str],
    fds: Mapping[int, int],
    env: Mapping[str, str],
    cwd: str,
    module: str,
    new_session: bool,
) -> Process:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(None)  # whatever a test makes the default
    mounts = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        connection.connect(address)
        request = json.dumps([list(args), list(fds), dict(env), cwd, module, new_session]).encode(
            "utf-8", "surrogateescape"
        )
        socket.send_fds(connection, [_LENGTH.pack(len(request))], [mounts, *fds.values()])
        connection.sendall(request)
        answer, (pidfd,), _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(mounts)
    return Process(args, connection, _LENGTH.unpack(answer)[0], pidfd)


# -- the process that forks --------------------------------------------------------------------------------------------


class _Server:
    """One thread. Each connection is a request, and lives as long as the process that was asked for."""

    def __init__(self, listener: socket.socket, end: int, daemons: str) -> None:
        """`daemons`: the address where commands ask for a daemon."""
        self._listener, self._end, self._daemons = listener, end, daemons
        self._children: dict[int, tuple[int, socket.socket]] = {}
        self._own_mounts = os.stat("/proc/self/ns/mnt").st_ino

    def serve(self) -> None:
        """Until the process that started this one is gone."""
        poll = select.poll()
        for fd in (self._listener.fileno(), self._end):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._end:
                    return
                if fd in self._children:
                    poll.unregister(fd)
                    self._has_ended(fd)
                elif fd == self._listener.fileno():
                    poll.register(self._fork(self._listener.accept()[0]), select.POLLIN)

    def _has_ended(self, pidfd: int) -> None:
        pid, connection = self._children.pop(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # nobody asks any more
            connection.send(_LENGTH.pack(status), socket.MSG_NOSIGNAL)
        connection.close()

    def _fork(self, connection: socket.socket) -> int:
        """Returns what tells of the child's end."""
        head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, _MAX_FDS)
        (left,) = _LENGTH.unpack(head)
        request = b""
        while len(request) < left:
            request += connection.recv(left - len(request))
        pid = os.fork()
        if pid == 0:
            other_mounts = os.stat(fds[0]).st_ino != self._own_mounts
            _be_child(json.loads(request), fds[0] if other_mounts else None, fds[1:], self._daemons)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (pid, connection)
        with contextlib.suppress(OSError):
            socket.send_fds(connection, [_LENGTH.pack(pid)], [pidfd])
        for fd in fds:
            os.close(fd)
        return pidfd


def _be_child(request: list[Any], mounts: int | None, fds: list[int], address: str) -> None:
    """Never returns. `mounts`: the namespace to enter."""
    code: object = 1
    try:
        args, targets, env, cwd, module, new_session = request
        if new_session:
            os.setsid()
        if mounts is not None:
            from snapshotd.kernel.syscalls import call

            call("setns", mounts, CLONE_NEWNS)
        _take(dict(zip(targets, fds, strict=True)))
        _open_streams()
        os.chdir(cwd)
        _call_it([sys.executable, "-m", module, *args])
        code = _run_in(env, module, args, address)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        threading._shutdown()  # type: ignore[attr-defined] # as at the end of any program: other threads, and then what wants to be called
        atexit._run_exitfuncs()
    except SystemExit as exc:
        code = exc.code
    except BaseException:  # noqa: BLE001 - as at the end of any program
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1 if code else 0)


def _take(wanted: dict[int, int]) -> None:
    """These descriptors under these numbers, the standard ones as they are if they are not among them, and no
    others."""
    import fcntl

    wanted = {0: 0, 1: 1, 2: 2} | wanted
    high = {target: fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH_FD) for target, fd in wanted.items()}
    for target, fd in high.items():
        os.dup2(fd, target, inheritable=True)
    keep = sorted(wanted)
    for low, above in zip(keep, [*keep[1:], 1 << 20], strict=True):
        os.closerange(low + 1, min(above, 65536))


def _open_streams() -> None:
    """As a new interpreter does: the old ones know of what they were opened on whether it can be sought."""
    for fd, name in ((1, "stdout"), (2, "stderr")):
        old, lines = getattr(sys, name), fd == 2 or os.isatty(fd)
        told = {"encoding": old.encoding, "errors": old.errors, "buffering": 1 if lines else -1}
        setattr(sys, name, open(fd, "w", closefd=False, **told))  # noqa: SIM115 - until the process ends


def _call_it(argv: list[str]) -> None:
    """Put a command line in place of this process's in /proc."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    begin, end = int(fields[45]), int(fields[46])
    text = b"\0".join(os.fsencode(word) for word in argv)[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, text, len(text))


def _run_in(env: dict[str, str], module: str, args: list[str], address: str) -> int:
    from snapshotd import failpoints
    from snapshotd.cli.main import main
    from snapshotd.client import autostart

    os.environ.clear()
    os.environ.update(env)
    importlib.reload(failpoints)  # into the same names, which those who have imported `hit` see
    if module in _CHILDREN:
        if args[:1] == ["archive"]:  # it starts others
            fork_own_children()
        sys.argv = [module, *args]
        sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0
    if module != "snapshotd" or args[:1] == ["daemon"]:
        _fork_children_later()
    if module.startswith("tests."):
        sys.argv = [module, *args]
        return int(importlib.import_module(module).main())
    sys.argv = ["snapshotd", *args]

    autostart._spawn = _spawner(lambda: address)
    return main(args)


def _spawner(address: Callable[[], str]) -> Callable[[Path, Path, int, str | None], Any]:
    """A client's own way to a daemon, but for who forks it."""
    from snapshotd.client import autostart

    def spawn(state_dir: Path, socket_path: Path, ready_fd: int, isolation: str | None) -> Process:
        argv = autostart.daemon_argv(state_dir, socket_path, ready_fd, isolation)
        with _nothing() as nothing, autostart._open_log(state_dir) as log:
            fds = {0: nothing, 1: log.fileno(), 2: log.fileno(), ready_fd: ready_fd}
            return _ask(address(), argv[argv.index("snapshotd") + 1 :], fds, os.environ, "/", "snapshotd", True)

    return spawn


# -- the children of a daemon ------------------------------------------------------------------------------------------


def _fork_children_later() -> None:
    """When this process has its own mounts, if it is a daemon."""
    from snapshotd.daemon import server

    enter = server.enter_own_mount_namespace

    def enter_and_split() -> None:
        enter()
        _fork_children()

    server.enter_own_mount_namespace = enter_and_split


def fork_own_children() -> None:
    """`_fork_children` in a process that adopts no orphans yet."""
    from snapshotd.kernel import syscalls

    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    _fork_children()


def _fork_children() -> None:
    """From now on this daemon's `subprocess.Popen` forks those of `_CHILDREN`, from a process that is made here, while
    the daemon has one thread and the mounts that its children have.

    The daemon is their parent: it adopts orphans, and so who starts them ends at once.
    """
    daemons, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        try:
            _serve_children(its.detach())
        finally:
            os._exit(0)
    its.close()
    assert daemons.recv(_LENGTH.size), "what forks the children has died"
    lock = threading.Lock()
    ordinary = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute(self: Any, *given: Any) -> None:
        of = dict(zip(_EXECUTE_CHILD, given, strict=True))
        argv = of["args"]
        if not isinstance(argv, list) or argv[1:2] != ["-m"] or argv[2] not in _CHILDREN:
            ordinary(self, *given)
            return
        env = dict(os.environ if of["env"] is None else of["env"])
        request = json.dumps([argv[3:], [0, 1, 2], env, os.getcwd(), argv[2], of["start_new_session"]])
        streams = [of["p2cread"], of["c2pwrite"], of["errwrite"]]
        with lock:
            fds = [usual if fd == -1 else fd for fd, usual in zip(streams, (0, 1, 2), strict=True)]
            socket.send_fds(daemons, [request.encode("utf-8", "surrogateescape")], fds)
            (self.pid,) = _LENGTH.unpack(daemons.recv(_LENGTH.size))
        self._child_created = True
        self._close_pipe_fds(*(of[name] for name in _PIPES))

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


def _serve_children(fd: int) -> None:
    """Until the daemon is gone. Keeps nothing of it open."""
    _call_it(["snapshotd-tests", "forks the children of a daemon"])
    logging.captureWarnings(False)
    logging.getLogger().handlers.clear()  # a daemon's log is its own
    logging.getLogger().setLevel(logging.WARNING)
    nothing = os.open(os.devnull, os.O_RDWR)
    _take({0: nothing, 1: nothing, 2: nothing, 3: fd})
    requests = socket.socket(fileno=3)
    requests.send(_LENGTH.pack(0))
    while True:
        data, fds, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, _MAX_FDS)
        if not data:
            return
        says, tells = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                _be_child(json.loads(data), None, fds, "")
            os.write(tells, _LENGTH.pack(pid))
            os._exit(0)
        os.waitpid(between, 0)
        requests.send(os.read(says, _LENGTH.size), socket.MSG_NOSIGNAL)
        for fd in (says, tells, *fds):
            os.close(fd)


def _import_commands() -> None:
    import snapshotd.cli
    import snapshotd.client

    _import_all_of(snapshotd.cli, snapshotd.client)
    for name in _LATER_IN_COMMANDS:
        importlib.import_module(name)


def _import_everything() -> None:
    import snapshotd.daemon
    from snapshotd.daemon import library

    _import_all_of(snapshotd.daemon)
    library.library()  # each daemon has it then
    for name in _LATER:
        importlib.import_module(name)
    sys.path.append(str(ROOT))
    importlib.import_module(SMALL_DAEMON)


def _import_all_of(*packages: ModuleType) -> None:
    for package in packages:
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name not in _OF_EXTRAS:
                importlib.import_module(found.name)


def _main() -> None:
    import gc

    all_, commands, end = map(int, sys.argv[1:4])
    gc.disable()  # until all is imported: it stays
    _import_commands()
    listener, other = (all_, commands) if os.fork() else (commands, all_)
    daemons = _name(all_)
    os.close(other)
    if listener == all_:
        _import_everything()
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()
    gc.enable()
    serving = socket.socket(fileno=listener)
    serving.settimeout(None)
    _Server(serving, end, daemons).serve()


def _name(listener: int) -> str:
    with socket.socket(fileno=os.dup(listener)) as found:
        name: bytes = found.getsockname()
        return name.decode()


if __name__ == "__main__":
    _main()
