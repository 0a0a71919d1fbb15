"""Finding the files of a folder that changed, as git's index does: by what the kernel says of each file.

The folder belongs to a user and is as hostile as any tree: it is walked by descriptors, no link is followed, and no
other file system is entered. The caller acts as the user, so the kernel refuses what the user may not read.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from snapshotd.engine.folders import ignore
from snapshotd.engine.folders.ignore import RuleFile, Rules
from snapshotd.errors import LimitExceeded
from snapshotd.kernel import files
from snapshotd.kernel.mounts import born_at, mount_id

MOST_FILES = 200_000
LARGEST_FILE_BYTES = 256 << 20
"""A larger file is left out: it is data, and a copy of it would hold the agent up."""
DEEPEST = 100
LONGEST_S = 20.0
"""An agent waits for so long at its hook, and no longer."""
_RACY_NS = 20_000_000
"""A file that changed so lately may change again without another time: the kernel's clock for files is that coarse."""
_HASHED_BYTES = 1 << 20
_HELD = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

Mark = tuple[int, ...]
"""Facts of a file by which a change is seen; of a directory its mode alone."""


def mark_of(st: os.stat_result) -> Mark:
    """See `Mark`."""
    if stat.S_ISDIR(st.st_mode):
        return (st.st_mode,)
    return (st.st_mode, st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_ino)


def open_file(directory: int, name: str) -> int:
    """Open a regular file for reading. OSError, also for anything else (EINVAL), such as one that was mounted there: a
    file of /proc would tell the daemon of itself, whatever the user's rights."""
    fd = os.open(name, _READ, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(fd).st_mode) or mount_id(fd) != mount_id(directory):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", name)
    return fd


def digest_of(fd: int) -> bytes:
    """A hash of a small file's bytes."""
    return hashlib.blake2b(os.pread(fd, _HASHED_BYTES, 0)).digest()


def settled_mark(fd: int, before: os.stat_result) -> tuple[Mark, bytes | None]:
    """The mark of a file whose content was just read, and a hash of it, if it may change again without a new mark.

    A file that changed while it was read, and a large one that changed too lately, get a mark that no file has.
    """
    mark = mark_of(before)
    if mark_of(os.fstat(fd)) != mark:
        return (*mark[:3], 0, mark[4]), None
    if before.st_ctime_ns < time.time_ns() - _RACY_NS:
        return mark, None
    return ((*mark[:3], 0, mark[4]), None) if before.st_size > _HASHED_BYTES else (mark, digest_of(fd))


