"""The lazy lower layer: a cold snapshot's difference from its image as a directory for overlayfs, at once, through
FUSE.

One child process serves all layers. Its death hurts only processes that read through it (ENOTCONN at once): `start`
makes a new mount. The daemon looks up names below the mount with a deadline, because it would wait for its own child.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from snapshotd.errors import SandboxFailed, Unsupported
from snapshotd.fuse.child import MountProcess
from snapshotd.fuse.lazy_layers import layer_name
from snapshotd.kernel import mounts
from snapshotd.types import TreeID

_log = logging.getLogger(__name__)

OPEN_DEADLINE_S = 10.0


class LazyMount:
    """`command` starts the process (see server.serve_lazy); the mount point is added to it as its last argument.

    `mount_point` lies in a directory that only root may enter; it is made if missing. Thread-safe.
    """

    def __init__(self, command: Sequence[str], mount_point: Path, refusal: Unsupported | None = None) -> None:
        """`refusal`: the reason why FUSE cannot work here, if that is known: `start` raises it."""
        self._command = [*command, str(mount_point)]
        self._point = mount_point
        self._child: MountProcess | None = None
        self._refusal = refusal
        self._lock = threading.Lock()

    def start(self) -> MountProcess:
        """Mount, unless it is mounted and alive. The mount of a dead process is detached first. Takes about 0.5 s: a
        Python starts. Unsupported where FUSE does not work, at every later call, too; InternalError when the process is
        killed meanwhile."""
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            if self._child is None or not self._child.alive():
                self._end()
                self._point.mkdir(mode=0o700, parents=True, exist_ok=True)
                try:
                    self._child = MountProcess(self._command)
                except Unsupported as exc:
                    self._refusal = exc
                    _log.warning("cold snapshots start only when their files are written: %s", exc.message)
                    raise
            return self._child

    def open_layer(self, tree: TreeID, below: TreeID, shift: int) -> int:
        """The root of the changes from `below` to `tree`, as an O_PATH descriptor: a lower layer for
        `kernel.mounts.overlay`, to be put directly above the layer of `below`. The caller closes it. Ids are shifted by
        `shift` already: it must not be id-mapped. Mounts if need be, with the errors of `start`; SandboxFailed when the
        process does not answer in `OPEN_DEADLINE_S` (it is killed then), or cannot read the trees."""
        child = self.start()
        try:
            return self._open(child, layer_name(tree, below, shift))
        except OSError as exc:
            if exc.errno not in mounts.GONE or not child.alive():
                raise _unreadable(tree, exc) from exc
        child.kill()  # it had died unnoticed
        try:
            return self._open(self.start(), layer_name(tree, below, shift))
        except OSError as exc:
            raise _unreadable(tree, exc) from exc

    def server(self) -> MountProcess | None:
        """The process that serves now; None if there is none. Layers that another process had opened are gone."""
        child = self._child
        return child if child is not None and child.alive() else None

    def drop_layer(self, tree: TreeID, below: TreeID, shift: int) -> None:
        """Free the memory (here and in the kernel, some 2 KiB for each file that was looked at) of a layer that no
        sandbox is mounted on any more. Without this it is freed when the kernel needs memory. Harmless while the layer
        is in use, but then it frees nothing."""
        if (child := self.server()) is not None:
            child.drop(layer_name(tree, below, shift))

    def close(self) -> None:
        """Unmount and end the process. A process that still uses a layer gets ENOTCONN. Idempotent."""
        with self._lock:
            self._end()

    def _open(self, child: MountProcess, name: bytes) -> int:
        guard = threading.Timer(OPEN_DEADLINE_S, child.kill)
        guard.start()
        try:
            return os.open(
                os.fsencode(self._point) + b"/" + name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            )
        finally:
            guard.cancel()

    def _end(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None
        # Not the real path of the point itself: it may be dead.
        point = os.path.join(os.path.realpath(self._point.parent), self._point.name)
        for found in mounts.read_mountinfo():
            if found.point == os.fsencode(point) and found.fs_type.startswith("fuse"):
                mounts.detach(found.point)


def _unreadable(tree: TreeID, exc: OSError) -> SandboxFailed:
    return SandboxFailed(f"snapshot tree {tree[:12]} cannot be read through FUSE: {exc.strerror}; the log says why")
