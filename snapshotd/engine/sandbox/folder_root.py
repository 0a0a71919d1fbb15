"""The root of a sandbox that is a plain folder: the live directory holds all files, and a snapshot is a layer with what
changed in it.

A capture stops the processes, looks at the status of every entry as git does, copies what is new (by reflink where the
file system can), and writes whiteouts for what is gone. So snapshots are layers like any others: they are stored,
merged, evicted, compared and restored by the same code, and no kernel mount is needed to read them. Writing chunks to
the repository at once instead would have made each step wait for the disk, and a second form of snapshot everywhere.

stack, base, fresh  as in root.py: the folder was as `stack` when it was last scanned
upper               the layer whose content is the folder. It bears the trajectory's id, so a resumed program finds its
                    files at the same place

A rewind writes the difference in place. Errors of a disk leave the folder between two states; what it is then is what
the next capture takes, since `_scanned` and `stack` only change together.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from snapshotd.engine.sandbox.live import Root, Survival
from snapshotd.engine.sandbox.quiesce import blocker, is_zombie, writable_mappings
from snapshotd.engine.sandbox.root import Captured, RootParts, SandboxRoot, frozen
from snapshotd.engine.sandbox.writer import TrajectoryWriter
from snapshotd.kernel import files
from snapshotd.kernel.mounts import Layout
from snapshotd.kernel.rootless import owner_outside
from snapshotd.layers.capture import FinishedCapture, capture_folder, folder_changed, scan_folder
from snapshotd.layers.store import LayerStore
from snapshotd.layers.view import open_stack
from snapshotd.runtime.base import Container
from snapshotd.trees import apply, diff
from snapshotd.trees.materialise import materialise
from snapshotd.trees.stack_view import StackView
from snapshotd.trees.view import View
from snapshotd.types import LayerID, SnapshotID, Stack, TrajectoryID


class FolderRoot(SandboxRoot):
    """See the module's text. The sandbox's lock guards it: the caller of every method holds it."""

    def __init__(
        self,
        parts: RootParts,
        writer: TrajectoryWriter,
        survival: Survival,
        stack: Stack,
        upper: LayerID,
        base: SnapshotID,
    ) -> None:
        """The folder was just filled (`fill`)."""
        super().__init__(parts, writer, survival, stack, upper, base)
        self._scanned = scan_folder(parts.store, upper)

    @property
    def changed(self) -> bool:
        return self.fresh > 0 or folder_changed(self.store, self.upper, self._scanned, self._mapped_paths())

    def capture(self) -> Captured:
        start = time.perf_counter_ns()
        with self._standing_still():
            found = self._capture()
        pause = time.perf_counter_ns() - start
        if found is None:
            return Captured(self.stack, "unchanged", None, pause, self.base, self.fresh)
        self.own_layers.append(found.layer)
        self.store.hold([found.layer])
        below = self._hold(self.stack.push(found.layer))
        self.store.release((*self.stack.layers, found.layer))
        self.stack, self._scanned = below, found.seen
        self.fresh += 1
        return Captured(self.stack, "scan", None, pause, self.base, self.fresh)

    def revive(self) -> None:
        """Nothing: no file of the folder is served."""

    def blocker(self, layout: Layout | None = None, *, unnoticed: bool = False) -> str | None:
        parked = set() if unnoticed else self._parts.parked()
        return blocker(self._parts.cgroup, self._parts.init_pid, -1, parked)

    def open_root(self) -> int:
        return self.store.open_upper(self.upper)

    def view(self) -> View:
        with files.closing_fd(self.store.read_upper(self.upper)) as fd:
            return StackView([fd])

    def rewrite(self, wanted: View, container: Container) -> None:
        with self.view() as now:
            self._write(now, wanted)

    def replace(self, stack: Stack, base: SnapshotID, *, made: LayerID | None = None) -> None:
        self._survival.forget()
        store = self.store
        try:
            with self._standing_still(), contextlib.ExitStack() as opened:
                thrown_away = self._capture()
                present = self.stack
                if thrown_away is not None:
                    opened.callback(store.remove, thrown_away.layer)
                    present = present.push(thrown_away.layer)
                now = opened.enter_context(open_stack(store, present))
                wanted = opened.enter_context(open_stack(store, stack))
                try:
                    self._write(now, wanted)
                except BaseException:
                    with contextlib.suppress(Exception), self.view() as half:
                        self._write(half, now)
                    raise
                seen = scan_folder(store, self.upper)
        except BaseException:
            store.release(stack.layers)
            raise
        store.release(self.stack.layers)
        store.unpin(layer for layer in self.own_layers if layer != self.upper)
        self.stack, self.base, self.fresh, self._scanned = stack, base, int(made is not None), seen
        self.own_layers = [self.upper] if made is None else [self.upper, made]

    def present(self) -> Root:
        return Root(0, self.upper, self.stack, self.base, self.fresh, self._writer.head, lazy=False)

    def _capture(self) -> FinishedCapture | None:
        return capture_folder(self.store, self.upper, self._scanned, self._mapped_paths())

    def _write(self, now: View, wanted: View) -> None:
        """Write what differs, times included, since programs build by them."""
        changes = list(diff.diff(now, wanted, times=True))
        with files.closing_fd(self.store.read_upper(self.upper)) as fd:
            apply.apply(fd, changes, wanted, owner=owner_outside(), whole_groups=True)

    def _mapped_paths(self) -> set[bytes]:
        """The files of the folder that some process may change without a new time."""
        folder = os.fsencode(folder_of(self.store, self.upper)).lstrip(b"/") + b"/"
        return {path.removeprefix(folder) for path in writable_mappings(self._parts.cgroup) if path.startswith(folder)}

    @contextlib.contextmanager
    def _standing_still(self) -> Iterator[None]:
        if all(map(is_zombie, set(self._parts.cgroup.members()) - {self._parts.init_pid})):
            yield
            return
        with frozen(self._parts.cgroup):
            yield


def folder_of(store: LayerStore, upper: LayerID) -> str:
    """The path of a live folder."""
    return f"{store.root}/{upper}/upper"


def fill(store: LayerStore, trajectory: TrajectoryID, stack: Stack, disk_bytes: int) -> LayerID:
    """A new live folder with the files of `stack`, pinned: copies, by reflink where the file system can. An ordinary
    user's has no owners and devices. OutOfSpace, DataLoss, OSError; nothing is left behind then."""
    upper = store.create(LayerID(trajectory))
    try:
        store.limits.limit(upper, store.limits.room(stack, disk_bytes))
        with files.closing_fd(store.read_upper(upper)) as fd, open_stack(store, stack) as view:
            materialise(view, b"", fd, owner=owner_outside())
        store.drop_work(upper)
    except BaseException:
        store.remove(upper)
        raise
    return upper
