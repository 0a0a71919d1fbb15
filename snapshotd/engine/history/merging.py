"""Merging: what changed between two snapshots goes into another trajectory, in place and in one step. Its mind goes on as
it is.

`trees/three_way.py` has the rules. All of the plan becomes one layer over the trajectory's head, and the marker's
snapshot. The marker has the arguments `from`, `base` and `paths` (their number).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from snapshotd.api.history import MergeRequest
from snapshotd.api.wire import sandbox_path
from snapshotd.engine.base import FileEdit, Merged
from snapshotd.engine.context import Context
from snapshotd.engine.history.editing import write_file
from snapshotd.engine.history.lineage import lineage
from snapshotd.engine.history.rewinding import Rewinding
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.engine.sandbox.step import marker
from snapshotd.engine.storage import look
from snapshotd.errors import Conflict, NotFound, UsageError
from snapshotd.kernel import files
from snapshotd.layers.amend import amend
from snapshotd.trees import apply
from snapshotd.trees.base import Change, ChangeKind, Entry
from snapshotd.trees.diff import diff
from snapshotd.trees.three_way import InTheWay, Item, MergePlan, Present, Side, Version
from snapshotd.trees.view import View, split
from snapshotd.types import Kind, Snapshot, SnapshotID, Trajectory, short

_WORKSPACE = b"workspace"
Items: TypeAlias = Sequence[Item[Present]]


class Merging:
    """See the module's text. Thread-safe."""

    def __init__(self, context: Context, sessions: Sessions, rewinding: Rewinding) -> None:
        self._context, self._catalog, self._sessions = context, context.catalog, sessions
        self._rewinding = rewinding

    def merge(self, into: Trajectory, request: MergeRequest) -> Merged:
        """See `BranchingService.merge`."""
        return self._merge(into, into.head, self._catalog.refs.find_snapshot(request.source).id, request)

    def recall(self, made: Snapshot, request: MergeRequest) -> Merged:
        """The answer to the merge that has made this snapshot, once more."""
        assert made.parent is not None
        into = self._catalog.trajectories.get(made.trajectory)
        return self._merge(into, made.parent, SnapshotID(made.call.arguments["from"]), request, made)

    def _merge(
        self,
        into: Trajectory,
        head_id: SnapshotID,
        source: SnapshotID,
        request: MergeRequest,
        taken: Snapshot | None = None,
    ) -> Merged:
        path = _WORKSPACE if request.path_b64 is None else sandbox_path(request.path_b64)
        find, pins = self._catalog.refs.find_snapshot, self._context.pins
        base_id = self._common(source, head_id) if request.base is None else find(request.base).id
        with pins.pinned(source) as theirs, pins.pinned(head_id) as head, pins.pinned(base_id) as base:
            plan = self._plan(base, theirs, head, split(path))
            if plan.items and not (plan.conflicts or request.dry_run or taken):
                taken = self._write(into, base, theirs, head, from_root(plan.items, path))
        told = tuple(plan.items), tuple(plan.conflicts), plan.same, tuple(plan.warnings)
        return Merged(theirs.id, head.id, base.id, request.dry_run, *told, taken)

    def _common(self, source: SnapshotID, head: SnapshotID) -> SnapshotID:
        """The last snapshot that both go on from."""
        find = self._catalog.refs.find_snapshot
        known = {one.id for one in lineage(find, source)}
        for one in reversed(lineage(find, head)):
            if one.id in known:
                return one.id
        raise UsageError(
            f"{short(source)} and {short(head)} have no snapshot in common, so nobody can tell what each has changed; name "
            "the snapshot to compare both with as the base"
        )

    def _plan(self, base: Snapshot, theirs: Snapshot, head: Snapshot, parts: list[bytes]) -> MergePlan[Present]:
        before, after = look.open_pair(self._context, base, theirs)
        with before, after, look.open_view(self._context, head) as present:
            source = ViewPair(before, after, parts)
            if not source.is_there:
                shown = "/" + os.fsdecode(b"/".join(parts))
                raise NotFound(f"{shown!r} does not exist in snapshot {short(theirs.id)}; name a directory of it")
            return MergePlan(source, ViewTree(present, parts), in_sandbox=True)

    def _write(self, into: Trajectory, base: Snapshot, source: Snapshot, head: Snapshot, items: Items) -> Snapshot:
        with self._sessions.start_for_change(into) as sandbox, self._rewinding.quieten(sandbox, "merge into"):
            self._rewinding.settle(sandbox, mind=False)
            if sandbox.head != head.id:
                raise Conflict(
                    f"{short(into.id)} has changed since it was compared: its head is {short(sandbox.head)}, not "
                    f"{short(head.id)}; nothing was merged: repeat the command"
                )
            call = marker("merge", {"from": source.id, "base": base.id, "paths": len(items)})

            def fill(root: int) -> None:
                with look.open_view(self._context, head) as present, look.open_view(self._context, source) as view:
                    write(root, present, view, items)

            change = lambda stack: amend(self._context.store, stack, fill)  # noqa: E731
            return self._rewinding.switch(sandbox, call, files=head, follows=None, change=change)


