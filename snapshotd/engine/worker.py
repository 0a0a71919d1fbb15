"""A child process for work that would hold Python's interpreter lock: counting changed files and merging layers.

The daemon answers tool calls in a few milliseconds; one busy thread in its process would add the interpreter's switch interval to every
system call of a pivot. So the work is done here, at idle priority: one JSON request a line in, one answer a line out, in order.
The child dies with the daemon. It only reads layers and writes into the one new layer directory it is told.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from snapshotd.errors import BY_CODE, InternalError, SnapshotdError
from snapshotd.kernel import syscalls as sc
from snapshotd.layers import diff, links, merge
from snapshotd.layers.store import LayerStore
from snapshotd.types import FileChanges, ImageID, LayerID, Stack


def _stack_json(stack: Stack) -> dict[str, Any]:
    return {"image": stack.image, "layers": list(stack.layers)}


def _stack(value: dict[str, Any]) -> Stack:
    return Stack(ImageID(value["image"]), tuple(LayerID(layer) for layer in value["layers"]))


class Worker:
    """The daemon's end. Starts the child at the first request and again if it died. Thread-safe; requests are served one by one."""

    def __init__(self, layers_root: Path, kind: str) -> None:
        self._command = [sys.executable, "-m", "snapshotd.engine.worker", str(layers_root), kind]
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def count(self, before: Stack, after: Stack) -> FileChanges:
        """How many files differ. NotFound when a layer was removed meanwhile."""
        answer = self._ask({"op": "count", "before": _stack_json(before), "after": _stack_json(after)})
        return FileChanges(**answer)

    def merge(self, layers: tuple[LayerID, ...], target: LayerID) -> None:
        """Merge adjacent layers, newest first, into the empty layer `target`."""
        self._ask({"op": "merge", "layers": list(layers), "target": target})

    def links(self, key: str, *, is_image: bool) -> list[links.Group]:
        """The hard link groups inside one layer or image. NotFound when it was removed."""
        answer = self._ask({"op": "links", "key": key, "image": is_image})
        return [tuple(base64.b64decode(path) for path in group) for group in answer["groups"]]

    def close(self) -> None:
        """End the child. Idempotent."""
        with self._lock:
            if self._child is not None:
                self._end(self._child)
                self._child = None

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            child = self._child
            if child is None or child.poll() is not None:
                child = self._child = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                child.stdin.write(line)
                child.stdin.flush()
                answer = child.stdout.readline()
            except BrokenPipeError:
                answer = b""
            if not answer.endswith(b"\n"):
                self._end(child)
                self._child = None
                raise InternalError(f"the worker process ended while it was asked to {request['op']}; the daemon's log says why")
        result: dict[str, Any] = json.loads(answer)
        if "error" in result:
            raise BY_CODE.get(result["error"]["code"], InternalError)(result["error"]["message"])
        return result

    @staticmethod
    def _end(child: subprocess.Popen[bytes]) -> None:
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()
        child.kill()
        child.wait()


def _serve(store: LayerStore, request: dict[str, Any]) -> dict[str, Any]:
    if request["op"] == "count":
        with store.view(_stack(request["before"])) as before, store.view(_stack(request["after"])) as after:
            changes = diff.count(diff.diff(before, after))
        return {"added": changes.added, "changed": changes.changed, "deleted": changes.deleted, "bytes": changes.bytes}
    if request["op"] == "links":
        fd = store.read_image(ImageID(request["key"])) if request["image"] else store.read_upper(LayerID(request["key"]))
        try:
            return {"groups": [[base64.b64encode(path).decode() for path in group] for group in links.groups(fd)]}
        finally:
            os.close(fd)
    fds = [store.read_upper(LayerID(layer)) for layer in (*request["layers"], request["target"])]
    try:
        merge.merge(fds[:-1], fds[-1])
    finally:
        for fd in fds:
            os.close(fd)
    return {}


def main(layers_root: str, kind: str) -> None:
    """Serve requests from standard input until it closes."""
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(10)
    store = LayerStore(Path(layers_root), kind)
    source: IO[bytes] = sys.stdin.buffer
    for line in source:
        try:
            answer = _serve(store, json.loads(line))
        except SnapshotdError as exc:
            answer = {"error": {"code": exc.code, "message": exc.message}}
        except OSError as exc:
            answer = {"error": {"code": "InternalError", "message": f"worker: {exc}"}}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
