"""The plan that brings the changes between two snapshots to another tree, path by path. Nothing is written.

Three versions of each path that changed are compared: as it was in the base, as it is in the snapshot, and as it is in
the target, which is a folder of a user (`apply`) or the head of a trajectory (`merge`). The rules (docs/branching.md says
them to users):

- The target is as the base was: it gets the snapshot's version. It is as the snapshot is: nothing to do.
- Both sides changed a text: `git merge-file` merges the lines. Anything else that both sides changed is a conflict, and
  so is a deletion against a change, and an entry of the target that the base did not have.
- Content and permissions are merged apart from each other. Owners, times and attributes are not compared.
- An entry that somebody put below a directory that goes away stays, and the directory with it.
- Never brought, with a warning: devices, fifos, sockets, set-user-id bits, anything named `.git` or as apply's own
  directories, and links that lead out of the folder.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

from snapshotd.errors import LimitExceeded, UsageError
from snapshotd.terms import number_of
from snapshotd.trees.git import merge_file

Side = Literal["base", "snapshot"]
MAX_CHANGES = 1_000_000
"""An agent can make any number of files; these take about 1 GiB here."""
MAX_MERGED_BYTES = 16 << 20
"""Larger texts that both sides changed are a conflict: merging holds all versions in memory."""
MAX_PLAN_BYTES = 512 << 20
"""All merged texts together: they wait in memory until everything is decided."""
KEPT_NAMES = b".snapshotd-apply"
"""Names that begin with this are never brought: an apply uses them, or has used them."""


class Version(Protocol):
    """One side of a change. `mode`: the twelve bits."""

    @property
    def kind(self) -> str: ...
    @property
    def mode(self) -> int: ...
    @property
    def size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Present:
    """An entry of the target. `permissions` are the nine bits of user, group and others. `target`: of a symbolic link."""

    kind: str
    permissions: int
    size: int
    target: bytes | None


P = TypeVar("P", bound=Present)
P_co = TypeVar("P_co", bound=Present, covariant=True)


class InTheWay(Exception):  # noqa: N818 - what was found, and an error only to who expected something else
    """A component of a path that is no directory in the target."""

    def __init__(self, path: bytes, kind: str) -> None:
        super().__init__(path, kind)
        self.path, self.kind = path, kind


class TreeSource(Protocol):
    """Two snapshots, below one of their directories. Paths are relative to it."""

    def changes(self) -> Iterable[tuple[bytes, Version | None, Version | None]]:
        """Each path that changed from base to snapshot, and both sides of it; parents before children."""

    def content(self, side: Side, path: bytes) -> Iterator[bytes]: ...

    def target(self, side: Side, path: bytes) -> bytes:
        """Where a symbolic link leads."""


class TargetTree(Protocol[P_co]):
    """The tree that gets the changes."""

    def look(self, path: bytes) -> P_co | None:
        """The entry at `path`, links not followed; None if there is none. InTheWay."""

    def names(self, path: bytes) -> list[bytes]:
        """The names in a directory."""

    def read(self, path: bytes) -> Iterator[bytes]:
        """A regular file's content in pieces."""


@dataclass(frozen=True, slots=True)
class Item(Generic[P]):
    """One path that is to become something else. `host` is what the target has there, `kind` what it then has (for a
    deletion: had), `put`: whether an entry is made (else only the permissions change, or it goes away). `merged` is the
    content, None for the snapshot's."""

    change: Literal["added", "changed", "deleted"]
    path: bytes
    kind: str
    host: P | None
    put: bool
    permissions: int = 0
    target: bytes = b""
    merged: bytes | None = None
    size: int = 0
    own_mode: bool = False
    """The permissions are not the snapshot's."""

    @property
    def is_directory(self) -> bool:
        """On both sides, as far as there are both."""
        return self.kind == "directory" and (self.host is None or self.host.kind == "directory")


@dataclass(frozen=True, slots=True)
class TreeConflict:
    """One path that both sides changed in ways that exclude each other."""

    path: bytes
    reason: str


class Unmergeable(Exception):  # noqa: N818 - a finding about one path
    """Why one path is a conflict."""


