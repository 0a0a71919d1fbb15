"""The root of a live sandbox: sealed layers under a live upper, and the ways to seal, copy and replace them.

stack        sealed layers under the live upper; the parent of what comes next; held, so that none is evicted. Where the host
             renames no directories of lower layers, the live upper holds what they do and stands on the image (delta.py)
base, fresh  a snapshot whose tree, with the newest `fresh` layers of `stack` on it, is that of `stack`, however the rest was merged.
             `fresh` is 0 unless a step was sealed and could not be committed
upper        the live, writable layer
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from snapshotd.engine.sandbox.live import Root, Survival
from snapshotd.engine.sandbox.quiesce import blocker, writable_mappings
from snapshotd.engine.sandbox.writer import TrajectoryWriter
from snapshotd.errors import DataLoss
from snapshotd.failpoints import hit
from snapshotd.kernel import files
from snapshotd.kernel.holding.members import Members
from snapshotd.kernel.mounts import Layout
from snapshotd.kernel.quota import Used
from snapshotd.layers import capture as copying
from snapshotd.layers import delta, links
from snapshotd.layers.links import Group
from snapshotd.layers.pivot import Busy, Target, layout_of, pivot
from snapshotd.layers.store import LayerStore
from snapshotd.layers.upper import dress, is_unchanged
from snapshotd.layers.view import open_stack
from snapshotd.runtime.base import Container
from snapshotd.trees import apply, diff
from snapshotd.trees.view import View
from snapshotd.types import LayerID, SnapshotID, Stack, TrajectoryID, short


@dataclass(frozen=True, slots=True)
class Captured:
    """The result of a capture: the stack of the new snapshot, the method, the reason if it was not a pivot, and the
    time for which the sandbox stood still."""

    stack: Stack
    method: str
    reason: str | None
    pause_ns: int
    base: SnapshotID | None
    own_layers: int
    """See `types.Snapshot`."""
    cleanup: Callable[[], None] | None = None
    """Clean-up that remains for when the sandbox goes on (`SandboxRoot.bury`)."""


@dataclass(frozen=True, slots=True)
class _FormerRoot:
    """The layers of a root that the sandbox has left."""

    held: tuple[LayerID, ...]
    pinned: tuple[LayerID, ...] = ()
    upper: LayerID | None = None
    """The live upper, if it is thrown away."""


@dataclass(frozen=True, slots=True)
class LayerSources:
    """The engine's knowledge of layers."""

    merged: Callable[[Stack], Stack]
    """Swaps runs of layers for their merged form, where one is ready (engine/storage/merging.py)."""
    links: Callable[[Stack], Iterable[Group]]
    """The hard link groups that are known of a stack (engine/storage/linkgroups.py)."""
    server_of_lazy: Callable[[], object | None] = lambda: None
    """Returns the server of layers that are not on disk yet (engine/storage/cold.py)."""


@dataclass(frozen=True, slots=True)
class RootParts:
    """The parts of a sandbox that its root is made of."""

    trajectory: TrajectoryID
    store: LayerStore
    target: Target | None
    """Its mount namespace; None: its root is a plain folder (folder_root.py)."""
    cgroup: Members
    init_pid: int
    parked: Callable[[], set[int]]
    """Returns the processes that wait for the daemon."""
    disk_bytes: int
    """As in `Limits`."""
    sources: LayerSources


