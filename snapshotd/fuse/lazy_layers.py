"""The root of the lazy lower mount: layers by name, made when they are asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial

from snapshotd.fuse.folders import FOREVER_S, Folder, Item, TreePlace
from snapshotd.trees.view import View
from snapshotd.types import TreeID

_NAME = re.compile(rb"(\d{1,10})\.([0-9a-f]{64})\.([0-9a-f]{64})")

_NO_ID = 0xFFFFFFFF


def layer_name(tree: TreeID, below: TreeID, shift: int) -> bytes:
    """The name under which the mount shows the changes from `below` to `tree`, ids shifted."""
    return f"{shift}.{tree}.{below}".encode()


class LazyLayers(Folder):
    """`<shift>.<tree>.<below>`; never listed. `open_view(tree, below)` makes the view of the difference."""

    timeout_s = FOREVER_S

    def __init__(self, open_view: Callable[[TreeID, TreeID], View]) -> None:
        self._open_view = open_view

    def find(self, name: bytes) -> Item | None:
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        shift, tree, below = (part.decode() for part in match.groups())
        if int(shift) >= _NO_ID:
            return None
        return TreePlace((tree, below), partial(self._open_view, TreeID(tree), TreeID(below)), int(shift))

    def entries(self) -> Iterable[tuple[bytes, Item]]:
        return ()
