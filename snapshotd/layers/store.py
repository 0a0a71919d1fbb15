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
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from snapshotd.errors import NO_ROOM, NotFound, OutOfSpace, Unsupported
from snapshotd.failpoints import hit
from snapshotd.kernel import files, loop, quota
from snapshotd.kernel import syscalls as sc
from snapshotd.kernel.abilities import TRUSTED, Abilities, Marks
from snapshotd.kernel.probes import needed, useful
from snapshotd.layers.ballast import Ballast
from snapshotd.layers.limits import DiskLimits
from snapshotd.layers.mounting import PATH_FLAGS, LayerMounts
from snapshotd.layers.proof import Proof
from snapshotd.layers.sizes import LayerSizes, layers_in
from snapshotd.layers.witness import Witness
from snapshotd.trees.stack_view import StackView
from snapshotd.trees.view import View
from snapshotd.types import IdMap, ImageID, LayerID, Stack, new_id

MAX_IMAGE_BYTES, MIN_IMAGE_BYTES = 1 << 40, 1 << 30
IMAGE_SHARE = 0.9
"""The sparse XFS image may grow to this part of the space that was free when it was made. It takes only written blocks;
a sandbox that fills it meets "no space left" inside, before the disk below is full and the image's own journal
fails."""
_MOUNT_TRIES = 5
"""A device that was seen may be detached, and a free one taken, before the mount: in a busy container more than
once."""
READY_LAYERS = 4
_TRASH = ".evicted-"
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
        `image`: the file that the file
        system lies in, whose blocks are allocated ahead and given back (ballast.py). `witness`: the store's own from now
        on; None for a store that only a child process opens. `missing`: the reason why the layers cannot be reached;
        `root` is an empty directory then."""
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
        self._sizes = LayerSizes(self.marks)
        self._trash = threading.Lock()
        self._ready: list[LayerID] = []
        self._lock = threading.Lock()
        self._limits = DiskLimits(self._fd)
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
            raise _space(exc, "create a layer") from exc
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
        fd = self.open_upper(layer)
        try:
            return os.open(".", files.DIR_FLAGS, dir_fd=fd)
        finally:
            os.close(fd)

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

    def view(self, stack: Stack) -> View:
        """The stack as one tree, for reading; its layers are held until the caller closes it. NotFound."""
        if not self.hold(stack.layers):
            raise NotFound(
                f"a layer of this snapshot is missing in {self.root}: its files can only come from the repository"
            )
        try:
            with ExitStack() as opened:
                fds = []
                for layer in stack.layers:
                    fds.append(self.read_upper(layer))
                    opened.callback(os.close, fds[-1])
                fds.append(self.read_image(stack.image))
                opened.callback(os.close, fds[-1])
                return StackView(fds, lambda: self.release(stack.layers), self.marks)
        except BaseException:
            self.release(stack.layers)
            raise

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

    def note_size(self, layer: LayerID, size_bytes: int) -> None:
        """Remember how much space a sealed layer takes. Not an error when it is gone."""
        with self._lock:
            self._sizes.note(self._fd, layer, size_bytes)

    def sized_bytes(self) -> int:
        """Disk use of all layers whose size is known. Cost: nothing per layer on disk, but for the first time."""
        with self._lock:
            return sum(self._sizes.known(self._fd).values())

    def sizes(self) -> dict[LayerID, tuple[int, int]]:
        """For each layer whose size is known: size in bytes, time of last use in ns."""
        return self._sizes.read(self._fd)

    def evict(self, layer: LayerID) -> bool:
        """Delete a layer unless it is held. Its content must be in the repository. A layer is there or not there, also
        after a crash."""
        with self._lock:
            if self._held[layer] > 0 or layer in self._lazy:
                return False
            if not self._taken(layer):
                return False
        hit("layers.evict.renamed")
        self._empty_trash(layer)
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

    def any_lazy(self, stack: Stack) -> bool:
        """True if a layer of the stack is still lazy."""
        return any(layer in self._lazy for layer in stack.layers)

    def publish(self, made: LayerID, layer: LayerID) -> None:
        """Give the finished layer `made` the id `layer`, which is lazy no more."""
        with self._lock:
            os.rename(made, layer, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            self._pins.discard(made)
            self._pins.add(layer)
            self.proof.forget(layer)  # it was proven at most as the mount that served it
            self._sizes.moved(made, layer)
            self._lazy.pop(layer, None)

    def forget(self, layer: LayerID) -> None:
        """A lazy layer will not come."""
        with self._lock:
            self._lazy.pop(layer, None)
            self._pins.discard(layer)

    # -- live layers ---------------------------------------------------------------------------------------------------

    def room(self, stack: Stack, disk_bytes: int) -> quota.Used:
        """The space above `stack` for a sandbox whose layers may take `disk_bytes` together (0: `limits.DISK_SHARE`). A layer
        whose size is not known yet counts as nothing."""
        with self._lock:
            return self._limits.room(stack, disk_bytes, self._sizes.known(self._fd))

    def free_bytes(self) -> int:
        """Space that layers can still take, from users other than root. With an image: together with everything else on
        its disk."""
        st = os.fstatvfs(self._fd)
        return st.f_bavail * st.f_frsize + (0 if self._ballast is None else self._ballast.reserve_bytes())

    @property
    def quotas(self) -> bool:
        """True if the file system keeps the limits of live uppers."""
        return self._limits.enforced

    def limit(self, layer: LayerID, room: quota.Used) -> None:
        """Let an empty layer that becomes a live upper take no more than this, where the file system can see to it.
        Before anything is in it. OutOfSpace.

        Only upper and work count to the project: a directory that hands its project on takes no hard link from
        elsewhere (EXDEV), as merges and copies make them, so no layer is made in one that does.
        """
        if not self.quotas:
            return
        try:
            project = self._limits.project(self._fd, room)
            for part in ("upper", "work"):
                fd = self._open(f"{layer}/{part}", files.DIR_FLAGS)
                try:
                    quota.join(fd, project)
                finally:
                    os.close(fd)
        except OSError as exc:
            raise _space(exc, "limit a layer") from exc

    def dress(self, layer: LayerID, stack: Stack) -> None:
        """Give an empty upper's root directory the owner, mode, xattrs and times that the root of `stack` has.

        The root directory's own metadata come from the upper alone, so a fresh one must look like the one below.
        """
        below, marks = self._open_top(stack), self.marks
        try:
            target = self.open_upper(layer)
            try:
                xattrs = {k: v for k, v in files.read_xattrs(below).items() if not k.startswith(marks.prefix)}
                files.copy_metadata(os.fstat(below), xattrs, target)
            finally:
                os.close(target)
        finally:
            os.close(below)

    def unchanged(self, layer: LayerID, stack: Stack) -> bool:
        """True if a live upper holds nothing: no entry, and its root directory looks like the stack's. One readdir, two
        stats."""
        below, marks = self._open_top(stack), self.marks
        try:
            upper = os.open(f"{layer}/upper", files.DIR_FLAGS, dir_fd=self._fd)
            try:
                return files.is_empty_dir(upper) and _root_identity(upper, marks) == _root_identity(below, marks)
            finally:
                os.close(upper)
        finally:
            os.close(below)

    def _open_top(self, stack: Stack) -> int:
        """O_PATH descriptor of the directory that the root of `stack` has its metadata from."""
        return self.open_upper(stack.layers[0]) if stack.layers else self.open_image(stack.image)

    def drop_work(self, layer: LayerID) -> None:
        """Remove a sealed layer's scratch directory. Not an error when it is gone."""
        files.remove_tree(self._fd, f"{layer}/work")

    def remove(self, layer: LayerID) -> None:
        """Delete a layer. Not an error when it is missing, or another thread deletes it just now. Cost: proportional to
        its entries."""
        with self._lock:
            self._pins.discard(layer)
            if not self._taken(layer):
                return
        self._empty_trash(layer)

    def _taken(self, layer: LayerID) -> bool:
        """Take a layer away from all other threads, so that only one deletes it. False when it is not there. Caller
        holds the lock."""
        try:
            self._rename_to_trash(layer)
        except FileNotFoundError:
            return False
        except OSError as exc:
            if exc.errno not in NO_ROOM or self._ballast is None or not self._ballast.give_up_spare():
                raise
            self._rename_to_trash(layer)
        self._pins.discard(layer)
        self.proof.forget(layer)
        self._sizes.gone(layer)
        return True

    def _rename_to_trash(self, layer: LayerID) -> None:
        try:
            os.rename(layer, _TRASH + layer, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            files.remove_tree(self._fd, _TRASH + layer)  # an earlier one of that id, whose removal was cut off
            os.rename(layer, _TRASH + layer, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def _empty_trash(self, layer: LayerID) -> None:
        with self._trash:
            files.remove_tree(self._fd, _TRASH + layer)

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
                if layer in self._pins or not self._taken(layer):
                    continue  # it came into use meanwhile, or went
            self._empty_trash(layer)
            gone.append(layer)
        with self._trash:
            for name in os.listdir(self._fd):
                if name.startswith(_TRASH):  # an eviction that was cut off
                    files.remove_tree(self._fd, name)
        return gone

    def flush(self) -> None:
        """Return when everything written to the layer directory is durable. OSError: it is not, and never will be."""
        self.proof.sync()


def _root_identity(fd: int, marks: Marks) -> tuple[object, ...]:
    st = os.fstat(fd)
    xattrs = {k: v for k, v in files.read_xattrs(fd).items() if not k.startswith(marks.prefix)}
    return st.st_mode, st.st_uid, st.st_gid, st.st_mtime_ns, xattrs


def _space(exc: OSError, doing: str) -> OSError | OutOfSpace:
    if exc.errno in NO_ROOM:
        return OutOfSpace(
            f"cannot {doing}: the state directory's disk is full; free space or remove trajectories with `snapshotd rm`"
        )
    return exc


# -- choosing the file system ------------------------------------------------------------------------------------------


def prepare(state_dir: Path) -> LayerStore:
    """Open the layer store of a state directory: `<state>/layers`, directly if files can be reflinked there, else on a
    sparse XFS image `<state>/layers.img` mounted over it (root, xfsprogs and a loop device), else plainly: then there is
    no image.

    The choice is made once: an existing image is always used again. A loop device that still holds the image from
    before a crash is reused, since two devices on one image would corrupt it. An image that cannot be mounted is left as
    it is, and the store is `missing`: what is stored can be read and removed without it. OutOfSpace.
    """
    directory, image = state_dir / "layers", state_dir / "layers.img"
    directory.mkdir(mode=0o700, exist_ok=True)
    witness = Witness(state_dir)

    def opened(kind: str, *, image: Path | None = None, missing: str = "") -> LayerStore:
        host = needed.find(directory, state_dir / needed.FILE_NAME)
        return LayerStore(directory, kind, host, image=image, witness=witness, missing=missing)

    try:
        is_new = not image.exists()
        if is_new:
            if useful.shares_extents(directory):
                return opened("reflink")
            if not _is_unused(directory) or useful.loop_devices() is not None or not _make_image(image):
                return opened("plain")
        try:
            _mount_image(image, directory)
        except Unsupported as exc:
            if is_new:  # a container may have the control of loop devices and no device
                image.unlink()
                _log.warning("layers lie in a plain directory: no loop device could be attached")
                return opened("plain")
            _log.error("%s", exc.message)
            return opened("missing", missing=exc.message)
        return opened("loop-xfs", image=image)
    except BaseException:
        witness.close()
        raise


def _is_unused(directory: Path) -> bool:
    """True if there has been no layer: a store that was missing leaves the directory of images, which is empty."""
    return not any(path.name != "images" or any(path.iterdir()) for path in directory.iterdir())


def _make_image(image: Path) -> bool:
    temporary = image.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as f:
            free = os.fstatvfs(f.fileno())
            room = int(free.f_bavail * free.f_frsize * IMAGE_SHARE)
            os.truncate(f.fileno(), min(max(room, MIN_IMAGE_BYTES), MAX_IMAGE_BYTES))
        subprocess.run(
            ["mkfs.xfs", "-q", "-f", "-m", "reflink=1", str(temporary)],
            check=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.CalledProcessError):
        temporary.unlink(
            missing_ok=True
        )  # no mkfs.xfs, or a file system without big sparse files: the plain directory serves
        return False
    os.rename(temporary, image)
    return True


def _mount_image(image: Path, directory: Path) -> None:
    if os.path.ismount(directory):
        return
    reason = ""
    for _ in range(_MOUNT_TRIES):
        try:
            device = loop.device_of(image)
            if device is None:
                loop.ensure_free_node()
        except OSError as exc:
            reason = f"{exc.filename or 'loop devices'}: {exc.strerror}"
            break
        for quotas in ("prjquota,", ""):  # without them where the kernel has none
            options = f"{quotas}{'' if device else 'loop,'}noatime,nodev,nosuid"
            command = ["mount", "-t", "xfs", "-o", options, device or str(image), str(directory)]
            result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
            if result.returncode == 0 and loop.is_mounted_from(directory, image):
                return
            if result.returncode == 0:  # the device has become another file's meanwhile
                sc.call("umount2", os.fsencode(directory), 0)
                reason = "its loop device was taken by another file"
                break
            reason = result.stderr.strip()
    raise Unsupported(
        f"cannot mount the layer image {image} ({reason}): stored snapshots can be read, exported and removed; nothing can "
        "be started, and captured snapshots wait in the image. It needs root, XFS, a free loop device (`snapshotd doctor`) "
        "and space on its disk: see to that and restart the daemon, or move the image away to begin without those snapshots"
    )


def release(store: LayerStore) -> None:
    """Close the store and unmount its image, if it has one. A mount that is still used goes with its last user."""
    store.close()
    if store.kind == "loop-xfs":
        try:
            sc.call("umount2", os.fsencode(store.root), 0)
        except OSError:
            sc.call("umount2", os.fsencode(store.root), sc.MNT_DETACH)
