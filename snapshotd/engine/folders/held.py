"""The folders that the daemon knows. A descriptor or a trajectory names one, and one thread at a time holds it."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator

from snapshotd.api.storage import Policy
from snapshotd.engine.base import Opener
from snapshotd.engine.context import Context
from snapshotd.engine.folders.places import FolderPlace, KnownFolders, open_folder, place_of
from snapshotd.engine.folders.recording import OpenFolder
from snapshotd.engine.folders.scan import FolderIndex
from snapshotd.engine.folders.writers import Touches
from snapshotd.engine.sandbox.step import marker
from snapshotd.engine.storage import retention
from snapshotd.errors import Conflict, LimitExceeded, NotFound
from snapshotd.failpoints import hit
from snapshotd.kernel.identity import HostUser
from snapshotd.types import (
    FOLDER,
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

MOST_KNOWN = 400_000
"""Files of one user's folders that the daemon knows in memory, more or less."""
_BUSY_S = 60.0


class HeldFolders:
    """Thread-safe. `submit` is told of the first snapshot of a folder."""

    def __init__(self, context: Context, submit: Callable[[Snapshot], object]) -> None:
        self._context, self._catalog, self._submit = context, context.catalog, submit
        self._places = KnownFolders(self._catalog)
        self._folders: dict[tuple[int, str], OpenFolder] = {}
        self._lock = threading.Lock()

    def find(self, user: HostUser, root: int) -> Trajectory:
        """The trajectory of a folder. NotFound: no hook has told of it yet."""
        place = place_of(root, user)
        found = self._places.find(user, place)
        if found is None:
            raise NotFound(f"no snapshot was taken of {place.path} yet; `snapshotd hooks install` in it begins")
        self._places.note_path(place, found)
        return self._catalog.trajectories.get(found)

    @contextlib.contextmanager
    def hold(self, user: HostUser, root: int, *, longest_s: float = math.inf) -> Iterator[OpenFolder]:
        """Hold a folder, alone among all threads. A new folder gets its trajectory here. LimitExceeded: another thread
        has held it for `longest_s`."""
        place = place_of(root, user)
        with self._lock:
            known = self._places.find(user, place)
            folder = self._folders.get((user.uid, place.identity))
            if folder is None or known != folder.trajectory:
                if known is None:
                    known = self._begin(user, place)
                folder = OpenFolder(user, known, self._catalog.trajectories.draw_fence(known))
                self._folders[user.uid, place.identity] = folder
            self._folders[user.uid, place.identity] = self._folders.pop((user.uid, place.identity))  # the last one used
            self._places.note_path(place, known)
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
        self._forget_unused(user)

    def _forget_unused(self, user: HostUser) -> None:
        """Forget the index of the user's least recently used folders if all indexes are too large. The next scan of
        such a folder compares it with its head."""
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
    def reopen(self, trajectory: Trajectory, opener: Opener) -> Iterator[tuple[OpenFolder, int]]:
        """The folder of a trajectory, and its descriptor."""
        facts = self._catalog.snapshots.of_trajectory(trajectory.id)[0].call.arguments
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
            with self.hold(user, root) as folder:
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
        self._catalog.trajectories.add([(trajectory, snapshot)])
        hit("engine.folders.begun")
        config = self._context.config  # named snapshots stay in any case
        kept = Policy(keep_last=config.folder_keep_last, keep_within_s=config.folder_keep_s)
        retention.set_policy(self._catalog, trajectory.id, kept)
        self._places.remember(user, place, trajectory.id)
        self._submit(snapshot)
        return trajectory.id