@dataclass(slots=True)
class FolderScan:
    """The difference between a folder and its index. Paths are relative, parents first."""

    changed: dict[str, Mark] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    revealed: set[str] = field(default_factory=set)
    """Changed paths without a known past: ignored, unreadable or elsewhere until now."""

    moved: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of the old and the new path of a file that was renamed."""

    began_ns: int = 0

    names: dict[str, list[str]] = field(default_factory=dict)
    """Changed path of a file with several names to all of them, also those that went: a change through one is a change
    of all."""

    elsewhere: set[str] = field(default_factory=set)
    """Changed paths of files with more names than these: what is done through them is not seen."""

    def part(self, paths: set[str]) -> FolderScan:
        """The difference at some paths."""
        changed = {path: mark for path, mark in self.changed.items() if path in paths}
        deleted = [path for path in self.deleted if path in paths]
        return FolderScan(changed, deleted, self.warnings, self.revealed, began_ns=self.began_ns)

    def __bool__(self) -> bool:
        return bool(self.changed or self.deleted)


class FolderIndex:
    """The marks of a folder's files as its last snapshot has them. Not thread-safe."""

    def __init__(self) -> None:
        self.known: dict[str, Mark] = {}
        self._fresh = True
        self._racy: dict[str, bytes] = {}
        """Files that were captured within `_RACY_NS` of their change, each with the hash of what was captured."""
        self._passed: set[str] = set()
        """Paths that the rules ignore: nothing is known of what is there."""
        self._blind: set[str] = set()
        """Paths that the last scan could not read, or left out for another reason."""
        self._revealed: set[str] = set()
        """Paths that the rules ignored, and do no longer, until a snapshot has them."""
        self._tracked: set[str] = set()
        """Paths that the last snapshot has, before they are known: the rules do not count for them."""
        self._rules: dict[str, tuple[Mark, RuleFile]] = {}
        """Path of a file with rules to its mark and its rules."""
        self._looked_ns = 0
        """When the last look at the folder began whose changes a snapshot has."""

    def knows_nothing(self) -> bool:
        """True until `compared`: a scan reports every file."""
        return self._fresh

    def expect(self, paths: set[str]) -> None:
        """Have the first scan look at these paths whatever the rules say: the last snapshot has them."""
        self._tracked = paths

    def reveal(self, paths: Iterable[str]) -> None:
        """Take note that the rules may have ignored these paths before."""
        self._revealed.update(paths)

    def note_look(self, began_ns: int) -> None:
        """Take note that a snapshot has what a look at the folder found that began then."""
        self._looked_ns = max(self._looked_ns, began_ns)

    def blind_paths(self) -> set[str]:
        """Paths with content in a snapshot that the last scan could not read, or left out."""
        return self._blind & self.known.keys()

    def note_compared(self) -> None:
        """Note that the index knows every file that is as the last snapshot has it."""
        self._fresh = False

    def ignored_paths(self) -> set[str]:
        """The paths that the last scan ignored. An ignored directory stands for everything in it."""
        return self._passed

    def is_ignored(self, path: str) -> bool:
        """True if the last scan passed over the path, or over a directory above it."""
        parts = path.split("/")
        above = ("/".join(parts[:count]) for count in range(1, len(parts) + 1))
        return any(path in self._passed or path in self._blind for path in above)

    def racy_paths(self) -> set[str]:
        """Paths of files that may have changed again right after they were captured. Only their content can show it."""
        return set(self._racy)

    def is_sure(self) -> bool:
        """False if the last scan could not tell of every path whether it has changed."""
        return not (self._fresh or self._racy or self._blind)

    def rule_files(self) -> dict[str, Mark]:
        """The files with rules that the last scan read, also those that no snapshot holds."""
        return {path: mark for path, (mark, _) in self._rules.items()}

    def scan(self, root: int) -> FolderScan:
        """Compare the folder of the descriptor with the index, which stays as it is until `note_captured`. LimitExceeded."""
        found = FolderScan(began_ns=time.time_ns())
        walk = _Walk(self, found, root)
        walk.top(root)
        self._blind = walk.blind
        missing = self.known.keys() - walk.seen
        gone = [path for path in missing if not self.is_ignored(path)]
        self._tracked -= walk.seen
        found.deleted = sorted(gone)
        found.changed = dict(sorted(found.changed.items()))
        older = self._find_older(root, found)
        if older:
            numbers = {mark[4] for mark in self.known.values() if len(mark) > 1}
            self._revealed.update(path for path in older if found.changed[path][4] not in numbers)
        found.revealed = self._revealed & found.changed.keys()
        self._find_names(found, walk.links)
        found.moved = self._find_moved(found, older)
        return found

    def _find_names(self, found: FolderScan, links: dict[int, int]) -> None:
        """Note the names of changed files that have several. `links`: inode number to the number of names, if there is
        more than one."""
        now: dict[int, list[str]] = {}
        for path, mark in found.changed.items():
            if len(mark) > 1:
                now.setdefault(mark[4], []).append(path)
        then: dict[int, list[str]] = {}
        for path in (*found.changed, *found.deleted):
            was = self.known.get(path, ())
            if len(was) > 1:
                then.setdefault(was[4], []).append(path)
        for number, paths in now.items():
            if links.get(number, 1) > len(paths):
                found.elsewhere.update(paths)
            before = then.get(number, [])
            both = paths
            if not set(before).isdisjoint(paths):  # another file may have the number of one that went
                both = list(dict.fromkeys((*paths, *before)))
            if len(both) > 1:
                for path in both:
                    found.names.setdefault(path, both)
                found.names.update(dict.fromkeys(paths, both))

    def _find_older(self, root: int, found: FolderScan) -> set[str]:
        """Find paths that lead to another file than before, which is older than the last look: it was renamed, or moved
        here from a place that is not looked at."""
        older = set()
        for path, mark in found.changed.items() if self._looked_ns else ():
            if len(mark) > 1 and self.known.get(path, mark[:1])[4:] != mark[4:]:
                born = _born(root, path)
                if born is not None and born < self._looked_ns - _RACY_NS:
                    older.add(path)
        return older

    def _find_moved(self, found: FolderScan, older: set[str]) -> list[tuple[str, str]]:
        """Find files under new names: the inode number is the same, and either size and time are or the file is older
        than the last look. A new file may have the number of a deleted one."""
        was = {}
        for path in (*found.deleted, *found.changed):
            mark = self.known.get(path, ())
            if len(mark) > 1:
                was[mark[4]] = (path, mark)
        pairs = []
        for path, mark in found.changed.items() if was else ():
            old, known = was.get(mark[4], (path, mark)) if len(mark) > 1 else (path, mark)
            if old != path and (path in older or known[1:3] == mark[1:3]):
                pairs.append((old, path))
        return pairs

    def note_captured(self, path: str, mark: Mark | None, digest: bytes | None = None) -> None:
        """Note that the last snapshot has the file as the mark says; None: it has no such file. `digest`: see
        `settled_mark`."""
        self._racy.pop(path, None)
        self._revealed.discard(path)
        if mark is None:
            self.known.pop(path, None)
            return
        self.known[path] = mark
        if digest is not None:
            self._racy[path] = digest

    def has_changed_again(self, path: str, mark: Mark, directory: int, name: str) -> bool:
        """True if a file without a new mark has changed since it was captured. It was captured right after its
        change."""
        try:
            fd = open_file(directory, name)
        except OSError:
            return True
        try:
            if digest_of(fd) != self._racy[path]:
                return True
        finally:
            os.close(fd)
        if mark[3] < time.time_ns() - _RACY_NS:
            del self._racy[path]
        return False


