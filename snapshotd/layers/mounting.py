"""How the layers of a directory are mounted on this host: its abilities, and the layers as containers with other ids see
them.

One mount for all layers and each map of ids, attached beside the directory: before Linux 6.15 overlayfs takes no layer of
a mount that is attached nowhere. It is seen in this process's mount namespace, and ends with it.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from snapshotd.kernel import mounts, namespaces
from snapshotd.kernel.abilities import Abilities, Marks
from snapshotd.kernel.files import closing_fd
from snapshotd.kernel.probes import needed
from snapshotd.types import IdMap

PATH_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class LayerMounts:
    """See the module's text. `root`: the layer directory; `fd`: the caller's descriptor of it; `host` None: it is still to
    be probed. Thread-safe."""

    def __init__(self, root: Path, fd: int, host: Abilities | None, marks: Marks) -> None:
        """`marks`: those of the layers where the host is not known."""
        self.marks = marks if host is None else host.overlay_marks
        self.root = root
        self._fd, self._host = fd, host
        self._lock = threading.Lock()
        self._mapped: dict[IdMap, int] = {}

    def close(self) -> None:
        """Take the mounts away, also those that a process which was killed has left in this namespace. Idempotent."""
        with self._lock:
            for fd in self._mapped.values():
                os.close(fd)
            self._mapped.clear()
            for place in self.root.parent.glob(f"{self.root.name}.as-*"):
                while os.path.ismount(place):
                    mounts.detach(os.fsencode(place))

    @property
    def host(self) -> Abilities:
        """The abilities with which layers are mounted here."""
        with self._lock:
            if self._host is None:
                self._host = needed.probe(self.root)
            return self._host

    def base(self, id_map: IdMap | None) -> int:
        """The descriptor of the layer directory: itself, where ids are the same, or its mount with these ids, which is made
        at its first use. It stays this object's. OSError."""
        if id_map is None or id_map.base == 0:
            return self._fd
        with self._lock:
            if id_map not in self._mapped:
                self._mapped[id_map] = self._mount(id_map)
            return self._mapped[id_map]

    def _mount(self, id_map: IdMap) -> int:
        place = self.root.with_name(f"{self.root.name}.as-{id_map.base}")
        place.mkdir(mode=0o700, exist_ok=True)
        with closing_fd(namespaces.user_namespace(id_map)) as userns:
            fd = mounts.id_mapped_clone(self._fd, userns)
        try:
            with closing_fd(os.open(place, PATH_FLAGS)) as spot:
                mounts.attach(fd, spot)
        except BaseException:
            os.close(fd)
            raise
        return fd
