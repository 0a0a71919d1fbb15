"""Starting sandboxes: containers are prepared ahead (warm), then pivoted into a snapshot's stack.

A prepared container is generic: it knows no image and no trajectory. So after one was taken, the next of the same kind
is made in the background, and a fork costs a pivot instead of a container start.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from snapshotd.egress.watching import WaysOut
from snapshotd.egress.way_out import WayOut
from snapshotd.engine import identity
from snapshotd.engine.context import Context
from snapshotd.engine.identity import SandboxIdentity
from snapshotd.engine.protocol.agent_handler import HandlerSlot
from snapshotd.engine.protocol.agent_protocol import AgentServer
from snapshotd.engine.sandbox import folder_root
from snapshotd.engine.sandbox.attach import Survivor
from snapshotd.engine.sandbox.folder_root import FolderRoot
from snapshotd.engine.sandbox.live import Survival
from snapshotd.engine.sandbox.root import LayerSources, RootParts, SandboxRoot, enter, lazy_server
from snapshotd.engine.sandbox.sandbox import Sandbox, SandboxUse
from snapshotd.engine.sandbox.writer import TrajectoryWriter
from snapshotd.errors import SandboxFailed, SnapshotdError
from snapshotd.failpoints import hit
from snapshotd.kernel import files
from snapshotd.kernel.holding.members import Members
from snapshotd.layers.pivot import Target
from snapshotd.network import HostRules
from snapshotd.runtime.base import Container, ContainerSpec, Runtime
from snapshotd.types import NO_ISOLATION, ContainerID, SandboxSpec, Snapshot, Stack, Trajectory, new_id, short

REFILL_DELAY_S = 0.25
"""Making a spare takes a processor for some 50 ms; the caller that took the last one is about to start a command."""
WARM_KINDS = 2
"""Number of kinds with spares; the least recently used kind's spares are destroyed."""


@dataclass(slots=True)
class Prepared:
    """A running container without a sandbox yet."""

    runtime: Runtime
    container: Container
    target: Target | None
    cgroup: Members
    server: AgentServer
    calls: HandlerSlot
    run_dir: Path
    way_out: WayOut | None = None

    def become(
        self,
        trajectory: Trajectory,
        root: SandboxRoot,
        writer: TrajectoryWriter,
        survival: Survival,
        use: SandboxUse,
        started_at_ns: int,
    ) -> Sandbox:
        """The container as the sandbox that it is from now on."""
        return Sandbox(
            trajectory=trajectory,
            runtime=self.runtime,
            container=self.container,
            cgroup=self.cgroup,
            server=self.server,
            started_at_ns=started_at_ns,
            root=root,
            writer=writer,
            survival=survival,
            use=use,
            way_out=self.way_out,
        )

    def destroy(self) -> None:
        """Remove the container and everything that was made for it."""
        self.server.close()
        self.runtime.destroy(self.container.id)
        if self.way_out is not None:
            self.way_out.close()
        if self.target is not None:
            self.target.close()


