"""The file system: requests of the kernel, answered from folders and views. Read-only.

A view never changes, so the kernel may keep all of it for ever: names, attributes, pages, the absence of a name. A view
serves one thread at a time. Most requests use it right in the event loop, once no thread does (`Source.idle`): handing
a request to a thread costs more than answering it. Reads that are large, or any while the store is slow, go to a
thread. Errors: a handler may raise nothing but FUSEError, so this is one of the places that catch everything: lost
data, and an exception without an errno of its own, become EIO for the reader and a line in the log.
"""

from __future__ import annotations

import errno
import functools
import logging
import secrets
import stat
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FUSEError

from snapshotd.errors import DataLoss
from snapshotd.fuse.folders import FOREVER_S, Folder, Link, TreePlace
from snapshotd.fuse.ids import PRIVATE_PREFIX, shift_xattrs
from snapshotd.fuse.nodes import Nodes, ShownNode, ShownTree
from snapshotd.trees.base import FORMATS, Child, Entry
from snapshotd.trees.target import shift_id
from snapshotd.types import Kind

_log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

_BLOCK_BYTES = 4096
_INLINE_BYTES = 128 << 10
_SLOW_S, _SLOW_FOR_S = 0.02, 1.0
"""A small read that takes longer than the first sends all reads to threads for the second."""
_DOTS = 2
"""`.` and `..` come first in every listing: entry i of a directory has position i + 2, and the kernel gets the position
after it."""


@dataclass(slots=True)
class _Listing:
    """An open directory. A folder is listed when it is opened. A tree's directory is listed when it is read first, and
    once for all its open descriptors: a sandbox may open the largest directory any number of times."""

    node: ShownNode
    names: Sequence[Any] | None = None
    """Children of a view, or (name, item) pairs of a folder."""
    handles: int = 0


_Handler = Callable[Concatenate["TreeOperations", P], Coroutine[Any, Any, T]]


def _answers(handler: _Handler[P, T]) -> _Handler[P, T]:
    """Turn everything that a handler may raise into an errno, with a line in the log where something is wrong with
    us."""

    @functools.wraps(handler)
    async def wrapper(self: TreeOperations, /, *arguments: P.args, **named: P.kwargs) -> T:
        try:
            return await handler(self, *arguments, **named)
        except FUSEError:
            raise
        except OSError as exc:
            if exc.errno not in (errno.ENOENT, errno.ENOTDIR):
                _log.error("%s of %s failed: %s", handler.__name__, self.describe(arguments[0]), exc)
            raise FUSEError(exc.errno or errno.EIO) from exc
        except DataLoss as exc:
            _log.error("%s of %s failed: %s", handler.__name__, self.describe(arguments[0]), exc)
            raise FUSEError(errno.EIO) from exc
        except Exception as exc:
            _log.exception("%s of %s failed", handler.__name__, self.describe(arguments[0]))
            raise FUSEError(errno.EIO) from exc

    return wrapper


