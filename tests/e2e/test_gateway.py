"""Agents that nobody rewrote, captured on the wire to their model: a snapshot for each turn of tool calls, resume and
fork by replies that are sent again. The provider is a process on the loopback of this machine, with a key that the
sandbox never gets."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.engine.journal.approval.policy import FILE_NAME
from tests.e2e.model_rig import (
    KEY,
    PROGRAMS,
    WAITS,
    Agents,
    Outside,
    Provider,
    bash,
    let_go,
    processes,
    provider,
    waits,
)
from tests.e2e.support import Snap, wait_until

PLAIN = PROGRAMS / "plain_agent.py"
LOOK, WRITE, COUNT = (
    bash("echo one > one; date +%s%N > stamp; echo looked", "I look."),
    bash("cat one; echo two > two; false || exit 3"),
    bash("echo x >> count; wc -l < count"),
)
WAIT = bash(f"{WAITS}; wc -l < waited")
END = {"text": "It is repaired."}

pytestmark = pytest.mark.timeout(900)  # the first test installs the clients


def with_clients(snap: Snap, runtime: str, full_image: str, tmp_path: Path) -> Agents:
    """For agents with the providers' own clients, which are installed in the sandbox: half a minute of CPU, and each
    start of such an agent 2 s. What those clients send is in the short set too: unit/gateway/test_clients.py."""
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("openai\nanthropic\n")
    return Agents(snap, runtime, full_image, requirements)


@pytest.fixture(params=["bare", pytest.param("openai", marks=pytest.mark.long)])
def program(request: pytest.FixtureRequest) -> Path:
    """An agent that streams and repeats what failed: as it is, and by its provider's client."""
    return PROGRAMS / f"{request.param}_agent.py"


@pytest.fixture
def agents(request: pytest.FixtureRequest, snap: Snap, runtime: str, program: Path, tmp_path: Path) -> Agents:
    if program.stem == "bare_agent":
        return Agents(snap, runtime)
    return with_clients(snap, runtime, request.getfixturevalue("full_image"), tmp_path)


@pytest.fixture
def plain(snap: Snap, runtime: str) -> Agents:
    """For the plain agent, which starts fast: a client of a provider takes 2 s of CPU to import."""
    return Agents(snap, runtime)


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Provider]:
    with provider(tmp_path, LOOK, WRITE, COUNT, END) as started:
        yield started


def _output(agents: Agents, snapshot: str) -> Any:
    """What a tool's result was on the wire."""
    return json.loads(json.loads(agents.snap("show", "--output", "output", snapshot).stdout))


def test_each_turn_has_a_snapshot(agents: Agents, program: Path, scripted: Provider) -> None:
    trajectory = agents.run(scripted, program, "repair it")
    steps = agents.steps(trajectory)
    assert [step["tool"]["name"] for step in steps] == ["start", "bash", "bash", "bash", "exit"]
    assert [step["tool"]["arguments"] for step in steps[1:4]] == [
        turn["calls"][0]["arguments"] for turn in (LOOK, WRITE, COUNT)
    ]
    files = [agents.files(step["id"]) for step in steps]
    stamp = files[1]["stamp"]
    assert files[0] == {}
    assert files[1] == {"one": "one\n", "stamp": stamp}
    assert files[2] == {"one": "one\n", "stamp": stamp, "two": "two\n"}
    assert files[3] == files[4] == {"one": "one\n", "stamp": stamp, "two": "two\n", "count": "x\n"}
    assert [_output(agents, step["id"]) for step in steps[1:4]] == [
        {"exit_code": 0, "output": "looked\n"},
        {"exit_code": 3, "output": "one\n"},
        {"exit_code": 0, "output": "1\n"},
    ]
    said = agents.said(trajectory)
    assert [role for role, _ in said] == ["system", "user", *["assistant", "tool"] * 3, "assistant"]
    assert (said[1], said[-1][1]["content"]) == (("user", "repair it"), "It is repaired.")
    assert [agents.snap.json("show", step["id"])["message_count"] for step in steps] == [0, 4, 6, 8, 9]
    assert agents.said(steps[2]["id"]) == said[:6]
    assert agents.journal(trajectory) == [("model", "done"), ("tool", "done")] * 3 + [("model", "done")]
    assert scripted.asked() == [0, 1, 2, 3]