class MergePlan(Generic[P]):
    """The changes to make, decided in the constructor. `items` in the order of the changes. `in_sandbox`: the tree is one
    of a sandbox, which may have any link, permission and set-user-id bit."""

    def __init__(self, source: TreeSource, tree: TargetTree[P], *, in_sandbox: bool = False) -> None:
        self._source, self._tree, self._in_sandbox = source, tree, in_sandbox
        self._umask = 0 if in_sandbox else _umask()
        self.items: list[Item[P]] = []
        self.conflicts: list[TreeConflict] = []
        self.warnings: list[str] = []
        self.same = 0
        self._directories: set[bytes] = set()  # that the plan makes
        self._vanishing: list[tuple[bytes, P, Version | None]] = []
        self._left_out = self._staged = self._merged_bytes = 0
        for number, (path, before, after) in enumerate(source.changes()):
            if number == MAX_CHANGES:
                raise LimitExceeded(f"more than {MAX_CHANGES} paths changed; apply a smaller part")
            self._decide(path, before, after)
        self._empty_directories()
        if self._left_out:
            self.warnings.append(
                f"left out: {number_of(self._left_out, 'change')} in .git directories, which could run programs here"
            )
        if self._staged:
            self.warnings.append(
                f"left out: {number_of(self._staged, 'change')} in {os.fsdecode(KEPT_NAMES)}*: apply uses these names"
            )
        self.items.sort(key=lambda item: item.path.split(b"/"))

    # -- one path -------------------------------------------------------------------------------------------------------

    def _decide(self, path: bytes, before: Version | None, after: Version | None) -> None:
        parts = path.split(b"/")
        if any(part in (b"", b".", b"..") for part in parts) or b"\0" in path:
            raise UsageError(f"a snapshot cannot hold the path {os.fsdecode(path)!r}; nothing was changed")
        if any(part.lower() == b".git" for part in parts):
            self._left_out += 1
            return
        if any(part.lower().startswith(KEPT_NAMES) for part in parts):
            self._staged += 1
            return
        if any(path.startswith(conflict.path + b"/") for conflict in self.conflicts[-1:]):
            return  # the directory it lies in is none here, which is said already
        before, after = self._leave_out(path, before, after)
        if before is None and after is None:
            return
        try:
            self._three_way(path, before, after, self._look(path, goes=after is None))
        except Unmergeable as exc:
            self.conflicts.append(TreeConflict(path, str(exc)))

    def _leave_out(
        self, path: bytes, before: Version | None, after: Version | None
    ) -> tuple[Version | None, Version | None]:
        """Both sides of a change, each None where it is never brought; of the snapshot's side a warning says so."""
        if after is not None:
            refused = None
            if after.kind not in ("file", "directory", "symlink"):
                refused = f"a {after.kind} is not brought"
            elif (
                after.kind == "symlink"
                and not self._in_sandbox
                and _leads_out(path, self._source.target("snapshot", path))
            ):
                refused = "a link that leads out of the folder is not brought"
            if refused is not None:
                self.warnings.append(f"{os.fsdecode(path)}: {refused}")
                return None, None
        if before is not None and before.kind not in ("file", "directory", "symlink"):
            before = None  # it was never brought either
        return before, after

    def _look(self, path: bytes, *, goes: bool) -> P | None:
        try:
            return self._tree.look(path)
        except InTheWay as exc:
            if goes or exc.path in self._directories:  # it has gone with its directory, or this becomes one
                return None
            raise Unmergeable(
                f"{os.fsdecode(exc.path)} is a {exc.kind} here, and nothing is written through it"
            ) from None

    def _three_way(self, path: bytes, before: Version | None, after: Version | None, host: P | None) -> None:
        if after is None:
            self._delete(path, before, host)
        elif after.kind == "directory":
            self._directory(path, before, after, host)
        elif host is None:
            if before is not None and not self._differ(path, before, after):
                return  # only what is not brought has changed, of something that is gone here
            if before is not None:
                raise Unmergeable("changed in the snapshot, deleted here")
            self._put(path, after, None, self._mode_here(after))
        elif host.kind == "file" and after.kind == "file" and before is not None and before.kind == "file":
            self._file(path, before, after, host)
        elif self._is_as(path, "snapshot", after, host) and (before is not None or _runs(after, host)):
            self.same += 1
        elif before is None:
            raise Unmergeable(f"the snapshot has a new {after.kind}, and here is a {host.kind} that it never knew")
        elif before.kind == "directory" and host.kind == "directory":
            self._vanishing.append((path, host, after))
        elif before.kind == host.kind and self._is_as(path, "base", before, host) and _mode_is(before, host):
            self._put(path, after, host, self._mode_here(after))
        else:
            raise Unmergeable(f"a {after.kind} in the snapshot, and {_describe_change(before, host)} here")

    def _delete(self, path: bytes, before: Version | None, host: P | None) -> None:
        if before is None:
            return
        if host is None:
            self.same += 1
        elif before.kind == "directory" and host.kind == "directory":
            self._vanishing.append((path, host, None))
        elif before.kind == host.kind and self._is_as(path, "base", before, host) and _mode_is(before, host):
            self.items.append(Item("deleted", path, host.kind, host, put=False))
        else:
            raise Unmergeable(f"deleted in the snapshot, {_describe_change(before, host)} here")

    def _directory(self, path: bytes, before: Version | None, after: Version, host: P | None) -> None:
        if host is None:
            if before is not None and before.kind == "directory":
                if _mode(before) != _mode(after):
                    raise Unmergeable("its permissions changed in the snapshot, deleted here")
                return
            if before is not None:
                raise Unmergeable("a directory in the snapshot, deleted here")
            self._make_directory(path, None, self._mode_here(after))
        elif host.kind == "directory":
            if before is None or before.kind != "directory":
                self.same += 1
            elif _mode(before) != _mode(after):
                self._mode_only(path, host, self._merge_mode(before, after, host))
        elif before is not None and before.kind == host.kind and self._is_as(path, "base", before, host):
            self._make_directory(path, host, self._mode_here(after))
        else:
            raise Unmergeable(f"a directory in the snapshot, a {host.kind} here")

    def _make_directory(self, path: bytes, host: P | None, permissions: int) -> None:
        self._parents(path)
        self._directories.add(path)
        change: Literal["added", "changed"] = "added" if host is None else "changed"
        self.items.append(Item(change, path, "directory", host, put=True, permissions=permissions))

    def _mode_only(self, path: bytes, host: P, permissions: int) -> None:
        if permissions == host.permissions:
            self.same += 1
        else:
            self.items.append(Item("changed", path, host.kind, host, put=False, permissions=permissions))

    def _file(self, path: bytes, before: Version, after: Version, host: P) -> None:
        """A file on all three sides: content and permissions."""
        if not self._differ_in_content(path, before, after):
            if _mode(before) != _mode(after):
                self._mode_only(path, host, self._merge_mode(before, after, host))
            return
        permissions = self._merge_mode(before, after, host)
        if self._is_as(path, "base", before, host):
            self._put(path, after, host, permissions)
        elif self._is_as(path, "snapshot", after, host):
            self._mode_only(path, host, permissions)
        else:
            merged, ours = self._merge_text(path, before, after, host)
            if merged != ours:
                self._put(path, after, host, permissions, merged)
            else:
                self._mode_only(path, host, permissions)

    def _merge_text(self, path: bytes, before: Version, after: Version, host: P) -> tuple[bytes, bytes]:
        """The merged content, and the folder's. Unmergeable: git cannot merge it."""
        if max(before.size, after.size, host.size) > MAX_MERGED_BYTES:
            raise Unmergeable("changed on both sides, and too large to be merged")
        ours = b"".join(_read_bounded(self._tree.read(path)))
        base = b"".join(self._source.content("base", path))
        theirs = b"".join(self._source.content("snapshot", path))
        if any(b"\0" in data for data in (ours, base, theirs)):
            raise Unmergeable("changed on both sides, and no text")
        merged = merge_file(ours, base, theirs)
        if merged is None:
            raise Unmergeable("changed on both sides in the same lines")
        self._merged_bytes += len(merged)
        if self._merged_bytes > MAX_PLAN_BYTES:
            raise LimitExceeded(f"more than {MAX_PLAN_BYTES} bytes of text are to be merged; apply a smaller part")
        return merged, ours

    def _put(self, path: bytes, after: Version, host: P | None, permissions: int, merged: bytes | None = None) -> None:
        target = self._source.target("snapshot", path) if after.kind == "symlink" else b""
        if after.kind == "file" and after.mode & 0o6000 and not self._in_sandbox:
            self.warnings.append(f"{os.fsdecode(path)}: its set-user-id or set-group-id bit is not brought")
        self._parents(path)
        change: Literal["added", "changed"] = "added" if host is None else "changed"
        own_mode = permissions != _mode(after)
        self.items.append(Item(change, path, after.kind, host, True, permissions, target, merged, after.size, own_mode))

    def _parents(self, path: bytes) -> None:
        """Make the directories that lead to `path`, where they are missing: somebody has deleted them here."""
        for parent in _folders(path):
            if parent in self._directories or self._tree.look(parent) is not None:
                return
            self._directories.add(parent)
            self.items.append(Item("added", parent, "directory", None, True, 0o777 & ~self._umask))

    def _empty_directories(self) -> None:
        """Directories go away when nothing is left in them, the deepest first."""
        gone = {item.path for item in self.items if item.change == "deleted"}
        unsure = {folder for conflict in self.conflicts for folder in _folders(conflict.path)}
        for path, host, after in reversed(self._vanishing):
            left = [name for name in self._tree.names(path) if path + b"/" + name not in gone]
            if not left:
                gone.add(path)
                if after is None:
                    self.items.append(Item("deleted", path, "directory", host, put=False))
                else:
                    self._put(path, after, host, self._mode_here(after))
            elif path in unsure:
                continue  # a conflict in it is said already
            elif after is None:
                self.warnings.append(
                    f"{os.fsdecode(path)}: the directory stays, for the files in it that the snapshot never knew"
                )
            else:
                reason = f"a {after.kind} in the snapshot, a directory here with files that it never knew"
                self.conflicts.append(TreeConflict(path, reason))

    # -- comparing ------------------------------------------------------------------------------------------------------

    def _differ(self, path: bytes, before: Version, after: Version) -> bool:
        return _mode(before) != _mode(after) or self._differ_in_content(path, before, after)

    def _differ_in_content(self, path: bytes, before: Version, after: Version) -> bool:
        if before.kind != after.kind:
            return True
        if after.kind == "symlink":
            return self._source.target("base", path) != self._source.target("snapshot", path)
        if before.size != after.size:
            return True
        return _digest(self._source.content("base", path)) != _digest(self._source.content("snapshot", path))

    def _is_as(self, path: bytes, side: Side, entry: Version, host: P) -> bool:
        """True if the folder has the content of this side."""
        if entry.kind != host.kind:
            return False
        if entry.kind == "symlink":
            return self._source.target(side, path) == host.target
        if entry.kind == "directory":
            return True
        if entry.size != host.size:
            return False
        return _digest(self._source.content(side, path)) == _digest(self._tree.read(path))

    def _mode_here(self, entry: Version) -> int:
        return _mode(entry) & ~self._umask

    def _merge_mode(self, before: Version, after: Version, host: P) -> int:
        if _mode(before) == _mode(after) or host.permissions in (_mode(after), self._mode_here(after)):
            return host.permissions
        if host.permissions == _mode(before):
            return self._mode_here(after)
        raise Unmergeable("its permissions changed on both sides")


