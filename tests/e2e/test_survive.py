"""The daemon is killed under a running agent, which does not notice: its call waits, and is sent again to the next
daemon."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd import failpoints
from snapshotd.client import Snapshotd
from tests import long
from tests.e2e.model_rig import WAITS, Agents, bash, let_go, provider, waits
from tests.e2e.support import Snap, processes_with, wait_until
from tests.leftovers import instance_of, nothing_left

STEPS = long.size(8, 12)
PROGRAM = """
import os, sys, threading, time
from snapshotd.agent import checkpoint, emit, message, model, now, state, store, task, tasks, tool, uuid

ME = os.getpid()

@tool
def work(number):
    emit("at %d\\n" % number)
    with open("/workspace/log", "a") as log:
        log.write("%d\\n" % number)
    emit("done with %d\\n" % number, stream="stderr")
    return {"lines": sum(1 for _ in open("/workspace/log")), "pid": os.getpid() == ME}

@model
def ask(prompt):
    return {"text": prompt.upper()}

message("user", "work")
name = uuid()
for number in range(%STEPS%):
    with task("task %d" % number):
        began = now()
        sys.stdout.write("step %d\\n" % number)  # one write: pieces of a line may come apart where another stream is shown too
        done = work(number)
        message("assistant", {"number": number, "done": done, "later": now() >= began})
        state["last"] = number
        said = ask("%d of %s" % (number, name))
        message("assistant", said["text"] == ("%d of %s" % (number, name)).upper())
    if number % 4 == 3:
        checkpoint("at %d" % number)
        state["stored"] = store.put("survived", number, namespace=name, expected_version=number // 4)
assert uuid() != name
message("assistant", [one["status"] for one in tasks()])
sys.stdout.write("all done\\n")
""".replace("%STEPS%", str(STEPS))


SHOWN = sorted([*(f"{what} {number}" for number in range(STEPS) for what in ("step", "at")), "all done"])
"""What a follower sees on standard output; what a program prints and what a call emits come on ways of their own."""


@pytest.fixture
def lone(own_snap: Snap) -> Iterator[Snap]:
    yield own_snap
    for one in sorted(own_snap.json("ls"), key=lambda one: one["forked_from"] is None):
        own_snap("rm", "--force", one["id"])
    nothing_left(own_snap.state_dir, running=True)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "agent.py"
    path.write_text(PROGRAM)
    return path


def _found(snap: Snap, name: str) -> dict[str, Any]:
    """What a run came to."""
    log = snap.json("log", "--all", name)
    works = [one for one in log if one["tool"]["name"] == "work"]
    return {
        "steps": [(one["tool"]["name"], one["tool"]["status"]) for one in log],
        "files": snap("cat", f"{name}:/workspace/log").stdout,
        "output": [_output(snap, one["id"], "stdout") for one in works],
        "errors": [_output(snap, one["id"], "stderr") for one in works],
        "printed": snap("show", "--output", "stdout", log[-1]["id"]).stdout,
        "conversation": [(one["role"], one["content"]) for one in snap.json("show", "--conversation", name)],
        "state": snap.json("state", name),
        "journal": [(one["kind"], one["name"], one["status"]) for one in snap.json("journal", name)],
    }


def _output(snap: Snap, snapshot: str, stream: str) -> str:
    return b"".join(Snapshotd(snap.state_dir).output(snapshot, stream)).decode()


def _expected() -> dict[str, Any]:
    numbers = range(STEPS)
    steps, journal = [("start", "done")], []
    conversation: list[tuple[str, Any]] = [("user", "work")]
    for number in numbers:
        steps += [("work", "done"), ("task", "done")]
        journal += [("tool", "work", "done"), ("model", "ask", "done"), ("task", f"task {number}", "done")]
        conversation += [
            ("assistant", {"number": number, "done": {"lines": number + 1, "pid": True}, "later": True}),
            ("assistant", True),
        ]
        if number % 4 == 3:
            steps.append(("checkpoint", "done"))
            journal.append(("checkpoint", "checkpoint", "done"))
    return {
        "steps": [*steps, ("exit", "done")],
        "files": "".join(f"{number}\n" for number in numbers),
        "output": [f"at {number}\n" for number in numbers],
        "errors": [f"done with {number}\n" for number in numbers],
        "printed": "".join(f"step {number}\n" for number in numbers) + "all done\n",
        "conversation": [*conversation, ("assistant", ["completed"] * STEPS)],
        "state": {"last": STEPS - 1, "stored": STEPS // 4},
        "journal": journal,
    }


WALKED = ("engine.step.", "engine.journal.begun", "engine.journal.ended", "engine.values.", "engine.output.")
"""Failpoints that a running program passes."""
SHORT = ("engine.output.moved", "engine.journal.begun")
"""Those of the short set. In the middle of a step, test_kills.py dies; when a call has ended,
test_a_reply_that_did_not_arrive."""


def _ended(running: subprocess.Popen[str]) -> None:
    """The follower was there to the end, and has shown everything once."""
    out, errors = running.communicate(timeout=240)
    assert running.returncode == 0, errors
    assert sorted(out.splitlines()) == SHOWN


@pytest.mark.each_runtime
@pytest.mark.timeout(600)
def test_killed_again_and_again(lone: Snap, runtime: str, program: Path) -> None:
    snap = lone
    chance = random.Random(f"{runtime}-1")
    running = snap.follow("run", "--runtime", runtime, "--name", "tough", program)
    wait_until(
        lambda: bool(snap.json("ls")) and len(snap.json("log", "tough")) > 1, "it runs"
    )  # the follower has been answered, too
    kills = 0
    while running.poll() is None and kills < 6:
        snap.kill_daemon()
        kills += 1
        snap("ls")  # or the follower was faster: there is a next one
        try:
            running.wait(chance.uniform(0.05, 0.7))
        except subprocess.TimeoutExpired:
            continue
    _ended(running)
    assert _found(snap, "tough") == _expected()


COUNT = long.size(20, 40)
COMMANDS = """
import subprocess
for number in range(%COUNT%):
    print(number, flush=True)
    subprocess.run(["snapshotd-agent", "message", "user", str(number)], check=True)
""".replace("%COUNT%", str(COUNT))


@pytest.mark.long  # a program's own calls: test_killed_again_and_again
@pytest.mark.runc
def test_commands_that_start_while_no_daemon_is_there(lone: Snap, runc_ready: None, tmp_path: Path) -> None:
    """Each is a process of its own, which no daemon has greeted yet."""
    program = tmp_path / "agent.py"
    program.write_text(COMMANDS)
    running = lone.follow("run", "--runtime", "runc", "--name", "commands", program)
    assert running.stdout is not None
    for number in range(COUNT):
        assert running.stdout.readline() == f"{number}\n"
        if number % 10 == 5:
            lone.kill_daemon()
    _, errors = running.communicate(timeout=240)
    assert running.returncode == 0, errors
    assert [one["content"] for one in lone.json("show", "--conversation", "commands")] == [
        str(number) for number in range(COUNT)
    ]


@pytest.mark.runc
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hit", [pytest.param(1, marks=pytest.mark.long), 7])
@pytest.mark.parametrize(
    "failpoint", [name for name in failpoints.NAMES if name.startswith(WALKED) and (long.LONG or name in SHORT)]
)
def test_killed_at_a_failpoint(lone: Snap, runc_ready: None, program: Path, failpoint: str, hit: int) -> None:
    snap = lone
    snap.stop_daemon()
    hit = min(
        hit, {"engine.step.outputs_saved": 1, "engine.values.changed": STEPS // 4}.get(failpoint, hit)
    )  # passed so many times
    armed = Snap(snap.state_dir, {**snap.env, "SNAPSHOTD_FAILPOINT": f"{failpoint}:{hit}"})
    first = armed.json("daemon", "--restart")["started"]
    running = snap.follow("run", "--runtime", "runc", "--name", "armed", program)
    _ended(running)
    assert snap.daemon_pid() != first, "it died"
    assert _found(snap, "armed") == _expected()
    events = [json.loads(line) for line in snap("attach", "--json", "armed", code=None).stdout.splitlines()]
    told = [event["id"] for event in events if event["event"] == "snapshot"]
    assert told == [one["id"] for one in snap.json("log", "--all", "armed")], "followers are told of each once"


GATEWAY_AGENT = """
import http.client, json, os, subprocess, sys, time

def ask(messages):
    while True:  # as any client of a provider does
        connection = http.client.HTTPConnection(os.environ["OPENAI_BASE_URL"].split("/")[2])
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps({"model": "gpt-5", "messages": messages}))
            answer = connection.getresponse()
            body = json.loads(answer.read())
        except (OSError, http.client.HTTPException):
            print("asks again", flush=True)
            continue
        assert answer.status == 200, body
        return body["choices"][0]["message"]