def _born(root: int, path: str) -> int | None:
    """The time at which the file at a path was made. None: it is not known."""
    parent, _, name = path.rpartition("/")
    try:
        directory = files.open_deep(root, os.fsencode(parent), one_device=True)
        try:
            fd = os.open(name, _HELD, dir_fd=directory)
        finally:
            os.close(directory)
    except OSError:
        return None
    try:
        return born_at(fd)
    except OSError:
        return None
    finally:
        os.close(fd)


class _Walk:
    """One walk over a folder."""

    def __init__(self, index: FolderIndex, found: FolderScan, root: int) -> None:
        self._index, self._found = index, found
        self._device, self._place = os.fstat(root).st_dev, os.readlink(files.fd_path(root))
        self._ends = time.monotonic() + LONGEST_S
        self.seen: set[str] = set()
        self.blind: set[str] = set()
        self.links: dict[int, int] = {}

    def top(self, root: int) -> None:
        fd = os.open(".", files.DIR_FLAGS, dir_fd=root)
        try:
            listed = self._list(fd, "")
            last, again = self._load(fd, "", ignore.RULES[1], listed)
            self._directory(fd, "", Rules.top(last or ignore.NONE), again, 0, listed, revealed=False)
        finally:
            os.close(fd)

    def _list(self, fd: int, prefix: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(fd) as entries:
                return list(entries)
        except OSError as exc:
            self._pass(prefix[:-1], f"{prefix} cannot be listed: {exc.strerror}")
            return []

    def _pass(self, path: str, warning: str) -> None:
        self.blind.add(path)
        if path not in self._index._blind:
            self._found.warnings.append(warning)

    def _load(self, fd: int, prefix: str, name: str, listed: list[os.DirEntry[str]]) -> tuple[RuleFile | None, bool]:
        """The rules of a file in this directory, and True if they are not the ones of the last scan."""
        path, rules = prefix + name, self._index._rules
        if name not in [entry.name for entry in listed]:
            return None, rules.pop(path, None) is not None
        try:
            file = open_file(fd, name)
        except OSError:
            return None, rules.pop(path, None) is not None
        try:
            mark = mark_of(os.fstat(file))
            if path in rules and rules[path][0] == mark and path not in self._index._racy:
                return rules[path][1], False
            data = os.pread(file, ignore.MOST_FILE_BYTES + 1, 0)
        finally:
            os.close(file)
        rules.pop(path, None)
        taken = sum(min(mark[1], ignore.MOST_FILE_BYTES) for mark, _ in rules.values())
        if len(rules) >= ignore.MOST_FILES or taken + len(data) > ignore.MOST_FOLDER_BYTES:
            over = (
                f"the folder has more than {ignore.MOST_FILES} such files, or {ignore.MOST_FOLDER_BYTES} bytes in them"
            )
            read = RuleFile((), f"{over}, and its rules do not count")
        else:
            read = ignore.read_rules(data)
        if read.over:
            self._found.warnings.append(f"{path} is not followed as a whole: {read.over}")
        rules[path] = (mark, read)
        return read, True

    def _directory(
        self,
        fd: int,
        prefix: str,
        rules: Rules,
        again: bool,
        depth: int,
        listed: list[os.DirEntry[str]],
        *,
        revealed: bool,
    ) -> None:
        """Walk one directory. `again`: the rules have changed, so every path that no snapshot has is looked at anew;
        recorded paths stay, as with git. `revealed`: the directory was ignored so far."""
        own, changed = self._load(fd, prefix, ignore.RULES[0], listed)
        if own is not None:
            rules = rules.below(prefix, own)
        again |= changed
        index, known, passed, seen = self._index, self._index.known, self._index._passed, self.seen
        racy, found, tracked = index._racy, self._found.changed, index._tracked
        for entry in listed:
            if time.monotonic() > self._ends:
                raise LimitExceeded(
                    f"{self._place} cannot be looked at within {LONGEST_S:g} s, up to {prefix or '.'}; name what needs no snapshot in a "
                    ".snapshotdignore at its top"
                )
            name = entry.name
            path = prefix + name
            is_dir = entry.is_dir(follow_symlinks=False)
            new = revealed
            if path not in known and path not in tracked:
                if not again and path in passed:
                    continue
                if name == ignore.NEVER or rules.ignores(path, is_dir):
                    passed.add(path)
                    continue
                new |= path in passed or path in index._blind
                passed.discard(path)
                if new:
                    index._revealed.add(path)
            if is_dir:
                self._enter(fd, name, path, rules, again, depth, revealed=new)
                continue
            try:
                st = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # it went meanwhile
            mark = (st.st_mode, st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_ino)
            if known.get(path) == mark:
                if path in racy and index.has_changed_again(path, mark, fd, name):
                    found[path] = mark
            elif not (stat.S_ISREG(st.st_mode) or stat.S_ISLNK(st.st_mode)):
                continue  # a socket or a fifo is no content
            elif st.st_size > LARGEST_FILE_BYTES:
                self._pass(
                    path, f"{path} was left out: it has {st.st_size} bytes, and the limit is {LARGEST_FILE_BYTES}"
                )
                continue
            else:
                found[path] = mark
            self._note_links(path, st)
            seen.add(path)
        if len(seen) > MOST_FILES:
            raise LimitExceeded(
                f"{self._place} has more than {MOST_FILES} files; name those that need no snapshot in a .snapshotdignore at its top"
            )

    def _note_links(self, path: str, st: os.stat_result) -> None:
        if st.st_nlink > 1 and path in self._found.changed:
            self.links[st.st_ino] = st.st_nlink

    def _enter(self, fd: int, name: str, path: str, rules: Rules, again: bool, depth: int, *, revealed: bool) -> None:
        try:
            deeper = files.open_dir(fd, os.fsencode(name))
        except OSError as exc:
            if exc.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                self._pass(path, f"{path} cannot be read: {exc.strerror}")
            return
        try:
            st = os.fstat(deeper)
            if st.st_dev != self._device or depth == DEEPEST:
                self._pass(path, f"{path} was left out: it is another file system, or lies too deep")
                return
            mark = mark_of(st)
            if self._index.known.get(path) != mark:
                self._found.changed[path] = mark
            self.seen.add(path)
            listed = self._list(deeper, path + "/")
            self._directory(deeper, path + "/", rules, again, depth + 1, listed, revealed=revealed)
        finally:
            os.close(deeper)
