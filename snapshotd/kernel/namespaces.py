"""Entering a mount, network or UTS namespace from one short-lived thread, and making user namespaces: as id maps only,
or to live in."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

from snapshotd.kernel import rootless
from snapshotd.kernel import syscalls as sc
from snapshotd.kernel.files import closing_fd, identity_of
from snapshotd.types import IdMap

T = TypeVar("T")
CONTAINER_IDS = IdMap(base=1_700_000_000, count=65_536)
"""Host ids of container ids: far above what useradd and other engines hand out, and one range for all sandboxes."""


def in_mount_namespace(ns_fd: int, action: Callable[[], T]) -> T:
    """Run `action` in a thread of its own that has joined the mount namespace; the rest of the process stays where it
    is.

    The thread's root and working directory are the namespace's root. Errors of `action` are raised here.
    Cost: about 0.1 ms for the thread.
    """
    return _inside("mount-namespace", ns_fd, sc.CLONE_NEWNS, action)


def _inside(name: str, ns_fd: int, kind: int, action: Callable[[], T]) -> T:
    def enter() -> T:
        if kind == sc.CLONE_NEWNS:
            sc.call("unshare", sc.CLONE_FS)  # a thread that shares its root with others may not join a mount namespace
        sc.call("setns", ns_fd, kind)
        return action()

    return apart(name, enter)


def as_seen_by(pid: int, action: Callable[[], T]) -> T:
    """Run `action`, which opens files by path, where paths mean what they mean to process `pid`: the daemon does not see
    what was mounted after its start where `/` is a private mount, nor the files of a container.

    0 stands for this process itself. An ordinary user's daemon cannot enter the namespace of a process outside: there,
    paths mean what they meant where the daemon was started. OSError when the process is gone.
    """
    ns_fd = None
    try:
        if pid != 0 and mount_namespace_of(pid) != mount_namespace_of(os.getpid()):
            ns_fd = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        if not rootless.in_own_namespace():
            raise
    if ns_fd is None:
        return action()
    with closing_fd(ns_fd):
        return in_mount_namespace(ns_fd, action)


def mount_namespace_of(pid: int) -> tuple[int, int]:
    """The name of a process's mount namespace, valid while the namespace exists. OSError when the process is gone."""
    return identity_of(os.stat(f"/proc/{pid}/ns/mnt"))


def in_known_mount_namespace(namespace: tuple[int, int], action: Callable[[], T]) -> T:
    """`in_mount_namespace` for one that is known by name and not held: held, it would outlive its processes, with all
    mounts in it.

    ProcessLookupError when no process is left in it. Cost: a look at every process.
    """
    if namespace == mount_namespace_of(os.getpid()):
        return action()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fd = os.open(f"/proc/{entry}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # it has ended meanwhile, or is a kernel thread
            with closing_fd(fd):
                if identity_of(os.fstat(fd)) == namespace:
                    return in_mount_namespace(fd, action)
    raise ProcessLookupError(errno.ESRCH, "no process is left in the mount namespace")


def in_network_namespace(pid: int, action: Callable[[], T]) -> T:
    """Run `action` in a thread of its own that has joined the network namespace of a process: sockets it makes belong
    there for good. Errors of `action` are raised here; OSError when the process is gone."""
    with closing_fd(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)) as ns_fd:
        return in_open_network_namespace(ns_fd, action)


def in_open_network_namespace(ns_fd: int, action: Callable[[], T]) -> T:
    """As `in_network_namespace`, for the network namespace of a descriptor."""
    return _inside("network-namespace", ns_fd, sc.CLONE_NEWNET, action)


def new_network_namespace() -> int:
    """A descriptor of a network namespace without anything in it, which belongs to this process's user namespace and
    lives as long as the descriptor, or a socket made in it. OSError."""

    def make() -> int:
        sc.call("unshare", sc.CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return apart("network-namespace", make)


def set_hostname(pid: int, hostname: str) -> None:
    """Set the hostname in the UTS namespace of a process. OSError when the process is gone."""
    with closing_fd(os.open(f"/proc/{pid}/ns/uts", os.O_RDONLY | os.O_CLOEXEC)) as ns_fd:
        _inside("uts-namespace", ns_fd, sc.CLONE_NEWUTS, lambda: socket.sethostname(hostname))


def apart(name: str, action: Callable[[], T]) -> T:
    """Run `action` in a thread of its own, which may leave the namespaces of the process and ends with it. Errors of
    `action` are raised here."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            outcome.append(action())
        except BaseException as exc:  # noqa: BLE001 - carried to the caller, whatever it is
            failure.append(exc)

    thread = threading.Thread(target=body, name=name)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


_libc = ctypes.CDLL(None, use_errno=True)
_mappings: dict[IdMap, int] = {}
_mappings_lock = threading.Lock()


def user_namespace(id_map: IdMap) -> int:
    """A file descriptor, the caller's own, of this process's user namespace that maps `id_map` and has no processes;
    only for id-mapped mounts.

    Container ids 0..count-1 on disk appear as host ids base..base+count-1. One more extent maps id `count` to host id
    0, without which overlayfs cannot create its work directory (EOVERFLOW, and the mount falls back to read-only).
    Made once, since each takes a fork of this process, a daemon of a hundred MiB. Raises OSError. The helper process
    that makes it is gone on return.
    """
    with _mappings_lock:
        if id_map not in _mappings:
            _mappings[id_map] = _user_namespace(f"0 {id_map.base} {id_map.count}\n{id_map.count} 0 1\n")
        return os.dup(_mappings[id_map])


def check_user_namespace(id_map: IdMap) -> None:
    """Make sure that a user namespace with this map, for processes to live in, can be made. OSError: it cannot."""
    os.close(_user_namespace(f"0 {id_map.base} {id_map.count}\n"))


def _user_namespace(extents: str) -> int:
    ready_r, ready_w = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:  # child: only async-signal-safe work, the parent is multi-threaded
        done = _libc.unshare(sc.CLONE_NEWUSER) == 0
        number = 0 if done else ctypes.get_errno() or errno.EPERM
        # It has every descriptor of the parent's, clients' connections included: it must not outlive a parent that is
        # killed just now.
        _libc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        os.write(ready_w, bytes((number,)))
        signal.pause()
        os._exit(0)
    try:
        os.close(ready_w)
        said = os.read(ready_r, 1)
        if said != b"\0":
            raise user_namespace_error(said[0] if said else errno.EPERM)
        return map_and_open(pid, extents)
    finally:
        os.close(ready_r)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def write_map(pid: int, extents: str) -> None:
    """Give the new user namespace in which the process is its map of user and group ids. OSError."""
    for kind in ("uid_map", "gid_map"):
        with open(f"/proc/{pid}/{kind}", "w") as f:
            f.write(extents)


def map_and_open(pid: int, extents: str) -> int:
    """Give the new user namespace in which the process is its map of user and group ids, and open it. OSError."""
    write_map(pid, extents)
    return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)


def user_namespace_error(number: int) -> OSError:
    """The error for a user namespace that the kernel did not make, from its errno."""
    return OSError(
        number, f"a user namespace cannot be made: {os.strerror(number)} (`sysctl user.max_user_namespaces`)"
    )
