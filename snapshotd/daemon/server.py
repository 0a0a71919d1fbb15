"""The daemon's life: checks, lock, engine, socket, requests, end.

    rights (a user's: a user namespace)  ->  lock  ->  log  ->  own mount namespace  ->  engine open (recovery)  ->  socket  ->  ready
    SIGTERM/SIGINT  ->  no new connections  ->  engine.life.close (a last snapshot of every sandbox)  ->  answers end  ->  exit 0
    a second signal  ->  exit at once; the next daemon recovers, as after kill -9

The socket exists exactly while requests can be answered: it is made after recovery and removed before the lock is
released. Other machines, where the daemon listens for them, are answered from the same time on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import socket
import ssl
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import uvicorn

import snapshotd
from snapshotd.api.wire import check_socket_path
from snapshotd.daemon.access.address import ListenAddress, open_listener
from snapshotd.daemon.access.audit import Audit
from snapshotd.daemon.access.certificate import load_certificate
from snapshotd.daemon.hooks import HookServer
from snapshotd.daemon.host import AS_ROOT, Footing, become_able, enter_own_mount_namespace, note_namespace
from snapshotd.daemon.http.api import create_app
from snapshotd.daemon.http.failures import not_usable
from snapshotd.daemon.http.peer import SandboxPredicate, in_sandbox_of, protocol_class
from snapshotd.daemon.http.remote import RemoteListener, RemoteProtocol
from snapshotd.daemon.http.routes.shared import Service
from snapshotd.daemon.lock import StateLock, make_state_dir
from snapshotd.daemon.logs import start_logging
from snapshotd.engine.engine import Engine
from snapshotd.errors import Conflict, NotPermitted, SnapshotdError, Unsupported, UsageError
from snapshotd.kernel import memory, processes
from snapshotd.kernel.syscalls import KEYCTL_JOIN_SESSION_KEYRING, call
from snapshotd.serving import PromptServer

log = logging.getLogger("snapshotd.daemon")

EngineFactory = Callable[[Path], Engine]
T = TypeVar("T")
_DRAIN_S = 30
"""Time for answers in flight after the engine is closed; their clients are slow, not their commands."""
_BACKLOG = 1024
_OPEN_FILES = 65536


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The places to serve at, and the ways to report. `ready_fd` gets one JSON line, `{"ready":pid}` or
    `{"error":{...}}`, and is closed."""

    state_dir: Path
    socket_path: Path
    foreground: bool = False
    ready_fd: int | None = None
    hook_socket: Path | None = None
    """Socket for hooks of agents in users' folders; None: there is none."""
    footing: Footing = AS_ROOT
    is_sandboxed: SandboxPredicate | None = None
    """Decides if a peer is refused because it lives in a sandbox; None asks the engine."""
    listen: ListenAddress | None = None
    """Where other machines reach the daemon; None: nowhere."""
    certificate: tuple[Path | None, ...] = (None, None)
    """Files of the certificate that they are shown, and of its key; None twice: the daemon has its own."""


def serve(options: ServerOptions, open_engine: Callable[[Footing], Engine]) -> int:
    """Be the daemon until told to stop. Returns the exit code. Call from the main thread before any other is started.

    Conflict (another daemon), UsageError (paths); errors of `become_able` and of `open_engine`. Each error is also
    written to `ready_fd`.
    """

    with report_failures(options.ready_fd):
        footing = become_able(options.footing, options.state_dir)
        return serve_here(options, lambda state_dir: open_engine(_with_mounts(footing, state_dir)))


def _with_mounts(footing: Footing, state_dir: Path) -> Footing:
    """Give this process mounts of its own. Returns its ground, also where it can have none and plain folders will do.
    Unsupported: they will not."""
    try:
        enter_own_mount_namespace()
    except Unsupported as exc:
        footing = footing if footing.in_folder else footing.without_isolation(exc.message)
    note_namespace(footing, state_dir)
    return footing


def run_alone(footing: Footing, state_dir: Path, action: Callable[[Footing], T]) -> T:
    """Do something to a state directory in place of its daemon. Call from the main thread before any other is started.

    NotPermitted, Conflict (a daemon serves it); errors of `become_able` and of `action`.
    """
    footing = become_able(footing, state_dir)
    make_state_dir(state_dir)
    lock = StateLock(state_dir)
    try:
        return action(_with_mounts(footing, state_dir))
    finally:
        lock.release()


