"""Each file of a state directory is taken away in turn: what is missing is said, with the next step, or changes nothing.
Never is there an emptiness that nobody is told of, and never does a prune remove what was referred to."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from snapshotd import failpoints
from tests import long
from tests.e2e.support import Snap, ended
from tests.leftovers import nothing_left

pytestmark = pytest.mark.runc

HARMLESS = {
    "lock", "snapshotd.sock", "reserve", "layers.state", "abilities.json", "repo/index.db.reserve", "repo/index.db.lock", "repo/tmp",
    "repo/store/@tmp", "catalog.db-shm", "secrets.db-shm", "repo/index.db-shm", "repo/index.db-journal",
}  # fmt: skip
"""Made again, or not needed: everything is there without them. The daemon's log and the streams of finished commands tell
about the past, and nothing is read from them but by a person."""
RECORDS = re.compile(r"daemon\.log|(runs|commands)(/.*)?")
LAYERS = re.compile(r"layers(\.img)?")
"""Content of the layers' own file system, which has tests of its own."""
NEEDED = {"catalog.db", "catalog.db-wal", "secrets.db", "secrets.db-wal", "secrets.key", "repo/key", "repo/index.db"}
INDEX_LOG = "repo/index.db-wal"
"""Its absence is found by what is not in the index then."""
SECRET = "ghp_0123456789abcdefghijABCDEFGHIJ456789"


@dataclass
class Kept:
    """A state directory as a killed daemon left it, a copy of it, and what its snapshot holds."""

    snap: Snap
    copy: Path
    snapshot: str

    def bring_back(self) -> None:
        self.snap.stop_daemon()
        _copy(self.copy, self.snap.state_dir)

    def works(self) -> bool:
        """Whether everything is there."""
        listed = self.snap("ls", code=None)
        read = self.snap("cat", f"{self.snapshot}:/workspace/a", code=None)
        return listed.returncode == 0 and "one" in listed.stdout and (read.returncode, read.stdout) == (0, "kept\n")


def _copy(source: Path, target: Path) -> None:
    """All but the layers, which no stored snapshot needs."""
    target.mkdir(exist_ok=True)
    for path in [each for each in target.iterdir() if not LAYERS.fullmatch(each.name)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in source.iterdir():
        if path.is_dir() and not LAYERS.fullmatch(path.name):
            shutil.copytree(path, target / path.name)
        elif path.is_file() and not LAYERS.fullmatch(path.name):
            shutil.copy(path, target)


def _files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir() and not path.is_socket())


