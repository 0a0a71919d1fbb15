"""Reuse: a second run is answered from an earlier one, call by call, and ends in the same files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.types import short
from tests import long
from tests.e2e.model_rig import KEY, PROGRAMS, bash, provider
from tests.e2e.support import AGENT, MANIFEST, Snap, wait_until

pytestmark = pytest.mark.runc
HOW_OFTEN = """
import time

@tool
def stamp(name):
    with open(name, "a") as file:
        file.write("%d\\n" % time.time_ns())
    return sorted(os.listdir("."))

"""
"""A tool that leaves another file at each run of it."""
THIRTY = (
    AGENT
    + """
for number in range(30):
    last = shell("echo %d >> log; cat log > copy-%d; date +%%N > when-%d" % (number, number, number))
    assert open("log").read().split() == [str(n) for n in range(number + 1)]
assert last == {"exit_code": 0, "output": ""}
print(len(os.listdir(".")))
"""
)
TWO_WAYS = (
    AGENT
    + HOW_OFTEN
    + """
for number in range(12):
    stamp("same-%d" % number if number != 9 else WHICH)
"""
)


class Runs:
    """Runs of one program, one after the other; each is forgotten at the end."""

    def __init__(self, snap: Snap, runtime: str, folder: Path) -> None:
        self.snap, self.runtime, self.folder = snap, runtime, folder
        self.made: list[str] = []

    def __call__(self, program: str, *options: str | Path, args: tuple[str, ...] = (), code: int = 0) -> Run:
        file = self.folder / "agent.py"
        file.write_text(program)
        name = f"{self.folder.name[-40:]}-{len(self.made)}"
        self.made.append(name)
        words = ("run", "--json", "--runtime", self.runtime, "--name", name)
        done = self.snap(*words, *options, file, *args, code=code)
        return Run(self.snap, name, [json.loads(line) for line in done.stdout.splitlines()])


class Run:
    def __init__(self, snap: Snap, name: str, events: list[dict[str, Any]]) -> None:
        self.snap, self.name, self.events = snap, name, events
        assert events[-1]["event"] == "finished"

    @property
    def reused(self) -> tuple[int, int] | None:
        """The number of calls that were reused, and of all."""
        found = self.events[-1].get("reuse")
        return None if found is None else (found["calls"], found["of"])

    @property
    def files(self) -> dict[str, Any]:
        """Content and metadata of all files at its end."""
        return files_of(self.snap, self.name)

    @property
    def log(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.snap.json("log", "--all", self.name)
        return found


def files_of(snap: Snap, ref: str) -> dict[str, Any]:
    done = snap.json("exec", "--snapshot", ref, "--", "python3", "-c", MANIFEST, "/workspace")
    found: dict[str, Any] = json.loads(done["stdout"])
    return found


@pytest.fixture
def runs(snap: Snap, runc_ready: None, tmp_path: Path) -> Iterator[Runs]:
    made = Runs(snap, "runc", tmp_path)
    yield made
    left = {one[key] for one in snap.json("ls") for key in ("id", "name")}
    for name in reversed(made.made):  # the newest first: its snapshots may have no chunks but the older one's yet
        if name in left:
            snap("rm", "--force", name)


def test_a_second_run_executes_no_call(snap: Snap, runtime: str, tmp_path: Path) -> None:
    runs = Runs(snap, runtime, tmp_path)
    first = runs(THIRTY)
    assert first.reused is None
    second = runs(THIRTY, "--reuse")
    assert second.reused == (30, 30)
    assert second.files == first.files, "the times in them, too"
    assert [one["reused"] for one in second.log] == [None, *[one["id"] for one in first.log[1:-1]], None]
    assert [one["tool"]["name"] for one in second.log] == [one["tool"]["name"] for one in first.log]
    head, last = second.log[-1], second.log[-2]
    assert head["tool"]["arguments"]["reused"] == {"calls": 30, "of": 30}
    source = first.log[-2]["id"]
    assert f"shell ← {short(source)}" in snap("log", second.name).stdout
    assert source in snap("show", last["id"]).stdout
    assert snap("show", "--output", "output", last["id"]).stdout == snap("show", "--output", "output", source).stdout
    for one in (*runs.made, runs.made[-1]):
        snap("rm", "--force", one, code=None)


@pytest.mark.long  # test_fork.py and test_storage.py with any run
def test_it_is_a_run_of_its_own(snap: Snap, runs: Runs, tmp_path: Path) -> None:
    """It can be resumed, forked, stored and restored when the run that it was answered from is gone."""
    program = TWO_WAYS.replace("WHICH", "'one'")
    first, second = runs(program), runs(program, "--reuse", "--wait", "stored")
    assert second.reused == (12, 12)
    files = first.files
    snap("rm", first.name)
    assert second.files == files
    middle = second.log[6]["id"]
    snap("restore", f"{middle}", "--path", "/workspace", "--to", tmp_path / "restored")
    assert sorted(one.name for one in (tmp_path / "restored").iterdir()) == [f"same-{number}" for number in range(6)]
    (fork,) = snap.json("fork", "--resume", middle)["trajectories"]
    runs.made.append(fork)
    snap("wait", fork)
    assert [one["reused"] for one in snap.json("log", fork)] == [None] * 7, "six calls and the exit: forks run"
    third = runs(program, "--reuse")
    assert third.reused == (12, 12), "from the second"
    assert snap("check", "--read-data").returncode == 0


@pytest.mark.long  # another call in the middle: test_from_there_on_everything_runs
def test_a_changed_tenth_call_reuses_nine(snap: Snap, runs: Runs) -> None:
    first = runs(TWO_WAYS.replace("WHICH", "'one'"))
    other = runs(TWO_WAYS.replace("WHICH", "'two'"), "--reuse")
    assert other.reused == (9, 12)
    shown = snap("attach", other.name).stderr
    assert "reused 9 of 12 calls" in shown
    assert f"(reused from {short(first.log[1]['id'])})" in shown
    before, after = first.files, other.files
    same = {f"same-{number}" for number in range(9)}
    assert {name for name in before if before[name] == after.get(name)} == same, "the rest was made anew"
    assert set(after) == same | {"two", "same-10", "same-11"}
    for which, source in (("one", first), ("two", other)):
        again = runs(TWO_WAYS.replace("WHICH", f"'{which}'"), "--reuse")
        assert (again.reused, again.files) == ((12, 12), source.files), "of two ways the one that it goes"


@pytest.mark.long  # what else counts: test_the_code_of_a_tool_counts
def test_it_has_to_begin_in_the_same_way(snap: Snap, runs: Runs, root_tar: Path, tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    folder.mkdir()
    (folder / "input").write_text("one")
    program = AGENT + HOW_OFTEN + "stamp('a'); stamp('b')\n"
    options: tuple[str | Path, ...] = ("--workspace", folder, "--env", "WAY=1")
    runs(program, *options, args=("x",))
    assert runs(program, "--reuse", *options, args=("x",)).reused == (2, 2)
    (folder / "input").touch()
    assert runs(program, "--reuse", *options, args=("x",)).reused == (2, 2), "a time of its files is no content"
    assert runs(program, "--reuse", *options, args=("y",)).reused == (0, 2)
    assert runs(program, "--reuse", "--workspace", folder, "--env", "WAY=2", args=("x",)).reused == (0, 2)
    assert runs(program, "--reuse", *options, "--memory", "1g", args=("x",)).reused == (0, 2)
    snap("image", "import", root_tar, "--name", "reuse-other")
    assert runs(program, "--reuse", *options, "--image", "reuse-other", args=("x",)).reused == (0, 2)
    (folder / "input").write_text("two")
    assert runs(program, "--reuse", *options, args=("x",)).reused == (0, 2)
    (folder / "input").write_text("one")
    (folder / "input").chmod(0o755)
    assert runs(program, "--reuse", *options, args=("x",)).reused == (0, 2)


LIVE = {
    "an opt-out": "@tool(reuse=False)\ndef other(): pass",
    "a call that can be sent twice": "@tool(side_effect='idempotent')\ndef other(): pass",
    "a call that cannot": "@tool(side_effect='irreversible')\ndef other(): pass",
    "the state": "@tool\ndef other(): state['x'] = 1",
    "the store": "@tool\ndef other(): store.get('x', 1)",
    "a message": "@tool\ndef other(): message('user', 'x')",
    "a checkpoint": "@tool\ndef other(): checkpoint('x')",
    "a failure": "@tool\ndef other(): raise ValueError('x')",
    "side by side": "@tool\nasync def one(n): await asyncio.sleep(0.3)\n"
    "async def both(): await asyncio.gather(one(1), one(2))\ndef other(): asyncio.run(both())",
}
AROUND = (
    AGENT
    + HOW_OFTEN
    + """
