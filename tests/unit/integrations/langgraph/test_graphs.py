"""Graphs of LangGraph over `SnapshotdSaver`: interrupts, time travel, subgraphs, tasks that a kill cut off, and channels
whose value is made from the writes to earlier checkpoints."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from operator import add
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.channels.delta import DeltaChannel
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from snapshotd.errors import Conflict
from snapshotd.integrations.langgraph import SnapshotdSaver, copy_threads
from tests import long
from tests.langgraph_rig import config, sqlite_saver

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[SnapshotdSaver]:
    with SnapshotdSaver(tmp_path / "agent.db") as saver:
        yield saver


class Log(TypedDict):
    said: Annotated[
        list[str],
        DeltaChannel(lambda old, new: old + [item for some in new for item in some], list, snapshot_frequency=7),
    ]
    count: Annotated[int, add]


def delta_graph(saver: SnapshotdSaver) -> Any:
    builder = StateGraph(Log)
    builder.add_node("speak", lambda state: {"said": [f"answer {len(state['said'])}"], "count": 1})
    builder.add_edge(START, "speak")
    builder.add_edge("speak", END)
    return builder.compile(checkpointer=saver)


def talk(graph: Any, turns: int, thread: str = "t") -> list[str]:
    for number in range(turns):
        graph.invoke(
            {"said": [f"question {number}"]}, {**config(thread), "run_id": f"00000000-0000-4000-8000-{number:012}"}
        )
    found: list[str] = graph.get_state(config(thread)).values["said"]
    return found


@pytest.mark.parametrize("turns", [1, 5, 12])
def test_delta_channels_outlive_every_kind_of_removal(tmp_path: Path, saver: SnapshotdSaver, turns: int) -> None:
    said = talk(delta_graph(saver), turns)
    assert len(said) == 2 * turns
    saver.copy_thread("t", "copy")
    saver.delete_for_runs([f"00000000-0000-4000-8000-{number:012}" for number in range(turns - 1)])
    saver.prune(["copy"])
    saver.prune(["copy"])
    assert len(list(saver.list(config("copy")))) == 1
    for thread in ("t", "copy"):
        with SnapshotdSaver(tmp_path / "agent.db") as again:
            graph = delta_graph(again)
            assert graph.get_state(config(thread)).values == {"said": said, "count": turns}
            assert talk(graph, 9, thread)[: len(said)] == said
            again.prune([thread])
            assert len(graph.get_state(config(thread)).values["said"]) == len(said) + 18


def test_delta_channels_are_the_same_asynchronously(saver: SnapshotdSaver) -> None:
    graph = delta_graph(saver)
    said = talk(graph, 5)

    async def look() -> Any:
        return await graph.aget_state(config("t"))

    assert asyncio.run(look()).values["said"] == said


def asking_graph(saver: Any) -> Any:
    def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(f"you said {interrupt('may I?')}", id=f"a{len(state['messages'])}")]}

    inner = StateGraph(MessagesState).add_node("ask", ask).add_edge(START, "ask").compile()
    return StateGraph(MessagesState).add_node("inner", inner).add_edge(START, "inner").compile(checkpointer=saver)


def test_interrupts_forks_and_subgraphs_go_on_in_another_process(tmp_path: Path, saver: SnapshotdSaver) -> None:
    asked = asking_graph(saver).invoke({"messages": [HumanMessage("hello", id="1")]}, config("t"))
    assert asked["__interrupt__"][0].value == "may I?"
    with SnapshotdSaver(tmp_path / "agent.db") as again:
        graph = asking_graph(again)
        assert graph.get_state(config("t"), subgraphs=True).tasks[0].interrupts[0].value == "may I?"
        done = graph.invoke(Command(resume="yes"), config("t"))
        assert [message.content for message in done["messages"]] == ["hello", "you said yes"]
        history = list(graph.get_state_history(config("t")))
        assert [len(state.values.get("messages", [])) for state in history] == [2, 1, 0]
        forked = graph.update_state(history[1].config, {"messages": [HumanMessage("other", id="2")]})
        graph.invoke(None, forked)
        done = graph.invoke(Command(resume="no"), config("t"))
        assert [message.content for message in done["messages"]] == ["hello", "other", "you said no"]
        assert len(list(graph.get_state_history(config("t")))) > len(history)


def test_threads_move_in_from_another_saver_and_out_again(tmp_path: Path, saver: SnapshotdSaver) -> None:
    """With what is pending in them: they go on where they were."""
    with sqlite_saver(tmp_path / "theirs.db") as theirs, sqlite_saver(tmp_path / "back.db") as back:
        theirs.setup()
        for thread in ("t", "other"):
            asking_graph(theirs).invoke({"messages": [HumanMessage("hello", id="1")]}, config(thread))
            asking_graph(theirs).invoke(Command(resume="once"), config(thread))
            asking_graph(theirs).invoke({"messages": [HumanMessage("again", id="2")]}, config(thread))
        assert copy_threads(theirs, saver, ["t"]) == len(list(theirs.list({"configurable": {"thread_id": "t"}})))
        assert {one.config["configurable"]["thread_id"] for one in saver.list(None)} == {"t"}
        assert seen(saver) == seen(theirs)
        with pytest.raises(Conflict, match="'t'"):
            copy_threads(theirs, saver)
        asking_graph(saver).invoke(Command(resume="twice"), config("t"))
        asking_graph(saver).invoke({"messages": [HumanMessage("more", id="3")]}, config("t"))
        back.setup()
        copy_threads(saver, back)
        assert seen(back) == seen(saver)
        done = asking_graph(back).invoke(Command(resume="thrice"), config("t"))
        texts = ["hello", "you said once", "again", "you said twice", "more", "you said thrice"]
        assert [message.content for message in done["messages"]] == texts
        asking_graph(saver).invoke({"messages": [HumanMessage("new", id="4")]}, config("fresh"))
        copy_threads(saver, back, ["fresh"])
        done = asking_graph(back).invoke(Command(resume="here"), config("fresh"))
        assert done["messages"][-1].content == "you said here"


def seen(saver: Any) -> Any:
    return [
        (
            one.config,
            one.checkpoint["channel_values"],
            one.metadata,
            one.parent_config,
            sorted(map(str, one.pending_writes)),
        )
        for one in saver.list({"configurable": {"thread_id": "t"}})
    ]


TASKS = """  # a process for each time that the flow is run, of one that has imported LangGraph
import os, sys, time
from langgraph.func import entrypoint, task
from snapshotd.integrations.langgraph import SnapshotdSaver
path, log, *times = sys.argv[1:]
for dies in times:
    pid = os.fork()
    if pid == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()

