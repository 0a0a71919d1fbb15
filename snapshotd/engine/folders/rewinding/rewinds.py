"""Going back in a user's folder: only the files that the agent has touched are put back, and the conversation becomes a new
session of the agent."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import stat
from dataclasses import asdict
from typing import Any

from snapshotd.api.history import RewindQuery, RewindRequest
from snapshotd.engine.base import Opener, RewindPreview
from snapshotd.engine.context import Context
from snapshotd.engine.folders import transcripts
from snapshotd.engine.folders.calls import parts_of
from snapshotd.engine.folders.held import HeldFolders
from snapshotd.engine.folders.names import name_of
from snapshotd.engine.folders.recording import UNDOABLE, FolderRecorder, OpenFolder, paths_of, rewind_key
from snapshotd.engine.folders.rewinding.cut_off import CutOff
from snapshotd.engine.folders.rewinding.out_place import Facts
from snapshotd.engine.folders.rewinding.plan import FolderChanges, History, RewindPlan, changes_of, describe_left, plan
from snapshotd.engine.folders.rewinding.putting_back import PuttingBack
from snapshotd.engine.folders.user_files import UserFiles
from snapshotd.engine.folders.writers import agent_of
from snapshotd.engine.markers import is_marker
from snapshotd.engine.sandbox.step import marker
from snapshotd.engine.storage import look
from snapshotd.engine.storage.cold import gone_error
from snapshotd.errors import Conflict, UsageError
from snapshotd.failpoints import hit
from snapshotd.kernel import files
from snapshotd.kernel.identity import HostUser, acting_as
from snapshotd.terms import number_of
from snapshotd.types import Message, Snapshot, SnapshotState, Trajectory, short

MOST_LEFT = 20_000
"""Sentences that a rewind records."""
_NEEDED = re.compile(r"(^|/)\.env(\.[^/]*)?$|\.(db|sqlite3?)(-wal|-shm|-journal)?$")
"""Files that git often ignores and that programs need as they were."""


class FolderRewinds:
    """Thread-safe."""

    def __init__(self, context: Context, held: HeldFolders, recorder: FolderRecorder, user_files: UserFiles) -> None:
        self._context, self._catalog = context, context.catalog
        self._held, self._recorder, self._user_files = held, recorder, user_files

    def session_of(self, user: HostUser, root: int, hook: int, ref: str) -> str | None:
        """Find the session of the process in which a person asks for a rewind. None: it is not known, or no other
        session has changed files since the snapshot `ref`."""
        to = self._catalog.refs.find_snapshot(ref)
        with self._held.hold(user, root) as folder:
            self._recorder.settle(folder, root)
            history = History.since(self._context, self._catalog.trajectories.get(folder.trajectory), to.seq)
            agent = agent_of(hook)
            mine = [one for one, process in folder.agents.items() if process == agent]
            changed = history.sessions()
            return next((one for one in mine if history.first_of(one) in changed and len(changed) > 1), None)

    def rewind(self, trajectory: Trajectory, to: Snapshot, opener: Opener, request: RewindRequest) -> Snapshot:
        """See `BranchingService.rewind`. Only files that the agent has touched since are put back; the conversation becomes a new
        session of the agent. The call of the snapshot names the command that goes on with it (`resume`), and what had
        to stay (`left`). `to` is pinned."""
        self._check_target(trajectory, to)
        mode = request.mode
        with self._held.reopen(trajectory, opener) as (folder, root):
            self._recorder.settle(folder, root)
            facts: dict[str, Any] = {"to": to.id, "mode": mode, "from": self._recorder.head(folder).id}
            history = History.since(self._context, trajectory, to.seq)
            chosen = history.choose_owners(request.session, to) if mode != "conversation" else set()
            line = self._cut_session(folder, to) if mode != "files" else None
            return self._put_back(folder, root, "rewind", facts, to, (history, chosen), line)

    def undo(self, trajectory: Trajectory, opener: Opener) -> Snapshot:
        """See `BranchingService.undo`."""
        with self._held.reopen(trajectory, opener) as (folder, root):
            self._recorder.settle(folder, root)
            last = self._find_last_rewind(trajectory)
            assert last.parent is not None
            before = self._catalog.snapshots.get(last.parent)
            mode = last.call.arguments["mode"]
            facts = {"of": last.id, "to": before.id, "mode": mode}
            session = self._recorder.session_of(before) if mode != "files" else None
            changes = changes_of(self._context, last)
            chosen = set() if changes is None else set(changes.made)
            history = History.since(self._context, trajectory, before.seq)
            return self._put_back(folder, root, "undo", facts, before, (history, chosen), session)

    def preview(self, trajectory: Trajectory, to: Snapshot, opener: Opener, query: RewindQuery) -> RewindPreview:
        """See `BranchingService.preview_rewind`."""
        mode = query.mode
        self._check_target(trajectory, to)
        found, left = RewindPlan(), list[str]()
        with self._held.reopen(trajectory, opener) as (folder, root):
            head = self._recorder.head(folder)
            if mode != "conversation":
                scan, touches = self._recorder.find_changes(folder, root, keep=True)
                history = History.since(self._context, trajectory, to.seq)
                for part in parts_of(scan, touches, folder.calls, None, folder.agents):
                    history.add(part.changes)
                found = self._plan(folder, head, to, history, history.choose_owners(query.session, to))
                left = describe_left(found.left | self._find_blind(folder, root, to))
        messages: tuple[Message, ...] = ()
        if mode != "files" and self._recorder.session_of(head).get("session") == self._recorder.session_of(to).get(
            "session"
        ):
            messages = tuple(self._catalog.conversations.read(head.id, min(to.messages, head.messages)))
        changes = tuple(found.changes[: query.max_files])
        return RewindPreview(head.id, to.id, mode, changes, len(found.changes), messages, (), tuple(left))

    def _put_back(
        self,
        folder: OpenFolder,
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
        head, found, done = self._recorder.head(folder), RewindPlan(), dict[bytes, Facts | None]()
        if facts["mode"] != "conversation":
            found = self._plan(folder, head, to, *wanted)
            cut_off = CutOff.of(head, to, found)
            folder.cut_off = None
            self._catalog.set_meta(rewind_key(folder), cut_off.text())
            with look.open_view(self._context, head) as before, look.open_view(self._context, to) as after:
                putting = PuttingBack(root, folder.user, before, after, cut_off.place)
                putting.run(found.changes)
            done = putting.done
            found.left |= putting.left | self._find_blind(folder, root, to)
            hit("engine.folders.put_back")
        if session is not None and session.get("session"):
            facts["resume"] = transcripts.RESUME[session["agent"]].format(session=shlex.quote(session["session"]))
            if session["session"] != self._recorder.session_of(to).get("session"):
                facts["continues"] = [session["session"], self._recorder.session_of(to).get("session")]
        if found.left:
            sentences = describe_left(found.left)
            more = (
                [f"{number_of(len(sentences) - MOST_LEFT, 'more path')} not changed"]
                if len(sentences) > MOST_LEFT
                else []
            )
            facts["left"] = sentences[:MOST_LEFT] + more
        scan, touches = self._recorder.find_changes(folder, root)
        changes = FolderChanges()
        for part in parts_of(scan, touches, folder.calls, None, folder.agents):
            for path in part.paths:
                raw = os.fsencode(path)
                mark = scan.changed.get(path)
                put = None if mark is None else (mark[:1] if stat.S_ISDIR(mark[0]) else (*mark[:3], mark[4]))
                is_ours = raw in done and done[raw] == put
                changes.add(found.owners[raw] if is_ours else part.changes.owners(raw), raw)
        facts["files"] = paths_of(scan)
        follows = to if session is not None else None
        snapshot = self._recorder.commit(
            folder, root, scan, marker(name, facts), changes, follows=follows, session=session
        )
        self._catalog.set_meta(rewind_key(folder), "")
        return snapshot

    def _plan(self, folder: OpenFolder, head: Snapshot, to: Snapshot, history: History, chosen: set[str]) -> RewindPlan:
        before, after = look.open_pair(self._context, head, to)
        with before, after:
            return plan(before, after, history, chosen, folder.index.ignored_paths())

    def _find_blind(self, folder: OpenFolder, root: int, to: Snapshot) -> dict[bytes, str]:
        """Find files that no snapshot holds as they are: too large ones, unreadable ones, and ignored ones that
        programs may need and that have changed since."""
        found = dict.fromkeys(
            map(os.fsencode, folder.index.blind_paths()),
            "it is too large or cannot be read, so no snapshot has it as it is",
        )
        for path in folder.index.ignored_paths():
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

    def _cut_session(self, folder: OpenFolder, to: Snapshot) -> dict[str, Any]:
        """Make a new session of the agent, with the history up to a snapshot."""
        session = self._recorder.session_of(to)
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
        new = transcripts.cut_session(own, session["transcript"], session.get("last"), session.get("call"))
        if new is None:
            return {"agent": session["agent"]}
        return {**session, **asdict(new)}

    def _check_target(self, trajectory: Trajectory, to: Snapshot) -> None:
        if to.trajectory != trajectory.id:
            raise Conflict(
                f"snapshot {short(to.id)} is not of the folder of {short(trajectory.id)}; restore it elsewhere"
            )
        if to.state in (SnapshotState.LOST, SnapshotState.PRUNED):
            raise gone_error(to)

    def _find_last_rewind(self, trajectory: Trajectory) -> Snapshot:
        for snapshot in reversed(self._catalog.snapshots.of_trajectory(trajectory.id, 100)):
            if is_marker(self._catalog, snapshot, UNDOABLE):
                return snapshot
            if self._catalog.journal.own(snapshot.id):
                break
        raise Conflict(
            f"there is nothing to undo in {short(trajectory.id)}: the agent has gone on since the last rewind, or there was "
            "none; `snapshotd rewind` goes to any snapshot"
        )