def serve_here(options: ServerOptions, open_engine: EngineFactory) -> int:
    """`serve` without the steps that need rights: no namespaces of its own."""
    if options.ready_fd is not None:
        os.set_inheritable(options.ready_fd, False)  # a child of ours that kept it would keep the client waiting
    check_socket_path(options.socket_path)
    make_state_dir(options.state_dir)
    lock = StateLock(options.state_dir)
    memory.share_freed()
    try:
        start_logging(options.state_dir, foreground=options.foreground)
        os.umask(0o022)  # the client that started us may have had any
        os.chdir("/")
        leave_session_keyring()
        _set_limits()
        with contextlib.ExitStack() as opened:
            remote = _open_remote(options, opened)
            engine = open_engine(options.state_dir)
            opened.callback(engine.life.close)
            listener = bind(options.socket_path)
            opened.callback(_unbind, options.socket_path, listener)
            lock.sign(options.socket_path)
            return _run(options, engine, listener, remote)
    except SnapshotdError as exc:
        log.error("the daemon ends", extra={"fields": exc.as_json()})
        raise
    except BaseException:
        log.critical("the daemon ends", exc_info=True)
        raise
    finally:
        lock.release()


def leave_session_keyring() -> None:
    """Go on with an empty session keyring: sandboxes inherit this process's, which belongs to the client that started
    the daemon. (Their filter lets no call reach it, but the kernel itself looks there.) Counts for this thread and what
    it starts, so it comes before all others."""
    with contextlib.suppress(OSError):  # a kernel without keyrings, or a container around us that has none
        call("keyctl", KEYCTL_JOIN_SESSION_KEYRING, None)


def bind(path: Path) -> socket.socket:
    """Listen on a socket at `path`, mode 0600, in place of a stale one. The caller holds the state directory's lock.

    Conflict when another process listens there or a file that is no socket is in the way; UsageError when it cannot be
    made.
    """
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as exc:
        listener.close()
        raise UsageError(f"the socket {path} cannot be made: {exc.strerror or exc}; choose another") from exc
    finally:
        os.umask(before)
    return listener


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise Conflict(f"{path} exists and is not a socket; move it away, or choose another place for the socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()  # its daemon is dead
            return
        except OSError as exc:
            raise Conflict(
                f"the socket {path} is in the way and cannot be tried: {exc.strerror}; choose another"
            ) from exc
    raise Conflict(f"another program already listens on {path}; stop it, or choose another place for the socket")


def _unbind(path: Path, listener: socket.socket) -> None:
    listener.close()
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


@dataclass(frozen=True, slots=True)
class _Remote:
    """The listener for other machines."""

    address: ListenAddress
    listener: socket.socket
    tls: ssl.SSLContext | None
    fingerprint: str
    audit: Audit


def _open_remote(options: ServerOptions, opened: contextlib.ExitStack) -> _Remote | None:
    if options.listen is None:
        return None
    tls, fingerprint = None, ""
    if options.listen.has_tls:
        tls, fingerprint = load_certificate(options.state_dir, *options.certificate)
    listener = opened.enter_context(open_listener(options.listen))
    audit = Audit(options.state_dir)
    opened.callback(audit.close)
    address = replace(options.listen, port=listener.getsockname()[1])
    return _Remote(address, listener, tls, fingerprint, audit)


def _run(options: ServerOptions, engine: Engine, listener: socket.socket, remote: _Remote | None) -> int:
    service = Service(engine, options.state_dir, os.getpid())
    if remote is not None:
        service.audit, service.listening, service.fingerprint = remote.audit, str(remote.address), remote.fingerprint
    sandboxed = options.is_sandboxed or in_sandbox_of(engine)
    protocol = protocol_class(sandboxed)
    config = uvicorn.Config(
        create_app(service),
        http=protocol,
        ws="none",
        loop="uvloop",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=_DRAIN_S,
    )
    hooks = None if options.hook_socket is None else HookServer(options.hook_socket, engine, sandboxed)
    server = _Server(config, service, lambda: _announce(options, service), hooks, remote)
    service.request_stop = server.stop_soon
    try:
        server.run(sockets=[listener])
    finally:
        if hooks is not None:
            hooks.close()
    log.info("stopped", extra={"fields": {"failed": server.close_failed}})
    return 1 if server.close_failed else 0


class _Server(PromptServer):
    """A server with our end of life: the engine closes between the last connection and the last answer."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        announce: Callable[[], None],
        hooks: HookServer | None,
        remote: _Remote | None,
    ) -> None:
        super().__init__(config)
        self._service, self._hooks, self._remote = service, hooks, remote
        self._taking: RemoteListener | None = None
        self._announce = announce
        self.close_failed = False

    def stop_soon(self) -> None:
        """Begin to stop; may be called from any thread. The second time: the end."""
        if self.should_exit:
            log.warning("told twice to stop: leaving at once")
            os._exit(1)
        super().stop_soon()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at SIGTERM and SIGINT. uvicorn's own method raises the signal again after a clean end, and so exits with its number."""
        if threading.current_thread() is not threading.main_thread():
            yield  # tests
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop_soon)
        yield
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._remote is not None:
            self._taking = RemoteListener(self._remote.listener, self._remote.tls, self._begin_remote)
        self._announce()

    def _begin_remote(self, on_lost: Callable[[], object]) -> RemoteProtocol:
        return RemoteProtocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state, on_lost=on_lost
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        if self._taking is not None:
            await self._taking.close()
        try:
            if self._hooks is not None:
                await asyncio.to_thread(self._hooks.close)
            await asyncio.to_thread(self._service.engine.life.close)
        except Exception:
            self.close_failed = True
            log.critical("the engine could not be closed; the next daemon recovers", exc_info=True)
        self._service.watchers.close()
        await super().shutdown(sockets)


