"""All ways out of a daemon's sandboxes: a thread hears what they refuse, and starts a proxy that was killed again."""

from __future__ import annotations

import logging
import os
import select
import threading

from snapshotd.egress.proxy import Holder
from snapshotd.egress.way_out import WayOut
from snapshotd.network import HostRules
from snapshotd.types import ContainerID, short

_log = logging.getLogger(__name__)
_KEY = "way-out"
_AGAIN_MS = 1000
"""A proxy that dies at once is started again only so often."""


class WaysOut:
    """The ways out of sandboxes that run. Thread-safe. The thread starts with the first."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._lock = threading.Lock()
        self._watched: list[WayOut] = []
        self._thread: threading.Thread | None = None
        self._woken_r, self._woken_w = -1, -1
        self._closed = False

    def adopt(self, way_out: WayOut, container: ContainerID) -> list[str]:
        """Watch one from now on, until it is closed, and have it outlive this daemon. Returns the keys under which the
        holder has it. SandboxFailed."""
        keys = way_out.keep(self._holder, f"{container}.{_KEY}")
        with self._lock:
            self._watched.append(way_out)
            if self._thread is None and not self._closed:
                self._woken_r, self._woken_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                self._thread = threading.Thread(target=self._watch, name="ways-out")
                self._thread.start()
        self._wake()
        return keys

    def find(self, container: ContainerID, pid: int, rules: HostRules) -> tuple[WayOut, list[str]]:
        """The way out of a sandbox that an earlier daemon has left, or a new one for it, with these rules in force; and the
        keys as of `adopt`. SandboxFailed."""
        name = short(container)
        found = WayOut.find(name, pid, self._holder, f"{container}.{_KEY}") or WayOut.make(name, pid)
        try:
            found.apply(rules)
            return found, self.adopt(found, container)
        except BaseException:
            found.close()
            raise

    def close(self) -> None:
        """Watch no more. Idempotent."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._wake()
            thread.join()
            os.close(self._woken_r)
            os.close(self._woken_w)

    def _wake(self) -> None:
        try:
            os.write(self._woken_w, b"\0")
        except (BlockingIOError, OSError):
            pass  # it is awake, or has ended

    def _watch(self) -> None:
        while not self._closed:
            with self._lock:
                self._watched = [one for one in self._watched if _mends(one)]
                watched = list(self._watched)
            poller, patience_ms = select.poll(), None
            poller.register(self._woken_r, select.POLLIN)
            for one in watched:
                if (fd := one.control_fd) is not None:
                    poller.register(fd, select.POLLIN)
                else:
                    patience_ms = _AGAIN_MS
            poller.poll(patience_ms)
            try:
                os.read(self._woken_r, 4096)
            except BlockingIOError:
                pass


def _mends(one: WayOut) -> bool:
    try:
        return one.mend()
    except Exception:  # noqa: BLE001 - the others must be watched on
        _log.warning("a way out of a sandbox cannot be mended", exc_info=True)
        return False
