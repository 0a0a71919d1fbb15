"""The hard link groups of one layer: which of its names are the same inode, and the number that their tree entries
carry."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, cast

from snapshotd.trees.lookup import Handles, Node, open_checked

if TYPE_CHECKING:
    from hashlib import _Hash

    from snapshotd.repo.base import TreeEntry

_MOST_LINK = (1 << 64) - 1


@dataclass(slots=True)
class Group:
    """One inode with several names in a layer. `entry`: the record of the first name, so that its data are read
    once."""

    link: int
    names: int
    entry: TreeEntry | None = None


def stat_within(dir_fd: int, name: bytes, device: int) -> os.stat_result:
    """The status of the entry itself. Raises OSError (EXDEV: something is mounted there, which is no part of a
    layer)."""
    st = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    if st.st_dev != device:
        raise OSError(errno.EXDEV, "another file system is mounted inside a layer", os.fsdecode(name))
    return st


def find_groups(layer_fd: int, salt: bytes) -> dict[int, Group]:
    """Inode number to group, for every inode that has two or more names in the layer. Whiteouts, which the kernel
    links, are in it, too.

    A group's number is the BLAKE2b of `salt` and its first path in the order of a sorted walk: the same again for the
    same layer, and as good as random among layers of different salts. Cost: one lstat per entry; memory for each inode
    with more than one name anywhere.
    """
    walk = _Walk(layer_fd, salt)
    with closing(walk.handles):
        walk.run()
    return walk.groups()


class _Walk:
    def __init__(self, layer_fd: int, salt: bytes) -> None:
        self.handles = Handles()
        self._root = self.handles.add_root(layer_fd)
        self._hash = cast("_Hash", blake2b(salt, digest_size=8))  # typeshed forgets that a blake2b is one
        self._first: dict[int, int] = {}
        self._names: dict[int, int] = {}

    def run(self) -> None:
        device = self._root.inode[0]
        # A path's hash goes on from its directory's: hashing each whole path would be quadratic in a deep tree.
        stack = [(self._root, self._hash, self._listing(self._root))]
        while stack:
            node, path_hash, names = stack[-1]
            if not names:
                stack.pop()
                continue
            name = names.pop()
            fd = self.handles.fd(node)
            st = stat_within(fd, name, device)
            if stat.S_ISDIR(st.st_mode):
                below = self.handles.adopt(node, name, open_checked(fd, name, (st.st_dev, st.st_ino)))
                stack.append((below, _extend(path_hash, name + b"/"), self._listing(below)))
            elif st.st_nlink > 1:
                self._add(st.st_ino, path_hash, name)

    def _listing(self, node: Node) -> list[bytes]:
        return sorted(map(os.fsencode, os.listdir(self.handles.fd(node))), reverse=True)

    def _add(self, inode: int, path_hash: _Hash, name: bytes) -> None:
        if inode in self._first:
            self._names[inode] = self._names.get(inode, 1) + 1
        else:
            self._first[inode] = int.from_bytes(_extend(path_hash, name).digest())

    def groups(self) -> dict[int, Group]:
        used = {0}  # 0 says that an entry has no other names
        result = {}
        for inode, names in self._names.items():
            link = self._first[inode]
            while link in used:
                link = (link + 1) & _MOST_LINK
            used.add(link)
            result[inode] = Group(link, names)
        return result


def _extend(path_hash: _Hash, more: bytes) -> _Hash:
    result = path_hash.copy()
    result.update(more)
    return result