messages = [{"role": "user", "content": "repair it"}]
while True:
    message = ask(messages)
    messages.append(message)
    for call in message.get("tool_calls") or ():
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout})
    if not message.get("tool_calls"):
        print(message["content"], flush=True)
        break
"""


@pytest.mark.long  # the next test kills the daemon under such an agent, too
@pytest.mark.runc
@pytest.mark.timeout(600)
def test_behind_the_gateway(lone: Snap, runc_ready: None, tmp_path: Path) -> None:
    """Killed while a tool runs, and while the model thinks: then its client asks again, and is heard by the next
    daemon."""
    program = tmp_path / "agent.py"
    program.write_text(GATEWAY_AGENT)
    agents = Agents(lone, "runc")
    wait, count = bash(f"{WAITS}; wc -l < waited", "I wait."), bash("echo x >> count; wc -l < count")
    with provider(tmp_path, wait, {**count, "hold": "thinks"}, wait, {"text": "It is repaired."}) as at:
        trajectory = agents.start(at, program)
        waits(trajectory)
        lone.kill_daemon()
        lone("ls")
        let_go(trajectory)
        wait_until(lambda: at.asked() == [0, 1], "the model thinks")
        lone.kill_daemon()
        lone("ls")
        wait_until(lambda: at.asked() == [0, 1, 1], "it is asked again")
        at.release("thinks")
        waits(trajectory)
        lone.kill_daemon()
        lone("ls")
        let_go(trajectory)
        agents.snap("attach", trajectory)
        assert at.asked() == [0, 1, 1, 2, 3]
    assert agents.names(trajectory) == ["start", "bash", "bash", "bash", "exit"]
    said = agents.said(trajectory)
    assert [role for role, _ in said] == ["user", *["assistant", "tool"] * 3, "assistant"]
    assert [content["content"] for role, content in said if role == "assistant"] == [
        "I wait.",
        None,
        "I wait.",
        "It is repaired.",
    ]
    journal = [entry for entry in agents.journal(trajectory) if entry[1] != "unknown"]
    assert journal == [("model", "done"), ("tool", "done")] * 3 + [("model", "done")]
    assert agents.files(trajectory) == {"waited": "x\nx\n", "count": "x\n"}
    assert lone("show", "--output", "stdout", trajectory).stdout == "asks again\nIt is repaired.\n"


@pytest.mark.runc
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hit", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_reply_that_did_not_arrive(lone: Snap, runc_ready: None, tmp_path: Path, hit: int) -> None:
    """The daemon dies when it has recorded a reply and the agent has not got it: the provider is not asked again."""
    assert _asked_over_a_death(lone, tmp_path, f"engine.journal.ended:{hit}") == [0, 1, 2]


@pytest.mark.long  # one that was recorded: the test before
@pytest.mark.runc
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_request_that_was_sent_and_not_recorded(lone: Snap, runc_ready: None, tmp_path: Path, number: int) -> None:
    """The daemon dies when the provider has a request, the second time with a tool's result: the client asks again, and
    nothing is missing or there twice."""
    asked = _asked_over_a_death(lone, tmp_path, f"engine.journal.sent:{number}")
    assert asked == sorted([0, 1, 2, number - 1])


def _asked_over_a_death(lone: Snap, folder: Path, failpoint: str) -> list[int]:
    """What the provider is asked by an agent of two calls whose daemon dies on the way. All is recorded once."""
    program = folder / "agent.py"
    program.write_text(GATEWAY_AGENT)
    lone.stop_daemon()
    armed = Snap(lone.state_dir, {**lone.env, "SNAPSHOTD_FAILPOINT": failpoint})
    armed("daemon", "--restart")
    agents = Agents(lone, "runc")
    count = bash("echo x >> count; wc -l < count", "I count.")
    with provider(folder, count, count, {"text": "It is repaired."}) as at:
        trajectory = agents.start(at, program)
        agents.snap("attach", trajectory)
        asked = at.asked()
    assert agents.names(trajectory) == ["start", "bash", "bash", "exit"]
    assert [role for role, _ in agents.said(trajectory)] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert agents.journal(trajectory) == [("model", "done"), ("tool", "done")] * 2 + [("model", "done")]
    assert agents.files(trajectory) == {"count": "x\nx\n"}
    return asked


PATIENT = """
import os, sys
from snapshotd.agent import approve, tool

