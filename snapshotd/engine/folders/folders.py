"""Snapshots of a folder of this machine in which a user's agent works, without a sandbox.

A folder is one trajectory for each user. Hooks of the agent tell of every call before and after it. Changes in between
are the call's, unless the kernel says that a process of somebody else made them (writers.py); those, and changes at
another time, get a snapshot of their own (`edits`). Each snapshot notes whose its changes are (plan.py). So a rewind
knows the files that the agent has touched, and leaves all others alone (putting_back.py).

Several sessions of an agent may follow each other or work side by side. A snapshot takes its files from its parent, and
its conversation from the last snapshot of its session.

The order of a snapshot is that of any step (sandbox/step.py): the layer, then the commit. The index of the folder
(scan.py) is in memory; after a restart the first scan compares the folder with the head.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shlex
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from snapshotd.engine.base import RetentionPolicy, RewindMode, RewindPreview
from snapshotd.engine.context import Context
from snapshotd.engine.folders import capture as capturing
from snapshotd.engine.folders import databases, transcripts
from snapshotd.engine.folders.calls import OpenCall, Part, end_of, parts_of, session_of
from snapshotd.engine.folders.capture import Capture
from snapshotd.engine.folders.comparing import compare, listing
from snapshotd.engine.folders.cut_off import CutOff
from snapshotd.engine.folders.events import HookEvent
from snapshotd.engine.folders.names import name_of
from snapshotd.engine.folders.places import FolderPlace, KnownFolders, open_folder, own_name, place_of
from snapshotd.engine.folders.plan import KEY, FolderChanges, History, RewindPlan, changes_of, plan, told
from snapshotd.engine.folders.putting_back import Facts, PuttingBack
from snapshotd.engine.folders.quiet import FolderWatch, Watches
from snapshotd.engine.folders.refusal import Refusal
from snapshotd.engine.folders.scan import LONGEST_S, FolderIndex, FolderScan
from snapshotd.engine.folders.user_files import UserFiles
from snapshotd.engine.folders.writers import Process, Touches, Writers, agent_of
from snapshotd.engine.sandbox.root import Captured
from snapshotd.engine.sandbox.step import StepListener, marker
from snapshotd.engine.storing import look, retention
from snapshotd.engine.storing.cold import Cold, gone
from snapshotd.errors import Conflict, LimitExceeded, NotFound, SnapshotdError, UsageError
from snapshotd.failpoints import hit
from snapshotd.kernel import fanotify, files, turns
from snapshotd.kernel.identity import HostUser, acting_as
from snapshotd.layers.amend import amend
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
"""Paths that the journal's entry of a call shows. A rewind goes by the changes that its snapshot notes, of any number."""
MOST_LEFT = 20_000
"""Sentences that a rewind records."""
MOST_RESULT_CHARS = 1 << 20
MOST_KNOWN = 400_000
"""Files of one user's folders that the daemon knows in memory, more or less."""
_MOST_OPEN, _MOST_SESSIONS = 200, 50
"""Calls that have begun in one folder, and sessions there whose place is in memory."""
_MOST_OPEN_CHARS = 1 << 16
"""Arguments of a call that has only begun: its end tells them again."""
MOST_WRITERS = 32
"""Folders of all users but root in which the kernel tells at once who changes files."""
_BUSY_S = 60.0
_UNDOABLE = ("rewind", "undo")
_NEEDED = re.compile(r"(^|/)\.env(\.[^/]*)?$|\.(db|sqlite3?)(-wal|-shm|-journal)?$")
"""Files that git often ignores and that programs need as they were."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Folder:
    """One folder of one user. Calls in `calls` have begun and not ended; `cut_off` is a rewind that was not recorded, whose
    changes the next scan may find."""

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


class Folders:
    """See the module's text. Thread-safe. `listener`: told of every snapshot."""

    def __init__(self, context: Context, cold: Cold, listener: StepListener) -> None:
        self._context, self._catalog, self._cold, self._listener = context, context.catalog, cold, listener
        self._places = KnownFolders(self._catalog)
        self._folders: dict[tuple[int, str], _Folder] = {}
        self._watches, self._writers, self._user_files = Watches(), Watches(MOST_WRITERS), UserFiles()
        self._ending = ThreadPoolExecutor(1, "folder-calls")
        self._lock = threading.Lock()

    def close(self) -> None:
        """Give the kernel's marks back, and end the process that opens users' files. Idempotent."""
        self._watches.close()
        self._writers.close()
        self._ending.shutdown()
        self._user_files.close()

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def hook(self, user: HostUser, root: int, event: HookEvent, hook: int | None = None) -> Snapshot | None:
        """Take the snapshot that an event of an agent calls for, of the folder that `root` holds. None: nothing changed,
        and no call has ended. `hook`: the process that told of it, which is a child of the agent. LimitExceeded,
        NotPermitted, OutOfSpace."""
        agent = None if hook is None else agent_of(hook)
        with self._held(user, root, longest_s=LONGEST_S) as folder, _before_others(root):
            folder.refusal.check(root)
            with folder.refusal.noted(root):
                self._end_lost(folder, root)
                self._watch(folder, root, event, agent)
                try:
                    if event.stage == "before":
                        return self._begun(folder, root, event, agent)
                    if event.stage == "after":
                        return self._ended(folder, root, end_of(folder.calls, event), event)
                    return self._between(folder, root, event)
                finally:
                    if folder.writers is not None:
                        folder.writers.listen(bool(folder.calls))

    def _begun(self, folder: _Folder, root: int, event: HookEvent, agent: Process | None) -> Snapshot | None:
        """A call begins: the changes until now are not its own. Calls of one session that run side by side are not told
        apart, and their changes wait for the end of one. Where recording them takes so long that the agent has gone on,
        the begin counts as not told."""
        found = None
        if not folder.calls or {one.session for one in folder.calls} != {session_of(event)}:
            found = self._settle(folder, root)
        if time.monotonic() - folder.held_at > LONGEST_S:
            return found
        del folder.calls[: max(len(folder.calls) - _MOST_OPEN + 1, 0)]
        bounded = replace(event, arguments=_bounded(event.arguments, _MOST_OPEN_CHARS), result=None, error=None)
        folder.calls.append(OpenCall(bounded, agent))
        return found

    def _ended(self, folder: _Folder, root: int, call: OpenCall | None, event: HookEvent) -> Snapshot:
        """A call has ended. If its begin was not told, its changes count as somebody else's too."""
        mine = Part(call)
        for part in self._parts(folder, root, call):
            if part.call is call and call is not None:
                mine = part
                continue
            if call is None and part.call is None:
                for path in part.paths:  # it may be the call's, so a rewind names it
                    part.changes.add({session_of(event)}, os.fsencode(path))
            self._save(folder, root, part)
        if call is not None:
            folder.calls.remove(call)
        return self._call(folder, root, mine, event)

    def _between(self, folder: _Folder, root: int, event: HookEvent) -> Snapshot | None:
        """A person's turn: a call that has not ended by now was interrupted."""
        cut_off = [one for one in folder.calls if one.session == session_of(event)]
        parts = self._parts(folder, root, cut_off[-1] if cut_off else None)
        folder.calls = [one for one in folder.calls if one not in cut_off]
        if event.stage == "prompt" and [part.call for part in parts] == [None]:
            return self._commit(
                folder, root, parts[0].scan, marker("prompt", event.arguments), parts[0].changes, event=event
            )
        saved = [self._save(folder, root, part, ended=part.call in cut_off) for part in parts]
        if event.stage == "prompt":
            return self._commit(folder, root, FolderScan(), marker("prompt", event.arguments), event=event)
        return saved[-1] if saved else None

    def _watch(self, folder: _Folder, root: int, event: HookEvent, agent: Process | None) -> None:
        """Have the kernel tell who changes the folder, from the first hook on."""
        if agent is None:
            return
        folder.agents[session_of(event)] = agent
        while len(folder.agents) > _MOST_SESSIONS:
            del folder.agents[next(iter(folder.agents))]
        if folder.writers is None or folder.writers.closed:
            try:
                folder.writers = Writers(root, partial(self._lost_agent, folder.trajectory))
            except (OSError, NotImplementedError):
                return  # `doctor` says so
            scan = self._scan(folder, root)
            known = {**folder.index.known, **scan.changed}
            folder.writers.follow(["", *(path for path, mark in known.items() if stat.S_ISDIR(mark[0]))])
            folder.writers.take()
            for session, one in folder.agents.items():
                folder.writers.know(session, one)
        self._writers.use(folder.writers, folder.user.uid)
        folder.writers.know(session_of(event), agent)

    def _lost_agent(self, trajectory: TrajectoryID, session: str) -> None:
        with contextlib.suppress(RuntimeError):  # the daemon ends
            self._ending.submit(self._end_calls, trajectory)

    def _end_calls(self, trajectory: TrajectoryID) -> None:
        """The agent of a session has ended: what it has done so far is its call's, and what comes now is not."""
        try:
            with self._reopened(self._catalog.get_trajectory(trajectory)) as (folder, root):
                self._end_lost(folder, root)
        except (SnapshotdError, OSError) as exc:
            _log.warning(
                "an interrupted call in the folder of %s is recorded at the next hook: %s", short(trajectory), exc
            )

    def _end_lost(self, folder: _Folder, root: int) -> None:
        """Record the calls whose agents have ended."""
        lost = [one for one in folder.calls if one.has_lost_its_agent()]
        if lost:
            parts = self._parts(folder, root, lost[-1])
            folder.calls = [one for one in folder.calls if one not in lost]
            for part in parts:
                self._save(folder, root, part, ended=part.call in lost)

    def checkpoint(self, user: HostUser, root: int, name: str) -> Snapshot:
        """A snapshot of the folder as it is, with a tag, which every prune keeps. Conflict, UsageError: the name."""
        known_as = own_name(user, name)
        with self._held(user, root) as folder:
            self._settle(folder, root)
            snapshot = self._commit(folder, root, FolderScan(), marker("checkpoint", {"name": name}))
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

    def session_of(self, user: HostUser, root: int, hook: int, to: Snapshot) -> str | None:
        """The session in which a person asks for a rewind, known by the process: None where it is not known, or is the
        only one that has changed files since."""
        with self._held(user, root) as folder:
            self._settle(folder, root)
            history = History.since(self._context, self._catalog.get_trajectory(folder.trajectory), to.seq)
            agent = agent_of(hook)
            mine = [one for one, process in folder.agents.items() if process == agent]
            changed = history.sessions()
            return next((one for one in mine if history.first_of(one) in changed and len(changed) > 1), None)

    def rewind(self, trajectory: Trajectory, to: Snapshot, mode: RewindMode, session: str | None = None) -> Snapshot:
        """See `Engine.rewind`. Only files that the agent has touched since are put back; the conversation becomes a new
        session of the agent. The call of the snapshot names the command that goes on with it (`resume`), and what had
        to stay (`left`). `to` is pinned."""
        self._check(trajectory, to)
        with self._reopened(trajectory) as (folder, root):
            self._settle(folder, root)
            facts: dict[str, Any] = {"to": to.id, "mode": mode, "from": self._head(folder).id}
            history = History.since(self._context, trajectory, to.seq)
            chosen = history.chosen(session, to) if mode != "conversation" else set()
            line = self._cut(folder, to) if mode != "files" else None
            return self._go(folder, root, "rewind", facts, to, (history, chosen), line)

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
            changes = changes_of(self._context, last)
            chosen = set() if changes is None else set(changes.made)
            history = History.since(self._context, trajectory, before.seq)
            return self._go(folder, root, "undo", facts, before, (history, chosen), session)

    def preview(
        self, trajectory: Trajectory, to: Snapshot, mode: RewindMode, max_files: int, session: str | None = None
    ) -> RewindPreview:
        """See `Engine.preview_rewind`."""
        self._check(trajectory, to)
        found, left = RewindPlan(), list[str]()
        with self._reopened(trajectory) as (folder, root):
            head = self._head(folder)
            if mode != "conversation":
                scan, touches = self._seen(folder, root, keep=True)
                history = History.since(self._context, trajectory, to.seq)
                for part in parts_of(scan, touches, folder.calls, None, folder.agents):
                    history.add(part.changes)
                found = self._planned(folder, head, to, history, history.chosen(session, to))
                left = told(found.left | self._needed(folder, root, to))
        messages: tuple[Message, ...] = ()
        if mode != "files" and self._session(head).get("session") == self._session(to).get("session"):
            messages = tuple(self._catalog.conversation(head.id, min(to.messages, head.messages)))
        changes = tuple(found.changes[:max_files])
        return RewindPreview(head.id, to.id, mode, changes, len(found.changes), messages, (), tuple(left))

    def _go(
        self,
        folder: _Folder,
        root: int,
        name: str,
        facts: dict[str, Any],
        to: Snapshot,
        wanted: tuple[History, set[str]],
        session: dict[str, Any] | None,
    ) -> Snapshot:
        """Put files back, then record the folder as it is now. A crash in between leaves a folder that the next rewind
        or hook finds changed; nothing is lost, since the head has the files of before. `wanted`: whose changes since are
        taken back."""
        head, found, done = self._head(folder), RewindPlan(), dict[bytes, Facts | None]()
        if facts["mode"] != "conversation":
            found = self._planned(folder, head, to, *wanted)
            cut_off = CutOff.of(head, to, found)
            folder.cut_off = None
            self._catalog.set_meta(_rewind_key(folder), cut_off.text())
            with look.open_view(self._context, head) as before, look.open_view(self._context, to) as after:
                putting = PuttingBack(root, folder.user, before, after, cut_off.place)
                putting.run(found.changes)
            done = putting.done
            found.left |= putting.left | self._needed(folder, root, to)
            hit("engine.folders.put_back")
        if session is not None and session.get("session"):
            facts["resume"] = transcripts.RESUME[session["agent"]].format(session=shlex.quote(session["session"]))
            if session["session"] != self._session(to).get("session"):
                facts["continues"] = [session["session"], self._session(to).get("session")]
        if found.left:
            sentences = told(found.left)
            more = [f"{len(sentences) - MOST_LEFT} more paths stay"] if len(sentences) > MOST_LEFT else []
            facts["left"] = sentences[:MOST_LEFT] + more
        scan, touches = self._seen(folder, root)
        changes = FolderChanges()
        for part in parts_of(scan, touches, folder.calls, None, folder.agents):
            for path in part.paths:
                raw = os.fsencode(path)
                mark = scan.changed.get(path)
                put = None if mark is None else (mark[:1] if stat.S_ISDIR(mark[0]) else (*mark[:3], mark[4]))
                is_ours = raw in done and done[raw] == put
                changes.add(found.owners[raw] if is_ours else part.changes.owners(raw), raw)
        facts["files"] = _paths(scan)
        follows = to if session is not None else None
        snapshot = self._commit(folder, root, scan, marker(name, facts), changes, follows=follows, session=session)
        self._catalog.set_meta(_rewind_key(folder), "")
        return snapshot

    def _planned(self, folder: _Folder, head: Snapshot, to: Snapshot, history: History, chosen: set[str]) -> RewindPlan:
        before, after = look.open_pair(self._context, head, to)
        with before, after:
            return plan(before, after, history, chosen, folder.index.passed())

    def _needed(self, folder: _Folder, root: int, to: Snapshot) -> dict[bytes, str]:
        """Files that no snapshot has as they are: those that are too large or cannot be read, and ignored ones that the
        state of then may need and that have changed since."""
        found = dict.fromkeys(
            map(os.fsencode, folder.index.blind()), "it is too large or cannot be read, so no snapshot has it as it is"
        )
        for path in folder.index.passed():
            if _NEEDED.search(path):
                with contextlib.suppress(OSError), acting_as(folder.user):
                    above, _, name = os.fsencode(path).rpartition(b"/")
                    directory = files.open_deep(root, above, one_device=True)
                    try:
                        st = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    finally:
                        os.close(directory)
                    if stat.S_ISREG(st.st_mode) and st.st_mtime_ns > to.created_at_ns:
                        found[os.fsencode(path)] = (
                            "it is ignored, so no snapshot has it, and it was changed since; a line "
                            f"!{name_of(name)} in .snapshotdignore has it recorded from now on"
                        )
        return found

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

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def _settle(self, folder: _Folder, root: int) -> Snapshot | None:
        """Record what changed since the head, so that nothing of it can be lost."""
        saved = [self._save(folder, root, part) for part in self._parts(folder, root, None)]
        return saved[-1] if saved else None

    def _parts(self, folder: _Folder, root: int, closing: OpenCall | None) -> list[Part]:
        """The changes since the head, and whose they are. `closing`: a call that ends."""
        scan, touches = self._seen(folder, root)
        parts = parts_of(scan, touches, folder.calls, closing, folder.agents)
        if folder.cut_off is not None and scan:
            with look.open_view(self._context, self._catalog.get_snapshot(folder.cut_off.to)) as after:
                folder.cut_off.claim(parts, PuttingBack(root, folder.user, after, after, folder.cut_off.place))
        return parts

    def _save(self, folder: _Folder, root: int, part: Part, *, ended: bool = False) -> Snapshot:
        """Record changes while the call that they belong to runs (`ended`: it was interrupted), or those of no call."""
        if part.call is None:
            return self._commit(folder, root, part.scan, marker("edits", {}), part.changes)
        status = CallStatus.INTERRUPTED if ended else CallStatus.UNKNOWN
        return self._call(folder, root, part, part.call.event, status=status)

    def _call(
        self, folder: _Folder, root: int, part: Part, event: HookEvent, *, status: CallStatus | None = None
    ) -> Snapshot:
        """The snapshot of a call that has ended, with its part of the changes."""
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
            details={key: value for key, value in details.items() if value is not None} | {"files": _paths(part.scan)},
        )
        return self._commit(folder, root, part.scan, call, part.changes, event=event, entries=(entry,))

    def _commit(
        self,
        folder: _Folder,
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
        """One snapshot: the scan's changes as a layer, and the call. `changes`: whose they are. `event`: it
        belongs to that session, whose new messages are read. `follows`, `session`: it continues that snapshot, as that
        session."""
        began = time.perf_counter_ns()
        head = self._head(folder)
        messages: list[Message] = []
        if event is not None:
            follows, session, messages = self._conversation(folder, head, event)
        scan.warnings.extend(databases.without_log(scan.changed, folder.index.passed()))
        is_rewind = not entries and call.name in _UNDOABLE  # half of it is no state that anything could go on from
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
            values = self._session(head if follows is None else follows) if session is None else session
            noted = {KEY: changes.record(snapshot.seq)} if changes is not None else {}
            try:
                self._catalog.commit_snapshot(
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
            folder.index.took(path, mark, digest)
        folder.index.reveal(capture.unread)
        folder.index.looked(scan.began_ns)
        if folder.cut_off is not None:
            folder.cut_off = None
            self._catalog.set_meta(_rewind_key(folder), "")
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
            while len(folder.readers) >= _MOST_SESSIONS:
                del folder.readers[next(iter(folder.readers))]
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
        self._watches.use(folder.watch, folder.user.uid)
        if not folder.index.knows_nothing():
            return folder.watch.scan(root, folder.user, folder.index)
        with look.open_view(self._context, self._head(folder)) as view:
            there = listing(view)
            folder.index.expect(set(there))
            scan = folder.watch.scan(root, folder.user, folder.index)
            scan = compare(view, there, root, folder.user, folder.index, scan)
            folder.index.reveal(scan.changed)  # any of them may have been ignored before
            scan.revealed.update(scan.changed)
        folder.index.compared()
        if not scan:
            folder.index.looked(scan.began_ns)
        return scan

    def _seen(self, folder: _Folder, root: int, *, keep: bool = False) -> tuple[FolderScan, Touches]:
        """The changes since the head, and the processes that were seen to make changes since the last time. `keep`: the
        next time tells them again."""
        self._recover(folder, root)
        writers = folder.writers
        if writers is None:
            return self._scan(folder, root), Touches()
        before = writers.peek() if keep else writers.take()
        folder.taken |= Touches(knows=True) if keep else before
        scan = self._scan(folder, root)
        writers.follow([path for path, mark in scan.changed.items() if stat.S_ISDIR(mark[0])])
        return scan, before | writers.peek()

    def _recover(self, folder: _Folder, root: int) -> None:
        """Settle a rewind that was cut off, before anything is looked at."""
        text = self._catalog.get_meta(_rewind_key(folder))
        if not text or not text.startswith("{"):
            return
        cut_off = CutOff.at(text)
        if folder.cut_off is not None:
            return
        try:
            head, to = map(self._catalog.get_snapshot, (cut_off.head, cut_off.to))
            with look.open_view(self._context, head) as before, look.open_view(self._context, to) as after:
                putting = PuttingBack(root, folder.user, before, after, cut_off.place)
                putting.recover(cut_off.paths)
        except SnapshotdError as exc:  # its files are in the folder, and the next scan finds them
            _log.warning("a rewind of %s was cut off, and is not settled: %s", short(folder.trajectory), exc)
        else:
            for sentence in told(putting.left):
                _log.warning("a rewind of %s was cut off: %s", short(folder.trajectory), sentence)
            if head.id == self._head(folder).id:
                folder.cut_off = cut_off
                return
        self._catalog.set_meta(_rewind_key(folder), "")

    # -- folders -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _held(self, user: HostUser, root: int, *, longest_s: float = math.inf) -> Iterator[_Folder]:
        """The folder, which no other thread has meanwhile. It begins here if it is new. LimitExceeded: another thread has
        it, and has had it for `longest_s`."""
        place = place_of(root, user)
        with self._lock:
            known = self._places.find(user, place)
            folder = self._folders.get((user.uid, place.identity))
            if folder is None or known != folder.trajectory:
                if known is None:
                    known = self._begin(user, place)
                folder = _Folder(user, known, self._catalog.draw_fence(known))
                self._folders[user.uid, place.identity] = folder
            self._folders[user.uid, place.identity] = self._folders.pop((user.uid, place.identity))  # the last one used
            self._places.moved(place, known)
        waits_s = min(_BUSY_S, max(0.0, longest_s - (time.monotonic() - folder.held_at)))
        if not folder.lock.acquire(timeout=waits_s):
            raise LimitExceeded(
                f"{place.path} is still being recorded, or its file system does not answer; no snapshot is taken of it "
                "until then. Name what needs none, such as builds and data, in a .snapshotdignore at its top"
            )
        try:
            folder.user, folder.held_at, folder.taken = user, time.monotonic(), Touches(knows=True)
            yield folder
        except BaseException:
            if folder.writers is not None:
                folder.writers.give_back(folder.taken)
            raise
        finally:
            folder.lock.release()
        self._bound(user)

    def _bound(self, user: HostUser) -> None:
        """Forget what is known of the user's folders that were not used for the longest time, if it is too much: the next
        scan of one compares it with its head."""
        with self._lock:
            own = [folder for (uid, _), folder in self._folders.items() if uid == user.uid]
            known = sum(len(folder.index.known) for folder in own)
            for folder in own:
                if known <= MOST_KNOWN or not folder.lock.acquire(blocking=False):
                    continue
                known -= len(folder.index.known)
                folder.watch.close()
                folder.index = FolderIndex()
                folder.lock.release()

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

    def _begin(self, user: HostUser, place: FolderPlace) -> TrajectoryID:
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


def _before_others(root: int) -> contextlib.AbstractContextManager[None]:
    """A turn before all other work of the daemon, where no file system can make it last."""
    return turns.first() if fanotify.is_local(root) else contextlib.nullcontext()


def _rewind_key(folder: _Folder) -> str:
    """Names the rewind that has begun to put files back, and is not recorded."""
    return f"folder-rewind/{folder.trajectory}"


def _bounded(value: Any, most_chars: int = MOST_RESULT_CHARS) -> Any:
    text = json.dumps(value)
    return value if len(text) <= most_chars else text[:most_chars]


def _paths(scan: FolderScan) -> list[str] | None:
    """The paths of a scan for a record; None if they are too many."""
    paths = [*scan.changed, *scan.deleted]
    return None if len(paths) > MOST_PATHS else [name_of(os.fsencode(path)) for path in paths]
