"""Agents with sub-agents: each conversation on the wire is a lane of its own, whatever comes first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import long
from tests.e2e.model_rig import PROGRAMS, WAITS, Agents, bash, let_go, provider, waits
from tests.e2e.page_rig import Person
from tests.e2e.support import Snap, wait_until

TEAM = PROGRAMS / "team_agent.py"
ASK = {
    "text": "I ask two.",
    "calls": [{"name": "agent", "arguments": {"prompt": f"explore {name}"}} for name in ("alpha", "beta")],
}
ALPHA = [bash("echo one > a1", "a"), bash("echo two > a2", "a"), {"text": "alpha is done"}]
BETA = [bash("echo one > b1", "b"), bash("echo two > b2", "b"), {"text": "beta is done"}]
MAIN = [bash("echo begun > begun", "I begin."), ASK, bash("cat a1 b1 > sum", "I sum up."), {"text": "All is done."}]
CONVERSATIONS = {"explore alpha": ALPHA, "explore beta": BETA}
FILES = {"begun": "begun\n", "a1": "one\n", "a2": "two\n", "b1": "one\n", "b2": "two\n", "sum": "one\none\n"}


def _roles(agents: Agents, trajectory: str) -> list[str]:
    return [role for role, _ in agents.said(trajectory)]


def test_two_at_once(agents: Agents, tmp_path: Path) -> None:
    with provider(tmp_path, *MAIN, conversations=CONVERSATIONS) as at:
        trajectory = agents.run(at, TEAM, "do it all", kind="anthropic")
        asked = len(at.asked())
        assert asked == 10
        steps = agents.steps(trajectory)
        calls = agents.calls(trajectory)
        assert sorted(call["name"] for call in calls) == ["agent"] * 2 + ["bash"] * 6
        assert all(call["arguments"] and call["status"] == "done" for call in calls)
        assert len([step for step in steps if step["tool"]["name"] in ("bash", "agent")]) == len(calls)
        assert agents.files(trajectory) == FILES

        models = [entry for entry in agents.snap.json("journal", trajectory) if entry["kind"] == "model"]
        assert all(model["status"] == "done" for model in models)
        lanes: dict[int, list[dict[str, Any]]] = {}
        for model in models:
            lanes.setdefault(model["details"]["lane"], []).append(model)
        assert sorted(map(len, lanes.values())) == [3, 3, 4]
        callers = {lane[0]["details"].get("caller") for lane in lanes.values()}
        assert callers == {None, "call_1_0", "call_1_1"}
        for call in calls:
            if call["name"] == "bash" and call["arguments"]["command"].endswith(("a1", "a2")):
                assert lanes[call["details"]["lane"]][0]["details"]["caller"] == "call_1_0"
        told = [model["details"]["messages"][-1]["role"] for model in models if "caller" in model["details"]]
        assert told == ["user"] * 6
        assert _roles(agents, trajectory) == ["system", "user", *["assistant", "user"] * 3, "assistant"]

        for step in steps[1:-1]:
            at.forget()
            (fork,) = agents.snap.json("fork", "--resume", step["id"])["trajectories"]
            agents.snap("attach", fork)
            assert "diverged" not in agents.names(fork)
            assert agents.files(fork) == FILES
            assert agents.said(fork) == agents.said(trajectory)
            assert len(at.asked()) < asked
            agents.snap("rm", "--force", fork)


def test_killed_in_one_of_them(agents: Agents, tmp_path: Path) -> None:
    """One sub-agent waits in a tool when the agent is killed: the other's steps are not repeated."""
    beta = [BETA[0], bash(f"{WAITS}; echo two > b2"), BETA[2]]
    with provider(tmp_path, *MAIN, conversations={"explore alpha": ALPHA, "explore beta": beta}) as at:
        trajectory = agents.start(at, TEAM, "do it all", kind="anthropic")
        agents.kill(trajectory)
        asked = len(at.asked())
        agents.resume(trajectory)
        assert asked <= len(at.asked()) <= 11
    files = agents.files(trajectory)
    del files["waited"]  # once or twice: a snapshot of the other sub-agent may hold what the killed tool wrote first
    assert files == FILES
    assert _roles(agents, trajectory) == ["system", "user", *["assistant", "user"] * 3, "assistant"]
    done = [call for call in agents.calls(trajectory) if call["status"] == "done"]
    assert len(done) == 8


