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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from snapshotd.engine.folders.capture import TOP
from snapshotd.engine.folders.databases import groups
from snapshotd.engine.folders.names import name_of
from snapshotd.engine.folders.scan import open_file
from snapshotd.failpoints import hit
from snapshotd.kernel import fanotify, files
from snapshotd.kernel.identity import HostUser, acting_as
from snapshotd.trees.base import Change, Entry
from snapshotd.trees.view import View
from snapshotd.types import Kind

PLACE = b".snapshotd-rewind-"
"""How the name of the directory begins in which the files lie that came out."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE_BYTES = 1 << 20
_CHANGED = "it was changed while the rewind ran"
_NO_SUCH_RENAME = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""File systems of networks know no exchange, and no renaming without replacing."""
_NO_SUCH_LINK = (errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)
"""A file system has no hard links, or not so many of one file."""

Facts = tuple[int, ...]
"""Mode, size, modification time and number of a file: it is the same one, and was not written to."""


def facts_of(st: os.stat_result) -> Facts:
    """See `Facts`. A directory has its mode alone."""
    return (st.st_mode,) if stat.S_ISDIR(st.st_mode) else (st.st_mode, st.st_size, st.st_mtime_ns, st.st_ino)


def new_place() -> bytes:
    """A name for the directory of a rewind."""
    return PLACE + secrets.token_hex(8).encode()


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


