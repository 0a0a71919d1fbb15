"""Bring a directory to another state in place: changes found by a comparison are written, the rest is left alone.

No link is followed, and no existing file is opened but directories, each by descriptor from the one above. A replaced
path is removed and made anew, so a process or link that holds the old file keeps it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

from snapshotd.kernel.files import fd_path, remove_tree
from snapshotd.trees.base import Change, Child, RestoreReport
from snapshotd.trees.lookup import public_xattrs
from snapshotd.trees.materialise import DirectoryFrame, Writer
from snapshotd.trees.target import Owner
from snapshotd.trees.view import Directory, View, count_common, join
from snapshotd.types import Kind

_DEFAULT_ACL = "system.posix_acl_default"


def apply(
    root_fd: int,
    changes: Iterable[Change],
    view: View,
    *,
    shift: int = 0,
    owner: Owner | None = None,
    whole_groups: bool = False,
) -> RestoreReport:
    """Write the `changes` that `diff.diff(before, view)` found into `root_fd`, a directory with the files of `before`.

    Removes deleted paths, and replaces changed ones with all metadata; directories in which names came, went or were
    replaced get their time from `view`. Other paths are not touched, so the directory may differ from `before` where
    nothing changed; the directories on the way to a changed path must be there. Changed names of one hard link group of
    `view` are one file afterwards. So are the group's other names with `whole_groups`, for a directory that is all of
    `before`, and `changes` all of the difference: then those names have the content already.

    `shift`: the number by which ids in the directory are higher than in `view`, if it is the root of a container with a
    user namespace, seen from outside. `owner`: the user and group of everything that is written; None: those of `view`.
    Metadata that the target cannot hold become a warning, as in `materialise`; so does a mount somewhere in the
    directory, which is never touched. Raises OutOfSpace, DataLoss, FileNotFoundError or NotADirectoryError (of a
    directory that is missing), OSError. After an error a part is done. The caller keeps others from writing to the
    directory meanwhile. Not durable on return. Memory: the changed names that have several links, and one directory per
    level. Time: proportional to the changes; with `whole_groups`, one walk through `view` if a link group changed in part.
    """
    with closing(_Applying(root_fd, view, shift, owner, whole_groups)) as applying:
        for change in changes:
            applying.change(change)
        return applying.finish()


@dataclass(slots=True)
class _Place:
    """A directory on the way to the present path. `made`: its metadata are written in the end; `touched`: its time
    is."""

    name: bytes
    frame: DirectoryFrame
    made: bool = False
    touched: bool = False
    default_acl: bytes | None = None
    """Taken away as long as entries are made, which would inherit it."""


class _Applying:
    def __init__(self, root_fd: int, view: View, shift: int, owner: Owner | None, whole_groups: bool) -> None:
        self._view, self._whole_groups = view, whole_groups
        self._device = os.fstat(root_fd).st_dev
        self._writer = Writer(view, whiteouts=True, threads=False, shift=shift, owner=owner)
        self._way = [_Place(b"", self._writer.root(view.directory(), root_fd))]
        self._gone: list[bytes] | None = None
        """The directory that was removed last, with everything in it."""
        self._left: dict[tuple[int, int], int] = {}
        """Link groups of the view that have been begun: how many of their names are still to come."""

    def close(self) -> None:
        self._writer.close()

    def change(self, change: Change) -> None:
        """Make one change. Changes come in the order of a walk."""
        parts = [part for part in change.path.split(b"/") if part]
        if self._gone is not None and parts[: len(self._gone)] == self._gone:
            return
        if not parts:
            self._renew(self._way[0])
            return
        if not self._go_to(parts[:-1]):
            return
        was_directory = change.before is not None and change.before.kind is Kind.DIRECTORY
        becomes_directory = change.after is not None and change.after.kind is Kind.DIRECTORY
        name = parts[-1]
        if was_directory and becomes_directory:
            if self._enter(name):
                self._renew(self._way[-1])
            return
        place = self._touch()
        self._gone = parts if was_directory else None
        if not self._remove(place, name):
            self._gone = parts
        elif becomes_directory:
            if self._writer.make_directory(place.frame, self._view.find(place.frame.source, name)):
                self._enter(name)
                self._way[-1].made = True
            else:
                self._gone = parts
        elif change.after is not None:
            self._write(self._view.find(place.frame.source, name))

    def finish(self) -> RestoreReport:
        """Complete link groups if they are to be, then the directories that are still open."""
        torn = {inode for inode, left in self._left.items() if left > 0 and self._whole_groups}
        for path in self._names_of(torn) if torn else ():
            parts = path.split(b"/")
            if not self._go_to(parts[:-1]):
                continue
            place = self._way[-1]
            child = self._view.find(place.frame.source, parts[-1])
            if not self._writer.is_linked(place.frame, child) and self._remove(self._touch(), child.name):
                self._write(child)
        self._go_to([])
        self._leave(self._way[0])
        return self._writer.report()

    def _remove(self, place: _Place, name: bytes) -> bool:
        """Make room for a name. False if something is mounted there."""
        try:
            remove_tree(self._writer.fd(place.frame), name, one_device=True)
        except OSError as exc:
            if exc.errno != errno.EBUSY:
                raise
            self._writer.warn(place.frame, name, "was left as it is, because something is mounted there")
            return False
        return True

    def _write(self, child: Child) -> None:
        if self._writer.write_entry(self._way[-1].frame, child) and child.entry.nlink > 1:
            self._left[child.entry.inode] = self._left.get(child.entry.inode, child.entry.nlink) - 1

    def _names_of(self, torn: set[tuple[int, int]]) -> list[bytes]:
        """Paths of the names of link groups in the view, in the order of a walk."""
        found: list[bytes] = []
        stack: list[tuple[bytes, Directory, list[Child]]] = []

        def enter(path: bytes, directory: Directory) -> None:
            wanted = [
                c for c in self._view.children(directory) if c.entry.kind is Kind.DIRECTORY or c.entry.inode in torn
            ]
            stack.append((path, directory, wanted[::-1]))

        enter(b"", self._view.directory())
        while stack:
            path, directory, children = stack[-1]
            if not children:
                stack.pop()
                continue
            child = children.pop()
            if child.entry.kind is Kind.DIRECTORY:
                enter(join(path, child.name), self._view.enter(directory, child.name))
            else:
                found.append(join(path, child.name))
        return found

    # -- directories ---------------------------------------------------------------------------------------------------

    def _go_to(self, parts: list[bytes]) -> bool:
        """Make the directory `parts` the present one. Directories that are left behind are complete. False if something
        is mounted on the way."""
        common = count_common(parts, (place.name for place in self._way[1:]))
        while len(self._way) > common + 1:
            self._leave(self._way.pop())
        return all(self._enter(name) for name in parts[common:])

    def _enter(self, name: bytes) -> bool:
        """Go down one directory. False if something is mounted there; everything below then counts as done."""
        frame = self._writer.enter(self._way[-1].frame, name)
        if os.fstat(self._writer.fd(frame)).st_dev != self._device:
            self._writer.warn(self._way[-1].frame, name, "was left as it is, because something is mounted there")
            self._gone = [*(place.name for place in self._way[1:]), name]
            return False
        self._way.append(_Place(name, frame))
        return True

    def _touch(self) -> _Place:
        """Make the present directory ready for a change of its entries: writable, without a default ACL. Returns it."""
        place = self._way[-1]
        if not place.touched:
            place.touched = True
            path = fd_path(self._writer.fd(place.frame))
            # An ordinary user's own may be closed to its owner, as Go's modules are.
            if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
                os.chmod(path, 0o700)
                place.made = True
            try:
                place.default_acl = os.getxattr(path, _DEFAULT_ACL)
                os.removexattr(path, _DEFAULT_ACL)
            except OSError as exc:
                if exc.errno not in (errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
        return place

    def _renew(self, place: _Place) -> None:
        """Give a directory that stays other metadata: attributes that it has no more are removed now, the rest is
        written when the walk leaves it."""
        place.made = True
        path = fd_path(self._writer.fd(place.frame))
        wanted = self._view.directory_xattrs(place.frame.source)
        for name in public_xattrs(os.listxattr(path)):
            if os.fsencode(name) not in wanted:
                os.removexattr(path, name)

    def _leave(self, place: _Place) -> None:
        """Complete a directory in which everything is written."""
        if place.made:
            self._writer.finish_directory(place.frame)
        elif place.touched:
            fd = self._writer.fd(place.frame)
            if place.default_acl is not None:
                os.setxattr(fd_path(fd), _DEFAULT_ACL, place.default_acl)
            mtime_ns = self._view.entry_of(place.frame.source).mtime_ns
            os.utime(fd, ns=(mtime_ns, mtime_ns))
