"""Members of a sandbox that can be held: they stand still until `let_go`, also when `freeze` and `thaw` come in
between."""

from __future__ import annotations

import threading

from snapshotd.kernel.holding.members import Members


class HeldMembers:
    """See the module's text; `Members` otherwise. Thread-safe. Equal only to itself."""

    def __init__(self, inner: Members) -> None:
        self.inner = inner
        self._lock = threading.Lock()
        self._moments = 0
        """Number of `freeze` without its `thaw`."""
        self._held = False

    def processes(self) -> list[int]:
        return self.inner.processes()

    def members(self) -> list[int]:
        return self.inner.members()

    def freeze(self) -> None:
        with self._lock:
            if not self._held and not self._moments:
                self.inner.freeze()
            self._moments += 1

    def thaw(self) -> None:
        with self._lock:
            self._moments = max(0, self._moments - 1)
            if not self._held and not self._moments:
                self.inner.thaw()

    def hold(self) -> None:
        """Stop every process until `let_go`. SandboxFailed: one cannot be stopped (they go on), or the container is gone."""
        with self._lock:
            if not self._held and not self._moments:
                self.inner.freeze()
            self._held = True

    def let_go(self) -> None:
        """Let every process go on, unless a `freeze` is under way. Not an error when they were not held."""
        with self._lock:
            self._held = False
            if not self._moments:
                self.inner.thaw()
