"""The library and the daemon's server together: every request that the library makes is one that the server
understands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from snapshotd.engine.protocol.agent_protocol import AgentServer

PROGRAM = """
    from snapshotd.agent import (approve, checkpoint, current_call, emit, message, messages, model, now, randint, random, record_usage,
                                 state, store, task, tasks, tool, uuid)
    @tool(side_effect="irreversible", key="k-{n}", compensate=["undo", "it"], approve="Sure?")
    def pay(n):
        emit("paying")
        emit(b"\\xff", "stderr")
        message("tool", "inside")
        return current_call().key
    @tool(side_effect="idempotent", approve=True)
    def send(text): return "y" * 50000
    @task("build", depends=["plan"])
    def build(n): return {"n": n}
    task.plan("plan")
    with task("plan") as t: t.result = [1]
    assert build(1) == {"n": 1}
    assert pay(1) == "k-1" and len(send("x" * 60000)) == 50000
    assert model("gpt", {"big": "z" * 100000}, call=lambda: record_usage(cost_usd=0.1) or {"usage": {"prompt_tokens": 1}})
    state["k"] = {"v": "w" * 100000}
    state["gone"] = 1
    del state["gone"]
    assert [now() > 0, 0 <= random() < 1, randint(1, 2) in (1, 2), len(uuid())] == [True, True, True, 36]
    assert not approve("Sure?", "no", expires_s=5) and approve("Sure?", "yes")
    assert checkpoint("here") and len(messages()) == 1
    assert store.put("k", "x" * 100000, ttl_s=5, expected_version=0) == 1 and store.put("k", None) == 1
    store.get("k"); store.get("k", version=1); store.delete("k", expected_version=1)
    assert store.search("k", where={"a": 1}, after="b", limit=5) == []
    print([entry["status"] for entry in tasks()])
"""


def test_everything_once(recorder: Any, server: AgentServer, run_agent: Callable[..., Any]) -> None:
    said = run_agent(PROGRAM).stdout
    assert said == "['pending', 'in-progress', 'completed', 'in-progress', 'completed']\n"
    assert [(call["name"], str(call["status"])) for call in recorder.calls.values()] == [
        ("plan", "done"),
        ("build", "done"),
        ("pay", "done"),
        ("send", "done"),
        ("gpt", "done"),
    ]
    assert recorder.named("gpt")[0]["arguments"] == {"request": {"big": "z" * 100_000}}
    assert recorder.values == {"k": {"v": "w" * 100_000}}
    assert [event for event in recorder.events if event[0] == "output"] == [
        ("output", "stdout", b"paying"),
        ("output", "stderr", b"\xff"),
    ]
    assert recorder.subtasks[3]["depends"] == ["plan"]
    assert recorder.lost == []
