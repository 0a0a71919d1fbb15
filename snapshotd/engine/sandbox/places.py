"""Places: gives a running sandbox the files of a recorded snapshot, and finds the files with which a trajectory goes
on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from snapshotd.catalog.base import Catalog
from snapshotd.engine.context import Context
from snapshotd.engine.markers import is_marker
from snapshotd.engine.sandbox.root import Captured, frozen
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.storage.cold import gone_error
from snapshotd.engine.storage.look import open_view
from snapshotd.errors import DataLoss, NotFound, OutOfSpace, SandboxFailed
from snapshotd.types import DURING, SNAPSHOT_NOW, Snapshot, SnapshotState, Stack, short

_log = logging.getLogger(__name__)
_ENDS = ("exit", "stop")
"""Markers that keep the files at a program's end or stop: these include files of a call that never ended."""


def _has_half_a_call(catalog: Catalog, snapshot: Snapshot) -> bool:
    """True if the snapshot's files may include files of a call that had not ended."""
    arguments = snapshot.call.arguments
    half_way = isinstance(arguments, dict) and DURING in arguments
    return is_marker(catalog, snapshot, (*_ENDS, SNAPSHOT_NOW) if half_way else _ENDS)


class Places:
    """See the module's text. Thread-safe."""

    def __init__(self, context: Context, take: Callable[[Snapshot], Stack]) -> None:
        """`take`: a snapshot's files as a stack that can be mounted now, held (cold.py)."""
        self._context, self._take = context, take

    def newest(self, head: Snapshot) -> Snapshot:
        """The snapshot with whose files a resumed program goes on: the head, or the snapshot before the markers of its
        own end, and before those that a person had taken in the middle of a call."""
        catalog = self._context.catalog
        while head.parent is not None and _has_half_a_call(catalog, head):
            head = catalog.snapshots.get(head.parent)
        return head

    def go_to(self, sandbox: Sandbox, snapshot: Snapshot) -> None:
        """Give a sandbox the files of a snapshot, in place: by switching its root if every process in it is parked,
        else file by file. Waits until no command of a client owns it. If a retention policy gave the snapshot's files
        up, the sandbox keeps its present ones. SandboxFailed, DataLoss, NotFound."""
        if snapshot.state is SnapshotState.LOST:
            raise gone_error(snapshot)
        if snapshot.state is SnapshotState.PRUNED:
            _log.warning(
                "the files of snapshot %s were pruned: %s is not switched to them", snapshot.id, sandbox.trajectory.id
            )
            return
        with sandbox.lock:
            sandbox.use.wait_for_commands()
            if sandbox.closed:
                raise SandboxFailed(f"the sandbox of {short(sandbox.trajectory.id)} has ended")
            if self._is_there(sandbox, snapshot):
                return
            reason = sandbox.root.blocker()
            if reason is None:
                sandbox.root.replace(self._take(snapshot), snapshot.id)
                sandbox.root.bury()
            else:
                self._rewrite(sandbox, snapshot, reason)

    def take_over(self, sandbox: Sandbox, snapshot: Snapshot) -> Captured | None:
        """Give a sandbox the files of a pinned snapshot of another run, as `go_to`, and return them as its next
        snapshot has them. None: they cannot be had, and the sandbox has its present ones. Caller holds the sandbox's
        lock until that snapshot is there. SandboxFailed, DataLoss."""
        start = time.perf_counter_ns()
        if sandbox.closed:
            raise SandboxFailed(f"the sandbox of {short(sandbox.trajectory.id)} has ended")
        stack = sandbox.root.stack
        if not self._is_there(sandbox, snapshot):
            reason = sandbox.root.blocker()
            try:
                stack = snapshot.stack if reason else self._take(snapshot)
            except (DataLoss, NotFound, OutOfSpace) as exc:
                _log.warning("no call of %s is answered from %s: %s", sandbox.trajectory.id, snapshot.id, exc.message)
                return None
            if reason is None:
                sandbox.root.replace(stack, snapshot.id)
                sandbox.root.bury()
            else:
                self._rewrite(sandbox, snapshot, reason)
        return Captured(stack, "reused", None, time.perf_counter_ns() - start, snapshot.id, 0)

    def _is_there(self, sandbox: Sandbox, snapshot: Snapshot) -> bool:
        if sandbox.root.changed:
            return False
        base = sandbox.root.base
        return base is not None and (
            base == snapshot.id or self._context.catalog.snapshots.get(base).stack == snapshot.stack
        )

    def _rewrite(self, sandbox: Sandbox, snapshot: Snapshot, reason: str) -> None:
        """Writes the differing files over the present ones while the sandbox stands still."""
        _log.info("the files of %s are rewritten in place because %s", sandbox.trajectory.id, reason)
        sandbox.survival.forget()
        with frozen(sandbox.cgroup), open_view(self._context, snapshot) as wanted:
            sandbox.root.rewrite(wanted, sandbox.container)
