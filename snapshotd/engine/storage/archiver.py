"""The child process (see child.py) that owns the repository for writing: archives snapshots, collects garbage, checks
and repairs.

One process, one request at a time: so an object is never collected while it is written, and the daemon answers tool
calls undisturbed. It reads sealed layers, which never change, and the spool, which it never writes.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from snapshotd.engine.storage.child import NICE, EngineChild, Progress
from snapshotd.engine.storage.records import Record, decode_any
from snapshotd.errors import DataLoss, InternalError, NotFound, VersionMismatch
from snapshotd.failpoints import hit
from snapshotd.layers.store import LayerStore
from snapshotd.repo.base import (
    CheckResult,
    Maintenance,
    Peers,
    Reclaimed,
    RepairResult,
    Repository,
    RepositoryWriter,
    Roots,
    SharedMaintenance,
)
from snapshotd.repo.spool import Spool
from snapshotd.trees import archive, diff
from snapshotd.trees.stored_view import StoredView
from snapshotd.types import BlobID, FileChanges, ImageID, LayerID, RecordID, SnapshotID, TrajectoryID, TreeID


@dataclass(frozen=True, slots=True)
class ArchivedTree:
    """A snapshot's tree, the space its own layers take (in the order given), and the warnings."""

    tree: TreeID
    layer_bytes: tuple[int, ...]
    warnings: tuple[str, ...]


