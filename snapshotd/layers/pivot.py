"""The pivot: give a running container another root, live, without restarting it. The core mechanism of snapshotd.

    1 build the next overlay, detached                          nothing has happened yet
    2 in the container's mount namespace: clone its sub-mounts
    3 seal the old root read-only                               EBUSY here: still nothing has happened
    4 attach the new root, hang the sub-mounts into it
    5 pivot_root, detach the old root

Every process whose root and working directory were the old root now has the new one. Cost does not depend on how much
changed. Failures in 4 unseal the old root, so the container goes on as before.

Source: pivot_root(2), mount_setattr(2); measured whole: 1-2.3 ms.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from snapshotd.errors import NO_ROOM, SandboxFailed
from snapshotd.kernel import files, mounts, namespaces
from snapshotd.kernel import syscalls as sc
from snapshotd.layers.store import LayerStore, LazyOpener
from snapshotd.layers.upper import mount_upper
from snapshotd.types import IdMap, LayerID, Stack

CONVENIENCES = (b"/etc/resolv.conf", b"/etc/hosts", b"/etc/hostname")
"""Files that a runtime mounts for comfort; an image that has something else in their place goes without them."""
MACHINE_ID = b"etc/machine-id"
"""File of the root that a sandbox may have its own form of (`Target.machine_id_fd`)."""
_MOVED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENAMETOOLONG)
"""Errors for a mount point whose directory was moved or replaced."""
MAX_CACHED_LOWERS = 64
MAX_SUBMOUNTS = 256
"""A container's own mounts are about thirty; docker adds a few per volume."""


class Busy(Exception):  # noqa: N818 - an answer, not a defect
    """The root cannot be sealed: a file is open for writing through it, or a mount in it was moved. Nothing has
    changed; take the copy path."""