class Launcher:
    """Prepares, hands out and destroys containers. Thread-safe. `close` destroys the spares."""

    def __init__(self, context: Context, take: Callable[[Snapshot], Stack], sources: LayerSources) -> None:
        """`take`: a snapshot's files as a stack that can be mounted now, held (cold.py)."""
        self._context = context
        self._take, self._sources = take, sources
        self._ways_out = WaysOut(context.keeper)
        self._spares: OrderedDict[SandboxSpec, deque[Prepared]] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False
        self.starting = 0
        """The number of sandboxes that are being launched."""
        self._closing = threading.Event()
        self._refilling: set[SandboxSpec] = set()
        self._threads: list[threading.Thread] = []

    def launch(
        self, trajectory: Trajectory, snapshot: Snapshot, head: Snapshot | None = None
    ) -> tuple[Sandbox, HandlerSlot]:
        """A sandbox on a fresh upper over the snapshot's files, with its init as the only process. `head`: the
        trajectory's, if that is another snapshot (a replay begins earlier). SandboxFailed, DataLoss or NotFound (there
        are no files); after an error nothing is left."""
        self._context.ownership.check_start()
        stack = self._take(snapshot)
        head = head or snapshot
        writer, survival = TrajectoryWriter(head.id, head.seq, head.messages), Survival()
        with self._lock:
            self.starting += 1
        begin = self._begin_in_folder if trajectory.spec.runtime == NO_ISOLATION else self._begin_in_container
        try:
            prepared, root = begin(trajectory, stack, snapshot, writer, survival)
        except BaseException:
            self._context.store.release(stack.layers)
            raise
        finally:
            with self._lock:
                self.starting -= 1
        sandbox = prepared.become(trajectory, root, writer, survival, SandboxUse(trajectory.id), time.time_ns())
        return sandbox, prepared.calls

    def _begin_in_container(
        self, trajectory: Trajectory, stack: Stack, snapshot: Snapshot, writer: TrajectoryWriter, survival: Survival
    ) -> tuple[Prepared, SandboxRoot]:
        """Take a container, and pivot it into the stack."""
        store, prepared = self._context.store, self.take(trajectory.spec)
        lazy_by = lazy_server(store, stack, self._sources)
        target = prepared.target
        assert target is not None
        try:
            own = SandboxIdentity.of(trajectory.id)
            identity.give(prepared.runtime, prepared.container, target, prepared.run_dir, own)
            identity.cover_machine_id(target, store, stack.image, prepared.run_dir)
            if prepared.way_out is not None:
                prepared.way_out.conceal_with(self._context.secrecy.of(trajectory).conceal_text)
                prepared.way_out.apply(HostRules(trajectory.spec.network.rules))
                survival.kept.extend(self._ways_out.adopt(prepared.way_out, prepared.container.id))
            upper, seen = enter(target, store, stack, trajectory.spec.limits.disk_bytes)
        except BaseException:
            prepared.destroy()
            raise
        parts = self._parts(trajectory, prepared)
        root = SandboxRoot(parts, writer, survival, stack, upper, snapshot.id, lazy_by=lazy_by, seen=seen)
        return prepared, root

    def _begin_in_folder(
        self, trajectory: Trajectory, stack: Stack, snapshot: Snapshot, writer: TrajectoryWriter, survival: Survival
    ) -> tuple[Prepared, SandboxRoot]:
        """A plain folder with the files of the stack, and the process that starts commands there."""
        store = self._context.store
        upper = folder_root.fill(store, trajectory.id, stack, trajectory.spec.limits.disk_bytes)
        try:
            prepared = self.prepare(trajectory.spec, Path(folder_root.folder_of(store, upper)))
            try:
                parts = self._parts(trajectory, prepared)
                return prepared, FolderRoot(parts, writer, survival, stack, upper, snapshot.id)
            except BaseException:
                self._discard(prepared)
                raise
        except BaseException:
            store.remove(upper)
            raise

    def take(self, spec: SandboxSpec) -> Prepared:
        """A container of this kind: a spare one if there is one that still lives, else a new one. SandboxFailed,
        Unsupported."""
        spec = replace(spec, network=spec.network.without_rules)
        while True:
            with self._lock:
                spares = self._spares.setdefault(spec, deque())
                self._spares.move_to_end(spec)
                prepared = spares.popleft() if spares else None
            if prepared is None:
                prepared = self.prepare(spec)
            elif prepared.runtime.grouping.name_of(prepared.container.pid) is None:
                prepared.destroy()
                continue
            self._refill_later(spec)
            return prepared

    def prepare(self, spec: SandboxSpec, root: Path | None = None) -> Prepared:
        """Make one container and its socket. `root`: the folder that it is, without isolation. SandboxFailed,
        Unsupported; nothing is left behind then."""
        context = self._context
        runtime = context.runtime(spec.runtime)
        container_id = ContainerID(new_id())
        run_dir = context.run_dir / "c" / container_id
        (run_dir / "share").mkdir(parents=True)
        for directory in (run_dir, run_dir / "share"):
            directory.chmod(0o755)
        calls = HandlerSlot()
        admitted: list[Callable[[int], bool]] = []
        server = _serve(run_dir, calls, admitted)
        image = context.image(spec.image)
        image_name = (image.name if image else "") or "snapshotd"
        way_out: WayOut | None = None
        try:
            container = runtime.create(
                ContainerSpec(container_id, run_dir, context.share_dir, spec.limits, spec.network, image_name, root)
            )
            hit("engine.start.container_created")
            admitted.append(runtime.admission(container))
            cgroup = context.members(runtime, container)
            if spec.network.allows_names:
                way_out = WayOut.make(short(container_id), container.pid)
            target = None if root is not None else Target.of(container.pid, container.id_map)
        except BaseException:
            server.close()
            runtime.destroy(container_id)
            if way_out is not None:
                way_out.close()
            self.remove_run_dir(container_id)
            raise
        return Prepared(runtime, container, target, cgroup, server, calls, run_dir, way_out)

    def remove_run_dir(self, container_id: ContainerID) -> None:
        """Delete a container's run directory. Not an error when it is gone."""
        with files.closing_fd(os.open(self._context.run_dir / "c", files.DIR_FLAGS)) as parent:
            files.remove_tree(parent, container_id)

    def close(self) -> None:
        """Destroy the spares. Idempotent."""
        with self._lock:
            self._closed = True
            self._closing.set()
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()
        with self._lock:
            spares = [p for kind in self._spares.values() for p in kind]
            self._spares.clear()
        for prepared in spares:
            self._discard(prepared)
        self._ways_out.close()

    def _discard(self, prepared: Prepared) -> None:
        prepared.destroy()
        self.remove_run_dir(prepared.container.id)

    def _refill_later(self, spec: SandboxSpec) -> None:
        with self._lock:
            if self._closed or self._context.config.warm_containers == 0 or spec in self._refilling:
                return
            self._refilling.add(spec)
            thread = threading.Thread(target=self._refill, args=(spec,), name="prepare-container")
            self._threads = [t for t in self._threads if t.is_alive()]
            self._threads.append(thread)
            thread.start()

    def _refill(self, spec: SandboxSpec) -> None:
        try:
            self._closing.wait(REFILL_DELAY_S)
            while True:
                with self._lock:
                    if self._closed or len(self._spares.get(spec, ())) >= self._context.config.warm_containers:
                        return
                prepared = self.prepare(spec)
                prepared.runtime.prepare(prepared.container)
                with self._lock:
                    self._spares.setdefault(spec, deque()).append(prepared)
                    evicted: list[Prepared] = []
                    while len(self._spares) > WARM_KINDS:
                        evicted.extend(self._spares.popitem(last=False)[1])
                for old in evicted:
                    self._discard(old)
        except SnapshotdError:
            return  # a missing spare is no loss: a caller that needs one meets the same error and reports it
        finally:
            with self._lock:
                self._refilling.discard(spec)

    def attach(self, survivor: Survivor, head: Snapshot) -> tuple[Sandbox, HandlerSlot]:
        """Go on with a sandbox that an earlier daemon launched, and all that lives in it. Its agents are not greeted before
        `calls.open` is set. OSError, SandboxFailed: the sandbox is as it was."""
        trajectory, container, root = survivor.trajectory, survivor.container, survivor.root
        run_dir = self._context.run_dir / "c" / container.id
        identity.go_on(survivor.target, run_dir)
        calls = HandlerSlot()
        calls.open.clear()
        base, fresh = root.base, root.fresh
        if head.id != root.head:  # there were snapshots since it got this root
            base, fresh = (head.base or base, head.own_layers - 1) if head.method == "copy" else (head.id, 0)
        server = _serve(run_dir, calls, [survivor.runtime.admission(container)])
        writer = TrajectoryWriter(head.id, head.seq, head.messages)
        survival = Survival([] if survivor.process is None else [container.id])
        way_out = None
        if trajectory.spec.network.allows_names:
            way_out, keys = self._ways_out.find(container.id, container.pid, HostRules(trajectory.spec.network.rules))
            way_out.conceal_with(self._context.secrecy.of(trajectory).conceal_text)
            survival.kept.extend(keys)
        prepared = Prepared(
            survivor.runtime, container, survivor.target, survivor.cgroup, server, calls, run_dir, way_out
        )
        parts = self._parts(trajectory, prepared)
        went_on = SandboxRoot(parts, writer, survival, root.stack, root.upper, base, fresh=fresh)
        use = SandboxUse(trajectory.id, agent_running=survivor.process is not None)
        return prepared.become(trajectory, went_on, writer, survival, use, survivor.facts["started_at_ns"]), calls

    def _parts(self, trajectory: Trajectory, prepared: Prepared) -> RootParts:
        return RootParts(
            trajectory.id,
            self._context.store,
            prepared.target,
            prepared.cgroup,
            prepared.container.pid,
            prepared.server.parked_pids,
            trajectory.spec.limits.disk_bytes,
            self._sources,
        )

    def end(self, sandbox: Sandbox) -> None:
        """Close a sandbox and remove its run directory. Idempotent."""
        sandbox.close()
        for key in sandbox.survival.kept:
            self._context.keeper.drop(key)
        self.remove_run_dir(sandbox.container.id)


def _serve(run_dir: Path, calls: HandlerSlot, admitted: list[Callable[[int], bool]]) -> AgentServer:
    """Listen for the agents of the container whose processes `admitted` knows, once it is there."""
    return AgentServer(
        run_dir / "agent.sock", calls.find, lambda pid: any(admits(pid) for admits in admitted), lost=calls.lose
    )


def is_alive(sandbox: Sandbox) -> bool:
    """True if the sandbox's container still runs."""
    try:
        return not sandbox.closed and sandbox.container.pid in sandbox.cgroup.members()
    except SandboxFailed:
        return False
