"""The calls of agents in users' folders. Hooks tell of each; the changes since the last hook are recorded under the name of whoever
made them."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from snapshotd.catalog.base import Catalog
from snapshotd.engine.base import Opener
from snapshotd.engine.folders import events
from snapshotd.engine.folders.calls import OpenCall, Part, end_of, session_of
from snapshotd.engine.folders.events import HookEvent
from snapshotd.engine.folders.held import HeldFolders
from snapshotd.engine.folders.quiet import Watches
from snapshotd.engine.folders.recording import MOST_SESSIONS, FolderRecorder, OpenFolder, limit_chars
from snapshotd.engine.folders.scan import LONGEST_S, FolderScan
from snapshotd.engine.folders.writers import Process, Writers, agent_of
from snapshotd.engine.sandbox.step import marker
from snapshotd.errors import SnapshotdError, UsageError
from snapshotd.kernel import fanotify, turns
from snapshotd.kernel.identity import HostUser
from snapshotd.types import Snapshot, TrajectoryID, short

_MOST_OPEN = 200
"""Calls that have begun in one folder."""
_MOST_OPEN_CHARS = 1 << 16
"""Arguments of a call that has only begun: its end tells them again."""
MOST_WRITERS = 32
"""Folders of all users but root in which the kernel tells at once who changes files."""
_log = logging.getLogger(__name__)


class HookCalls:
    """Thread-safe."""

    def __init__(self, catalog: Catalog, held: HeldFolders, recorder: FolderRecorder) -> None:
        self._catalog, self._held, self._recorder = catalog, held, recorder
        self._writers, self._ending = Watches(MOST_WRITERS), ThreadPoolExecutor(1, "folder-calls")

    def close(self) -> None:
        """Give the kernel's marks back. Idempotent."""
        self._writers.close()
        self._ending.shutdown()

    def record(
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
        with self._held.hold(user, root, longest_s=LONGEST_S) as folder, _before_others(root):
            folder.refusal.check(root)
            with folder.refusal.note(root):
                self._end_lost(folder, root)
                self._watch(folder, root, event, agent)
                try:
                    if event.stage == "before":
                        return self._record_begin(folder, root, event, agent)
                    if event.stage == "after":
                        return self._record_end(folder, root, end_of(folder.calls, event), event)
                    return self._record_turn(folder, root, event)
                finally:
                    if folder.writers is not None:
                        folder.writers.listen(bool(folder.calls))

    def _record_begin(self, folder: OpenFolder, root: int, event: HookEvent, agent: Process | None) -> Snapshot | None:
        """Record the changes before a call, which are not its own. The calls of one session that run side by side are
        not told apart: their changes wait for the end of one. If recording takes so long that the agent has gone on,
        the begin counts as not told."""
        found = None
        if not folder.calls or {one.session for one in folder.calls} != {session_of(event)}:
            found = self._recorder.settle(folder, root)
        if time.monotonic() - folder.held_at > LONGEST_S:
            return found
        del folder.calls[: max(len(folder.calls) - _MOST_OPEN + 1, 0)]
        begun = replace(event, arguments=limit_chars(event.arguments, _MOST_OPEN_CHARS), result=None, error=None)
        folder.calls.append(OpenCall(begun, agent))
        return found

    def _record_end(self, folder: OpenFolder, root: int, call: OpenCall | None, event: HookEvent) -> Snapshot:
        """Record a call that has ended. If its begin was not told, its changes count as somebody else's too."""
        mine = Part(call)
        for part in self._recorder.find_parts(folder, root, call):
            if part.call is call and call is not None:
                mine = part
                continue
            if call is None and part.call is None:
                for path in part.paths:  # it may be the call's, so a rewind names it
                    part.changes.add({session_of(event)}, os.fsencode(path))
            self._recorder.save(folder, root, part)
        if call is not None:
            folder.calls.remove(call)
        return self._recorder.record_call(folder, root, mine, event)

    def _record_turn(self, folder: OpenFolder, root: int, event: HookEvent) -> Snapshot | None:
        """Record a person's turn. Calls that have not ended by now were interrupted."""
        cut_off = [one for one in folder.calls if one.session == session_of(event)]
        parts = self._recorder.find_parts(folder, root, cut_off[-1] if cut_off else None)
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
                folder.writers = Writers(root, partial(self._end_calls_soon, folder.trajectory))
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

    def _end_calls_soon(self, trajectory: TrajectoryID, writers: Writers) -> None:
        with contextlib.suppress(RuntimeError):  # the daemon ends
            self._ending.submit(self._end_calls, trajectory, writers)

    def _end_calls(self, trajectory: TrajectoryID, writers: Writers) -> None:
        """Record the calls of an agent that has ended: what comes now is not theirs."""
        if writers.closed:
            return  # an agent that ended together with this one was told, too
        try:
            line = self._catalog.trajectories.get(trajectory)
            with writers.open_root() as root, self._held.reopen(line, Opener(root)) as (folder, _):
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
            parts = self._recorder.find_parts(folder, root, lost[-1])
            folder.calls = [one for one in folder.calls if one not in lost]
            for part in parts:
                self._recorder.save(folder, root, part, ended=part.call in lost)


def _before_others(root: int) -> contextlib.AbstractContextManager[None]:
    """Go before all other work of the daemon, unless the file system may block."""
    return turns.first() if fanotify.is_local(root) else contextlib.nullcontext()
