"""Snapshots of a folder of this machine in which a user's agent works, without a sandbox.

A folder is one trajectory for each user. Hooks of the agent tell of every call before and after it. Changes in between
are the call's, unless the kernel says that a process of somebody else made them (writers.py); those, and changes at
another time, get a snapshot of their own (`edits`). Each snapshot notes whose its changes are (plan.py). So a rewind
knows the files that the agent has touched, and leaves all others alone (putting_back.py).

Several sessions of an agent may follow each other or work side by side. A snapshot takes its files from its parent, and
its conversation from the last snapshot of its session.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shlex
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from snapshotd.api.storage import Policy
from snapshotd.engine.base import Opener, RewindMode, RewindPreview
from snapshotd.engine.context import Context
from snapshotd.engine.folders import events, transcripts
from snapshotd.engine.folders.calls import OpenCall, Part, end_of, parts_of, session_of
from snapshotd.engine.folders.cut_off import CutOff
from snapshotd.engine.folders.events import HookEvent
from snapshotd.engine.folders.names import name_of
from snapshotd.engine.folders.places import FolderPlace, KnownFolders, open_folder, own_name, place_of
from snapshotd.engine.folders.plan import FolderChanges, History, RewindPlan, changes_of, plan, told
from snapshotd.engine.folders.putting_back import Facts, PuttingBack
from snapshotd.engine.folders.quiet import Watches
from snapshotd.engine.folders.recording import (
    MOST_SESSIONS,
    UNDOABLE,
    FolderRecorder,
    OpenFolder,
    bounded,
    paths_of,
    rewind_key,
)
from snapshotd.engine.folders.scan import LONGEST_S, FolderIndex, FolderScan
from snapshotd.engine.folders.user_files import UserFiles
from snapshotd.engine.folders.writers import Process, Touches, Writers, agent_of
from snapshotd.engine.sandbox.step import StepListener, marker
from snapshotd.engine.storing import look, retention
from snapshotd.engine.storing.cold import Cold, gone
from snapshotd.errors import Conflict, LimitExceeded, NotFound, SnapshotdError, UsageError
from snapshotd.failpoints import hit
from snapshotd.kernel import fanotify, files, turns
from snapshotd.kernel.identity import HostUser, acting_as
from snapshotd.terms import number_of
from snapshotd.types import (
    FOLDER,
    MIN_PREFIX_CHARS,
    Message,
    SandboxSpec,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Stack,
    Trajectory,
    TrajectoryID,
    TrajectoryStatus,
    new_id,
    short,
)

MOST_LEFT = 20_000
"""Sentences that a rewind records."""
MOST_KNOWN = 400_000
"""Files of one user's folders that the daemon knows in memory, more or less."""
_MOST_OPEN = 200
"""Calls that have begun in one folder."""
_MOST_OPEN_CHARS = 1 << 16
"""Arguments of a call that has only begun: its end tells them again."""
MOST_WRITERS = 32
"""Folders of all users but root in which the kernel tells at once who changes files."""
_BUSY_S = 60.0
_NEEDED = re.compile(r"(^|/)\.env(\.[^/]*)?$|\.(db|sqlite3?)(-wal|-shm|-journal)?$")
"""Files that git often ignores and that programs need as they were."""
_log = logging.getLogger(__name__)


