"""A live sandbox: one container on one live upper, and the lock that makes its steps happen one at a time.

    stack        sealed layers under the live upper; the parent of what comes next; held, so that none is evicted
    base, fresh  a snapshot whose tree, with the newest `fresh` layers of `stack` on it, is that of `stack`, however the rest was merged.
                 `fresh` is 0 unless a step was sealed and could not be committed
    upper        the live, writable layer
    writer       the trajectory's head, and the fence under which it moves
    mind         the agent's state and messages that no snapshot has yet

Everything that changes these happens under `lock`. A command that a client runs owns them from its start to its
commit (`Sandbox.command`): meanwhile steps may be taken, but no other thread gives the sandbox another root or another
past.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from snapshotd.engine.protocol.agent_protocol import AgentServer
from snapshotd.engine.sandbox.live import LiveRecord, Root
from snapshotd.engine.sandbox.mind import UnsavedMind
from snapshotd.engine.sandbox.quiesce import blocker, writable_mappings
from snapshotd.engine.sandbox.writer import TrajectoryWriter
from snapshotd.errors import Conflict, DataLoss
from snapshotd.failpoints import hit
from snapshotd.gateway.base import Gateway
from snapshotd.kernel import cgroup as cgroups
from snapshotd.kernel.mounts import Layout
from snapshotd.kernel.quota import Used
from snapshotd.layers import capture as copying
from snapshotd.layers import links
from snapshotd.layers.links import Group
from snapshotd.layers.pivot import Busy, Target, layout_of, pivot
from snapshotd.layers.store import LayerStore
from snapshotd.runtime.base import Container, Process, Runtime
from snapshotd.types import LayerID, SnapshotID, Stack, Trajectory, short

CUT_OFF_DEADLINE_S = 10.0
"""A killed command is captured as fast as any; every command before it in the lock's queue may copy changed files."""


@dataclass(frozen=True, slots=True)
class Captured:
    """The result of a capture: the stack of the new snapshot, the method, the reason if it was not a pivot, and the
    time for which the sandbox stood still."""

    stack: Stack
    method: str
    reason: str | None
    pause_ns: int
    base: SnapshotID
    own_layers: int
    """See `types.Snapshot`."""
    cleanup: Callable[[], None] | None = None
    """Clean-up that remains for when the sandbox goes on."""


