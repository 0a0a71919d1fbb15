"""LangGraph's state and a sandbox's files, bound: a prebuilt agent with a scripted model travels in time, forks, and is
killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import add
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send, interrupt

from snapshotd.client import ExecFailed, Sandbox, Snapshotd
from snapshotd.errors import DaemonUnavailable, Denied, NotFound, Undecided, UsageError, VersionMismatch
from snapshotd.failpoints import EXIT_CODE
from snapshotd.integrations.langgraph import SnapshotdSaver, file
from tests import long
from tests.e2e.forked_programs import Forks, forks_with
from tests.e2e.programs.langgraph_agent import CONFIG, STEPS, agent
from tests.e2e.support import Snap, daemon_with, processes_with, wait_until

pytestmark = [pytest.mark.runc, pytest.mark.filterwarnings("ignore:create_react_agent has been moved")]
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "integrations" / "langgraph.md"
EXAMPLES = ROOT / "docs" / "examples" / "integrations"
PROGRAM = Path(__file__).with_name("programs") / "langgraph_agent.py"


@pytest.fixture(scope="module")
def small_snap(small_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snap]:
    """A daemon with a small image. It finds no Docker, so that sandboxes are runc's."""
    with daemon_with(
        small_root, tmp_path_factory.mktemp("g") / "state", {"DOCKER_HOST": "unix:///run/snapshotd-no-such-engine.sock"}
    ) as snap:
        yield snap


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """Forks `PROGRAM` and the programs of the page, which import LangGraph."""
    with forks_with(["tests.e2e.programs.langgraph_agent"]) as forks:
        yield forks


@pytest.fixture
def client(small_snap: Snap) -> Snapshotd:
    return Snapshotd(small_snap.state_dir)


@pytest.fixture
def sandbox(client: Snapshotd) -> Iterator[Sandbox]:
    sandbox = Sandbox.create(runtime="runc", client=client)
    yield sandbox
    for one in reversed(client.trajectories()):
        client.remove(one.id, force=True)


@pytest.fixture
def saver(tmp_path: Path, sandbox: Sandbox, client: Snapshotd) -> Iterator[SnapshotdSaver]:
    with SnapshotdSaver(tmp_path / "agent.db", sandbox=sandbox, client=client) as saver:
        yield saver


def log_of(sandbox: Sandbox) -> str:
    return sandbox.files.read_text("log").replace("\n", "") if sandbox.files.exists("log") else ""


def check_history(graph: Any, client: Snapshotd) -> None:
    """Each checkpoint has the files that belong to its messages."""
    for state in graph.get_state_history(CONFIG):
        done = sum(message.type == "tool" for message in state.values.get("messages", []))
        files = {item.name for item in client.list_files(state.metadata["snapshot"], "/workspace")}
        assert files == {f"step-{step}" for step in range(1, done + 1)} | ({"log"} if done else set())


def before_call(graph: Any, step: int) -> Any:
    """The checkpoint from which call number `step` is made."""
    return next(
        state
        for state in graph.get_state_history(CONFIG)
        if state.next and state.next[0] == "tools" and f"call-{step}" in str(state.values["messages"][-1].tool_calls)
    )


def test_the_history_names_snapshots_and_going_back_brings_their_files(
    saver: SnapshotdSaver, sandbox: Sandbox, client: Snapshotd
) -> None:
    graph = agent(saver)
    graph.invoke({"messages": [("user", "please")]}, CONFIG)
    assert log_of(sandbox) == "123456"
    check_history(graph, client)

    third = before_call(graph, 3)
    graph.invoke(None, third.config)
    assert saver.sandbox(CONFIG).id == sandbox.id
    assert log_of(sandbox) == "123456"
    tools = [snapshot.info.tool.name for snapshot in sandbox.snapshots()]
    assert tools[1:] == ["exec"] * STEPS + ["rewind"] + ["exec"] * (STEPS - 2)
    for config, why in (
        ({}, "no thread"),
        (None, "no graph"),
        ({"configurable": {"thread_id": "none"}}, "no checkpoint"),
    ):
        with pytest.raises(UsageError, match=why):
            saver.exec("true", config=config)  # type: ignore[arg-type]


