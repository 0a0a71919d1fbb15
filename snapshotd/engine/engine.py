"""The engine: a service for each subject, and its life. Put together in daemon/wiring.py.

The daemon's API is a thin skin over the services; the CLI and the client say the same words over HTTP. `ref` is a user's
name for a thing: a tag, a name, or a unique prefix of an id. Snapshot refs accept trajectories (their head).

Errors: the classes of `errors.py`; every method that takes a ref may raise NotFound and Ambiguous. Nothing has changed
when a method raises, unless it says so.
Concurrency: every method may be called from any thread.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from snapshotd.engine.base import Event
from snapshotd.engine.context import Context
from snapshotd.engine.experiments.service import ExperimentService
from snapshotd.engine.folder_expiry import FolderExpiry
from snapshotd.engine.folders.folders import Folders
from snapshotd.engine.journal.keyvalue import KeyValueStore
from snapshotd.engine.requests import Requests
from snapshotd.engine.runs import recover
from snapshotd.engine.runs.file_calls import FileCalls
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.engine.sandbox.attach import Survivor
from snapshotd.engine.sandbox.background import Background
from snapshotd.engine.sandbox.disk_watch import DiskWatch
from snapshotd.engine.sandbox.idle import IdleWatch
from snapshotd.engine.search.filling import Filling
from snapshotd.engine.search.service import FindService
from snapshotd.engine.services.approvals import ApprovalService
from snapshotd.engine.services.branching import BranchingService
from snapshotd.engine.services.fleet import FleetService
from snapshotd.engine.services.images import ImageService
from snapshotd.engine.services.journal import JournalService
from snapshotd.engine.services.runs import RunService
from snapshotd.engine.services.snapshots import SnapshotService
from snapshotd.engine.services.stats import StatsService
from snapshotd.engine.services.storage import StorageService
from snapshotd.engine.storage.archive_queue import Archive
from snapshotd.engine.storage.cold import Cold
from snapshotd.engine.storage.evict import Disposal
from snapshotd.engine.storage.upkeep import Upkeep
from snapshotd.errors import SnapshotdError, UsageError
from snapshotd.kernel.abilities import weaker
from snapshotd.kernel.memory import available_bytes
from snapshotd.layers.filesystem import release
from snapshotd.types import TrajectoryID

if TYPE_CHECKING:
    from snapshotd.engine.node.node import FleetNode

STEP_BYTES = 256 << 10
"""With less space than this even a step that changes nothing may fail: a layer's directories, an output, the catalog's
log."""


class EnginePart(Protocol):
    def close(self) -> None: ...


class Life:
    """The engine's beginning and end, and its state in between."""

    def __init__(
        self,
        context: Context,
        sessions: Sessions,
        cold: Cold,
        archive: Archive,
        background: Background,
        disposal: Disposal,
        upkeep: Upkeep,
        experiments: ExperimentService,
        filling: Filling,
        policy_file: str,
        ends: Sequence[EnginePart],
        node: FleetNode | None = None,
    ) -> None:
        """`ends`: what is closed at the end, in this order; the sessions among it take their last snapshots. `node`: of a
        fleet."""
        self._context, self._catalog, self._sessions = context, context.catalog, sessions
        self._cold, self._archive, self._background = cold, archive, background
        self._disposal, self._upkeep, self._experiments, self._filling = disposal, upkeep, experiments, filling
        self._policy_file, self._ends, self._node = policy_file, ends, node
        self._watches: tuple[DiskWatch | IdleWatch | FolderExpiry, ...] = ()
        self._closed = threading.Event()

    def start(self, survivors: list[Survivor]) -> None:
        """Begin to work, and go on with the sandboxes of an earlier daemon that recovery has found."""
        sweep = self._disposal.sweep_what_was_held
        self._context.store.on_unneeded(lambda: self._background.run_later(sweep))
        self._archive.start(self._end_batch)
        self._store_what_has_no_layers()
        self._sessions.go_on(survivors)
        self._background.go_on(snapshot for snapshot in self._catalog.snapshots.all() if snapshot.files is None)
        idle = IdleWatch(self._sessions.live, lambda sandbox: self._sessions.stop(sandbox.trajectory, only=sandbox))
        expiry = FolderExpiry(self._upkeep, self._context.config.folder_prune_s)
        self._watches = (idle, DiskWatch(self._context, self._sessions.launched), expiry)
        if self._node is not None:
            self._node.start()
        self._experiments.start()
        self._filling.start()

    def _end_batch(self) -> None:
        """Snapshots were stored."""
        if self._node is not None:
            self._node.publisher.hear_of_stored()
        self._disposal.evict()

    def _store_what_has_no_layers(self) -> None:
        """Runs before the first request, for snapshots captured on a layer that was still being rebuilt when the daemon
        died. The files below their own layers are in the repository alone, so these snapshots cannot be read until they
        are stored."""
        if all(
            self._cold.is_hot(self._catalog.snapshots.get(snapshot)) for snapshot in self._catalog.snapshots.unstored()
        ):
            return
        try:
            self._archive.wait()
        except SnapshotdError:
            return  # the archive has logged it, and tries again

    def status(self) -> dict[str, Any]:
        """Facts for `doctor` and `daemon --status`: versions, state directory, layer file system, runtimes, counts."""
        context = self._context
        return {
            "instance": context.instance,
            "state_dir": str(context.state_dir),
            "mode": str(context.mode),
            "weaker": weaker(context.mode, context.store.host),
            "layer_kind": context.store.kind,
            "free_bytes": context.store.free_bytes(),
            "free_memory_bytes": available_bytes(),
            "processor_count": len(os.sched_getaffinity(0)),
            "runtimes": {name: runtime.unavailable() or "available" for name, runtime in context.runtimes.items()},
            "trajectory_count": len(self._catalog.trajectories.list()),
            "sandbox_count": len(self._sessions.live()),
            "policy_file": self._policy_file,
            "image_count": len(context.images.list()),
            "durability": self._durability(),
            **(self.node_facts() or {}),
            "settings": context.config.without_secrets(),
        }

    def node_facts(self) -> dict[str, Any] | None:
        """Facts about the node of a fleet that the daemon is: its state, lease and lag; None: it is alone."""
        return None if self._node is None else self._node.status()

    def publish(self, trajectory: TrajectoryID) -> None:
        """Return when every snapshot so far of a trajectory is published. UsageError: this daemon is no node of a fleet;
        Conflict: it has snapshots here that are not published, and another node owns it by now; Unavailable: they cannot be yet."""
        if self._node is None:
            raise UsageError("this daemon publishes nothing: it is no node of a fleet (SNAPSHOTD_FLEET)")
        self._node.publish(trajectory)

    def _durability(self) -> str:
        """`ok`, or the reason why snapshots cannot be taken or stored."""
        context = self._context
        try:
            context.store.proof.check()
        except SnapshotdError as exc:
            return exc.message
        if self._archive.failure is not None:
            return self._archive.failure.message
        if self._archive.stuck:
            return self._archive.stuck
        for place in (context.store.root, context.state_dir):
            if _free_bytes(place) < STEP_BYTES:
                return (
                    f"no step can be captured: the disk of {place} is full; free space, remove trajectories with "
                    "`snapshotd rm`, or `snapshotd prune`"
                )
        return "ok"

    def listen(self, told: Callable[[Event], object]) -> Callable[[], None]:
        """Call `told` with each event for outside tools, from now on, of all trajectories. It is called in the thread in which
        the event happens, and must return at once. Returns what ends that."""
        return self._context.events.watch.listen(told)

    def close(self) -> None:
        """Stop every sandbox (with a last snapshot each) and release everything. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._experiments.close()
        if self._node is not None:
            self._node.close()
        for watch in self._watches:
            watch.close()
        for part in self._ends:
            part.close()
        recover.mark_clean(self._context)
        self._context.secrecy.vault.close()
        self._context.spool.close()
        self._context.repo.close()
        self._catalog.close()
        release(self._context.store)
        for directory in (self._context.run_dir, self._context.share_dir):
            shutil.rmtree(directory, ignore_errors=True)  # files that stay do no harm: the next start makes it anew


@dataclass(frozen=True, slots=True)
class Engine:
    """The services. `life`: nothing else may be asked before it has started, or when it is closed."""

    runs: RunService
    snapshots: SnapshotService
    files: FileCalls
    branching: BranchingService
    experiments: ExperimentService
    journal: JournalService
    approvals: ApprovalService
    values: KeyValueStore
    folders: Folders
    storage: StorageService
    stats: StatsService
    images: ImageService
    requests: Requests
    find: FindService
    fleet: FleetService
    life: Life


def _free_bytes(path: Path) -> int:
    """Bytes that a file system still takes from users other than root."""
    st = os.statvfs(path)
    return st.f_bavail * st.f_frsize
