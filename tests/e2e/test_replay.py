"""A program that is started again meets what is recorded: quickly, side by side, and told exactly where it does
something else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.client import Snapshotd
from snapshotd.errors import Conflict, Undecided
from snapshotd.types import short
from tests import long
from tests.e2e.support import AGENT, Snap, wait_until

STARTED = """
import os, sys, threading
from snapshotd.agent import tool

first_time = []

@tool
def started():
    first_time.append(True)

started()
"""
"""What is recorded does not run again: so a program of these tests knows whether it is resumed."""
HUNDRED = (
    AGENT
    + STARTED
    + """
for number in range(100):
    shell("echo %d >> log" % number)
if first_time:
    os._exit(9)
assert open("log").read().split() == [str(n) for n in range(100)]
"""
)
DIVERGENT = (
    AGENT
    + STARTED
    + """
shell("echo one > file")
shell("echo %s >> file" % ("two" if first_time else "other"))
os._exit(9)
"""
)
WAITING = (
    AGENT
    + STARTED
    + """
import time
shell("echo one > file")
if not first_time:
    open("/tmp/here", "w").close()
    while not os.path.exists("/tmp/go"):
        time.sleep(0.05)
shell("echo two > file")
if first_time:
    os._exit(9)
open("/tmp/there", "w").close()
time.sleep(1000)
"""
)
POLLING = (
    AGENT
    + """
import time
shell("echo one > file")
while not os.path.exists("/workspace/go"):
    time.sleep(0.05)
shell("cat early go > both")
"""
)
BETWEEN = (
    AGENT
    + STARTED
    + """
def write(line):
    with open("/workspace/lines", "a") as file:
        print(line, file=file)

write("before")
shell("echo one >> lines")
write("between")
if first_time:
    os._exit(9)
if "again" in sys.argv:
    shell("echo two >> lines")
write("after")
"""
)
"""It writes to a file between its calls, and after the last of them."""
LASTING = (
    AGENT
    + STARTED
    + """
import time
shell("echo one > file")
if first_time:
    os._exit(9)
while not os.path.exists("/tmp/go"):
    time.sleep(0.05)
"""
)
"""Resumed, it runs until it is let go: whoever comes second finds it running."""
PARALLEL = (
    STARTED
    + """
import asyncio
from concurrent.futures import ThreadPoolExecutor

all_there = threading.Barrier(4)

@tool
def thread(number):
    all_there.wait(60)
    with open("/workspace/threads-%d" % number, "a") as file:
        file.write("once\\n")
    return number

@tool
async def coroutine(number):
    await asyncio.sleep(0.01 * (number % 3))
    with open("/workspace/coroutines-%d" % number, "a") as file:
        file.write("once\\n")
    return number

async def all_of_them():
    return await asyncio.gather(*map(coroutine, range(6)))

with ThreadPoolExecutor(4) as pool:
    assert list(pool.map(thread, range(4))) == list(range(4))
assert asyncio.run(all_of_them()) == list(range(6))
if first_time:
    os._exit(9)
"""
)
BESIDE = (
    STARTED
    + """
import asyncio
from concurrent.futures import ThreadPoolExecutor

THREADS = sys.argv[2] == "threads"
all_quick = threading.Event() if THREADS else asyncio.Event()

def write(name):
    with open("/workspace/" + name, "a") as file:
        file.write("once\\n")

def slow():
    write("slow")

def quick(number):
    write("quick-%d" % number)
    if first_time and sys.argv[3:] == [str(number)]:
        os._exit(9)

if THREADS:
    @tool(name="slow")
    def slow_tool():
        all_quick.wait(60)
        slow()
    quick_tool = tool(name="quick")(quick)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(slow_tool)
        for number in range(3):
            quick_tool(number)
        all_quick.set()
        running.result()
else:
    @tool(name="slow")
    async def slow_tool():
        await asyncio.wait_for(all_quick.wait(), 60)
        slow()
    @tool(name="quick")
    async def quick_tool(number):
        quick(number)
    async def all_of_them():
        for number in range(3):
            await quick_tool(number)
        all_quick.set()
    async def both():
        await asyncio.gather(slow_tool(), all_of_them())
    asyncio.run(both())
"""
)
"""`slow` begins first, and ends after all the others."""
CUT_OFF = (
    STARTED
    + """
