"""Makes a golden repository and catalog of the present format: `python -m tests.golden.make FOLDER`, once for every new
format.

What it holds is said in `expected.json`, read back with the version that wrote it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from snapshotd.catalog.base import Catalog
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.storage import records
from snapshotd.repo.base import Repository, TreeEntry
from snapshotd.repo.key import load_key
from snapshotd.repo.reading.reader import PackReader
from snapshotd.repo.spool import Spool
from snapshotd.repo.writing.writer import PackRepository
from snapshotd.store.base import Store
from snapshotd.store.open import open_store
from snapshotd.trees.stored_view import StoredView
from snapshotd.trees.view import Directory, View, join
from snapshotd.types import BlobID, Kind, Message, Snapshot, SnapshotState, TreeID
from tests import stored_trees
from tests.records import begin, follow, fork, make_call, make_image

_LARGE = b"".join(random.Random(7).randbytes(64) * 30 + b"%d\n" % n for n in range(1000))
"""Two megabytes in several chunks that take little space in a pack."""


def store_of(folder: Path) -> Store:
    """The packs of a golden repository."""
    return open_store((folder / "store").as_uri())


def make(folder: Path) -> None:
    """Fill an empty folder; its path must be absolute."""
    (folder / "store").mkdir()
    spool = Spool(folder)
    with spool.writer() as blob:
        blob.write(b"an output that is not archived yet\n" * 100)
        kept = blob.save()
    key = load_key(folder)
    catalog = SqliteCatalog(folder / "catalog.db")
    with closing(PackRepository(store_of(folder), folder / "index.db", key)) as repository:
        image = make_image(tree=stored_trees.save(repository, {b"etc": {b"passwd": b"root:x:0:0\n"}, b"usr": {}}))
        catalog.images.add(image)
        for one in _history(catalog, repository, kept):
            line = catalog.trajectories.get(one.trajectory)
            tree = stored_trees.save(repository, _plan(repository, one.seq + (10 if line.forked_from else 0)))
            stored = replace(one, tree=tree, state=SnapshotState.STORED)
            record = repository.save_record(
                records.encode(stored, line, image, catalog.conversations.own(one.id)), None
            )
            catalog.snapshots.set_stored(one.id, tree, record)
            repository.flush()
    catalog.close()
    spool.close()
    (folder / "expected.json").write_text(json.dumps(read(folder), sort_keys=True) + "\n")


def _history(catalog: Catalog, repository: PackRepository, kept: BlobID) -> list[Snapshot]:
    """Three snapshots and a fork of the second; all captured. The last one's output is in the spool."""
    (image,) = catalog.images.list()
    line, first = begin(image, "golden")
    first = replace(
        first, call=make_call("start", output=None, stdout=repository.save_bytes(b"printed\n"), stderr=None)
    )
    catalog.trajectories.add([(line, first)])
    taken = [first]
    output = None
    for number in range(2):
        output = repository.save_bytes(b"".join(b"%d %d\n" % (line, line + number % 2) for line in range(500)), output)
        call = make_call(f"tool {number}", output=output, stdout=None, stderr=None)
        messages = [Message("user", f"message {number} \udcff"), Message("tool", {"n": number})]
        one = follow(taken[-1], messages=len(messages), call=call)
        catalog.snapshots.commit(one, messages, expected_head=taken[-1].id)
        taken.append(one)
    catalog.refs.tag(taken[1].id, "kept")
    branch = fork(taken[1], line, "branch")
    catalog.trajectories.add([(branch, None)])
    one = follow(taken[1], branch.id, call=make_call(output=None, stdout=None, stderr=None))
    catalog.snapshots.commit(one, [], expected_head=taken[1].id)
    waiting = follow(taken[-1], call=make_call(output=kept, stdout=None, stderr=None))
    catalog.snapshots.commit(waiting, [], expected_head=taken[-1].id)
    return [*taken, one]


