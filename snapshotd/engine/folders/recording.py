"""One snapshot of a user's folder: what has changed since the head, whose it is, and the commit.

The order of a snapshot is that of any step (sandbox/step.py): the layer, then the commit. The index of the folder
(scan.py) is in memory; after a restart the first scan compares the folder with the head.
"""

from __future__ import annotations

import json
import logging
import math
import os
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from snapshotd.engine.context import Context
from snapshotd.engine.folders import capture as capturing
from snapshotd.engine.folders import databases, transcripts
from snapshotd.engine.folders.calls import OpenCall, Part, parts_of
from snapshotd.engine.folders.capture import Capture, Refusal
from snapshotd.engine.folders.comparing import compare, listing
from snapshotd.engine.folders.events import HookEvent
from snapshotd.engine.folders.names import name_of
from snapshotd.engine.folders.quiet import FolderWatch, Watches
from snapshotd.engine.folders.rewinding.cut_off import CutOff
from snapshotd.engine.folders.rewinding.plan import KEY, FolderChanges, describe_left
from snapshotd.engine.folders.rewinding.putting_back import PuttingBack
from snapshotd.engine.folders.scan import FolderIndex, FolderScan
from snapshotd.engine.folders.user_files import UserFiles
from snapshotd.engine.folders.writers import Process, Touches, Writers
from snapshotd.engine.sandbox.root import Captured
from snapshotd.engine.sandbox.step import StepListener, marker
from snapshotd.engine.storage import look
from snapshotd.engine.storage.cold import Cold
from snapshotd.errors import SnapshotdError
from snapshotd.failpoints import hit
from snapshotd.kernel.identity import HostUser
from snapshotd.layers.amend import amend
from snapshotd.types import (
    CallStatus,
    EntryKind,
    JournalEntry,
    Message,
    Snapshot,
    SnapshotID,
    SnapshotState,
    ToolCall,
    TrajectoryID,
    new_id,
    short,
)

MOST_PATHS = 5000
"""Paths that the journal's entry of a call shows. A rewind goes by the changes that its snapshot notes, of any number."""
MOST_RESULT_CHARS = 1 << 20
MOST_SESSIONS = 50
"""Sessions of one folder whose place is in memory."""
UNDOABLE = ("rewind", "undo")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenFolder:
    """One folder of one user. `calls`: the calls that have begun and not ended. `cut_off`: a rewind that was not
    recorded; the next scan may find its changes."""

    user: HostUser
    trajectory: TrajectoryID
    fence: int
    index: FolderIndex = field(default_factory=FolderIndex)
    watch: FolderWatch = field(default_factory=FolderWatch)
    readers: dict[str, transcripts.TranscriptReader] = field(default_factory=dict)
    calls: list[OpenCall] = field(default_factory=list)
    writers: Writers | None = None
    agents: dict[str, Process] = field(default_factory=dict)
    """The agent of each session."""
    cut_off: CutOff | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    held_at: float = 0.0
    """When the lock was taken the last time (by the monotonic clock)."""
    taken: Touches = field(default_factory=Touches)
    """The touches whose changes are being recorded."""
    refusal: Refusal = field(default_factory=Refusal)