@pytest.mark.long  # without files: unit/integrations/langgraph/test_graphs.py
def test_forks_from_one_step_run_side_by_side_and_are_compared(
    saver: SnapshotdSaver, sandbox: Sandbox, client: Snapshotd
) -> None:
    graph = agent(saver)
    graph.invoke({"messages": [("user", "please")]}, CONFIG)
    third = next(
        one for one in graph.get_state_history(CONFIG) if one.next == ("agent",) and len(one.values["messages"]) == 5
    )
    wishes = [f"wish{number}" for number in range(4)]
    forks = [graph.update_state(third.config, {"messages": [("user", wish)]}, as_node="tools") for wish in wishes]
    assert log_of(sandbox) == "123456"
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda config: graph.invoke(None, config), forks))
    boxes = {}
    for wish, state in zip(wishes, done, strict=True):
        assert state["messages"][-1].id == f"ai-done-{wish}"
        (last,) = [
            one
            for one in graph.get_state_history(CONFIG)
            if not one.next and one.values["messages"] == state["messages"]
        ]
        box = saver.sandbox(last.config)
        boxes[box.id] = box
        assert log_of(box) == "123456"
        assert [box.files.read_text(f"step-{step}").strip() for step in (2, 3, 6)] == ["please", wish, wish]
    assert len({*boxes, sandbox.id}) == 5
    assert sandbox.files.read_text("step-3").strip() == "please"

    compared = client.compare(*boxes)
    assert compared.fork_point is not None
    assert compared.fork_point.id == third.metadata["snapshot"]
    assert [(branch.call_count, branch.failed) for branch in compared.branches] == [(STEPS - 2, 0)] * 4
    for pair in compared.pairs:
        assert [(call.number, call.difference) for call in pair.calls] == [(step, "arguments") for step in (3, 4, 5, 6)]
        assert {change.path for change in pair.changes} == {f"/workspace/step-{step}" for step in (3, 4, 5, 6)}


@pytest.mark.long  # forks of a thread: the test before
def test_a_copy_of_a_thread_is_a_fork_and_other_threads_begin_with_the_first_files(
    saver: SnapshotdSaver, sandbox: Sandbox, client: Snapshotd, tmp_path: Path
) -> None:
    sandbox.files.write("given", "x")
    graph = agent(saver)
    graph.invoke({"messages": [("user", "please")]}, CONFIG)
    saver.copy_thread("t", "copy")
    copy: Any = {"configurable": {"thread_id": "copy"}}
    box = saver.sandbox(copy)
    assert box.id != sandbox.id
    assert (log_of(box), box.files.read_text("given")) == ("123456", "x")
    other: Any = {"configurable": {"thread_id": "other"}}
    graph.invoke({"messages": [("user", "anew")]}, other)
    assert saver.sandbox(other).id not in (sandbox.id, box.id)
    assert log_of(saver.sandbox(other)) == "123456"
    assert saver.sandbox(other).files.read_text("step-1").strip() == "anew"
    with SnapshotdSaver(tmp_path / "agent.db", sandbox=sandbox, client=client) as again:
        assert again.sandbox(copy).id == box.id


@pytest.mark.long  # unit/integrations/langgraph/test_saver.py
def test_the_state_of_a_pruned_snapshot_is_there_and_its_files_are_said_to_be_gone(
    saver: SnapshotdSaver, sandbox: Sandbox, client: Snapshotd
) -> None:
    graph = agent(saver)
    graph.invoke({"messages": [("user", "please")]}, CONFIG)
    third = before_call(graph, 3)
    saver.copy_thread("t", "copy")
    sandbox.remove(force=True)
    state = graph.get_state(third.config)
    assert state.values == third.values
    with pytest.raises(
        NotFound, match=rf"the files .* are gone because snapshot {third.metadata['snapshot'][:12]} was removed"
    ):
        graph.invoke(None, third.config)
    with pytest.raises(NotFound, match="its state is there"):
        saver.sandbox({"configurable": {"thread_id": "copy"}})


@pytest.mark.parametrize(
    ("point", "step"), [("in", 3), *([("before", 1), ("after", 4), ("after", 6), ("in", 6)] if long.LONG else [])]
)
def test_no_call_is_made_twice_after_kill_9(
    tmp_path: Path, small_snap: Snap, sandbox: Sandbox, forks: Forks, point: str, step: int
) -> None:
    for number, kill in enumerate((point, "never")):
        words = [tmp_path / "agent.db", small_snap.state_dir, sandbox.id, kill, step]
        done = forks.run(PROGRAM, *words, env=small_snap.env)
        assert done.returncode == (0 if number else -9), done.stderr
    assert done.stdout == "done"
    assert log_of(sandbox) == "123456"
    assert [snapshot.info.tool.name for snapshot in sandbox.snapshots()][1:] == ["exec"] * STEPS