class ViewPair:
    """Two trees below one of their directories: a `TreeSource`. UsageError: it is something else in one."""

    def __init__(self, before: View, after: View, parts: list[bytes]) -> None:
        self._views: dict[Side, View] = {"base": before, "snapshot": after}
        self._top = b"/".join(parts)
        found = [entry.kind for view in (after, before) if (entry := _entry(view, self._top)) is not None]
        self.is_there = bool(found)
        if any(kind is not Kind.DIRECTORY for kind in found):
            shown = "/" + os.fsdecode(self._top)
            raise UsageError(f"{shown!r} is a {found[0]}; merge takes directories: name the one it lies in")

    def changes(self) -> Iterator[tuple[bytes, Version | None, Version | None]]:
        for change in diff(self._views["base"], self._views["snapshot"], self._top):
            if change.path != self._top:
                yield change.path.removeprefix(self._top).lstrip(b"/"), change.before, change.after

    def content(self, side: Side, path: bytes) -> Iterator[bytes]:
        return look.pieces(self._views[side].open(_below(self._top, path)))

    def target(self, side: Side, path: bytes) -> bytes:
        return self._views[side].readlink(_below(self._top, path))


class ViewTree:
    """A tree below one of its directories: a `TargetTree`."""

    def __init__(self, view: View, parts: list[bytes]) -> None:
        self._view, self._top = view, b"/".join(parts)
        self._kinds: dict[bytes, Kind | None] = {}

    def look(self, path: bytes) -> Present | None:
        parts = path.split(b"/")
        for above in (b"/".join(parts[:count]) for count in range(1, len(parts))):
            if above not in self._kinds:
                entry = _entry(self._view, _below(self._top, above))
                self._kinds[above] = None if entry is None else entry.kind
            kind = self._kinds[above]
            if kind is None:
                return None
            if kind is not Kind.DIRECTORY:
                raise InTheWay(above, kind)
        whole = _below(self._top, path)
        found = _entry(self._view, whole)
        if found is None:
            return None
        target = self._view.readlink(whole) if found.kind is Kind.SYMLINK else None
        return Present(found.kind, found.mode & 0o777, found.size, target)

    def names(self, path: bytes) -> list[bytes]:
        return [name for name, _ in self._view.list(_below(self._top, path))]

    def read(self, path: bytes) -> Iterator[bytes]:
        return look.pieces(self._view.open(_below(self._top, path)))


def write(root: int, present: View, view: View, items: Items) -> None:
    """Change the paths of a plan, and no others, in `root`, which has the files of `present`. Paths begin at the root of
    the tree. A name that the head has linked to a changed file becomes a file of its own. UsageError, NotFound: a path
    does not fit the head or `view`."""
    for item in sorted(items, key=_walk_order, reverse=True):
        if item.change == "deleted":
            _delete(root, item.path)  # first, so that a name is free for what takes its place
    together, apart = list[Change](), list[Change]()
    for item in sorted(items, key=_walk_order):
        if item.put and item.merged is None:
            (apart if item.kind != "directory" and _sets_mode(item) else together).append(_change(present, view, item))
    try:
        apply.apply(root, together, view)
        for change in apart:  # linked to another, it would give that one its permissions
            apply.apply(root, [change], view)
        for item in items:
            if item.merged is not None:
                write_file(root, FileEdit(item.path, item.merged, item.permissions))
            elif _sets_mode(item):
                _set_mode(root, item.path, item.permissions)
    except (FileNotFoundError, NotADirectoryError) as exc:
        shown = os.fsdecode(exc.filename or b"")
        raise UsageError(
            f"the paths to be merged do not fit the head ({exc.strerror}: {shown!r}); nothing was merged: compare with it again"
        ) from exc


def from_root(items: Items, path: bytes) -> Items:
    """The items with paths from the tree's root, in place of paths below `path`."""
    top = b"/".join(split(path))
    return [replace(item, path=_below(top, item.path)) for item in items]


def _sets_mode(item: Item[Present]) -> bool:
    """True if the permissions are to be set apart: they come with what is taken, unless the head had changed them."""
    return item.change != "deleted" and item.kind != "symlink" and (not item.put or item.own_mode)


def _walk_order(item: Item[Present]) -> list[bytes]:
    return item.path.split(b"/")


def _below(top: bytes, path: bytes) -> bytes:
    return top + b"/" + path if top else path


def _change(present: View, view: View, item: Item[Present]) -> Change:
    before, after = _entry(present, item.path), _entry(view, item.path)
    if after is None:
        raise NotFound(
            f"{'/' + os.fsdecode(item.path)!r} does not exist in the snapshot that is merged; nothing was merged"
        )
    return Change(item.path, ChangeKind.ADDED if before is None else ChangeKind.CHANGED, before, after)


def _entry(view: View, path: bytes) -> Entry | None:
    try:
        return view.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _delete(root: int, path: bytes) -> None:
    """Remove a path. Not an error when it has gone with its directory."""
    folder, _, name = path.rpartition(b"/")
    try:
        directory = files.open_deep(root, folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    with files.closing_fd(directory):
        files.remove_tree(directory, name)


def _set_mode(root: int, path: bytes, mode: int) -> None:
    """Set the nine permission bits; a set-user-id or sticky bit stays."""
    folder, _, name = path.rpartition(b"/")
    with files.closing_fd(files.open_deep(root, folder)) as directory:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    with files.closing_fd(fd):
        os.chmod(files.fd_path(fd), mode & 0o777 | stat.S_IMODE(os.fstat(fd).st_mode) & 0o7000)