@tool(approve="may I?")
def send():
    return os.getpid()

print(send() == os.getpid(), flush=True)
print(bool(approve("and now?")), flush=True)
"""


@pytest.mark.timeout(600)
def test_while_it_waits_for_a_person(lone: Snap, runtime: str, tmp_path: Path) -> None:
    program = tmp_path / "agent.py"
    program.write_text(PATIENT)
    running = lone.follow("run", "--runtime", runtime, "--name", "patient", program)
    asked: list[str] = []
    for _ in range(2):
        wait_until(lambda: any(one["id"] not in asked for one in lone.json("approvals")), "it asks", 120)
        (waiting,) = lone.json("approvals")
        lone.kill_daemon()
        assert lone.json("approvals") == [waiting], "it still waits, for the same person"
        lone("approve", waiting["id"])
        asked.append(waiting["id"])
    out, errors = running.communicate(timeout=240)
    assert (running.returncode, out) == (0, "True\nTrue\n"), errors
    assert len(lone.json("approvals", "--all")) == 2


@pytest.mark.runc
def test_what_ends_with_the_daemon(lone: Snap, runc_ready: None, tmp_path: Path) -> None:
    """A command that a client runs is cut off; a sandbox without a program ends; so does one whose keeper is killed,
    too."""
    program = tmp_path / "agent.py"
    program.write_text("print('up', flush=True)\nimport time\ntime.sleep(1000)\n")
    running = lone.follow("run", "--runtime", "runc", "--name", "sleeper", program)
    assert running.stdout is not None
    assert running.stdout.readline() == "up\n"
    bare, _ = lone.create("--runtime", "runc")
    command = lone.follow("exec", "sleeper", "--", "sh", "-c", "(sleep 998 &) ; echo runs; exec sleep 999")
    assert command.stdout is not None
    assert command.stdout.readline() == "runs\n"
    lone.kill_daemon()
    command.communicate(timeout=60)
    (sandbox,) = lone.json("ps")
    assert sandbox["name"] == "sleeper"
    wait_until(lambda: not _sleeps(sandbox["pid"], "999"), "what the client ran has ended")
    assert _sleeps(sandbox["pid"], "998"), "what it had left in the background goes on"
    assert [one["status"] for one in lone.json("ls") if one["id"] == bare] == ["stopped"]
    (keeper,) = [pid for pid, line in processes_with("keeper_main.py") if f"/{instance_of(lone.state_dir)}/" in line]
    lone.crash(keeper)
    assert [one["status"] for one in lone.json("ls") if one["name"] == "sleeper"] == ["interrupted"]
    running.communicate(timeout=120)
    assert running.returncode == 125


ORPHAN = """
import os, time
print("up", flush=True)
while not os.path.exists("/workspace/go"):
    time.sleep(0.05)