class SandboxRoot:
    """See the module's text. The sandbox's lock guards it: the caller of every method holds it."""

    def __init__(
        self,
        parts: RootParts,
        writer: TrajectoryWriter,
        survival: Survival,
        stack: Stack,
        upper: LayerID,
        base: SnapshotID | None,
        *,
        fresh: int = 0,
        lazy_by: tuple[object | None] | None = None,
        seen: copying.Seen | None = None,
    ) -> None:
        """`lazy_by`: the server of a layer that was not on disk yet when the root was made; None: all layers were. `seen`: as
        `enter` gives it."""
        self._parts, self._writer, self._survival = parts, writer, survival
        self.stack, self.upper, self.base, self.fresh = stack, upper, base, fresh
        self._lazy_by = lazy_by
        self._seen = seen
        """The entries of the live upper that `stack` has, where it is never sealed; None: not known."""
        self._mirror: copying.FinishedCapture | None = None
        """The last copy, while the next one may link unchanged files from it."""
        self.own_layers: list[LayerID] = [upper]
        """Layers pinned for it: the live upper, and layers made from it that no snapshot has yet."""
        self._former: deque[_FormerRoot] = deque()
        """Roots to be buried."""

    @property
    def _target(self) -> Target:
        """The container's mount namespace."""
        assert self._parts.target is not None
        return self._parts.target

    @property
    def store(self) -> LayerStore:
        """The store with the layers of the root."""
        return self._parts.store

    @property
    def lazy(self) -> bool:
        """True if the root has a layer that was not on disk yet when the root was made."""
        return self._lazy_by is not None

    @property
    def changed(self) -> bool:
        """True if the sandbox holds files that no snapshot has."""
        return self.fresh > 0 or not self._is_unchanged()

    @property
    def live_stack(self) -> Stack:
        """The live upper and the layers that it stands on: the files as they are now."""
        return _ground(self._parts.store, self.stack).push(self.upper)

    def _is_unchanged(self) -> bool:
        store = self._parts.store
        if store.host.redirects:
            return is_unchanged(store, self.upper, self.stack)
        return self._seen is not None and delta.is_unchanged(store, self.upper, self._seen)

    def room(self, stack: Stack | None = None) -> Used:
        """The space that the live upper may take: the sandbox's disk limit, less the layers of `stack` (None: of the
        present stack)."""
        store = self._parts.store
        return store.limits.room(_ground(store, stack or self.stack), self._parts.disk_bytes)

    def capture(self) -> Captured:
        """Seal or copy the live upper. On any error the sandbox goes on as before."""
        start = time.perf_counter_ns()
        if not self._parts.store.host.redirects:
            return self._capture_delta()
        if is_unchanged(self._parts.store, self.upper, self.stack):
            self.revive()
            pause = time.perf_counter_ns() - start
            return Captured(self.stack, "unchanged", None, pause, self.base, self.fresh, self.bury)
        layout = layout_of(self._target)
        reason = self.blocker(layout)
        if reason is None:
            try:
                self._pivot_on(layout)
                pause = time.perf_counter_ns() - start
                return Captured(self.stack, "pivot", None, pause, self.base, self.fresh, self.bury)
            except Busy as busy:
                reason = str(busy)
        return self.capture_copy(reason)

    def revive(self) -> None:
        """Give the sandbox a root that is served again, or written, if the process that served its files has died. As
        long as a process is alive that is not parked, nothing changes. Errors as `capture`."""
        if self._lazy_by is None:
            return
        (served_by,) = self._lazy_by
        if served_by is not None and served_by is self._parts.sources.server_of_lazy():
            return
        layout = layout_of(self._target)
        if self.blocker(layout) is not None:
            return
        try:
            self._pivot_on(layout, changed=not is_unchanged(self._parts.store, self.upper, self.stack))
        except Busy:
            return
        self.bury()

    def blocker(self, layout: Layout | None = None, *, unnoticed: bool = False) -> str | None:
        """Reason why the sandbox cannot be pivoted now, or None. `unnoticed`: parked processes are one, too."""
        root_id = (layout or layout_of(self._target)).root_id
        return blocker(self._parts.cgroup, self._parts.init_pid, root_id, set() if unnoticed else self._parts.parked())

    def open_root(self) -> int:
        """A descriptor (O_PATH) of the root as it is now. OSError, SandboxFailed."""
        return self._target.open_root()

    def view(self) -> View:
        """The files as they are now, for reading while nothing changes them. NotFound."""
        return open_stack(self._parts.store, self.live_stack)

    def rewrite(self, wanted: View, container: Container) -> None:
        """Write the files of another view over the present ones, in place, so that the live upper can be read as if it
        were sealed. The caller has stopped the processes. Errors as `apply.apply`."""
        with files.closing_fd(container.open_root()) as root, self.view() as now:
            shift = container.id_map.base if container.id_map else 0
            changes = list(diff.diff(now, wanted))  # all of them first: writing changes the upper
            apply.apply(root, changes, wanted, shift=shift, whole_groups=True)

    def bury(self) -> None:
        """Let go of the roots that the sandbox has left. It takes time in proportion to the inodes touched there, so call
        it when the sandbox goes on; from any thread, also from several."""
        store, former = self._parts.store, []
        with contextlib.suppress(IndexError):
            while True:
                former.append(self._former.popleft())
        if self._parts.target is not None:
            self._parts.target.bury()
        for root in former:
            store.release(root.held)
            store.unpin(root.pinned)
            if root.upper is not None:
                store.remove(root.upper)

    def _hold(self, stack: Stack) -> Stack:
        """The stack with merged runs swapped in, held. A merged run may be evicted between the two: then its parts are
        there."""
        while True:
            below = self._parts.sources.merged(stack)
            if self._parts.store.hold(below.layers):
                return below
            if below == stack:  # no layer could have been evicted
                head = short(self._writer.head)
                raise DataLoss(
                    f"a layer of the sandbox of {short(self._parts.trajectory)} is missing in {self.store.root}, so its next step cannot "
                    f"be taken: go on from its head {head} (`snapshotd fork {head}`)"
                )

    def _pivot_on(self, layout: Layout, *, changed: bool = True) -> None:
        """Seal the live upper as a layer and go on in a fresh one above it; the old root is to be buried. An upper that
        is not `changed` becomes no layer.

        No freeze is needed: every live process waits for the daemon, and a write between the seal and the switch would
        fail with "read-only file system" and never reach the sealed layer.
        """
        sealed = self.stack.push(self.upper) if changed else self.stack
        below, store = self._hold(sealed), self._parts.store
        with contextlib.ExitStack() as undo:
            undo.callback(store.release, below.layers)
            upper = store.create()
            undo.callback(store.remove, upper)
            store.limits.limit(upper, self.room(sealed))
            dress(store, upper, sealed)
            lazy_by = lazy_server(store, below, self._parts.sources)
            announce = functools.partial(self._announce, upper, below, lazy_by is not None, self.fresh + changed)
            pivot(self._target, store, below, upper, layout, seal=True, announce=announce)
            undo.pop_all()
        if changed:
            self._relink(self.upper, self.stack)
        else:
            self.own_layers.remove(self.upper)
        self.own_layers.append(upper)
        self._former.append(
            _FormerRoot((*self.stack.layers, *self._mirror_layers()), (), None if changed else self.upper)
        )
        self.stack, self.upper, self._mirror = below, upper, None
        self.fresh += changed
        self._lazy_by = lazy_by
        self._survival.confirm_announced()

    def _relink(self, sealed: LayerID, parent: Stack) -> None:
        """Mend hard links that copy-up tore apart, in the layer that was sealed a moment ago, before any reader opens
        it."""
        with files.closing_fd(self._parts.store.read_upper(sealed)) as fd:
            candidates = links.find_torn(fd, self._parts.sources.links(parent))
            if candidates:
                with open_stack(self._parts.store, parent) as view:
                    links.relink(fd, candidates, view, self._parts.store.marks)

    @contextlib.contextmanager
    def _measure_stop(self, pauses: list[int]) -> Iterator[None]:
        """Stop the sandbox inside the block, and add the time to `pauses`."""
        start = time.perf_counter_ns()
        with frozen(self._parts.cgroup):
            yield
        pauses.append(time.perf_counter_ns() - start)

    def _mapped_paths(self) -> set[bytes]:
        return writable_mappings(self._parts.cgroup)

    def _capture_delta(self) -> Captured:
        """Like `capture`, where no upper can be sealed: what changed becomes a layer of its own."""
        store, pauses = self._parts.store, list[int]()
        live = self.blocker() is not None
        taken = delta.capture(store, self.upper, self._seen, self._measure_stop(pauses), self._mapped_paths, live=live)
        if taken.layer is None:
            self._seen = taken.seen
            return Captured(self.stack, "unchanged", None, sum(pauses), self.base, self.fresh)
        self.own_layers.append(taken.layer)
        below = self._hold((Stack(self.stack.image) if taken.whole else self.stack).push(taken.layer))
        store.release(self.stack.layers)
        self.stack, self._seen = below, taken.seen
        self.base, self.fresh = (None, 1) if taken.whole else (self.base, self.fresh + 1)
        self._survival.update_root(self.present)
        return Captured(below, "delta", None, sum(pauses), self.base, self.fresh)

    def capture_copy(self, reason: str) -> Captured:
        """Like `capture`, by copying changed files; `reason`: the obstacle to a pivot."""
        pauses: list[int] = []
        mirror = copying.capture(
            self._parts.store, self.upper, self._mirror, self._measure_stop(pauses), self._mapped_paths
        )
        self._parts.store.hold([mirror.layer])  # the next copy links unchanged files from it
        self._parts.store.release(self._mirror_layers())
        self._mirror = mirror
        self.own_layers.append(mirror.layer)
        stack = self.stack.push(mirror.layer)
        return Captured(stack, "copy", reason, sum(pauses), self.base, self.fresh + 1, self.bury)

    def _mirror_layers(self) -> tuple[LayerID, ...]:
        """The layer of the last copy, if the next copy may link unchanged files from it: then it is held."""
        return () if self._mirror is None else (self._mirror.layer,)

    def replace(self, stack: Stack, base: SnapshotID, *, made: LayerID | None = None) -> None:
        """Throw the live upper away and go on from `stack` (held, taken over): the files of snapshot `base`, and the
        layer `made` on top of them; the old root is to be buried. The caller has made sure that no process but init
        lives."""
        parts = self._parts
        self._survival.forget()
        lazy_by = lazy_server(parts.store, stack, parts.sources)
        try:
            upper, seen = enter(self._target, parts.store, stack, parts.disk_bytes)
        except BaseException:
            parts.store.release(stack.layers)
            raise
        held = (*self.stack.layers, *self._mirror_layers())
        self._former.append(_FormerRoot(held, tuple(self.own_layers), self.upper))
        self.upper, self.stack, self._mirror, self._seen = upper, stack, None, seen
        self.base, self.fresh, self._lazy_by = base, int(made is not None), lazy_by
        self.own_layers = [upper] if made is None else [upper, made]

    def adopt_capture(self, captured: Captured, snapshot: SnapshotID) -> None:
        """Go on from this snapshot: the capture became it, and it is the head."""
        sealed = captured.stack.layers[: captured.own_layers]
        self._parts.store.unpin(sealed)  # the catalog refers to them now
        self.own_layers = [layer for layer in self.own_layers if layer not in sealed]
        if captured.method == "reused" and self.changed:
            pass  # the live upper holds what differs between the stack, which is not the snapshot's, and its files
        elif captured.method != "copy":  # a copy leaves the stack as it was
            self.base, self.fresh = snapshot, 0
        self._survival.finish_commit(snapshot, self.present)

    def abandon_capture(self, captured: Captured) -> None:
        """Go on from the head: the capture became no snapshot. The next snapshot gets its sealed layer as well; a copy is
        made again."""
        self.bury()
        if captured.method == "copy" and self._mirror is not None:
            self.own_layers.remove(self._mirror.layer)
            self._parts.store.unpin([self._mirror.layer])

    def present(self) -> Root:
        """The present root, for the next daemon."""
        mount_id = layout_of(self._target).root_id
        return Root(mount_id, self.upper, self.stack, self.base, self.fresh, self._writer.head, self.lazy)

    def _announce(self, upper: LayerID, stack: Stack, lazy: bool, fresh: int, mount_id: int) -> None:
        """Announce the root that the sandbox is about to get to the next daemon."""
        self._survival.announce(Root(mount_id, upper, stack, self.base, fresh, self._writer.head, lazy))

    def release(self) -> None:
        """Let go of the layers: the container has ended. Files in the live upper are gone."""
        store = self._parts.store
        if self._parts.target is not None:
            self._parts.target.close()
        self.bury()
        store.release((*self.stack.layers, *self._mirror_layers()))
        store.unpin(self.own_layers)
        store.remove(self.upper)  # last: on a full disk it may fail, and is then left to a sweep


