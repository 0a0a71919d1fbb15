"""A state directory without daemon, for tests of export and import: a real catalog, layer store and spool, a repository
in memory."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from snapshotd.catalog.base import SnapshotRow
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.base import Imported
from snapshotd.engine.context import Context
from snapshotd.engine.pins import Pins
from snapshotd.engine.transfer.bundle import StoredSource, _Writer, export_bundle
from snapshotd.engine.transfer.import_layers import BundleLimits
from snapshotd.engine.transfer.imports import import_bundle
from snapshotd.formats.tar_reader import TarReader
from snapshotd.kernel import files
from snapshotd.layers.store import LayerStore
from snapshotd.layers.view import open_stack
from snapshotd.repo.spool import Spool
from snapshotd.trees import archive
from snapshotd.trees.stored_view import StoredView
from snapshotd.trees.view import View
from snapshotd.types import (
    BlobID,
    Image,
    ImageID,
    Kind,
    Limits,
    Message,
    Network,
    SandboxSpec,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Trajectory,
    TreeID,
)
from tests.memory_repository import MemoryRepository
from tests.records import begin, follow, fork, make_call, make_image

POLICY = SandboxSpec(ImageID(""), "runc", Network.NONE, Limits(1 << 28, 0.25, 33))
Manifest = dict[bytes, tuple[Any, ...]]


def manifest(view: View) -> Manifest:
    """Everything a view shows, by path; names of one file as the first of them."""
    found: Manifest = {b"": (*_entry(view, view.directory(), b""), _attributes(view, b""))}
    links: dict[tuple[int, int], bytes] = {}
    for path, entry in view.walk():
        if entry.kind is not Kind.DIRECTORY and entry.nlink > 1 and links.setdefault(entry.inode, path) != path:
            found[path] = ("link", links[entry.inode])
            continue
        facts: tuple[Any, ...] = (entry.kind, entry.mode, entry.uid, entry.gid, entry.mtime_ns, entry.rdev)
        content: Any = None
        if entry.kind is Kind.FILE:
            content = (entry.size, _content(view, path))
        elif entry.kind is Kind.SYMLINK:
            content = view.readlink(path)
        found[path] = (*facts, content, _attributes(view, path))
    return found


def _entry(view: View, directory: Any, path: bytes) -> tuple[Any, ...]:
    entry = view.entry_of(directory)
    return entry.kind, entry.mode, entry.uid, entry.gid, entry.mtime_ns


def _attributes(view: View, path: bytes) -> tuple[tuple[bytes, bytes], ...]:
    return tuple(sorted(view.xattrs(path).items()))


def _content(view: View, path: bytes) -> str:
    fd = view.open(path)
    digest = hashlib.sha256()
    with open(fd, "rb") as f:
        while piece := f.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


class World:
    """One state directory."""

    def __init__(self, directory: Path, *, catalog_file: bool = False) -> None:
        (directory / "layers").mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.catalog = SqliteCatalog(directory / "catalog" if catalog_file else ":memory:")
        self.repo = MemoryRepository()
        self.store = LayerStore(directory / "layers", "plain")
        self.spool = Spool(directory / "spool")
        self.pins = Pins(self.catalog.snapshots.get)
        self.context = cast(
            Context,
            SimpleNamespace(
                state_dir=directory,
                catalog=self.catalog,
                repo=self.repo,
                store=self.store,
                spool=self.spool,
                pins=self.pins,
            ),
        )
        self.images = 0

    def close(self) -> None:
        self.catalog.close()
        self.store.close()
        self.spool.close()

    def base_image(self, env: tuple[tuple[str, str], ...], workdir: str) -> Image:
        self.images += 1
        image = make_image(f"imported-{self.images}", env=env, workdir=workdir, source_id=f"empty {env} {workdir}")
        (self.directory / "layers/images" / image.id / "root").mkdir(parents=True)
        self.catalog.images.add(image)
        return image

    # -- what is exported ----------------------------------------------------------------------------------------------

    def tree(self, root: Path) -> TreeID:
        """Store a directory."""
        fd = os.open(root, files.DIR_FLAGS)
        try:
            return archive.apply(self.repo, fd, None, salt=b"s" * 32, marks=False).tree
        finally:
            os.close(fd)

    def record(
        self, image: Image, trajectories: Sequence[Trajectory], snapshots: Sequence[Snapshot], new: bool = True
    ) -> None:
        rows, done = [], {None: 0}
        for snapshot in snapshots:
            before = done[snapshot.parent]
            messages = tuple(Message("user", {"n": number}) for number in range(before, snapshot.messages))
            rows.append(SnapshotRow(snapshot, messages))
            done[snapshot.id] = snapshot.messages
        self.catalog.others.restore([image] if new else [], trajectories, rows)

    def line(self, root: Path, steps: Sequence[Callable[[Path], object]], name: str | None = "line") -> list[Snapshot]:
        """A trajectory whose n-th snapshot has the files of `root` after the n-th step; even ones add a message and
        have outputs."""
        image = make_image("the image", env=(("PATH", "/x"), ("LANG", "C")), workdir="/home")
        trajectory, snapshot = begin(image, name)
        found: list[Snapshot] = []
        for number, step in enumerate(steps):
            step(root)
            if number:
                snapshot = follow(snapshot, messages=number % 2)
            stderr = self.output(b"") if number == 2 else None
            outputs = {"output": None, "stdout": self.output(b"out %d" % (number // 2)), "stderr": stderr}
            snapshot = replace(
                snapshot, state=SnapshotState.STORED, tree=self.tree(root), call=make_call(f"step-{number}", **outputs)
            )
            found.append(snapshot)
        self.record(image, [replace(trajectory, head=found[-1].id)], found)
        return found

    def forked(self, origin: Snapshot, root: Path) -> Snapshot:
        """The first snapshot of a fork, with the files of `root`."""
        trajectory = fork(origin, self.catalog.trajectories.get(origin.trajectory), "forked")
        outputs = {"output": None, "stdout": None, "stderr": None}
        snapshot = follow(
            origin, trajectory.id, tree=self.tree(root), state=SnapshotState.STORED, call=make_call("first", **outputs)
        )
        self.catalog.others.restore([], [replace(trajectory, head=snapshot.id)], [SnapshotRow(snapshot)])
        return snapshot

    def output(self, data: bytes) -> BlobID:
        return self.repo.save_bytes(data)

    def export(self, snapshots: Sequence[Snapshot], *, since: Snapshot | None = None, compress: bool = False) -> bytes:
        out = io.BytesIO()
        source = StoredSource(self.catalog, self.repo, lambda snapshot: self.catalog.images.find(snapshot.stack.image))
        assert export_bundle(snapshots, source, out.write, since=since, compress=compress) == ()
        return out.getvalue()

    def stored(self, snapshot: Snapshot) -> Manifest:
        assert snapshot.tree is not None
        return manifest(StoredView(self.repo, snapshot.tree))

    # -- what is imported ----------------------------------------------------------------------------------------------

    def take(self, data: bytes, name: str | None = None, limits: BundleLimits | None = None) -> Imported:
        before = len(os.listdir("/proc/self/fd"))
        try:
            return import_bundle(
                self.context,
                io.BytesIO(data).read,
                name=name,
                policy=POLICY,
                base_image=self.base_image,
                progress=lambda _: None,
                limits=limits,
            )
        finally:
            assert len(os.listdir("/proc/self/fd")) <= before, "a descriptor leaked"

    def shown(self, snapshot_id: SnapshotID) -> Manifest:
        """An imported snapshot's files through its layers."""
        with open_stack(self.store, self.catalog.snapshots.get(snapshot_id).stack) as view:
            return manifest(view)

    def archive_all(self) -> None:
        """What the archive does: each captured snapshot's own layers on its base's tree."""
        for snapshot_id in self.catalog.snapshots.unstored():
            snapshot = self.catalog.snapshots.get(snapshot_id)
            tree = None if snapshot.base is None else self.catalog.snapshots.get(snapshot.base).tree
            for layer in reversed(snapshot.stack.layers[: snapshot.own_layers]):
                fd = self.store.read_upper(layer)
                tree = archive.apply(self.repo, fd, tree, salt=b"s" * 32).tree
                os.close(fd)
            assert tree is not None
            self.catalog.snapshots.set_stored(snapshot_id, tree, self.repo.save_record(snapshot_id.encode()))

    def is_empty(self) -> bool:
        return (
            not self.catalog.trajectories.list() and not list(self.catalog.snapshots.all()) and not self.store.layers()
        )


