"""Merging: files of one snapshot go into another trajectory, in place and in one step. Its mind goes on as it is.

The caller has compared the files and says what is to be done for each path. All of it becomes one layer over the
trajectory's head, and the marker's snapshot. The marker has the arguments `from`, `base` and `paths` (their number).
"""

from __future__ import annotations

import os
import stat

from snapshotd.engine.base import MergeRequest
from snapshotd.engine.context import Context
from snapshotd.engine.past.editing import check_file, write_file
from snapshotd.engine.past.rewinding import Rewinding
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.engine.sandbox.step import marker
from snapshotd.engine.storing import look
from snapshotd.errors import Conflict, NotFound, UsageError
from snapshotd.kernel import files
from snapshotd.layers.amend import amend
from snapshotd.trees import apply
from snapshotd.trees.base import Change, ChangeKind, Entry
from snapshotd.trees.view import View
from snapshotd.types import Kind, Snapshot, Trajectory, short


class Merging:
    """See the module's text. Thread-safe."""

    def __init__(self, context: Context, sessions: Sessions, rewinding: Rewinding) -> None:
        self._context, self._catalog, self._sessions = context, context.catalog, sessions
        self._rewinding = rewinding

    def merge(self, into: Trajectory, source: Snapshot, request: MergeRequest) -> Snapshot:
        """See `BranchingService.merge`. `source` is pinned."""
        for edit in request.edits:
            check_file(edit)
        with self._sessions.started_for_change(into) as sandbox, self._rewinding.quiet(sandbox, "merge into"):
            self._rewinding.settle(sandbox, mind=False)
            if sandbox.head != request.head:
                raise Conflict(
                    f"{short(into.id)} has changed since it was compared: its head is {short(sandbox.head)}, not "
                    f"{short(request.head)}; nothing was merged: repeat the command"
                )
            arguments = {"from": source.id, "base": request.base, "paths": request.paths}
            with self._context.pins.pinned(sandbox.head) as head:
                return self._rewinding.switch(
                    sandbox,
                    marker("merge", arguments),
                    files=head,
                    follows=None,
                    change=lambda stack: amend(
                        self._context.store, stack, lambda root: self._write(root, head, source, request)
                    ),
                )

    def _write(self, root: int, head: Snapshot, source: Snapshot, request: MergeRequest) -> None:
        with look.open_view(self._context, head) as present, look.open_view(self._context, source) as view:
            write(root, present, view, request)


def write(root: int, present: View, view: View, request: MergeRequest) -> None:
    """Change the paths of the request in `root`, which has the files of `present`, and no others: a name that the head
    has linked to one of them is a file of its own then. UsageError, NotFound: a path does not fit the head or `view`."""
    for path in sorted(request.delete, key=_walk_order, reverse=True):
        _delete(root, path)  # first, so that a name is free for what takes its place
    own_mode = {path for path, _ in request.modes}
    together, apart = list[Change](), list[Change]()
    for path in sorted(request.take, key=_walk_order):
        change = _change(present, view, path)
        is_file = change.after is not None and change.after.kind is not Kind.DIRECTORY
        (apart if is_file and path in own_mode else together).append(change)
    try:
        apply.apply(root, together, view)
        for change in apart:  # linked to another, it would give that one its permissions
            apply.apply(root, [change], view)
        for edit in request.edits:
            write_file(root, edit)
        for path, mode in request.modes:
            _set_mode(root, path, mode)
    except (FileNotFoundError, NotADirectoryError) as exc:
        shown = os.fsdecode(exc.filename or b"")
        raise UsageError(
            f"the paths to be merged do not fit the head ({exc.strerror}: {shown!r}); nothing was merged: compare with it again"
        ) from exc


def _walk_order(path: bytes) -> list[bytes]:
    return path.split(b"/")


def _change(present: View, view: View, path: bytes) -> Change:
    before, after = _entry(present, path), _entry(view, path)
    if after is None:
        raise NotFound(f"{_shown(path)!r} does not exist in the snapshot that is merged; nothing was merged")
    return Change(path, ChangeKind.ADDED if before is None else ChangeKind.CHANGED, before, after)


def _entry(view: View, path: bytes) -> Entry | None:
    try:
        return view.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _delete(root: int, path: bytes) -> None:
    """Not an error when it has gone with its directory."""
    folder, _, name = path.rpartition(b"/")
    try:
        directory = files.open_deep(root, folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        files.remove_tree(directory, name)
    finally:
        os.close(directory)


def _set_mode(root: int, path: bytes, mode: int) -> None:
    """The nine bits; a set-user-id or sticky bit stays."""
    folder, _, name = path.rpartition(b"/")
    directory = files.open_deep(root, folder)
    try:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    finally:
        os.close(directory)
    try:
        os.chmod(files.fd_path(fd), mode & 0o777 | stat.S_IMODE(os.fstat(fd).st_mode) & 0o7000)
    finally:
        os.close(fd)


def _shown(path: bytes) -> str:
    return "/" + os.fsdecode(path)
