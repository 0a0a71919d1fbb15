"""The making of a sandbox, in the place of `runc run`: namespaces, cgroups, mounts and the first process, as runc makes
them (main.py calls it; standard library only).

    resident   the host's rights: cgroups and limits. Then a user namespace, whose map the daemon writes, and all other
               namespaces in it. It clones the init, and stays as the resident of the sandbox
    init       the mounts, the other root, hostname and loopback; then it becomes a program as every command does

Nothing of a sandbox's own is there yet: the paths below the root are those of the stub root and of mounts made here. The
order is the daemon's: the OCI configuration that runc gets, and the filters and cgroups of a sandbox that runc made
(_pattern.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from snapshotd.kernel import passing
from snapshotd.kernel import syscalls as sc
from snapshotd.runtime.starting.command import (
    ANSWER_FD,
    CLONE_NEWUSER,
    LIBRARY,
    NAMESPACES,
    Filters,
    answer,
    clone,
    drop_rights,
    execute,
    load_filters,
    write,
)

_START_DEADLINE_S = 60.0
_MS_SLAVE, _MS_PRIVATE = sc.MS_SLAVE, 1 << 18
_FLAGS = {
    "ro": sc.MS_RDONLY,
    "nosuid": sc.MS_NOSUID,
    "nodev": sc.MS_NODEV,
    "noexec": 8,
    "noatime": sc.MS_NOATIME,
    "nodiratime": 2048,
    "relatime": 1 << 21,
    "strictatime": 1 << 24,
}
_RESTRICTIONS = ("ro", "nosuid", "nodev", "noexec")
"""Options of a bind mount that it does not have from its source. Their flags have the same numbers in mount(2) and in
mount_setattr(2)."""
_DEVICES = ("null", "random", "full", "tty", "zero", "urandom")
_LINKS = (
    ("/proc/self/fd", "fd"),
    ("/proc/self/fd/0", "stdin"),
    ("/proc/self/fd/1", "stdout"),
    ("/proc/self/fd/2", "stderr"),
)
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def make(order: dict[str, Any], answer_fd: int, socket_fd: int, filters: Filters) -> int:
    """In a new process: make the sandbox, and be in its namespaces but that of processes. Returns a pidfd of its init.
    OSError, KeyError: it cannot be made; the daemon removes what is there of it."""
    process = order["config"]["process"]
    passing.close_all_but(answer_fd, socket_fd)
    enter_limits(process, order["cgroups"])
    own_user_namespace(order["owner"])
    answer(answer_fd, unmapped=os.getpid())
    if not os.read(socket_fd, 1):
        os._exit(0)  # the daemon does not wait any more
    sc.call("unshare", NAMESPACES)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    drop_rights(process)
    pid = clone()
    if pid == 0:
        _be_init(order, answer_fd, filters)
    answer(answer_fd, init=pid)
    return os.pidfd_open(pid)


def enter_limits(process: dict[str, Any], doors: Sequence[str]) -> None:
    """Enter the sandbox's cgroups, and take on the limits of its processes. Needs the host's rights."""
    write("/proc/self/oom_score_adj", str(process["oomScoreAdj"]))
    for limit in process["rlimits"]:
        resource.setrlimit(getattr(resource, limit["type"]), (limit["soft"], limit["hard"]))
    for door in doors:
        write(door, "0")


def own_user_namespace(owner: int) -> None:
    """Enter a new user namespace, which belongs to a user of the host. OSError."""
    # With all capabilities if that is allowed: without them, some machines forbid making user namespaces.
    LIBRARY.prctl(sc.PR_SET_SECUREBITS, sc.SECBIT_NO_SETUID_FIXUP, 0, 0, 0)
    with contextlib.suppress(PermissionError):  # in a user namespace with one id, which has no other groups to act for
        os.setgroups([])
    os.setresgid(owner, owner, owner)
    os.setresuid(owner, owner, owner)
    sc.call("unshare", CLONE_NEWUSER)


# -- the init ----------------------------------------------------------------------------------------------------------


def _be_init(order: dict[str, Any], answer_fd: int, filters: Filters) -> NoReturn:
    config = order["config"]

    def prepare() -> tuple[dict[str, Any], float]:
        os.dup2(answer_fd, ANSWER_FD, inheritable=False)
        passing.close_all_but(ANSWER_FD)
        before = os.umask(0)
        _mount_all(config)
        os.umask(before)
        socket.sethostname(config["hostname"])
        _raise_loopback()
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        for number in range(3):
            os.dup2(null, number)
        os.close(null)
        load_filters(filters)
        return config["process"], time.monotonic() + _START_DEADLINE_S

    execute(prepare)


def _mount_all(config: dict[str, Any]) -> None:
    root = config["root"]["path"]
    _mount(None, "/", None, _MS_SLAVE | sc.MS_REC)
    _mount(root, root, None, sc.MS_BIND | sc.MS_REC)
    for one in config["mounts"]:
        _mount_one(root, one)
    for name in _DEVICES:
        place = f"{root}/dev/{name}"
        os.close(os.open(place, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        _mount(f"/dev/{name}", place, None, sc.MS_BIND)
    for target, name in _LINKS:
        os.symlink(target, f"{root}/dev/{name}")
    if os.path.exists("/proc/kcore"):
        os.symlink("/proc/kcore", f"{root}/dev/core")
    os.symlink("pts/ptmx", f"{root}/dev/ptmx")
    _change_root(root)
    _restrict("/", sc.MOUNT_ATTR_RDONLY)
    for path in config["linux"]["readonlyPaths"]:
        with contextlib.suppress(FileNotFoundError):
            _mount(path, path, None, sc.MS_BIND | sc.MS_REC)
            _restrict(path, sc.MOUNT_ATTR_RDONLY)
    for path in config["linux"]["maskedPaths"]:
        _mask_path(path)


def _mount_one(root: str, one: dict[str, Any]) -> None:
    place, options = root + one["destination"], one["options"]
    if one["type"] != "bind":
        os.makedirs(place, 0o755, exist_ok=True)
        flags = sum(_FLAGS.get(option, 0) for option in options)
        _mount(one["source"], place, one["type"], flags, ",".join(option for option in options if option not in _FLAGS))
        return
    _mount(one["source"], place, None, sc.MS_BIND)
    _restrict(place, sum(_FLAGS[option] for option in _RESTRICTIONS if option in options))
    _mount(None, place, None, _MS_PRIVATE | sc.MS_REC)


def _change_root(root: str) -> None:
    """pivot_root(2), the way without a directory for the old root."""
    old = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    os.chdir(root)
    sc.call("pivot_root", b".", b".")
    os.fchdir(old)
    os.close(old)
    _mount(None, ".", None, _MS_SLAVE | sc.MS_REC)
    sc.call("umount2", b".", sc.MNT_DETACH)
    os.chdir("/")


def _mask_path(path: str) -> None:
    try:
        _mount("/dev/null", path, None, sc.MS_BIND)
    except FileNotFoundError:
        pass  # this kernel has no such path
    except OSError as exc:
        if exc.errno != errno.ENOTDIR:
            raise
        _mount("tmpfs", path, "tmpfs", sc.MS_RDONLY)


def _mount(source: str | None, place: str, kind: str | None, flags: int, data: str | None = None) -> None:
    sc.call("mount", source, place, kind, flags, data)


def _restrict(place: str, attributes: int) -> None:
    attr = sc.MountAttr(attributes, 0, 0, 0)
    sc.call("mount_setattr", sc.AT_FDCWD, place, 0, ctypes.byref(attr), ctypes.sizeof(attr))


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
