"""The layer directory: where layers and image roots lie, how they are made, opened, flushed and removed.

    <root>/<layer id>/upper     the writable, later sealed directory
    <root>/<layer id>/work      overlayfs's own scratch directory; only while the layer is live
    <root>/images/<image id>/root

A layer directory exists before any catalog row mentions it and is removed after the last row is gone, so an
unreferenced layer is garbage: `sweep` removes it. `root` is on a reflink file system where possible (`prepare`):
copy-up of a big file is then O(1) (opening a 512 MiB file for writing: 0.1 ms on XFS against 369 ms on ext4).

A layer in use is *held*: by a sandbox that stands on it, a view that reads it. `evict` takes layers that are not held.
Three facts about a layer are on its own directory: the time of its last use (mtime), its size (an xattr), and whether
it is whole (it is there under its id).

A *lazy* layer is not there yet: its content is served from elsewhere (a FUSE mount) until `publish` puts the real one
in its place.

Concurrency: thread-safe; two calls never work on one layer id.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from snapshotd.errors import NO_ROOM, NotFound, Unsupported
from snapshotd.failpoints import hit
from snapshotd.kernel import files
from snapshotd.kernel.abilities import TRUSTED, Abilities, Marks
from snapshotd.layers.ballast import Ballast
from snapshotd.layers.limits import DiskLimits, no_room
from snapshotd.layers.mounting import PATH_FLAGS, LayerMounts
from snapshotd.layers.proof import Proof
from snapshotd.layers.sizes import LayerSizes, layers_in
from snapshotd.layers.trash import Trash
from snapshotd.layers.witness import Witness
from snapshotd.types import IdMap, ImageID, LayerID, Stack, new_id

READY_LAYERS = 4
LazyOpener = Callable[[int], int]
"""Opens a lazy layer's content for overlayfs: the host id that container id 0 is shown as, to an O_PATH descriptor."""
_log = logging.getLogger(__name__)