class Folders:
    """See the module's text. Thread-safe. `listener`: told of every snapshot."""

    def __init__(self, context: Context, cold: Cold, listener: StepListener) -> None:
        self._context, self._catalog = context, context.catalog
        self._places = KnownFolders(self._catalog)
        self._folders: dict[tuple[int, str], OpenFolder] = {}
        self._watches, self._writers, self._user_files = Watches(), Watches(MOST_WRITERS), UserFiles()
        self._recorder = FolderRecorder(context, cold, listener, self._watches, self._user_files)
        self._ending = ThreadPoolExecutor(1, "folder-calls")
        self._lock = threading.Lock()

    def close(self) -> None:
        """Give the kernel's marks back, and end the process that opens users' files. Idempotent."""
        self._watches.close()
        self._writers.close()
        self._ending.shutdown()
        self._user_files.close()

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def hook(
        self, user: HostUser, root: int, name: str, payload: dict[str, Any], hook: int | None = None
    ) -> Snapshot | None:
        """Take the snapshot that a hook of the agent `name` calls for, of the folder that `root` holds, with the rights of
        `user`. None: nothing changed, and no call has ended. `hook`: the process that told of it, which is a child of the
        agent and lives until the answer. UsageError: the payload; LimitExceeded, NotPermitted: no snapshots are taken of
        such a folder; OutOfSpace."""
        if name not in events.AGENTS:
            raise UsageError(f"no hooks of {name[:40]!r} are known; choose {', '.join(events.AGENTS)}")
        event = events.read(name, payload)
        if event is None:
            return None
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

    def _begun(self, folder: OpenFolder, root: int, event: HookEvent, agent: Process | None) -> Snapshot | None:
        """A call begins: the changes until now are not its own. Calls of one session that run side by side are not told
        apart, and their changes wait for the end of one. Where recording them takes so long that the agent has gone on,
        the begin counts as not told."""
        found = None
        if not folder.calls or {one.session for one in folder.calls} != {session_of(event)}:
            found = self._recorder.settle(folder, root)
        if time.monotonic() - folder.held_at > LONGEST_S:
            return found
        del folder.calls[: max(len(folder.calls) - _MOST_OPEN + 1, 0)]
        begun = replace(event, arguments=bounded(event.arguments, _MOST_OPEN_CHARS), result=None, error=None)
        folder.calls.append(OpenCall(begun, agent))
        return found

    def _ended(self, folder: OpenFolder, root: int, call: OpenCall | None, event: HookEvent) -> Snapshot:
        """A call has ended. If its begin was not told, its changes count as somebody else's too."""
        mine = Part(call)
        for part in self._recorder.parts(folder, root, call):
            if part.call is call and call is not None:
                mine = part
                continue
            if call is None and part.call is None:
                for path in part.paths:  # it may be the call's, so a rewind names it
                    part.changes.add({session_of(event)}, os.fsencode(path))
            self._recorder.save(folder, root, part)
        if call is not None:
            folder.calls.remove(call)
        return self._recorder.call(folder, root, mine, event)

    def _between(self, folder: OpenFolder, root: int, event: HookEvent) -> Snapshot | None:
        """A person's turn: a call that has not ended by now was interrupted."""
        cut_off = [one for one in folder.calls if one.session == session_of(event)]
        parts = self._recorder.parts(folder, root, cut_off[-1] if cut_off else None)
        folder.calls = [one for one in folder.calls if one not in cut_off]
        if event.stage == "prompt" and [part.call for part in parts] == [None]:
            return self._recorder.commit(
                folder, root, parts[0].scan, marker("prompt", event.arguments), parts[0].changes, event=event
            )
        saved = [self._recorder.save(folder, root, part, ended=part.call in cut_off) for part in parts]
        if event.stage == "prompt":
            return self._recorder.commit(folder, root, FolderScan(), marker("prompt", event.arguments), event=event)
        return saved[-1] if saved else None

    def _watch(self, folder: OpenFolder, root: int, event: HookEvent, agent: Process | None) -> None:
        """Have the kernel tell who changes the folder, from the first hook on."""
        if agent is None:
            return
        folder.agents[session_of(event)] = agent
        while len(folder.agents) > MOST_SESSIONS:
            del folder.agents[next(iter(folder.agents))]
        if folder.writers is None or folder.writers.closed:
            try:
                folder.writers = Writers(root, partial(self._lost_agent, folder.trajectory))
            except (OSError, NotImplementedError):
                return  # `doctor` says so
            scan = self._recorder.scan(folder, root)
            known = {**folder.index.known, **scan.changed}
            folder.writers.follow(["", *(path for path, mark in known.items() if stat.S_ISDIR(mark[0]))])
            folder.writers.take()
            for session, one in folder.agents.items():
                folder.writers.know(session, one)
        self._writers.use(folder.writers, folder.user.uid)
        folder.writers.know(session_of(event), agent)
        folder.writers.close_unused()  # an agent that has ended by now is never told

    def _lost_agent(self, trajectory: TrajectoryID, writers: Writers) -> None:
        with contextlib.suppress(RuntimeError):  # the daemon ends
            self._ending.submit(self._end_calls, trajectory, writers)

    def _end_calls(self, trajectory: TrajectoryID, writers: Writers) -> None:
        """The agent of a session has ended: what it has done so far is its call's, and what comes now is not."""
        if writers.closed:
            return  # an agent that ended together with this one was told, too
        try:
            line = self._catalog.get_trajectory(trajectory)
            with writers.opened() as root, self._reopened(line, Opener(root)) as (folder, _):
                self._end_lost(folder, root)
        except (SnapshotdError, OSError) as exc:
            _log.warning(
                "an interrupted call in the folder of %s is recorded at the next hook: %s", short(trajectory), exc
            )
        finally:
            writers.close_unused()

    def _end_lost(self, folder: OpenFolder, root: int) -> None:
        """Record the calls whose agents have ended."""
        lost = [one for one in folder.calls if one.has_lost_its_agent()]
        if lost:
            parts = self._recorder.parts(folder, root, lost[-1])
            folder.calls = [one for one in folder.calls if one not in lost]
            for part in parts:
                self._recorder.save(folder, root, part, ended=part.call in lost)

    def checkpoint(self, user: HostUser, root: int, name: str) -> Snapshot:
        """A snapshot of the folder as it is, with a tag, which every prune keeps. Conflict, UsageError: the name."""
        known_as = own_name(user, name)
        with self._held(user, root) as folder:
            self._recorder.settle(folder, root)
            snapshot = self._recorder.commit(folder, root, FolderScan(), marker("checkpoint", {"name": name}))
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
            what = (
                f"there is no snapshot {ref[:80]!r}" if not found else f"{ref} fits {number_of(len(found), 'snapshot')}"
            )
            raise NotFound(f"{what} of this folder; its log lists them")
        return found[0]

    # -- going back ----------------------------------------------------------------------------------------------------

    def session_of(self, user: HostUser, root: int, hook: int, ref: str) -> str | None:
        """The session in which a person asks for a rewind, known by the process: None where it is not known, or is the
        only one that has changed files since the snapshot `ref`."""
        to = self._catalog.resolve_snapshot(ref)
        with self._held(user, root) as folder:
            self._recorder.settle(folder, root)
            history = History.since(self._context, self._catalog.get_trajectory(folder.trajectory), to.seq)
            agent = agent_of(hook)
            mine = [one for one, process in folder.agents.items() if process == agent]
            changed = history.sessions()
            return next((one for one in mine if history.first_of(one) in changed and len(changed) > 1), None)

    def rewind(
        self, trajectory: Trajectory, to: Snapshot, opener: Opener, mode: RewindMode, session: str | None = None
    ) -> Snapshot:
        """See `BranchingService.rewind`. Only files that the agent has touched since are put back; the conversation becomes a new
        session of the agent. The call of the snapshot names the command that goes on with it (`resume`), and what had
        to stay (`left`). `to` is pinned."""
        self._check(trajectory, to)
        with self._reopened(trajectory, opener) as (folder, root):
            self._recorder.settle(folder, root)
            facts: dict[str, Any] = {"to": to.id, "mode": mode, "from": self._recorder.head(folder).id}
            history = History.since(self._context, trajectory, to.seq)
            chosen = history.chosen(session, to) if mode != "conversation" else set()
            line = self._cut(folder, to) if mode != "files" else None
            return self._go(folder, root, "rewind", facts, to, (history, chosen), line)

    def undo(self, trajectory: Trajectory, opener: Opener) -> Snapshot:
        """See `BranchingService.undo`."""
        with self._reopened(trajectory, opener) as (folder, root):
            self._recorder.settle(folder, root)
            last = self._last_rewind(trajectory)
            assert last.parent is not None
            before = self._catalog.get_snapshot(last.parent)
            mode = last.call.arguments["mode"]
            facts = {"of": last.id, "to": before.id, "mode": mode}
            session = self._recorder.session(before) if mode != "files" else None
            changes = changes_of(self._context, last)
            chosen = set() if changes is None else set(changes.made)
            history = History.since(self._context, trajectory, before.seq)
            return self._go(folder, root, "undo", facts, before, (history, chosen), session)

    def preview(
        self,
        trajectory: Trajectory,
        to: Snapshot,
        opener: Opener,
        mode: RewindMode,
        max_files: int,
        session: str | None = None,
    ) -> RewindPreview:
        """See `BranchingService.preview_rewind`."""
        self._check(trajectory, to)
        found, left = RewindPlan(), list[str]()
        with self._reopened(trajectory, opener) as (folder, root):
            head = self._recorder.head(folder)
            if mode != "conversation":
                scan, touches = self._recorder.seen(folder, root, keep=True)
                history = History.since(self._context, trajectory, to.seq)
                for part in parts_of(scan, touches, folder.calls, None, folder.agents):
                    history.add(part.changes)
                found = self._planned(folder, head, to, history, history.chosen(session, to))
                left = told(found.left | self._needed(folder, root, to))
        messages: tuple[Message, ...] = ()
        if mode != "files" and self._recorder.session(head).get("session") == self._recorder.session(to).get("session"):
            messages = tuple(self._catalog.conversation(head.id, min(to.messages, head.messages)))
        changes = tuple(found.changes[:max_files])
        return RewindPreview(head.id, to.id, mode, changes, len(found.changes), messages, (), tuple(left))

    def _go(
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
            found = self._planned(folder, head, to, *wanted)
            cut_off = CutOff.of(head, to, found)
            folder.cut_off = None
            self._catalog.set_meta(rewind_key(folder), cut_off.text())
            with look.open_view(self._context, head) as before, look.open_view(self._context, to) as after:
                putting = PuttingBack(root, folder.user, before, after, cut_off.place)
                putting.run(found.changes)
            done = putting.done
            found.left |= putting.left | self._needed(folder, root, to)
            hit("engine.folders.put_back")
        if session is not None and session.get("session"):
            facts["resume"] = transcripts.RESUME[session["agent"]].format(session=shlex.quote(session["session"]))
            if session["session"] != self._recorder.session(to).get("session"):
                facts["continues"] = [session["session"], self._recorder.session(to).get("session")]
        if found.left:
            sentences = told(found.left)
            more = (
                [f"{number_of(len(sentences) - MOST_LEFT, 'more path')} not changed"]
                if len(sentences) > MOST_LEFT
                else []
            )
            facts["left"] = sentences[:MOST_LEFT] + more
        scan, touches = self._recorder.seen(folder, root)
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

    def _planned(
        self, folder: OpenFolder, head: Snapshot, to: Snapshot, history: History, chosen: set[str]
    ) -> RewindPlan:
        before, after = look.open_pair(self._context, head, to)
        with before, after:
            return plan(before, after, history, chosen, folder.index.passed())

    def _needed(self, folder: OpenFolder, root: int, to: Snapshot) -> dict[bytes, str]:
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

    def _cut(self, folder: OpenFolder, to: Snapshot) -> dict[str, Any]:
        """The session with the history up to a snapshot, as a new one of the agent."""
        session = self._recorder.session(to)
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
            if snapshot.call.name in UNDOABLE and not self._catalog.own_entries(snapshot.id):
                return snapshot
            if self._catalog.own_entries(snapshot.id):
                break
        raise Conflict(
            f"there is nothing to undo in {short(trajectory.id)}: the agent has gone on since the last rewind, or there was "
            "none; `snapshotd rewind` goes to any snapshot"
        )

    # -- folders -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _held(self, user: HostUser, root: int, *, longest_s: float = math.inf) -> Iterator[OpenFolder]:
        """The folder, which no other thread has meanwhile. It begins here if it is new. LimitExceeded: another thread has
        it, and has had it for `longest_s`."""
        place = place_of(root, user)
        with self._lock:
            known = self._places.find(user, place)
            folder = self._folders.get((user.uid, place.identity))
            if folder is None or known != folder.trajectory:
                if known is None:
                    known = self._begin(user, place)
                folder = OpenFolder(user, known, self._catalog.draw_fence(known))
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
    def _reopened(self, trajectory: Trajectory, opener: Opener) -> Iterator[tuple[OpenFolder, int]]:
        """The folder of a trajectory, and its descriptor."""
        facts = self._catalog.snapshots(trajectory.id)[0].call.arguments
        path = self._places.path_of(trajectory.id) or facts["folder"]
        try:
            user = HostUser.of(facts["uid"])
        except KeyError:
            user = HostUser(facts["uid"], facts["gid"])
        try:
            root = open_folder(path, user, opener)
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
        kept = Policy(keep_last=config.folder_keep_last, keep_within_s=config.folder_keep_s)
        retention.set_policy(self._catalog, trajectory.id, kept)
        self._places.remember(user, place, trajectory.id)
        self._recorder.submit(snapshot)
        return trajectory.id


def _before_others(root: int) -> contextlib.AbstractContextManager[None]:
    """A turn before all other work of the daemon, where no file system can make it last."""
    return turns.first() if fanotify.is_local(root) else contextlib.nullcontext()