class Archiver:
    """The daemon's end. Nothing is durable before `flush` has returned; after an error since the last flush, everything
    since then must be archived again. Thread-safe."""

    def __init__(self, command: list[str]) -> None:
        self._child = EngineChild(command)
        self._epochs: set[str] = set()
        """Epochs of the child that archived data for the next flush."""

    def begin(self) -> None:
        """Forget everything archived before: the next flush is not about it."""
        self._epochs.clear()

    def _archive(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = self._child.ask(request)
        self._epochs.add(answer["epoch"])
        return answer

    @property
    def pid(self) -> int | None:
        return self._child.pid

    def archive_image(self, image: ImageID) -> TreeID:
        """Archive an image's root."""
        return TreeID(self._archive({"op": "image", "image": image})["tree"])

    def archive_tree(self, layers: Sequence[LayerID], parent: TreeID, outputs: Sequence[BlobID]) -> ArchivedTree:
        """Archive the tree that `layers` (oldest first) make of `parent`, and outputs from the spool. NotFound: a layer
        is gone."""
        answer = self._archive({"op": "tree", "layers": list(layers), "parent": parent, "outputs": list(outputs)})
        return ArchivedTree(TreeID(answer["tree"]), tuple(answer["bytes"]), tuple(answer["warnings"]))

    def archive_record(self, data: bytes, previous: RecordID | None) -> RecordID:
        """Archive a record."""
        encoded = base64.b64encode(data).decode()
        return RecordID(self._archive({"op": "record", "data": encoded, "previous": previous})["record"])

    def flush(self) -> None:
        """Return when everything archived since `begin`, or the last flush, is durable. InternalError: some of it is
        not there any more, for a write failed or the process was killed meanwhile."""
        try:
            self._child.ask({"op": "flush", "epochs": list(self._epochs)})
        finally:
            self._epochs.clear()

    def count(self, before: TreeID, after: TreeID) -> FileChanges:
        """Number of files that differ between two stored trees."""
        return FileChanges(**self._child.ask({"op": "count", "before": before, "after": after}))

    def prune(
        self,
        roots: Roots,
        known: Sequence[SnapshotID],
        removed: Collection[TrajectoryID],
        *,
        grace_s: float,
        dry_run: bool,
        progress: Progress,
        peers: Peers | None = None,
    ) -> Reclaimed:
        """Collect the objects that `roots` do not reach (dry run: only count them). Packs that the index does not know
        stay if one has the record of a snapshot that is not `known`, of a trajectory that was not `removed`. `peers`: of a
        fleet."""
        request = {
            "op": "prune",
            "roots": _describe(roots),
            "known": known,
            "removed": list(removed),
            "now": time.time(),
        }
        told = {} if peers is None else {"peers": asdict(peers)}
        answer = self._child.ask({**request, **told, "grace_s": grace_s, "dry_run": dry_run}, progress)
        return Reclaimed(**answer)

    def check(self, roots: Roots, *, read_data: bool, progress: Progress) -> CheckResult:
        """Verify the repository and everything that `roots` reach."""
        return CheckResult.from_json(
            self._child.ask({"op": "check", "roots": _describe(roots), "read_data": read_data}, progress)
        )

    def repair(self, progress: Progress) -> RepairResult:
        """Rebuild the damaged parts of the repository itself."""
        answer = self._child.ask({"op": "repair"}, progress)
        return RepairResult(tuple(answer["actions"]), tuple(answer["gone"]))

    def publish(self, roots: Roots, peers: Peers) -> int:
        """In a fleet: let the other nodes know what is stored. `roots`: what is to be readable there. See
        `SharedMaintenance.publish`."""
        request = {"op": "publish", "roots": _describe(roots), "peers": asdict(peers), "now": time.time()}
        return int(self._child.ask(request)["segment"])

    def merge(self, peers: Peers, *, ahead: bool = False) -> None:
        """In a fleet: take over what the other nodes have stored. `ahead`: see `SharedMaintenance.merge`."""
        self._child.ask({"op": "merge", "peers": asdict(peers), "ahead": ahead})

    def hurry(self, *, waited_for: bool) -> None:
        """Work at the daemon's own priority while a caller waits, else at low priority."""
        self._child.prioritise(0 if waited_for else NICE)

    def close(self) -> None:
        """End the process. Data that were not flushed are archived again after the next start. Idempotent."""
        self._child.close()


def count_between(repository: Repository, before: TreeID, after: TreeID) -> FileChanges:
    """Number of files that differ between two stored trees. DataLoss, NotFound: a part of one cannot be read."""
    with StoredView(repository, before) as old, StoredView(repository, after) as new:
        return diff.count(diff.diff(old, new))


def _describe(roots: Roots) -> dict[str, Any]:
    return {"trees": dict(roots.trees), "contents": dict(roots.contents), "records": dict(roots.records)}


_ARCHIVING = ("image", "tree", "record")


class ArchiverService:
    """The child's end."""

    def __init__(self, maintenance: Maintenance, store: LayerStore, spool: Spool) -> None:
        self._maintenance, self._store, self._spool = maintenance, store, spool

    @property
    def _writer(self) -> RepositoryWriter:
        return self._maintenance.writer()

    def __call__(self, request: dict[str, Any], progress: Progress) -> dict[str, Any]:
        handler = getattr(self, "_do_" + request["op"])
        result: dict[str, Any] = handler(request, progress)
        if request["op"] in _ARCHIVING:
            result["epoch"] = self._writer.epoch
        return result

    def _do_image(self, request: dict[str, Any], _: Progress) -> dict[str, Any]:
        fd = self._store.read_image(ImageID(request["image"]))
        try:
            return {"tree": archive.apply(self._writer, fd, None, salt=b"", marks=False, names=self._store.marks).tree}
        finally:
            os.close(fd)

    def _do_tree(self, request: dict[str, Any], _: Progress) -> dict[str, Any]:
        tree = TreeID(request["parent"])
        sizes: list[int] = []
        warnings: list[str] = []
        for layer in request["layers"]:
            fd = self._store.read_upper(LayerID(layer))
            try:
                applied = archive.apply(self._writer, fd, tree, salt=layer.encode(), names=self._store.marks)
            finally:
                os.close(fd)
            tree = applied.tree
            sizes.append(applied.bytes)
            warnings.extend(applied.warnings)
        hit("engine.archive.tree")
        for blob in request["outputs"]:
            self._output(BlobID(blob))
        return {"tree": tree, "bytes": sizes, "warnings": warnings}

    def _output(self, blob: BlobID) -> None:
        if self._writer.contains(blob):
            return
        try:
            pieces: Iterator[bytes] = self._spool.load_blob(blob)
        except NotFound:  # it was stored before, and counts as garbage by now: that can be read until it is deleted
            pieces = self._writer.load(blob)
        rest = b""

        def read(size: int) -> bytes:
            nonlocal rest
            data = rest or next(pieces, b"")
            rest = data[size:]
            return data[:size]

        saved = self._writer.save_content(read)
        if saved != blob:
            raise NotFound(f"output {blob} is not in the spool: another content has its name")

    def _do_record(self, request: dict[str, Any], _: Progress) -> dict[str, Any]:
        previous = request["previous"]
        record = self._writer.save_record(base64.b64decode(request["data"]), RecordID(previous) if previous else None)
        hit("engine.archive.record")
        return {"record": record}

    def _do_flush(self, request: dict[str, Any], _: Progress) -> dict[str, Any]:
        writer = self._writer
        if not {writer.epoch}.issuperset(request["epochs"]):
            raise InternalError(
                "some of what was archived was given up with a write that failed; all of it is archived again"
            )
        writer.flush()
        hit("engine.archive.flushed")
        return {}

    def _do_count(self, request: dict[str, Any], _: Progress) -> dict[str, Any]:
        return asdict(count_between(self._writer, TreeID(request["before"]), TreeID(request["after"])))

    def _do_prune(self, request: dict[str, Any], progress: Progress) -> dict[str, Any]:
        known, removed = frozenset(request["known"]), frozenset(request["removed"])

        def wanted(document: bytes) -> bool:
            try:
                record = decode_any(document)
            except (DataLoss, VersionMismatch):
                return True
            if not isinstance(record, Record):
                return False
            return record.snapshot.id not in known and record.snapshot.trajectory not in removed

        return asdict(
            self._maintenance.collect(
                Roots(**request["roots"]),
                grace_s=request["grace_s"],
                now=request["now"],
                dry_run=request["dry_run"],
                progress=progress,
                wanted=wanted,
            )
        )

    def _do_check(self, request: dict[str, Any], progress: Progress) -> dict[str, Any]:
        return self._maintenance.check(
            Roots(**request["roots"]), read_data=request["read_data"], progress=progress
        ).to_json()

    def _do_repair(self, _: dict[str, Any], progress: Progress) -> dict[str, Any]:
        return asdict(self._maintenance.repair(progress))


class SharedArchiverService(ArchiverService):
    """The child's end in a daemon that is a node of a fleet."""

    def __init__(self, maintenance: SharedMaintenance, store: LayerStore, spool: Spool, peers: Peers) -> None:
        """`peers`: changed by each request that tells of the nodes."""
        super().__init__(maintenance, store, spool)
        self._shared, self._peers = maintenance, peers

    def __call__(self, request: dict[str, Any], progress: Progress) -> dict[str, Any]:
        if "peers" in request:
            self._peers.segments = request["peers"]["segments"]
            self._peers.oldest_pin_s = request["peers"]["oldest_pin_s"]
        return super().__call__(request, progress)

    def _do_publish(self, request: dict[str, Any], _: Progress) -> dict[str, Any]:
        return {"segment": self._shared.publish(Roots(**request["roots"]), now=request["now"])}

    def _do_merge(self, request: dict[str, Any], _: Progress) -> dict[str, Any]:
        self._shared.merge(ahead=request["ahead"])
        return {}