@pytest.mark.long  # another process goes on: the test before
def test_a_thread_goes_on_after_a_week_a_new_daemon_and_a_new_format_of_the_file(
    tmp_path: Path, small_snap: Snap, sandbox: Sandbox, client: Snapshotd, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next release's format is made up: the present one and another column. Its release migrates a file that the
    present one wrote, with a thread in the middle of its work, and the present one refuses the file from then on."""
    path = tmp_path / "agent.db"
    done = forks.run(PROGRAM, path, small_snap.state_dir, sandbox.id, "after", 3, env=small_snap.env)
    assert done.returncode == -9, done.stderr
    small_snap.stop_daemon()
    with monkeypatch.context() as newer:
        newer.setattr(file, "FORM", replace(file.FORM, version=file.FORM.version + 1))
        newer.setattr(file, "MIGRATIONS", (*file.MIGRATIONS, "ALTER TABLE thread ADD COLUMN week INTEGER"))
        with SnapshotdSaver(path, sandbox=sandbox, client=client) as saver:
            graph = agent(saver)
            assert graph.invoke(None, CONFIG)["messages"][-1].content == "done"
            check_history(graph, client)
            assert log_of(sandbox) == "123456"
            assert [snapshot.info.tool.name for snapshot in sandbox.snapshots()][1:] == ["exec"] * STEPS
            again = graph.invoke({"messages": [("user", "and then?")]}, CONFIG)["messages"]
            assert [message.content for message in again if message.type == "human"] == ["please", "and then?"]
            graph.invoke(None, before_call(graph, 2).config)
            assert log_of(saver.sandbox(CONFIG)) == "123456"
    with pytest.raises(VersionMismatch, match="was written by a newer snapshotd"):
        SnapshotdSaver(path, sandbox=sandbox, client=client)


@pytest.mark.long  # one call: test_a_call_that_died_with_the_daemon_is_made_again_or_asked_about
@pytest.mark.parametrize(
    "points",
    [
        ("engine.step.sealed:3", "engine.step.committed:2"),
        *([("engine.step.begin:1", "engine.step.outputs_saved:4", "engine.request.done:1")] if long.LONG else []),
    ],
)
def test_no_call_is_made_twice_after_kill_9_of_the_daemon(
    saver: SnapshotdSaver, sandbox: Sandbox, small_snap: Snap, points: tuple[str, ...]
) -> None:
    """Each point is reached by a daemon of its own. Where the call is recorded, the client hears of it from the next one,
    and the run goes on by itself; so such a point comes last."""
    graph, log = agent(saver), small_snap.state_dir / "daemon.log"
    graph.update_state(CONFIG, {"messages": [("user", "please")]}, as_node="__start__")
    for point in points:
        died = log.read_text().count(f"failpoint {point.partition(':')[0]} reached")
        small_snap.kill_daemon()
        Snap(small_snap.state_dir, {**small_snap.env, "SNAPSHOTD_FAILPOINT": point})("ls")
        with contextlib.suppress(DaemonUnavailable):
            graph.invoke(None, CONFIG)
        assert log.read_text().count(f"failpoint {point.partition(':')[0]} reached") == died + 1
    graph.invoke(None, CONFIG)
    assert graph.get_state(CONFIG).values["messages"][-1].content == "done"
    assert log_of(sandbox) == "123456"
    assert [snapshot.info.tool.name for snapshot in sandbox.snapshots()][1:] == ["exec"] * STEPS


BETWEEN = ("langgraph.call.begun:2", "langgraph.call.made:1", "langgraph.put.bound:2", "langgraph.put.stored:2")
"""Each place between a snapshot's commit and that of the checkpoint that names it, and how often it is passed first. Two
checkpoints belong to a call: before it, and before the model is asked again."""


def test_a_checkpoint_names_its_files_or_is_not_there_whenever_the_graphs_program_dies(
    tmp_path: Path, small_snap: Snap, sandbox: Sandbox, client: Snapshotd, saver: SnapshotdSaver, forks: Forks
) -> None:
    graph = agent(saver)
    words = [tmp_path / "agent.db", small_snap.state_dir, sandbox.id, "never", 0]
    for point in (*BETWEEN, ""):
        done = forks.run(PROGRAM, *words, env={**small_snap.env, "SNAPSHOTD_FAILPOINT": point})
        assert done.returncode == (EXIT_CODE if point else 0), done.stderr
        check_history(graph, client)
    assert done.stdout == "done"
    assert log_of(sandbox) == "123456"
    assert [snapshot.info.tool.name for snapshot in sandbox.snapshots()][1:] == ["exec"] * STEPS


class Log(TypedDict):
    seen: Annotated[list[str], add]


@pytest.mark.parametrize("irreversible", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_call_that_died_with_the_daemon_is_made_again_or_asked_about(
    saver: SnapshotdSaver, sandbox: Sandbox, small_snap: Snap, irreversible: bool
) -> None:
    kills, long_sleep = [1], f"sleep 1000.{os.getpid()}"

    def told(_: bytes) -> None:
        """It has not ended: the first time it is cut off with the daemon, and the second time it is let go."""
        if kills:
            kills.pop()
            small_snap.kill_daemon()
            return
        wait_until(lambda: bool(asleep()), "it sleeps")
        for pid in asleep():
            os.kill(pid, signal.SIGKILL)

    def asleep() -> list[int]:
        return [pid for pid, line in processes_with(long_sleep) if line.startswith("sleep")]

    def work(state: Log) -> dict[str, Any]:
        step = len(state["seen"])
        script = f"echo {step} >> log; echo did {step}" + (f"; {long_sleep}; true" if step == 1 else "")
        listener = told if step == 1 else None
        return {
            "seen": [saver.exec(script, irreversible=irreversible and step == 1, on_stdout=listener).stdout.strip()]
        }

    builder = StateGraph(Log).add_node("work", work).add_edge(START, "work")
    builder.add_conditional_edges("work", lambda state: "work" if len(state["seen"]) < 3 else END)
    graph = builder.compile(checkpointer=saver)
    with pytest.raises(DaemonUnavailable):
        graph.invoke({"seen": []}, CONFIG)
    if irreversible:
        with pytest.raises(Undecided, match="may or may not have happened"):
            graph.invoke(None, CONFIG)
        graph.update_state(CONFIG, {"seen": ["decided"]})
    assert graph.invoke(None, CONFIG)["seen"] == ["did 0", "decided" if irreversible else "did 1", "did 2"]
    assert log_of(sandbox) == ("02" if irreversible else "012")


def test_a_daemon_that_is_gone_when_a_checkpoint_is_put(
    tmp_path: Path, small_snap: Snap, sandbox: Sandbox, client: Snapshotd
) -> None:
    """The checkpoint is not stored, with or without files, and the thread goes on from the one before."""
    alone, kills = Snapshotd(small_snap.state_dir, autostart=False), [1]
    box = Sandbox.connect(sandbox.id, client=alone)

    def work(state: Log) -> dict[str, Any]:
        done = saver.exec(f"echo {len(state['seen'])} >> log; cat log").stdout
        if len(state["seen"]) == 1 and kills:
            kills.pop()
            small_snap.kill_daemon()
        return {"seen": ["".join(done.split())]}

    builder = StateGraph(Log).add_node("work", work).add_edge(START, "work")
    builder.add_conditional_edges("work", lambda state: "work" if len(state["seen"]) < 3 else END)
    with SnapshotdSaver(tmp_path / "agent.db", sandbox=box, client=alone) as saver:
        graph = builder.compile(checkpointer=saver)
        with pytest.raises(DaemonUnavailable):
            graph.invoke({"seen": []}, CONFIG)
        found = saver.get_tuple(CONFIG)
        assert found is not None
        assert found.checkpoint["channel_values"]["seen"] == ["0"]
        assert client.status()
        assert graph.invoke(None, CONFIG)["seen"] == ["0", "01", "012"]
    assert [snapshot.info.tool.name for snapshot in sandbox.snapshots()][1:] == ["exec"] * 3


@pytest.mark.long  # unit/integrations/langgraph/test_saver.py
def test_two_processes_on_one_thread_find_the_files_of_their_own_checkpoints(
    tmp_path: Path, small_snap: Snap, sandbox: Sandbox, client: Snapshotd, saver: SnapshotdSaver, forks: Forks
) -> None:
    words = [tmp_path / "agent.db", small_snap.state_dir, sandbox.id, "never", 0]
    running = [forks.start(PROGRAM, *words, env=small_snap.env) for _ in range(2)]
    told = [process.wait() for process in running]
    assert [(done.returncode, done.stdout) for done in told] == [(0, "done")] * 2, told
    check_history(agent(saver), client)


def asking(saver: SnapshotdSaver, *questions: Any) -> Any:
    """A graph of one task, which asks each question between two commands and logs the answers."""

    def work(state: Log) -> dict[str, Any]:
        for number, question in enumerate(questions):
            saver.exec(f"echo asked {number} >> log")
            saver.exec(f"echo '{json.dumps(interrupt(question))}' >> log")
        return {"seen": ["done"]}

    return StateGraph(Log).add_node("work", work).add_edge(START, "work").compile(checkpointer=saver)


def pending(client: Snapshotd) -> list[Any]:
    return client.approvals("pending")


def test_an_interrupt_is_decided_by_a_person_after_the_graphs_process_is_gone(
    saver: SnapshotdSaver, sandbox: Sandbox, client: Snapshotd, small_snap: Snap, tmp_path: Path
) -> None:
    questions = ("deploy?", {"to": "ann", "odd": "\ud800\0"}, 3, {"not", "json", *"abcdefgh"})
    assert "__interrupt__" in asking(saver, *questions).invoke({"seen": []}, CONFIG)
    (tmp_path / "answer.json").write_text('{"to": "bob"}')
    shown = []
    for words in (["approve"], ["approve", "--arguments", tmp_path / "answer.json"], ["deny"], ["approve"]):
        (one,) = small_snap.json("approvals")
        assert (one["name"], one["trajectory"], one["arguments"]["thread"]) == ("interrupt", sandbox.id, "t")
        shown.append(one["question"])
        with SnapshotdSaver(tmp_path / "agent.db", sandbox=sandbox, client=client) as later:
            graph = asking(later, *questions)
            graph.invoke(None, CONFIG)  # nobody has decided: it asks the same again
            assert [item.id for item in pending(client)] == [one["id"]]
            small_snap(*words, one["id"])
            done = graph.invoke(None, CONFIG)
    assert shown[:3] == ["deploy?", '{"to": "ann", "odd": "?\\u0000"}', "3"]
    assert done["seen"] == ["done"]
    answers = ("true", '{"to": "bob"}', "false", "true")
    lines = sandbox.files.read_text("log").splitlines()
    assert lines == [line for number, answer in enumerate(answers) for line in (f"asked {number}", answer)]
    assert [snapshot.info.tool.name for snapshot in sandbox.snapshots()][1:] == ["exec"] * 8
    assert pending(client) == []


def test_who_resumes_the_graph_decides_the_approval(saver: SnapshotdSaver, sandbox: Sandbox, client: Snapshotd) -> None:
    graph = asking(saver, "one", "two", "three")
    graph.invoke({"seen": []}, CONFIG)
    for answer in (True, False, {"x": [1]}):
        assert len(pending(client)) == 1
        graph.invoke(Command(resume=answer), CONFIG)
    decided = [(item.status, item.edited) for item in client.approvals() if item.trajectory == sandbox.id]
    assert decided == [("approved", None), ("denied", None), ("approved", ({"x": [1]},))]
    assert sandbox.files.read_text("log").splitlines()[1::2] == ["true", "false", '{"x": [1]}']


def test_several_tasks_and_graphs_within_tasks_are_answered_one_by_one(
    saver: SnapshotdSaver, client: Snapshotd
) -> None:
    def ask(state: Log) -> dict[str, Any]:
        return {"seen": [f"{state['seen'][-1]}: {interrupt(state['seen'][-1])}"]}

    def ask_twice(_: Log) -> dict[str, Any]:
        return {"seen": [f"{question}: {interrupt(question)}" for question in ("deep", "deeper")]}

    inner = StateGraph(Log).add_node(ask_twice).add_edge(START, "ask_twice").compile()
    builder = StateGraph(Log).add_node("ask", ask).add_node("inner", inner)
    builder.add_conditional_edges(START, lambda state: [Send("ask", {"seen": [wish]}) for wish in state["seen"]])
    graph = builder.add_edge("ask", "inner").compile(checkpointer=saver)
    graph.invoke({"seen": ["left", "right"]}, CONFIG)
    left, right = sorted(pending(client), key=lambda item: str(item.question))
    client.approve(right.id)
    graph.invoke(None, CONFIG)
    assert [item.id for item in pending(client)] == [left.id]
    client.deny(left.id)
    graph.invoke(None, CONFIG)
    (deep,) = pending(client)
    graph.invoke(Command(resume="mine"), CONFIG)
    (deeper,) = pending(client)
    client.approve(deeper.id, arguments="yours")
    seen = graph.invoke(None, CONFIG)["seen"]
    assert list(dict.fromkeys(seen)) == ["left", "right", "left: False", "right: True", "deep: mine", "deeper: yours"]
    assert client.approval(deep.id).approval.edited == ("mine",)
    assert pending(client) == []


@pytest.fixture
def policy(small_snap: Snap) -> Iterator[Path]:
    path = small_snap.state_dir / "policy.toml"
    yield path
    path.unlink(missing_ok=True)


def test_a_call_that_the_policy_gates_is_an_interrupt(
    saver: SnapshotdSaver, sandbox: Sandbox, client: Snapshotd, policy: Path
) -> None:
    policy.write_text(
        '[[rule]]\nname = "exec"\narguments = { argv = "gated" }\naction = "approve"\nreason = "really?"\n'
        '[[rule]]\nname = "exec"\narguments = { argv = "never" }\naction = "deny"\nreason = "it is late"\n'
    )

    def work(state: Log) -> dict[str, Any]:
        seen = [saver.exec("echo free >> log; echo free").stdout, interrupt("first?")]
        for number in range(4):
            try:
                seen.append(saver.exec(f"echo gated {number} >> log; echo ran {number}").stdout)
            except Denied as exc:
                seen.append(str(exc))
        seen.append(interrupt("last?"))
        with pytest.raises(Denied, match="it is late"):
            saver.exec("echo never >> log")
        return {"seen": [str(one).strip() for one in seen]}

    graph = StateGraph(Log).add_node("work", work).add_edge(START, "work").compile(checkpointer=saver)
    graph.invoke({"seen": []}, CONFIG)

    def go_on(given: Any) -> Any:
        (one,) = pending(client)
        done = graph.invoke(given(one), CONFIG)
        return done["__interrupt__"][0].value if "__interrupt__" in done else done["seen"]

    value = go_on(lambda _: Command(resume="mine"))
    assert (value["tool"], value["question"], value["argv"][-1]) == (
        "exec",
        "really?",
        "echo gated 0 >> log; echo ran 0",
    )
    assert value["approval"] == pending(client)[0].id
    go_on(lambda one: client.approve(one.id) and None)
    go_on(
        lambda one: client.approve(one.id, arguments={"argv": ["sh", "-c", "echo other >> log; echo gated"]}) and None
    )
    go_on(lambda one: client.deny(one.id, by="ann", reason="no") and None)
    assert go_on(lambda _: Command(resume=True)) == "last?"
    seen = go_on(lambda one: client.approve(one.id, arguments="yours") and None)
    refused = seen.pop(4)
    assert seen == ["free", "mine", "ran 0", "gated", "ran 3", "yours"]
    assert refused.startswith("ann let")
    assert sandbox.files.read_text("log").split("\n") == ["free", "gated 0", "other", "gated 3", ""]
    assert [item.status for item in client.approvals() if item.name == "exec"] == ["approved"] * 2 + [
        "denied",
        "approved",
    ]


@pytest.mark.long
def test_a_question_is_asked_although_the_graphs_program_died_before_it(
    tmp_path: Path, small_snap: Snap, sandbox: Sandbox, client: Snapshotd, forks: Forks
) -> None:
    words = [tmp_path / "agent.db", small_snap.state_dir, sandbox.id, "ask", 0]

    def run(point: str, code: int) -> str:
        done = forks.run(PROGRAM, *words, env={**small_snap.env, "SNAPSHOTD_FAILPOINT": point})
        assert done.returncode == code, done.stderr
        return done.stdout

    run("langgraph.writes.stored", EXIT_CODE)
    assert pending(client) == []
    run("", 0)
    (one,) = pending(client)
    client.approve(one.id)
    assert run("", 0) == "True"
    assert sandbox.files.read_text("log") == "asked\n"


@pytest.mark.long  # with the graph's process gone: five tests above
def test_a_question_is_asked_once_although_the_daemon_dies_over_it(
    saver: SnapshotdSaver, sandbox: Sandbox, client: Snapshotd, small_snap: Snap
) -> None:
    graph = asking(saver, "one")
    small_snap.kill_daemon()
    Snap(small_snap.state_dir, {**small_snap.env, "SNAPSHOTD_FAILPOINT": "engine.approval.recorded"})("ls")
    graph.invoke({"seen": []}, CONFIG)
    assert "failpoint engine.approval.recorded reached" in (small_snap.state_dir / "daemon.log").read_text()
    graph.invoke(None, CONFIG)
    (one,) = pending(client)
    client.approve(one.id, arguments="now")
    assert graph.invoke(None, CONFIG)["seen"] == ["done"]
    assert sandbox.files.read_text("log").splitlines() == ["asked 0", '"now"']


def test_a_recorded_failure_is_a_failure_again(saver: SnapshotdSaver) -> None:
    """A step that fails after its calls is made again, with the same answers."""
    seen: list[Any] = []

    def work(state: Log) -> dict[str, Any]:
        with pytest.raises(ExecFailed, match="exit code 3") as failed:
            saver.exec("echo x >> log; echo out; echo err >&2; exit 3", check=True)
        seen.append((failed.value.result, saver.exec(["cat", "log"]).stdout))
        raise ValueError("not yet")

    graph = StateGraph(Log).add_node("work", work).add_edge(START, "work").compile(checkpointer=saver)
    for given in ({"seen": []}, None, None):
        with pytest.raises(ValueError, match="not yet"):
            graph.invoke(given, CONFIG)
    assert seen[0] == seen[1] == seen[2]
    assert (seen[0][0].stdout, seen[0][0].stderr, seen[0][1]) == ("out\n", "err\n", "x\n")


def test_the_program_of_the_page_prints_what_it_shows(tmp_path: Path, small_snap: Snap, forks: Forks) -> None:
    shown = re.search(r"\$ python3 coder\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown is not None
    done = forks.run(EXAMPLES / "coder.py", env=small_snap.env, cwd=tmp_path)
    assert (done.stdout, done.stderr) == (shown[1], "")
    for one in reversed(Snapshotd(small_snap.state_dir).trajectories()):
        small_snap("rm", "--force", one.id)


def test_the_program_of_the_page_waits_for_a_person(tmp_path: Path, small_snap: Snap, forks: Forks) -> None:
    shown = re.search(
        r"\$ python3 release\.py &\n(.*?)\$ snapshotd approvals\n.*?approve .*?\n.*?\n(.*?)```",
        PAGE.read_text(),
        re.DOTALL,
    )
    assert shown is not None
    program = forks.start(EXAMPLES / "release.py", env=small_snap.env, cwd=tmp_path)
    assert program.stdout.readline() == shown[1]
    (one,) = small_snap.json("approvals")
    assert small_snap("approve", one["id"], "--by", "ann").stdout.startswith(f"{one['id'][:12]}  approved by ann at ")
    done = program.wait()
    assert (done.returncode, done.stdout) == (0, shown[2]), done
    for box in reversed(Snapshotd(small_snap.state_dir).trajectories()):
        small_snap("rm", "--force", box.id)


@pytest.mark.long  # without a sandbox: unit/integrations/langgraph/test_conformance.py
def test_the_bound_saver_has_full_marks_too(
    tmp_path: Path, sandbox: Sandbox, client: Snapshotd, record_property: Callable[[str, object], None]
) -> None:
    files = iter(range(100))

    @checkpointer_test(name="SnapshotdSaver")
    async def saver() -> AsyncIterator[SnapshotdSaver]:
        async with SnapshotdSaver(tmp_path / f"{next(files)}.db", sandbox=sandbox, client=client) as opened:
            yield opened

    report = asyncio.run(validate(saver))
    passed = {name: result.tests_passed for name, result in report.results.items()}
    record_property(
        "told", f"langgraph-checkpoint-conformance, with a sandbox: {sum(passed.values())} passed: {passed}"
    )
    assert [result.failures for result in report.results.values()] == [[]] * len(passed)
    assert sum(passed.values()) >= 81
