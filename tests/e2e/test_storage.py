"""From captured to stored and back: waiting for it, evicting layers, starting cold snapshots, pruning, checking."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.prepared import daemon_on
from tests.e2e.support import Snap, daemon_with, wait_until


@pytest.fixture(scope="module")
def small(minimal_state: Path, tmp_path_factory: pytest.TempPathFactory, engine_env: dict[str, str]) -> Iterator[Snap]:
    """A daemon that keeps no layer it need not keep."""
    with daemon_on(
        minimal_state, tmp_path_factory.mktemp("small") / "state", {**engine_env, "SNAPSHOTD_LAYER_BUDGET": "0"}
    ) as snap:
        yield snap


def wait_until_cold(snap: Snap) -> None:
    """Until nothing that is stored has layers (empty ones, made ahead for the next step, are always there)."""
    wait_until(lambda: snap.json("df")["layer_bytes"] == 0, "all layers are evicted", pause_s=0.2)


def spooled(snap: Snap) -> set[str]:
    return {path.name for path in (snap.state_dir / "repo" / "blobs").rglob("*") if path.is_file()}


@pytest.mark.long  # test_share.py and others wait so
def test_wait_stored(small: Snap, runtime: str) -> None:
    before = spooled(small)  # outputs of a snapshot that was removed before it was stored stay until the next start
    made = small.json("create", "--runtime", runtime, "--wait", "stored")
    assert small.json("show", made["snapshot"])["state"] == "stored"
    result = small.json(
        "exec", "--wait", "stored", made["trajectory"], "--", "sh", "-c", "echo 1 > a; echo out; echo err >&2"
    )
    shown = small.json("show", result["snapshot"])
    assert shown["state"] == "stored"
    assert small("cat", f"{result['snapshot']}:/workspace/a").stdout == "1\n"
    assert [s["state"] for s in small.json("log", made["trajectory"])] == ["stored", "stored"]
    wait_until(lambda: spooled(small) <= before, "archived outputs leave the spool")
    small("rm", "--force", made["trajectory"])


def test_an_evicted_snapshot_is_all_there(small: Snap, runtime: str) -> None:
    """Read, compared, restored, forked and rewound to without its layers."""
    trajectory, _ = small.create("--runtime", runtime)
    script = (
        "mkdir -p d/e; echo one > d/e/f; ln d/e/f hard; ln -s d/e/f soft; chmod 4755 d/e/f; rm /usr/share/common-licenses/GPL-1;"
        " mv /etc/skel /etc/skeleton; truncate -s 1M sparse; echo end >> sparse"
    )
    first = small.sh(trajectory, script)["snapshot"]
    seen = small.manifest(trajectory)
    second = small.sh(trajectory, "rm -r d; echo two > two")["snapshot"]
    small("stop", trajectory, "--wait", "stored")
    wait_until_cold(small)
    assert small("cat", f"{first}:/workspace/d/e/f").stdout == "one\n"
    changed = {c["path"] for c in small.json("diff", first, second)}
    assert {"/workspace/d", "/workspace/two"} <= changed
    (fork,) = small.json("fork", first)["trajectories"]
    assert small.manifest(fork) == seen
    assert small.sh(fork, "ls /usr/share/common-licenses/GPL-1 /etc/skel", code=None)["exit_code"] != 0
    assert small.sh(fork, "ls -A /etc/skeleton | wc -l; echo more >> d/e/f; cat d/e/f")["stdout"].split("\n")[1:] == [
        "one",
        "more",
        "",
    ]
    after = small.sh(fork, "cat soft sparse | tail -c 4; echo 3 > three")["snapshot"]
    small("stop", fork, "--wait", "stored")
    assert small("cat", f"{after}:/workspace/d/e/f").stdout == "one\nmore\n"
    assert small("cat", f"{after}:/workspace/three").stdout == "3\n"
    small("rewind", trajectory, first)
    assert small.manifest(trajectory) == seen
    for each in (fork, trajectory):
        small("rm", "--force", each)


@pytest.mark.long  # when it dies: system/test_cold_kill.py
def test_the_lazy_process_may_die(small: Snap) -> None:
    trajectory, _ = small.create("--runtime", "runc")
    snapshot = small.sh(trajectory, "seq 1000 > numbers")["snapshot"]
    small("stop", trajectory, "--wait", "stored")
    wait_until_cold(small)
    (fork,) = small.json("fork", snapshot)["trajectories"]
    for pid in _children(small.daemon_pid(), "lazy"):
        process = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        select.select([process], [], [])  # a command that meets its last moments gets an error
        os.close(process)
    assert small.sh(fork, "tail -1 numbers")["stdout"] == "1000\n"
    (other,) = small.json("fork", snapshot)["trajectories"]
    assert small.sh(other, "tail -1 numbers")["stdout"] == "1000\n"
    small("rewind", fork, snapshot)
    assert small.sh(fork, "tail -1 numbers")["stdout"] == "1000\n"
    for each in (fork, other, trajectory):
        small("rm", "--force", each)


def _children(pid: int, role: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                parent = int(Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == pid and b"snapshotd.daemon.children" in words and role.encode() in words:
                found.append(int(name))
    return found


@pytest.fixture
def smaller(small_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snap]:
    """A daemon with an image of a few files, for what reads or writes all that is stored."""
    with daemon_with(small_root, tmp_path_factory.mktemp("smaller") / "state") as snap:
        yield snap


def test_prune_says_what_goes_and_does_it(smaller: Snap) -> None:
    small = smaller
    trajectory, first = small.create("--runtime", "runc", "--wait", "stored")
    scripts = [f"head -c 300000 /dev/urandom > big; echo {n} > n" for n in range(6)]
    # Stored one by one: in a pack with the image, which stays, three steps would not be worth rewriting it.
    steps = [
        small.json("exec", "--wait", "stored", trajectory, "--", "sh", "-c", script)["snapshot"] for script in scripts
    ]
    small("tag", steps[1], "keep-me")
    small("stop", trajectory)
    dry = small.json("prune", "--dry-run", "--keep-last", "2", "--grace", "0")
    assert {p["snapshot"] for p in dry["pruned"]} == {steps[0], steps[2], steps[3]}
    assert dry["freed_bytes"] >= 3 * 300000
    assert all(s["state"] == "stored" for s in small.json("log", trajectory)), "a dry run changes nothing"
    done = small.json("prune", "--force", "--keep-last", "2", "--grace", "0")
    assert done["pruned"] == dry["pruned"]
    assert done["freed_bytes"] == dry["freed_bytes"]
    states = {s["id"]: s["state"] for s in small.json("log", trajectory)}
    assert [states[s] for s in (first, *steps)] == [
        "stored",
        "pruned",
        "stored",
        "pruned",
        "pruned",
        "stored",
        "stored",
    ]
    for number in (1, 4, 5):
        assert small("cat", f"{steps[number]}:/workspace/n").stdout == f"{number}\n"
    assert "given up" in small("cat", f"{steps[0]}:/workspace/n", code=4).stderr
    assert "given up" in small("fork", steps[2], code=4).stderr
    assert small.json("show", steps[0])["tool"]["arguments"]["argv"][0] == "sh", "its call is still there"
    small("check", "--read-data")
    small("rm", "--force", trajectory)
    assert small.json("prune", "--force", "--grace", "0")["freed_bytes"] >= 3 * 300000
    small("check", "--read-data")


@pytest.mark.long  # repair: test_damage.py
def test_damage_is_found_named_and_repaired_from_layers(smaller: Snap) -> None:
    snap = smaller
    trajectory, _ = snap.create("--runtime", "runc")
    kept = snap.json("exec", "--wait", "stored", trajectory, "--", "sh", "-c", "head -c 200000 /dev/urandom > data")[
        "snapshot"
    ]
    content = snap("restore", kept, "--to", snap.state_dir.parent / "before").returncode
    assert content == 0
    assert snap.json("repair")["actions"] == [], "nothing is done to a healthy repository"
    pack = max((snap.state_dir / "repo" / "store").rglob("packs/*/*"), key=lambda p: p.stat().st_mtime)
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 0xFF
    pack.chmod(0o600)
    pack.write_bytes(data)
    report = snap.json("check", "--read-data", code=20)
    assert any(d["pack"] and d["what"] for d in report["damages"])
    assert snap.json("repair")["lost"] == []
    snap("check", "--read-data")
    snap("restore", kept, "--to", snap.state_dir.parent / "after")
    assert (snap.state_dir.parent / "after/workspace/data").read_bytes() == (
        snap.state_dir.parent / "before/workspace/data"
    ).read_bytes()
    snap("rm", "--force", trajectory)