class TreeOperations(pyfuse3.Operations):
    """One mount. `enable_acl`: the kernel enforces POSIX ACLs and permissions (a lower layer), else only shows them
    (root browses)."""

    supports_dot_lookup = False  # a file handle from before, which overlayfs has noted as an origin, must be stale

    def __init__(self, top: Folder, *, enable_acl: bool) -> None:
        super().__init__()
        self.enable_acl = enable_acl
        self._nodes = Nodes(top)
        self._listings: dict[int, _Listing] = {}
        self._of_trees: dict[int, _Listing] = {}
        self._next_handle = 1
        self._generation = secrets.randbits(31)
        self._started_ns = time.time_ns()
        self._slow_until = 0.0

    def describe(self, what: object) -> str:
        """The path of an inode or handle number, for messages."""
        try:
            return self._nodes.get(int(str(what))).path()
        except (KeyError, ValueError):
            return f"handle {what}"

    # -- names ---------------------------------------------------------------------------------------------------------

    @_answers
    async def lookup(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> EntryAttributes:
        parent = self._nodes.get(parent_inode)
        if isinstance(parent.item, Folder):
            item = parent.item.find(name)
            if item is None:
                return self._absent(0.0 if parent.item.timeout_s < FOREVER_S else 1.0)
            node = self._nodes.of_item(parent, name, item)
            self._nodes.note_lookup(node)  # before anything is awaited: a listing may tell of it meanwhile
            try:
                attributes = await self._attributes(node)
            except BaseException:
                self._nodes.forget([(node.number, 1)])
                raise
            attributes.entry_timeout = parent.item.timeout_s
        else:
            tree = self._tree(parent)
            await tree.source.idle()
            try:
                child = tree.view.find(parent.directory, name)
            except FileNotFoundError:
                return self._absent(FOREVER_S)
            node = self._nodes.of_child(parent, child)
            attributes = self._of_entry(node, child.entry)
            self._nodes.note_lookup(node)
        return attributes

    def _absent(self, timeout_s: float) -> EntryAttributes:
        nothing = EntryAttributes()
        nothing.st_ino = 0
        nothing.entry_timeout = timeout_s
        return nothing

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        self._nodes.forget(inode_list)

    @_answers
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> EntryAttributes:
        return await self._attributes(self._nodes.get(inode))

    @_answers
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        node = self._nodes.get(inode)
        if isinstance(node.item, Link):
            return node.item.target
        tree, child = self._tree(node), self._child(node)
        await tree.source.idle()
        return tree.view.readlink_of(child)

    # -- directories ---------------------------------------------------------------------------------------------------

    @_answers
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        node = self._nodes.get(inode)
        if isinstance(node.item, Folder):
            listing = _Listing(node, list(node.item.entries()))
        else:
            self._tree(node)
            listing = self._of_trees.get(inode) or _Listing(node)
            self._of_trees[inode] = listing
        listing.handles += 1
        handle = self._next_handle
        self._next_handle += 1
        self._listings[handle] = listing
        return handle

    async def releasedir(self, fh: int) -> None:
        listing = self._listings.pop(fh, None)
        if listing is not None:
            listing.handles -= 1
            if not listing.handles:
                self._of_trees.pop(listing.node.number, None)

    @_answers
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        listing = self._listings[fh]
        node = listing.node
        for position in range(start_id, _DOTS):
            above = node if position == 0 or node.parent is None else node.parent
            if not pyfuse3.readdir_reply(token, b"." * (position + 1), self._provisional(above.number), position + 1):
                return
        start_id = max(start_id, _DOTS)
        if isinstance(node.item, Folder):
            assert listing.names is not None
            for position in range(start_id, len(listing.names) + _DOTS):
                name, item = listing.names[position - _DOTS]
                entry = self._nodes.of_item(node, name, item)
                if not self._tell(token, name, entry, self._of_item(entry), position):
                    return
        else:
            tree = self._tree(node)
            await tree.source.idle()
            if listing.names is None:
                listing.names = tree.view.children(node.directory)
            for position in range(start_id, len(listing.names) + _DOTS):
                child = listing.names[position - _DOTS]
                entry = self._nodes.of_child(node, child)
                if not self._tell(token, child.name, entry, self._of_entry(entry, child.entry), position):
                    return

    def _tell(
        self, token: pyfuse3.ReaddirToken, name: bytes, node: ShownNode, attributes: EntryAttributes, position: int
    ) -> bool:
        """Add an entry to a listing, after which the kernel knows it; False when the listing's buffer is full."""
        if not pyfuse3.readdir_reply(token, name, attributes, position + 1):
            return False
        self._nodes.note_lookup(node)
        return True

    # -- contents ------------------------------------------------------------------------------------------------------

    @_answers
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        self._child(self._nodes.get(inode))
        return pyfuse3.FileInfo(fh=inode, keep_cache=True)

    @_answers
    async def read(self, fh: int, off: int, size: int) -> bytes:
        node = self._nodes.get(fh)
        tree, child = self._tree(node), self._child(node)
        wanted = max(0, min(size, child.entry.size - off))
        if not wanted:
            return b""
        if wanted <= _INLINE_BYTES and trio.current_time() >= self._slow_until:
            await tree.source.idle()
            began = trio.current_time()
            data = tree.view.read_child(child, off, wanted)
            if trio.current_time() - began > _SLOW_S:
                self._slow_until = began + _SLOW_FOR_S
        else:
            data = await tree.source.read_in_thread(child, off, wanted)
        if len(data) != wanted:  # the kernel would fill the rest with zeros
            raise DataLoss(f"{len(data)} of {wanted} bytes at {off} came back; run `snapshotd check --read-data`")
        return data

    async def release(self, fh: int) -> None:
        """Nothing is held per open file."""

    # -- extended attributes -------------------------------------------------------------------------------------------

    @_answers
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        if name.startswith(PRIVATE_PREFIX):
            raise FUSEError(pyfuse3.ENOATTR)  # overlayfs asks for three of them per file
        value = (await self._xattrs(self._nodes.get(inode))).get(name)
        if value is None:
            raise FUSEError(pyfuse3.ENOATTR)
        return value

    @_answers
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> list[bytes]:
        return list(await self._xattrs(self._nodes.get(inode)))

    async def _xattrs(self, node: ShownNode) -> dict[bytes, bytes]:
        if isinstance(node.item, Folder | Link):
            return {}
        tree = self._tree(node)
        await tree.source.idle()
        if node.child is None or node.child.entry.kind is Kind.DIRECTORY:
            found = tree.view.directory_xattrs(node.directory)
        else:
            found = tree.view.xattrs_of(node.child)
        return shift_xattrs(found, tree.shift)

    # -- the whole -----------------------------------------------------------------------------------------------------

    @_answers
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        """Full: nothing can be written. The size is unknown without a walk over everything."""
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = _BLOCK_BYTES
        data.f_blocks = data.f_bfree = data.f_bavail = 0
        data.f_files = data.f_ffree = data.f_favail = 0
        data.f_namemax = 255
        return data

    # -- inside --------------------------------------------------------------------------------------------------------

    def _tree(self, node: ShownNode) -> ShownTree:
        self._nodes.open_place(node)
        if node.tree is None:
            raise FUSEError(errno.ENOTDIR)
        return node.tree

    def _child(self, node: ShownNode) -> Child:
        if node.child is None:
            raise FUSEError(errno.EISDIR)
        return node.child

    async def _attributes(self, node: ShownNode) -> EntryAttributes:
        if isinstance(node.item, Folder | Link):
            return self._of_item(node)
        tree = self._tree(node)
        await tree.source.idle()
        return self._of_entry(node, node.entry())

    def _of_entry(self, node: ShownNode, entry: Entry) -> EntryAttributes:
        assert node.tree is not None
        shift = node.tree.shift
        result = EntryAttributes()
        result.st_ino = node.number
        result.generation = self._generation
        result.entry_timeout = result.attr_timeout = FOREVER_S
        result.st_mode = FORMATS[entry.kind] | entry.mode
        # 1 of a directory: its sub-directories are not counted here.
        result.st_nlink = 1 if entry.kind is Kind.DIRECTORY else max(1, entry.nlink)
        result.st_uid = shift_id(entry.uid, shift) if shift else entry.uid
        result.st_gid = shift_id(entry.gid, shift) if shift else entry.gid
        result.st_rdev = entry.rdev
        result.st_size = entry.size
        result.st_blksize = _BLOCK_BYTES
        result.st_blocks = (entry.size + 511) >> 9
        result.st_atime_ns = result.st_mtime_ns = entry.mtime_ns
        result.st_ctime_ns = entry.ctime_ns
        return result

    def _of_item(self, node: ShownNode) -> EntryAttributes:
        """Attributes of a folder or link; of a place provisional ones, for which the kernel will ask again."""
        result = self._provisional(node.number)
        if isinstance(node.item, Link):
            result.st_mode = stat.S_IFLNK | 0o777
            result.st_size = len(node.item.target)
        if not isinstance(node.item, TreePlace):
            result.attr_timeout = 1.0
        return result

    def _provisional(self, number: int) -> EntryAttributes:
        result = EntryAttributes()
        result.st_ino = number
        result.generation = self._generation
        result.entry_timeout = result.attr_timeout = 0
        result.st_mode = stat.S_IFDIR | 0o755
        result.st_nlink = 1
        result.st_uid = result.st_gid = 0
        result.st_size = 0
        result.st_blksize = _BLOCK_BYTES
        result.st_atime_ns = result.st_mtime_ns = result.st_ctime_ns = self._started_ns
        return result
