"""Stops every sandbox of the daemon at once, and keeps it so until the node may act again."""

from __future__ import annotations

import logging
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from weakref import WeakSet

from snapshotd.errors import SandboxFailed
from snapshotd.kernel.holding.held import HeldMembers
from snapshotd.kernel.holding.members import Members

_AT_ONCE = 16
"""Threads that freeze: each waits until the kernel has stopped the tasks of one sandbox."""
_log = logging.getLogger(__name__)


class Freezer:
    """Every sandbox from its first process on, spare ones, too. Frozen at first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: WeakSet[HeldMembers] = WeakSet()
        self._frozen = True

    def hold(self, members: Members) -> HeldMembers:
        """Freeze and thaw a new sandbox with the others from now on. SandboxFailed: it is to be frozen, and cannot be."""
        held = HeldMembers(members)
        with self._lock:
            self._all.add(held)
            frozen = self._frozen
        if frozen:
            held.hold()
        return held

    def everything(self) -> list[HeldMembers]:
        """All sandboxes that have not ended, and perhaps some that have."""
        with self._lock:
            return list(self._all)

    def freeze(self) -> int:
        """Stop everything. A sandbox with a process that does not stop is killed. Returns the number of those stopped."""
        with self._lock:
            self._frozen = True
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="freeze") as pool:
            return sum(pool.map(_hold_or_kill, self.everything()))

    def thaw(self) -> None:
        """Let all sandboxes go on."""
        with self._lock:
            self._frozen = False
        for held in self.everything():
            held.let_go()


def _hold_or_kill(held: HeldMembers) -> bool:
    try:
        held.hold()
    except SandboxFailed as exc:
        with suppress(SandboxFailed):  # it is gone
            for pid in held.members():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _log.error("a sandbox is killed because it cannot be frozen: %s", exc.message)
        return False
    return True