def test_the_key_stays_with_the_daemon(plain: Agents, tmp_path: Path) -> None:
    with provider(
        tmp_path, bash("env; cat /proc/*/environ; grep -rlaF sk-known-to-the /run /etc /workspace /tmp; true"), END
    ) as at:
        trajectory = plain.run(at, PLAIN, "show me the key")
        assert at.requests()[0]["headers"]["authorization"] == f"Bearer {KEY}"
    (step,) = [step for step in plain.steps(trajectory) if step["tool"]["name"] == "bash"]
    seen = plain.snap("show", "--output", "output", step["id"]).stdout
    assert "OPENAI_BASE_URL=http://127.0.0.1:" in seen
    told = [
        plain.snap(*words, trajectory).stdout
        for words in (("show", "--json"), ("log", "--json"), ("journal", "--json"), ("attach",))
    ]
    for text in (seen, *told):
        assert KEY not in text
    assert _with_the_key(plain.snap.state_dir) == []


def _with_the_key(state_dir: Path) -> list[Path]:
    """Files in which the key stands in plain; the sandboxes' own files aside. The daemon works in there meanwhile."""
    found, looked_at = [], 0
    for base, folders, names in os.walk(state_dir):
        folders[:] = [name for name in folders if name != "layers"]
        for path in (Path(base, name) for name in names if name != "layers.img"):
            try:
                content = path.read_bytes() if path.is_file() else b""
            except FileNotFoundError:
                continue  # a temporary one
            looked_at += 1
            found += [path] if KEY.encode() in content else []
    assert looked_at > 3
    return found


def test_killed_in_a_tool_it_goes_on(plain: Agents, tmp_path: Path) -> None:
    with provider(tmp_path, LOOK, WRITE, WAIT, COUNT, END) as at:
        undisturbed = plain.start(at, PLAIN, "repair it")
        let_go(undisturbed)
        plain.snap("attach", undisturbed)
        at.forget()

        trajectory = plain.start(at, PLAIN, "repair it")
        plain.kill(trajectory)
        assert at.asked() == [0, 1, 2]
        recorded = [step["id"] for step in plain.steps(trajectory)]
        assert plain.names(trajectory) == ["start", "bash", "bash", "exit"]
        assert plain.files(trajectory)["waited"] == "x\n"

        plain.resume(trajectory)
        assert at.asked() == [0, 1, 2, 3, 4], "what was recorded is not asked again"
    assert [step["id"] for step in plain.steps(trajectory)][:4] == recorded
    assert plain.names(trajectory) == ["start", "bash", "bash", "exit", "bash", "bash", "exit"]
    assert plain.said(trajectory) == plain.said(undisturbed)
    stamps = [plain.files(which).pop("stamp") for which in (recorded[1], trajectory)]
    assert stamps[0] == stamps[1], "the files are the recorded ones, not those of the tool that ran again"
    assert {**plain.files(trajectory), "stamp": ""} == {**plain.files(undisturbed), "stamp": ""}
    assert plain.files(trajectory)["waited"] == "x\n", "the tool that was cut off ran on the files from before it"
    (waited,) = [step for step in plain.steps(trajectory) if step["tool"]["arguments"] == WAIT["calls"][0]["arguments"]]
    assert json.loads(plain.snap("show", "--output", "output", waited["id"]).stdout) == "1\n"