from snapshotd.agent import current_call, message, store, task

STOP = sys.argv[2] if first_time else ""

@tool(side_effect="irreversible")
def pay(amount):
    store.put("paid-%d" % amount, store.get("paid-%d" % amount, 0, namespace=sys.argv[1]) + 1, namespace=sys.argv[1])
    if STOP == "pay":
        os._exit(9)
    return "paid %d" % amount

@tool(side_effect="idempotent")
def put(what):
    keys = store.get("keys", [], namespace=sys.argv[1])
    store.put("keys", [*keys, current_call().key], namespace=sys.argv[1])
    if STOP == "put":
        os._exit(9)
    return what

with task("first"):
    put("first")
with task("second"):
    message("assistant", {"got": pay(5)})
"""
)


LIKE_MARKERS = (
    AGENT
    + """
def write(word):
    with open("file", "a") as f:
        f.write(word + "\\n")

@tool
def look():
    return "nothing there"

@tool
def edit(text):
    write(text)
    return "done"

@tool
def retry():
    write("again")

@tool(name="exit")
def leave():
    return None

message("user", "go")
message("tool", look())
message("tool", edit("one"))
message("assistant", "more")
retry()
message("tool", edit("two"))
leave()
"""
)


NATURAL = (
    AGENT
    + """
@tool
def look(number):
    return f"saw {number}"

