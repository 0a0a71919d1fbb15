"""Files of a snapshot, put into a folder again, while others may work in it.

A path is changed only if what is there is what the head has: content, type and mode. Nothing is looked at first and
replaced then. The new file and the one that is there change places in one instant, the old one is compared, and they
change places again if it is another one. A file that goes is renamed away, compared, and renamed back. Where nothing
may be, a name is given without replacing one. The old files are deleted at the end alone: until then a program that
still had one open may have written to it, and a file with a writer is never taken for the agent's. A file in doubt stays
under a name that is told.

The old files lie in one directory of the folder (`place`), numbered as the changes are. A rewind that was cut off is
settled from there (`recover`). Names of one file come out one after the other, each with a change of its status that is
ours, so the time of the last one counts for all. Names that are one file in the snapshot are one again.

Everything is done as the folder's user, by descriptors from the folder down: nothing outside of it and nothing that the
user may not touch is reached, and what is made belongs to the user; if that is root, a file belongs to its owner again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from snapshotd.engine.folders.capture import TOP
from snapshotd.engine.folders.databases import groups
from snapshotd.engine.folders.names import name_of
from snapshotd.engine.folders.rewinding.out_place import (
    CHANGED,
    NO_SUCH_RENAME,
    Facts,
    NewFiles,
    OutPlace,
    facts_of,
    file_name,
    is_written,
)
from snapshotd.engine.folders.scan import open_file
from snapshotd.failpoints import hit
from snapshotd.kernel import files
from snapshotd.kernel.identity import HostUser, acting_as
from snapshotd.trees.base import Change, Entry
from snapshotd.trees.view import View
from snapshotd.types import Kind


def relative(change: Change) -> bytes:
    """The path from the folder."""
    return change.path[len(TOP) + 1 :]


@dataclass(frozen=True, slots=True)
class _Out:
    """A file that came out. `replaced`: the facts of ours that is at its path now; None: nothing is. `path` None: it is
    ours, and was never the user's."""

    number: int
    path: bytes
    st: os.stat_result
    replaced: Facts | None
    ours: bool = False


