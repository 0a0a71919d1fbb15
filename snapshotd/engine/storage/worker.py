"""The child process (see child.py) that counts changed files and merges layers.

It only reads layers and writes into the one new layer directory it is told.
"""

from __future__ import annotations

import base64
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from snapshotd.engine.storage.child import EngineChild, serve
from snapshotd.kernel.abilities import TRUSTED, Marks
from snapshotd.layers import links, merge
from snapshotd.layers.store import LayerStore
from snapshotd.layers.view import open_stack
from snapshotd.trees import diff
from snapshotd.types import FileChanges, ImageID, LayerID, Stack


def _stack(value: dict[str, Any]) -> Stack:
    return Stack(ImageID(value["image"]), tuple(LayerID(layer) for layer in value["layers"]))


class Worker:
    """The daemon's end. Thread-safe; requests are served one by one."""

    def __init__(self, layers_root: Path, kind: str, marks: Marks = TRUSTED) -> None:
        arguments = [str(layers_root), kind, marks.prefix.decode()]
        self._child = EngineChild([sys.executable, "-m", "snapshotd.engine.storage.worker", *arguments])

    def count(self, before: Stack, after: Stack) -> FileChanges:
        """Number of files that differ. NotFound when a layer was removed meanwhile."""
        answer = self._child.ask({"op": "count", "before": asdict(before), "after": asdict(after)})
        return FileChanges(**answer)

    def merge(self, layers: tuple[LayerID, ...], target: LayerID) -> int:
        """Merge adjacent layers, newest first, into the empty layer `target`. Returns the bytes it occupies."""
        return int(self._child.ask({"op": "merge", "layers": list(layers), "target": target})["bytes"])

    def links(self, key: str, *, is_image: bool) -> list[links.Group]:
        """The hard link groups inside one layer or image. NotFound when it was removed."""
        answer = self._child.ask({"op": "links", "key": key, "image": is_image})
        return [tuple(base64.b64decode(path) for path in group) for group in answer["groups"]]

    def close(self) -> None:
        """End the child. Idempotent."""
        self._child.close()


def _serve(store: LayerStore, request: dict[str, Any]) -> dict[str, Any]:
    if request["op"] == "count":
        with (
            open_stack(store, _stack(request["before"])) as before,
            open_stack(store, _stack(request["after"])) as after,
        ):
            changes = diff.count(diff.diff(before, after))
        return asdict(changes)
    if request["op"] == "links":
        fd = (
            store.read_image(ImageID(request["key"])) if request["image"] else store.read_upper(LayerID(request["key"]))
        )
        try:
            return {"groups": [[base64.b64encode(path).decode() for path in group] for group in links.groups(fd)]}
        finally:
            os.close(fd)
    fds = [store.read_upper(LayerID(layer)) for layer in (*request["layers"], request["target"])]
    try:
        return {"bytes": merge.merge(fds[:-1], fds[-1], store.marks)}
    finally:
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    opened = LayerStore(Path(sys.argv[1]), sys.argv[2], marks=Marks(sys.argv[3].encode()))
    serve(lambda request, _: _serve(opened, request))
