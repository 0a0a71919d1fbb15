"""The file system that the layers of a state directory lie on: the state directory's own, or an XFS image."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

from snapshotd.errors import Unsupported
from snapshotd.kernel import loop
from snapshotd.kernel import syscalls as sc
from snapshotd.kernel.files import free_bytes
from snapshotd.kernel.probes import needed, useful
from snapshotd.layers.store import LayerStore
from snapshotd.layers.witness import Witness

MAX_IMAGE_BYTES, MIN_IMAGE_BYTES = 1 << 40, 1 << 30
IMAGE_SHARE = 0.9
"""The sparse XFS image may grow to this part of the space that was free when it was made. It takes only written blocks;
a sandbox that fills it meets "no space left" inside, before the disk below is full and the image's own journal
fails."""
_MOUNT_TRIES = 5
"""A device that was seen may be detached, and a free one taken, before the mount: in a busy container more than
once."""
_log = logging.getLogger(__name__)


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

    def open_store(kind: str, *, image: Path | None = None, missing: str = "") -> LayerStore:
        host = needed.find(directory, state_dir / needed.FILE_NAME)
        return LayerStore(directory, kind, host, image=image, witness=witness, missing=missing)

    try:
        is_new = not image.exists()
        if is_new:
            if useful.shares_extents(directory):
                return open_store("reflink")
            if not _is_unused(directory) or useful.loop_devices() is not None or not _make_image(image):
                return open_store("plain")
        os.chmod(image, 0o600)  # it has all files of all sandboxes; one of an earlier version may be open to all
        try:
            _mount_image(image, directory)
        except Unsupported as exc:
            if is_new:  # a container may have the control of loop devices and no device
                image.unlink()
                _log.warning("layers lie in a plain directory: no loop device could be attached")
                return open_store("plain")
            _log.error("%s", exc.message)
            return open_store("missing", missing=exc.message)
        return open_store("loop-xfs", image=image)
    except BaseException:
        witness.close()
        raise


def _is_unused(directory: Path) -> bool:
    """True if there has been no layer: a store that was missing leaves the directory of images, which is empty."""
    return not any(path.name != "images" or any(path.iterdir()) for path in directory.iterdir())


def _make_image(image: Path) -> bool:
    temporary = image.with_suffix(".tmp")
    try:
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as f:
            room = int(free_bytes(f.fileno()) * IMAGE_SHARE)
            os.truncate(f.fileno(), min(max(room, MIN_IMAGE_BYTES), MAX_IMAGE_BYTES))
        subprocess.run(
            ["mkfs.xfs", "-q", "-f", "-m", "reflink=1", str(temporary)],
            check=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.CalledProcessError):
        temporary.unlink(missing_ok=True)
        return False  # no mkfs.xfs, or a file system without big sparse files: the plain directory serves
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
