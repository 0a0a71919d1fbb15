"""Snapshots of a folder of this machine in which a user's agent works, without a sandbox.

A folder is one trajectory for each user. Hooks of the agent tell of every call before and after it. Changes in between
are the call's; changes at another time came from outside, and get a snapshot of their own (`edits`). So a rewind knows
the files that the agent has touched, and leaves all others alone.

Several sessions of an agent may follow each other or work side by side. A snapshot takes its files from its parent, and
its conversation from the last snapshot of its session.

The order of a snapshot is that of any step (sandbox/step.py): the layer, then the commit. The index of the folder
(scan.py) is in memory; after a restart the first scan compares the folder with the head.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from snapshotd.engine.base import RetentionPolicy, RewindMode, RewindPreview
from snapshotd.engine.context import Context
from snapshotd.engine.folders import transcripts
from snapshotd.engine.folders.capture import TOP, Capture
from snapshotd.engine.folders.comparing import compare
from snapshotd.engine.folders.events import HookEvent
from snapshotd.engine.folders.places import Place, Places, open_folder, own_name, place_of
from snapshotd.engine.folders.putting_back import put_back, relative
from snapshotd.engine.folders.quiet import FolderWatch, Watches
from snapshotd.engine.folders.scan import FolderIndex, FolderScan
from snapshotd.engine.folders.user_files import UserFiles
from snapshotd.engine.sandbox.root import Captured
from snapshotd.engine.sandbox.step import StepListener, marker
from snapshotd.engine.storing import look, retention
from snapshotd.engine.storing.cold import Cold, gone
from snapshotd.errors import Conflict, NotFound, UsageError
from snapshotd.failpoints import hit
from snapshotd.kernel import turns
from snapshotd.kernel.identity import HostUser
from snapshotd.layers.amend import amend
from snapshotd.trees import diff
from snapshotd.trees.base import Change, ChangeKind
from snapshotd.types import (
    FOLDER,
    MIN_PREFIX_CHARS,
    CallStatus,
    EntryKind,
    JournalEntry,
    Message,
    SandboxSpec,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Stack,
    ToolCall,
    Trajectory,
    TrajectoryID,
    TrajectoryStatus,
    new_id,
    short,
)

MOST_PATHS = 5000
"""Paths that are recorded with a call; of one that changed more, every difference counts as its own."""
MOST_RESULT_CHARS = 1 << 20
_UNDOABLE = ("rewind", "undo")


@dataclass(slots=True)
class _Folder:
    """One folder of one user. `open_calls`: calls that have begun, by their ids, each with its session."""

    user: HostUser
    trajectory: TrajectoryID
    fence: int
    index: FolderIndex = field(default_factory=FolderIndex)
    watch: FolderWatch = field(default_factory=FolderWatch)
    readers: dict[str, transcripts.TranscriptReader] = field(default_factory=dict)
    open_calls: dict[str, HookEvent] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Folders:
    """See the module's text. Thread-safe. `listener`: told of every snapshot."""

    def __init__(self, context: Context, cold: Cold, listener: StepListener) -> None:
        self._context, self._catalog, self._cold, self._listener = context, context.catalog, cold, listener
        self._places = Places(self._catalog)
        self._folders: dict[tuple[int, str], _Folder] = {}
        self._watches, self._user_files = Watches(), UserFiles()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Give the kernel's marks back, and end the process that opens users' files. Idempotent."""
        self._watches.close()
        self._user_files.close()

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def hook(self, user: HostUser, root: int, event: HookEvent) -> Snapshot | None:
        """Take the snapshot that an event of an agent calls for, of the folder that `root` holds. None: nothing changed,
        and no call has ended. LimitExceeded, NotPermitted, OutOfSpace."""
        with turns.first(), self._held(user, root) as folder:
            scan = self._scan(folder, root)
            if event.stage == "before":
                found = None if not scan or folder.open_calls else self._edits(folder, root, scan)
                folder.open_calls[event.call_id or event.tool] = event
                return found
            if event.stage == "after":
                folder.open_calls.pop(event.call_id or event.tool, None)
                return self._call(folder, root, scan, event)
            return self._between(folder, root, scan, event)

    def _between(self, folder: _Folder, root: int, scan: FolderScan, event: HookEvent) -> Snapshot | None:
        """A person's turn: a call that has not ended by now was interrupted."""
        cut_off = [one for one in folder.open_calls.values() if one.session == event.session]
        for one in cut_off:
            del folder.open_calls[one.call_id or one.tool]
        if cut_off and scan:
            self._call(folder, root, scan, cut_off[-1], status=CallStatus.INTERRUPTED)
            scan = FolderScan()
        if event.stage == "prompt":
            return self._commit(folder, root, scan, marker("prompt", event.arguments), event=event)
        return self._edits(folder, root, scan) if scan and not folder.open_calls else None

    def checkpoint(self, user: HostUser, root: int, name: str) -> Snapshot:
        """A snapshot of the folder as it is, with a tag, which every prune keeps. Conflict, UsageError: the name."""
        known_as = own_name(user, name)
        with self._held(user, root) as folder:
            snapshot = self._commit(folder, root, self._scan(folder, root), marker("checkpoint", {"name": name}))
            self._catalog.tag(snapshot.id, known_as)
            return snapshot

    def trajectory(self, user: HostUser, root: int) -> Trajectory:
        """The trajectory of a folder. NotFound: no hook has told of it yet."""
        place = place_of(root, user)
        found = self._places.find(user, place)
        if found is None:
            raise NotFound(f"no snapshot was taken of {place.path} yet; `snapshotd hooks install` in it begins")
        self._places.moved(place, found)
        return self._catalog.get_trajectory(found)

    def snapshot(self, user: HostUser, root: int, ref: str) -> Snapshot:
        """A snapshot of the user's folder, by its id, the beginning of that, or the name of a checkpoint. NotFound. No
        other snapshot is looked at: neither the answer nor the time that it takes tells of any."""
        trajectory = self.trajectory(user, root)
        all_of_it = self._catalog.snapshots(trajectory.id)
        names = {ref, f"{ref}@{user.uid}"}
        found = [one for one in all_of_it if one.id == ref] or [one for one in all_of_it if names & {*one.tags}]
        if not found and len(ref) >= MIN_PREFIX_CHARS:
            found = [one for one in all_of_it if one.id.startswith(ref)]
        if len(found) != 1:
            what = f"there is no snapshot {ref[:80]!r}" if not found else f"{ref} fits {len(found)} snapshots"
            raise NotFound(f"{what} of this folder; its log lists them")
        return found[0]

    # -- going back ----------------------------------------------------------------------------------------------------

    def rewind(self, trajectory: Trajectory, to: Snapshot, mode: RewindMode) -> Snapshot:
        """See `Engine.rewind`. Only files that the agent has touched since are put back; the conversation becomes a new
        session of the agent. The call of the snapshot names the command that goes on with it (`resume`), and what had
        to stay (`left`). `to` is pinned."""
        self._check(trajectory, to)
        with self._reopened(trajectory) as (folder, root):
            self._settle(folder, root)
            facts: dict[str, Any] = {"to": to.id, "mode": mode, "from": self._head(folder).id}
            session = self._cut(folder, to) if mode != "files" else None
            return self._go(folder, root, "rewind", facts, to, self._touched(trajectory, to.seq), session)

    def undo(self, trajectory: Trajectory) -> Snapshot:
        """See `Engine.undo`."""
        with self._reopened(trajectory) as (folder, root):
            self._settle(folder, root)
            last = self._last_rewind(trajectory)
            assert last.parent is not None
            before = self._catalog.get_snapshot(last.parent)
            mode = last.call.arguments["mode"]
            facts = {"of": last.id, "to": before.id, "mode": mode}
            session = self._session(before) if mode != "files" else None
            return self._go(folder, root, "undo", facts, before, _recorded(last.call.arguments), session)

    def preview(self, trajectory: Trajectory, to: Snapshot, mode: RewindMode, max_files: int) -> RewindPreview:
        """See `Engine.preview_rewind`."""
        self._check(trajectory, to)
        changes: list[Change] = []
        with self._reopened(trajectory) as (folder, root):
            head = self._head(folder)
            if mode != "conversation":
                scan = self._scan(folder, root)
                changes = self._changes(
                    folder, head, to, self._touched(trajectory, to.seq), {*scan.changed, *scan.deleted}
                )
        messages: tuple[Message, ...] = ()
        if mode != "files" and self._session(head).get("session") == self._session(to).get("session"):
            messages = tuple(self._catalog.conversation(head.id, min(to.messages, head.messages)))
        return RewindPreview(head.id, to.id, mode, tuple(changes[:max_files]), len(changes), messages, ())

    def _go(
        self,
        folder: _Folder,
        root: int,
        name: str,
        facts: dict[str, Any],
        to: Snapshot,
        touched: set[str] | None,
        session: dict[str, Any] | None,
    ) -> Snapshot:
        """Put files back, then record the folder as it is now. A crash in between leaves a folder that the next rewind
        or hook finds changed; nothing is lost, since the head has the files of before."""
        left: list[str] = []
        if facts["mode"] != "conversation":
            self._catalog.set_meta(_rewind_key(folder), self._head(folder).id)
            with look.open_view(self._context, to) as view:
                left = put_back(root, folder.user, view, self._changes(folder, self._head(folder), to, touched, set()))
            hit("engine.folders.put_back")
        if session is not None and session.get("session"):
            facts["resume"] = transcripts.RESUME[session["agent"]].format(session=shlex.quote(session["session"]))
        if left:
            facts["left"] = left[:100]
        scan = self._scan(folder, root)
        facts["files"] = _paths(scan)
        return self._commit(
            folder, root, scan, marker(name, facts), follows=to if session is not None else None, session=session
        )

    def _cut(self, folder: _Folder, to: Snapshot) -> dict[str, Any]:
        """The session with the history up to a snapshot, as a new one of the agent."""
        session = self._session(to)
        if not session.get("transcript"):
            raise Conflict(
                f"snapshot {short(to.id)} has no conversation that {session.get('agent', 'an agent')} could go on with; "
                "rewind the files alone"
            )
        if session["agent"] != "claude":
            raise UsageError(
                f"the sessions of {session['agent']} cannot be cut at a snapshot; rewind the files alone, and go back in the "
                "conversation with the agent's own command"
            )
        own = self._user_files.of(folder.user)
        new = transcripts.cut(own, session["transcript"], session.get("last"), session.get("call"))
        if new is None:
            return {"agent": session["agent"]}
        return {**session, **asdict(new)}

    def _check(self, trajectory: Trajectory, to: Snapshot) -> None:
        if to.trajectory != trajectory.id:
            raise Conflict(
                f"snapshot {short(to.id)} is not of the folder of {short(trajectory.id)}; restore it elsewhere"
            )
        if to.state in (SnapshotState.LOST, SnapshotState.PRUNED):
            raise gone(to)

    def _last_rewind(self, trajectory: Trajectory) -> Snapshot:
        for snapshot in reversed(self._catalog.snapshots(trajectory.id, 100)):
            if snapshot.call.name in _UNDOABLE and not self._catalog.own_entries(snapshot.id):
                return snapshot
            if self._catalog.own_entries(snapshot.id):
                break
        raise Conflict(
            f"there is nothing to undo in {short(trajectory.id)}: the agent has gone on since the last rewind, or there was "
            "none; `snapshotd rewind` goes to any snapshot"
        )

    def _touched(self, trajectory: Trajectory, since: int) -> set[str] | None:
        """The paths that the agent, and rewinds, have changed since a snapshot. None: too many to tell apart."""
        touched: set[str] = set()
        for snapshot in self._catalog.snapshots(trajectory.id):
            if snapshot.seq <= since:
                continue
            own = self._catalog.own_entries(snapshot.id)
            if own or "files" in snapshot.call.arguments:
                paths = _recorded(own[0].details if own else snapshot.call.arguments)
                if paths is None:
                    return None
                touched |= paths
        return touched

    def _changes(
        self, folder: _Folder, head: Snapshot, to: Snapshot, touched: set[str] | None, dirty: set[str]
    ) -> list[Change]:
        """The changes that lead to a snapshot, of paths that were touched and are not ignored now. `dirty`: paths that
        are not as the head has them."""
        before, after = look.open_pair(self._context, head, to)
        with before, after:
            try:
                found = list(diff.diff(before, after, TOP))
            except FileNotFoundError:
                return []
            listed = {relative(change) for change in found}
            for path in sorted(map(os.fsencode, dirty)):
                if path not in listed:
                    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                        entry = after.lstat(TOP + b"/" + path)
                        found.append(Change(TOP + b"/" + path, ChangeKind.CHANGED, entry, entry))
        return [
            change
            for change in found
            if (path := relative(change))
            and (touched is None or _shown(path) in touched)
            and not folder.index.ignored(os.fsdecode(path))
        ]

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def _settle(self, folder: _Folder, root: int) -> None:
        """Record what changed since the head, so that nothing of it can be lost."""
        scan = self._scan(folder, root)
        if scan:
            self._edits(folder, root, scan)

    def _edits(self, folder: _Folder, root: int, scan: FolderScan) -> Snapshot:
        """Changes that no call has made. While a call runs, they are the call's; after a rewind that was cut off, they are
        the rewind's, which another rewind may take back."""
        if folder.open_calls:
            return self._call(folder, root, scan, next(reversed(folder.open_calls.values())), status=CallStatus.UNKNOWN)
        cut_off = self._catalog.get_meta(_rewind_key(folder)) == self._head(folder).id
        return self._commit(folder, root, scan, marker("edits", {"files": _paths(scan)} if cut_off else {}))

    def _call(
        self, folder: _Folder, root: int, scan: FolderScan, event: HookEvent, *, status: CallStatus | None = None
    ) -> Snapshot:
        """The snapshot of a call that has ended."""
        conceal = self._context.secrecy.of(self._catalog.get_trajectory(folder.trajectory)).conceal
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
            after=self._head(folder).id,
            began_at_ns=call.started_at_ns,
            status=status,
            ended_at_ns=time.time_ns(),
            result=conceal(_bounded(event.result)),
            error=error,
            details={key: value for key, value in details.items() if value is not None} | {"files": _paths(scan)},
        )
        return self._commit(folder, root, scan, call, event=event, entries=(entry,))

    def _commit(
        self,
        folder: _Folder,
        root: int,
        scan: FolderScan,
        call: ToolCall,
        *,
        event: HookEvent | None = None,
        entries: Sequence[JournalEntry] = (),
        follows: Snapshot | None = None,
        session: dict[str, Any] | None = None,
    ) -> Snapshot:
        """One snapshot: the scan's changes as a layer, and the call. `event`: it belongs to that session, whose new
        messages are read. `follows`, `session`: it continues that snapshot, as that session."""
        began = time.perf_counter_ns()
        head = self._head(folder)
        messages: list[Message] = []
        if event is not None:
            follows, session, messages = self._conversation(folder, head, event)
        capture = Capture(root, folder.user, scan)
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
            try:
                self._catalog.commit_snapshot(
                    snapshot,
                    tuple(messages),
                    expected_head=head.id,
                    entries=entries,
                    fence=folder.fence,
                    state=None if session is None else {"values": session},
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
            folder.index.took(path, mark, digest)
        self._submit(snapshot)
        return snapshot

    def _submit(self, snapshot: Snapshot) -> None:
        """Have it counted, merged and stored. No process writes to its layer, as after a pivot."""
        taken = Captured(
            snapshot.stack, "pivot", None, snapshot.pause_ns, snapshot.base or snapshot.id, snapshot.own_layers
        )
        self._listener(snapshot, taken)

    def _conversation(
        self, folder: _Folder, head: Snapshot, event: HookEvent
    ) -> tuple[Snapshot | None, dict[str, Any], list[Message]]:
        """The snapshot that the event's session continues (None: the head), the session, and its new messages."""
        last = self._last_of(folder, head, event.session)
        reader = folder.readers.get(event.session)
        if reader is None:
            place = {} if last is None else self._session(last)
            recorded = () if last is None else self._catalog.conversation(last.id)
            reader = folder.readers[event.session] = transcripts.TranscriptReader.at(place, recorded)
        messages = reader.read(event, self._user_files.of(folder.user))
        conceal = self._context.secrecy.of(self._catalog.get_trajectory(folder.trajectory)).conceal
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
            return self._catalog.snapshots(folder.trajectory)[0], session, concealed
        return (None if last.id == head.id else last), session, concealed

    def _last_of(self, folder: _Folder, head: Snapshot, session: str) -> Snapshot | None:
        """The last snapshot of a session; None for a new one."""
        if self._session(head).get("session") == session:
            return head
        for snapshot in reversed(self._catalog.snapshots(folder.trajectory, 1000)):
            if self._session(snapshot).get("session") == session:
                return snapshot
        return None

    def _session(self, snapshot: Snapshot) -> dict[str, Any]:
        found = self._catalog.state(snapshot.id).get("values", {})
        return dict(found)

    def _head(self, folder: _Folder) -> Snapshot:
        return self._catalog.get_snapshot(self._catalog.get_trajectory(folder.trajectory).head)

    def _scan(self, folder: _Folder, root: int) -> FolderScan:
        self._watches.use(folder.watch)
        scan = folder.watch.scan(root, folder.user, folder.index)
        if folder.index.knows_nothing():
            with look.open_view(self._context, self._head(folder)) as view:
                scan = compare(view, root, folder.user, folder.index, scan)
            folder.index.compared()
        return scan

    # -- folders -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _held(self, user: HostUser, root: int) -> Iterator[_Folder]:
        """The folder, which no other thread has meanwhile. It begins here if it is new."""
        place = place_of(root, user)
        with self._lock:
            known = self._places.find(user, place)
            folder = self._folders.get((user.uid, place.identity))
            if folder is None or known != folder.trajectory:
                if known is None:
                    known = self._begin(user, place)
                folder = _Folder(user, known, self._catalog.draw_fence(known))
                self._folders[user.uid, place.identity] = folder
            self._places.moved(place, known)
        with folder.lock:
            folder.user = user
            yield folder

    @contextlib.contextmanager
    def _reopened(self, trajectory: Trajectory) -> Iterator[tuple[_Folder, int]]:
        """The folder of a trajectory, and its descriptor."""
        facts = self._catalog.snapshots(trajectory.id)[0].call.arguments
        path = self._places.path_of(trajectory.id) or facts["folder"]
        try:
            user = HostUser.of(facts["uid"])
        except KeyError:
            user = HostUser(facts["uid"], facts["gid"])
        try:
            root = open_folder(path, user)
        except OSError as exc:
            raise NotFound(
                f"the folder {path} cannot be opened: {exc.strerror}; restore the snapshot elsewhere"
            ) from exc
        try:
            if self._places.find(user, place_of(root, user)) != trajectory.id:
                raise Conflict(
                    f"{path} is another folder by now than the one of {short(trajectory.id)}, and stays as it is; restore the "
                    "snapshot elsewhere"
                )
            with self._held(user, root) as folder:
                yield folder, root
        finally:
            os.close(root)

    def _begin(self, user: HostUser, place: Place) -> TrajectoryID:
        """A new trajectory with an empty first snapshot, so that it exists before the first scan."""
        image = next((one for one in self._context.images.list() if one.name == "default"), None)
        image = image or self._context.images.empty((), "/workspace")
        facts = {"folder": place.path, "uid": user.uid, "gid": user.gid}
        now = time.time_ns()
        snapshot = Snapshot(
            id=SnapshotID(new_id()),
            parent=None,
            trajectory=TrajectoryID(new_id()),
            seq=0,
            stack=Stack(image.id),
            call=marker("start", facts),
            messages=0,
            state=SnapshotState.CAPTURED,
            pause_ns=0,
            created_at_ns=now,
            method="build",
        )
        trajectory = Trajectory(
            id=snapshot.trajectory,
            name=self._places.free_name(user, place.path),
            spec=SandboxSpec(image.id, FOLDER),
            agent=None,
            head=snapshot.id,
            status=TrajectoryStatus.STOPPED,
            created_at_ns=now,
        )
        self._catalog.add_trajectories([(trajectory, snapshot)])
        hit("engine.folders.begun")
        config = self._context.config  # named snapshots stay in any case
        kept = RetentionPolicy(keep_last=config.folder_keep_last, keep_within_s=config.folder_keep_s)
        retention.set_policy(self._catalog, trajectory.id, kept)
        self._places.remember(user, place, trajectory.id)
        self._submit(snapshot)
        return trajectory.id


def _rewind_key(folder: _Folder) -> str:
    """Names the head at which the last rewind began to put files back."""
    return f"folder-rewind/{folder.trajectory}"


def _bounded(result: Any) -> Any:
    text = json.dumps(result)
    return result if len(text) <= MOST_RESULT_CHARS else text[:MOST_RESULT_CHARS]


def _paths(scan: FolderScan) -> list[str] | None:
    """The paths of a scan for a record; None if they are too many."""
    paths = [*scan.changed, *scan.deleted]
    return None if len(paths) > MOST_PATHS else [_shown(os.fsencode(path)) for path in paths]


def _shown(path: bytes) -> str:
    """A path as records name it."""
    return path.decode(errors="backslashreplace")


def _recorded(record: dict[str, Any]) -> set[str] | None:
    paths = record.get("files")
    return None if paths is None else set(paths)