def _announce(options: ServerOptions, service: Service) -> None:
    log.info(
        "ready",
        extra={
            "fields": {
                "version": snapshotd.__version__,
                "pid": os.getpid(),
                "state_dir": str(options.state_dir),
                "socket": str(options.socket_path),
                **({"listening": service.listening, "fingerprint": service.fingerprint} if service.listening else {}),
            }
        },
    )
    _tell(options.ready_fd, {"ready": os.getpid()})
    _notify_systemd()
    if not options.foreground and options.ready_fd is None:
        sys.stderr.write(f"snapshotd: daemon {os.getpid()} ready on {options.socket_path}\n")
    if service.listening and options.ready_fd is None:
        shown = f", certificate {service.fingerprint}" if service.fingerprint else ", without TLS"
        sys.stderr.write(f"snapshotd: other machines reach it at {service.listening}{shown}\n")


@contextlib.contextmanager
def report_failures(ready_fd: int | None) -> Iterator[None]:
    """Report a failure to the process that waits for the daemon to be ready."""
    try:
        yield
    except SnapshotdError as exc:
        _tell(ready_fd, exc.as_json())
        raise
    except PermissionError as exc:
        failure = NotPermitted(f"the daemon cannot start: {not_usable(exc)}")
        _tell(ready_fd, failure.as_json())
        raise failure from exc


def _tell(ready_fd: int | None, news: dict[str, object]) -> None:
    if ready_fd is None:
        return
    try:
        os.write(ready_fd, json.dumps(news).encode() + b"\n")
        os.close(ready_fd)
    except OSError:
        log.warning("no process waits for the daemon to be ready any more")


def _notify_systemd() -> None:
    """sd_notify(3): READY=1 to the socket that systemd names, once, and not to our children."""
    address = os.environ.pop("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s:
        try:
            s.sendto(b"READY=1", "\0" + address[1:] if address.startswith("@") else address)
        except OSError as exc:
            log.warning("systemd could not be notified: %s", exc)


def _set_limits() -> None:
    """Set the resource limits of this process and of everything that it starts, commands in sandboxes included.

    Open files: a sandbox costs about ten descriptors, and 256 are a fork. No higher: some children close every possible
    one.

    Core dumps: 1 byte, which tells the kernel to start no program for them (0 does not: fs/coredump.c). That program
    would be the host's, run as root, and its input is the memory of a process that an attacker has filled and crashed.
    Our own memory has secrets in it.
    """
    with contextlib.suppress(ValueError):  # it may be 0 already, for good
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    processes.allow_files(_OPEN_FILES)
