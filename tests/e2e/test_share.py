"""Snapshots for others: bundles from one state directory into another, tars, folders to look into, and a catalog made
again."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import oracles, variety
from tests.capabilities import require
from tests.e2e.history import History, facts_of, files_of, run_agent
from tests.e2e.support import Snap, processes_with, wait_until
from tests.leftovers import nothing_left

pytestmark = pytest.mark.runc


@pytest.fixture(scope="module")
def root(small_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small root without Perl's tables of Unicode, four of five of its files: each test here reads them all."""
    root = tmp_path_factory.mktemp("root") / "root"
    shutil.copytree(small_root, root, symlinks=True)
    (tables,) = root.glob("usr/lib/*/perl-base/unicore")
    shutil.rmtree(tables)
    return root


@pytest.fixture(scope="module")
def places(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Snap, Snap]]:
    """Two daemons with nothing in common."""
    require("fuse", "oracles")
    found = []
    for _ in range(2):
        snap = Snap(tmp_path_factory.mktemp("share") / "state")
        snap("image", "import", root, "--name", "default")
        found.append(snap)
    yield found[0], found[1]
    for snap in found:
        snap.stop_daemon()
        nothing_left(snap.state_dir, running=False)


@pytest.fixture(scope="module")
def here(places: tuple[Snap, Snap]) -> Snap:
    return places[0]


@pytest.fixture
def there(places: tuple[Snap, Snap]) -> Iterator[Snap]:
    """The other state directory, without a trajectory before and after."""
    yield places[1]
    while left := places[1].json("ls"):  # forks before what they were forked from
        codes = {places[1]("rm", "--force", item["id"], code=None).returncode for item in left}
        assert 0 in codes


@pytest.fixture(scope="module")
def history(here: Snap, tmp_path_factory: pytest.TempPathFactory) -> History:
    return run_agent(here, "line", tmp_path_factory.mktemp("files"))


def contents(snap: Snap, *, spool: bool = False) -> dict[str, Any]:
    """Everything that a failed import could leave. Outputs may stay in the `spool` until the daemon's next start."""
    usage = snap.json("df")
    if not spool:
        del usage["spool_bytes"]
    return {
        "ls": snap.json("ls"),
        "images": snap.json("image", "ls"),
        "usage": usage,
        "top": sorted(one for one in os.listdir(snap.state_dir) if not one.startswith("find.db-")),  # when it is quiet
    }


# -- bundles -----------------------------------------------------------------------------------------------------------


def test_one_snapshot(here: Snap, there: Snap, history: History, tmp_path: Path) -> None:
    """Into another state directory, and what that exports of it into a clean one again."""
    snapshot = history.snapshots[3]
    bundle, again = tmp_path / "bundle", tmp_path / "again"
    done = here.json("export", snapshot, "-o", bundle)
    assert (done["bytes"], done["warnings"]) == (bundle.stat().st_size, [])
    expected = facts_of(here, snapshot)
    for source, target in ((bundle, again), (again, tmp_path / "third")):
        got = there.json("import", source, "--wait", "stored")
        assert (got["snapshot_count"], got["warnings"], got["state"]) == (1, [], "stored")
        imported = facts_of(there, snapshot)
        assert imported.pop("parent") is None, "its parent did not come along"
        assert imported == {key: value for key, value in expected.items() if key != "parent"}
        found = files_of(there, snapshot, tmp_path / f"files of {source.name}")
        assert variety.difference(history.files[snapshot], found) == ""
        there("export", snapshot, "-o", target)
        (trajectory,) = got["trajectories"]
        assert there.sh(trajectory, "cat log; echo more >> log")["stdout"] == "line 1\nline 2\nline 3\n"
        there("rm", "--force", trajectory)
    there("check", "--read-data")