# -- forging -----------------------------------------------------------------------------------------------------------


def members(data: bytes) -> list[tuple[bytes, bytes]]:
    """The files of a bundle that is not compressed, without its trailer."""
    reader = TarReader(io.BytesIO(data))
    return [(member.path, b"".join(reader.pieces())) for member in reader][:-1]


def forged(content: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A bundle of any files, with the right checksum."""
    out = io.BytesIO()
    writer = _Writer(out.write, compress=False)
    for name, data in content:
        writer.file(name, data)
    writer.finish()
    return out.getvalue()


# -- trees -------------------------------------------------------------------------------------------------------------


def first(root: Path) -> None:
    """A tree with a bit of everything."""
    for name in ("a/b/c", "d", "gone/deeper", "becomes-file", "workspace"):
        (root / name).mkdir(parents=True)
    (root / "a/file").write_text("one")
    (root / "a/b/c/deep").write_bytes(b"x" * 3000)
    (root / "gone/deeper/x").write_text("x")
    (root / "becomes-file/x").write_text("x")
    (root / "becomes-dir").write_text("x")
    (root / ".wh.plain").write_text("not a mark")
    (root / "link").symlink_to("a/file")
    os.link(root / "a/file", root / "a/b/same")
    os.mkfifo(root / "d/pipe")
    with open(root / "sparse", "wb") as f:
        os.pwrite(f.fileno(), b"data", 1 << 20)
        os.ftruncate(f.fileno(), 3 << 20)
    os.setxattr(root / "d", "user.of", b"d")
    (root / "d").chmod(0o1711)
    os.utime(root / "a/b/c/deep", ns=(0, -1_500_000_000))


def second(root: Path) -> None:
    """Whiteouts, replaced kinds, a torn link group, metadata only, names that look like marks."""
    shutil.rmtree(root / "gone")
    (root / ".wh.plain").unlink()
    (root / ".wh.other").write_text("not a mark either")
    shutil.rmtree(root / "becomes-file")
    (root / "becomes-file").write_text("now")
    (root / "becomes-dir").unlink()
    (root / "becomes-dir").mkdir()
    (root / "becomes-dir/x").write_text("now")
    (root / "a/b").rename(root / "d/moved")
    (root / "d").chmod(0o755)
    os.setxattr(root, "user.root", b"changed")
    os.utime(root, ns=(0, 12345))


def nothing(root: Path) -> None:
    """A step that changes no file."""


def third(root: Path) -> None:
    (root / "a/file").write_text("three")
    (root / "gone").mkdir()
    (root / "gone/new").write_text("another directory of that name")
    os.link(root / "gone/new", root / "workspace/new")


STEPS = (first, second, nothing, third)