@dataclass(slots=True)
class Target:
    """A container to pivot: a descriptor of its mount namespace, and the map of its ids. Close when done."""

    pid: int
    id_map: IdMap | None
    mount_ns_fd: int
    root_fd: int = -1
    """The mount that is the container's root now, once it is one of ours."""
    retired: deque[int] = field(default_factory=deque)
    """Former roots. Letting go of one evicts its inodes, which takes as long as much changed: never while the container
    waits."""
    machine_id_fd: int = -1
    """A file to mount over `MACHINE_ID` in every root where that is a regular file; -1: none."""
    machine_id_mount: int = -1
    """The id of the mount that covers it in the present root; -1: none does."""
    lowers: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Descriptors of lower layers, kept from one pivot to the next."""

    def lower(self, key: str, opener: Callable[[], int]) -> int:
        """The descriptor for a layer or image, from the cache or opened now. It stays the cache's."""
        if key in self.lowers:
            self.lowers.move_to_end(key)
            return self.lowers[key]
        self.lowers[key] = fd = opener()
        return fd

    def lazy_lower(self, key: str, opener: LazyOpener) -> int:
        """Like `lower`, for a layer that is served with its ids shifted already, because its file system cannot be
        id-mapped."""
        if key in self.lowers and not mounts.answers(self.lowers[key]):
            os.close(self.lowers.pop(key))  # its process died, and another may serve it
        if key not in self.lowers:
            self.lowers[key] = opener(self.id_map.base if self.id_map else 0)
        self.lowers.move_to_end(key)
        return self.lowers[key]

    def cover_machine_id(self, file: Path, mount: int = -1) -> None:
        """Mount this file over `MACHINE_ID` in every root from now on, where that is a regular file. `mount`: the id of
        the mount that does so already. OSError."""
        self.machine_id_fd = os.open(file, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.machine_id_mount = mount

    def bury(self) -> None:
        """Let go of former roots. After the container goes on; from any thread, and from several."""
        with contextlib.suppress(IndexError):
            while True:
                os.close(self.retired.popleft())

    def trim(self) -> None:
        """Close the lowers that were used longest ago, beyond `MAX_CACHED_LOWERS`."""
        while len(self.lowers) > MAX_CACHED_LOWERS:
            os.close(self.lowers.popitem(last=False)[1])

    @staticmethod
    def of(pid: int, id_map: IdMap | None) -> Target:
        """For the container whose init is `pid`. SandboxFailed when it is gone."""
        try:
            ns = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise SandboxFailed(f"process {pid} is gone: its container died before it could be given a root") from exc
        return Target(pid, id_map, ns)

    def open_root(self) -> int:
        """A descriptor (O_PATH) of the container's root as it is now. OSError, SandboxFailed."""
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        if self.root_fd >= 0:
            return os.open(b".", flags, dir_fd=self.root_fd)
        return namespaces.in_mount_namespace(self.mount_ns_fd, lambda: os.open("/", flags))

    def close(self) -> None:
        for fd in (self.mount_ns_fd, self.machine_id_fd):
            if fd >= 0:
                os.close(fd)
        self.machine_id_fd = -1
        self.bury()
        for fd in (*self.lowers.values(), *([self.root_fd] if self.root_fd >= 0 else [])):
            os.close(fd)
        self.root_fd = -1
        self.lowers.clear()
        self.mount_ns_fd = -1


def pivot(
    target: Target,
    store: LayerStore,
    stack: Stack,
    upper: LayerID,
    layout: mounts.Layout,
    *,
    seal: bool,
    announce: Callable[[int], None] = lambda _: None,
) -> None:
    """Give the container the root `upper` over `stack`, and hang the mounts of its `layout` into it.

    `seal`: the present root is one of ours and must become an immutable layer; raises Busy if it cannot. Without it
    (the first root of a fresh container, or a rewind that throws the present one away) nothing is sealed. `announce` is
    told the id of the mount that becomes the root, when everything is prepared.
    Raises Busy, SandboxFailed when the container is gone or its root cannot hold the sub-mounts, or OSError (ENOSPC).
    Then the root is as before.
    The caller makes sure that every live process has its working directory and open files outside the root (see
    engine/sandbox/quiesce.py).
    """
    points = tuple(point for point in layout.points if point[1] != target.machine_id_mount)
    with _overlay(target, store, stack, upper) as new_root, _machine_id(target) as machine_id:
        owner = target.id_map.base if target.id_map else 0
        announce(mounts.mount_id(new_root))
        target.machine_id_mount = namespaces.in_mount_namespace(
            target.mount_ns_fd, lambda: _switch(new_root, points, machine_id, owner, seal=seal)
        )
        if target.root_fd >= 0:
            target.retired.append(target.root_fd)
        target.root_fd = os.dup(new_root)


def settle(target: Target) -> None:
    """Undo or finish a pivot whose process was killed in the middle. OSError, SandboxFailed."""
    found = mounts.read_mountinfo(target.pid)
    prepared = sum(mount.point == b"/proc" and mount.fs_type == "overlay" for mount in found)
    retired = sum(mount.point == b"/" for mount in found) - 1

    def uncover() -> None:
        os.chdir("/")
        for _ in range(prepared):
            mounts.detach(b"/proc")  # a root that had not become one: it lies on top
        for _ in range(retired):
            mounts.detach(b".")  # the root before this one, which lies on top until it is detached

    namespaces.in_mount_namespace(target.mount_ns_fd, uncover)
    namespaces.in_mount_namespace(target.mount_ns_fd, mounts.unseal_here)  # the root that is now at "/"


@contextlib.contextmanager
def _overlay(target: Target, store: LayerStore, stack: Stack, upper: LayerID) -> Iterator[int]:
    lowers = [_lower(target, store, layer) for layer in stack.layers]
    lowers.append(target.lower(f"image {stack.image}", partial(store.open_image, stack.image, target.id_map)))
    with mount_upper(store, upper, lowers, target.id_map) as mount:
        target.trim()
        yield mount


@contextlib.contextmanager
def _machine_id(target: Target) -> Iterator[int]:
    """A mount of the sandbox's own machine id, for one root; -1: it has none."""
    if target.machine_id_fd < 0:
        yield -1
        return
    with files.closing_fd(mounts.read_only_file(target.machine_id_fd)) as tree:
        yield tree


def _lower(target: Target, store: LayerStore, layer: LayerID) -> int:
    """The lazy form has a key of its own, so that the real layer takes its place at the first pivot after it is
    there."""
    opener = store.lazy(layer)
    if opener is not None:
        return target.lazy_lower(f"lazy {layer}", opener)
    return target.lower(layer, partial(store.open_upper, layer, target.id_map))


def layout_of(target: Target) -> mounts.Layout:
    """The mounts in the container's root. SandboxFailed when the container is gone, or has more mounts than any of
    ours."""
    try:
        found = mounts.layout(target.pid)
    except OSError as exc:
        raise SandboxFailed(f"process {target.pid} is gone: its container died") from exc
    if len(found.points) > MAX_SUBMOUNTS:
        raise SandboxFailed(
            f"the sandbox has {len(found.points)} mounts in its root; at most {MAX_SUBMOUNTS} are supported"
        )
    return found


def _clones(points: tuple[tuple[bytes, int], ...], opened: ExitStack) -> list[tuple[bytes, int]]:
    """The sub-mounts, each as a tree of its own. FileNotFoundError when one no longer lies on its point: a clone of a
    directory of the root would be a mount that sealing does not reach, and the sandbox could change a snapshot through
    it afterwards."""
    trees = []
    root = opened.enter_context(files.closing_fd(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)))
    for point, mount_id in points:
        with files.closing_fd(files.open_beneath(root, point.lstrip(b"/"), os.O_PATH | os.O_NOFOLLOW)) as spot:
            if mounts.mount_id(spot) != mount_id:
                raise FileNotFoundError(errno.ENOENT, "the mount is no longer there", point)
            trees.append((point, opened.enter_context(files.closing_fd(mounts.clone(spot, recursive=True)))))
    return trees


