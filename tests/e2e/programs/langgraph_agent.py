"""A prebuilt ReAct agent of LangGraph with a scripted model: six calls, each of which adds its number to /workspace/log
and writes a file.

    langgraph_agent.py FILE STATE_DIR SANDBOX POINT STEP

It kills itself with SIGKILL at POINT of call STEP: before, in, after, or never. At the point "ask" it is a graph that
asks a person instead.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from typing import Any

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool

warnings.filterwarnings("ignore", message="create_react_agent has been moved")
from langgraph.graph import START, MessagesState, StateGraph  # noqa: E402
from langgraph.prebuilt import create_react_agent  # noqa: E402
from langgraph.types import interrupt  # noqa: E402

from snapshotd.client import Sandbox, Snapshotd  # noqa: E402
from snapshotd.integrations.langgraph import SnapshotdSaver  # noqa: E402

STEPS = 6
TOKEN = "ghp_" + "a1B2c3" * 6
"""It looks like a secret, so the record of its command has a marker in its place."""
CONFIG: Any = {"configurable": {"thread_id": "t"}}


class Scripted(BaseChatModel):
    """Asks for the next of six calls, and tells the last person's wish to each."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **more: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        step = sum(isinstance(message, ToolMessage) for message in messages) + 1
        wish = next(str(message.content) for message in reversed(messages) if message.type == "human")
        call = {"name": "work", "args": {"step": step, "wish": wish}, "id": f"call-{step}", "type": "tool_call"}
        asks = AIMessage("", id=f"ai-{step}-{wish}", tool_calls=[call])
        answer = AIMessage("done", id=f"ai-done-{wish}") if step > STEPS else asks
        return ChatResult(generations=[ChatGeneration(message=answer)])


def agent(saver: SnapshotdSaver, point: str = "never", at: int = 0) -> Any:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @tool
    def work(step: int, wish: str) -> str:
        """Do one step."""
        doomed = step == at
        if doomed and point == "before":
            die()
        script = f"echo {step} >> log; echo {wish} > step-{step}; echo did {step}"
        script += f"; sleep 1; : {TOKEN}" if step == 3 else ""
        if doomed and point == "in":

            def told(_: bytes) -> None:
                die()

            saver.exec(script, on_stdout=told)
        done = saver.exec(script)
        if doomed and point == "after":
            die()
        return done.stdout

    return create_react_agent(Scripted(), [work], checkpointer=saver)


def asking(saver: SnapshotdSaver) -> Any:
    """A graph with one question."""

    def ask(_: MessagesState) -> dict[str, Any]:
        saver.exec("echo asked >> log")
        return {"messages": [("ai", str(interrupt("go on?")))]}

    return StateGraph(MessagesState).add_node(ask).add_edge(START, "ask").compile(checkpointer=saver)


def main() -> None:
    path, state_dir, sandbox, point, step = sys.argv[1:]
    client = Snapshotd(state_dir)
    box = Sandbox.connect(sandbox, client=client)
    with SnapshotdSaver(path, sandbox=box, client=client) as saver:
        graph = asking(saver) if point == "ask" else agent(saver, point, int(step))
        first = saver.get_tuple(CONFIG) is None
        done = graph.invoke({"messages": [("user", "please")]} if first else None, CONFIG)
        sys.stdout.write(done["messages"][-1].content)


if __name__ == "__main__":
    main()