print("done", flush=True)
"""


@pytest.mark.long  # before one: the test above; afterwards: system/test_lost_exit_code.py
@pytest.mark.runc
@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.long), 7])
def test_the_keeper_dies_after_a_restart(lone: Snap, runc_ready: None, tmp_path: Path, code: int) -> None:
    """The agent is nobody's child whom the daemon knows, and goes on. Whoever looks sees one truth at any time."""
    program = tmp_path / "agent.py"
    program.write_text(f"{ORPHAN}raise SystemExit({code})\n")
    running = lone.follow("run", "--runtime", "runc", "--name", "orphan", program)
    assert running.stdout is not None
    assert running.stdout.readline() == "up\n"
    lone("daemon", "--restart")
    (keeper,) = [pid for pid, line in processes_with("keeper_main.py") if f"/{instance_of(lone.state_dir)}/" in line]
    lone._kill([keeper])
    lone.sh("orphan", "touch go", code=None)  # the run may end first, and its sandbox with all that runs there
    out, errors = running.communicate(timeout=240)
    (run,) = [one for one in lone.json("ls") if one["name"] == "orphan"]
    assert (out, running.returncode, run["status"], run["exit_code"]) == (
        "done\n",
        code,
        "failed" if code else "finished",
        code,
    ), errors
    last = lone.json("show", "orphan")
    assert (last["tool"]["name"], last["tool"]["exit_code"]) == ("exit", code)
    assert lone("show", "--output", "stdout", "orphan").stdout == "up\ndone\n"


def _sleeps(init: int, seconds: str) -> bool:
    """Whether a process of the sandbox sleeps for so long."""
    group = Path(f"/proc/{init}/cgroup").read_text()
    for pid, line in processes_with("sleep"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if line == f"sleep {seconds} " and Path(f"/proc/{pid}/cgroup").read_text() == group:
                return True
    return False
