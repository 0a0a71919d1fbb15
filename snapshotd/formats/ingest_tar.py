"""Bring a root file system tar, or one layer of an image, safely into a directory.

The archive is an attacker's. Every directory is reached from the target's own descriptor, one component at a time and
never through a link, every entry is made new under its parent's descriptor (an older one of that name is removed first,
never written through), and owner, mode, attributes and times go through the descriptor of the new entry.

Archives go by directory, so the directories on the way to the current member are held, and each gets its time back when
it is left: left directories take no memory, and paths of any length can be reached.
"""

from __future__ import annotations

import errno
import os
import stat
from array import array
from contextlib import closing
from dataclasses import dataclass

from snapshotd.errors import LimitExceeded, UsageError
from snapshotd.formats import ingest_nodes as nodes
from snapshotd.formats.ingest_nodes import IngestReport, printable
from snapshotd.formats.tar_reader import MAX_PATH_BYTES, ByteSource, Member, MemberKind, TarReader
from snapshotd.kernel import files, turns
from snapshotd.kernel.abilities import TRUSTED, Marks
from snapshotd.trees.lookup import Handles, Node, make_whiteout, public_xattrs
from snapshotd.trees.target import ACL_NAMES
from snapshotd.trees.view import count_common

PATH_MAX = 4095
"""The longest path of an image's layer, and of any link's target."""
MAX_NAME_BYTES = 255
_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_OTHER_MARKS = b".wh..wh."
_ZEROS = bytes(1 << 20)
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TarLimits:
    """Bounds of one archive: members (with directories that only their paths name), bytes of content (without holes of
    sparse files)."""

    members: int = 2_000_000
    bytes: int = 64 << 30


def ingest_tar(
    stream: ByteSource,
    target_fd: int,
    *,
    oci_whiteouts: bool,
    overlay_marks: bool = False,
    marks: Marks = TRUSTED,
    limits: TarLimits | None = None,
) -> IngestReport:
    """Apply a plain (not compressed) tar to the directory that `target_fd` (O_PATH is fine) holds.

    Later members replace earlier ones and existing files. With `oci_whiteouts`, `.wh.NAME` deletes NAME and
    `.wh..wh..opq` empties its directory of the entries of earlier archives (image layers are applied in order into one
    directory). With `overlay_marks`, the target is a layer of ours, with these `marks`, and a character device 0:0 is a
    deletion in it. Other device nodes are kept as nodes where this process may make some; overlay's attributes are left out with a warning.

    Raises UsageError (naming the member: a path that leaves the tree, is absolute or passes through a link; a hard link
    to nowhere; a character device 0:0 without `overlay_marks`; a damaged archive), LimitExceeded, OutOfSpace,
    NotPermitted. The target then holds part of the archive. Memory: some MiB, and with `oci_whiteouts` the paths of the
    archive.
    """
    with closing(_TarIngest(target_fd, oci_whiteouts, overlay_marks, limits or TarLimits(), marks)) as ingest:
        reader = TarReader(stream)
        for member in reader:
            turns.give_way()
            ingest.apply(member, reader)
        if not reader.ended_by_marker:
            ingest.tally.warn("the archive has no end marker: it may have been cut off")
        ingest.finish()
    return ingest.tally.report()


