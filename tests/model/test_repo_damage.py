"""Any damage to any file of a repository: reads give what was saved or a typed error, and repair brings back all that
was not damaged."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from snapshotd.errors import DataLoss, NotFound, SnapshotdError, VersionMismatch
from snapshotd.repo.base import ObjectKind
from snapshotd.repo.format import chunks, compress, pack
from snapshotd.repo.format.ids import Identity
from snapshotd.repo.format.index import IndexEntry
from snapshotd.store.local import LocalStore
from snapshotd.types import BlobID
from tests import long
from tests.model.repo_world import KEY, Author, Opened, Saved, is_as_saved, load, open_reader, roots_of, save, silent

TYPED = (DataLoss, NotFound, VersionMismatch)


class Template:
    """A repository, and all that is known about it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.with_name("live")
        author = Author(random.Random(11))
        large = random.Random(12).randbytes(900_000)
        writer = Opened(directory)
        self.snapshots: list[Saved] = []
        for number in range(6):
            files = author.step() | {
                b"big/large": large if number < 3 else large[:500_000] + b"inserted" + large[500_000:]
            }
            self.snapshots.append(
                save(writer.repo, files, f"snapshot-{number}", self.snapshots[-1] if self.snapshots else None)
            )
            writer.repo.flush()
        self.roots = roots_of((f"snapshot-{number}", one) for number, one in enumerate(self.snapshots))
        # As a killed process leaves it: most of the index is in its log.
        shutil.copytree(directory, self.directory, ignore=shutil.ignore_patterns("*.reserve"))
        writer.close()
        reader = open_reader(directory)
        index = reader.open_index()
        assert index is not None
        self.entries: dict[bytes, IndexEntry] = {entry.id: entry for entry in index.objects()}
        self.frames = {raw: reader.frame_bytes(entry) for raw, entry in self.entries.items()}
        self.parts = {
            raw: [part for part, _ in reader.contents.chunk_list(raw).parts]
            for raw, entry in self.entries.items()
            if entry.kind == ObjectKind.LIST
        }
        self.plain = {raw: reader.plain(raw) for raw in self.entries}
        assert self.parts
        assert sum(entry.base is not None for entry in self.entries.values()) > 10
        assert len(index.packs()) == 6
        reader.close()
        everything = self.directory.rglob("*")
        self.files = sorted(
            path.relative_to(self.directory) for path in everything if path.is_file() and path.stat().st_size
        )
        assert Path("index.db-wal") in self.files

    def readable(self, directory: Path) -> set[bytes]:
        """The objects whose frames, and whatever else they need, are still somewhere in the packs."""
        packs = [path.read_bytes() for path in (directory / "store" / "packs").rglob("*") if path.is_file()]
        intact = {raw for raw, frame in self.frames.items() if any(frame in data for data in packs)}
        while True:
            fine = {
                raw
                for raw in intact
                if self.entries[raw].base in {None, *intact} and intact.issuperset(self.parts.get(raw, ()))
            }
            if fine == intact:
                return fine
            intact = fine


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return Template(tmp_path_factory.mktemp("template") / "repo")


@pytest.fixture
def copy(template: Template, tmp_path: Path) -> Path:
    return fresh(template, tmp_path)


def fresh(template: Template, directory: Path) -> Path:
    shutil.rmtree(directory / "copy", ignore_errors=True)
    shutil.copytree(template.directory, directory / "copy")
    return directory / "copy"


def content_of(directory: Path) -> dict[Path, bytes]:
    return {
        path.relative_to(directory): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.suffix != ".reserve"
    }


DAMAGE = st.tuples(
    st.sampled_from(["flip", "flip", "cut", "remove", "insert", "zero", "append", "delete", "swap", "copy-range"]),
    st.integers(0, 1 << 30),
    st.integers(0, 1 << 30),
    st.integers(0, 1 << 30),
)


