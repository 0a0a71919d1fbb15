"""The child process (see child.py) that brings files back from the repository: layers for sandboxes, and restores into
folders."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from snapshotd.engine.storage.child import Progress
from snapshotd.kernel import files
from snapshotd.kernel.rootless import owner_outside
from snapshotd.layers.store import LayerStore
from snapshotd.repo.base import Repository
from snapshotd.trees import materialise
from snapshotd.trees.difference import DifferenceView
from snapshotd.trees.stored_view import StoredView
from snapshotd.types import LayerID, TreeID


class ColdService:
    """The child's end."""

    def __init__(self, repository: Repository, store: LayerStore) -> None:
        self._repository, self._store = repository, store

    def __call__(self, request: dict[str, Any], _: Progress) -> dict[str, Any]:
        tree = TreeID(request["tree"])
        if request["op"] == "rebuild":
            with DifferenceView(self._repository, tree, TreeID(request["below"])) as layer:
                fd = self._store.read_upper(LayerID(request["layer"]))
                try:
                    return asdict(materialise.materialise(layer, b"", fd, whiteouts=True, marks=self._store.marks))
                finally:
                    os.close(fd)
        if request["op"] == "image":
            with StoredView(self._repository, tree) as view:
                fd = os.open(request["target"], files.DIR_FLAGS)
                try:
                    return asdict(materialise.materialise(view, b"", fd, marks=self._store.marks))
                finally:
                    os.close(fd)
        with StoredView(self._repository, tree) as view:
            fd = os.open(request["target"], files.DIR_FLAGS & ~os.O_NOFOLLOW)  # a descriptor of the daemon's
            try:
                return asdict(materialise.materialise(view, bytes.fromhex(request["path"]), fd, owner=owner_outside()))
            finally:
                os.close(fd)