def _read_bounded(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The content of a file of the folder, which may grow while it is read. Unmergeable: it is too large."""
    left = MAX_MERGED_BYTES
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise Unmergeable("changed on both sides, and too large to be merged")
        yield piece


def _digest(pieces: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def _leads_out(path: bytes, target: bytes) -> bool:
    """True if a link may lead out of the folder. `..` counts only at the beginning, where it means the directories that
    lead to the link; behind a name it could mean those that another link leads to."""
    if target.startswith(b"/") or not target:
        return True
    parts = [part for part in target.split(b"/") if part not in (b"", b".")]
    ups = len(list(itertools.takewhile(lambda part: part == b"..", parts)))
    return ups > path.count(b"/") or b".." in parts[ups:]


def _mode(entry: Version) -> int:
    """The nine permission bits; none of a link."""
    return 0 if entry.kind == "symlink" else entry.mode & 0o777


def _mode_is(entry: Version, host: Present) -> bool:
    return entry.kind == "symlink" or _mode(entry) == host.permissions


def _runs(entry: Version, host: Present) -> bool:
    """True if both can be run as a program, or neither."""
    return entry.kind != "file" or bool(_mode(entry) & 0o100) == bool(host.permissions & 0o100)


def _describe_change(before: Version, host: Present) -> str:
    return "changed" if before.kind == host.kind else f"a {host.kind}"


def _folders(path: bytes) -> Iterator[bytes]:
    """The directories that lead to it, the deepest first."""
    while b"/" in path:
        path = path.rpartition(b"/")[0]
        yield path


def _umask() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022