@pytest.mark.long  # test_survive.py and test_manners.py kill it under such an agent
@pytest.mark.runc
def test_the_daemon_is_killed(own_snap: Snap, tmp_path: Path) -> None:
    """Also what the model said last, which no snapshot holds yet, is in the conversation afterwards."""
    agents = Agents(own_snap, "runc")
    wait = {**WAIT, "text": "I wait."}
    with provider(tmp_path, wait, COUNT, wait, END) as at:
        trajectory = agents.start(at, PLAIN, "repair it")
        waits(trajectory)
        own_snap.crash()
        agents.snap("resume", "--detach", trajectory)
        let_go(trajectory)
        waits(trajectory)  # the last tool
        own_snap.crash()
        agents.snap("resume", "--detach", trajectory)
        let_go(trajectory)  # the first one, in the replay
        let_go(trajectory)
        agents.snap("attach", trajectory)
        assert at.asked() == [0, 1, 2, 3]
    assert agents.names(trajectory) == ["start", "bash", "bash", "bash", "exit"]
    said = agents.said(trajectory)
    assert [role for role, _ in said] == ["user", *["assistant", "tool"] * 3, "assistant"]
    assert [content["content"] for role, content in said if role == "assistant"] == [
        "I wait.",
        None,
        "I wait.",
        "It is repaired.",
    ]
    assert agents.files(trajectory) == {"waited": "x\nx\n", "count": "x\n"}


@pytest.mark.long  # what did not fail: test_a_fork_goes_on_with_the_recorded_history
def test_what_failed_for_good_fails_again(plain: Agents, tmp_path: Path) -> None:
    """The agent went on with something else after an error: so it does in a fork, without asking anybody."""
    with provider(tmp_path, {**LOOK, "failures": [{"status": 400, "message": "too long"}]}, COUNT, END) as at:
        trajectory = plain.run(at, PLAIN, "repair it")
        assert at.asked() == [0, 0, 0, 1, 2], "the first wish failed, and the second until it was repeated"
        failed = ("model", "failed")
        assert plain.journal(trajectory)[:4] == [failed, failed, ("model", "done"), ("tool", "done")]
        at.forget()
        (fork,) = plain.snap.json("fork", "--resume", plain.steps(trajectory)[2]["id"])["trajectories"]
        plain.snap("attach", fork)
        assert at.asked() == [2]
    assert plain.names(fork) == ["exit"]
    assert plain.files(fork) == plain.files(trajectory)


REFUSED = """
import http.client, json, os, subprocess
messages = [{"role": "user", "content": "tidy up"}]
while True:
    connection = http.client.HTTPConnection(os.environ["OPENAI_BASE_URL"].split("/")[2])
    connection.request("POST", "/v1/chat/completions", json.dumps({"model": "gpt-5", "messages": messages}))
    answer = connection.getresponse()
    body = json.loads(answer.read())
    if answer.status != 200:
        messages += [{"role": "assistant", "content": "Refused: %d" % answer.status}, {"role": "user", "content": "go on without"}]
        continue
    message = body["choices"][0]["message"]
    messages.append(message)
    for call in message.get("tool_calls") or ():
        done = subprocess.run(["bash", "-c", json.loads(call["function"]["arguments"])["command"]], capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout})
    if not message.get("tool_calls"):
        break
"""


@pytest.mark.long  # without the gateway: test_approvals.py
def test_what_the_policy_denied_is_denied_again_in_a_replay(own_snap: Snap, runc_ready: None, tmp_path: Path) -> None:
    """The agent did not get the reply that asked for it, so a replay must not send it: the tool is the agent's own."""
    program = tmp_path / "agent.py"
    program.write_text(REFUSED)
    policy = own_snap.state_dir / FILE_NAME
    policy.write_text(
        '[[rule]]\nname = "bash"\narguments = { command = "^rm" }\naction = "deny"\nreason = "nothing is removed here"\n'
    )
    agents = Agents(own_snap, "runc")
    with provider(tmp_path, bash("echo kept > kept"), bash("rm kept"), END) as at:
        trajectory = agents.run(at, program)
        assert at.asked() == [0, 1, 2]
        assert agents.names(trajectory) == ["start", "bash", "bash", "exit"]
        assert agents.files(trajectory) == {"kept": "kept\n"}
        said = agents.said(trajectory)
        policy.unlink()  # it would be let run now, but it was not
        for step in (2, 3):
            at.forget()
            (fork,) = agents.snap.json("fork", "--resume", agents.steps(trajectory)[step]["id"])["trajectories"]
            agents.snap("attach", fork)
            assert at.asked() in ([2], [])
            assert agents.files(fork) == {"kept": "kept\n"}
            assert agents.said(fork) == said