@pytest.mark.long  # increments: unit/engine/test_bundle.py
def test_a_line_in_two_parts(here: Snap, there: Snap, history: History, tmp_path: Path) -> None:
    middle, last = history.snapshots[2], history.snapshots[-1]
    here("export", middle, "--trajectory", "-o", tmp_path / "first")
    here("export", last, "--trajectory", "--since", middle, "-o", tmp_path / "rest")
    assert (tmp_path / "rest").stat().st_size < (tmp_path / "first").stat().st_size / 4, "only what came after"
    refused = there("import", tmp_path / "rest", code=4)
    assert middle[:12] in refused.stderr
    assert there.json("ls") == []
    there("import", tmp_path / "first")
    there("import", tmp_path / "rest", "--name", "other", "--wait", "stored")
    taken = [item["id"] for item in there.json("ls")]
    again = there("import", tmp_path / "rest")
    assert "here already" in again.stderr
    assert again.stdout.split()[0] in taken
    assert [item["id"] for item in there.json("ls")] == taken
    for snapshot in history.snapshots:
        mine, theirs = facts_of(here, snapshot), facts_of(there, snapshot)
        assert theirs == mine
        assert variety.difference(history.files[snapshot], files_of(there, snapshot, tmp_path / snapshot)) == ""
    assert [change["path"] for change in there.json("diff", middle, last)] == [
        c["path"] for c in here.json("diff", middle, last)
    ]
    (fork,) = there.json("fork", history.snapshots[4])["trajectories"]
    assert there.sh(fork, "tail -n 1 log; ls /usr/bin/seq || true")["stdout"] == "line 4\n"
    whole = tmp_path / "whole"
    there(
        "export", last, "--trajectory", "-o", whole
    )  # across the seam: the imported second part is a fork of the first
    there("check", "--read-data")


def test_a_tag_travels(here: Snap, there: Snap, history: History, tmp_path: Path) -> None:
    """As docs/ci.md has it: a known-good state for another runner, which may take it in more than once."""
    snapshot, bundle = history.snapshots[2], tmp_path / "bundle"
    here("tag", snapshot, "known-good")
    try:
        here("export", "known-good", "-o", bundle)
    finally:
        here("tag", "--delete", "known-good")
    (trajectory,) = there.json("import", bundle)["trajectories"]
    assert there.json("show", "known-good")["id"] == snapshot
    again = there.json("import", bundle)
    assert (again["trajectories"], again["snapshot_count"], again["warnings"]) == ([trajectory], 0, [])
    assert there.json("show", "known-good")["id"] == snapshot
    there("rm", trajectory)
    there("import", bundle)
    assert there.json("show", "known-good")["id"] == snapshot, "the name is free again after its snapshot went"


