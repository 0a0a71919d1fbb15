"""An agent of DeepAgents with a scripted model: four commands, each of which adds its number to /workspace/log.

    deepagents_agent.py FILE SANDBOX POINT [STEP]

It kills itself with SIGKILL at POINT of call STEP: before, after, or never. At the point "travel" it goes back and forks, at
"errors" it does what cannot be done.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from deepagents import create_deep_agent
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from snapshotd.client import Sandbox, Snapshot, Snapshotd
from snapshotd.integrations.deepagents import SnapshotdBackend
from snapshotd.integrations.langgraph import SnapshotdSaver

STEPS = 4
THREAD: Any = {"configurable": {"thread_id": "t"}}


class Scripted(BaseChatModel):
    """Asks for the next of the commands."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **more: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        step = sum(isinstance(message, ToolMessage) for message in messages) + 1
        call = {
            "name": "execute",
            "args": {"command": f"echo {step} >> log"},
            "id": f"call-{step}",
            "type": "tool_call",
        }
        answer = AIMessage("done", id="done") if step > STEPS else AIMessage("", id=f"ai-{step}", tool_calls=[call])
        return ChatResult(generations=[ChatGeneration(message=answer)])


class Doomed(SnapshotdBackend):
    point, step = "never", 0

    def execute(self, command: str, *, timeout: int | None = None) -> Any:
        doomed = command == f"echo {self.step} >> log"
        if doomed and self.point == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        done = super().execute(command, timeout=timeout)
        if doomed and self.point == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return done


def log_of(box: Sandbox) -> str:
    return " ".join(box.files.read_text("log").split())


def errors(box: Sandbox) -> None:
    backend = SnapshotdBackend(box)
    box.files.write("a", "1")
    found = backend.download_files(["/none", "/workspace", "relative", "/workspace/a"])
    print(*(one.error for one in found))  # noqa: T201
    put = backend.upload_files([("/workspace/b/c", b"1"), ("relative", b"2")])
    print(*(one.error for one in put), box.files.read("b/c"))  # noqa: T201
    print(*(backend.execute(one, timeout=1).exit_code for one in ("exit 3", "sleep 30", "no-such-thing")))  # noqa: T201
    box.remove(force=True)
    print("gone" if backend.execute("true").exit_code is None else "there")  # noqa: T201


def main() -> None:
    file, sandbox, point, *step = sys.argv[1:]
    box = Sandbox.connect(sandbox, client=Snapshotd())
    if point == "errors":
        errors(box)
        return
    Doomed.point, Doomed.step = point, int(step[0]) if step else 0
    with SnapshotdSaver(file, sandbox=box) as saver:
        agent: Any = create_deep_agent(model=Scripted(), backend=Doomed(saver), checkpointer=saver)
        first = saver.get_tuple(THREAD) is None
        agent.invoke({"messages": [("user", "please")]} if first else None, THREAD, durability="sync")
        print(log_of(saver.sandbox(THREAD)))  # noqa: T201
        if point == "travel":
            travel(agent, saver, box)


def travel(agent: Any, saver: SnapshotdSaver, box: Sandbox) -> None:
    def results(state: Any) -> int:
        return sum(isinstance(one, ToolMessage) for one in state.values.get("messages", []))

    second = next(state for state in reversed(list(agent.get_state_history(THREAD))) if results(state) == 2)
    print("after 2:", " ".join(_log_at(second)))  # noqa: T201
    agent.invoke(None, second.config, durability="sync")
    print("again:", log_of(saver.sandbox(THREAD)))  # noqa: T201
    fork = agent.update_state(second.config, {"messages": [("user", "another way")]})
    agent.invoke(None, fork, durability="sync")
    print("fork:", log_of(saver.sandbox(THREAD)))  # noqa: T201
    print("first:", log_of(box))  # noqa: T201


def _log_at(state: Any) -> list[str]:
    return Snapshot.get(state.metadata["snapshot"]).files.read_text("log").split()


if __name__ == "__main__":
    main()