import asyncio
from snapshotd.agent import checkpoint, state, store
OTHER
stamp("before")
checkpoint("a snapshot of the program's own")
open("mine", "w").close()
stamp("between")
try:
    other()
except ValueError:
    pass
stamp("after")
"""
)


@pytest.mark.parametrize("kind", long.some(LIVE, 2))
def test_from_there_on_everything_runs(runs: Runs, kind: str) -> None:
    program = AROUND.replace("OTHER", LIVE[kind])
    runs(program)
    reused, of = runs(program, "--reuse").reused or (0, 0)
    assert (reused, of) == (2, 5 if kind == "side by side" else 4)


def test_the_code_of_a_tool_counts(runs: Runs) -> None:
    program = AGENT + HOW_OFTEN + "def help(name): return name + 'x'\n@tool\ndef helped(name): stamp(help(name))\n"
    use = "stamp('a')\nhelped('b')\nstamp('c')\n"
    runs(program + use)
    assert runs(program + "# another program, the same tools\n" + use, "--reuse").reused == (3, 3)
    assert runs(program.replace("'x'", "'y'") + use, "--reuse").reused == (1, 3), "what it calls is another one"
    assert runs(program.replace("%d\\n", "%d!\\n") + use, "--reuse").reused == (0, 3)


@pytest.mark.parametrize("command", long.some(["echo mine > mine", "echo mine > mine; exec sleep 1000"], 1))
def test_a_hand_of_somebody_else(snap: Snap, runs: Runs, tmp_path: Path, command: str) -> None:
    """Files that a person changed in the middle of a run are not the work of its calls, even if the command that changed
    them ended after a call, or goes on."""
    tools = AGENT + HOW_OFTEN
    (tmp_path / "agent.py").write_text(
        tools + "stamp('a')\nwhile not os.path.exists('mine'): time.sleep(0.02)\nstamp('b')\n"
    )
    name = f"{tmp_path.name[-40:]}-hand"
    runs.made.append(name)
    snap("run", "--detach", "--runtime", "runc", "--name", name, tmp_path / "agent.py")
    wait_until(lambda: snap.json("log", name)[-1]["tool"]["name"] == "stamp", "it waits behind its first call")
    snap("exec", *(("--detach",) if "sleep" in command else ()), name, "--", "sh", "-c", command)
    snap("wait", name)
    second = runs(tools + "stamp('a')\nstamp('b')\n", "--reuse")
    assert second.reused == (1, 2)
    assert set(second.files) == {"a", "b"}


@pytest.mark.long  # those that are there: the first test
def test_files_that_were_given_up(snap: Snap, runs: Runs) -> None:
    program = AGENT + HOW_OFTEN + "for name in 'abc': stamp(name)\n"
    first = runs(program, "--wait", "stored")
    snap("policy", first.name, "--keep-last", "1")
    snap("prune", "--force")
    assert [one["state"] for one in first.log[1:]] == ["pruned", "pruned", "pruned", "stored"]
    assert runs(program, "--reuse").reused == (0, 3)
    assert runs(program, "--reuse").reused == (3, 3), "from the second"


@pytest.mark.long  # a person's command that goes on: test_a_hand_of_somebody_else
def test_a_program_with_company(runs: Runs) -> None:
    """Another process lives in the sandbox: files are rewritten in place."""
    program = (
        AGENT
        + HOW_OFTEN
        + "child = subprocess.Popen(['sleep', '1000'])\nfor name in 'abc': stamp(name)\nchild.kill()\n"
    )
    first, second = runs(program), runs(program, "--reuse")
    assert (second.reused, second.files) == ((3, 3), first.files)
    more = runs(program.replace("'abc'", "'abcd'"), "--reuse")
    assert more.reused == (3, 4)
    after = more.files
    assert {name: after[name] for name in "abc"} == {name: first.files[name] for name in "abc"}


@pytest.mark.long  # a run that is not answered: test_survive.py
@pytest.mark.parametrize(
    "failpoint",
    [
        "engine.reuse.moved:4",
        *(pytest.param(f"engine.step.{name}:4", marks=pytest.mark.long) for name in ("committed", "begin")),
    ],
)
def test_a_daemon_that_is_killed_in_between(own_snap: Snap, runc_ready: None, tmp_path: Path, failpoint: str) -> None:
    program = AGENT + HOW_OFTEN + "for name in 'abcdef': stamp(name)\n"
    runs = Runs(own_snap, "runc", tmp_path)
    first = runs(program)
    own_snap.stop_daemon()
    armed = Snap(own_snap.state_dir, {**own_snap.env, "SNAPSHOTD_FAILPOINT": failpoint})
    armed("daemon", "--detach", code=None)
    name = f"{first.name}-killed"
    armed("run", "--reuse", "--detach", "--runtime", "runc", "--name", name, tmp_path / "agent.py", code=None)
    wait_until(lambda: own_snap("daemon", "--status", code=None).returncode != 0, "the daemon is dead")
    status = next(one["status"] for one in own_snap.json("ls") if one["name"] == name)
    if status == "interrupted":
        own_snap("resume", "--detach", name)
    own_snap("wait", name)
    log = own_snap.json("log", name)
    assert [one["reused"] is not None for one in log] == [False, *[True] * 6, False], "it goes on being answered"
    assert files_of(own_snap, name) == first.files
    shutil.rmtree(tmp_path, ignore_errors=True)
    for one in (name, first.name):
        own_snap("rm", "--force", one)


@pytest.mark.long  # those of a model in the program: the last test
def test_replies_of_an_unmodified_agent(snap: Snap, runs: Runs, tmp_path: Path) -> None:
    """The agent runs its tools itself, and its model is asked only where the conversation is another one."""
    look, write = bash("echo one > one; date +%s%N > stamp"), bash("echo two > two")
    options = ("--env", "OPENAI_API_KEY=none")
    with provider(tmp_path, look, write, {"text": "Done."}) as model:
        told = (*options, "--provider", f"openai={model.url}", "--provider-key", "openai=REUSE_KEY")
        keyed = Runs(Snap(snap.state_dir, {**snap.env, "REUSE_KEY": KEY}), "runc", tmp_path)
        keyed.made = runs.made
        program = (PROGRAMS / "plain_agent.py").read_text()
        first = keyed(program, *told, args=("repair it",))
        asked = len(model.asked())
        assert asked == 3
        second = keyed(program, "--reuse", "--reuse-replies", *told, args=("repair it",))
        assert second.events[-1]["reuse"] == {"calls": 0, "of": 2, "replies": 3, "replies_of": 3}
        assert len(model.asked()) == asked, "nobody was asked"
        assert [one["tool"]["name"] for one in second.log] == [one["tool"]["name"] for one in first.log]
        assert snap("show", "--conversation", second.name).stdout == snap("show", "--conversation", first.name).stdout
        assert second.files["one"]["sha256"] == first.files["one"]["sha256"]
        assert second.files["stamp"]["sha256"] != first.files["stamp"]["sha256"], "its tools ran"
        third = keyed(program, "--reuse", *told, args=("repair it",))
        assert len(model.asked()) == 2 * asked, "calls alone are no replies"
        assert third.reused == (0, 2)


def test_replies_need_reuse(snap: Snap, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("")
    refused = snap("run", "--reuse-replies", tmp_path / "agent.py", code=None)
    assert refused.returncode in (2, 125)
    assert "--reuse-replies goes with --reuse" in refused.stderr


def test_replies_of_a_model_in_the_program(runs: Runs) -> None:
    program = (
        AGENT
        + HOW_OFTEN
        + "from snapshotd.agent import model\n@model\ndef ask(what): return {'at': time.time_ns()}\n"
        + "open('said', 'w').write(repr(ask('x')['at']))\nstamp('a')\n"
    )
    first = runs(program)
    live = runs(program, "--reuse")
    assert live.reused == (1, 1)
    assert live.files["said"]["sha256"] == first.files["said"]["sha256"], "the call's files are the recorded ones"
    second = runs(program, "--reuse", "--reuse-replies")
    assert second.events[-1]["reuse"] == {"calls": 1, "of": 1, "replies": 1, "replies_of": 1}