@pytest.mark.long  # the command line does in test_two_at_once
def test_the_page_shows_whose_calls_they_are(own_snap: Snap, person: Person, runc_ready: None, tmp_path: Path) -> None:
    agents = Agents(own_snap, "runc")
    with provider(tmp_path, *MAIN, conversations=CONVERSATIONS) as at:
        trajectory = agents.run(at, TEAM, "do it all", kind="anthropic")
    person.opens(trajectory[:12])
    rows = person.page.locator(".row", has_text="bash")
    rows.nth(5).wait_for()
    of = {row.locator("code").inner_text(): row.locator(".side .tag").all_inner_texts() for row in rows.all()}
    (alpha,), (beta,) = of["echo one > a1"], of["echo one > b1"]
    assert alpha != beta
    assert of == {
        "echo begun > begun": [],
        "cat a1 b1 > sum": [],
        **{f"echo {text} > a{number}": [alpha] for number, text in ((1, "one"), (2, "two"))},
        **{f"echo {text} > b{number}": [beta] for number, text in ((1, "one"), (2, "two"))},
    }
    rows.filter(has_text="> a1").click()
    person.sees(f"of {alpha}", ".inspector")


def test_the_daemon_is_killed_in_between(own_snap: Snap, runc_ready: None, tmp_path: Path) -> None:
    """The next daemon goes on with every lane, and the agent notices nothing."""
    agents = Agents(own_snap, "runc")
    beta = [BETA[0], bash(f"{WAITS}; echo two > b2"), BETA[2]]
    with provider(tmp_path, *MAIN, conversations={"explore alpha": ALPHA, "explore beta": beta}) as at:
        trajectory = agents.start(at, TEAM, "do it all", kind="anthropic")
        waits(trajectory)
        wait_until(lambda: len(at.asked()) == 7, "the other one has ended")
        wait_until(lambda: agents.names(trajectory).count("bash") == 4, "its last call has its snapshot")
        own_snap.kill_daemon()
        own_snap("ls")  # the next one goes on
        let_go(trajectory)
        agents.snap("attach", trajectory)
        assert len(at.asked()) == 10
    assert agents.files(trajectory) == {**FILES, "waited": "x\n"}
    calls = agents.calls(trajectory)
    assert sorted(call["name"] for call in calls) == ["agent"] * 2 + ["bash"] * 6
    assert all(call["arguments"] and call["status"] == "done" for call in calls)
    assert _roles(agents, trajectory) == ["system", "user", *["assistant", "user"] * 3, "assistant"]


@pytest.mark.long  # one that is resumed: test_killed_in_one_of_them
def test_a_program_that_goes_on_with_a_session(agents: Agents, tmp_path: Path) -> None:
    """It was not resumed, and sends what its parent's program was told: that is known."""
    more = [bash("echo more > more", "More."), {"text": "More is done."}]
    with provider(tmp_path, *MAIN[:1], {"text": "Begun."}, *more) as at:
        trajectory = agents.run(at, TEAM, "do it all", kind="anthropic")
        (fork,) = agents.snap.json("fork", trajectory, "--", "python3", str(TEAM), "go on", "--continue")[
            "trajectories"
        ]
        agents.snap("attach", fork)
        assert at.asked() == [0, 1, 2, 3]
    assert [call["name"] for call in agents.calls(fork)] == ["bash"]
    assert _roles(agents, fork) == ["system", "user", *["assistant", "user"] * 3, "assistant"]
    assert agents.names(fork) == ["bash", "exit"]
    assert agents.files(fork) == {"begun": "begun\n", "more": "more\n"}


