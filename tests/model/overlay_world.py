"""Random work on real kernel overlays, and what a mount shows of it: the oracle that `snapshotd.layers` is compared
with."""

from __future__ import annotations

import hashlib
import os
import random
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from snapshotd.kernel import mounts
from snapshotd.kernel import syscalls as sc
from snapshotd.kernel.files import DIR_FLAGS
from snapshotd.trees.base import Change
from snapshotd.trees.view import View
from snapshotd.types import Kind
from tests import capabilities

RENAME_EXCHANGE = 2
MOST_ENTRIES = 60
NAMES = (b"a", b"b", b"c", b"d", b"with space", b'\xff\n"\\', b"x" * 255)
Manifest = dict[bytes, tuple[Any, ...]]
"""Path to (kind, mode, uid, gid, size of a file, mtime, device, content or target, attributes, index of the link
group)."""


def need_root() -> None:
    """Skip without root; fail instead where the environment says that everything must run."""
    if os.geteuid() != 0:
        if os.environ.get("SNAPSHOTD_REQUIRE"):
            pytest.fail("needs root, and SNAPSHOTD_REQUIRE is set")
        pytest.skip("needs root")


def _content(path: bytes, st: os.stat_result) -> bytes:
    if stat.S_ISLNK(st.st_mode):
        return os.readlink(path)
    if stat.S_ISREG(st.st_mode):
        with open(path, "rb") as f:
            return hashlib.sha256(f.read()).digest()
    return b""


def manifest(root: bytes | str) -> Manifest:
    """Everything below a directory, by ordinary system calls. FileNotFoundError: a name is listed and cannot be
    found."""
    top = os.fsencode(root)
    result: Manifest = {}
    groups: dict[int, int] = {}
    todo = [b""]
    while todo:
        path = todo.pop()
        full = os.path.join(top, path) if path else top
        st = os.lstat(full)
        is_dir = stat.S_ISDIR(st.st_mode)
        xattrs = {
            os.fsencode(name): os.getxattr(full, name, follow_symlinks=False)
            for name in os.listxattr(full, follow_symlinks=False)
            if not name.startswith("trusted.overlay.")
        }
        result[path] = (
            stat.S_IFMT(st.st_mode),
            stat.S_IMODE(st.st_mode),
            st.st_uid,
            st.st_gid,
            st.st_size if stat.S_ISREG(st.st_mode) else 0,
            st.st_mtime_ns,
            st.st_rdev,
            _content(full, st),
            tuple(sorted(xattrs.items())),
            0 if is_dir else st.st_ino,
        )
        if is_dir:
            todo += [os.path.join(path, name) if path else name for name in os.listdir(full)]
    for path in sorted(result):
        row = result[path]
        result[path] = (*row[:-1], groups.setdefault(row[-1], len(groups)) if row[-1] else -1)
    return result


_FORMATS = {
    Kind.FILE: stat.S_IFREG,
    Kind.DIRECTORY: stat.S_IFDIR,
    Kind.SYMLINK: stat.S_IFLNK,
    Kind.FIFO: stat.S_IFIFO,
    Kind.SOCKET: stat.S_IFSOCK,
    Kind.CHAR_DEVICE: stat.S_IFCHR,
    Kind.BLOCK_DEVICE: stat.S_IFBLK,
}


def view_manifest(view: View) -> Manifest:
    """The same of a view, by its path methods."""
    result: Manifest = {}
    groups: dict[tuple[int, int], int] = {}
    for path, entry in [(b"", view.lstat(b"")), *view.walk()]:
        assert view.lstat(path) == entry
        content = b""
        if entry.kind is Kind.FILE:
            with open(view.open(path), "rb") as f:
                content = hashlib.sha256(f.read()).digest()
        elif entry.kind is Kind.SYMLINK:
            content = view.readlink(path)
        result[path] = (
            _FORMATS[entry.kind],
            entry.mode,
            entry.uid,
            entry.gid,
            entry.size if entry.kind is Kind.FILE else 0,
            entry.mtime_ns,
            entry.rdev,
            content,
            tuple(sorted(view.xattrs(path).items())),
            entry.inode if entry.kind is not Kind.DIRECTORY else None,
        )
    for path in sorted(result):
        row = result[path]
        result[path] = (*row[:-1], groups.setdefault(row[-1], len(groups)) if row[-1] else -1)
    return result