def test_a_fork_goes_on_with_the_recorded_history(agents: Agents, program: Path, scripted: Provider) -> None:
    trajectory = agents.run(scripted, program, "repair it")
    middle = agents.steps(trajectory)[2]["id"]
    scripted.forget()
    (fork,) = agents.snap.json("fork", "--resume", middle)["trajectories"]
    agents.snap("attach", fork)
    assert scripted.asked() == [2, 3]
    assert agents.names(fork) == ["bash", "exit"]
    assert agents.said(fork) == agents.said(trajectory)
    assert agents.files(fork) == agents.files(trajectory), "also what a tool writes differently each time"


@pytest.mark.long  # one that asks the same: the test before
def test_a_fork_that_asks_something_else_is_a_branch(plain: Agents, scripted: Provider) -> None:
    trajectory = plain.run(scripted, PLAIN, "repair it")
    middle = plain.steps(trajectory)[2]["id"]
    scripted.forget()
    (fork,) = plain.snap.json("fork", "--resume", middle, "--", "repair it better")["trajectories"]
    plain.snap("attach", fork)
    assert scripted.asked() == [0, 1, 2, 3]
    assert plain.names(fork) == ["diverged", "bash", "bash", "bash", "exit"]
    assert plain.said(fork)[0] == ("user", "repair it better")
    assert plain.files(fork)["count"] == "x\n"
    assert plain.files(fork)["stamp"] != plain.files(trajectory)["stamp"]


def test_a_provider_in_trouble(agents: Agents, program: Path, tmp_path: Path) -> None:
    """The client repeats what failed; everything is recorded, and a fork meets the replies alone."""
    limited = {"status": 429, "headers": {"retry-after": "0"}}
    with provider(
        tmp_path, {**LOOK, "failures": [limited, {"drop": True}]}, WRITE, {**COUNT, "failures": [limited]}, END
    ) as at:
        trajectory = agents.run(at, program, "repair it", "--stream")
        assert at.asked() == [0, 0, 0, 1, 2, 2, 3]
        model, tool = ("model", "done"), ("tool", "done")
        failed = ("model", "failed")
        assert agents.journal(trajectory) == [failed, failed, model, tool, model, tool, failed, model, tool, model]
        errors = [entry["error"] for entry in agents.snap.json("journal", trajectory) if entry["status"] == "failed"]
        assert "429" in errors[0] or "scripted" in errors[0]
        assert all(errors)
        at.forget()
        (fork,) = agents.snap.json("fork", "--resume", agents.steps(trajectory)[3]["id"])["trajectories"]
        agents.snap("attach", fork)
        assert at.asked() == [3]
    assert [role for role, _ in agents.said(trajectory)] == ["system", "user", *["assistant", "tool"] * 3, "assistant"]
    assert agents.said(fork) == agents.said(trajectory)
    assert agents.files(fork) == agents.files(trajectory)


@pytest.mark.long  # a provider in other trouble: the test before
def test_half_a_stream(agents: Agents, program: Path, tmp_path: Path) -> None:
    """The client does not repeat what broke in the middle: the agent dies, and a resume asks again."""
    with provider(tmp_path, LOOK, {**WRITE, "failures": [{"cut_after": 3}]}, END) as at:
        trajectory = agents.run(at, program, "repair it", "--stream", code=1)
        assert agents.journal(trajectory) == [("model", "done"), ("tool", "done"), ("model", "failed")]
        agents.snap("resume", trajectory)
        assert at.asked() == [0, 1, 1, 2]
    assert agents.names(trajectory) == ["start", "bash", "exit", "bash", "exit"]
    assert [role for role, _ in agents.said(trajectory)] == ["system", "user", *["assistant", "tool"] * 2, "assistant"]
    assert agents.files(trajectory)["two"] == "two\n"


