"""Going back in place: the files, the agent's mind, or both, and undoing it. Nothing is destroyed: each is a new
snapshot.

A rewind does not compare files: it gives the sandbox another root and the trajectory another past to continue. Its
marker has the arguments `to`, `mode` and `from`; `undo` goes back to the snapshot before it (its parent).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from snapshotd.api.history import RewindQuery, RewindRequest
from snapshotd.engine import requests
from snapshotd.engine.base import RewindPreview
from snapshotd.engine.context import Context
from snapshotd.engine.history.effects import Effects
from snapshotd.engine.markers import is_marker
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.sandbox.signals import end_background, end_services
from snapshotd.engine.sandbox.step import StepListener, commit_step, marker
from snapshotd.engine.storage import look
from snapshotd.engine.storage.cold import Cold, gone_error
from snapshotd.errors import Conflict, UsageError
from snapshotd.trees import diff
from snapshotd.trees.view import View
from snapshotd.types import (
    CallStatus,
    Ended,
    JournalEntry,
    LayerID,
    Message,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Stack,
    ToolCall,
    Trajectory,
    TrajectoryID,
    short,
)

LayerMaker = Callable[[Stack], LayerID]
"""Makes a pinned layer for the top of a stack."""
MODES = ("files", "conversation", "both")
UNDOABLE = ("rewind", "undo", "retry", "promote", "merge")
"""Markers after which everything is as it was at another snapshot."""


class Rewinding:
    """See the module's text. Thread-safe."""

    def __init__(
        self, context: Context, sessions: Sessions, cold: Cold, effects: Effects, listener: StepListener
    ) -> None:
        self._context, self._catalog, self._sessions = context, context.catalog, sessions
        self._cold, self._effects, self._listener = cold, effects, listener

    # -- verbs ---------------------------------------------------------------------------------------------------------

    def rewind(self, trajectory: Trajectory, to: Snapshot, request: RewindRequest) -> Snapshot:
        """See `BranchingService.rewind`. `to` is pinned."""
        mode = request.mode
        self._check(trajectory, to, mode)
        with self._sessions.start_for_change(trajectory) as sandbox:
            if request.compensate and mode != "files":
                with self.quieten(sandbox, "rewind"):
                    effects = self._effects.beyond(self._catalog.trajectories.get(trajectory.id), to)
                self._effects.run_all(trajectory, effects, "`snapshotd rewind --yes` leaves the call behind")
            with self.quieten(sandbox, "rewind"):
                self.settle(sandbox, mind=mode != "files")
                call = marker("rewind", {"to": to.id, "mode": mode, "from": sandbox.head})
                return self.switch(
                    sandbox, call, files=None if mode == "conversation" else to, follows=None if mode == "files" else to
                )

    def undo(self, trajectory: Trajectory) -> Snapshot:
        """See `BranchingService.undo`."""
        self._find_undone(trajectory, self._catalog.trajectories.get(trajectory.id).head)  # nothing is started in vain
        with (
            self._sessions.start_for_change(trajectory) as sandbox,
            self.quieten(sandbox, "undo", end=False),  # their snapshots would be what it finds
        ):
            last, parent = self._find_undone(trajectory, sandbox.head)
            self.settle(sandbox, mind=True)
            with self._context.pins.pinned(parent) as before:
                return self.switch(
                    sandbox, marker("undo", {"of": last.id, "to": before.id}), files=before, follows=before
                )

    def _find_undone(self, trajectory: Trajectory, head: SnapshotID) -> tuple[Snapshot, SnapshotID]:
        """The snapshot that `undo` takes back, and the one before it. Conflict: `head` is none of this trajectory's that can be
        taken back."""
        last = self._catalog.snapshots.get(head)
        if last.trajectory != trajectory.id or last.parent is None or not is_marker(self._catalog, last, UNDOABLE):
            raise Conflict(
                f"there is nothing to undo in {short(trajectory.id)}: its last snapshot {short(last.id)} is no rewind, "
                "promotion or merge; `snapshotd rewind` goes to any other"
            )
        return last, last.parent

    def preview(self, trajectory: Trajectory, to: Snapshot, query: RewindQuery) -> RewindPreview:
        """See `BranchingService.preview_rewind`."""
        mode = query.mode
        self._check(trajectory, to, mode)
        head = self._catalog.snapshots.get(trajectory.head)
        files, count = ((), 0) if mode == "conversation" else self._changes(trajectory, head, to, query.max_files)
        if mode == "files":
            return RewindPreview(head.id, to.id, mode, files, count, (), ())
        effects = self._effects.beyond(trajectory, to)
        return RewindPreview(head.id, to.id, mode, files, count, self._messages(trajectory, head, to), tuple(effects))

    # -- what other verbs do, too --------------------------------------------------------------------------------------

    @contextmanager
    def quieten(self, sandbox: Sandbox, what: str, *, end: bool = True) -> Iterator[None]:
        """Hold the sandbox's lock for the block, in which nothing but init lives in it and no command owns it. Conflict: a
        command owns it, or a process lives. With `end`, commands in the background are ended first. Services are ended;
        the caller starts them again."""
        with sandbox.lock:
            if not sandbox.use.agent_running:
                if end:
                    end_background(sandbox)
                end_services(sandbox)
            if sandbox.use.agent_running:
                reason: str | None = "its program is running"
            elif sandbox.use.commands:
                reason = "a command in it has not ended"
            else:
                reason = _blocker(sandbox)
            if reason is not None:
                name = short(sandbox.trajectory.id)
                raise Conflict(
                    f"cannot {what} {name} in place: {reason}; stop it first (`snapshotd stop {name}`), or fork the snapshot"
                )
            yield

    def settle(self, sandbox: Sandbox, *, mind: bool) -> None:
        """Capture the changes since the head. With `mind`, calls whose end can no longer come get an unknown outcome,
        so that the line that is left behind remembers them."""
        entries = self._end_open_calls(sandbox) if mind else []
        if sandbox.root.changed or (mind and (entries or sandbox.mind.messages or sandbox.mind.changed)):
            commit_step(self._catalog, sandbox, marker("checkpoint", {"name": "before rewind"}), self._listener)

    def _end_open_calls(self, sandbox: Sandbox) -> list[JournalEntry]:
        unbound = self._catalog.journal.unbound(sandbox.trajectory.id)
        for entry in unbound:
            if entry.status is None:
                ended = Ended(entry.id, CallStatus.UNKNOWN, time.time_ns(), error="it was cut off")
                self._catalog.journal.end(sandbox.trajectory.id, ended, fence=sandbox.writer.fence)
        return unbound

    def switch(
        self,
        sandbox: Sandbox,
        call: ToolCall,
        *,
        files: Snapshot | None,
        follows: Snapshot | None,
        entries: Sequence[JournalEntry] = (),
        state: dict[str, Any] | None = None,
        change: LayerMaker | None = None,
        messages: Sequence[Message] = (),
        keep_messages: int | None = None,
    ) -> Snapshot:
        """Put the files of a snapshot (None: they stay; with `change`: as `replace_files`) and the mind of another into
        a settled sandbox, and record it. `state`: replaces the one of `follows`; `messages`: come after its first
        `keep_messages` (None: all).

        Caller holds the lock and has made sure that no process lives. On an error everything is as before.
        """
        head, old, old_changed = sandbox.head, sandbox.mind.state, sandbox.mind.changed
        if files is not None:
            self.replace_files(sandbox, files, change)
        if state is not None:
            sandbox.mind.put(state, changed=True)
        pending = list(sandbox.mind.messages)
        sandbox.mind.messages.extend(messages)
        try:
            return commit_step(
                self._catalog,
                sandbox,
                call,
                self._listener,
                follows=follows,
                keep_messages=keep_messages,
                entries=entries,
                request=requests.present(),
            )
        except BaseException:
            sandbox.mind.put(old, changed=old_changed)
            sandbox.mind.messages[:] = pending
            if files is not None:
                self.replace_files(sandbox, self._catalog.snapshots.get(head))
                sandbox.root.bury()
            raise

    def replace_files(self, sandbox: Sandbox, files: Snapshot, change: LayerMaker | None = None) -> None:
        """Replace a sandbox's files by a snapshot's. `change`: makes one more layer over them. Conditions as for
        `switch`; the old root is to be buried, as after `SandboxRoot.replace`."""
        stack = self._cold.take(files)
        if change is None:
            sandbox.root.replace(stack, files.id)
            return
        try:
            layer = change(stack)
        except BaseException:
            self._context.store.release(stack.layers)
            raise
        self._context.store.hold([layer])
        try:
            sandbox.root.replace(stack.push(layer), files.id, made=layer)
        except BaseException:
            self._context.store.remove(layer)
            raise

    def check_files(self, trajectory: Trajectory, to: Snapshot) -> None:
        """Raises if the snapshot's files cannot be put into the trajectory's sandbox. DataLoss, Conflict."""
        if to.state in (SnapshotState.LOST, SnapshotState.PRUNED):
            raise gone_error(to)
        if to.stack.image != trajectory.spec.image:
            raise Conflict(
                f"snapshot {short(to.id)} cannot be put into {short(trajectory.id)}: it is of another image; fork it"
            )

    def in_history(self, trajectory: Trajectory, snapshot: Snapshot) -> bool:
        """True if the snapshot is one of the trajectory's own, or of the trajectories that it was forked from."""
        own, last = trajectory, None
        while True:
            if snapshot.trajectory == own.id:
                return last is None or snapshot.seq <= last
            if own.forked_from is None:
                return False
            source = self._catalog.snapshots.get(own.forked_from)
            own, last = self._catalog.trajectories.get(source.trajectory), source.seq

    def common_messages(self, a: Snapshot, b: Snapshot) -> int:
        """The number of messages that two conversations share: those at their last common snapshot, less those cut since."""
        kept = dict(self._kept_on_the_way(b))
        return next((min(count, kept[at]) for at, count in self._kept_on_the_way(a) if at in kept), 0)

    def _kept_on_the_way(self, at: Snapshot) -> Iterator[tuple[SnapshotID, int]]:
        """The snapshots on the way to this one, newest first, each with the number of its messages that are still there."""
        kept = at.messages
        while True:
            kept = min(kept, at.messages)
            yield at.id, kept
            if at.continues is None:
                return
            kept, at = self._count_kept(at, kept), self._catalog.snapshots.get(at.continues)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check(self, trajectory: Trajectory, to: Snapshot, mode: str) -> None:
        if mode not in MODES:
            raise UsageError(f"{mode[:40]!r} cannot be rewound; choose {', '.join(MODES)}")
        if mode != "conversation":
            self.check_files(trajectory, to)
        if mode != "files" and not self.in_history(trajectory, to):
            raise Conflict(
                f"the conversation of {short(trajectory.id)} cannot go back to {short(to.id)}, which is not of its history; "
                "rewind the files alone, or fork that snapshot"
            )

    def _changes(self, trajectory: Trajectory, head: Snapshot, to: Snapshot, max_files: int) -> tuple[Any, int]:
        with self._present(trajectory.id, head) as before, look.open_view(self._context, to) as after:
            changes = diff.diff(before, after)
            listed = tuple(islice(changes, max_files))
            return listed, len(listed) + sum(1 for _ in changes)

    @contextmanager
    def _present(self, trajectory: TrajectoryID, head: Snapshot) -> Iterator[View]:
        """The files as they are now: of the live sandbox if it stands still, else of the head."""
        sandbox = self._sessions.find(trajectory)
        if sandbox is not None and not sandbox.closed:
            with sandbox.lock:
                alone = not sandbox.closed and _blocker(sandbox) is None
                if alone and sandbox.root.changed:
                    with sandbox.root.view() as view:
                        yield view
                    return
        with look.open_view(self._context, head) as view:
            yield view

    def _messages(self, trajectory: Trajectory, head: Snapshot, to: Snapshot) -> tuple[Message, ...]:
        """The messages that the conversation has now and loses by the rewind."""
        sandbox = self._sessions.find(trajectory.id)
        pending: tuple[Message, ...] = ()
        if sandbox is not None:
            with sandbox.lock:
                pending = tuple(sandbox.mind.messages)
        return (*self._catalog.conversations.read(head.id, self.common_messages(head, to)), *pending)

    def _count_kept(self, snapshot: Snapshot, kept: int) -> int:
        """Number of messages that the snapshot took over from the one it continues, at most `kept`."""
        if snapshot.follows is None:
            return kept
        return min(kept, snapshot.messages - len(self._catalog.conversations.own(snapshot.id)))


def _blocker(sandbox: Sandbox) -> str | None:
    """The reason why a sandbox cannot get another root unnoticed; None: it can. A parked process would notice."""
    return sandbox.root.blocker(unnoticed=True)