class LayerStore:
    """See the module's text. `root` must exist; `kind`: its file system: `reflink`, `loop-xfs`, `plain`, or `missing`."""

    def __init__(
        self,
        root: Path,
        kind: str,
        host: Abilities | None = None,
        *,
        marks: Marks = TRUSTED,
        image: Path | None = None,
        witness: Witness | None = None,
        missing: str = "",
    ) -> None:
        """`host`: None where no layer is mounted, or the host is still to be probed; the layers have these `marks` then.
        `image`: the file that the file system lies in, whose blocks are allocated ahead and given back (ballast.py).
        `witness`: the store's own from now on; None for a store that only a child process opens. `missing`: the reason
        why the layers cannot be reached; `root` is an empty directory then."""
        self.kind = kind
        self._fd = os.open(root, files.DIR_FLAGS)
        self._mounts = LayerMounts(root, self._fd, host, marks)
        self.proof = Proof(root, self._fd, image, witness, missing)
        os.makedirs(root / "images", mode=0o700, exist_ok=True)
        self._pins: set[LayerID] = set()
        self._held: Counter[LayerID] = Counter()
        self._spared: set[LayerID] = set()
        """Layers that a sweep would have removed if they had not been held."""
        self._unneeded: Callable[[], object] = lambda: None
        self._lazy: dict[LayerID, LazyOpener] = {}
        self.sizes = LayerSizes(self._fd, self.marks)
        self._trash = Trash(self._fd)
        self._ready: list[LayerID] = []
        self._lock = threading.Lock()
        self.limits = DiskLimits(self._fd, self.sizes)
        self._ballast = Ballast(self._fd, image) if image is not None else None

    def close(self) -> None:
        """Remove the layers made ahead and release the descriptor. Idempotent."""
        if self._fd >= 0:
            for layer in self._ready:
                files.remove_tree(self._fd, layer)
            self._ready.clear()
            self._mounts.close()
            if self._ballast is not None:
                self._ballast.close()
            self.proof.close()
            os.close(self._fd)
            self._fd = -1

    def create(self, layer: LayerID | None = None) -> LayerID:
        """An empty layer (upper and work), pinned until `unpin`: one made ahead, or three mkdirs now, as always under a
        given id that no layer has. OutOfSpace; DataLoss and Unsupported as `Proof.check`."""
        self.proof.check()
        if layer is not None:
            return self._make(layer)
        with self._lock:
            if self._ready:
                return self._ready.pop()
        return self._make(LayerID(new_id()))

    def make_ahead(self) -> None:
        """Have `READY_LAYERS` empty layers at hand, so that a step need not wait for the file system's journal.
        OutOfSpace."""
        while not self.proof.missing:
            with self._lock:
                if len(self._ready) >= READY_LAYERS:
                    return
            layer = self._make(LayerID(new_id()))
            with self._lock:
                self._ready.append(layer)

    @contextmanager
    def making(self) -> Iterator[LayerID]:
        """A new layer for the block to fill, as of `create`; removed if the block raises."""
        layer = self.create()
        try:
            yield layer
        except BaseException:
            self.remove(layer)
            raise

    def _make(self, layer: LayerID) -> LayerID:
        with self._lock:
            self._pins.add(layer)
        try:
            os.mkdir(layer, 0o700, dir_fd=self._fd)
            for part, mode in (("upper", 0o755), ("work", 0o700)):
                os.mkdir(f"{layer}/{part}", mode, dir_fd=self._fd)
        except OSError as exc:
            if exc.errno != errno.EEXIST:  # else it is another's
                self.remove(layer)
            raise no_room(exc, "create a layer") from exc
        return layer

    @property
    def root(self) -> Path:
        """The layer directory."""
        return self._mounts.root

    @property
    def marks(self) -> Marks:
        """The names of overlayfs's marks in its layers."""
        return self._mounts.marks

    @property
    def host(self) -> Abilities:
        """The abilities with which layers are mounted here."""
        return self._mounts.host

    def open_layer(self, layer: LayerID, id_map: IdMap | None = None) -> int:
        """O_PATH descriptor of the layer's directory (holding upper and work). `id_map`: through a mount that shifts the
        ids of what is below. NotFound."""
        return self._open(layer, base=self._mounts.base(id_map))

    def open_upper(self, layer: LayerID, id_map: IdMap | None = None) -> int:
        """O_PATH descriptor of the layer's content, as `open_layer`; a lazy layer is served with its ids as they are
        shown. NotFound."""
        lazy = self._lazy.get(layer)
        if lazy is not None:
            return lazy(id_map.base if id_map else 0)
        return self._open(f"{layer}/upper", base=self._mounts.base(id_map))

    def open_image(self, image: ImageID, id_map: IdMap | None = None) -> int:
        """O_PATH descriptor of an image's root, as `open_layer`. NotFound."""
        return self._open(f"images/{image}/root", base=self._mounts.base(id_map))

    def read_upper(self, layer: LayerID) -> int:
        """Descriptor for listing the layer's content. NotFound."""
        if layer not in self._lazy:
            return self._open(f"{layer}/upper", files.DIR_FLAGS)
        with files.closing_fd(self.open_upper(layer)) as fd:
            return os.open(".", files.DIR_FLAGS, dir_fd=fd)

    def read_image(self, image: ImageID) -> int:
        """Descriptor for listing an image's root. NotFound."""
        return self._open(f"images/{image}/root", files.DIR_FLAGS)

    def _open(self, relative: str, flags: int = PATH_FLAGS, base: int = -1) -> int:
        try:
            return os.open(relative, flags, dir_fd=self._fd if base < 0 else base)
        except FileNotFoundError as exc:
            if self.proof.missing:
                raise Unsupported(self.proof.missing) from exc
            message = f"{relative} is missing in {self.root}: its snapshots cannot be read; restore the state directory from a backup"
            raise NotFound(message) from exc

    # -- who is using what ---------------------------------------------------------------------------------------------

    def hold(self, layers: Iterable[LayerID]) -> bool:
        """Keep layers from being evicted until `release`, all or none. False when one is not there. Notes that they
        were used."""
        wanted = tuple(layers)
        with self._lock:
            for layer in wanted:
                if layer in self._lazy:
                    continue
                try:
                    os.utime(layer, dir_fd=self._fd, follow_symlinks=False)
                except FileNotFoundError:
                    return False
            self._held.update(wanted)
        return True

    def release(self, layers: Iterable[LayerID]) -> None:
        """Undo one `hold`."""
        with self._lock:
            self._held.subtract(layers)
            free = {layer for layer, count in self._held.items() if count <= 0}
            for layer in free:
                del self._held[layer]
            unneeded = bool(self._spared & free)
            self._spared -= free
        if unneeded:
            self._unneeded()

    def on_unneeded(self, sweep: Callable[[], object]) -> None:
        """Have `sweep` called when a layer is released that a sweep would have removed. It must not block."""
        self._unneeded = sweep

    def is_held(self, layer: LayerID) -> bool:
        """True if the layer is held right now."""
        with self._lock:
            return self._held[layer] > 0

    def evict(self, layer: LayerID) -> bool:
        """Delete a layer unless it is held. Its content must be in the repository. A layer is there or not there, also
        after a crash."""
        with self._lock:
            if self._held[layer] > 0 or layer in self._lazy or not self._take_away(layer):
                return False
        hit("layers.evict.renamed")
        self._trash.remove(layer)
        return True

    # -- layers that are not there yet ---------------------------------------------------------------------------------

    def expect(self, layer: LayerID, opener: LazyOpener) -> None:
        """Announce a lazy layer: it counts as present from now on, and is pinned."""
        with self._lock:
            self._lazy[layer] = opener
            self._pins.add(layer)

    def lazy(self, layer: LayerID) -> LazyOpener | None:
        """The opener of a layer that is still lazy; None for any other."""
        return self._lazy.get(layer)

    def publish(self, made: LayerID, layer: LayerID) -> None:
        """Give the finished layer `made` the id `layer`, which is lazy no more."""
        with self._lock:
            os.rename(made, layer, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            self._pins.discard(made)
            self._pins.add(layer)
            self.proof.forget(layer)  # it was proven at most as the mount that served it
            self.sizes.move(made, layer)
            self._lazy.pop(layer, None)

    def forget(self, layer: LayerID) -> None:
        """Give up a lazy layer, which will not come."""
        with self._lock:
            self._lazy.pop(layer, None)
            self._pins.discard(layer)

    # -- live layers ---------------------------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        """Space that layers can still take, from users other than root. With an image: together with everything else on
        its disk."""
        return files.free_bytes(self._fd) + (0 if self._ballast is None else self._ballast.reserve_bytes())

    def drop_work(self, layer: LayerID) -> None:
        """Remove a sealed layer's scratch directory. Not an error when it is gone."""
        files.remove_tree(self._fd, f"{layer}/work")

    def remove(self, layer: LayerID) -> None:
        """Delete a layer. Not an error when it is missing, or another thread deletes it just now. Cost: proportional to
        its entries."""
        with self._lock:
            self._pins.discard(layer)
            if not self._take_away(layer):
                return
        self._trash.remove(layer)

    def _take_away(self, layer: LayerID) -> bool:
        """Take a layer away from all other threads, so that only one deletes it. False when it is not there. Caller
        holds the lock."""
        try:
            self._trash.take(layer)
        except FileNotFoundError:
            return False
        except OSError as exc:
            if exc.errno not in NO_ROOM or self._ballast is None or not self._ballast.give_up_spare():
                raise
            self._trash.take(layer)
        self._pins.discard(layer)
        self.proof.forget(layer)
        self.sizes.forget(layer)
        return True

    def revive(self, upper: LayerID, stack: Stack) -> bool:
        """Take over a live upper of an earlier daemon, pinned, and the layers below it, held. False when one is not
        there."""
        if upper not in self.layers() or not self.hold(stack.layers):
            return False
        with self._lock:
            self._pins.add(upper)
        return True

    def unpin(self, layers: Iterable[LayerID]) -> None:
        """Let `sweep` take these layers once nothing refers to them."""
        with self._lock:
            self._pins.difference_update(layers)

    def layers(self) -> list[LayerID]:
        """Every layer directory, referenced or not."""
        return layers_in(self._fd)

    def sweep(self, referenced: Callable[[], set[LayerID]]) -> list[LayerID]:
        """Remove every layer that is neither pinned, nor held, nor in `referenced`; returns the removed ones.

        `referenced` is called after the layers were listed, so a layer that is committed meanwhile is never missed.
        """
        present = self.layers()
        with self._lock:
            pinned = set(self._pins)
        keep = referenced() | pinned
        gone = []
        for layer in present:
            if layer in keep:
                continue
            with self._lock:
                if layer in self._held:
                    self._spared.add(layer)
                    continue
                if layer in self._pins or not self._take_away(layer):
                    continue  # it came into use meanwhile, or went
            self._trash.remove(layer)
            gone.append(layer)
        self._trash.empty()
        return gone
