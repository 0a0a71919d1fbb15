"""Captures without a pivot, where overlayfs cannot rename directories of lower layers (an ordinary user's daemon): one
live upper over the image alone holds all that the sandbox has changed, and a snapshot's layer is a copy of what changed
in it since the snapshot before.

So nothing in a sandbox is ever a lower layer but its image: directories that an earlier step made can be renamed, and
hard links stay links. The layers are the same as those of pivots, and mean the same in a stack. The files of a stack are
written into the fresh upper of a sandbox that begins on it (`fill`), by reflink where the file system can.

How the layer comes about: a directory of the upper is *continued* if it is the one that stood there at the snapshot
before, in directories that are. In continued directories only entries with another signature (capture.py) are copied, and
a name that has gone becomes a whiteout. A directory that is not continued is copied with all that is in it, and hides
what the stack has in its place.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from snapshotd.failpoints import hit
from snapshotd.kernel.abilities import Marks
from snapshotd.kernel.files import closing_fd
from snapshotd.layers.capture import ChangeCopier, Copier, Seen, Signature, open_parent, parent_of, signature_of
from snapshotd.layers.merge import merge
from snapshotd.layers.store import LayerStore
from snapshotd.layers.upper import dress
from snapshotd.trees.lookup import entry_path, get_xattr
from snapshotd.types import LayerID, Stack


@dataclass(frozen=True, slots=True)
class Delta:
    """A layer of what changed, and the upper as it was then. `layer` None: nothing had changed. `whole`: the layer stands
    on the image, because it was not known what the snapshot before held."""

    layer: LayerID | None
    seen: Seen
    whole: bool


def fill(store: LayerStore, upper: LayerID, stack: Stack) -> Seen:
    """Copy all layers of a stack, which are held, into an empty upper. Returns the entries that are in it then. OSError
    (ENOSPC), LimitExceeded; the upper then holds a part."""
    if not stack.layers:
        dress(store, upper, stack)
    else:
        with ExitStack() as opened:
            layer = stack.layers[0]
            if len(stack.layers) > 1:
                layer = store.create()
                opened.callback(store.remove, layer)
                _merge(store, stack, layer)
            source, target = (opened.enter_context(closing_fd(store.read_upper(each))) for each in (layer, upper))
            Copier(source, target, store.marks, store.host.fine_times).run(tolerant=False, always=set())
    with closing_fd(store.read_upper(upper)) as fd:
        return {
            path: signature_of(st, settled=settled) for path, st, settled in _walker(store, fd).walk(tolerant=False)
        }


def note_mount(store: LayerStore, upper: LayerID, seen: Seen) -> None:
    """Note in `seen` that the upper is mounted now: overlayfs has put marks on its root directory, which is no change."""
    with closing_fd(store.read_upper(upper)) as fd:
        now = signature_of(os.fstat(fd))
    if (*now[:5], now[6]) == (*seen[b""][:5], seen[b""][6]):
        seen[b""] = now


def is_unchanged(store: LayerStore, upper: LayerID, seen: Seen) -> bool:
    """True if a live upper holds what it did then. Cost: a status of each of its entries."""
    with closing_fd(store.read_upper(upper)) as fd:
        count = 0
        for path, st, settled in _walker(store, fd).walk(tolerant=True):
            count += 1
            if not settled or seen.get(path) != signature_of(st):
                return False
        return count == len(seen)


def capture(
    store: LayerStore,
    upper: LayerID,
    seen: Seen | None,
    frozen: AbstractContextManager[object],
    volatile: Callable[[], set[bytes]],
    *,
    live: bool,
) -> Delta:
    """Copy what changed in the live `upper` since it was as in `seen` (None: that is not known) into a new layer. `frozen`
    and `volatile`: as for `capture.capture`. `live`: processes may be at work, so most is copied before they are stopped.

    The caller unpins the layer when a catalog row refers to it. On any error there is none, and the sandbox goes on.
    OSError (ENOSPC), SandboxFailed, LimitExceeded.
    """
    with store.making() as layer:
        with closing_fd(store.read_upper(upper)) as source, closing_fd(store.read_upper(layer)) as target:
            copier = _DeltaCopier(source, target, store.marks, store.host.fine_times, seen)
            if live:
                copier.run(tolerant=True, always=set())
            with frozen:
                copier.run(tolerant=False, always=volatile())
        if not copier.changed:
            store.remove(layer)
            return Delta(None, copier.seen, whole=False)
        store.drop_work(layer)
        hit("layers.capture.copied")
        return Delta(layer, copier.seen, whole=copier.whole)


class _DeltaCopier(ChangeCopier):
    """Makes `target` a layer that, on the stack which the upper `below` stood for, shows what `source` shows."""

    def __init__(self, source: int, target: int, marks: Marks, fine_times: bool, below: Seen | None) -> None:
        super().__init__(source, target, marks, fine_times)
        self.whole = below is None
        self._below = below or {}
        self._continued: set[bytes] = set()

    @property
    def changed(self) -> bool:
        return self.whole or len(self.made) > 1 or self.seen[b""] != self._below[b""]

    def _is_wanted(self, path: bytes, signature: Signature, before: Seen) -> bool:
        if self.whole or not path:
            if not path:
                self._continued = set() if self.whole else {b""}
                self._hiding.clear()
            return True
        below = self._below.get(path)
        if below is not None and parent_of(path) in self._continued:
            if self._continues(path, signature, below):
                self._continued.add(path)
            if below == signature:
                return False
        self._make_parents(path, before)
        return True

    def _continues(self, path: bytes, signature: Signature, below: Signature) -> bool:
        """True if the directory is the one that stood here at the snapshot before. A new one may have the same inode
        number, but has the mark by which it hides the image's."""
        if not stat.S_ISDIR(signature[1]) or not stat.S_ISDIR(below[1]) or signature[0] != below[0]:
            return False
        if signature == below:
            return True
        with open_parent(self._source, path) as (fd, name):
            return get_xattr(entry_path(fd, name), self._marks.opaque) is None

    def _finish(self) -> None:
        for path in sorted(self._below.keys() - self.seen.keys()):
            above = parent_of(path)
            if above not in self._continued:
                continue  # it went with its directory
            self._hide(path)

    def _set_marks(self, path: bytes, xattrs: dict[bytes, bytes]) -> dict[bytes, bytes]:
        opaque = os.fsencode(self._marks.opaque)
        if path in self._continued:
            xattrs.pop(opaque, None)
        elif path in self._below:
            xattrs[opaque] = b"y"
        return xattrs


def _walker(store: LayerStore, fd: int) -> Copier:
    return Copier(fd, -1, store.marks, store.host.fine_times)


def _merge(store: LayerStore, stack: Stack, target: LayerID) -> None:
    with ExitStack() as opened:
        fds = [opened.enter_context(closing_fd(store.read_upper(layer))) for layer in (*stack.layers, target)]
        merge(fds[:-1], fds[-1], store.marks)