def hurt(directory: Path, files: list[Path], kind: str, which: int, where: int, amount: int) -> None:
    path = directory / files[which % len(files)]
    other = directory / files[amount % len(files)]
    if not path.exists() or not other.exists():
        return
    data = path.read_bytes()
    at = where % (len(data) + 1)
    length = 1 + amount % 300
    if kind == "delete":
        path.unlink()
    elif kind == "swap":
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
    elif kind == "flip":
        path.write_bytes(data[:at] + bytes(b ^ (1 + amount % 255) for b in data[at : at + 1]) + data[at + 1 :])
    elif kind == "cut":
        path.write_bytes(data[:at])
    elif kind == "remove":
        path.write_bytes(data[:at] + data[at + length :])
    elif kind == "insert":
        path.write_bytes(data[:at] + random.Random(amount).randbytes(length) + data[at:])
    elif kind == "zero":
        path.write_bytes(data[:at] + bytes(len(data[at : at + length * 20])) + data[at + length * 20 :])
    elif kind == "append":
        path.write_bytes(data + random.Random(amount).randbytes(length))
    else:
        piece = other.read_bytes()[at : at + length]
        path.write_bytes(data[:at] + piece + data[at + len(piece) :])


def reads_are_right_or_typed(template: Template, directory: Path) -> set[bytes]:
    """What can be read, each object as it was saved."""
    try:
        reader = open_reader(directory)
    except TYPED:
        return set()
    fine: set[bytes] = set()
    for raw, plain in template.plain.items():
        try:
            assert reader.plain(raw) == plain
            fine.add(raw)
        except TYPED:
            continue
    at_once = reader.load_many([BlobID(raw.hex()) for raw in template.plain])
    assert all(found is None or found == plain for found, plain in zip(at_once, template.plain.values(), strict=True))
    for one in template.snapshots:
        try:
            assert load(reader, one.tree) == one.files
        except TYPED:
            continue
    reader.close()
    return fine