@pytest.mark.long  # in their order: the first test
def test_results_of_one_turn_come_in_any_order(agents: Agents, tmp_path: Path) -> None:
    """Also from a snapshot between them, where only one is recorded: the other one runs."""
    both = {
        "text": "Both.",
        "calls": [{"name": "bash", "arguments": {"command": f"echo x >> {name}"}} for name in ("left", "right")],
    }
    with provider(tmp_path, both, bash("cat left right", "I look."), {"text": "Done."}) as at:
        trajectory = agents.run(at, TEAM, "do it all", kind="anthropic")
        for step in agents.steps(trajectory)[1:4]:
            fork = agents.snap("edit", "--env", "LAST_FIRST=1", "--resume", step["id"]).stdout.strip()
            agents.snap("attach", fork)
            assert agents.files(fork) == {"left": "x\n", "right": "x\n"}
            assert [call["status"] for call in agents.calls(fork)] == ["done"] * 3
            assert sorted(call["arguments"]["command"] for call in agents.calls(fork)) == [
                "cat left right",
                "echo x >> left",
                "echo x >> right",
            ]


def test_a_difference_is_shown_line_by_line(agents: Agents, tmp_path: Path) -> None:
    """The time in a prompt is another one in each run: a resume is refused, and its message says what differs."""
    program = tmp_path / "agent.py"
    program.write_text(
        TEAM.read_text().replace('"You lead."', 'f"You lead.\\nNow: {time.time_ns()}"') + "\nos._exit(3)\n"
    )
    program.write_text(program.read_text().replace("import threading", "import threading\nimport time"))
    with provider(tmp_path, *MAIN[:1], {"text": "Begun."}) as at:
        trajectory = agents.run(at, program, "do it all", kind="anthropic", code=3)
        agents.snap("resume", trajectory, code=None)
        told = agents.snap("attach", trajectory, code=None)
        shown = told.stdout + told.stderr
        assert "message 0 (system) differs:" in shown
        assert "\n-Now: " in shown
        assert "\n+Now: " in shown
        assert "You lead." not in shown.partition("differs:")[2]
        listed = agents.snap("log", trajectory).stderr
        assert f"the program of {trajectory[:12]} was refused" in listed
        assert "message 0 (system) differs:" in listed
        agents.snap("rewind", trajectory, agents.steps(trajectory)[1]["id"])
        assert "refused" not in agents.snap("log", trajectory).stderr


RESPONSES = """
import http.client, json, os, subprocess
said = [{"role": "user", "content": "do it all"}]
while True:
    connection = http.client.HTTPConnection(os.environ["OPENAI_BASE_URL"].split("/")[2])
    connection.request("POST", "/v1/responses", json.dumps({"model": "gpt-5", "input": said, "store": False}))
    output = json.load(connection.getresponse())["output"]
    said += output
    calls = [item for item in output if item["type"] == "function_call"]
    for call in calls:
        done = subprocess.run(["bash", "-c", json.loads(call["arguments"])["command"]], stdout=subprocess.PIPE)
        said.append({"type": "function_call_output", "call_id": call["call_id"], "output": done.stdout.decode()})
    if not calls:
        break
"""


@pytest.mark.parametrize(
    ("api", "kind"), long.some([("messages", "anthropic"), ("chat completions", "openai"), ("responses", "openai")], 1)
)
def test_an_edit_that_the_model_would_not_see_is_refused(agents: Agents, tmp_path: Path, api: str, kind: str) -> None:
    changed = tmp_path / "changed.json"
    changed.write_text('"changed"')
    (tmp_path / "responses.py").write_text(RESPONSES)
    programs = {
        "messages": TEAM,
        "chat completions": PROGRAMS / "plain_agent.py",
        "responses": tmp_path / "responses.py",
    }
    with provider(tmp_path, *MAIN[:1], {"text": "Begun."}) as at:
        trajectory = agents.run(at, programs[api], "do it all", kind=kind)
        assert [str(request["path"]).rpartition("/v1/")[2] for request in at.requests()] == [api.replace(" ", "/")] * 2
    assert agents.names(trajectory) == ["start", "bash", "exit"]
    step = agents.steps(trajectory)[1]["id"]
    for change in (("--message", "user=changed"), ("--result", changed), ("--drop-messages", "1")):
        refused = agents.snap("edit", *change, step, code=None)
        assert refused.returncode != 0
        assert "never see" in refused.stderr
    agents.snap("edit", "--env", "A=1", step)