def _switch(new_root: int, points: tuple[tuple[bytes, int], ...], machine_id: int, owner: int, *, seal: bool) -> int:
    """Steps 2 to 5, in a thread inside the container's mount namespace. Returns the id of the mount that covers the
    machine id; -1: none does."""
    with ExitStack() as opened:
        os.chdir("/")
        try:
            trees = _clones(points, opened)
        except OSError as exc:
            if exc.errno not in _MOVED:
                raise
            if seal:
                raise Busy("a mount in the root was moved") from exc
            raise SandboxFailed(
                f"a mount of the sandbox was moved while it was to get another root ({exc}); try again"
            ) from exc
        if seal:
            try:
                mounts.seal_here()
            except OSError as exc:
                if exc.errno == errno.EBUSY:
                    raise Busy("a file is open for writing") from exc
                raise
        attached = False
        try:
            _attach_on_proc(new_root)
            attached = True
            for point, tree in trees:
                _hang(new_root, point, tree, owner)
            covered = _cover_machine_id(new_root, machine_id)
            os.fchdir(new_root)
            sc.call("pivot_root", b".", b".")
        except BaseException:
            if attached:
                mounts.detach(b"/proc")  # the new root lies on top there
            if seal:
                mounts.unseal_here()
            raise
        mounts.detach(b".")
        return covered


def _cover_machine_id(new_root: int, tree: int) -> int:
    """Hang the sandbox's machine id over the root's, where that is a regular file. Nothing is made in the (hostile) root,
    and no link of it is followed."""
    if tree < 0:
        return -1
    try:
        spot = files.open_beneath(new_root, MACHINE_ID, os.O_PATH | os.O_NOFOLLOW)
    except OSError as exc:
        if exc.errno not in _MOVED:
            raise
        return -1
    with files.closing_fd(spot):
        if not stat.S_ISREG(os.fstat(spot).st_mode):
            return -1
        mounts.attach(tree, spot)
        return mounts.mount_id(tree)


def _attach_on_proc(new_root: int) -> None:
    """Put the new root anywhere in the namespace, as pivot_root demands: on top of /proc, which every container has."""
    with files.closing_fd(os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as spot:
        mounts.attach(new_root, spot)


def _hang(new_root: int, point: bytes, tree: int, owner: int) -> None:
    """Move one sub-mount to its place in the new root, without following links of that (hostile) root."""
    relative = point.lstrip(b"/")
    is_dir = stat.S_ISDIR(os.fstat(tree).st_mode)
    try:
        try:
            spot = files.open_beneath(new_root, relative, os.O_PATH | os.O_NOFOLLOW)
        except FileNotFoundError:
            spot = _make_spot(new_root, relative, owner, is_dir=is_dir)
        with files.closing_fd(spot):
            mode = os.fstat(spot).st_mode
            if point in CONVENIENCES and not stat.S_ISREG(mode):
                return  # an image whose /etc/resolv.conf is a link keeps its own
            mounts.attach(tree, spot)
    except OSError as exc:
        if exc.errno in NO_ROOM:
            raise
        raise SandboxFailed(
            f"cannot mount {os.fsdecode(point)!r} in the sandbox's root: {exc.strerror}; the snapshot has something else in its place"
        ) from exc


def _make_spot(new_root: int, relative: bytes, owner: int, *, is_dir: bool) -> int:
    """Create a missing mount point (directory or file, as the mount is) in the new root's upper layer; returns it as
    O_PATH."""
    *parents, name = relative.split(b"/")
    directory = os.open(".", files.DIR_FLAGS, dir_fd=new_root)
    try:
        for parent in parents:
            with contextlib.suppress(FileExistsError):
                _make(directory, parent, owner, is_dir=True)
            deeper = files.open_dir(directory, parent)
            os.close(directory)
            directory = deeper
        _make(directory, name, owner, is_dir=is_dir)
        return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    finally:
        os.close(directory)


def _make(directory: int, name: bytes, owner: int, *, is_dir: bool) -> None:
    if is_dir:
        os.mkdir(name, 0o755, dir_fd=directory)
    else:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644, dir_fd=directory))
    os.chown(name, owner, owner, dir_fd=directory, follow_symlinks=False)