@settings(
    max_examples=long.size(8, 500),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(damages=st.lists(DAMAGE, min_size=1, max_size=3))
@example(damages=[("delete", 0, 0, 0)])
def test_any_damage_is_found_and_repaired(
    template: Template, tmp_path: Path, damages: list[tuple[str, int, int, int]]
) -> None:
    directory = fresh(template, tmp_path)
    files = [path for path in template.files if path.name != "index.db.lock"]
    for damage in damages:
        hurt(directory, files, *damage)
    assume(content_of(directory) != content_of(template.directory))
    reads_are_right_or_typed(template, directory)
    packs_hurt = {path for path in files if path.parts[0] == "store"} and any(
        not (directory / path).exists() or (directory / path).read_bytes() != (template.directory / path).read_bytes()
        for path in files
        if path.parts[0] == "store"
    )
    writer = Opened(directory)
    found = writer.check(template.roots, read_data=True, progress=silent)
    if packs_hurt:
        assert found.faults
    expected = template.readable(directory)
    result = writer.repair(silent)
    for raw in expected:
        assert writer.repo.reader.plain(raw) == template.plain[raw], raw.hex()
    lost = template.entries.keys() - expected
    assert {bytes.fromhex(one) for one in result.gone} <= lost
    for raw in lost:
        with pytest.raises(TYPED):
            writer.repo.reader.plain(raw)
    after = writer.check(template.roots, read_data=True, progress=silent)
    assert {fault.object_id for fault in after.faults} <= {raw.hex() for raw in lost}
    if not lost:
        assert (after.faults, after.owners) == ((), ())
    before = content_of(directory)
    assert writer.repair(silent) == type(result)((), ())
    assert {path: data for path, data in content_of(directory).items() if "index" not in path.name} == {
        path: data for path, data in before.items() if "index" not in path.name
    }
    for number, one in enumerate(template.snapshots):
        again = save(writer.repo, one.files, f"snapshot-{number}")
        assert (again.tree, again.record) == (one.tree, one.record)
    writer.repo.flush()
    assert all(is_as_saved(writer.repo, one) for one in template.snapshots)
    assert writer.check(template.roots, read_data=True, progress=silent).faults == ()
    writer.close()


def test_a_healthy_repository_is_left_alone(template: Template, copy: Path) -> None:
    writer = Opened(copy)
    writer.writer()
    writer.close()  # folds the log of the index
    before = content_of(copy)
    writer = Opened(copy)
    assert writer.check(template.roots, read_data=True, progress=silent).faults == ()
    result = writer.repair(silent)
    assert (result.actions, result.gone) == ((), ())
    writer.close()
    assert content_of(copy) == before


def test_damage_is_named(template: Template, copy: Path) -> None:
    """The snapshot, the path and the pack of a chunk whose frame was hit."""
    number = 3
    content, earlier = (bytes.fromhex(template.snapshots[n].contents[b"big/large"]) for n in (number, number - 1))
    chunk = next(part for part in template.parts[content] if part not in template.parts[earlier])
    entry = template.entries[chunk]
    path = copy / "store" / pack.pack_key(entry.pack)
    data = bytearray(path.read_bytes())
    data[entry.offset + entry.stored // 2] ^= 1
    path.write_bytes(data)
    for read_data in (False, True):
        writer = Opened(copy)
        found = writer.check(template.roots, read_data=read_data, progress=silent)
        faults = {fault.object_id: fault for fault in found.faults if fault.object_id}
        named = faults[content.hex()]
        assert (named.owner, named.path) == (f"snapshot-{number}", b"big/large")
        assert faults[chunk.hex()].pack == entry.pack.hex()
        assert any(fault.pack == entry.pack.hex() and fault.object_id is None for fault in found.faults)
        hit = {
            n
            for n, other in enumerate(template.snapshots)
            if chunk in template.parts[bytes.fromhex(other.contents[b"big/large"])]
        }
        assert set(found.owners) == {f"snapshot-{n}" for n in hit} != set(template.roots.trees.values())
        writer.close()


def test_a_damaged_index_stops_only_reading(template: Template, copy: Path) -> None:
    (copy / "index.db").write_bytes(b"garbage" * 1000)
    (copy / "index.db-wal").unlink()
    writer = Opened(copy)
    with pytest.raises(DataLoss, match="repair"):
        writer.repo.load_tree(template.snapshots[0].tree)
    found = writer.check(template.roots, read_data=True, progress=silent)
    assert found.faults
    assert len(found.owners) == 6
    result = writer.repair(silent)
    assert result.gone == ()
    assert (copy / "index.db.damaged-1").read_bytes() == b"garbage" * 1000
    assert all(is_as_saved(writer.repo, one) for one in template.snapshots)
    assert [raw for raw, _ in writer.repo.records()] == [one.record for one in template.snapshots]
    writer.close()


def test_open_readers_go_on_after_a_repair(template: Template, copy: Path) -> None:
    """With the index made anew, and packs that lie elsewhere."""
    reader = open_reader(copy)
    assert all(is_as_saved(reader, one) for one in template.snapshots)
    for path in copy.glob("index.db*"):
        path.unlink()
    victim = copy / "store" / pack.pack_key(template.entries[bytes.fromhex(template.snapshots[5].tree)].pack)
    victim.write_bytes(victim.read_bytes()[:-1])
    writer = Opened(copy)
    assert writer.repair(silent).gone == ()
    new = save(writer.repo, {b"new": b"after the repair"}, "new")
    writer.repo.flush()
    assert load(reader, new.tree) == new.files
    reader.forget()
    assert all(is_as_saved(reader, one) for one in (*template.snapshots, new))
    writer.close()
    reader.close()


def test_a_lost_pack_that_comes_back_is_taken_in(template: Template, copy: Path) -> None:
    key = pack.pack_key(template.entries[bytes.fromhex(template.snapshots[0].tree)].pack)
    data = (copy / "store" / key).read_bytes()
    (copy / "store" / key).unlink()
    writer = Opened(copy)
    result = writer.repair(silent)
    assert template.snapshots[0].tree in result.gone
    (copy / "store" / key).write_bytes(data)
    assert writer.repair(silent).gone == ()
    assert all(is_as_saved(writer.repo, one) for one in template.snapshots)
    assert writer.check(template.roots, read_data=True, progress=silent).faults == ()
    writer.close()


def test_what_was_moved_aside_is_kept_whole(template: Template, copy: Path) -> None:
    key = pack.pack_key(template.entries[bytes.fromhex(template.snapshots[0].tree)].pack)
    path = copy / "store" / key
    bad = path.read_bytes()[:-40] + b"x"
    path.write_bytes(bad)
    writer = Opened(copy)
    writer.repair(silent)
    store = LocalStore(copy / "store")
    kept = list(store.keys("damaged/"))
    assert [store.get(one) for one in kept] == [bad]
    writer.close()


def test_a_newer_version_is_never_repaired(template: Template, copy: Path) -> None:
    path = next((copy / "store" / "packs").rglob("*/*"))
    data = bytearray(path.read_bytes())
    data[8] = pack.PACK_VERSION + 1
    path.write_bytes(bytes(data[:-8]) + xxhash.xxh3_64_digest(bytes(data[:-8])))
    before = content_of(copy / "store")
    writer = Opened(copy)
    for call in (lambda: writer.repair(silent), lambda: writer.check(template.roots, read_data=False, progress=silent)):
        with pytest.raises(VersionMismatch):
            call()
    writer.close()
    assert content_of(copy / "store") == before
    reader = open_reader(copy)
    assert all(is_as_saved(reader, one) for one in template.snapshots)
    reader.close()


def test_errors_are_ours() -> None:
    assert all(issubclass(error, SnapshotdError) for error in TYPED)


@pytest.mark.parametrize("form", ["delta", "whole", "list", "record"])
def test_a_frame_planted_in_a_content_is_not_believed(tmp_path: Path, form: str) -> None:
    """Whoever knows an id, and how frames look, puts one that claims the id into a file; then the pack is damaged
    before it."""
    opened = Opened(tmp_path / "repo")
    victim = b"the true content, long enough to be worth a delta " * 20
    base = opened.repo.save_bytes(victim[:-1])
    wanted = BlobID(Identity(KEY).content(victim).hex())
    raw = bytes.fromhex(wanted)
    payload = compress.compress_delta(b"forged " * 100, victim[:-1], 3)
    parts = chunks.encode_list([(bytes.fromhex(base), len(victim) - 1)], 0, False)
    frame = {
        "delta": pack.encode_frame(ObjectKind.CHUNK, raw, 700, payload, True, bytes.fromhex(base)),
        "whole": pack.encode_frame(ObjectKind.CHUNK, raw, 6, b"forged", False),
        "list": pack.encode_frame(ObjectKind.LIST, raw, len(parts), parts, False),
        "record": pack.encode_frame(ObjectKind.RECORD, raw, 10, b'\x00{"id": 1}', False),
    }[form]
    noise = random.Random(1)
    opened.repo.save_bytes(noise.randbytes(1000) + b"".join(frame) + noise.randbytes(1000))
    opened.repo.flush()
    (path,) = (one for one in (tmp_path / "repo" / "store" / "packs").rglob("*") if one.is_file())
    data = path.read_bytes()
    at = data.index(b"".join(frame)) - 1004  # in the header of the content's own frame
    data = data[:at] + data[at + 10 :]
    path.write_bytes(data)
    planted = [
        one for one in pack.frames(data) if isinstance(one, pack.Frame) and one.payload in frame
    ]  # it does look like one
    assert [raw.startswith(one.id) for one in planted] == [True]
    opened.repair(silent)
    assert list(opened.repo.records()) == []
    assert b"".join(opened.repo.load(base)) == victim[:-1]
    with pytest.raises(NotFound):
        opened.repo.load(wanted)
    assert opened.repo.save_bytes(victim) == wanted
    opened.repo.flush()
    assert b"".join(opened.repo.load(wanted)) == victim
    opened.close()
