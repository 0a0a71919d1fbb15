"""A fork of more children than run at once: each gets its turn, one that fails is said, and by default it takes all back."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from snapshotd.client import Snapshotd
from snapshotd.errors import Conflict, UsageError
from tests import long
from tests.e2e.support import Snap, wait_until

CHILDREN = long.size(12, 200)


@pytest.fixture(scope="module")
def box(snap: Snap) -> str:
    trajectory, _ = snap.create("--runtime", "runc")
    snap.sh(trajectory, "echo source > file")
    snap("stop", trajectory)
    return trajectory


@pytest.mark.runc
def test_each_child_gets_its_turn_and_its_number(snap: Snap, box: str) -> None:
    client = Snapshotd(state_dir=snap.state_dir, autostart=False)
    head = client.trajectory(box).head
    most, over = [0], threading.Event()

    def watch() -> None:
        while not over.is_set():
            running = [one for one in client.sandboxes() if one.agent_running and one.trajectory.forked_from == head]
            most.append(len(running))
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    script = "echo $SNAPSHOTD_FORK_INDEX/$SNAPSHOTD_FORK_COUNT {index} >> file; exit {index}"
    found = snap.json("fork", box, "--n", str(CHILDREN), "--parallel", "3", "--", "sh", "-c", script)
    over.set()
    watcher.join()
    assert max(most) <= 3
    children = found["children"]
    assert [(one["index"], one["exit_code"]) for one in children] == [(n, n % 256) for n in range(CHILDREN)]
    assert {one["error"] for one in children} == {None}
    experiment = {
        one["experiment"] for one in snap.json("ls") if one["id"] in {child["trajectory"] for child in children}
    }
    assert experiment == {found["experiment"]}
    for number in (0, CHILDREN - 1):
        text = snap("cat", f"{children[number]['trajectory']}:/workspace/file").stdout
        assert text == f"source\n{number}/{CHILDREN} {number}\n"
    own = {child["trajectory"] for child in children}
    wait_until(lambda: not own & {one["trajectory"] for one in snap.json("ps")}, "every sandbox has ended")
    for child in children:
        snap("rm", child["trajectory"])


@pytest.mark.runc
def test_one_that_does_not_start_takes_all_back_unless_told(snap: Snap, box: str, tmp_path: Path) -> None:
    """The second child's name is taken."""
    before = [one["id"] for one in snap.json("ls")]
    taken, _ = snap.create("--runtime", "runc", "--name", f"{tmp_path.name}-1")
    words = ("fork", box, "--n", "3", "--parallel", "1", "--name", tmp_path.name)
    failed = snap(*words, "--", "true", code=Conflict.exit_code)
    assert f"{tmp_path.name}-1" in failed.stderr
    assert {one["id"] for one in snap.json("ls")} == {*before, taken}, "the first is gone again"
    done = snap.json(*words, "--keep-going", "--", "true", code=1)["children"]
    assert [one["error"] is None for one in done] == [True, False, True]
    assert [one["exit_code"] for one in done] == [0, None, 0]
    for each in (taken, done[0]["trajectory"], done[2]["trajectory"]):
        snap("rm", "--force", each)


@pytest.mark.runc
def test_variants_wait_for_their_turn(snap: Snap, box: str) -> None:
    ways = [word for way in ("a", "b", "c") for word in ("--variant", f"{way}:env.WAY={way}-{{index}}")]
    done = snap.json("fork", box, *ways, "--parallel", "auto", "--", "sh", "-c", "echo $WAY > file")["children"]
    assert [one["label"] for one in done] == ["a", "b", "c"]
    for index, child in enumerate(done):
        assert snap("cat", f"{child['trajectory']}:/workspace/file").stdout == f"{child['label']}-{index}\n"
        snap("rm", child["trajectory"])


@pytest.mark.runc
def test_what_a_queue_refuses(snap: Snap, box: str, tmp_path: Path) -> None:
    before = snap.json("ls")
    many, too_many = tmp_path / "many.toml", tmp_path / "too-many.toml"
    many.write_text("".join(f"[w{number}]\n" for number in range(257)))
    too_many.write_text("".join(f"[w{number}]\n" for number in range(10_001)))
    for words, said in (
        (("--variants", many, "--", "true"), "257 forks are more than the 256 that one fork makes; --parallel P"),
        (
            ("--variants", too_many, "--parallel", "5", "--", "true"),
            "one fork makes 1 to 10000 children, not 10001 variants",
        ),
        (("--variants", too_many, "--", "true"), "10001 forks"),
        (("--n", "10000", "--", "true"), "--parallel"),
        (("--n", "10001", "--parallel", "5", "--", "true"), "10,000"),
        (("--n", "3", "--parallel", "0", "--", "true"), "whole number"),
        (("--n", "3", "--parallel", "2"), "programs that end"),
    ):
        assert said in snap("fork", box, *words, code=UsageError.exit_code).stderr
    assert snap.json("ls") == before
