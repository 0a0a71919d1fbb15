"""The lease of a driver: its branches idle out where it does not renew them, so none outlives a driver that was killed."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterable

from snapshotd.api.wire import QUEUE_MAX
from snapshotd.client.fleet.base import KnownNodes
from snapshotd.client.fleet.branch import Branch
from snapshotd.errors import SnapshotdError
from snapshotd.fleet.base import NodeID

LEASE_S = 60.0
"""A branch is stopped, with a last snapshot, so long after its driver has gone."""
_RENEWALS = 4
"""In the time of a lease: three of them may fail."""


class DriverLease:
    """Keeps branches alive from the first one on, until it is closed."""

    def __init__(self, nodes: KnownNodes, lease_s: float) -> None:
        self.lease_s = lease_s
        self._nodes, self._branches = nodes, list[Branch]()
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="fleet-lease", daemon=True)

    def add(self, branches: Iterable[Branch]) -> None:
        with self._lock:
            if not self._branches and not self._thread.is_alive() and not self._closing.is_set():
                self._thread.start()
            self._branches += branches

    def remove(self, branches: Iterable[Branch]) -> None:
        with self._lock:
            gone = set(map(id, branches))
            self._branches = [branch for branch in self._branches if id(branch) not in gone]

    def branches(self) -> list[Branch]:
        with self._lock:
            return list(self._branches)

    def close(self) -> None:
        """Renew nothing any more. Idempotent."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        while not self._closing.wait(self.lease_s / _RENEWALS):
            there: defaultdict[NodeID, list[str]] = defaultdict(list)
            for branch in self.branches():
                there[branch.node].append(branch.id)
            for node, trajectories in there.items():
                with contextlib.suppress(SnapshotdError):  # the next renewal may get through
                    for first in range(0, len(trajectories), QUEUE_MAX):
                        self._nodes.client(node).keep_alive(trajectories[first : first + QUEUE_MAX])
