"""`Snapshotd.apply`: bring what changed between two snapshots to a folder of this machine.

host_tree.py     look into the folder
host_change.py   change it as a whole or not at all
journal.py       the record by which a change that was cut off is undone
git.py           make a commit

The rules, what is to be done for each path, are in `trees/three_way.py`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from snapshotd.client.apply.git import Worktree
from snapshotd.client.apply.host_change import HostChange, LeftOver
from snapshotd.client.apply.host_tree import HostEntry, HostTree
from snapshotd.client.results import AppliedInfo, ApplyInfo, ConflictInfo, EntryInfo, SnapshotInfo
from snapshotd.errors import Conflict, DaemonUnavailable, NotFound, UsageError
from snapshotd.terms import short
from snapshotd.trees.three_way import Item, MergePlan, Side, TreeSource

if TYPE_CHECKING:
    from snapshotd.client.client import Snapshotd

WORKSPACE = b"/workspace"


class EntryMode(NamedTuple):
    """One side of a change, with its mode as a number."""

    kind: str
    mode: int
    size: int

    @classmethod
    def of(cls, entry: EntryInfo | None) -> EntryMode | None:
        return None if entry is None else cls(entry.kind, int(entry.mode, 8), entry.size)


class SnapshotReader:
    """Two snapshots of `client`'s daemon below the directory `path`: a `TreeSource`. UsageError, NotFound."""

    def __init__(self, client: Snapshotd, base: str, snapshot: str, path: bytes) -> None:
        parts = [part for part in path.split(b"/") if part not in (b"", b".")]
        self._client, self._refs = client, {"base": base, "snapshot": snapshot}
        self._top = b"/".join(parts)
        self._prefix = self._top + b"/" if parts else b""
        kinds = [self._kind(ref) for ref in (snapshot, base)]
        found = next((kind for kind in kinds if kind is not None), None)
        shown = "/" + os.fsdecode(self._top)
        if found is None:
            raise NotFound(f"{shown!r} does not exist in snapshot {short(snapshot)}; name a directory of it")
        if any(kind not in (None, "directory") for kind in kinds):
            raise UsageError(f"{shown!r} is a {found}; apply takes directories: name the one it lies in")

    def _kind(self, ref: str) -> str | None:
        try:
            return self._client.lstat(ref, b"/" + self._top).kind
        except NotFound:
            return None

    def changes(self) -> Iterator[tuple[bytes, EntryMode | None, EntryMode | None]]:
        for change in self._client.diff(self._refs["base"], self._refs["snapshot"]):
            path = os.fsencode(change.path).lstrip(b"/")
            if path != self._top and path.startswith(self._prefix):
                yield path[len(self._prefix) :], EntryMode.of(change.before), EntryMode.of(change.after)

    def content(self, side: Side, path: bytes) -> Iterator[bytes]:
        return self._client.cat(self._refs[side], b"/" + self._prefix + path)

    def target(self, side: Side, path: bytes) -> bytes:
        return self._client.lstat(self._refs[side], b"/" + self._prefix + path).target or b""


def first_of(client: Snapshotd, snapshot: SnapshotInfo) -> str:
    """The snapshot that was taken right after the workspace had been copied in: the first of the trajectory, or of
    the one that it was forked from, and so on."""
    trajectory = client.trajectory(snapshot.trajectory)
    while trajectory.forked_from is not None:
        trajectory = client.trajectory(client.snapshot(trajectory.forked_from).trajectory)
    return client.log(trajectory.id)[0].id


def commit_message(message: str, snapshot: SnapshotInfo) -> str:
    """With what names the snapshot, as trailers of git's."""
    text = message.strip() or f"Apply snapshot {short(snapshot.id)}"
    return f"{text}\n\nSnapshotd-Trajectory: {snapshot.trajectory}\nSnapshotd-Snapshot: {snapshot.id}\n"


def apply(source: TreeSource, to: Path, *, dry_run: bool, message: str | None = None, hooks: bool = False) -> ApplyInfo:
    """Everything but the ids in the answer. With `message`, a git commit is made of it, and with `hooks` the programs
    that the repository names run for it; git is asked before, also for a dry run. Errors leave the folder as it was, but
    for a hook that refuses the commit."""
    with HostTree(to) as tree:
        left_over = LeftOver(tree)
        if not dry_run:
            left_over.repair()
        elif left_over.cut_off:
            raise Conflict(
                f"an earlier apply to {to} was cut off in the middle; apply without a dry run to undo it first"
            )
        worktree = None if message is None else Worktree(to, hooks=hooks)
        try:
            plan = MergePlan(source, tree)
        except OSError as exc:
            raise UsageError(f"{to} cannot be compared with a snapshot: {exc.strerror}; nothing was changed") from exc
        plan.warnings[:0] = left_over.warnings
        changes = tuple(AppliedInfo(item.change, item.path, item.kind, item.merged is not None) for item in plan.items)
        conflicts = tuple(ConflictInfo(one.path, one.reason) for one in plan.conflicts)
        files = [item.path for item in plan.items if not item.is_directory]
        commit = None
        if worktree is not None and not plan.conflicts:
            worktree.check([item.path for item in plan.items if item.change != "deleted" and item.kind != "directory"])
        if plan.items and not plan.conflicts and not dry_run:
            _write(source, tree, plan)
            if worktree is not None and message is not None:
                commit = worktree.commit(files, message)
        return ApplyInfo("", "", dry_run, changes, conflicts, plan.same, tuple(plan.warnings), commit)


def _write(source: TreeSource, tree: HostTree, plan: MergePlan[HostEntry]) -> None:
    root = os.fstat(tree.fd)
    owner = (root.st_uid, root.st_gid)
    with HostChange(tree) as change:
        for item in reversed(plan.items):
            if item.host is not None and (item.change == "deleted" or (item.put and item.host.kind == "directory")):
                change.take(item.path, item.host.stamp)
        for item in plan.items:
            if item.change == "changed" and not item.put and item.host is not None and _has_names(item.host):
                change.take(item.path, item.host.stamp)
                special = stat.S_IMODE(item.host.stamp.mode) & ~0o777
                change.put_file(item.path, tree.read(item.path), special | item.permissions, item.host.owner)
            if not item.put:
                continue
            if item.host is not None and item.host.kind != "directory":
                change.take(item.path, item.host.stamp)
            own = owner if item.host is None else item.host.owner
            if item.kind == "directory":
                change.put_directory(item.path, item.permissions, own)
            elif item.kind == "symlink":
                change.put_link(item.path, item.target, own)
            elif item.merged is not None:
                change.put_file(item.path, [item.merged], item.permissions, own)
            else:
                change.put_file(item.path, _whole(source, item), item.permissions, own)
        for item in plan.items:
            if item.change != "deleted" and not item.put and item.host is not None and not _has_names(item.host):
                change.change_mode(
                    item.path, item.host.stamp, item.permissions
                )  # last: a directory may become read-only
        change.run()


def _has_names(host: HostEntry) -> bool:
    """True for a file with more names, which keep their permissions: this one gets a copy."""
    return host.kind == "file" and host.links > 1


def _whole(source: TreeSource, item: Item[HostEntry]) -> Iterator[bytes]:
    """The snapshot's content, and DaemonUnavailable if it ended early."""
    count = 0
    for piece in source.content("snapshot", item.path):
        count += len(piece)
        yield piece
    if count != item.size:
        raise DaemonUnavailable(
            f"the daemon gave {count} bytes of {os.fsdecode(item.path)!r}, which has {item.size}; nothing was changed: repeat it"
        )