@task
def step(number: int) -> int:
    with open(log, "a") as file:
        file.write(f"{number}\\n")
    return number * 10

with SnapshotdSaver(path) as saver:
    @entrypoint(checkpointer=saver)
    def flow(count: int) -> list[int]:
        done = []
        for number in range(count):
            done.append(step(number).result())
            if dies == str(number):
                deadline = time.monotonic() + 30
                while time.monotonic() < deadline:
                    stored = saver.get_tuple(config)  # None while the first checkpoint is on its way to the disk
                    if stored is not None and len(stored.pending_writes) > number:
                        break
                    time.sleep(0.01)
                os.kill(os.getpid(), 9)
        return done

    config = {"configurable": {"thread_id": "t"}}
    saved = saver.get_tuple(config)
    print(flow.invoke(5 if saved is None else None, config, durability="sync"))
"""


def test_no_task_runs_twice_after_a_kill(tmp_path: Path) -> None:
    """The process is killed within a super-step, once what its tasks returned is stored."""
    log = tmp_path / "log"
    times = ("0", "2", "4", "no") if long.LONG else ("2", "no")
    words = [sys.executable, "-c", TASKS, str(tmp_path / "agent.db"), str(log), *times]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n") == [*["-9"] * (len(times) - 1), "[0, 10, 20, 30, 40]", "0", ""], done.stderr
    assert log.read_text().split() == list("01234")