@dataclass(slots=True)
class PuttingBack:
    """One rewind of files: `head` is what the folder should have, `to` what it gets. `done`: each path that was changed,
    with the facts of what was put there (None: nothing is there now); `left`: a reason for each that was not."""

    folder: int
    user: HostUser
    head: View
    to: View
    place: bytes
    done: dict[bytes, Facts | None] = field(default_factory=dict)
    left: dict[bytes, str] = field(default_factory=dict)
    _out: list[_Out] = field(default_factory=list)
    _unused: set[int] = field(default_factory=set)
    """New files that have got no name yet."""
    _new: dict[tuple[int, int], tuple[bytes, Facts]] = field(default_factory=dict)
    """Inode of a file with several names in `to`, to another name in the place of the one that was made for it."""
    _seen_ns: dict[int, int] = field(default_factory=dict)
    """Inode of a file that came out, to the time of its last change of status, which was ours."""
    _place: int = -1

    def run(self, changes: Sequence[Change]) -> None:
        """Make these changes: `before` is what `head` has, `after` what `to` has."""
        try:
            with acting_as(self.user):
                os.mkdir(self.place, 0o700, dir_fd=self.folder)
        except OSError as exc:
            self.left |= {relative(change): f"the folder cannot be written to: {exc.strerror}" for change in changes}
            return
        with self._opened():
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
        with contextlib.suppress(FileNotFoundError), self._opened():
            for name in sorted(map(os.fsencode, os.listdir(self._place))):
                number = int(name[1:]) if name[1:].isdigit() else len(paths)
                if name[:1] != b"n" or number >= len(paths):
                    continue
                path = paths[number]
                if all(self._difference(name, path, view) is not None for view in (self.head, self.to)):
                    self._try(path, partial(self._bring_back, number, path))
                else:
                    with acting_as(self.user):
                        os.unlink(name, dir_fd=self._place)

    def _pass_open_databases(self, changes: Sequence[Change]) -> None:
        """The files of a database that a program has open stay all."""
        for group in groups(map(relative, changes)).values():
            if len(group) > 1 and any(self._has_writer(path) for path in group):
                self.left |= dict.fromkeys(group, "a program has the database open; end it, and rewind again")

    def _has_writer(self, path: bytes) -> bool:
        try:
            with self._parent(path) as (parent, name):
                with acting_as(self.user):
                    fd = open_file(parent, os.fsdecode(name))
                try:
                    return _is_written(fd)
                finally:
                    os.close(fd)
        except OSError:
            return False

    # -- one path ------------------------------------------------------------------------------------------------------

    def _remove(self, number: int, change: Change) -> None:
        path, before = relative(change), change.before
        assert before is not None
        with self._parent(path) as (parent, name):
            if before.kind is Kind.DIRECTORY:
                with acting_as(self.user):
                    os.rmdir(name, dir_fd=parent)
                self.done[path] = None
                return
            with acting_as(self.user):
                os.rename(name, _out(number), src_dir_fd=parent, dst_dir_fd=self._place)
            hit("engine.folders.exchanged")
            self.done[path] = None
            self._check(number, path, None)

    def _put(self, number: int, change: Change, after: Entry) -> None:
        path = relative(change)
        before = None if _other_kind(change) else change.before
        with self._parent(path) as (parent, name):
            if after.kind is Kind.DIRECTORY:
                self.done[path] = self._directory(parent, name, before, after)
                return
            facts = self._write(number, path, after)
            if before is None:
                self._give(parent, name, number)
                self._unused.discard(number)
                self.done[path] = facts
                self._note_linked(parent, name, after, facts)
                return
            try:
                with acting_as(self.user):
                    files.exchange(self._place, _out(number), parent, name)
            except OSError as exc:
                if exc.errno not in _NO_SUCH_RENAME:
                    raise
                self._put_in_two_steps(number, path, parent, name, facts)
                return
            self._unused.discard(number)
            hit("engine.folders.exchanged")
            self.done[path] = facts
            self._note_linked(parent, name, after, facts)
            self._check(number, path, facts)

    def _note_linked(self, parent: int, name: bytes, after: Entry, facts: Facts) -> None:
        if after.nlink > 1:
            with contextlib.suppress(OSError):
                self._note(os.stat(name, dir_fd=parent, follow_symlinks=False), facts)

    def _put_in_two_steps(self, number: int, path: bytes, parent: int, name: bytes, facts: Facts) -> None:
        """Where the file system knows no exchange: for an instant nothing is there."""
        with acting_as(self.user):
            os.rename(_out(number), b"w%d" % number, src_dir_fd=self._place, dst_dir_fd=self._place)
            self._unused.discard(number)
            os.rename(name, _out(number), src_dir_fd=parent, dst_dir_fd=self._place)
        self.done[path] = None
        self._check(number, path, None)
        if path not in self.left:
            self._give(parent, name, number, b"w")
            self.done[path] = facts

    def _check(self, number: int, path: bytes, replaced: Facts | None) -> None:
        """Compare what came out; what is not as the head has it goes back at once."""
        reason = self._difference(_out(number), path, self.head)
        if reason is None:
            st = os.stat(_out(number), dir_fd=self._place, follow_symlinks=False)
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
                parent, name = opened.enter_context(self._parent(path))
                if replaced is None or not self._exchange_again(number, path, parent, name, replaced):
                    self._give(parent, name, number)
            except OSError:
                self._keep(number, path)

    def _exchange_again(self, number: int, path: bytes, parent: int, name: bytes, replaced: Facts) -> bool:
        """False: nothing is at the path any more. OSError (EEXIST): what is there is not ours."""
        try:
            with acting_as(self.user):
                files.exchange(self._place, _out(number), parent, name)
        except FileNotFoundError:
            return False
        st = os.stat(_out(number), dir_fd=self._place, follow_symlinks=False)
        if facts_of(st) == replaced:
            self._seen_ns[st.st_ino] = st.st_ctime_ns
            self._out.append(_Out(number, path, st, None, ours=True))
            return True
        with acting_as(self.user):
            files.exchange(self._place, _out(number), parent, name)
        raise FileExistsError(errno.EEXIST, "somebody has written there")

    def _bring_back(self, number: int, path: bytes) -> None:
        """After a crash: `_return`, where what is at the path may still be ours."""
        self.left[path] = _CHANGED
        try:
            with self._parent(path) as (parent, name):
                try:
                    self._give(parent, name, number)
                    return
                except FileExistsError:
                    pass
                with acting_as(self.user):
                    files.exchange(self._place, _out(number), parent, name)
                if self._difference(_out(number), path, self.to) is None:
                    with acting_as(self.user):
                        os.unlink(_out(number), dir_fd=self._place)
                    return
                with acting_as(self.user):
                    files.exchange(self._place, _out(number), parent, name)
        except OSError:
            pass
        self._keep(number, path)

    def _keep(self, number: int, path: bytes) -> None:
        """Let a file that cannot have its name again be found beside it, or at the top."""
        kept = path.rpartition(b"/")[2][:200] + b".kept-" + secrets.token_hex(4).encode()
        self.done.pop(path, None)
        for at in (path.rpartition(b"/")[0], b""):
            with contextlib.suppress(OSError), self._parent(at + b"/" + kept) as (parent, name):
                self._give(parent, name, number)
                self.left[path] = f"{_CHANGED}, and what was there is {name_of((at + b'/' + kept).lstrip(b'/'))} now"
                return
        self.left[path] = f"{_CHANGED}, and what was there is {name_of(self.place + b'/' + _out(number))} now"

    def _finish(self, group: Sequence[_Out]) -> None:
        """Delete a file that came out, by all of these names, if nobody has written to it since."""
        for one, rest in zip(group, (*group[1:], None), strict=True):
            try:
                is_last_of_many = rest is None and len(group) > 1
                if self._is_untouched(one) and not (is_last_of_many and self._differs_now(one)):
                    with acting_as(self.user):
                        os.unlink(_out(one.number), dir_fd=self._place)
                    if rest is not None:
                        st = os.stat(_out(rest.number), dir_fd=self._place, follow_symlinks=False)
                        self._note(st, facts_of(one.st))
                elif one.ours:
                    self._keep(one.number, one.path)
                else:
                    self._return(one.number, one.path, one.replaced, _CHANGED)
            except OSError as exc:
                self.left[one.path] = (
                    f"{exc.strerror}; what was there is {name_of(self.place + b'/' + _out(one.number))} now"
                )

    def _note(self, st: os.stat_result, facts: Facts) -> None:
        """We have changed the names of a file. `facts`: those that it must have."""
        if st.st_ino in self._seen_ns and facts_of(st) == facts:
            self._seen_ns[st.st_ino] = st.st_ctime_ns

    def _differs_now(self, one: _Out) -> bool:
        """True if a file is another one than head (or target) has: between two looks its names have changed by us."""
        return self._difference(_out(one.number), one.path, self.to if one.ours else self.head) is not None

    def _is_untouched(self, one: _Out) -> bool:
        try:
            name, seen_ns = _out(one.number), self._seen_ns[one.st.st_ino]
            st = os.stat(name, dir_fd=self._place, follow_symlinks=False)
            if (facts_of(st), st.st_ctime_ns) != (facts_of(one.st), seen_ns):
                return False
            if not stat.S_ISREG(st.st_mode):
                return True
            with self._reading(name, self._place) as fd:
                return not _is_written(fd) and os.fstat(fd).st_ctime_ns == seen_ns
        except OSError:
            return False

    # -- looking -------------------------------------------------------------------------------------------------------

    def holds(self, path: bytes) -> bool:
        """True if what is at the path is what `to` has there."""
        try:
            with self._parent(path) as (parent, name):
                st = os.stat(name, dir_fd=parent, follow_symlinks=False)
                if stat.S_ISDIR(st.st_mode):
                    entry = self.to.lstat(TOP + b"/" + path)
                    return entry.kind is Kind.DIRECTORY and entry.mode & 0o777 == stat.S_IMODE(st.st_mode)
                return self._difference(name, path, self.to, parent) is None
        except (FileNotFoundError, NotADirectoryError):
            return not _has(self.to, path)
        except OSError:
            return False

    def _difference(self, name: bytes, path: bytes, view: View, directory: int | None = None) -> str | None:
        """Why a file in the place (or in `directory`) is not what a view has at its path. None: it is."""
        directory = self._place if directory is None else directory
        try:
            wanted = view.child(TOP + b"/" + path)
            st = os.stat(name, dir_fd=directory, follow_symlinks=False)
            entry = Entry.of(st)
            if entry.kind is not wanted.entry.kind:
                return "something else is there by now"
            if entry.kind is Kind.SYMLINK:
                with acting_as(self.user):
                    target = os.readlink(name, dir_fd=directory)
                return None if os.fsencode(target) == view.readlink_of(wanted) else _CHANGED
            bits = 0o7777 if view is self.head else 0o777  # files that a rewind puts have no others
            if entry.mode & bits != wanted.entry.mode & bits or entry.size != wanted.entry.size:
                return _CHANGED
            with self._reading(name, directory) as fd:
                if _is_written(fd):
                    return "a program has it open for writing; end it, and rewind again"
                for offset in range(0, entry.size, _PIECE_BYTES):
                    if view.read_child(wanted, offset, _PIECE_BYTES) != os.pread(fd, _PIECE_BYTES, offset):
                        return _CHANGED
                return None if os.fstat(fd).st_ctime_ns == st.st_ctime_ns else _CHANGED
        except (FileNotFoundError, NotADirectoryError):
            return "something else is there by now"
        except OSError as exc:
            return f"it cannot be compared: {exc.strerror}"

    # -- files ---------------------------------------------------------------------------------------------------------

    def _directory(self, parent: int, name: bytes, before: Entry | None, after: Entry) -> Facts:
        with acting_as(self.user):
            if before is None:
                os.mkdir(name, 0o700, dir_fd=parent)
            fd = files.open_dir(parent, name)
            try:
                if before is not None and stat.S_IMODE(os.fstat(fd).st_mode) != before.mode:
                    raise OSError(errno.EBUSY, _CHANGED)
                os.fchmod(fd, after.mode & 0o777)
                return facts_of(os.fstat(fd))
            finally:
                os.close(fd)

    def _write(self, number: int, path: bytes, entry: Entry) -> Facts:
        """Make the new file in the place, whole under its number."""
        half = b"w%d" % number
        if entry.inode in self._new:
            first, facts = self._new[entry.inode]
            try:
                with acting_as(self.user):
                    os.link(first, half, src_dir_fd=self._place, dst_dir_fd=self._place, follow_symlinks=False)
                    os.rename(half, _out(number), src_dir_fd=self._place, dst_dir_fd=self._place)
            except OSError as exc:
                if exc.errno not in _NO_SUCH_LINK:
                    raise
            else:
                self._unused.add(number)
                return facts
        if entry.kind is Kind.SYMLINK:
            target = self.to.readlink(TOP + b"/" + path)
            with acting_as(self.user):
                os.symlink(target, half, dir_fd=self._place)
        else:
            with acting_as(self.user):
                fd = os.open(half, _NEW, 0o600, dir_fd=self._place)
            try:
                self.to.copy_child(self.to.child(TOP + b"/" + path), fd)
                with acting_as(self.user):
                    os.fchmod(fd, entry.mode & 0o777)
            finally:
                os.close(fd)
        self._give_to_owner(half, entry)
        with acting_as(self.user):
            os.rename(half, _out(number), src_dir_fd=self._place, dst_dir_fd=self._place)
        self._unused.add(number)
        facts = facts_of(os.stat(_out(number), dir_fd=self._place, follow_symlinks=False))
        if entry.kind is Kind.FILE and entry.nlink > 1:
            self._keep_for_links(number, entry, facts)
        return facts

    def _keep_for_links(self, number: int, entry: Entry, facts: Facts) -> None:
        """Give a new file another name in the place, which its further names are made from."""
        other = b"w-%d" % number
        try:
            with acting_as(self.user):
                os.link(_out(number), other, src_dir_fd=self._place, dst_dir_fd=self._place, follow_symlinks=False)
        except OSError as exc:
            if exc.errno not in _NO_SUCH_LINK:
                raise
        else:
            self._new[entry.inode] = other, facts

    def _give_to_owner(self, name: bytes, entry: Entry) -> None:
        """Give a new file in the place the owner and group that it had, as far as the user may."""
        uid = entry.uid if self.user.uid == 0 else -1
        with contextlib.suppress(OSError), acting_as(self.user):
            os.chown(name, uid, entry.gid, dir_fd=self._place, follow_symlinks=False)

    def _give(self, parent: int, name: bytes, number: int, kind: bytes = b"n") -> None:
        """Give a file in the place its name. FileExistsError: something is there."""
        here = kind + b"%d" % number
        with acting_as(self.user):
            try:
                files.rename_no_replace(self._place, here, parent, name)
            except OSError as exc:
                if exc.errno not in _NO_SUCH_RENAME:
                    raise
                os.link(here, name, src_dir_fd=self._place, dst_dir_fd=parent, follow_symlinks=False)
                os.unlink(here, dir_fd=self._place)

    def _try(self, path: bytes, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as exc:
            self.done.pop(path, None)
            self.left.setdefault(path, _why(exc))

    @contextlib.contextmanager
    def _parent(self, path: bytes) -> Iterator[tuple[int, bytes]]:
        above, _, name = path.rpartition(b"/")
        with acting_as(self.user):
            fd = files.open_deep(self.folder, above, one_device=True)
        try:
            yield fd, name
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _reading(self, name: bytes, directory: int) -> Iterator[int]:
        with acting_as(self.user):
            fd = open_file(directory, os.fsdecode(name))
        try:
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        """The place is open inside, and gone afterwards, unless something in it could not be brought back."""
        with acting_as(self.user):
            self._place = files.open_dir(self.folder, self.place)
        try:
            yield
        finally:
            with contextlib.suppress(OSError), acting_as(self.user):
                for number in self._unused:
                    os.unlink(_out(number), dir_fd=self._place)
                for name in os.listdir(self._place):
                    if name.startswith("w"):
                        os.unlink(name, dir_fd=self._place)
                os.rmdir(self.place, dir_fd=self.folder)
            os.close(self._place)


def _out(number: int) -> bytes:
    return b"n%d" % number


def _other_kind(change: Change) -> bool:
    kinds = {entry.kind is Kind.DIRECTORY for entry in (change.before, change.after) if entry is not None}
    return len(kinds) == 2


def _has(view: View, path: bytes) -> bool:
    try:
        view.lstat(TOP + b"/" + path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _is_written(fd: int) -> bool:
    """True if a process may write to the file. A file system that does not tell counts as one without writers."""
    try:
        return fanotify.has_writer(fd)
    except OSError:
        return False


def _why(exc: OSError) -> str:
    if exc.errno in (errno.ENOTEMPTY, errno.EEXIST):
        return "something else is there by now"
    if exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        return "it is gone, or its directory is"
    return str(exc.strerror)