@contextlib.contextmanager
def frozen(cgroup: Members) -> Iterator[None]:
    """Freeze every process of the sandbox inside the block."""
    cgroup.freeze()
    try:
        yield
    finally:
        cgroup.thaw()


def lazy_server(store: LayerStore, stack: Stack, sources: LayerSources) -> tuple[object | None] | None:
    """The present server of lazy layers, if the stack has one; else None."""
    return (sources.server_of_lazy(),) if any(map(store.lazy, stack.layers)) else None


def _ground(store: LayerStore, stack: Stack) -> Stack:
    """The layers that a live upper stands on, whose files are those of `stack`."""
    return stack if store.host.redirects else Stack(stack.image)


def enter(target: Target, store: LayerStore, stack: Stack, disk_bytes: int) -> tuple[LayerID, copying.Seen | None]:
    """Give a fresh container its first root with the files of `stack`, which is held; returns the live upper, and where it
    is never sealed the entries in it. Nothing is left behind on error. `disk_bytes`: as in `Limits`."""
    upper, ground, seen = store.create(), _ground(store, stack), None
    try:
        store.limits.limit(upper, store.limits.room(ground, disk_bytes))
        if store.host.redirects:
            dress(store, upper, stack)
        else:
            seen = delta.fill(store, upper, stack)
        pivot(target, store, ground, upper, layout_of(target), seal=False)
        if seen is not None:
            delta.note_mount(store, upper, seen)
        hit("engine.start.pivoted")
    except BaseException:
        store.remove(upper)
        raise
    return upper, seen