@pytest.fixture(scope="module")
def kept(small_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    base = tmp_path_factory.mktemp("missing")
    with ended(Snap(base / "state", {"SNAPSHOTD_LAYER_BUDGET": "0"})) as snap:
        snap("image", "import", small_root, "--name", "default")
        snap.create("--name", "one")
        script = f"echo {SECRET}; echo kept > /workspace/a"
        done = snap.json("exec", "--wait", "stored", "one", "--", "sh", "-c", script)
        snap("exec", "--detach", "one", "--", "sh", "-c", "echo in the background")
        snap("stop", "one", "--wait", "stored")
        snap.kill_daemon()
        _copy(snap.state_dir, base / "copy")
        yield Kept(snap, base / "copy", done["snapshot"])
        Kept(snap, base / "copy", "").bring_back()


def test_each_missing_file_is_said(kept: Kept) -> None:
    names = _files(kept.copy)
    assert {*names} >= NEEDED
    names = names if long.LONG else ["catalog.db", "catalog.db-wal"]
    faults = {}
    for name in names:
        kept.bring_back()
        (kept.snap.state_dir / name).unlink()
        said = [kept.snap("ls", code=None), kept.snap("prune", "--force", "--grace", "0", code=None)]
        if name in HARMLESS or RECORDS.fullmatch(name):
            if not kept.works():
                faults[name] = f"nothing needs it, and yet: {said}"
            continue
        said.append(kept.snap("cat", f"{kept.snapshot}:/workspace/a", code=None))
        errors = [each.stderr for each in said if each.returncode]
        if not any("is missing" in error and (Path(name).name in error or name == INDEX_LOG) for error in errors):
            faults[name] = f"nobody says that it is missing: {said}"
        kept.snap.stop_daemon()
        shutil.copy(kept.copy / name, kept.snap.state_dir / name)
        if not kept.works():
            faults[name] = f"brought back, and yet something is lost: {said}"
    assert not faults, "\n\n".join(f"{name}: {fault}" for name, fault in faults.items())


def test_a_repository_that_is_missing_as_a_whole_is_said(kept: Kept) -> None:
    kept.bring_back()
    shutil.rmtree(kept.snap.state_dir / "repo")
    told = kept.snap("ls", code=20).stderr
    assert "of the repository is missing although the catalog has trajectories" in told
    assert str(kept.snap.state_dir / "repo") in told
    kept.bring_back()
    assert kept.works()


@pytest.mark.long  # the whole repository: the test before
@pytest.mark.parametrize(
    "again", [pytest.param(False, id="gone", marks=pytest.mark.long), pytest.param(True, id="an empty mount point")]
)
def test_packs_that_are_missing_as_a_whole_are_said_by_every_start(kept: Kept, again: bool) -> None:
    kept.bring_back()
    store = kept.snap.state_dir / "repo" / "store"
    shutil.rmtree(store)
    if again:
        store.mkdir()
    for words in (("ls",), ("log", "one"), ("daemon", "--restart")):
        told = kept.snap(*words, code=20).stderr
        assert "the packs" in told
        assert "are missing although the catalog has stored snapshots" in told
        assert str(store) in told
        assert "snapshotd repair" in told
    kept.bring_back()
    assert kept.works()
    kept.bring_back()
    shutil.rmtree(store)
    (store / "packs").mkdir(parents=True)  # as the message says
    assert kept.snapshot in kept.snap("repair", code=20).stdout
    assert "one" in kept.snap("ls").stdout
    kept.bring_back()


@pytest.mark.long  # a rebuild: the last test
def test_after_a_repair_without_packs_a_rebuild_takes_what_is_left(kept: Kept) -> None:
    kept.bring_back()
    store = kept.snap.state_dir / "repo" / "store"
    shutil.rmtree(store)
    (store / "packs").mkdir(parents=True)
    kept.snap("repair", code=20)
    kept.snap.stop_daemon()
    rebuilt = json.loads(kept.snap("daemon", "--rebuild-catalog", "--json").stdout)
    assert (rebuilt["trajectory_count"], rebuilt["lost"]) == (1, [])
    assert "one" in kept.snap("ls").stdout


@pytest.mark.long  # a start without them is refused: test_a_repository_that_is_missing_as_a_whole_is_said
@pytest.mark.parametrize(
    "left",
    [
        "no catalog",
        *(pytest.param(left, marks=pytest.mark.long) for left in ("nothing", "an empty mount point", "an empty packs")),
    ],
)
def test_a_rebuild_without_packs_replaces_nothing(kept: Kept, left: str) -> None:
    kept.bring_back()
    state, store = kept.snap.state_dir, kept.snap.state_dir / "repo" / "store"
    kept.snap("ls")
    kept.snap.stop_daemon()
    store.rename(state / "away")
    if left == "an empty mount point":
        store.mkdir()
    if left == "an empty packs":
        (store / "packs").mkdir(parents=True)
    env = dict(kept.snap.env)
    if left == "no catalog":
        (state / "catalog.db").unlink()
        env["SNAPSHOTD_STORE"] = store.as_uri()
    told = Snap(state, env)("daemon", "--rebuild-catalog", "--json", code=20).stderr
    assert ("move the index away" if left == "no catalog" else f"the packs {store}/packs are missing although") in told
    assert store.exists() == (left in ("an empty mount point", "an empty packs"))
    shutil.rmtree(store, ignore_errors=True)
    (state / "away").rename(store)
    if left == "no catalog":
        kept.snap("daemon", "--rebuild-catalog")
    assert kept.works()


@pytest.mark.long  # a rebuild that is not: the last test
@pytest.mark.parametrize(
    "place", [pytest.param("engine.rebuild.filled", marks=pytest.mark.long), "engine.rebuild.aside"]
)
def test_a_rebuild_that_is_cut_off_leaves_no_empty_catalog(kept: Kept, place: str) -> None:
    kept.bring_back()
    (kept.snap.state_dir / "catalog.db").unlink()
    env = {**kept.snap.env, "SNAPSHOTD_FAILPOINT": place}
    Snap(kept.snap.state_dir, env)("daemon", "--rebuild-catalog", code=failpoints.EXIT_CODE)
    assert "--rebuild-catalog" in kept.snap("ls", code=20).stderr
    rebuilt = kept.snap("daemon", "--rebuild-catalog", "--json")
    assert (json.loads(rebuilt.stdout)["trajectory_count"], rebuilt.stderr) == (1, "")
    kept.snap("prune", "--force", "--grace", "0")
    assert kept.works()


@pytest.mark.long  # without a rebuild: test_crash.py
def test_after_a_rebuild_nothing_runs_that_a_killed_daemon_has_left(kept: Kept) -> None:
    kept.bring_back()
    kept.snap("exec", "--detach", "one", "--", "sleep", "1000")
    instance = kept.snap.json("daemon", "--status")["instance"]
    kept.snap.kill_daemon()
    (kept.snap.state_dir / "catalog.db").unlink()
    kept.snap("daemon", "--rebuild-catalog")
    kept.snap("ls")
    assert kept.snap.json("daemon", "--status")["instance"] == instance
    nothing_left(kept.snap.state_dir, running=True)


@pytest.mark.parametrize(
    "lost", ["catalog and index", pytest.param("packs, as a repair was told", marks=pytest.mark.long)]
)
def test_packs_that_come_back_later_outlive_a_prune(kept: Kept, small_root: Path, lost: str) -> None:
    kept.bring_back()
    state, store = kept.snap.state_dir, kept.snap.state_dir / "repo" / "store"
    store.rename(state / "away")
    if lost == "catalog and index":
        for path in (*state.glob("catalog.db*"), *state.glob("repo/index.db*")):
            path.unlink()
        kept.snap("daemon", "--rebuild-catalog")
        assert "one" not in kept.snap("ls").stdout
        kept.snap("image", "import", small_root, "--name", "default")
        kept.snap.create("--name", "two")
        kept.snap("exec", "--wait", "stored", "two", "--", "true")
    else:
        (store / "packs").mkdir(parents=True)
        kept.snap("repair", code=20)
    kept.snap.stop_daemon()
    shutil.copytree(state / "away", store, dirs_exist_ok=True)
    shutil.rmtree(state / "away")
    said = kept.snap("prune", "--force", "--grace", "0").stderr
    assert "--rebuild-catalog" in said
    assert "`prune` removes them)" not in kept.snap("check", code=None).stderr
    kept.snap.stop_daemon()
    kept.snap("daemon", "--rebuild-catalog")
    assert kept.works()
    assert "--rebuild-catalog" not in kept.snap("prune", "--force", "--grace", "0").stderr
    assert kept.works()