class PuttingBack:
    """One rewind of files: `head` is what the folder should have, `to` what it gets. `done`: each path that was changed,
    with the facts of what was put there (None: nothing is there now); `left`: a reason for each that was not."""

    def __init__(self, folder: int, user: HostUser, head: View, to: View, place: bytes) -> None:
        self._head, self._to, self._user = head, to, user
        self._place = OutPlace(folder, user, place)
        self._new = NewFiles(self._place, to)
        self.done: dict[bytes, Facts | None] = {}
        self.left: dict[bytes, str] = {}
        self._out: list[_Out] = []
        self._seen_ns: dict[int, int] = {}
        """Inode of a file that came out, to the time of its last change of status, which was ours."""

    def run(self, changes: Sequence[Change]) -> None:
        """Make these changes: `before` is what `head` has, `after` what `to` has."""
        try:
            with acting_as(self._user):
                os.mkdir(self._place.name, 0o700, dir_fd=self._place.folder)
        except OSError as exc:
            self.left |= {relative(change): f"the folder cannot be written to: {exc.strerror}" for change in changes}
            return
        with self._place.hold_open():
            self._pass_open_databases(changes)
            numbered = [(n, change) for n, change in enumerate(changes) if relative(change) not in self.left]
            for number, change in reversed(numbered):
                if change.after is None or _other_kind(change):
                    self._try(relative(change), partial(self._remove, number, change))
            for number, change in numbered:
                hit("engine.folders.put")
                if change.after is not None and relative(change) not in self.left:
                    self._try(relative(change), partial(self._put, number, change, change.after))
            for ours in (False, True):  # the user's first: what cannot go takes the place of one of ours
                groups: dict[int, list[_Out]] = {}
                for one in self._out:
                    if one.ours is ours:
                        groups.setdefault(one.st.st_ino, []).append(one)
                for group in groups.values():
                    self._finish(group)

    def recover(self, paths: Sequence[bytes]) -> None:
        """Settle a rewind of these paths that was cut off: files that came out are deleted if head or target have them;
        others are somebody's, and come back."""
        with contextlib.suppress(FileNotFoundError), self._place.hold_open():
            for name in sorted(map(os.fsencode, os.listdir(self._place.fd))):
                number = int(name[1:]) if name[1:].isdigit() else len(paths)
                if name[:1] != b"n" or number >= len(paths):
                    continue
                path = paths[number]
                if all(self._difference(name, path, view) is not None for view in (self._head, self._to)):
                    self._try(path, partial(self._bring_back, number, path))
                else:
                    with acting_as(self._user):
                        os.unlink(name, dir_fd=self._place.fd)

    def _pass_open_databases(self, changes: Sequence[Change]) -> None:
        """Leave all files of a database that a program has open."""
        for group in groups(map(relative, changes)).values():
            if len(group) > 1 and any(self._has_writer(path) for path in group):
                self.left |= dict.fromkeys(group, "a program has the database open; end it, and rewind again")

    def _has_writer(self, path: bytes) -> bool:
        try:
            with self._place.parent(path) as (parent, name):
                with acting_as(self._user):
                    fd = open_file(parent, os.fsdecode(name))
                try:
                    return is_written(fd)
                finally:
                    os.close(fd)
        except OSError:
            return False

    # -- one path ------------------------------------------------------------------------------------------------------

    def _remove(self, number: int, change: Change) -> None:
        path, before = relative(change), change.before
        assert before is not None
        with self._place.parent(path) as (parent, name):
            if before.kind is Kind.DIRECTORY:
                with acting_as(self._user):
                    os.rmdir(name, dir_fd=parent)
                self.done[path] = None
                return
            with acting_as(self._user):
                os.rename(name, file_name(number), src_dir_fd=parent, dst_dir_fd=self._place.fd)
            hit("engine.folders.exchanged")
            self.done[path] = None
            self._check(number, path, None)

    def _put(self, number: int, change: Change, after: Entry) -> None:
        path = relative(change)
        before = None if _other_kind(change) else change.before
        with self._place.parent(path) as (parent, name):
            if after.kind is Kind.DIRECTORY:
                self.done[path] = self._directory(parent, name, before, after)
                return
            facts = self._new.write(number, path, after)
            if before is None:
                self._place.give(parent, name, number)
                self._place.unused.discard(number)
                self.done[path] = facts
                self._note_linked(parent, name, after, facts)
                return
            try:
                with acting_as(self._user):
                    files.exchange(self._place.fd, file_name(number), parent, name)
            except OSError as exc:
                if exc.errno not in NO_SUCH_RENAME:
                    raise
                self._put_in_two_steps(number, path, parent, name, facts)
                return
            self._place.unused.discard(number)
            hit("engine.folders.exchanged")
            self.done[path] = facts
            self._note_linked(parent, name, after, facts)
            self._check(number, path, facts)

    def _note_linked(self, parent: int, name: bytes, after: Entry, facts: Facts) -> None:
        if after.nlink > 1:
            with contextlib.suppress(OSError):
                self._note(os.stat(name, dir_fd=parent, follow_symlinks=False), facts)

    def _put_in_two_steps(self, number: int, path: bytes, parent: int, name: bytes, facts: Facts) -> None:
        """Replace a file where the file system cannot exchange two names: for an instant there is none at the path."""
        with acting_as(self._user):
            os.rename(file_name(number), b"w%d" % number, src_dir_fd=self._place.fd, dst_dir_fd=self._place.fd)
            self._place.unused.discard(number)
            os.rename(name, file_name(number), src_dir_fd=parent, dst_dir_fd=self._place.fd)
        self.done[path] = None
        self._check(number, path, None)
        if path not in self.left:
            self._place.give(parent, name, number, b"w")
            self.done[path] = facts

    def _check(self, number: int, path: bytes, replaced: Facts | None) -> None:
        """Compare what came out; what is not as the head has it goes back at once."""
        reason = self._difference(file_name(number), path, self._head)
        if reason is None:
            st = os.stat(file_name(number), dir_fd=self._place.fd, follow_symlinks=False)
            self._seen_ns[st.st_ino] = st.st_ctime_ns
            self._out.append(_Out(number, path, st, replaced))
        else:
            self._return(number, path, replaced, reason)

    def _return(self, number: int, path: bytes, replaced: Facts | None, reason: str) -> None:
        """Give a file that came out its name again. `replaced`: see `_Out`."""
        self.done.pop(path, None)
        self.left[path] = reason
        with contextlib.ExitStack() as opened:
            try:
                parent, name = opened.enter_context(self._place.parent(path))
                if replaced is None or not self._exchange_again(number, path, parent, name, replaced):
                    self._place.give(parent, name, number)
            except OSError:
                self._keep(number, path)

    def _exchange_again(self, number: int, path: bytes, parent: int, name: bytes, replaced: Facts) -> bool:
        """False: nothing is at the path any more. OSError (EEXIST): what is there is not ours."""
        try:
            with acting_as(self._user):
                files.exchange(self._place.fd, file_name(number), parent, name)
        except FileNotFoundError:
            return False
        st = os.stat(file_name(number), dir_fd=self._place.fd, follow_symlinks=False)
        if facts_of(st) == replaced:
            self._seen_ns[st.st_ino] = st.st_ctime_ns
            self._out.append(_Out(number, path, st, None, ours=True))
            return True
        with acting_as(self._user):
            files.exchange(self._place.fd, file_name(number), parent, name)
        raise FileExistsError(errno.EEXIST, "somebody has written there")

    def _bring_back(self, number: int, path: bytes) -> None:
        """Return a file to its path after a crash, as `_return` does. The rewind's own file may still be there."""
        self.left[path] = CHANGED
        try:
            with self._place.parent(path) as (parent, name):
                try:
                    self._place.give(parent, name, number)
                    return
                except FileExistsError:
                    pass
                with acting_as(self._user):
                    files.exchange(self._place.fd, file_name(number), parent, name)
                if self._difference(file_name(number), path, self._to) is None:
                    with acting_as(self._user):
                        os.unlink(file_name(number), dir_fd=self._place.fd)
                    return
                with acting_as(self._user):
                    files.exchange(self._place.fd, file_name(number), parent, name)
        except OSError:
            pass
        self._keep(number, path)

    def _keep(self, number: int, path: bytes) -> None:
        """Let a file that cannot have its name again be found beside it, or at the top."""
        kept = path.rpartition(b"/")[2][:200] + b".kept-" + secrets.token_hex(4).encode()
        self.done.pop(path, None)
        for at in (path.rpartition(b"/")[0], b""):
            with contextlib.suppress(OSError), self._place.parent(at + b"/" + kept) as (parent, name):
                self._place.give(parent, name, number)
                self.left[path] = f"{CHANGED}, and what was there is {name_of((at + b'/' + kept).lstrip(b'/'))} now"
                return
        self.left[path] = f"{CHANGED}, and what was there is {name_of(self._place.name + b'/' + file_name(number))} now"

    def _finish(self, group: Sequence[_Out]) -> None:
        """Delete a file that came out, by all of these names, if nobody has written to it since."""
        for one, rest in zip(group, (*group[1:], None), strict=True):
            try:
                is_last_of_many = rest is None and len(group) > 1
                if self._is_untouched(one) and not (is_last_of_many and self._differs_now(one)):
                    with acting_as(self._user):
                        os.unlink(file_name(one.number), dir_fd=self._place.fd)
                    if rest is not None:
                        st = os.stat(file_name(rest.number), dir_fd=self._place.fd, follow_symlinks=False)
                        self._note(st, facts_of(one.st))
                elif one.ours:
                    self._keep(one.number, one.path)
                else:
                    self._return(one.number, one.path, one.replaced, CHANGED)
            except OSError as exc:
                self.left[one.path] = (
                    f"{exc.strerror}; what was there is {name_of(self._place.name + b'/' + file_name(one.number))} now"
                )

    def _note(self, st: os.stat_result, facts: Facts) -> None:
        """Note that this rewind changed the names of a file. `facts`: those that the file must have."""
        if st.st_ino in self._seen_ns and facts_of(st) == facts:
            self._seen_ns[st.st_ino] = st.st_ctime_ns

    def _differs_now(self, one: _Out) -> bool:
        """True if a file is another one than head (or target) has: between two looks its names have changed by us."""
        return self._difference(file_name(one.number), one.path, self._to if one.ours else self._head) is not None

    def _is_untouched(self, one: _Out) -> bool:
        try:
            name, seen_ns = file_name(one.number), self._seen_ns[one.st.st_ino]
            st = os.stat(name, dir_fd=self._place.fd, follow_symlinks=False)
            if (facts_of(st), st.st_ctime_ns) != (facts_of(one.st), seen_ns):
                return False
            if not stat.S_ISREG(st.st_mode):
                return True
            with self._place.reading(name, self._place.fd) as fd:
                return not is_written(fd) and os.fstat(fd).st_ctime_ns == seen_ns
        except OSError:
            return False

    def _difference(self, name: bytes, path: bytes, view: View, directory: int | None = None) -> str | None:
        """See `OutPlace.difference`. Files that a rewind puts have nine bits of a mode."""
        return self._place.difference(name, path, view, directory, whole_mode=view is self._head)

    # -- looking -------------------------------------------------------------------------------------------------------

    def holds(self, path: bytes) -> bool:
        """True if what is at the path is what `to` has there."""
        try:
            with self._place.parent(path) as (parent, name):
                st = os.stat(name, dir_fd=parent, follow_symlinks=False)
                if stat.S_ISDIR(st.st_mode):
                    entry = self._to.lstat(TOP + b"/" + path)
                    return entry.kind is Kind.DIRECTORY and entry.mode & 0o777 == stat.S_IMODE(st.st_mode)
                return self._difference(name, path, self._to, parent) is None
        except (FileNotFoundError, NotADirectoryError):
            return not _has(self._to, path)
        except OSError:
            return False

    def _directory(self, parent: int, name: bytes, before: Entry | None, after: Entry) -> Facts:
        with acting_as(self._user):
            if before is None:
                os.mkdir(name, 0o700, dir_fd=parent)
            fd = files.open_dir(parent, name)
            try:
                if before is not None and stat.S_IMODE(os.fstat(fd).st_mode) != before.mode:
                    raise OSError(errno.EBUSY, CHANGED)
                os.fchmod(fd, after.mode & 0o777)
                return facts_of(os.fstat(fd))
            finally:
                os.close(fd)

    def _try(self, path: bytes, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as exc:
            self.done.pop(path, None)
            self.left.setdefault(path, _why(exc))


def _other_kind(change: Change) -> bool:
    kinds = {entry.kind is Kind.DIRECTORY for entry in (change.before, change.after) if entry is not None}
    return len(kinds) == 2


def _has(view: View, path: bytes) -> bool:
    try:
        view.lstat(TOP + b"/" + path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _why(exc: OSError) -> str:
    if exc.errno in (errno.ENOTEMPTY, errno.EEXIST):
        return "something else is there by now"
    if exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        return "it is gone, or its directory is"
    return str(exc.strerror)