@pytest.mark.long  # sub-agents side by side: test_lanes.py
def test_calls_side_by_side(plain: Agents, tmp_path: Path) -> None:
    both = {"calls": [LOOK["calls"][0], {"name": "bash", "arguments": {"command": "echo two > two"}}]}
    with provider(tmp_path, both, COUNT, END) as at:
        trajectory = plain.run(at, PLAIN, "repair it")
        assert plain.names(trajectory) == ["start", "bash", "bash", "bash", "exit"]
        at.forget()
        (fork,) = plain.snap.json("fork", "--resume", plain.steps(trajectory)[2]["id"])["trajectories"]
        plain.snap("attach", fork)
        assert at.asked() == [1, 2]
    assert plain.said(fork) == plain.said(trajectory)
    assert plain.files(fork) == plain.files(trajectory)


@pytest.mark.long
def test_anthropic(snap: Snap, runtime: str, full_image: str, scripted: Provider, tmp_path: Path) -> None:
    agents = with_clients(snap, runtime, full_image, tmp_path)
    trajectory = agents.run(scripted, PROGRAMS / "anthropic_agent.py", "repair it", kind="anthropic")
    assert agents.names(trajectory) == ["start", "bash", "bash", "bash", "exit"]
    steps = agents.steps(trajectory)
    assert [step["tool"]["status"] for step in steps[1:4]] == ["done", "failed", "done"]
    assert [role for role, _ in agents.said(trajectory)] == ["system", "user", *["assistant", "user"] * 3, "assistant"]
    scripted.forget()
    (fork,) = agents.snap.json("fork", "--resume", steps[2]["id"])["trajectories"]
    agents.snap("attach", fork)
    assert scripted.asked() == [2, 3]
    assert agents.said(fork) == agents.said(trajectory)
    assert agents.files(fork) == agents.files(trajectory)


def test_what_happened_outside_does_not_happen_again(plain: Agents, tmp_path: Path) -> None:
    """With a network: the agent runs its tools again in a replay, but they reach nobody until it is live."""
    with Outside() as outside:
        visit = bash(
            f"(exec 3<>/dev/tcp/{outside.address} && echo hello >&3 && cat <&3) 2>&1 | tail -n 1 | tee -a visits"
        )
        with provider(tmp_path, visit, visit, COUNT, END) as at:
            trajectory = plain.run(at, PLAIN, "repair it", more=("--network", "bridge"))
            assert outside.visits == 2
            (fork,) = plain.snap.json("fork", "--resume", plain.steps(trajectory)[1]["id"])["trajectories"]
            plain.snap("attach", fork)
            assert outside.visits == 3
    assert plain.names(fork) == ["bash", "bash", "exit"]
    assert plain.files(fork) == plain.files(trajectory) == {"visits": "welcome\n" * 2, "count": "x\n"}


@pytest.mark.long  # what tools did is not done again: the test before
def test_a_tool_that_leaves_a_process(plain: Agents, tmp_path: Path) -> None:
    """It lives on through a fork's replay, and what it writes then is not recorded as new."""
    with provider(
        tmp_path, bash("(while :; do date +%N > ticks; sleep 0.01; done) > /dev/null 2>&1 &"), COUNT, END
    ) as at:
        trajectory = plain.run(at, PLAIN, "repair it")
        at.forget()
        (fork,) = plain.snap.json("fork", "--resume", plain.steps(trajectory)[2]["id"])["trajectories"]
        plain.snap("attach", fork)
        assert at.asked() == [2]
    assert plain.said(fork) == plain.said(trajectory)
    wait_until(lambda: not processes(fork), "its sandbox has ended")