message("user", "go")
for number in range(2):
    asked = {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": str(number)}}
    message("assistant", {"content": None, "tool_calls": [asked]})
    message("tool", {"tool_call_id": asked["id"], "content": look(number)})
message("assistant", "done")
"""
)


@pytest.fixture
def name(snap: Snap, tmp_path: Path) -> Iterator[str]:
    """Of a trajectory, and of its namespace in the store, where the program keeps what it has done."""
    name = tmp_path.name.replace("_", "-")
    yield name
    for one in sorted(snap.json("ls"), key=lambda one: one["forked_from"] is None):  # forks first
        if (one["name"] or "").startswith(name):
            snap("rm", "--force", one["id"])


def _killed(snap: Snap, runtime: str, name: str, program: str, folder: Path, *args: str) -> None:
    """The program runs until it ends itself without a word."""
    (folder / "agent.py").write_text(program)
    snap("run", "--quiet", "--runtime", runtime, "--name", name, folder / "agent.py", name, *args, code=9)


def _everything(snap: Snap, name: str) -> tuple[Any, ...]:
    """But whether a snapshot is stored and counted yet, which goes on in the background."""
    head = next(one["head"] for one in snap.json("ls") if one["name"] == name)
    log = [
        {key: value for key, value in one.items() if key not in ("state", "files")} for one in snap.json("log", name)
    ]
    return (head, log, snap.json("journal", name), snap.json("state", name), snap.json("show", "--conversation", name))


def test_a_hundred_recorded_calls(snap: Snap, runtime: str, name: str, tmp_path: Path) -> None:
    _killed(snap, runtime, name, HUNDRED, tmp_path)
    before = [one for one in snap.json("journal", name) if one["name"] == "shell"]
    snapshots = [one["id"] for one in snap.json("log", "-n", "1000", name)]
    assert len(before) == 100
    assert "101 calls replayed" in snap("resume", name).stderr
    assert [one for one in snap.json("journal", name) if one["name"] == "shell"] == before
    after = snap.json("log", "-n", "1000", name)
    assert [one["id"] for one in after[: len(snapshots)]] == snapshots
    assert [one["tool"]["name"] for one in after[len(snapshots) :]] == ["exit"], "nothing ran again"


@pytest.mark.parametrize("makes_another_call", long.some([True, False], 1))
def test_what_a_program_writes_after_its_last_recorded_call_stays(
    snap: Snap, runtime: str, name: str, tmp_path: Path, makes_another_call: bool
) -> None:
    """Whether it goes live with another call, or ends without one."""
    _killed(snap, runtime, name, BETWEEN, tmp_path, *(["again"] if makes_another_call else []))
    lines = ["before", "one", "between", *(["two"] if makes_another_call else []), "after"]
    recorded = next(one["id"] for one in snap.json("log", name) if one["tool"]["name"] == "shell")
    (fork,) = snap.json("fork", "--resume", "--name", f"{name}-fork", recorded)["trajectories"]
    snap("attach", "--quiet", fork)
    assert snap("cat", f"{fork}:/workspace/lines").stdout.split() == lines
    snap("resume", "--quiet", name)
    assert snap("cat", f"{name}:/workspace/lines").stdout.split() == lines


def test_a_person_s_files_are_there_after_the_last_recorded_call(
    snap: Snap, runtime: str, name: str, tmp_path: Path
) -> None:
    _killed(snap, runtime, name, BETWEEN, tmp_path)
    snap.sh(name, "echo mine > /workspace/mine")
    snap("resume", "--quiet", name)
    assert snap("cat", f"{name}:/workspace/mine").stdout == "mine\n"
    assert snap("cat", f"{name}:/workspace/lines").stdout.split()[-1] == "after"


@pytest.mark.long  # one with calls: test_what_a_program_writes_after_its_last_recorded_call_stays
def test_a_program_without_calls_keeps_what_it_writes(snap: Snap, runtime: str, name: str) -> None:
    snap("create", "--runtime", runtime, "--name", name)
    script = "echo x >> runs; test -e /tmp/go || { touch /tmp/here; sleep 1000; }; echo y >> runs"
    box = f"{name}-fork"
    snap("fork", name, "--name", box, "--", "sh", "-c", script)
    (inside,) = [Path(f"/proc/{one['pid']}/root/tmp") for one in snap.json("ps") if one["name"] == box]
    wait_until((inside / "here").exists, "it has written the first line")
    snap("stop", box)
    assert snap("cat", f"{box}:/workspace/runs").stdout == "x\n"
    snap("resume", "--detach", box)
    (inside,) = [Path(f"/proc/{one['pid']}/root/tmp") for one in snap.json("ps") if one["name"] == box]
    wait_until((inside / "here").exists, "it has written the first line again")
    snap("stop", box)
    snap.sh(box, "touch /tmp/go")
    snap("resume", "--quiet", box)
    assert snap("cat", f"{box}:/workspace/runs").stdout.split()[-2:] == ["x", "y"]


def test_a_program_that_does_something_else_is_told_what_and_where(
    snap: Snap, runtime: str, name: str, tmp_path: Path
) -> None:
    _killed(snap, runtime, name, DIVERGENT, tmp_path)
    first = next(one["id"] for one in snap.json("log", name) if one["tool"]["name"] == "shell")
    before = _everything(snap, name)
    refused = snap("resume", name, code=1).stderr
    for part in (
        'tool shell with {"script": "echo two >> file"}',
        'tool shell with {"script": "echo other >> file"}',
        short(first),
    ):
        assert part in refused
    assert f"`snapshotd fork --resume {short(first)}`" in refused
    assert _everything(snap, name) == before, "nothing was changed"
    (fork,) = snap.json("fork", "--resume", "--name", f"{name}-fork", before[0])["trajectories"]
    snap("attach", "--quiet", fork, code=9)
    assert snap("cat", f"{fork}:/workspace/file").stdout == "one\nother\n", "a fork goes its own way from there"


@pytest.mark.long  # a person's files: three tests above
@pytest.mark.runc
def test_a_command_after_the_last_replayed_call_has_the_newest_files_and_keeps_its_own(
    snap: Snap, runc_ready: None, name: str, tmp_path: Path
) -> None:
    """Also while the program has not made its next call yet."""
    (tmp_path / "agent.py").write_text(POLLING)
    snap("run", "--detach", "--runtime", "runc", "--name", name, tmp_path / "agent.py")
    wait_until(lambda: [one["tool"]["name"] for one in snap.json("log", name)][-1:] == ["shell"], "it waits")
    snap.sh(name, "echo early > early")
    snap("stop", name)
    snap("resume", "--detach", name)
    wait_until(lambda: snap("exec", name, "--", "true", code=None).returncode == 0, "all is replayed")
    snap.sh(name, "cat early && echo late > go")
    snap("attach", "--quiet", name)
    assert snap("cat", f"{name}:/workspace/both").stdout == "early\nlate\n"


@pytest.mark.long  # the long set alone has what a person does meanwhile
@pytest.mark.runc
def test_no_command_comes_between_replayed_calls(snap: Snap, runc_ready: None, name: str, tmp_path: Path) -> None:
    """Until the program has met everything, its root becomes another one at each call."""
    _killed(snap, "runc", name, WAITING, tmp_path)
    head = snap.json("show", name)["id"]
    snap("resume", "--detach", name)
    (inside,) = [Path(f"/proc/{one['pid']}/root/tmp") for one in snap.json("ps") if one["name"] == name]
    wait_until((inside / "here").exists, "it waits between two calls")
    assert "is being replayed" in snap("exec", name, "--", "sh", "-c", "echo mine > mine", code=125).stderr
    assert "is being replayed" in snap("snapshot", name, code=Conflict.exit_code).stderr
    assert snap.json("show", name)["id"] == head
    (inside / "go").touch()
    wait_until((inside / "there").exists, "everything is met")
    done = snap.sh(name, "echo mine > mine")
    assert snap("cat", f"{done['snapshot']}:/workspace/mine").stdout == "mine\n"
    snap("stop", name)


def test_calls_side_by_side_are_met_again(snap: Snap, runtime: str, name: str, tmp_path: Path) -> None:
    _killed(snap, runtime, name, PARALLEL, tmp_path)
    before = [one["id"] for one in snap.json("journal", name)]
    assert len(before) == 11
    assert "11 calls replayed" in snap("resume", name).stderr
    assert [one["id"] for one in snap.json("journal", name)] == before
    for kind, count in (("threads", 4), ("coroutines", 6)):
        assert [snap("cat", f"{name}:/workspace/{kind}-{number}").stdout for number in range(count)] == [
            "once\n"
        ] * count


@pytest.mark.long  # the order: unit/engine/test_replay_matching.py
@pytest.mark.parametrize("how", ["threads", pytest.param("tasks", marks=pytest.mark.long)])
def test_a_call_that_ran_beside_others_runs_again_after_them(
    snap: Snap, runtime: str, name: str, tmp_path: Path, how: str
) -> None:
    """It was cut off by a kill, or by a rewind to a snapshot of one of the others."""
    _killed(snap, runtime, name, BESIDE, tmp_path, how, "2")
    beside = ["quick-0", "quick-1", "quick-2"]
    snap("resume", "--quiet", name)
    for _ in range(2):
        assert [snap("cat", f"{name}:/workspace/{file}").stdout for file in [*beside, "slow"]] == ["once\n"] * 4
        done = [one for one in snap.json("journal", name) if one["status"] == "done"]
        quick = [one["snapshot"] for one in done if one["name"] == "quick"]
        assert len(quick) == 3
        (fork,) = snap.json("fork", "--resume", "--name", f"{name}-{len(snap.json('ls'))}", quick[1])["trajectories"]
        snap("attach", "--quiet", fork)
        names = [one["tool"]["name"] for one in snap.json("log", fork)]
        assert "diverged" not in names
        assert sorted(names) == ["exit", "quick", "slow"]
        snap("rewind", name, quick[1])
        snap("resume", "--quiet", name)


@pytest.mark.parametrize(
    ("decision", "got", "paid"),
    long.some([("result", "from a person", 1), ("skip", None, 1), ("retry", "paid 5", 2)], 1),
)
def test_an_irreversible_call_that_was_cut_off_is_decided_by_a_person(
    snap: Snap, runtime: str, name: str, tmp_path: Path, decision: str, got: str | None, paid: int
) -> None:
    _killed(snap, runtime, name, CUT_OFF, tmp_path, "pay")
    (cut_off,) = [one for one in snap.json("journal", name) if one["name"] == "pay"]
    assert cut_off["status"] is None
    before = _everything(snap, name)
    refused = snap("resume", name, code=Undecided.exit_code).stderr
    for part in (short(cut_off["id"]), 'pay with {"amount": 5}', "--retry", "--skip", "--result"):
        assert part in refused
    assert _everything(snap, name) == before
    (tmp_path / "result.json").write_text(json.dumps(got))
    said = {"skip": cut_off["id"], "retry": cut_off["id"][:8], "result": f"{cut_off['id']}={tmp_path / 'result.json'}"}[
        decision
    ]
    snap("resume", "--quiet", f"--{decision}", said, name)
    assert snap.json("show", "--conversation", name)[-1]["content"] == {"got": got}
    assert snap.json("store", "get", name, "paid-5")["value"] == paid
    assert len(snap.json("store", "get", name, "keys")["value"]) == 1, "the first task was over"
    assert [(one["name"], one["status"]) for one in snap.json("tasks", name)] == [
        ("first", "completed"),
        ("second", "completed"),
    ]


@pytest.mark.long  # other names: all tests above
def test_tools_that_are_called_like_markers_are_replayed_as_any(
    snap: Snap, runtime: str, name: str, tmp_path: Path
) -> None:
    """Also where one is the first call of a fork, as the daemon's own marker of an edit is."""
    (tmp_path / "agent.py").write_text(LIKE_MARKERS)
    snap("run", "--quiet", "--runtime", runtime, "--name", name, tmp_path / "agent.py")
    before = next(one for one in snap.json("log", name) if one["tool"]["name"] == "look")
    for number, source in enumerate([before["id"], f"{name}-0", f"{name}-1"]):
        fork = f"{name}-{number}"
        snap("fork", "--resume", "--name", fork, source)
        snap("attach", "--quiet", fork)
        done = snap.json("journal", fork)
        assert [one["name"] for one in done if one["kind"] == "tool"] == ["look", "edit", "retry", "edit", "exit"]
        assert snap("cat", f"{fork}:/workspace/file").stdout == "".join(f"{word}\n" for word in ("one", "again", "two"))
        assert "diverged" not in [one["tool"]["name"] for one in snap.json("log", fork)]
    for number in (2, 1, 0):
        snap("rm", "--force", f"{name}-{number}")


@pytest.mark.long  # results of one turn: test_lanes.py
def test_a_hint_at_a_tools_snapshot_comes_behind_the_tools_result(
    snap: Snap, runtime: str, name: str, tmp_path: Path
) -> None:
    """No API of a model takes a user's message between a call and its result. What is resumed again is the same."""
    (tmp_path / "agent.py").write_text(NATURAL)
    snap("run", "--quiet", "--runtime", runtime, "--name", name, tmp_path / "agent.py")
    looked = next(one["id"] for one in snap.json("log", name) if one["tool"]["name"] == "look")
    hint = "hint:message.user=mind the log"
    (fork,) = snap.json("fork", "--resume", "--name", f"{name}-0", looked, "--variant", hint)["trajectories"]
    snap("attach", "--quiet", fork)
    roles = ["user", "assistant", "tool", "user", "assistant", "tool", "assistant"]
    said = snap.json("show", "--conversation", fork)
    assert [one["role"] for one in said] == roles
    assert said[3]["content"] == "mind the log"
    last = next(one["id"] for one in snap.json("log", fork) if one["tool"]["name"] == "look")
    snap("fork", "--resume", "--name", f"{name}-1", last)
    snap("attach", "--quiet", f"{name}-1")
    assert snap.json("show", "--conversation", f"{name}-1") == said
    assert "diverged" not in [one["tool"]["name"] for one in snap.json("log", f"{name}-1")]
    snap("rm", "--force", f"{name}-1")
    snap("rm", "--force", fork)


def test_an_idempotent_call_is_sent_again_under_its_key(snap: Snap, runtime: str, name: str, tmp_path: Path) -> None:
    _killed(snap, runtime, name, CUT_OFF, tmp_path, "put")
    snap("resume", "--quiet", name)
    first, second = snap.json("store", "get", name, "keys")["value"]
    assert first == second


def test_of_two_who_resume_one_wins(snap: Snap, runtime: str, name: str, tmp_path: Path) -> None:
    _killed(snap, runtime, name, LASTING, tmp_path)
    client = Snapshotd(snap.state_dir)
    together = threading.Barrier(2, timeout=60)
    answers: list[str] = []

    def resume() -> None:
        together.wait()
        try:
            answers.append(client.resume(name).id)
        except Conflict as exc:
            answers.append(exc.message)

    threads = [threading.Thread(target=resume) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    trajectory = client.trajectory(name).id
    refused = [answer for answer in answers if answer != trajectory]
    assert len(answers) == 2
    assert len(refused) == 1
    assert short(trajectory) in refused[0]
    wait_until(lambda: snap("exec", name, "touch", "/tmp/go", code=None).returncode == 0, "everything is met")
    snap("attach", "--quiet", name)
    assert [one["tool"]["name"] for one in snap.json("log", name)].count("exit") == 2
