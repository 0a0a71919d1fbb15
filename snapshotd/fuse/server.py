"""The program of the FUSE child processes: a lazy lower layer for sandboxes, or snapshots to browse.

folders.py      the folders above the trees of a mount
lazy_layers.py  ... of the lazy lower
history.py      ... of the folder to browse
nodes.py        the inodes of a mount that the kernel knows
ids.py          owner ids shifted for containers in a user namespace
operations.py   the kernel's questions, answered from views
mount.py        mounting, serving, unmounting
child.py        the daemon's side: such a process, started and ended
lazy.py         the daemon's side of the lazy lower
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from snapshotd.catalog.base import Catalog
from snapshotd.fuse import mount
from snapshotd.fuse.history import history
from snapshotd.fuse.lazy_layers import LazyLayers
from snapshotd.repo.base import FollowedReads, ReadOrders, Repository
from snapshotd.trees.difference import DifferenceView
from snapshotd.trees.stored_view import StoredView
from snapshotd.trees.view import View
from snapshotd.types import TreeID

LAZY_OPTIONS = {"default_permissions", "nosuid", "nodev"}
"""Overlayfs reads with its mounter's credentials and heeds its own mount's flags only: only root needs access here, and
setuid programs work in the sandbox all the same."""


class _FollowedView(DifferenceView):
    """A layer whose beginning is fetched ahead while it is read."""

    def __init__(self, followed: FollowedReads, tree: TreeID, below: TreeID) -> None:
        self._followed = followed
        try:
            super().__init__(followed.repository, tree, below, whole_groups=False)
        except BaseException:
            followed.close()
            raise

    def close(self) -> None:
        self._followed.close()
        super().close()


def serve_lazy(repository: Repository, mount_point: Path, orders: ReadOrders | None = None) -> None:
    """Serve lazy lower layers (see lazy.py) on a directory, until standard input closes. UsageError, Unsupported (no
    FUSE).

    Hard link groups may be torn between such a layer and the image, as a copy-up would tear them: finding all names of
    all groups first takes reading every changed directory, which for 50,000 files is 0.5 s, and a fork must begin in
    0.15 s. `orders`: where the repository is far away, they are fetched ahead.
    """

    def open_view(tree: TreeID, below: TreeID) -> View:
        if orders is None:
            return DifferenceView(repository, tree, below, whole_groups=False)
        return _FollowedView(orders.follow(tree, below), tree, below)

    mount.serve(LazyLayers(open_view), mount_point, options=LAZY_OPTIONS, enable_acl=True)


def serve_browse(repository: Repository, catalog: Catalog, mount_point: Path, namespace_pid: int | None = None) -> None:
    """Serve every stored snapshot (see history.py) on a directory, until it is unmounted or standard input closes.

    `namespace_pid`: a process in whose mount namespace, and by whose paths, the directory is meant. Only root gets in:
    snapshots hold private files and setuid programs. UsageError (no such directory or process), Unsupported (no FUSE),
    OSError.
    """
    top = history(catalog, partial(StoredView, repository))
    mount.serve(top, mount_point, options={"nosuid", "nodev"}, namespace_pid=namespace_pid)
