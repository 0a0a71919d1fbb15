"""The consequences of a node's lease: sandboxes of trajectories that were taken over end, a draining node hands over, and a
trajectory that is taken over comes with its history. See `base.py`."""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from snapshotd.api.service import NodeStats
from snapshotd.engine.context import Context
from snapshotd.engine.node.base import Publisher
from snapshotd.engine.node.rights import NodeParts, NodeRights
from snapshotd.engine.node.takeover import NodeTakeover
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.errors import NotFound, SnapshotdError
from snapshotd.fleet.base import OwnedTrajectory, Taken
from snapshotd.fleet.places import NodeRoom
from snapshotd.kernel.memory import available_bytes
from snapshotd.types import TrajectoryID, TrajectoryStatus

STEP_END_S = 60.0
"""A draining node waits so long for the end of the calls and commands that run in a sandbox, and then cuts them off."""
PUBLISHED_S = 300.0
LOOK_S = 2.0
"""The other nodes are looked at so often, whoever asks."""
_POLL_S = 0.05
_log = logging.getLogger(__name__)


class FleetNode:
    """See the module's text. Threads: `fleet-node` does what takes time, one thing after the other."""

    def __init__(
        self,
        context: Context,
        rights: NodeRights,
        sessions: Sessions,
        publisher: Publisher,
        takeover: NodeTakeover,
        starting: Callable[[], int],
    ) -> None:
        """`starting`: the number of sandboxes that are being launched."""

        self._context, self._catalog, self._rights, self._sessions = context, context.catalog, rights, sessions
        self.publisher, self._takeover, self._starting = publisher, takeover, starting
        self._looking, self._look_again = threading.Lock(), 0.0
        self._seen: tuple[NodeStats, ...] = ()
        self._changed = threading.Condition()
        self._closing = False
        self._settled: set[OwnedTrajectory] = set()
        """Rows of other nodes' trajectories without unpublished snapshots here."""
        self._told = False
        """A renewal came that the thread has not looked at."""
        self._thread = threading.Thread(target=self._work, name="fleet-node")

    def start(self) -> None:
        """Begin. The sandboxes of an earlier daemon are found."""
        self._rights.attend(NodeParts(self.room, self.end_lost, self._tell, self._take_over, self.publisher.catch_up))
        self._rights.note_incomplete(filter(self._takeover.is_incomplete, self._rights.claims()))
        self.publisher.start()
        self._thread.start()

    def publish(self, trajectory: TrajectoryID) -> None:
        """Return when every snapshot so far of a trajectory is published. Conflict, Unavailable."""
        self.publisher.publish(trajectory, PUBLISHED_S)

    def close(self) -> None:
        """Idempotent. The publisher and the lease stay; the wiring closes them when every sandbox has ended."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def status(self) -> dict[str, Any]:
        """Facts for `doctor` and `daemon --status`."""
        status = self._rights.status()
        failure = status["node_failure"] or self.publisher.why_behind()
        return {**status, "node_failure": failure, "unpublished_count": self.publisher.lag()}

    # -- facts ---------------------------------------------------------------------------------------------------------

    def describe_fleet(self) -> tuple[NodeStats, ...]:
        """All nodes of the fleet, at most `LOOK_S` old. Without a lease or a database: as last seen. Thread-safe."""
        with self._looking:
            lease, now = self._rights.lease, time.monotonic()
            if now >= self._look_again and lease.may_act():
                try:
                    self._seen = lease.fleet.describe_nodes()
                except SnapshotdError as exc:
                    _log.info("the fleet's nodes are shown as they were: %s", exc.message)
                self._look_again = now + LOOK_S
            return self._seen

    def room(self) -> NodeRoom:
        """The node as placement is to see it."""
        config = self._context.config
        limits = [sandbox.trajectory.spec.limits for sandbox in self._sessions.live() if not sandbox.closed]
        free = available_bytes()
        if config.node_memory_bytes is not None:
            free = min(free, config.node_memory_bytes - sum(one.memory_bytes for one in limits))
        return NodeRoom(
            self._rights.lease.facts.node,
            address=self._rights.lease.facts.address,
            architecture=platform.machine(),
            abilities=frozenset(name for name, it in self._context.runtimes.items() if it.unavailable() is None),
            cpus=float(config.node_cpus or os.cpu_count() or 1),
            promised_cpus=sum(one.cpus for one in limits),
            free_bytes=max(0, free),
            starting=self._starting(),
            starting_most=config.node_starting,
            warm=frozenset(image.id for image in self._context.images.list()),
            unpublished=self.publisher.lag(),
        )

    # -- what was taken over from this node ----------------------------------------------------------------------------

    def end_lost(self, trajectories: Sequence[TrajectoryID]) -> None:
        """End the frozen sandboxes of trajectories that other nodes own by now, without letting anything in them go on."""
        for trajectory in trajectories:
            sandbox = self._sessions.find(trajectory)
            if sandbox is None:
                continue
            _log.error("trajectory %s was taken over by another node: its sandbox ends here", trajectory)
            try:
                self._sessions.discard(sandbox)
                self._catalog.trajectories.set_status(trajectory, TrajectoryStatus.INTERRUPTED)
            except (SnapshotdError, OSError) as exc:
                _log.error("the sandbox of %s is left behind, frozen: %s", trajectory, exc)
        self._tell()

    def _branch_off(self) -> None:
        rows = set(self._rights.elsewhere())
        self._settled &= rows
        for row in rows - self._settled:
            if self._closing:
                return
            if self._sessions.find(row.trajectory) is not None:
                continue
            side = self._takeover.branch_off(row) if self._takeover.count_unpublished(row.trajectory) else None
            self._settled.add(row)
            if side is not None:
                _log.warning(
                    "the snapshots of %s that this node could not publish are side branch %s",
                    row.trajectory,
                    side.trajectory,
                )

    # -- what this node takes over -------------------------------------------------------------------------------------

    def _take_over(self, row: OwnedTrajectory, taken: Taken) -> None:
        if self._takeover.count_unpublished(row.trajectory):
            self._takeover.branch_off(row)
        self._takeover.bring(row.trajectory)
        self._takeover.intend(taken)
        self._catalog.trajectories.set_status(row.trajectory, TrajectoryStatus.INTERRUPTED)

    # -- draining ------------------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        for trajectory in sorted(self._rights.claims()):
            with self._changed:
                if self._closing or not self._rights.lease.draining:
                    return
            self._hand_over_one(trajectory)

    def _hand_over_one(self, trajectory: TrajectoryID) -> None:
        try:
            record = self._catalog.trajectories.get(trajectory)
        except NotFound:  # removed here, or of a state directory that was lost
            self._rights.hand_over(trajectory)
            return
        self._wait_for_step_end(trajectory)
        self._sessions.stop(record)
        if (
            record.agent is not None
            and self._catalog.trajectories.get(trajectory).status is not TrajectoryStatus.FINISHED
        ):
            self._catalog.trajectories.set_status(trajectory, TrajectoryStatus.INTERRUPTED)
        self.publisher.publish(trajectory, PUBLISHED_S)
        self._rights.hand_over(trajectory)
        _log.info("trajectory %s is handed over", trajectory)

    def _wait_for_step_end(self, trajectory: TrajectoryID) -> None:
        deadline = time.monotonic() + STEP_END_S
        while (sandbox := self._sessions.find(trajectory)) is not None and not sandbox.closed:
            busy = bool(sandbox.use.commands) or bool(self._sessions.open_calls(sandbox))
            if not busy or time.monotonic() > deadline:
                return
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, _POLL_S):
                    return

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        with self._changed:
            self._told = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._told or self._closing)
                if self._closing:
                    return
                self._told = False
            for action in (self._branch_off, *([self._hand_over] if self._rights.lease.draining else [])):
                try:
                    action()
                except (SnapshotdError, OSError) as exc:
                    _log.warning("node %s tries again after its next renewal: %s", self._rights.lease.facts.node, exc)