def expected_changes(before: Manifest, after: Manifest) -> list[tuple[bytes, str]]:
    """What diff must say: everything but times and link groups counts."""

    def counts(row: tuple[Any, ...] | None) -> Any:
        if row is None:
            return None
        mode = 0 if row[0] == stat.S_IFLNK else row[1]
        return row[0], mode, row[2:5], row[6:9]

    result = []
    for path in sorted(before.keys() | after.keys(), key=lambda p: p.split(b"/") if p else []):
        old, new = before.get(path), after.get(path)
        if counts(old) != counts(new):
            result.append((path, "added" if old is None else "deleted" if new is None else "changed"))
    return result


def said(changes: Sequence[Change]) -> list[tuple[bytes, str]]:
    return [(change.path, str(change.kind)) for change in changes]


def difference(a: Manifest, b: Manifest) -> str:
    """For a failure message: the first paths where two manifests differ."""
    lines = [
        f"{path!r}: {a.get(path)} != {b.get(path)}"
        for path in sorted(a.keys() | b.keys())
        if a.get(path) != b.get(path)
    ]
    return "\n".join(lines[:10])


class World:
    """An image, sealed layers and a live overlay in `base`, changed by random operations."""

    def __init__(self, base: Path, seed: int) -> None:
        self.base = base
        self.rng = random.Random(seed)
        self.log: list[str] = []
        self.count = 0
        self.mount = os.fsencode(base / "mnt")
        (base / "mnt").mkdir()
        self.image = self._new_dir("image")
        self.layers: list[Path] = []
        self._fill_image()
        self.upper = self._mount_live()

    def close(self) -> None:
        self._unmount()

    # -- layers --------------------------------------------------------------------------------------------------------

    def _new_dir(self, kind: str) -> Path:
        self.count += 1
        path = self.base / f"{kind}{self.count}"
        path.mkdir()
        return path

    def open_all(self, dirs: Sequence[Path]) -> list[int]:
        return [os.open(path, DIR_FLAGS) for path in dirs]

    def _mount_live(self) -> Path:
        upper = self._new_dir("layer")
        lowers = [*self.layers, self.image]
        os.chmod(upper, stat.S_IMODE(os.stat(lowers[0]).st_mode))
        self.mount_overlay(lowers, upper, self.mount)
        return upper

    def mount_overlay(self, lowers: Sequence[Path], upper: Path, at: bytes) -> None:
        fds = self.open_all([*lowers, upper, self._new_dir("work")])
        try:
            mount_fd = mounts.overlay(fds[:-2], fds[-2], fds[-1], capabilities.layer_naming())
            target = os.open(at, os.O_PATH)
            mounts.attach(mount_fd, target)
            os.close(mount_fd)
            os.close(target)
        finally:
            for fd in fds:
                os.close(fd)

    def _unmount(self) -> None:
        if os.path.ismount(self.mount):
            sc.call("umount2", self.mount, 0)

    def live_stack(self) -> list[Path]:
        return [self.upper, *self.layers, self.image]

    def pivot(self) -> None:
        """Seal the live layer and go on with a new one above it."""
        self._unmount()
        self.layers.insert(0, self.upper)
        self.upper = self._mount_live()
        self.log.append("pivot")

    def remount(self, layers: list[Path]) -> None:
        """Seal the live layer and go on with other layers below it."""
        self._unmount()
        self.layers = layers
        self.upper = self._mount_live()

    def give(self) -> None:
        """Put a new folder into a layer of its own, as user space writes a workspace: directories lack the marks that
        the kernel sets."""
        self.pivot()
        layer = self._new_dir("layer")
        os.chmod(layer, stat.S_IMODE(os.stat(self.mount).st_mode))
        folder = layer / f"given{self.count}"
        folder.mkdir()
        self.mount, live = os.fsencode(folder), self.mount
        for _ in range(self.rng.randrange(5, 40)):
            self.step()
        self.mount = live
        self.log.append(f"gave {folder.name}")
        self.remount([layer, *self.layers])

    def fresh_manifest(self, lowers: Sequence[Path]) -> Manifest:
        """What a new mount of a stack shows."""
        at = self._new_dir("fresh")
        upper = self._new_dir("empty")
        self.mount_overlay(lowers, upper, os.fsencode(at))
        try:
            result = manifest(str(at))
        finally:
            sc.call("umount2", str(at), 0)
        st, row = os.stat(lowers[0]), result[b""]  # a root's own metadata came from the empty upper layer
        xattrs = {
            os.fsencode(n): os.getxattr(lowers[0], n)
            for n in os.listxattr(lowers[0])
            if not n.startswith("trusted.overlay.")
        }
        result[b""] = (
            row[0],
            stat.S_IMODE(st.st_mode),
            st.st_uid,
            st.st_gid,
            0,
            st.st_mtime_ns,
            *row[6:8],
            tuple(sorted(xattrs.items())),
            row[9],
        )
        return result

    # -- operations ----------------------------------------------------------------------------------------------------

    def _fill_image(self) -> None:
        self.mount, live = os.fsencode(self.image), self.mount
        for _ in range(self.rng.randrange(10, 120)):
            self.step()
        self.mount = live
        self.log.append("mounted")

    def paths(self, want: Callable[[os.stat_result], bool] = lambda st: True) -> list[bytes]:
        found, todo = [], [b""]
        while todo:
            path = todo.pop()
            for name in sorted(os.listdir(os.path.join(self.mount, path))):
                child = os.path.join(path, name) if path else name
                st = os.lstat(os.path.join(self.mount, child))
                if want(st):
                    found.append(child)
                if stat.S_ISDIR(st.st_mode):
                    todo.append(child)
        return found

    def _full(self, path: bytes) -> bytes:
        return os.path.join(self.mount, path)

    def _any(self, want: Callable[[os.stat_result], bool] = lambda st: True) -> bytes:
        paths = self.paths(want)
        if not paths:
            raise FileNotFoundError(2, "nothing fits")
        return self._full(self.rng.choice(paths))

    def _place(self) -> bytes:
        """A path to create: a random directory and name, mostly a new one."""
        dirs = [b"", *self.paths(lambda st: stat.S_ISDIR(st.st_mode))]
        for _ in range(4):
            name = self.rng.choice(NAMES[:4] if self.rng.random() < 0.9 else NAMES)
            path = self._full(os.path.join(self.rng.choice(dirs), name))
            if not os.path.lexists(path) or self.rng.random() < 0.2:
                break
        return path

    def step(self) -> None:
        """One random operation; those that a file system refuses are no-ops."""
        name = self.rng.choice(OPERATIONS)
        if self.rng.random() < 0.3 and len(self.paths()) > MOST_ENTRIES:
            name = "rmtree"
        try:
            what = getattr(self, "do_" + name)()
        except OSError as exc:
            what = f"refused: {exc}"
        self.log.append(f"{name} {what}")

    def do_create(self) -> str:
        path = self._place()
        with self._open(path, os.O_CREAT | os.O_TRUNC) as f:
            f.write(self.rng.randbytes(self.rng.choice((0, 1, 100, 5000))))
            if self.rng.random() < 0.2:
                f.truncate(100_000)
        return repr(path)

    def _open(self, path: bytes, flags: int) -> IO[bytes]:
        """Never through a link: its target would be a file of this machine. Never waiting for a fifo's reader."""
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o644)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(22, "not a regular file")
        return os.fdopen(fd, "wb")

    def do_append(self) -> str:
        path = self._any(lambda st: stat.S_ISREG(st.st_mode))
        with self._open(path, os.O_APPEND) as f:
            f.write(b"more\n")
        return repr(path)

    def do_mkdir(self) -> str:
        path = self._place()
        os.mkdir(path, self.rng.choice((0o755, 0o700, 0o2775, 0o1777)))
        return repr(path)

    def do_rename(self) -> str:
        source, target = self._any(), self._place()
        os.rename(source, target)
        return f"{source!r} -> {target!r}"

    def do_rename_dir(self) -> str:
        source, target = self._any(lambda st: stat.S_ISDIR(st.st_mode)), self._place()
        os.rename(source, target)
        return f"{source!r} -> {target!r}"

    def do_swap(self) -> str:
        source, target = self._any(), self._any()
        sc.call("renameat2", sc.AT_FDCWD, source, sc.AT_FDCWD, target, RENAME_EXCHANGE)
        return f"{source!r} <-> {target!r}"

    def do_unlink(self) -> str:
        path = self._any(lambda st: not stat.S_ISDIR(st.st_mode))
        os.unlink(path)
        return repr(path)

    def do_rmtree(self) -> str:
        path = self._any(lambda st: stat.S_ISDIR(st.st_mode))
        if len(os.listdir(path)) > 2 and self.rng.random() < 0.5:
            raise OSError(0, "too big to lose")
        for parent, dirs, files in os.walk(path, topdown=False):
            for name in files:
                os.unlink(os.path.join(parent, name))
            for name in dirs:
                child = os.path.join(parent, name)
                os.unlink(child) if os.path.islink(child) else os.rmdir(child)
        os.rmdir(path)
        if self.rng.random() < 0.6:
            os.mkdir(path)
            if self.rng.random() < 0.5:
                with self._open(os.path.join(path, self.rng.choice(NAMES)), os.O_CREAT) as f:
                    f.write(b"new")
        return repr(path)

    def do_replace_kind(self) -> str:
        path = self._any(lambda st: not stat.S_ISDIR(st.st_mode))
        os.unlink(path)
        os.mkdir(path)
        return repr(path)

    def do_symlink(self) -> str:
        path = self._place()
        os.symlink(self.rng.choice((b"a", b"/nowhere/x", b"../b", b"with\nline")), path)
        return repr(path)

    def do_link(self) -> str:
        source, target = self._any(lambda st: not stat.S_ISDIR(st.st_mode)), self._place()
        os.link(source, target, follow_symlinks=False)
        return f"{source!r} = {target!r}"

    def do_chmod(self) -> str:
        path = self._any(lambda st: not stat.S_ISLNK(st.st_mode))
        os.chmod(path, self.rng.choice((0o644, 0o755, 0o4711, 0o000, 0o1777)))
        return repr(path)

    def do_chown(self) -> str:
        path = self._any()
        os.chown(path, self.rng.randrange(3), self.rng.randrange(3), follow_symlinks=False)
        return repr(path)

    def do_xattr(self) -> str:
        path = self._any(lambda st: stat.S_ISREG(st.st_mode) or stat.S_ISDIR(st.st_mode))
        name = self.rng.choice(("user.one", "user.overlay.opaque", "user.overlay.redirect", "trusted.own"))
        os.setxattr(path, name, self.rng.choice((b"", b"y", b"/a")))
        return f"{name} {path!r}"

    def do_utime(self) -> str:
        path = self._any()
        os.utime(path, ns=(5, self.rng.randrange(10**18)), follow_symlinks=False)
        return repr(path)

    def do_special(self) -> str:
        path = self._place()
        kind = self.rng.choice((stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK))
        os.mknod(path, kind | 0o640, os.makedev(1, 3) if kind in (stat.S_IFCHR, stat.S_IFBLK) else 0)
        return repr(path)

    def do_root(self) -> str:
        os.chmod(self.mount, self.rng.choice((0o755, 0o750)))
        return "chmod /"


OPERATIONS = (
    ["create"] * 6
    + ["append"] * 3
    + ["mkdir"] * 8
    + ["rename"] * 4
    + ["rename_dir"] * 9
    + ["swap"] * 2
    + ["unlink"] * 2
    + ["rmtree"] * 2
    + [
        "replace_kind",
        "symlink",
        "symlink",
        "link",
        "link",
        "chmod",
        "chown",
        "xattr",
        "xattr",
        "utime",
        "special",
        "root",
    ]
)