def _plan(repository: PackRepository, number: int) -> stored_trees.Plan:
    """A tree with an entry of every kind; `number` decides what changed."""

    def file(data: bytes, **more: Any) -> TreeEntry:
        return stored_trees.file(repository, data, **more)

    own = stored_trees.OWN._replace(mode=0o1777, uid=number, mtime_ns=(1 << 62) + 1)
    linked = file(b"two names\n", link=77, nlink=2, mode=0o4755, uid=1000, gid=65534)
    return {
        b"changing": b"version %d\n" % number + b"the rest stays as it is\n" * 200,
        b"large": _LARGE[:900_000] + b"%d" % number + _LARGE[900_000:],
        b"empty": b"",
        b"hard": linked,
        b"link": linked,
        b"\xff\nname": file(b"odd name", mtime_ns=-1_234_567_890_123_456_789),
        b"soft": TreeEntry(b"", Kind.SYMLINK, 0o777, 0, 0, 1, target=b"../\xfe"),
        b"pipe": TreeEntry(b"", Kind.FIFO, 0o600, 1, 2, 3),
        b"null": TreeEntry(b"", Kind.CHAR_DEVICE, 0o666, 0, 0, 4, rdev=os.makedev(1, 3)),
        b"disk": TreeEntry(b"", Kind.BLOCK_DEVICE, 0o660, 0, 6, 5, rdev=os.makedev(259, 70_000)),
        b"socket": TreeEntry(b"", Kind.SOCKET, 0o755, 0, 0, 6),
        b"attributes": file(
            b"x", xattrs=((b"security.capability", bytes(20)), (b"user.a", b""), (b"user.b", b"\0\xff" * 300))
        ),
        b"sparse": file(b"dataend", size=1 << 40, extents=((4096, 4), ((1 << 40) - 3, 3))),
        b"d": {b"": own, **{b"%03d" % n: b"%d" % n for n in range(9)}},
        b"deep": {b"a" * 255: {b"b" * 255: {b"c": {}}}},
    }


def read(folder: Path) -> dict[str, Any]:
    """What a golden folder holds, in JSON: every snapshot with its row, record and tree."""
    catalog = SqliteCatalog(folder / "catalog.db")
    repository = PackReader(store_of(folder), folder / "index.db", load_key(folder))
    try:
        return {
            "trajectories": [f"{t.id} {t.name} {t.head} {t.forked_from}" for t in catalog.trajectories.list()],
            "snapshots": {s.id: _snapshot(catalog, repository, s) for s in catalog.snapshots.all()},
            "image": [tree_of(repository, i.tree) for i in catalog.images.list() if i.tree is not None],
        }
    finally:
        repository.close()
        catalog.close()


def _snapshot(catalog: Catalog, repository: Repository, one: Snapshot) -> dict[str, Any]:
    record = catalog.snapshots.record(one.id)
    return {
        "row": f"{one.parent} {one.trajectory} {one.seq} {one.state} {one.call.name} {one.call.status} {one.tags} {one.messages}",
        "outputs": {
            blob: hashlib.sha256(b"".join(repository.load(blob))).hexdigest()
            for blob in (one.call.output, one.call.stdout, one.call.stderr)
            if blob is not None and repository.contains(blob)
        },
        "conversation": [[m.role, ascii(m.content)] for m in catalog.conversations.read(one.id)],
        "record": None if record is None else hashlib.sha256(repository.load_record(record)).hexdigest(),
        "tree": None if one.tree is None else tree_of(repository, one.tree),
    }


def tree_of(repository: Repository, tree: TreeID) -> dict[str, list[Any]]:
    """Every path (bytes in base64) with all that a tree says of it; contents as digests of their data."""
    found: dict[str, list[Any]] = {}
    with StoredView(repository, tree) as view:
        pending: list[tuple[bytes, Directory]] = [(b"", view.directory(b""))]
        while pending:
            path, directory = pending.pop()
            entry = view.entry_of(directory)
            found[_text(path)] = [
                entry.kind,
                entry.mode,
                entry.uid,
                entry.gid,
                entry.mtime_ns,
                _hex(view.directory_xattrs(directory)),
            ]
            for child in view.children(directory):
                below = join(path, child.name)
                if child.entry.kind is Kind.DIRECTORY:
                    pending.append((below, view.enter(directory, child.name)))
                else:
                    found[_text(below)] = _leaf(view, child)
    return found


def _leaf(view: View, child: Any) -> list[Any]:
    e = child.entry
    facts = [e.kind, e.mode, e.uid, e.gid, e.mtime_ns, e.size, e.rdev, e.nlink, _hex(view.xattrs_of(child))]
    if e.kind is Kind.SYMLINK:
        return [*facts, view.readlink_of(child).hex()]
    return [*facts, _digest(view, child)] if e.kind is Kind.FILE else facts


def _digest(view: View, child: Any) -> str:
    """Of a file's data and where it lies."""
    digest = hashlib.sha256()
    fd = view.open_child(child)
    try:
        at, size = 0, child.entry.size
        while at < size:
            try:
                at = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:
                break  # only a hole follows
            data = os.pread(fd, 4096, at).rstrip(b"\0")  # how far a page is data is the file system's affair
            if data:
                digest.update(b"%d %d " % (at, len(data)) + data)
            at = (at // 4096 + 1) * 4096
    finally:
        os.close(fd)
    return digest.hexdigest()


def _hex(xattrs: Any) -> dict[str, str]:
    return {name.decode(): value.hex() for name, value in sorted(xattrs.items())}


def _text(path: bytes) -> str:
    return base64.b64encode(path).decode()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
