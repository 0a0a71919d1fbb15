"""Damage to any file of the repository: every read gives the same data as before or an error that says what is wrong,
check finds it, and repair brings back what was not damaged.

tests/long.py says how to run one seed again; a seed's damage is always the same kind at the same relative place.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.client import Snapshotd
from snapshotd.errors import DataLoss, NotFound, SnapshotdError
from snapshotd.repo.format.index import Index
from snapshotd.repo.format.pack import pack_key
from snapshotd.types import SnapshotID
from tests import long, variety
from tests.capabilities import require
from tests.e2e.history import History, run_agent
from tests.e2e.support import Snap, wait_until
from tests.leftovers import nothing_left

pytestmark = pytest.mark.runc

SEEDS = long.seeds(1, 24)
KINDS = ("flip", "cut", "zero", "delete", "swap", "remove", "insert", "append")


@dataclass
class Place:
    """A state directory whose snapshots are all stored and cold, a copy of its repository and catalog, and what
    everything reads as."""

    snap: Snap
    saved: Path
    history: History
    fork: str
    snapshots: list[str]
    expected: dict[tuple[str, str], Any]
    scratch: Path

    def client(self) -> Snapshotd:
        return Snapshotd(state_dir=self.snap.state_dir, autostart=False)

    def undo(self) -> None:
        """Stop the daemon and bring back what was saved."""
        self.snap.stop_daemon()
        _bring(self.saved, self.snap.state_dir)


def _bring(source: Path, target: Path) -> None:
    shutil.rmtree(target / "repo", ignore_errors=True)
    for old in target.glob("catalog.db*"):
        old.unlink()
    shutil.copytree(source / "repo", target / "repo")
    for each in source.glob("catalog.db*"):
        shutil.copy(each, target)


@pytest.fixture(scope="module")
def place(small_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    require("fuse")
    base = tmp_path_factory.mktemp("damage")
    snap = Snap(base / "state", {"SNAPSHOTD_LAYER_BUDGET": "0"})
    snap("image", "import", small_root, "--name", "default")
    history = run_agent(snap, "line", base / "files", steps=4)
    (fork,) = snap.json("fork", history.snapshots[2], "--wait", "stored")["trajectories"]
    last = snap.json(
        "exec",
        "--wait",
        "stored",
        fork,
        "--",
        "sh",
        "-c",
        "echo forked; head -c 100000 /workspace/data > /workspace/big",
    )
    snap("stop", fork, "--wait", "stored")
    wait_until(lambda: snap.json("df")["layer_bytes"] == 0, "all layers are evicted")
    scratch = base / "scratch"
    scratch.mkdir()
    made = Place(snap, base / "saved", history, fork, [*history.snapshots, last["snapshot"]], {}, scratch)
    made.expected = {name: read() for name, read in _reads(made).items()}
    made.expected |= {(each, "inside"): _inside(made, each) for each in made.snapshots[1:]}
    assert None not in made.expected.values()
    snap.stop_daemon()
    made.saved.mkdir()
    _bring(snap.state_dir, made.saved)
    yield made
    snap.stop_daemon()
    nothing_left(snap.state_dir, running=False)


def _reads(place: Place) -> dict[tuple[str, str], Callable[[], Any]]:
    """Every way to read every snapshot, by (snapshot, what)."""
    client, found = place.client(), {}
    for number, each in enumerate(place.snapshots):
        shown = client.snapshot(each)
        found[each, "cat"] = lambda each=each: b"".join(
            client.cat(each, "/workspace/log" if each != place.snapshots[0] else "/etc/passwd")
        )
        found[each, "restore"] = lambda each=each: _restored(place, each)
        found[each, "conversation"] = lambda each=each: client.conversation(each)
        if number:
            found[each, "diff"] = lambda each=each: list(client.diff(place.snapshots[0], each))
        for which in shown.tool.outputs:
            found[each, which] = lambda each=each, which=which: b"".join(client.output(each, which))
    return found


def _restored(place: Place, snapshot: str) -> dict[bytes, variety.Fact]:
    target = place.scratch / "restored"
    shutil.rmtree(target, ignore_errors=True)
    report = place.client().restore(snapshot, target, path="/workspace" if snapshot != place.snapshots[-1] else "/")
    assert report.warnings == ()
    return variety.manifest(target)


def _is_whole(place: Place, snapshot: str) -> bool:
    """Whether every file can be read, those too that nobody has changed."""
    target = place.scratch / "whole"
    shutil.rmtree(target, ignore_errors=True)
    try:
        place.client().restore(snapshot, target)
    except DataLoss:
        return False
    return True


def _read_all(place: Place) -> dict[tuple[str, str], SnapshotdError]:
    """Read everything. What is read is right; what fails says where. Returns the failures."""
    failed: dict[tuple[str, str], SnapshotdError] = {}
    for name, read in _reads(place).items():
        try:
            got = read()
        except (DataLoss, NotFound) as exc:
            failed[name] = exc
            continue
        assert got == place.expected[name], name
    vague = [exc.message for (snapshot, _), exc in failed.items() if not _names_a_place(place, snapshot, exc.message)]
    assert vague == []
    return failed


def _names_a_place(place: Place, snapshot: str, message: str) -> bool:
    """A snapshot, a pack, an object, a file in the repository."""
    return any(
        word in message
        for word in (snapshot[:12], "pack", "object", "content ", "tree ", str(place.snap.state_dir / "repo"))
    )


def _hurt(place: Place, kind: str, rng: random.Random) -> Path:
    """Damage a file of the repository. Returns which."""
    repo = place.snap.state_dir / "repo"
    files = [*sorted(path for path in (repo / "store").rglob("*") if path.is_file()), repo / "index.db"]
    path = rng.choice(files)
    other = rng.choice([each for each in files if each != path])
    data, theirs = path.read_bytes(), other.read_bytes()
    at, length = rng.randrange(len(data)), rng.randrange(1, 3000)
    changed = {
        "flip": data[:at] + bytes((data[at] ^ (1 << rng.randrange(8)),)) + data[at + 1 :],
        "cut": data[:at],
        "zero": data[:at] + bytes(len(data[at : at + length])) + data[at + length :],
        "swap": theirs,
        "remove": data[:at] + data[at + length :],
        "insert": data[:at] + rng.randbytes(length) + data[at:],
        "append": data + rng.randbytes(length),
    }
    for each in (path, other):
        each.chmod(0o600)
    if kind == "delete":
        path.unlink()
    else:
        path.write_bytes(changed[kind])
        if kind == "swap":
            other.write_bytes(data)
    return path


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_and_repaired(place: Place, seed: int) -> None:
    rng, snap, client = random.Random(seed), place.snap, place.client()
    try:
        path = _hurt(place, KINDS[seed % len(KINDS)], rng)
        started = snap("ls", code=None)
        assert started.returncode in (0, DataLoss.exit_code), started
        failed: dict[tuple[str, str], SnapshotdError] = {}
        readable: set[str] = set()
        if started.returncode == 0:
            failed = _read_all(place)
            forked = rng.choice(place.snapshots[1:])
            assert _inside(place, forked) in (None, place.expected[forked, "inside"])
            checked = snap("check", "--read-data", code=None)
            assert checked.returncode in (0, DataLoss.exit_code), checked
            harmless = path.name == "index.db" and not failed  # it has bytes that say nothing
            assert checked.returncode != 0 or harmless, (path, failed)
            readable = {
                each
                for each in place.snapshots
                if each not in {snapshot for snapshot, _ in failed} and _is_whole(place, each)
            }
        else:
            assert str(path) in started.stderr or "repair" in started.stderr
        repaired = snap.json("repair", code=None)
        lost = set(repaired["lost"])
        if started.returncode == 0:
            assert not lost & readable, "what could be read is not lost"
        if path.name == "index.db" and seed % len(KINDS) != KINDS.index("swap"):
            assert lost == set(), "all packs are whole"
        # The records of lost snapshots may be gone with their files; the catalog, which has all that they said, still
        # names them.
        left = snap.json("check", "--read-data", code=None)["damages"]
        assert len(left) <= len(lost), (path, lost, left, repaired)
        assert {item["snapshot"] for item in left} <= {None}
        still = _read_all(place)
        assert {snapshot for snapshot, _ in still} <= lost
        assert "conversation" not in {what for _, what in still}
        assert snap.json("repair")["actions"] == []
        states = {each: client.snapshot(each).state for each in place.snapshots}
        assert {each for each, state in states.items() if state == "lost"} == lost & set(place.snapshots)
        for forked in [each for each in place.snapshots[1:] if each not in lost][-2:]:
            assert _inside(place, forked) == place.expected[forked, "inside"]
        made = snap.json("create", "--runtime", "runc")["trajectory"]
        more = snap.json("exec", "--wait", "stored", made, "--", "sh", "-c", "echo new > new; cat new")["snapshot"]
        snap("stop", made)
        assert snap("cat", f"{more}:new").stdout == "new\n"
        assert len(snap.json("check", "--read-data", code=None)["damages"]) == len(left)
    finally:
        place.undo()


@pytest.mark.long  # flips of any byte: unit/test_sqlite_flips.py
@pytest.mark.parametrize("seed", range(long.size(1, 4)))
def test_a_flip_in_the_catalog_is_found_and_named(place: Place, seed: int) -> None:
    """Or it says nothing: then all is shown as before."""
    snap, rng, path = place.snap, random.Random(seed), place.snap.state_dir / "catalog.db"
    lines = [("log", "--all", "--json", name) for name in ("line", place.fork)]
    before = [snap(*line).stdout for line in lines]
    snap.stop_daemon()
    try:
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        shown = [snap(*line, code=None) for line in lines]
        checked = snap("check", "--read-data", code=None)
        for was, now in zip(before, shown, strict=True):
            assert now.returncode == DataLoss.exit_code or now.stdout == was
        for each in (*shown, checked):
            assert each.returncode in (0, DataLoss.exit_code), each
            assert each.returncode == 0 or "catalog" in each.stdout + each.stderr, each
        assert checked.returncode == DataLoss.exit_code or [each.stdout for each in shown] == before
        if any(each.returncode for each in (*shown, checked)):
            assert "--rebuild-catalog" in "".join(each.stdout + each.stderr for each in (*shown, checked))
    finally:
        place.undo()


@pytest.mark.long  # damage to anything: the first test
def test_a_damaged_output_is_shown_as_damaged(place: Place) -> None:
    """And not as that of a call that printed nothing, which it looks like where only the bytes are gone."""
    snap, snapshot = place.snap, place.snapshots[-1]
    with closing(SqliteCatalog(snap.state_dir / "catalog.db")) as catalog:
        blob = catalog.snapshots.get(SnapshotID(snapshot)).call.stdout
    assert blob is not None
    with closing(Index(snap.state_dir / "repo/index.db", write=False)) as index:
        entry = index.find(bytes.fromhex(blob))
    assert entry is not None
    pack = snap.state_dir / "repo/store" / pack_key(entry.pack)
    data, at = bytearray(pack.read_bytes()), entry.offset + entry.stored // 2
    data[at] ^= 1
    try:
        pack.chmod(0o600)
        pack.write_bytes(data)
        assert "was given up" in " ".join(snap.json("repair", code=None)["actions"])
        for words in (("show", "--output", "stdout", snapshot), ("show", "--output", "stdout", "--json", snapshot)):
            refused = snap(*words, code=DataLoss.exit_code)
            for word in ("stdout", snapshot[:12], "7 bytes", blob):
                assert word in refused.stderr
        tool = snap.json("show", snapshot)["tool"]
        assert (tool["outputs"], tool["damaged"]) == ([], [{"output": "stdout", "bytes": 7, "hash": blob}])
        assert f"stdout:\n  damaged and gone: 7 bytes (hash {blob})\n" in snap("show", snapshot).stdout
        assert snap("show", "--output", "stderr", snapshot).stdout == "", "it printed nothing there"
        assert snap.json("repair")["actions"] == []
        assert snap.json("check", "--read-data")["damages"] == []
        snap("export", snapshot, "-o", place.scratch / "bundle")
        snap("rm", place.fork)
        snap("import", place.scratch / "bundle")
        assert snap.json("show", snapshot)["tool"]["damaged"] == tool["damaged"], "it goes along in bundles"
    finally:
        place.undo()


def _inside(place: Place, snapshot: str) -> bytes | None:
    """What a program in a fork reads; None if it meets an error."""
    script = "cat /workspace/log > /tmp/log && od -An -tx1 /workspace/data > /tmp/data && cat /tmp/log /tmp/data"
    pieces: list[bytes] = []
    try:
        done = place.client().exec_snapshot(
            snapshot, ["sh", "-c", script], on_output=lambda which, data: pieces.append(data)
        )
    except (DataLoss, NotFound):
        return None
    return b"".join(pieces) if done.exit_code == 0 else None
