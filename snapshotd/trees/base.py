"""Layers and stacks: the words that the modules of this package share.

A *layer* is the sealed upper directory of an overlay: exactly what changed since the parent. A *stack* is layers,
newest first, over an image's root. Overlayfs marks in a layer: a character device 0:0 is a whiteout; the xattr
`opaque=y` (see `kernel.abilities.Marks`) hides the directories below; `redirect` says where a renamed directory's
lower part lies. A sealed layer is never written to. The kernel lists a whiteout as a name that cannot be opened where
nothing below has its directory. So a directory with whiteouts carries `origin`, which makes the kernel
filter them anywhere (`lookup.make_whiteout`; the kernel itself sets it when it copies up).

    store.py        the layer directory: create, seal, remove, durability, where it lies (reflink or not)
    pivot.py        give a live container another root (the core mechanism)
    capture.py      copy a live upper into a layer, for sandboxes with live processes
    lookup.py       how overlayfs finds a name in a stack
    view.py         read a tree, wherever it lies: the interface
    stack_view.py   a stack as a view, without mounting it
    stored_view.py  a stored tree as a view
    live_view.py    the live root of a sandbox as a view
    difference.py   the difference between two stored trees as a view: a layer that never was a directory
    archive.py      apply a sealed layer to a stored tree: the tree of the snapshot
    diff.py         compare two views
    hunks.py        find changed lines, in bounded time
    patch.py        write a comparison as a git-style patch
    materialise.py  write a view into a directory
    apply.py        bring a directory to another state in place
    amend.py        make a layer that changes a stack
    links.py        mend hard links that copy-up tore apart
    merge.py        combine adjacent layers into one
    ingest.py       bring a foreign folder or archive into a layer
    tar_writer.py   write a view as a tar
"""

from __future__ import annotations

import os
import stat
import threading
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from snapshotd.types import Kind

_KINDS = {
    stat.S_IFREG: Kind.FILE,
    stat.S_IFDIR: Kind.DIRECTORY,
    stat.S_IFLNK: Kind.SYMLINK,
    stat.S_IFIFO: Kind.FIFO,
    stat.S_IFSOCK: Kind.SOCKET,
    stat.S_IFCHR: Kind.CHAR_DEVICE,
    stat.S_IFBLK: Kind.BLOCK_DEVICE,
}

FORMATS = {kind: bits for bits, kind in _KINDS.items()}
"""The type bits of `st_mode`, inode(7)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a tree. Ids are the container's. `mode` is permission bits only (12 bits, setuid and sticky
    included). A directory's `size` is 0: file systems give it sizes of their own.

    `inode` is (device, inode number) of the file that backs it: equal for the names of one hard link group inside one
    layer, and equal between two views when the very same file backs both.
    """

    kind: Kind
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    rdev: int
    nlink: int
    inode: tuple[int, int]
    ctime_ns: int

    @staticmethod
    def of(st: os.stat_result) -> Entry:
        return Entry(
            _KINDS[stat.S_IFMT(st.st_mode)],
            stat.S_IMODE(st.st_mode),
            st.st_uid,
            st.st_gid,
            0 if stat.S_ISDIR(st.st_mode) else st.st_size,
            st.st_mtime_ns,
            st.st_rdev,
            st.st_nlink,
            (st.st_dev, st.st_ino),
            st.st_ctime_ns,
        )


@dataclass(slots=True)
class Child:
    """An entry of a directory of a view, and the data that the view needs to read it without another lookup. Not to be
    changed (not frozen, because that doubles the cost of making one, and a listing makes many)."""

    name: bytes
    entry: Entry
    source: Any
    """The view's own."""


class ChangeKind(StrEnum):
    ADDED = "added"
    CHANGED = "changed"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Change:
    """One path that differs between two trees. `before` is None for added, `after` for deleted ones.

    A directory that came or went is followed by every entry in it. Content, mode, owner, xattrs, link target and device
    number count; of directories mode, owner and xattrs count; times alone do not make a change.
    """

    path: bytes
    kind: ChangeKind
    before: Entry | None
    after: Entry | None


class PathPart(Protocol):
    """A directory known by its name in its parent; the root has none."""

    @property
    def parent(self) -> PathPart | None: ...
    @property
    def name(self) -> bytes: ...


def printable_path(directory: PathPart, name: bytes = b"") -> str:
    """The path of an entry of a directory (b"": of the directory itself) for people: always printable, and of limited
    length."""
    names, at = ([name] if name else []), directory
    while at.parent is not None:
        names.append(at.name)
        at = at.parent
    text = ascii(os.fsdecode(b"/".join(reversed(names)) or b"."))
    return text if len(text) <= 300 else text[:150] + "..." + text[-147:]


class Warnings:
    """Sentences about what was lost, at most `limit`, so that a hostile tree cannot fill the memory. Thread-safe."""

    def __init__(self, limit: int = 1000) -> None:
        self._limit, self._sentences, self._left_out, self._lock = limit, list[str](), 0, threading.Lock()

    def add(self, sentence: str) -> None:
        with self._lock:
            if len(self._sentences) < self._limit:
                self._sentences.append(sentence)
            else:
                self._left_out += 1

    def all(self) -> tuple[str, ...]:
        """The sentences, and one that counts the others."""
        more = (f"{self._left_out} more warnings are not listed",) if self._left_out else ()
        return (*self._sentences, *more)


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The result of a restore. `warnings`: one sentence for everything that the target could not hold."""

    files: int
    directories: int
    bytes: int
    warnings: tuple[str, ...]
