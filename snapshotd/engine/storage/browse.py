"""Folders in which every stored snapshot shows: one child process each, which serves a FUSE mount in the caller's mount
namespace."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from snapshotd.engine.context import Context
from snapshotd.engine.storage.look import check_host_folder
from snapshotd.errors import Conflict, NotFound, Unsupported, UsageError
from snapshotd.fuse.child import MountProcess, detach_dead
from snapshotd.kernel import files, namespaces

_log = logging.getLogger(__name__)
_Place = tuple[tuple[int, int], Path]
"""The mount namespace that a directory is meant in, and the directory."""


class Browse:
    """Thread-safe. A mount ends when it is unmounted (here or by another process), when its process dies, or with the
    daemon."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._mounts: dict[_Place, MountProcess] = {}

    def mount(self, directory: Path, namespace_pid: int) -> None:
        """Show all snapshots below `directory`, by the paths of the process `namespace_pid`. UsageError, Conflict,
        Unsupported."""
        if not directory.is_absolute():
            raise UsageError(f"mount point {str(directory)!r} must be an absolute path")
        key = _place(directory, namespace_pid)
        seen = f"/proc/{namespace_pid}/root{directory}"
        with self._lock:
            known = self._mounts.get(key)
            if known is not None and known.alive():
                raise Conflict(f"snapshots are mounted on {str(directory)!r} already; `snapshotd umount` ends it")
            self._end(key)
            try:
                with files.closing_fd(os.open(seen, files.DIR_FLAGS & ~os.O_NOFOLLOW)) as fd:
                    check_host_folder(self._context, fd, directory)
                    if not files.is_empty_dir(fd):
                        raise UsageError(f"mount point {str(directory)!r} is not empty; name an empty directory")
            except OSError as exc:
                raise UsageError(
                    f"mount point {str(directory)!r} cannot be used: {exc.strerror}; name an empty directory"
                ) from exc
            self._mounts[key] = MountProcess([*self._context.child("browse"), str(directory), str(namespace_pid)])

    def unmount(self, directory: Path, namespace_pid: int) -> None:
        """End it, also where its process has died. NotFound when nothing is mounted there, or another daemon's that
        lives."""
        with self._lock:
            if not self._end(_place(directory, namespace_pid)):
                raise NotFound(f"this daemon has no snapshots mounted on {str(directory)!r}")

    def close(self) -> None:
        """End all. Idempotent."""
        with self._lock:
            for key in list(self._mounts):
                try:
                    self._end(key)
                except Conflict as exc:
                    _log.warning("%s", exc.message)

    def _end(self, key: _Place) -> bool:
        """End the mount at a place, and remove a dead mount of a killed process of this daemon or an earlier one.
        Returns True if there was a mount. Caller holds the lock."""
        (namespace, directory), child = key, self._mounts.pop(key, None)
        if child is not None:
            child.close()
        try:
            return namespaces.in_known_mount_namespace(namespace, lambda: detach_dead(directory)) or child is not None
        except ProcessLookupError:
            return True  # the mount went with its namespace
        except OSError as exc:
            raise Conflict(
                f"the mount on {str(directory)!r} cannot be taken away: {exc.strerror}; `umount -l` it"
            ) from exc


def _place(directory: Path, pid: int) -> _Place:
    try:
        return namespaces.mount_namespace_of(pid), directory
    except PermissionError as exc:
        raise Unsupported(
            "an ordinary user's daemon cannot mount anything where the user's programs see it: use `snapshotd restore`, or `snapshotd cat`"
        ) from exc
    except OSError as exc:
        raise UsageError(f"process {pid}, in whose view of the files it should be mounted, is gone") from exc