def clean_path(raw: bytes, what: str, limit: int = PATH_MAX) -> bytes:
    """A member's path as `a/b/c`, or b"" for the root. UsageError/LimitExceeded for one that could lead out of the
    tree."""
    if raw.startswith(b"/"):
        raise UsageError(
            f"{what} is absolute, so it would leave the target directory; make the archive with relative paths"
        )
    parts = [part for part in raw.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise UsageError(
            f"{what} contains `..`, so it could leave the target directory; the archive is hostile or damaged"
        )
    if b"\0" in raw:
        raise UsageError(f"{what} contains a zero byte; the archive is hostile or damaged")
    path = b"/".join(parts)
    if len(path) > limit or any(len(part) > MAX_NAME_BYTES for part in parts):
        raise LimitExceeded(f"{what} is longer than a path may be ({limit} bytes, {MAX_NAME_BYTES} per name)")
    return path


class _Held:
    """A directory on the way to the current member. `mtime_ns`: the time that it gets when it is left; `inherits`: new
    entries in it get an access list from it (and must not keep that)."""

    __slots__ = ("inherits", "mtime_ns", "node")

    def __init__(self, node: Node, fd: int, mtime_ns: int) -> None:
        self.node = node
        self.mtime_ns = mtime_ns
        self.inherits = ACL_NAMES[1].decode() in os.listxattr(fd)


class _Own:
    """The paths that one archive of an image has made or passed through below `root`. A deletion of entries of earlier
    archives spares them."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._paths: set[bytes] = set()

    def add(self, path: bytes) -> None:
        """Take in a path, and those above it."""
        while path and path not in self._paths:
            self._paths.add(path)
            path = path.rpartition(b"/")[0]

    def delete_others(self, parent_fd: int, path: bytes, name: bytes) -> None:
        """Remove an entry, as far as it is of earlier archives."""
        if path not in self._paths:
            files.remove_tree(parent_fd, name)
        elif _is_dir(parent_fd, name):
            self.empty(path)

    def empty(self, path: bytes) -> None:
        """Remove everything below a directory but the entries of this archive and the directories on the way to
        them."""
        pending = [path]
        while pending:
            path = pending.pop()
            with files.closing_fd(files.open_beneath(self._root, path, files.DIR_FLAGS)) as fd:
                before = os.fstat(fd).st_mtime_ns
                for entry in os.listdir(fd):
                    name = os.fsencode(entry)
                    child = path + b"/" + name if path else name
                    if child not in self._paths:
                        files.remove_tree(fd, name)
                    elif _is_dir(fd, name):
                        pending.append(child)
                os.utime(fd, ns=(before, before))


class _TarIngest:
    def __init__(
        self, target_fd: int, oci_whiteouts: bool, overlay_marks: bool, limits: TarLimits, marks: Marks
    ) -> None:
        self._marks = marks
        self.tally = nodes.Tally()
        self._whiteouts, self._overlay_marks = oci_whiteouts, overlay_marks
        self._limits = limits
        self._path_limit = PATH_MAX if oci_whiteouts else MAX_PATH_BYTES
        self._members = 0
        self._root = nodes.writable_root(target_fd)
        self._own = _Own(self._root)
        """Filled only when whiteouts count."""
        self._handles = Handles()
        self._held = [_Held(self._handles.add_root(self._root), self._root, os.fstat(self._root).st_mtime_ns)]
        self._at = b""
        """Path of the last held directory."""

    def close(self) -> None:
        self._handles.close()
        os.close(self._root)

    def apply(self, member: Member, reader: TarReader) -> None:
        self._count(member)
        shown = printable(member.path)
        if self.tally.bytes + member.stored > self._limits.bytes:
            raise LimitExceeded(f"the archive holds more than {self._limits.bytes} bytes; it stopped at {shown}")
        path = clean_path(member.path, f"the path {shown} in the archive", self._path_limit)
        parent, _, name = path.rpartition(b"/")
        if self._whiteouts and name.startswith(_WHITEOUT):
            self._whiteout(parent, name, member)
            return
        if self._whiteouts and any(part.startswith(_WHITEOUT) for part in parent.split(b"/")):
            raise UsageError(f"{shown} in the archive lies below a deletion mark; the layer is damaged or hostile")
        with nodes.writing(path):
            if not path:
                self._root_directory(member)
            else:
                self._go(parent, member)
                self._make(member, path, self._handles.fd(self._held[-1].node), name, reader)
        if self._whiteouts:
            self._own.add(path)

    def _count(self, member: Member) -> None:
        self._members += 1
        if self._members > self._limits.members:
            shown = printable(member.path)
            raise LimitExceeded(
                f"the archive has more than {self._limits.members} members or directories; it stopped at {shown}"
            )

    # -- reaching a directory ------------------------------------------------------------------------------------------

    def _go(self, path: bytes, member: Member, *, make: bool = True) -> None:
        """Open the directory `path` and those above it, as the present place. Missing directories are made (0755, root's, as
        old as the member); without `make` they are a FileNotFoundError."""
        if path == self._at:
            return
        wanted, have = path.split(b"/") if path else [], self._at.split(b"/") if self._at else []
        common = count_common(wanted, have)
        self._leave(common)
        self._at = b"/".join(wanted[:common])
        for number in range(common, len(wanted)):
            name = wanted[number]
            fd = self._handles.fd(self._held[-1].node)
            try:
                deeper, mtime_ns = self._step(fd, name, member, make)
            except OSError as exc:
                raise _path_error(b"/".join(wanted[: number + 1]), member, exc) from exc
            self._held.append(_Held(self._handles.adopt(self._held[-1].node, name, deeper), deeper, mtime_ns))
            self._at = self._at + b"/" + name if number else name

    def _step(self, fd: int, name: bytes, member: Member, make: bool) -> tuple[int, int]:
        """A descriptor of the directory `name`, and the time it is to have."""
        try:
            found = files.open_dir(fd, name)
            return found, os.fstat(found).st_mtime_ns
        except FileNotFoundError:
            if not make:
                raise
            self._count(member)  # one path of some MiB could make a million
            os.mkdir(name, 0o700, dir_fd=fd)
        made = files.open_dir(fd, name)
        files.drop_xattrs(made, ACL_NAMES)
        files.give(made, 0, 0)  # an ordinary user's daemon is another user in its namespace
        os.fchmod(made, 0o755)
        self.tally.directories += 1
        return made, member.mtime_ns

    def _leave(self, keep: int) -> None:
        """Let go of the held directories but the root and the next `keep`; each gets its time."""
        while len(self._held) > keep + 1:
            held = self._held.pop()
            fd = self._handles.fd(held.node)
            os.utime(fd, ns=(held.mtime_ns, held.mtime_ns))
            # While there is a way up from below: the one from the root may be very long.
            self._handles.fd(self._held[-1].node)
            self._handles.drop(held.node)

    def finish(self) -> None:
        """Give the directories that are still held their times."""
        with nodes.writing(self._at):
            self._leave(0)
            os.utime(self._root, ns=(self._held[0].mtime_ns, self._held[0].mtime_ns))

    # -- making an entry -----------------------------------------------------------------------------------------------

    def _root_directory(self, member: Member) -> None:
        if member.kind is not MemberKind.DIRECTORY:
            raise UsageError(f"the archive's root is a {member.kind}, not a directory")
        self._dress(self._root, b"", member)
        self._held[0] = _Held(self._held[0].node, self._root, member.mtime_ns)

    def _make(self, member: Member, path: bytes, parent: int, name: bytes, reader: TarReader) -> None:
        if member.kind is MemberKind.DIRECTORY:
            self._directory(member, path, parent, name)
            return
        if member.kind is MemberKind.HARD_LINK:
            self._hard_link(member, path, parent, name)
        else:
            files.remove_tree(parent, name)
            self._node(member, path, parent, name, reader)
        self.tally.files += 1

    def _directory(self, member: Member, path: bytes, parent: int, name: bytes) -> None:
        try:
            fd = files.open_dir(parent, name)
        except FileNotFoundError:
            fd = -1
        except OSError as exc:
            if exc.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            files.remove_tree(parent, name)
            fd = -1
        if fd < 0:
            os.mkdir(name, 0o700, dir_fd=parent)
            fd = files.open_dir(parent, name)
            self.tally.directories += 1
        with files.closing_fd(fd):
            # An older directory's, or inherited from a default access list.
            files.drop_xattrs(fd, public_xattrs(os.listxattr(fd), self._marks))
            self._dress(fd, path, member)

    def _node(self, member: Member, path: bytes, parent: int, name: bytes, reader: TarReader) -> None:
        if member.kind is MemberKind.SYMLINK:
            self._symlink(member, parent, name)
            return
        if member.kind is MemberKind.FILE:
            fd = os.open(
                name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent
            )
        else:
            if not self._special(member, parent, name):
                return
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        with files.closing_fd(fd):
            if member.kind is MemberKind.FILE:
                _write(fd, member, reader)
                self.tally.bytes += member.stored
            if self._held[-1].inherits:
                files.drop_xattrs(fd, ACL_NAMES)
            self._dress(fd, path, member)

    def _special(self, member: Member, parent: int, name: bytes) -> bool:
        """Make a fifo, a device or a whiteout. False: nothing was made that has attributes."""
        if member.kind is MemberKind.FIFO:
            os.mkfifo(name, 0o600, dir_fd=parent)
            return True
        major, minor = member.device
        if member.kind is MemberKind.CHAR_DEVICE and member.device == (0, 0):
            if self._overlay_marks:
                make_whiteout(parent, name, self._marks)
                return False
            raise UsageError(
                f"{printable(member.path)} in the archive is a character device 0:0, which overlayfs takes for a deletion; leave it out"
            )
        if not (0 <= major < 1 << 12 and 0 <= minor < 1 << 20):
            raise UsageError(
                f"{printable(member.path)} in the archive has the device number {major}:{minor}, which Linux does not have"
            )
        kind = stat.S_IFCHR if member.kind is MemberKind.CHAR_DEVICE else stat.S_IFBLK
        try:
            os.mknod(name, kind | 0o600, os.makedev(major, minor), dir_fd=parent)
        except PermissionError:
            self.tally.count("a device node was left out, which a daemon without root cannot make")
            return False
        return True

    def _symlink(self, member: Member, parent: int, name: bytes) -> None:
        if not member.link or b"\0" in member.link or len(member.link) > PATH_MAX:
            raise UsageError(
                f"{printable(member.path)} in the archive is a symbolic link without a usable target; the archive is damaged"
            )
        os.symlink(member.link, name, dir_fd=parent)
        nodes.set_link_metadata(parent, name, nodes.allowed_ids(member.uid, member.gid, self.tally), member.mtime_ns)

    def _hard_link(self, member: Member, path: bytes, parent: int, name: bytes) -> None:
        """Another name for an entry that lies in the target already; linkat never follows, so a link to a symbolic link
        is just that."""
        shown = printable(member.path)
        source = clean_path(
            member.link, f"the hard link target {printable(member.link)} of {shown} in the archive", self._path_limit
        )
        if source == path:
            raise UsageError(f"{shown} in the archive is a hard link to itself; the archive is damaged or hostile")
        source_parent, _, source_name = source.rpartition(b"/")
        try:
            source_fd = self._open(source_parent)
        except OSError as exc:
            raise _no_target(shown, member.link, exc) from exc
        with files.closing_fd(source_fd):
            try:
                found = (
                    os.stat(source_name, dir_fd=source_fd, follow_symlinks=False)
                    if source_name
                    else os.fstat(source_fd)
                )
            except OSError as exc:
                raise _no_target(shown, member.link, exc) from exc
            if stat.S_ISDIR(found.st_mode):
                raise UsageError(
                    f"{shown} in the archive is a hard link to the directory {printable(member.link)}, which cannot be"
                )
            files.remove_tree(parent, name)
            try:
                os.link(source_name, name, src_dir_fd=source_fd, dst_dir_fd=parent, follow_symlinks=False)
            except FileNotFoundError as exc:  # it lay below a path that this member replaces
                raise _no_target(shown, member.link, exc) from exc

    def _dress(self, fd: int, path: bytes, member: Member) -> None:
        nodes.set_metadata(
            fd,
            path,
            owner=nodes.allowed_ids(member.uid, member.gid, self.tally),
            mode=member.mode,
            mtime_ns=member.mtime_ns,
            xattrs=member.xattrs,
            tally=self.tally,
        )

    def _open(self, path: bytes) -> int:
        """A descriptor of a directory below the target, which nothing is made in."""
        if len(path) > PATH_MAX:
            return files.open_deep(self._root, path)
        return files.open_beneath(self._root, path, files.DIR_FLAGS)

    # -- deletions of earlier layers -----------------------------------------------------------------------------------

    def _whiteout(self, parent: bytes, name: bytes, member: Member) -> None:
        """Delete entries of earlier archives, never entries of this one (OCI image specification, "Whiteouts")."""
        victim = name[len(_WHITEOUT) :]
        if name != _OPAQUE and (name.startswith(_OTHER_MARKS) or victim in (b"", b".", b"..")):
            self.tally.count("a mark of the aufs file system was left out")
            return
        try:
            self._go(parent, member, make=False)
        except FileNotFoundError:
            return  # nothing there to delete
        with nodes.writing(parent):
            if name == _OPAQUE:
                self._own.empty(parent)
            else:
                self._own.delete_others(
                    self._handles.fd(self._held[-1].node), parent + b"/" + victim if parent else victim, victim
                )


def _is_dir(fd: int, name: bytes) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)


def _write(fd: int, member: Member, reader: TarReader) -> None:
    """A file's content; pieces of zeros become holes, so that a bomb of zeros takes no space; but not in a file that
    lists its holes."""
    keep = member.extents is not None
    extents = iter(member.extents if member.extents is not None else array("q", [0, member.size]))
    offset = left = 0
    for piece in reader.pieces():
        rest = memoryview(piece)
        while rest:
            while not left:
                offset, left = next(extents), next(extents)
            part = rest[:left]
            if keep or len(part) < _PAGE_BYTES or part != _ZEROS[: len(part)]:
                files.write_all(fd, part, offset)
            offset, left, rest = offset + len(part), left - len(part), rest[len(part) :]
    os.ftruncate(fd, member.size)


def _path_error(path: bytes, member: Member, exc: OSError) -> Exception:
    if exc.errno in (errno.ELOOP, errno.ENOTDIR, errno.EXDEV):
        return UsageError(
            f"{printable(member.path)} in the archive passes through {printable(path)}, which is not a real directory but a link or file"
        )
    return exc


def _no_target(shown: str, link: bytes, exc: OSError) -> UsageError:
    where = f"{printable(link)}, which is not in it ({exc.strerror})"
    return UsageError(f"{shown} in the archive is a hard link to {where}; the archive is damaged or hostile")
