"""Snapshots of a folder of this machine in which a user's agent works, without a sandbox.

A folder is one trajectory for each user. Hooks of the agent tell of every call before and after it (hook_calls.py). Changes in between
are the call's, unless the kernel says that a process of somebody else made them (writers.py); those, and changes at
another time, get a snapshot of their own (`edits`). Each snapshot notes whose its changes are (plan.py). So a rewind
knows the files that the agent has touched, and leaves all others alone (rewinds.py).

Several sessions of an agent may follow each other or work side by side. A snapshot takes its files from its parent, and
its conversation from the last snapshot of its session.
"""

from __future__ import annotations

from snapshotd.engine.context import Context
from snapshotd.engine.folders.held import HeldFolders
from snapshotd.engine.folders.hook_calls import HookCalls
from snapshotd.engine.folders.places import own_name
from snapshotd.engine.folders.quiet import Watches
from snapshotd.engine.folders.recording import FolderRecorder
from snapshotd.engine.folders.rewinding.rewinds import FolderRewinds
from snapshotd.engine.folders.scan import FolderScan
from snapshotd.engine.folders.user_files import UserFiles
from snapshotd.engine.sandbox.step import StepListener, marker
from snapshotd.engine.storage.cold import Cold
from snapshotd.errors import NotFound
from snapshotd.kernel.identity import HostUser
from snapshotd.terms import number_of
from snapshotd.types import MIN_PREFIX_CHARS, Snapshot, Trajectory


class Folders:
    """See the module's text. Thread-safe. `listener`: told of every snapshot."""

    def __init__(self, context: Context, cold: Cold, listener: StepListener) -> None:
        self._catalog, self._watches, self._user_files = context.catalog, Watches(), UserFiles()
        self._recorder = FolderRecorder(context, cold, listener, self._watches, self._user_files)
        self._held = HeldFolders(context, self._recorder.submit)
        self.calls = HookCalls(self._catalog, self._held, self._recorder)
        self.rewinds = FolderRewinds(context, self._held, self._recorder, self._user_files)

    def close(self) -> None:
        """Give the kernel's marks back, and end the process that opens users' files. Idempotent."""
        self._watches.close()
        self.calls.close()
        self._user_files.close()

    def trajectory(self, user: HostUser, root: int) -> Trajectory:
        """The trajectory of a folder. NotFound: no hook has told of it yet."""
        return self._held.find(user, root)

    def checkpoint(self, user: HostUser, root: int, name: str) -> Snapshot:
        """A snapshot of the folder as it is, with a tag, which every prune keeps. Conflict, UsageError: the name."""
        known_as = own_name(user, name)
        with self._held.hold(user, root) as folder:
            self._recorder.settle(folder, root)
            snapshot = self._recorder.commit(folder, root, FolderScan(), marker("checkpoint", {"name": name}))
            self._catalog.refs.tag(snapshot.id, known_as)
            return snapshot

    def snapshot(self, user: HostUser, root: int, ref: str) -> Snapshot:
        """A snapshot of the user's folder, by its id, the beginning of that, or the name of a checkpoint. NotFound. No
        other snapshot is looked at: neither the answer nor the time that it takes tells of any."""
        all_of_it = self._catalog.snapshots.of_trajectory(self.trajectory(user, root).id)
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
