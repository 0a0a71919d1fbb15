"""A tree with one nasty entry for everything a snapshot claims to keep, and an oracle that says what a tree holds.

`make` writes the tree, `manifest` reads any tree by ordinary system calls. Both are on their own: nothing here uses the
product, so that a mistake in it cannot hide itself.

What is left out because no snapshot claims it: ctime and birth time, attributes of chattr, project ids, character
device 0:0 (in an overlay that is a deletion), ids over 65,535 (containers have that many), and access times.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import stat
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

DEPTH = 1200
"""Levels of the deep part: more than recursion allows, and its path is longer than PATH_MAX."""
_DEEP_NAME = b"deeper and deeper"
_NOT_OURS = ("trusted.overlay.", "trusted.SGI_ACL_")
"""The second: XFS lists access lists once more in its own form, for root."""
_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_S = 10**9
TIMES_NS = {
    "epoch": 0,
    "a nanosecond before": -1,
    "1901": -2_147_483_648 * _S,
    "1969": -123_456_789 * _S + 987_654_321,
    "2038": 2_147_483_648 * _S + 1,
    "2106": 4_294_967_296 * _S + 999_999_999,
    "2400": 13_569_465_600 * _S + 7,
}
NAMES = (
    b"\xff\xfe not UTF-8",
    b"new\nline",
    b"-rf",
    b"--",
    b" leading",
    b"trailing ",
    b"trailing.",
    b"n" * 255,
    b"\xc3\xa9 NFC",
    b"e\xcc\x81 NFD",
    b"case",
    b"CASE",
    b"...",
    b".. ",
    b"\x1b[31mred\x07",
    b"\xe2\x80\xaegnp.exe",
    b"quote'\"`$(x)\\",
    b"*?[a]",
    b"tab\t",
    b"\x7f",
    b"#x",
    b"a:b",
)


@dataclass(frozen=True, slots=True)
class Fact:
    """What one path is. `kind` is S_IFMT; `digest` of a regular file's logical content (holes are zeros); `links`: all
    paths of its inode inside the tree if there are several. Fields that make no sense for a kind are zero or empty; the
    size of directories does not count."""

    kind: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int
    rdev: int
    target: bytes
    digest: str
    xattrs: tuple[tuple[bytes, bytes], ...]
    links: tuple[bytes, ...]


# -- the oracle --------------------------------------------------------------------------------------------------------


def manifest(root: Path) -> dict[bytes, Fact]:
    """Every path below `root` (b"" is the root itself, no leading slash). Any depth. Attributes of overlayfs itself do
    not count, nor what XFS shows a second time."""
    facts: dict[bytes, Fact] = {}
    inodes: dict[tuple[int, int], list[bytes]] = defaultdict(list)
    for path, st, dir_fd, name in _walk(root):
        place = b"/proc/self/fd/%d/%b" % (dir_fd, name) if name else b"/proc/self/fd/%d/." % dir_fd
        kind = stat.S_IFMT(st.st_mode)
        target = os.readlink(name, dir_fd=dir_fd) if kind == stat.S_IFLNK else b""
        facts[path] = Fact(
            kind,
            stat.S_IMODE(st.st_mode),
            st.st_uid,
            st.st_gid,
            st.st_mtime_ns,
            st.st_size if kind == stat.S_IFREG else 0,
            st.st_rdev if kind in (stat.S_IFCHR, stat.S_IFBLK) else 0,
            target,
            _digest(dir_fd, name, st) if kind == stat.S_IFREG else "",
            _xattrs(place),
            (),
        )
        if kind != stat.S_IFDIR:
            inodes[st.st_dev, st.st_ino].append(path)
    for paths in inodes.values():
        if len(paths) > 1:
            for path in paths:
                facts[path] = replace(facts[path], links=tuple(sorted(paths)))
    return facts


def _walk(root: Path) -> Iterator[tuple[bytes, os.stat_result, int, bytes]]:
    """(path, status, descriptor of its directory, name) of everything. One descriptor: up again goes by `..`."""
    fd = os.open(root, _DIR)
    try:
        yield b"", os.fstat(fd), fd, b""
        stack = [_names(fd)]
        path: list[bytes] = []
        while stack:
            if not stack[-1]:
                stack.pop()
                if path:
                    path.pop()
                    fd = _replace(fd, b"..")
                continue
            name = stack[-1].pop()
            st = os.stat(name, dir_fd=fd, follow_symlinks=False)
            yield b"/".join([*path, name]), st, fd, name
            if stat.S_ISDIR(st.st_mode):
                fd = _replace(fd, name)
                path.append(name)
                stack.append(_names(fd))
    finally:
        os.close(fd)


def _names(fd: int) -> list[bytes]:
    return sorted(map(os.fsencode, os.listdir(fd)), reverse=True)


def _replace(fd: int, name: bytes) -> int:
    other = os.open(name, _DIR, dir_fd=fd)
    os.close(fd)
    return other


def _digest(dir_fd: int, name: bytes, st: os.stat_result) -> str:
    fd, digest, size = os.open(name, _FILE, dir_fd=dir_fd), hashlib.sha256(), 0
    with open(fd, "rb", buffering=0) as f:
        while piece := f.read(1 << 20):
            digest.update(piece)
            size += len(piece)
    assert size == st.st_size, f"{name!r} has {size} bytes, its size is {st.st_size}"
    return digest.hexdigest()


def _xattrs(place: bytes) -> tuple[tuple[bytes, bytes], ...]:
    names = [name for name in os.listxattr(place, follow_symlinks=False) if not name.startswith(_NOT_OURS)]
    return tuple(sorted((os.fsencode(name), os.getxattr(place, name, follow_symlinks=False)) for name in names))


def difference(expected: dict[bytes, Fact], got: dict[bytes, Fact]) -> str:
    """For a failure message: the first ten paths that differ, and in what. Empty if nothing does."""
    lines = []
    for path in sorted(expected.keys() | got.keys()):
        a, b = expected.get(path), got.get(path)
        if a is None or b is None:
            lines.append(f"{path[:300]!r}: {'is too much' if a is None else 'is missing'}")
        elif a != b:
            pairs = [(name, getattr(a, name), getattr(b, name)) for name in Fact.__slots__]
            parts = [f"{name} {one!r:.200} != {other!r:.200}" for name, one, other in pairs if one != other]
            lines.append(f"{path[:300]!r}: {'; '.join(parts)}")
    return "\n".join(lines[:10])


# -- the tree ----------------------------------------------------------------------------------------------------------


def make(root: Path, *, deep: bool = True) -> None:
    """Fill the directory `root` (it is created if need be). Needs root. `deep=False` leaves out the part deeper than
    PATH_MAX, which common tools cannot read (and `shutil.rmtree` cannot delete; `rm -r` can).

    Where the file system cannot hold something in full (a value of 64 KiB, a target of 4,095 bytes), as much as it can
    is written.
    """
    root.mkdir(exist_ok=True)
    top = os.fsencode(root)
    for part in (
        _modes,
        _owners,
        _names_of_all_kinds,
        _attributes,
        _capabilities_and_acls,
        _links,
        _symlinks,
        _holes,
        _nodes,
        _shapes,
    ):
        place = os.path.join(top, part.__name__.strip("_").encode())
        os.mkdir(place)
        part(place)
    if deep:
        _deep(os.path.join(top, b"deep"))
    _times(os.path.join(top, b"times"))
    os.chmod(top, 0o751)
    os.utime(top, ns=(0, 1_111_111_111_111_111_111))


def make_deep(root: Path) -> None:
    """Only the part that is deeper than PATH_MAX, in the new directory `root`."""
    _deep(os.fsencode(root))


def _write(path: bytes, data: bytes = b"") -> bytes:
    with open(path, "xb") as f:
        f.write(data)
    return path


def _modes(at: bytes) -> None:
    for mode in (0o000, 0o111, 0o444, 0o644, 0o777, 0o1777, 0o2755, 0o4755, 0o6711, 0o7777):
        os.chmod(_write(at + b"/file %04o" % mode, b"%o" % mode), mode)
        os.mkdir(at + b"/dir %04o" % mode)
        _write(at + b"/dir %04o/inside" % mode, b"x")
        os.chmod(at + b"/dir %04o" % mode, mode)


def _owners(at: bytes) -> None:
    for uid, gid in ((0, 0), (1, 2), (1000, 0), (65534, 65535)):
        name = b"/%d %d" % (uid, gid)
        os.chown(_write(at + name), uid, gid)
        os.chmod(at + name, 0o6755)  # chown clears these
        os.mkdir(at + name + b" dir")
        os.chown(at + name + b" dir", uid, gid)
        os.symlink(b"nowhere", at + name + b" link")
        os.chown(at + name + b" link", uid, gid, follow_symlinks=False)


def _names_of_all_kinds(at: bytes) -> None:
    for name in NAMES:
        _write(os.path.join(at, name), name)
    os.mkdir(at + b"/dirs")
    for name in NAMES:
        os.mkdir(os.path.join(at, b"dirs", name))
        _write(os.path.join(at, b"dirs", name, name), name)


def _attributes(at: bytes) -> None:
    given = {
        "user.plain": b"value",
        "user.empty": b"",
        "user.100%d %s": b"percent",
        "user.a=b": b"=",
        "user.new\nline": b"\n",
        "user.\udcff": b"\xff",
        "user." + "n" * 250: b"longest name",
        "user.zeros": bytes(100),
        "user.overlay.opaque": b"y",
        "user.overlay.redirect": b"/etc",
        "user.overlay.whiteout": b"",
        "trusted.own": b"t",
        "security.own": b"s",
        "security.selinux": b"system_u:object_r:tmp_t:s0\0",
    }
    _write(at + b"/file", b"content")
    os.mkdir(at + b"/dir")
    _write(at + b"/empty file")
    os.symlink(b"file", at + b"/link")
    os.mkfifo(at + b"/fifo")
    for path in (b"/file", b"/dir", b"/empty file"):
        for name, value in given.items():
            os.setxattr(at + path, name, value)
    for path in (b"/link", b"/fifo"):
        for name in ("trusted.own", "security.own"):
            os.setxattr(at + path, name, given[name], follow_symlinks=False)
    big = _write(at + b"/big value")
    for size in (65536, 16384, 3000):
        try:
            os.setxattr(big, "user.big", b"\xa5" * size)
            break
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.E2BIG, errno.ERANGE):
                raise


def _capabilities_and_acls(at: bytes) -> None:
    os.setxattr(_write(at + b"/capability"), "security.capability", struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0))
    os.setxattr(
        _write(at + b"/capability of a namespace"),
        "security.capability",
        struct.pack("<6I", 0x03000000, 1 << 10, 0, 0, 0, 1000),
    )
    acl = _acl((0x01, 7, -1), (0x02, 6, 1000), (0x04, 5, -1), (0x08, 4, 2000), (0x10, 7, -1), (0x20, 0, -1))
    os.mkdir(at + b"/dir")
    for path in (_write(at + b"/acl"), at + b"/dir"):
        os.setxattr(path, "system.posix_acl_access", acl)
    os.setxattr(at + b"/dir", "system.posix_acl_default", acl)
    _write(at + b"/dir/inherits")


def _acl(*entries: tuple[int, int, int]) -> bytes:
    """POSIX ACL as an attribute: version 2, then (tag, permissions, id) each (linux/posix_acl_xattr.h)."""
    return struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", tag, permissions, who & 0xFFFFFFFF) for tag, permissions, who in entries
    )


def _links(at: bytes) -> None:
    os.mkdir(at + b"/z")
    os.mkdir(at + b"/a")
    _write(at + b"/z/file", b"one inode, three names")
    os.link(at + b"/z/file", at + b"/a/file")
    os.link(at + b"/z/file", at + b"/a.file")
    os.symlink(b"target", at + b"/z/symlink")
    os.link(at + b"/z/symlink", at + b"/a/symlink", follow_symlinks=False)
    os.mknod(at + b"/z/device", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    os.link(at + b"/z/device", at + b"/a/device")
    os.mkfifo(at + b"/z/fifo")
    os.link(at + b"/z/fifo", at + b"/a/fifo")
    _write(at + b"/same content", b"one inode, three names")


def _symlinks(at: bytes) -> None:
    targets = (
        b"/",
        b"..",
        b"\xff\xfe\n",
        b"/proc/self/root/etc/passwd",
        b"../" * 60 + b"etc/passwd",
        b" ",
        b"none",
        b"loop",
        b"a//./b",
    )
    for number, target in enumerate(targets):
        os.symlink(target, at + b"/%d" % number)
    os.symlink(b"loop", at + b"/loop")
    for length in (4095, 1023):  # PATH_MAX less the NUL; what XFS allows
        try:
            os.symlink((b"long/" * 1000)[:length], at + b"/long")
            break
        except OSError as exc:
            if exc.errno != errno.ENAMETOOLONG:
                raise
    os.utime(at + b"/long", ns=(0, -5), follow_symlinks=False)
    os.lchown(at + b"/long", 12, 34)


def _holes(at: bytes) -> None:
    layouts: dict[bytes, tuple[int, list[tuple[int, int]]]] = {
        b"all hole": (3 << 20, []),
        b"hole first": (1 << 20, [((1 << 20) - 10, 10)]),
        b"hole last": (5_000_001, [(0, 10_000)]),
        b"islands": (16 << 20, [(i * (3 << 19) + 4097, 70_000) for i in range(10)]),
        b"one byte at the end": (8 << 20, [((8 << 20) - 1, 1)]),
        b"written zeros": (300_000, [(0, 100_000)]),
        b"large without holes": (3_000_000, [(0, 3_000_000)]),
    }
    for number, (name, (size, data)) in enumerate(layouts.items()):
        with open(at + b"/" + name, "xb") as f:
            f.truncate(size)
            for offset, length in data:
                f.seek(offset)
                f.write(
                    bytes(length)
                    if b"zeros" in name
                    else bytes((number * 31 + i * 7 + i // 251) & 255 for i in range(length))
                )
    with open(at + b"/many pieces", "xb") as f:
        for i in range(6000):
            f.seek(i * 8192 + 11)
            f.write(b"%d" % i)
    with open(at + b"/reserved", "xb") as f:
        f.write(b"data")
        f.flush()
        os.posix_fallocate(f.fileno(), 0, 1 << 20)  # not written: reads as zeros, and is neither a hole nor data
        f.seek(500_000)
        f.write(b"in the middle")
    with open(at + b"/reserved beyond the end", "xb") as f:
        f.write(b"short")
        f.flush()
        os.posix_fallocate(f.fileno(), 0, 1 << 20)
        f.truncate(5)


def _nodes(at: bytes) -> None:
    os.mkfifo(at + b"/fifo", 0o640)
    os.mknod(at + b"/char", stat.S_IFCHR | 0o666, os.makedev(5, 2))
    os.mknod(at + b"/block", stat.S_IFBLK | 0o660, os.makedev(254, 0))
    os.mknod(at + b"/block 0 0", stat.S_IFBLK | 0o600, 0)
    os.mknod(at + b"/far device", stat.S_IFCHR | 0o600, os.makedev(511, 262143))  # the most that XFS holds
    os.mknod(at + b"/socket made", stat.S_IFSOCK | 0o755)
    fd = os.open(at, _DIR)
    try:
        with socket.socket(socket.AF_UNIX) as listener:  # by descriptor: the address has room for 107 bytes
            listener.bind(f"/proc/self/fd/{fd}/socket bound")
    finally:
        os.close(fd)


def _shapes(at: bytes) -> None:
    os.mkdir(at + b"/empty")
    os.mkdir(at + b"/wide")
    for number in range(1000):
        _write(at + b"/wide/%d" % number, b"%d" % (number % 10))
    path = at
    for _ in range(60):
        path += b"/nested"
        os.mkdir(path)
    _write(path + b"/bottom", b"x")


def _deep(at: bytes) -> None:
    os.mkdir(at)
    fd = os.open(at, _DIR)
    for level in range(DEPTH):
        os.mkdir(_DEEP_NAME, 0o700 + level % 8, dir_fd=fd)
        if level % 100 == 0:
            os.close(os.open(b"file", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600, dir_fd=fd))
        fd = _replace(fd, _DEEP_NAME)
    with open(os.open(b"end", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600, dir_fd=fd), "wb") as f:
        f.write(b"you have arrived")
    os.close(fd)


def _times(at: bytes) -> None:
    """Last, and directories after what is in them: writing into a directory changes its time."""
    os.mkdir(at)
    for name, mtime_ns in TIMES_NS.items():
        place = os.path.join(at, name.encode())
        os.mkdir(place)
        _write(place + b"/file")
        os.symlink(b"x", place + b"/link")
        os.mkfifo(place + b"/fifo")
        for path in (place + b"/file", place + b"/link", place + b"/fifo", place):
            os.utime(path, ns=(0, mtime_ns), follow_symlinks=False)
    os.utime(at, ns=(0, 1))
