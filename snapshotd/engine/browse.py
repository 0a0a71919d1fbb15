"""Folders in which every stored snapshot shows: one child process each, which serves a FUSE mount in the caller's mount namespace."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from snapshotd.engine.context import Context
from snapshotd.errors import Conflict, NotFound, UsageError
from snapshotd.fuse.child import Child


class Browse:
    """Thread-safe. A mount ends when it is unmounted here or by anybody else, when its process dies, or with the daemon."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._mounts: dict[tuple[int, Path], Child] = {}

    def mount(self, directory: Path, namespace_pid: int) -> None:
        """Show all snapshots below `directory`, by the paths of the process `namespace_pid`. UsageError, Conflict, Unsupported."""
        if not directory.is_absolute():
            raise UsageError(f"mount point {str(directory)!r} must be an absolute path")
        key = (_namespace(namespace_pid), directory)
        seen = f"/proc/{namespace_pid}/root{directory}"
        with self._lock:
            known = self._mounts.get(key)
            if known is not None and known.alive():
                raise Conflict(f"snapshots are mounted on {str(directory)!r} already; `snapshotd umount` ends it")
            try:
                with os.scandir(seen) as entries:
                    if next(entries, None) is not None:
                        raise UsageError(f"mount point {str(directory)!r} is not empty; name an empty directory")
            except OSError as exc:
                raise UsageError(f"mount point {str(directory)!r} cannot be used: {exc.strerror}; name an empty directory") from exc
            if known is not None:
                known.close()
            self._mounts[key] = Child([*self._context.child("browse"), str(directory), str(namespace_pid)])

    def unmount(self, directory: Path, namespace_pid: int) -> None:
        """End it. NotFound when nothing is mounted there by this daemon."""
        with self._lock:
            child = self._mounts.pop((_namespace(namespace_pid), directory), None)
        if child is None:
            raise NotFound(f"this daemon has no snapshots mounted on {str(directory)!r}")
        child.close()

    def close(self) -> None:
        """End all. Idempotent."""
        with self._lock:
            children, self._mounts = list(self._mounts.values()), {}
        for child in children:
            child.close()


def _namespace(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/mnt").st_ino
    except OSError as exc:
        raise UsageError(f"process {pid}, in whose view of the files it should be mounted, is gone") from exc
