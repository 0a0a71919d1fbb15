"""`Snapshotd.merge`: bring what changed between two snapshots to the head of another trajectory.

The rules are those of apply (plan.py), with the head in the place of the folder; the daemon then makes the changes as one
step of the trajectory.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from snapshotd.client.apply.apply import WORKSPACE, SnapshotReader
from snapshotd.client.apply.host_tree import HostEntry, InTheWay, Stamp
from snapshotd.client.apply.plan import ApplyPlan, Item
from snapshotd.client.branching.lineage import lineage
from snapshotd.client.local.arguments import sandbox_path
from snapshotd.client.results import AppliedInfo, MergeInfo, SnapshotInfo
from snapshotd.client.verbs.base import b64
from snapshotd.errors import NotFound, UsageError

if TYPE_CHECKING:
    from snapshotd.client.client import Snapshotd

_NO_STAMP = Stamp(0, 0, 0, 0)


class HeadTree:
    """A snapshot below one of its directories, as `ApplyPlan` looks at a folder."""

    def __init__(self, client: Snapshotd, snapshot: str, path: bytes) -> None:
        self._client, self._snapshot = client, snapshot
        self._top = b"/".join(part for part in path.split(b"/") if part not in (b"", b"."))
        self._kinds: dict[bytes, str | None] = {}

    def look(self, path: bytes) -> HostEntry | None:
        """The entry at `path`, links not followed; None if there is none. InTheWay."""
        parts = path.split(b"/")
        for count in range(1, len(parts)):
            above = b"/".join(parts[:count])
            kind = self._kind(above)
            if kind is None:
                return None
            if kind != "directory":
                raise InTheWay(above, kind)
        try:
            found = self._client.lstat(self._snapshot, b"/" + self.whole(path))
        except NotFound:
            return None
        permissions = int(found.mode, 8) & 0o777
        return HostEntry(found.kind, permissions, found.size, found.target, _NO_STAMP, (found.uid, found.gid))

    def names(self, path: bytes) -> list[bytes]:
        """The names in a directory."""
        found = self._client.list_files(self._snapshot, b"/" + self.whole(path))
        return [os.fsencode(one.name) for one in found]

    def read(self, path: bytes) -> Iterator[bytes]:
        """A regular file's content in pieces."""
        return self._client.cat(self._snapshot, b"/" + self.whole(path))

    def whole(self, path: bytes) -> bytes:
        """The path from the sandbox's root."""
        return self._top + b"/" + path if self._top else path

    def _kind(self, path: bytes) -> str | None:
        if path not in self._kinds:
            try:
                self._kinds[path] = self._client.lstat(self._snapshot, b"/" + self.whole(path)).kind
            except NotFound:
                self._kinds[path] = None
        return self._kinds[path]


def merge(
    client: Snapshotd, source: str, into: str, *, base: str | None, path: str | bytes | None, dry_run: bool
) -> MergeInfo:
    """See `Snapshotd.merge`."""
    line = client.trajectory(into)
    theirs, head = client.snapshot(source), client.snapshot(line.head)
    start = _common(client, theirs, head) if base is None else client.snapshot(base).id
    where = WORKSPACE if path is None else sandbox_path(path)
    tree = HeadTree(client, head.id, where)
    plan = ApplyPlan(SnapshotReader(client, start, theirs.id, where), tree, in_sandbox=True)
    taken: SnapshotInfo | None = None
    if plan.items and not plan.conflicts and not dry_run:
        taken = client.merge_files(line.id, merge_request(tree.whole, plan, theirs.id, start, head.id))
    changes = tuple(AppliedInfo(item.change, item.path, item.kind, item.merged is not None) for item in plan.items)
    return MergeInfo(
        theirs.id, head.id, start, dry_run, changes, tuple(plan.conflicts), plan.same, tuple(plan.warnings), taken
    )


def _common(client: Snapshotd, theirs: SnapshotInfo, head: SnapshotInfo) -> str:
    """The last snapshot that both go on from."""
    known = {one.id for one in lineage(client, theirs.id)}
    for one in reversed(lineage(client, head.id)):
        if one.id in known:
            return one.id
    raise UsageError(
        f"{theirs.id[:12]} and {head.id[:12]} have no snapshot in common, so nobody can tell what each has changed; name "
        "the snapshot to compare both with as the base"
    )


def merge_request(
    whole: Callable[[bytes], bytes], plan: ApplyPlan, source: str, base: str, head: str
) -> dict[str, Any]:
    """The plan as the daemon takes it. `whole` gives the path from the sandbox's root."""
    puts = [item for item in plan.items if item.put]
    return {
        "source": source,
        "base": base,
        "head": head,
        "take_b64": [b64(whole(item.path)) for item in puts if item.merged is None],
        "delete_b64": [b64(whole(item.path)) for item in plan.items if item.change == "deleted"],
        "edits": [
            {
                "path_b64": b64(whole(item.path)),
                "content_b64": base64.b64encode(item.merged).decode(),
                "mode": item.permissions,
            }
            for item in puts
            if item.merged is not None
        ],
        "modes": [
            {"path_b64": b64(whole(item.path)), "mode": item.permissions}
            for item in plan.items
            if item.merged is None and _has_mode(item)
        ],
    }


def _has_mode(item: Item) -> bool:
    """True if the permissions are to be set apart: they come with what is taken, unless the head had changed them."""
    return item.change != "deleted" and item.kind != "symlink" and (not item.put or item.own_mode)
