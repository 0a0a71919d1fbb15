"""The files and directories that the kernel knows of a mount: their numbers, and the kernel's reference counts.

A number is a hash, so that it is the same when the kernel forgets a file and asks again (`rsync -H` and `git` compare
them over time): of the parent's number and the name; for hard links of the tree's root and the link group, so that all
names have one number. 56 bits: overlayfs needs the uppermost ones. Two snapshots never share a number, though they may
share everything else: one directory in two places would confuse the kernel.
Bounded by the kernel: nodes that it forgets are dropped here, and a tree's view is closed with its last node.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import trio

from snapshotd.fuse.folders import Folder, Item, TreePlace
from snapshotd.trees.base import Child, Entry
from snapshotd.trees.view import View
from snapshotd.types import Kind

_log = logging.getLogger(__name__)

ROOT_NUMBER = 1
_NUMBER_BYTES = 7
_DIGEST_BYTES = 16


@dataclass(slots=True, eq=False)
class SharedView:
    """A view, and how many trees of the mount show it.

    A view serves one thread at a time. The event loop's thread may use it right after `idle` has returned, until it
    awaits anything.
    """

    view: View
    key: object
    users: int = 0
    _reading: trio.Event | None = None
    """Set when the thread that uses the view now has ended. It is no lock: a lock is handed from one waiter to the
    next, so a task that only checks if it is free would never see it so."""

    async def idle(self) -> None:
        """Return when no thread uses the view."""
        while self._reading is not None:
            await self._reading.wait()

    async def read_in_thread(self, child: Child, offset: int, length: int) -> bytes:
        """The view's `read_child` in a thread."""
        await self.idle()
        self._reading = done = trio.Event()
        try:
            return await trio.to_thread.run_sync(self.view.read_child, child, offset, length)
        finally:
            self._reading = None
            done.set()


@dataclass(slots=True, eq=False)
class ShownTree:
    """A tree in use. `live`: the number of nodes that come from it."""

    source: SharedView
    shift: int
    root_number: int
    live: int = 0

    @property
    def view(self) -> View:
        return self.source.view


@dataclass(slots=True, eq=False, repr=False)
class ShownNode:
    """One file, directory or link. `item`: it belongs to no tree, or a tree begins here. `child`: None for those and a
    tree's root."""

    number: int
    digest: bytes
    parent: ShownNode | None
    name: bytes
    tree: ShownTree | None = None
    child: Child | None = None
    item: Item | None = None
    lookups: int = 0
    _entered: Any = None

    @property
    def directory(self) -> Any:
        """The view's handle of this directory, entered when it is first needed."""
        if self._entered is None:
            assert self.tree is not None
            if self.child is None:
                self._entered = self.tree.view.directory()
            else:
                assert self.parent is not None
                self._entered = self.tree.view.enter(self.parent.directory, self.child.name)
        return self._entered

    def entry(self) -> Entry:
        """Its attributes."""
        assert self.tree is not None
        return self.tree.view.entry_of(self.directory) if self.child is None else self.child.entry

    def path(self) -> str:
        """Its path in the mount, for messages."""
        parts, at = [], self
        while at.parent is not None:
            parts.append(at.name)
            at = at.parent
        text = ascii(b"/".join(reversed(parts)))[1:]
        return text if len(text) < 4000 else f"{text[:2000]}...{text[-2000:]}"


class Nodes:
    """All nodes of a mount, by number. For one thread."""

    def __init__(self, top: Folder) -> None:
        root = ShownNode(ROOT_NUMBER, b"", None, b"")
        root.item = top
        root.lookups = 1  # the kernel never forgets it
        self._nodes = {ROOT_NUMBER: root}
        self._sources: dict[object, SharedView] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, number: int) -> ShownNode:
        """KeyError: the kernel asks for a number that it never got, or has forgotten."""
        return self._nodes[number]

    def of_item(self, parent: ShownNode, name: bytes, item: Item) -> ShownNode:
        """The node of a folder's entry. A tree that begins there is not opened yet."""
        node = self._at(_digest(parent.number, name), parent, name)
        if node.tree is None:
            node.item = item
        return node

    def open_place(self, node: ShownNode) -> None:
        """Open the tree that begins at a node which the kernel knows, if there is one and it is not open. Raises the errors
        of opening."""
        if isinstance(node.item, TreePlace) and node.tree is None:
            key = node.item.key
            source = self._sources.get(key)
            if source is None:
                source = self._sources[key] = SharedView(node.item.open_view(), key)
            source.users += 1
            node.tree = ShownTree(source, node.item.shift, node.number)
            node.tree.live = 1

    def of_child(self, parent: ShownNode, child: Child) -> ShownNode:
        """The node of an entry of a tree's directory."""
        tree, entry = parent.tree, child.entry
        assert tree is not None
        if entry.nlink > 1 and entry.kind is not Kind.DIRECTORY:
            digest = _digest(tree.root_number, b"/%d/%d" % entry.inode)  # no name has a slash
        else:
            digest = _digest(parent.number, child.name)
        node = self._at(digest, parent, child.name)
        if node.tree is None:
            node.tree, node.child = tree, child
        return node

    def note_lookup(self, node: ShownNode) -> None:
        """Note that the kernel is being told of the node once more (`forget` undoes it). Await nothing between getting a
        node and this."""
        if node.lookups == 0:
            self._nodes[node.number] = node
            if node.tree is not None:
                node.tree.live += 1
        node.lookups += 1

    def forget(self, numbers: Sequence[tuple[int, int]]) -> None:
        """The kernel has dropped (number, count) references each."""
        for number, times in numbers:
            node = self._nodes.get(number)
            if node is None or number == ROOT_NUMBER:
                continue
            node.lookups -= times
            if node.lookups <= 0:
                del self._nodes[number]
                node.lookups = 0
                if node.tree is not None:
                    node.tree.live -= 1
                    if node.tree.live == 0:
                        self._leave(node.tree.source)

    def _leave(self, source: SharedView) -> None:
        source.users -= 1
        if source.users == 0:
            del self._sources[source.key]
            source.view.close()
            _log.info("the kernel has forgotten all of tree %s", source.key)

    def _at(self, digest: bytes, parent: ShownNode, name: bytes) -> ShownNode:
        """The node of that digest, or a new one with the first free number from it on (collisions: 1 in 10^6 for
        400,000 files)."""
        number = int.from_bytes(digest[:_NUMBER_BYTES], "little")
        while number <= ROOT_NUMBER or ((found := self._nodes.get(number)) is not None and found.digest != digest):
            number = (number + 1) % (1 << 8 * _NUMBER_BYTES)
        return found if found is not None else ShownNode(number, digest, parent, name)


def _digest(number: int, name: bytes) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little") + name, digest_size=_DIGEST_BYTES).digest()