@dataclass(eq=False, slots=True)
class ClientCommand:
    """One that a client runs."""

    process: Process | None = None
    """Once it is started."""
    cut_off: bool = False
    """The sandbox ends, and the command with it."""
    timed_out: bool = False
    """It took longer than its caller allows, and was ended (engine/sandbox/timeout.py)."""
    alone: bool = True
    """No other one ran beside it so far."""


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
    writer: TrajectoryWriter
    base: SnapshotID
    started_at_ns: int
    merged: Callable[[Stack], Stack]
    """Swaps runs of layers for their merged form, where one is ready (engine/storing/merging.py)."""
    links: Callable[[Stack], Iterable[Group]]
    """The hard link groups that are known of a stack (engine/storing/linkgroups.py)."""
    server_of_lazy: Callable[[], object | None] = lambda: None
    """Returns the server of layers that are not on disk yet (engine/storing/cold.py)."""
    fresh: int = 0
    lazy: bool = False
    """True if the root has a layer that was not on disk yet when the root was made."""
    lazy_by: object | None = None
    """The server of that layer at the time."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    mind: UnsavedMind = field(default_factory=UnsavedMind)
    commands: list[ClientCommand] = field(default_factory=list)
    """Clients' commands that run, or that have ended and are not committed yet."""
    ending: bool = False
    """No more commands."""
    changing: threading.Condition = field(init=False)
    """Over `lock`: of `commands` and `closed`."""
    connections: dict[socket.socket, Callable[[], object]] = field(default_factory=dict)
    """Clients' connections to servers inside (engine/runs/ports.py), each with what to call when the sandbox ends."""
    gateway: Gateway | None = None
    """Its model endpoint, if its trajectory has providers."""
    live: LiveRecord | None = None
    """The record that lets another daemon go on with the sandbox (`outlive`); only for a trajectory with a program."""
    kept: list[str] = field(default_factory=list)
    """Names of the descriptors that the keeper holds for it."""
    residue: Callable[[], dict[str, Any]] = dict
    """Returns the records that stay pending beyond a snapshot that was just taken (engine/mind/pending.py)."""
    mirror: copying.FinishedCapture | None = None
    own_layers: list[LayerID] = field(default_factory=list)
    """Layers pinned for it: the live upper, and layers made from it that no snapshot has yet."""
    agent_running: bool = False
    idle_timeout_s: float = 0.0
    """After so long without anything happening it ends (engine/sandbox/idle.py). 0: never."""
    _facts: dict[str, Any] | None = None
    """The facts that `outlive` was given."""
    _roots: tuple[Root, ...] = ()
    """The roots in `live`: the present root last, or the one that it is about to become."""
    ended_for: list[str] = field(default_factory=list)
    """Reasons why processes of the present command were ended, if that was for the disk that they took
    (engine/sandbox/disk_watch.py)."""
    closed: bool = False
    """No more steps. Set under `lock`."""
    released: bool = False

    def __post_init__(self) -> None:
        self.changing = threading.Condition(self.lock)

    @property
    def head(self) -> SnapshotID:
        """The trajectory's head."""
        return self.writer.head

    @property
    def changed(self) -> bool:
        """True if the sandbox holds files that no snapshot has. Caller holds `lock`."""
        return self.fresh > 0 or not self.store.unchanged(self.upper, self.stack)

    def renew(self, trajectory: Trajectory) -> None:
        """The trajectory's own record has changed."""
        self.trajectory = trajectory

    def room(self, stack: Stack | None = None) -> Used:
        """The space that its live upper may take: its disk limit, less the layers of `stack` (None: of the present
        stack)."""
        return self.store.room(stack or self.stack, self.trajectory.spec.limits.disk_bytes)

    @contextlib.contextmanager
    def command(self) -> Iterator[ClientCommand]:
        """Inside, the sandbox belongs to a command that a client runs. Several may do so at once. Conflict: the sandbox
        is about to end."""
        command = ClientCommand()
        with self.lock:
            if self.ending:
                raise Conflict(
                    f"the sandbox of {short(self.trajectory.id)} is just ending, so no command begins in it; try again"
                )
            command.alone = not self.commands
            for other in self.commands:
                other.alone = False
            self.commands.append(command)
        try:
            yield command
        finally:
            with self.lock:
                self.commands.remove(command)
                self.changing.notify_all()

    def cut_off(self) -> None:
        """The sandbox is about to end: no command begins any more, and those that run are killed. Returns when they are
        recorded, or after a limit, because a client that does not take its output holds its command up. Caller holds
        `lock`; other threads take it in between."""
        self.ending = True
        for command in self.commands:
            command.cut_off = True
            if command.process is not None:
                command.process.kill()
        self.changing.wait_for(lambda: not self.commands or self.closed, CUT_OFF_DEADLINE_S)

    def wait_for_commands(self) -> None:
        """Return when it belongs to none, or is closed. Caller holds `lock`, which others have meanwhile."""
        self.changing.wait_for(lambda: not self.commands or self.closed)

    def capture(self) -> Captured:
        """Seal or copy the live upper. Caller holds `lock`. On any error the sandbox goes on as before."""
        start = time.perf_counter_ns()
        if self.store.unchanged(self.upper, self.stack):
            self.revive()
            return Captured(self.stack, "unchanged", None, time.perf_counter_ns() - start, self.base, self.fresh)
        layout = layout_of(self.target)
        reason = self.blocker(layout)
        if reason is None:
            try:
                retired = self._pivot_on(layout)
                pause = time.perf_counter_ns() - start
                return Captured(self.stack, "pivot", None, pause, self.base, self.fresh, lambda: self._bury(retired))
            except Busy as busy:
                reason = str(busy)
        return self.capture_copy(reason)

    def revive(self) -> None:
        """If the process that served files of the root has died, go on on a root that is served again, or written. As
        long as something is alive that is not parked, everything stays as it is. Caller holds `lock`. Errors as
        `capture`."""
        if not self.lazy or (self.lazy_by is not None and self.lazy_by is self.server_of_lazy()):
            return
        layout, old = layout_of(self.target), self.upper
        if self.blocker(layout) is not None:
            return
        changed = not self.store.unchanged(old, self.stack)
        try:
            retired = self._pivot_on(layout, changed=changed)
        except Busy:
            return
        self._bury(retired)
        if not changed:
            self.store.remove(old)

    def blocker(self, layout: Layout | None = None) -> str | None:
        """Reason why the sandbox cannot be pivoted now, or None."""
        root_id = (layout or layout_of(self.target)).root_id
        return blocker(self.cgroup, self.container.pid, root_id, self.server.parked_pids())

    def _bury(self, retired: tuple[LayerID, ...]) -> None:
        self.target.bury()
        self.store.release(retired)

    def _hold(self, stack: Stack) -> Stack:
        """The stack with merged runs swapped in, held. A merged run may be evicted between the two: then its parts are
        there."""
        while True:
            below = self.merged(stack)
            if self.store.hold(below.layers):
                return below
            if below == stack:  # no layer could have been evicted
                head = short(self.head)
                raise DataLoss(
                    f"a layer of the sandbox of {short(self.trajectory.id)} is missing in {self.store.root}, so its next step cannot be "
                    f"taken: go on from its head {head} (`snapshotd fork {head}`)"
                )

    def _pivot_on(self, layout: Layout, *, changed: bool = True) -> tuple[LayerID, ...]:
        """Seal the live upper as a layer and go on in a fresh one above it. Returns the layers of the old root, in use
        until it is buried. An upper that is not `changed` becomes no layer; the caller removes it when the old root is
        buried.

        No freeze is needed: every live process waits for the daemon, and a write between the seal and the switch would
        fail with "read-only file system" and never reach the sealed layer.
        """
        sealed = self.stack.push(self.upper) if changed else self.stack
        below = self._hold(sealed)
        try:
            upper = self.store.create()
        except BaseException:
            self.store.release(below.layers)
            raise
        try:
            self.store.limit(upper, self.room(sealed))
            self.store.dress(upper, sealed)
            lazy, lazy_by = self.store.any_lazy(below), self.server_of_lazy()
            announce = functools.partial(self._announce, upper, below, lazy, self.fresh + changed)
            pivot(self.target, self.store, below, upper, layout, seal=True, announce=announce)
        except BaseException:
            self.store.release(below.layers)
            self.store.remove(upper)
            raise
        if changed:
            self._relink(self.upper, self.stack)
        else:
            self.own_layers.remove(self.upper)
        self.own_layers.append(upper)
        retired = (*self.stack.layers, *self._mirrored())
        self.stack, self.upper, self.mirror = below, upper, None
        self.fresh += changed
        self.lazy, self.lazy_by = lazy, lazy_by
        self._roots = self._roots[-1:]
        return retired

    def committed(self, captured: Captured, snapshot: SnapshotID) -> None:
        """The capture became this snapshot. Caller holds `lock`."""
        sealed = captured.stack.layers[: captured.own_layers]
        self.store.unpin(sealed)  # the catalog refers to them now
        self.own_layers = [layer for layer in self.own_layers if layer not in sealed]
        if captured.method != "copy":  # a copy leaves the stack as it was
            self.base, self.fresh = snapshot, 0
        if self.live is not None:
            self.live.bound(self.head, self.residue())
            if self._facts is not None and not self.live.kept:
                self._keep(self.live, self._facts)

    def uncommitted(self, captured: Captured) -> None:
        """The capture became no snapshot. Caller holds `lock`. A sealed layer goes to the next snapshot as well; a copy
        is made again."""
        if captured.cleanup is not None:
            captured.cleanup()
        if captured.method == "copy" and self.mirror is not None:
            self.own_layers.remove(self.mirror.layer)
            self.store.unpin([self.mirror.layer])

    # -- beyond the daemon ---------------------------------------------------------------------------------------------

    def committing(self, snapshot: SnapshotID) -> None:
        """This snapshot is about to become the head: records that it does not bind are noted for it first."""
        residue = self.residue() if self.live is not None else None
        if self.live is not None and residue:
            self.live.note(snapshot, residue)

    def outlive(self, facts: dict[str, Any]) -> None:
        """From now on the next daemon can go on with this sandbox, if this one dies. `facts`: as `LiveRecord.keep`."""
        with self.lock:
            assert self.live is not None
            self._facts = facts
            if self.mind.changed:
                self.live.set_state(self.head, self.mind.state)
            self._keep(self.live, facts)

    def _keep(self, live: LiveRecord, facts: dict[str, Any]) -> None:
        self._roots = (
            Root(layout_of(self.target).root_id, self.upper, self.stack, self.base, self.fresh, self.head, self.lazy),
        )
        live.keep(facts, self._roots)

    def between_states(self) -> None:
        """Drops the live record: the files match no snapshot from here on, so no daemon can go on with the sandbox
        until the next snapshot. Caller holds `lock`."""
        if self.live is not None:
            self.live.forget()

    def _announce(self, upper: LayerID, stack: Stack, lazy: bool, fresh: int, mount_id: int) -> None:
        """The root is about to become another one: after a crash, the next daemon sees by the mount which of the two it
        is."""
        if self.live is not None and self.live.kept and self._facts is not None:
            self._roots = (*self._roots[:1], Root(mount_id, upper, stack, self.base, fresh, self.head, lazy))
            self.live.keep(self._facts, self._roots)

    def _relink(self, sealed: LayerID, parent: Stack) -> None:
        """Mend hard links that copy-up tore apart, in the layer that was sealed a moment ago, before any reader opens
        it."""
        fd = self.store.read_upper(sealed)
        try:
            candidates = links.torn(fd, self.links(parent))
            if candidates:
                with self.store.view(parent) as view:
                    links.relink(fd, candidates, view)
        finally:
            os.close(fd)

    def capture_copy(self, reason: str) -> Captured:
        """Like `capture`, by copying changed files; `reason`: the obstacle to a pivot. Caller holds `lock`."""
        pauses: list[int] = []

        @contextlib.contextmanager
        def stopped() -> Iterator[None]:
            start = time.perf_counter_ns()
            with self.frozen():
                yield
            pauses.append(time.perf_counter_ns() - start)

        mirror = copying.capture(self.store, self.upper, self.mirror, stopped(), lambda: writable_mappings(self.cgroup))
        self.store.hold([mirror.layer])  # the next copy links unchanged files from it
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

    def kill(self, choose: Callable[[list[int]], Iterable[int]]) -> list[int]:
        """SIGKILL to those that `choose` takes of all processes but init, which stand still while it looks; returns
        them. Caller holds `lock`."""
        with self.frozen():
            chosen = list(choose([pid for pid in self.cgroup.processes() if pid != self.container.pid]))
            for pid in chosen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return chosen

    def replace_root(self, stack: Stack, base: SnapshotID) -> Callable[[], None]:
        """Throw the live upper away and go on from `stack` (held, taken over), the files of snapshot `base`. Caller
        holds `lock` and has made sure that no process but init lives. Returns the clean-up that remains, to be called
        once from any thread: it releases the old root, which takes time in proportion to the inodes touched there."""
        self.between_states()
        lazy, lazy_by = self.store.any_lazy(stack), self.server_of_lazy()
        try:
            upper = enter(self.target, self.store, stack, self.trajectory.spec.limits.disk_bytes)
        except BaseException:
            self.store.release(stack.layers)
            raise
        old, retired = self.upper, (*self.stack.layers, *self._mirrored())
        self.upper, self.stack, self.mirror = upper, stack, None
        self.base, self.fresh, self.lazy, self.lazy_by = base, 0, lazy, lazy_by
        given_up, self.own_layers = self.own_layers, [upper]

        def cleanup() -> None:
            self._bury(retired)
            self.store.unpin(given_up)
            self.store.remove(old)

        return cleanup

    def close(self) -> None:
        """End the container and let go of its layers. Idempotent. Files in the live upper that came after the head are
        gone.

        Not under `lock` beyond the first lines: a call of the agent may be waiting for it, and its connection is waited
        for here.
        """
        with self.lock:
            self.closed = True
            self.changing.notify_all()
            if self.released:
                return
            self.released = True
        if self.live is not None:
            self.live.remove()
        self.server.close()
        if self.gateway is not None:
            self.gateway.close()
        for ended in list(self.connections.values()):
            ended()
        self.runtime.destroy(self.container.id)
        self.target.close()
        self.store.release((*self.stack.layers, *self._mirrored()))
        self.store.unpin(self.own_layers)
        self.store.remove(self.upper)  # last: on a full disk it may fail, and is then left to a sweep


def enter(target: Target, store: LayerStore, stack: Stack, disk_bytes: int) -> LayerID:
    """Give a fresh container its first root over `stack`; returns the live upper. Nothing is left behind on error.
    `disk_bytes`: as in `Limits`."""
    upper = store.create()
    try:
        store.limit(upper, store.room(stack, disk_bytes))
        store.dress(upper, stack)
        pivot(target, store, stack, upper, layout_of(target), seal=False)
        hit("engine.start.pivoted")
    except BaseException:
        store.remove(upper)
        raise
    return upper