@pytest.mark.long  # any damage: unit/engine/test_bundle.py
def test_a_damaged_bundle_leaves_nothing(here: Snap, there: Snap, history: History, tmp_path: Path) -> None:
    bundle, bad = tmp_path / "bundle", tmp_path / "bad"
    here("export", history.snapshots[-1], "--trajectory", "-o", bundle)
    data = bundle.read_bytes()
    there.stop_daemon()  # the next one sweeps what somebody still held when the test before removed it
    before = contents(there)
    rng = random.Random(20)
    damaged = [data[: len(data) * 2 // 3], data[:-1], data + b"\0", b""]
    for _ in range(4):
        at = rng.randrange(len(data))
        damaged.append(data[:at] + bytes((data[at] ^ (1 << rng.randrange(8)),)) + data[at + 1 :])
    for number, content in enumerate(damaged):
        bad.write_bytes(content)
        result = there("import", bad, code=None)
        assert result.returncode in (2, 10, 11, 20), (number, result)
        assert result.stderr.startswith("snapshotd: ")
        assert contents(there) == before, number
    there.stop_daemon()
    assert contents(there, spool=True) == before | {"usage": before["usage"] | {"spool_bytes": 0}}
    there("check", "--read-data")


def test_a_name_that_is_taken(here: Snap, there: Snap, history: History, tmp_path: Path) -> None:
    here("export", history.snapshots[1], "-o", tmp_path / "bundle")
    taken = there.json("create", "--runtime", "runc", "--name", "taken", "--wait", "stored")["trajectory"]
    before = contents(there)
    assert "taken" in there("import", tmp_path / "bundle", "--name", "taken", code=6).stderr
    assert contents(there) == before
    other = there.json("create", "--runtime", "runc", "--name", "line")["trajectory"]
    done = there.json("import", tmp_path / "bundle")
    assert len(done["warnings"]) == 1, "its own name is taken, too, and nobody asked for that"
    names = {item["id"]: item["name"] for item in there.json("ls")}
    assert names == {taken: "taken", other: "line", done["trajectories"][0]: None}


def test_through_a_pipe(here: Snap, there: Snap, history: History) -> None:
    snapshot, command = history.snapshots[2], [sys.executable, "-m", "snapshotd"]
    with subprocess.Popen([*command, "export", snapshot, "-o", "-"], env=here.env, stdout=subprocess.PIPE) as writer:
        take = [*command, "import", "-", "--json"]
        done = subprocess.run(take, env=there.env, stdin=writer.stdout, capture_output=True, timeout=60, check=True)
        assert writer.wait(60) == 0
    (trajectory,) = json.loads(done.stdout)["trajectories"]
    assert there.json("log", trajectory)[0]["id"] == snapshot
    assert there("cat", f"{snapshot}:log").stdout == "line 1\nline 2\n"


def test_a_tar(here: Snap, history: History, tmp_path: Path) -> None:
    """Two programs unpack it to what a restore gives."""
    snapshot = history.snapshots[-1]
    done = here.json("export", snapshot, "--format", "tar", "-o", tmp_path / "tar")
    assert done["warnings"] == []
    here("restore", snapshot, "--to", tmp_path / "restored")
    (tmp_path / "restored").chmod(history.files[snapshot][b""].mode)
    assert oracles.tar(tmp_path / "tar", tmp_path / "restored") == set()
    for name, program in (
        ("tar", ("tar", "--xattrs", "--xattrs-include=*", "--acls", "--numeric-owner")),
        ("bsdtar", ("bsdtar",)),
    ):
        target = tmp_path / f"by {name}"
        target.mkdir()
        subprocess.run([*program, "-C", target, "-xpf", tmp_path / "tar"], check=True, timeout=60)
        target.chmod(0o755)
        expected, got = dict(history.files[snapshot]), variety.manifest(target)
        assert expected.pop(b"").mode == got.pop(b"").mode  # bsdtar leaves the time of a directory that was there
        assert variety.difference(expected, got) == ""


# -- folders -----------------------------------------------------------------------------------------------------------


def _tool(*command: str | Path, code: int = 0) -> str:
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
    assert result.returncode == code, (command, result)
    return result.stdout


@pytest.mark.long  # what is looked into: unit/fuse and system/test_fuse.py
def test_looking_through_folders(here: Snap, history: History, tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    here("tag", history.snapshots[2], "good")
    here("mount", top)
    try:
        line = top / "trajectories" / history.trajectory
        assert (
            _tool("grep", "-rl", "line 4", f"{line}/4/workspace/log", f"{line}/3/workspace/log")
            == f"{line}/4/workspace/log\n"
        )
        listed = _tool("diff", "-rq", "--no-dereference", f"{line}/1/workspace", f"{line}/2/workspace", code=1)
        assert f"Only in {line}/2/workspace: d2" in listed
        assert "log differ" in listed
        found = _tool("find", line, "-maxdepth", "3", "-name", "d3").split()
        assert [Path(path).relative_to(line).parts[0] for path in found] == [
            item for item in sorted(os.listdir(line)) if int(item) >= 3
        ]
        assert os.readlink(top / "tags/good").endswith(history.snapshots[2])
        assert (top / "tags/good/workspace/log").read_text() == "line 1\nline 2\n"
        assert os.readlink(top / "trajectories/line") == history.trajectory
        for snapshot in history.snapshots[::2]:
            shown = variety.manifest(top / "snapshots" / snapshot)
            assert variety.difference(history.files[snapshot], shown) == ""
        _tool("cp", "-a", top / "tags/good", tmp_path / "link")
        _tool("cp", "-a", f"{top}/tags/good/.", tmp_path / "copy")
        (tmp_path / "copy").chmod(0o755)
        assert variety.difference(history.files[history.snapshots[2]], variety.manifest(tmp_path / "copy")) == ""
        with pytest.raises(OSError, match="Read-only"):
            (top / "tags/good/workspace/new").touch()
        (fork,) = here.json("fork", history.snapshots[1])["trajectories"]
        later = here.json("exec", "--wait", "stored", fork, "--", "sh", "-c", "echo later > later")["snapshot"]
        here("tag", later, "after-mounting")
        wait_until(lambda: (top / "tags/after-mounting").is_dir(), "a tag that was given later shows")
        assert (top / "snapshots" / later / "workspace/later").read_text() == "later\n"
        assert later in os.listdir(top / "snapshots")
        here("rm", "--force", fork)
    finally:
        here("umount", top)
    assert os.listdir(top) == []
    assert "no snapshots mounted" in here("umount", top, code=4).stderr
    (top / "mine").touch()
    assert "not empty" in here("mount", top, code=2).stderr


def test_the_browsing_process_is_killed(here: Snap, history: History, tmp_path: Path) -> None:
    here("mount", tmp_path)
    pid = here.daemon_pid()
    (child,) = [each for each in _children(pid) if b"browse" in Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")]
    (tmp_path / "snapshots" / history.snapshots[1] / "workspace/log").read_text()
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: _is_dead(tmp_path), "whoever reads gets an error")
    assert here.daemon_pid() == pid
    assert here("cat", f"{history.snapshots[1]}:log").stdout == "line 1\n"
    here("umount", tmp_path)
    assert os.listdir(tmp_path) == []
    here("mount", tmp_path)
    assert history.snapshots[1] in os.listdir(tmp_path / "snapshots")
    here("umount", tmp_path)


def _is_dead(mounted: Path) -> bool:
    try:
        os.listdir(mounted / "trajectories")
    except OSError as exc:
        return exc.errno == errno.ENOTCONN
    return False


def _children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


# -- the catalog -------------------------------------------------------------------------------------------------------


@pytest.mark.long  # others are: unit/engine/test_rebuild.py, test_missing_files.py
@pytest.mark.parametrize("how", [pytest.param("torn", marks=pytest.mark.long), "gone"])
def test_the_catalog_is_made_again(root: Path, tmp_path: Path, how: str) -> None:
    snap = Snap(tmp_path / "state")
    snap("image", "import", root, "--name", "default")
    history = run_agent(snap, "line", tmp_path / "before", steps=3)
    (fork,) = snap.json("fork", history.snapshots[2], "--wait", "stored")["trajectories"]
    (counting,) = [pid for pid, line in processes_with(str(snap.state_dir)) if "storage.worker" in line]
    os.kill(counting, signal.SIGSTOP)  # so that the record is made before its changes are counted
    forked = snap.sh(fork, "echo forked; echo forked > forked; echo wrong >&2")["snapshot"]
    wait_until(lambda: snap.json("show", forked)["state"] == "stored", "it is stored")
    os.kill(counting, signal.SIGCONT)
    snap("tag", history.snapshots[1], "good")
    snap("stop", fork, "--wait", "stored")
    everything = [*history.snapshots, forked]
    wait_until(lambda: all(snap.json("show", each)["files"] is not None for each in everything), "all is counted")
    before = {each: facts_of(snap, each) for each in everything}
    changed = snap.json("diff", history.snapshots[1], forked)
    wait_until(lambda: snap.json("df")["unarchived"] == 0, "all is stored")
    snap.stop_daemon()
    for name in ("catalog.db-wal", "catalog.db-shm"):
        (snap.state_dir / name).unlink(missing_ok=True)
    if how == "torn":
        data = (snap.state_dir / "catalog.db").read_bytes()
        (snap.state_dir / "catalog.db").write_bytes(random.Random(3).randbytes(4096) + data[4096 : len(data) // 2])
        assert str(snap.state_dir / "catalog.db") in snap("ls", code=20).stderr
    else:
        (snap.state_dir / "catalog.db").unlink()
    report = snap.json("daemon", "--rebuild-catalog")
    assert (report["lost"], report["left_out"], report["tag_count"]) == ([], [], 1)
    assert report["snapshot_count"] >= len(everything)
    assert {each: facts_of(snap, each) for each in everything} == before
    lines = {item["id"]: item for item in snap.json("ls")}
    assert lines[history.trajectory]["name"] == "line"
    assert lines[fork]["status"] == "interrupted", "it has an agent, of whose end no record tells"
    assert snap.json("show", "good")["id"] == history.snapshots[1]
    assert snap.json("diff", history.snapshots[1], forked) == changed
    for each in history.snapshots:
        assert variety.difference(history.files[each], files_of(snap, each, tmp_path / f"after {each}")) == ""
    (other,) = snap.json("fork", forked)["trajectories"]
    assert snap.sh(other, "cat forked log")["stdout"] == "forked\nline 1\nline 2\n"
    assert snap.sh(fork, "cat forked")["stdout"] == "forked\n"
    snap("check", "--read-data")
    assert snap.json("repair")["actions"] == []
    snap.stop_daemon()
    nothing_left(snap.state_dir, running=False)
