"""What the tests of mounts need: a tree with one of everything, a manifest of a directory, and commands in a user
namespace."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import struct
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests import forked, long

CHILD = [sys.executable, "-m", forked.FUSE_CHILD]
MANY = long.size(800, 3000)
"""Files of one directory: more than one answer to the kernel has room for."""
READ_ANY = struct.pack("<IIIII", 0x02000001, 1 << 2, 0, 0, 0)
"""security.capability of revision 2: cap_dac_read_search, effective and permitted."""


def acl(user: int, permissions: int) -> bytes:
    """system.posix_acl_access: rw for the owner, `permissions` for `user`, nothing for anybody else."""
    entries = (
        (0x01, 6, 0xFFFFFFFF),
        (0x02, permissions, user),
        (0x04, 0, 0xFFFFFFFF),
        (0x10, 7, 0xFFFFFFFF),
        (0x20, 0, 0xFFFFFFFF),
    )
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def make_variety(root: Path) -> None:
    """One of everything that a tree can hold, with nasty names. Needs root."""
    root.mkdir()
    top = os.fsencode(root)
    accents = (name.encode() for name in ("\u00e4", "a\u0308"))
    for name in (b"plain", b"-rf", b"new\nline", b"not utf-8 \xff\xfe", b" blanks ", b"n" * 255, b"\\x41", *accents):
        Path(os.fsdecode(top + b"/" + name)).write_bytes(name * 3)
    (root / "empty").touch()
    (root / "large").write_bytes(hashlib.shake_128(b"large").digest(3_000_001))
    with (root / "sparse").open("wb") as f:
        f.seek(1 << 20)
        f.write(b"island")
        f.truncate(5 << 20)
    (root / "a/b/c").mkdir(parents=True)
    (root / "empty directory").mkdir()
    os.link(root / "plain", root / "a/other name")
    os.link(root / "plain", root / "a/b/third")
    os.symlink(b"dangling \xff target", top + b"/link")
    os.symlink("t" * 4000, root / "long link")
    os.link(root / "link", root / "a/hard link of a link", follow_symlinks=False)
    os.mkfifo(root / "fifo", 0o640)
    os.mknod(root / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    os.mknod(root / "disk", 0o600 | stat.S_IFBLK, os.makedev(259, 70_000))
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(root / "socket"))
    for name, mode in (("setuid", 0o4755), ("setgid", 0o2711), ("sticky", 0o1777), ("none", 0), ("odd", 0o7421)):
        (root / name).write_text(name)
        os.chown(root / name, 1000, 70_000)
        (root / name).chmod(mode)
    os.lchown(root / "long link", 12, 34)
    (root / "attributes").touch()
    for attribute, value in (
        ("user.empty", b""),
        ("user.50%=\n", b"\0\xff"),
        ("user.long", b"v" * 3000),
        ("trusted.mine", b"1"),
    ):
        os.setxattr(root / "attributes", attribute, value)
    os.setxattr(root / "attributes", "security.capability", READ_ANY)
    os.setxattr(root / "attributes", "system.posix_acl_access", acl(1000, 5))
    os.setxattr(root / "a", "system.posix_acl_default", acl(1001, 6))
    os.setxattr(root / "a/b", "user.on a directory", b"yes")
    (root / "many").mkdir()
    for number in range(MANY):
        (root / f"many/{number}").touch()
    make_deep(root / "deep", 60)
    for number, name in enumerate(("plain", "large", "a/b", "fifo", "link", "null", "a", "empty")):
        at = (
            -2_000_000_000_123_456_789,
            -1,
            0,
            1,
            4_102_444_800_000_000_001,
            6_000_000_000_999_999_999,
            123,
            999_999_999,
        )[number]
        os.utime(root / name, ns=(at, at), follow_symlinks=False)


def make_deep(top: Path, levels: int) -> None:
    """Directories in directories until their path is longer than the kernel takes (4095 bytes)."""
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d" * 100, dir_fd=fd)
        deeper = os.open("d" * 100, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = deeper
    with open(os.open("bottom", os.O_CREAT | os.O_WRONLY, dir_fd=fd), "w") as f:
        f.write("deep down")
    os.close(fd)


def manifest(root: Path) -> dict[bytes, tuple[Any, ...]]:
    """Everything about every entry below `root` (and itself, b""), hard links as the group of their paths. Independent
    of our own code.

    ctime, atime and the inode's own number are not in it, nor the size and link count of directories."""
    found: dict[bytes, tuple[Any, ...]] = {}
    groups: dict[tuple[int, int], list[bytes]] = defaultdict(list)
    todo = [(b"", os.open(root, os.O_RDONLY | os.O_DIRECTORY))]
    while todo:
        path, fd = todo.pop()
        if not path:
            found[b""] = _facts(os.stat(fd), f"/proc/self/fd/{fd}".encode(), follow=True)
        for name in map(os.fsencode, os.listdir(fd)):
            deeper = path + b"/" + name
            st = os.stat(name, dir_fd=fd, follow_symlinks=False)
            found[deeper] = _facts(st, f"/proc/self/fd/{fd}/".encode() + name, follow=False)
            if stat.S_ISDIR(st.st_mode):
                todo.append((deeper, os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)))
            else:
                groups[st.st_dev, st.st_ino].append(deeper)
        os.close(fd)
    for names in groups.values():
        for name in names:
            found[name] = (*found[name], *sorted(names))
    return found


def _facts(st: os.stat_result, path: bytes, *, follow: bool) -> tuple[Any, ...]:
    kind = stat.S_IFMT(st.st_mode)
    xattrs = {
        name: os.getxattr(path, name, follow_symlinks=follow) for name in os.listxattr(path, follow_symlinks=follow)
    }
    shown = tuple(sorted((k, v) for k, v in xattrs.items() if not k.startswith("trusted.overlay.")))
    facts: tuple[Any, ...] = (oct(st.st_mode), st.st_uid, st.st_gid, st.st_mtime_ns, shown)
    if kind == stat.S_IFREG:
        facts += (st.st_size, st.st_nlink, hashlib.sha256(Path(os.fsdecode(path)).read_bytes()).hexdigest())
    elif kind == stat.S_IFLNK:
        facts += (st.st_nlink, os.readlink(path))
    elif kind in (stat.S_IFCHR, stat.S_IFBLK):
        facts += (st.st_nlink, os.major(st.st_rdev), os.minor(st.st_rdev))
    return facts


_ENTER = """
import ctypes, os, sys
shift, uid, root, *command = sys.argv[1:]
os.chdir(root)
ready_r, ready_w = os.pipe()
go_r, go_w = os.pipe()
pid = os.fork()
if pid == 0:
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000 | 0x20000):
        os._exit(99)
    os.write(ready_w, b"1")
    os.read(go_r, 1)
    os.setgroups([])
    os.setresgid(int(uid), int(uid), int(uid))
    os.setresuid(0, 0, 0)
    os.chroot(".")
    os.setresuid(int(uid), int(uid), int(uid))
    os.execv(command[0], command)
os.read(ready_r, 1)
for kind in ("uid_map", "gid_map"):
    with open(f"/proc/{pid}/{kind}", "w") as f:
        f.write(f"0 {shift} 65536\\n")
os.write(go_w, b"1")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def in_user_namespace(shift: int, uid: int, root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as container user `uid` of a user namespace at host ids `shift`..., with `root` as its root
    directory."""
    return subprocess.run(
        [sys.executable, "-c", _ENTER, str(shift), str(uid), str(root), *command],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
    )
