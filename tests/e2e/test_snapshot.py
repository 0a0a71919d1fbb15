"""`snapshot` as a user sees it: a snapshot between two calls, in the middle of one, and every so often."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from snapshotd.client import Sandbox, Snapshotd
from snapshotd.errors import Conflict, UsageError
from snapshotd.types import new_id, short
from tests import way
from tests.e2e.support import AGENT, Snap, wait_until

IN_A_CALL = (
    AGENT
    + """
import time

@tool
def build():
    found = os.path.exists("half")
    open("half", "w").close()
    while not os.path.exists("/tmp/go"):
        time.sleep(0.02)
    open("whole", "w").write(f"half was there: {found}")

shell("echo source > source")
build()
"""
)
"""Its second call waits in the middle."""


def sandbox_of(snap: Snap, runtime: str) -> Sandbox:
    return Sandbox.connect(snap.create("--runtime", runtime)[0], client=Snapshotd(snap.state_dir))


def files_inside(snap: Snap, name: str, inside: str) -> Path:
    """A path in a running sandbox, seen from here."""
    (pid,) = [one["pid"] for one in snap.json("ps") if name in (one["name"], one["trajectory"])]
    return Path(f"/proc/{pid}/root/{inside}")


@pytest.mark.usefixtures("both_clients")
@pytest.mark.same_verbs
def test_it_has_the_files_of_now_and_a_name(snap: Snap, runtime: str) -> None:
    sandbox = sandbox_of(snap, runtime)
    tag = f"now-{new_id()[:8]}"
    sandbox.exec("(sleep 0.2; echo late > late) >/dev/null 2>&1 & echo early > early")
    wait_until(lambda: sandbox.files.exists("late"), "it is written after its call")
    wait_until(lambda: not sandbox.exec("pgrep sleep").stdout, "nothing but init is alive")
    sandbox.exec("true")
    before = len(sandbox.snapshots())
    taken = sandbox.snapshot(tag)
    assert (taken.info.tool.name, taken.info.tool.arguments, taken.info.tags) == ("snapshot", {"name": tag}, (tag,))
    assert (taken.cat("/workspace/late"), sandbox.head().id, taken.info.method) == (b"late\n", taken.id, "unchanged")
    with pytest.raises(Conflict, match="belongs to snapshot"):
        sandbox.snapshot(tag)
    with pytest.raises(UsageError, match="cannot be a tag"):
        sandbox.snapshot("no name")
    with pytest.raises(UsageError, match="could be taken for an id"):
        sandbox.snapshot(sandbox.head().id)
    assert len(sandbox.snapshots()) == before + 1
    server = sandbox.exec("echo one > live; exec sleep 1000", background=True)
    wait_until(lambda: sandbox.files.exists("live"), "it runs")
    alive = sandbox.snapshot()
    assert (alive.info.method, alive.cat("/workspace/live"), alive.info.tool.arguments) == (way.COPY, b"one\n", {})
    assert server.info.status == "running", "whatever runs runs on"
    (fork,) = alive.fork()
    assert fork.files.read("live") == b"one\n"
    fork.remove(force=True)
    sandbox.stop()
    with pytest.raises(Conflict, match=f"not running.*tag {short(sandbox.head().id)}"):
        sandbox.snapshot()
    sandbox.remove()


def test_in_the_middle_of_a_call_it_says_so_and_a_resumed_agent_makes_the_call_again_from_its_beginning(
    snap: Snap, runtime: str, tmp_path: Path
) -> None:
    agent, name = tmp_path / "agent.py", f"half-{new_id()[:8]}"
    agent.write_text(IN_A_CALL)
    snap("run", "--detach", "--runtime", runtime, "--name", name, agent)
    wait_until(lambda: files_inside(snap, name, "workspace/half").exists(), "it is in its second call")
    taken = [snap("snapshot", name).stdout.strip() for _ in range(2)]
    shown = [snap.json("show", one) for one in taken]
    assert [one["tool"]["arguments"] for one in shown] == [{"during": ["build"]}] * 2
    assert [one["method"] for one in shown] == [way.COPY, "unchanged" if way.WAY else "copy"]
    assert snap("cat", f"{taken[0]}:/workspace/half").stdout == ""

    (fork,) = snap.json("fork", taken[1], "--resume")["trajectories"]
    wait_until(lambda: files_inside(snap, fork, "workspace/half").exists(), "its call runs again")
    files_inside(snap, fork, "tmp/go").touch()
    snap("wait", fork)
    assert snap("cat", f"{fork}:/workspace/whole").stdout == "half was there: False"

    snap("stop", name)
    snap("resume", "--detach", name)
    wait_until(lambda: files_inside(snap, name, "workspace/half").exists(), "its call runs again")
    files_inside(snap, name, "tmp/go").touch()
    snap("wait", name)
    assert snap("cat", f"{name}:/workspace/whole").stdout == "half was there: False"
    assert [one["tool"]["name"] for one in snap.json("log", name)].count("shell") == 1


def test_one_every_so_often_until_it_is_interrupted_or_the_sandbox_ends(snap: Snap, runtime: str) -> None:
    sandbox = sandbox_of(snap, runtime)

    def taken() -> int:
        return [one.info.tool.name for one in sandbox.snapshots()].count("snapshot")

    with snap.start("snapshot", "--every", "0.05", sandbox.id) as every:
        sandbox.exec("(while :; do date +%N > now; sleep 0.01; done) >/dev/null 2>&1 &")
        wait_until(lambda: taken() >= 3, "it takes one after the other")
        every.send_signal(signal.SIGINT)
        out, _ = every.communicate(timeout=60)
    assert every.returncode == 130
    assert out.split() == [one.id for one in sandbox.snapshots() if one.info.tool.name == "snapshot"]
    with snap.start("snapshot", "--every", "0.05", sandbox.id) as every:
        assert every.stdout is not None
        assert every.stdout.readline()
        sandbox.stop()
        assert every.wait(60) == 0, "the sandbox has ended"
        every.communicate()
    sandbox.exec("true")
    client = Snapshotd(snap.state_dir)
    assert client.take_snapshot(sandbox.id, if_changed=True).id == sandbox.head().id, "no file was written"
    sandbox.stop()
    assert "--every" in snap("snapshot", "--every", "1", "--name", "x", sandbox.id, code=2).stderr
    assert "not running" in snap("snapshot", "--every", "1", sandbox.id, code=Conflict.exit_code).stderr
    sandbox.remove()
