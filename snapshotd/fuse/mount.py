"""Mounting, serving and unmounting one file system, in a process of its own. It talks with the process that started it
by three streams:

    standard input    closes, also when its holder was killed: the mount goes and the process ends
                      a line: the name of an entry of the mount's root that is not used any more. The kernel is asked to forget it and all
                      below it, which frees memory there and here
    standard output   `mounted`, once, when the mount is there; or `failed <error> <message>`
    standard error    the log

Not PR_SET_PDEATHSIG: that fires when the *thread* ends that started the process, and the daemon starts it from passing
threads.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pyfuse3
import trio

from snapshotd.errors import SnapshotdError, Unsupported, UsageError
from snapshotd.fuse.child import TYPE
from snapshotd.fuse.folders import Folder
from snapshotd.fuse.operations import TreeOperations
from snapshotd.kernel import mounts, namespaces

_log = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_SAID_BYTES = 2000
_WHO = (
    "only root's daemon can, where `snapshotd doctor` finds FUSE; `snapshotd cat`, `diff` and `restore` read snapshots "
    "without a mount"
)
READ_AHEAD_KB = 1024
"""With the kernel's default of 128 one request would become eight."""
_MAX_TASKS = 64
"""Requests in work at once. Each has a buffer of 1 MiB; a request without data to write touches one page of it."""


class Mounted:
    """A mount that this process serves, in its own mount namespace or in that of process `namespace_pid`.

    The namespace is not held: it would live as long as this process, with the mount in it, when all its own processes
    are gone.
    """

    def __init__(
        self, top: Folder, mount_point: Path, options: set[str], *, enable_acl: bool, namespace_pid: int | None
    ) -> None:
        self._namespace: tuple[int, int] | None = None
        if namespace_pid is not None:
            try:
                self._namespace = namespaces.mount_namespace_of(namespace_pid)
            except OSError as exc:
                raise UsageError(
                    f"there is no process {namespace_pid} whose mount namespace could be entered: {exc.strerror}"
                ) from exc
        self._point = Path()
        self._device = ""
        self._operations = TreeOperations(top, enable_acl=enable_acl)
        try:
            self._within(lambda: self._mount(mount_point, options))
        except PermissionError as exc:
            raise Unsupported(f"snapshots cannot be mounted here: {exc.strerror}; {_WHO}") from exc

    def serve(self) -> None:
        """Serve until the mount is unmounted, standard input closes, or SIGTERM or SIGINT comes."""
        threading.Thread(target=self._follow_parent, name="parent", daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        try:
            trio.run(pyfuse3.main, 1, _MAX_TASKS)
        except OSError as exc:
            if exc.errno not in (errno.ENODEV, errno.ECONNABORTED):  # read errors after unmounting and after an abort
                raise
        finally:
            self.detach()
            pyfuse3.close(unmount=False)

    def detach(self) -> None:
        """Take the mount away if it is still there; a process that uses it keeps it until this process ends. Never
        another mount."""
        try:
            self._within(self._detach_here)
        except ProcessLookupError:
            pass  # the mount went with its namespace
        except OSError as exc:
            _log.error("cannot unmount %s: %s", self._point, exc)

    def _end(self, *_: object) -> None:
        """Take the mount away, and end: the other threads cannot delay it."""
        self.detach()
        os._exit(0)

    def _follow_parent(self) -> None:
        waiting = b""
        while piece := os.read(0, 4096):
            *names, waiting = (waiting + piece).split(b"\n")
            for name in names:
                try:
                    pyfuse3.invalidate_entry(pyfuse3.ROOT_INODE, name)
                except OSError as exc:
                    if exc.errno != errno.ENOENT:  # the kernel does not know it (any more)
                        _log.warning("the kernel does not forget %s: %s", ascii(name), exc)
        self._end()

    def _within(self, action: Callable[[], T]) -> T:
        return action() if self._namespace is None else namespaces.in_known_mount_namespace(self._namespace, action)

    def _mount(self, mount_point: Path, options: set[str]) -> None:
        try:
            self._point = mount_point.resolve(strict=True)
            os.listdir(self._point)
        except OSError as exc:
            raise UsageError(
                f"cannot mount on {str(mount_point)!r}: {exc.strerror}; give an existing directory"
            ) from exc
        try:
            pyfuse3.init(self._operations, str(self._point), options)
        except RuntimeError as exc:
            raise Unsupported(f"cannot mount a FUSE file system on {self._point}: {exc}; {_WHO}") from exc
        self._device = next((m.device for m in reversed(self._here()) if m.fs_type.startswith("fuse")), "")
        try:
            Path(f"/sys/class/bdi/{self._device}/read_ahead_kb").write_text(str(READ_AHEAD_KB))
        except OSError as exc:
            _log.info("read-ahead stays at the kernel's default: %s", exc)

    def _here(self) -> list[mounts.MountPoint]:
        return [m for m in mounts.read_mountinfo("thread-self") if m.point == os.fsencode(self._point)]

    def _detach_here(self) -> None:
        there = self._here()
        if there and there[-1].device == self._device:
            mounts.detach(os.fsencode(self._point))


def serve(
    top: Folder, mount_point: Path, *, options: set[str], enable_acl: bool = False, namespace_pid: int | None = None
) -> None:
    """Mount `top` on a directory and serve it until it ends (see the module's text).

    Raises UsageError (no such directory or process), Unsupported (no FUSE). Only one per process: libfuse keeps one
    session.
    """
    common = {f"fsname={TYPE}", f"subtype={TYPE}", "ro", "noatime"}
    try:
        mounted = Mounted(top, mount_point, options | common, enable_acl=enable_acl, namespace_pid=namespace_pid)
    except SnapshotdError as exc:
        _say(f"failed {exc.code} {' '.join(exc.message.split())}")
        raise
    except OSError as exc:
        _say(f"failed {Unsupported('').code} a mount could not be made: {exc.strerror}; the log says more")
        raise
    try:
        _say("mounted")
    except BrokenPipeError:
        mounted.detach()
        return  # the parent process has gone
    except OSError:
        mounted.detach()
        raise
    mounted.serve()


def _say(line: str) -> None:
    os.write(sys.stdout.fileno(), line.encode("utf-8", "replace")[:_MAX_SAID_BYTES] + b"\n")
