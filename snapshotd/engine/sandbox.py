"""A live sandbox: one container on one live upper, and the lock that makes its steps happen one at a time.

    stack        sealed layers under the live upper; the parent of what comes next; held, so that none is evicted
    base, fresh  a snapshot whose tree, with the newest `fresh` layers of `stack` on it, is that of `stack`, however the rest was merged.
                 `fresh` is 0 unless a step was sealed and could not be committed
    upper        the live, writable layer
    head         the trajectory's head: the snapshot that the next one's parent will be

Everything that changes these three happens under `lock`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from snapshotd.engine.agent_protocol import AgentServer
from snapshotd.engine.quiesce import blocker, writable_mappings
from snapshotd.failpoints import hit
from snapshotd.gateway.base import Gateway
from snapshotd.kernel import cgroup as cgroups
from snapshotd.kernel.mounts import Layout
from snapshotd.layers import capture as copying
from snapshotd.layers import links
from snapshotd.layers.links import Group
from snapshotd.layers.pivot import Busy, Target, layout_of, pivot
from snapshotd.layers.store import LayerStore
from snapshotd.runtime.base import Container, Runtime
from snapshotd.types import LayerID, Message, SnapshotID, Stack, Trajectory


@dataclass(frozen=True, slots=True)
class Captured:
    """What a capture made: the stack of the new snapshot, how, why not by pivot, and for how long the sandbox stood still."""

    stack: Stack
    method: str
    reason: str | None
    pause_ns: int
    base: SnapshotID
    own_layers: int
    """See `types.Snapshot`."""
    cleanup: Callable[[], None] | None = None
    """What remains to be done once the sandbox goes on."""


@dataclass(slots=True)
class Sandbox:
    """See the module's text. Made by `launch.Launcher`; ended by `close`."""

    trajectory: Trajectory
    runtime: Runtime
    container: Container
    target: Target
    cgroup: cgroups.Cgroup
    server: AgentServer
    store: LayerStore
    stack: Stack
    upper: LayerID
    head: SnapshotID
    base: SnapshotID
    seq: int
    message_count: int
    started_at_ns: int
    merged: Callable[[Stack], Stack]
    """Swaps runs of layers for their merged form, where one is ready (engine/merging.py)."""
    links: Callable[[Stack], Iterable[Group]]
    """The hard link groups that are known of a stack (engine/linkgroups.py)."""
    fresh: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)
    pending_bytes: int = 0
    pending: list[Message] = field(default_factory=list)
    """Messages of the conversation that the next snapshot will bind."""
    state: dict[str, Any] = field(default_factory=dict)
    """The agent's state: `values` (its own JSON) and `tasks` (engine/tasks.py). Replaced, never changed in place; under `lock`."""
    state_changed: bool = False
    """The next snapshot has to save it."""
    claimed: SnapshotID | None = None
    """The head from which a writer that named it is taking the next step."""
    fence: int | None = None
    """The token of this trajectory's one writer; None: nothing is recorded (a throw-away sandbox)."""
    gateway: Gateway | None = None
    """Its model endpoint, if its trajectory has providers."""
    mirror: copying.Mirror | None = None
    own_layers: list[LayerID] = field(default_factory=list)
    agent_running: bool = False
    closed: bool = False
    """No more steps. Set under `lock`."""
    released: bool = False

    def capture(self) -> Captured:
        """Seal or copy what the live upper holds. Caller holds `lock`. On any error the sandbox goes on as before."""
        start = time.perf_counter_ns()
        if self.store.unchanged(self.upper, self.stack):
            return Captured(self.stack, "unchanged", None, time.perf_counter_ns() - start, self.base, self.fresh)
        layout = layout_of(self.target)
        reason = self.blocker(layout)
        if reason is None:
            try:
                retired = self._pivot_on(layout)
                pause = time.perf_counter_ns() - start
                return Captured(self.stack, "pivot", None, pause, self.base, self.fresh, lambda: self._bury(retired))
            except Busy:
                reason = "a file is open for writing"
        return self.capture_copy(reason)

    def blocker(self, layout: Layout | None = None) -> str | None:
        """Why the sandbox cannot be pivoted now, or None."""
        root_id = (layout or layout_of(self.target)).root_id
        return blocker(self.cgroup, self.container.pid, root_id, self.server.parked_pids())

    def _bury(self, retired: tuple[LayerID, ...]) -> None:
        self.target.bury()
        self.store.release(retired)

    def _hold(self, stack: Stack) -> Stack:
        """The stack with merged runs swapped in, held. A merged run may be evicted between the two: then its parts are there."""
        while True:
            below = self.merged(stack)
            if self.store.hold(below.layers):
                return below

    def _pivot_on(self, layout: Layout) -> tuple[LayerID, ...]:
        """Seal the live upper as a layer and go on in a fresh one above it. Returns the layers of the old root, in use until it is buried.

        Nothing needs to be frozen: what lives is waiting for us, and whatever wrote all the same between the seal and the switch would get
        "read-only file system", not into the sealed layer.
        """
        sealed = self.stack.push(self.upper)
        below = self._hold(sealed)
        try:
            upper = self.store.create()
        except BaseException:
            self.store.release(below.layers)
            raise
        try:
            self.store.dress(upper, sealed)
            pivot(self.target, self.store, below, upper, layout, seal=True)
        except BaseException:
            self.store.release(below.layers)
            self.store.remove(upper)
            raise
        self._relink(self.upper, self.stack)
        self.own_layers.append(upper)
        retired = (*self.stack.layers, *self._mirrored())
        self.stack, self.upper, self.mirror = below, upper, None
        self.fresh += 1
        return retired

    def committed(self, captured: Captured, snapshot: SnapshotID) -> None:
        """The capture became this snapshot. Caller holds `lock`."""
        sealed = captured.stack.layers[: captured.own_layers]
        self.store.unpin(sealed)  # the catalog refers to them now
        self.own_layers = [layer for layer in self.own_layers if layer not in sealed]
        if captured.method != "copy":  # after a copy the stack is still what it was
            self.base, self.fresh = snapshot, 0

    def _relink(self, sealed: LayerID, parent: Stack) -> None:
        """Mend hard links that copy-up tore apart, in the layer that was sealed a moment ago and that nobody has looked into yet."""
        fd = self.store.read_upper(sealed)
        try:
            candidates = links.torn(fd, self.links(parent))
            if candidates:
                with self.store.view(parent) as view:
                    links.relink(fd, candidates, view)
        finally:
            os.close(fd)

    def capture_copy(self, reason: str) -> Captured:
        """As `capture`, by copying what changed; `reason`: why not by a pivot. Caller holds `lock`."""
        pauses: list[int] = []

        @contextlib.contextmanager
        def stopped() -> Iterator[None]:
            start = time.perf_counter_ns()
            with self.frozen():
                yield
            pauses.append(time.perf_counter_ns() - start)

        mirror = copying.capture(self.store, self.upper, self.mirror, stopped(), lambda: writable_mappings(self.cgroup))
        self.store.hold([mirror.layer])  # the next copy takes from it what has not changed
        self.store.release(self._mirrored())
        self.mirror = mirror
        self.own_layers.append(mirror.layer)
        return Captured(self.stack.push(mirror.layer), "copy", reason, sum(pauses), self.base, self.fresh + 1)

    def _mirrored(self) -> tuple[LayerID, ...]:
        """The layer of the last copy, which is held as long as the next one may need it."""
        return () if self.mirror is None else (self.mirror.layer,)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Every process of the sandbox stands still inside."""
        self.cgroup.freeze()
        try:
            yield
        finally:
            self.cgroup.thaw()

    def replace_root(self, stack: Stack, base: SnapshotID) -> None:
        """Throw the live upper away and go on from `stack` (held, taken over), the files of snapshot `base`. Caller holds `lock` and has
        made sure that nothing but init lives."""
        try:
            upper = enter(self.target, self.store, stack)
        except BaseException:
            self.store.release(stack.layers)
            raise
        old, retired = self.upper, (*self.stack.layers, *self._mirrored())
        self.upper, self.stack, self.mirror = upper, stack, None
        self.base, self.fresh = base, 0
        self.target.bury()
        self.store.release(retired)
        self.store.remove(old)

    def close(self) -> None:
        """End the container and let go of its layers. Idempotent. What the live upper held beyond the head is gone.

        Not under `lock` beyond the first lines: a call of the agent may be waiting for it, and its connection is waited for here.
        """
        with self.lock:
            self.closed = True
            if self.released:
                return
            self.released = True
        self.server.close()
        if self.gateway is not None:
            self.gateway.close()
        self.runtime.destroy(self.container.id)
        self.target.close()
        self.store.remove(self.upper)
        self.store.release((*self.stack.layers, *self._mirrored()))
        self.store.unpin(self.own_layers)


def enter(target: Target, store: LayerStore, stack: Stack) -> LayerID:
    """Give a fresh container its first root over `stack`; returns the live upper. Nothing is left behind on error."""
    upper = store.create()
    try:
        store.dress(upper, stack)
        pivot(target, store, stack, upper, layout_of(target), seal=False)
        hit("engine.start.pivoted")
    except BaseException:
        store.remove(upper)
        raise
    return upper