class FolderRecorder:
    """Takes the snapshots of folders. The caller has the folder's lock. `listener`: told of every snapshot."""

    def __init__(
        self, context: Context, cold: Cold, listener: StepListener, watches: Watches, user_files: UserFiles
    ) -> None:
        self._context, self._catalog, self._cold, self._listener = context, context.catalog, cold, listener
        self._watches, self._user_files = watches, user_files

    def settle(self, folder: OpenFolder, root: int) -> Snapshot | None:
        """Record what changed since the head, so that nothing of it can be lost."""
        saved = [self.save(folder, root, part) for part in self.find_parts(folder, root, None)]
        return saved[-1] if saved else None

    def find_parts(self, folder: OpenFolder, root: int, closing: OpenCall | None) -> list[Part]:
        """Find the changes since the head, and their owners. `closing`: a call that ends."""
        scan, touches = self.find_changes(folder, root)
        parts = parts_of(scan, touches, folder.calls, closing, folder.agents)
        if folder.cut_off is not None and scan:
            with look.open_view(self._context, self._catalog.snapshots.get(folder.cut_off.to)) as after:
                folder.cut_off.claim(parts, PuttingBack(root, folder.user, after, after, folder.cut_off.place))
        return parts

    def save(self, folder: OpenFolder, root: int, part: Part, *, ended: bool = False) -> Snapshot:
        """Record changes while the call that they belong to runs (`ended`: it was interrupted), or those of no call."""
        if part.call is None:
            return self.commit(folder, root, part.scan, marker("edits", {}), part.changes)
        status = CallStatus.INTERRUPTED if ended else CallStatus.UNKNOWN
        return self.record_call(folder, root, part, part.call.event, status=status)

    def record_call(
        self, folder: OpenFolder, root: int, part: Part, event: HookEvent, *, status: CallStatus | None = None
    ) -> Snapshot:
        """Record a call that has ended, with its part of the changes."""
        conceal = self._context.secrecy.of(self._catalog.trajectories.get(folder.trajectory)).conceal
        if status is None:
            status = CallStatus.DONE if event.error is None else CallStatus.FAILED
        arguments, error = conceal(event.arguments), conceal(event.error)
        call = marker(event.tool, arguments, status=status, error=error)
        details = {
            "agent": event.agent,
            "session": event.session,
            "tool_use_id": event.call_id,
            "sub_agent": event.lane,
        }
        entry = JournalEntry(
            id=call.id,
            kind=EntryKind.TOOL,
            name=event.tool,
            arguments=arguments,
            after=self.head(folder).id,
            began_at_ns=call.started_at_ns,
            status=status,
            ended_at_ns=time.time_ns(),
            result=conceal(limit_chars(event.result)),
            error=error,
            details={key: value for key, value in details.items() if value is not None}
            | {"files": paths_of(part.scan)},
        )
        return self.commit(folder, root, part.scan, call, part.changes, event=event, entries=(entry,))

    def commit(
        self,
        folder: OpenFolder,
        root: int,
        scan: FolderScan,
        call: ToolCall,
        changes: FolderChanges | None = None,
        *,
        event: HookEvent | None = None,
        entries: Sequence[JournalEntry] = (),
        follows: Snapshot | None = None,
        session: dict[str, Any] | None = None,
    ) -> Snapshot:
        """Commit one snapshot: the scan's changes as a layer, and the call. `changes`: their owners. `event`: the
        snapshot joins that event's session, whose new messages are read. `follows`, `session`: the snapshot continues
        that one, in that session."""
        began = time.perf_counter_ns()
        head = self.head(folder)
        messages: list[Message] = []
        if event is not None:
            follows, session, messages = self._conversation(folder, head, event)
        scan.warnings.extend(databases.without_log(scan.changed, folder.index.ignored_paths()))
        is_rewind = not entries and call.name in UNDOABLE  # half of it is no state that anything could go on from
        capture = Capture(root, folder.user, scan, math.inf if is_rewind else capturing.LONGEST_S)
        below, own = self._cold.take(head) if scan else head.stack, int(bool(scan))
        try:
            stack = below.push(amend(self._context.store, below, capture.write)) if own else below
            kept = (head if follows is None else follows).messages
            snapshot = Snapshot(
                id=SnapshotID(new_id()),
                parent=head.id,
                trajectory=folder.trajectory,
                seq=head.seq + 1,
                stack=stack,
                call=call,
                messages=kept + len(messages),
                state=SnapshotState.CAPTURED,
                pause_ns=time.perf_counter_ns() - began,
                created_at_ns=time.time_ns(),
                method="copy" if own else "unchanged",
                base=head.id,
                own_layers=own,
                follows=None if follows is None else follows.id,
                warnings=tuple(scan.warnings[:100]),
            )
            hit("engine.folders.captured")
            values = self.session_of(head if follows is None else follows) if session is None else session
            noted = {KEY: changes.record(snapshot.seq)} if changes is not None else {}
            try:
                self._catalog.snapshots.commit(
                    snapshot,
                    tuple(messages),
                    expected_head=head.id,
                    entries=entries,
                    fence=folder.fence,
                    state={"values": values, **noted} if noted or session is not None else None,
                )
            except BaseException:
                if own:
                    self._context.store.remove(stack.layers[0])
                raise
        finally:
            if own:
                self._context.store.release(below.layers)
        if own:
            self._context.store.unpin(stack.layers[:1])
        for path, mark, digest in capture.took:
            folder.index.note_captured(path, mark, digest)
        folder.index.reveal(capture.unread)
        folder.index.note_look(scan.began_ns)
        if folder.cut_off is not None:
            folder.cut_off = None
            self._catalog.set_meta(rewind_key(folder), "")
        self.submit(snapshot)
        return snapshot

    def submit(self, snapshot: Snapshot) -> None:
        """Have a snapshot counted, merged and stored. No process writes to its layer, as after a pivot."""
        taken = Captured(
            snapshot.stack, "pivot", None, snapshot.pause_ns, snapshot.base or snapshot.id, snapshot.own_layers
        )
        self._listener(snapshot, taken)

    def _conversation(
        self, folder: OpenFolder, head: Snapshot, event: HookEvent
    ) -> tuple[Snapshot | None, dict[str, Any], list[Message]]:
        """The snapshot that the event's session continues (None: the head), the session, and its new messages."""
        last = self._last_of(folder, head, event.session)
        reader = folder.readers.get(event.session)
        if reader is None:
            place = {} if last is None else self.session_of(last)
            recorded = () if last is None else self._catalog.conversations.read(last.id)
            while len(folder.readers) >= MOST_SESSIONS:
                del folder.readers[next(iter(folder.readers))]
            reader = folder.readers[event.session] = transcripts.TranscriptReader.at(place, recorded)
        messages = reader.read(event, self._user_files.of(folder.user))
        conceal = self._context.secrecy.of(self._catalog.trajectories.get(folder.trajectory)).conceal
        session = {
            "agent": event.agent,
            "session": event.session,
            "transcript": event.transcript,
            "cwd": event.cwd,
            "call": event.call_id,
            **reader.place(),
        }
        concealed = [Message(message.role, conceal(message.content)) for message in messages]
        if last is None:
            return self._catalog.snapshots.of_trajectory(folder.trajectory)[0], session, concealed
        return (None if last.id == head.id else last), session, concealed

    def _last_of(self, folder: OpenFolder, head: Snapshot, session: str) -> Snapshot | None:
        """The last snapshot of a session; None for a new one."""
        if self.session_of(head).get("session") == session:
            return head
        for snapshot in reversed(self._catalog.snapshots.of_trajectory(folder.trajectory, 1000)):
            if self.session_of(snapshot).get("session") == session:
                return snapshot
        return None

    def session_of(self, snapshot: Snapshot) -> dict[str, Any]:
        found = self._catalog.conversations.state(snapshot.id).get("values", {})
        return dict(found)

    def head(self, folder: OpenFolder) -> Snapshot:
        return self._catalog.snapshots.get(self._catalog.trajectories.get(folder.trajectory).head)

    def scan(self, folder: OpenFolder, root: int) -> FolderScan:
        self._watches.use(folder.watch, folder.user.uid)
        if not folder.index.knows_nothing():
            return folder.watch.scan(root, folder.user, folder.index)
        with look.open_view(self._context, self.head(folder)) as view:
            there = listing(view)
            folder.index.expect(set(there))
            scan = folder.watch.scan(root, folder.user, folder.index)
            scan = compare(view, there, root, folder.user, folder.index, scan)
            folder.index.reveal(scan.changed)  # any of them may have been ignored before
            scan.revealed.update(scan.changed)
        folder.index.note_compared()
        if not scan:
            folder.index.note_look(scan.began_ns)
        return scan

    def find_changes(self, folder: OpenFolder, root: int, *, keep: bool = False) -> tuple[FolderScan, Touches]:
        """Find the changes since the head, and the processes that made changes since the last call. With `keep`, the
        next call tells the same processes again."""
        self._recover(folder, root)
        writers = folder.writers
        if writers is None:
            return self.scan(folder, root), Touches()
        before = writers.peek() if keep else writers.take()
        folder.taken |= Touches(knows=True) if keep else before
        scan = self.scan(folder, root)
        writers.follow([path for path, mark in scan.changed.items() if stat.S_ISDIR(mark[0])])
        return scan, before | writers.peek()

    def _recover(self, folder: OpenFolder, root: int) -> None:
        """Settle a rewind that was cut off, before anything is looked at."""
        text = self._catalog.get_meta(rewind_key(folder))
        if not text or not text.startswith("{"):
            return
        cut_off = CutOff.at(text)
        if folder.cut_off is not None:
            return
        try:
            head, to = map(self._catalog.snapshots.get, (cut_off.head, cut_off.to))
            with look.open_view(self._context, head) as before, look.open_view(self._context, to) as after:
                putting = PuttingBack(root, folder.user, before, after, cut_off.place)
                putting.recover(cut_off.paths)
        except SnapshotdError as exc:  # its files are in the folder, and the next scan finds them
            _log.warning("a rewind of %s was cut off, and is not settled: %s", short(folder.trajectory), exc)
        else:
            for sentence in describe_left(putting.left):
                _log.warning("a rewind of %s was cut off: %s", short(folder.trajectory), sentence)
            if head.id == self.head(folder).id:
                folder.cut_off = cut_off
                return
        self._catalog.set_meta(rewind_key(folder), "")


def rewind_key(folder: OpenFolder) -> str:
    """Return the name of the catalog's note about a rewind that has begun to put files back and is not recorded yet."""
    return f"folder-rewind/{folder.trajectory}"


def limit_chars(value: Any, most_chars: int = MOST_RESULT_CHARS) -> Any:
    text = json.dumps(value)
    return value if len(text) <= most_chars else text[:most_chars]


def paths_of(scan: FolderScan) -> list[str] | None:
    """The paths of a scan for a record; None if they are too many."""
    paths = [*scan.changed, *scan.deleted]
    return None if len(paths) > MOST_PATHS else [name_of(os.fsencode(path)) for path in paths]
