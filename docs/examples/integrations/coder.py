"""State and files together: back to an earlier step, and two forks of it."""

from langgraph.graph import START, MessagesState, StateGraph

from snapshotd.client import Sandbox
from snapshotd.integrations.langgraph import SnapshotdSaver

sandbox = Sandbox.create(name="coder")
with SnapshotdSaver("coder.db", sandbox=sandbox) as saver:

    def work(state: MessagesState) -> dict:
        wish = state["messages"][-1].content
        return {"messages": [("ai", saver.exec(f"echo {wish} >> notes; cat notes").stdout)]}

    graph = StateGraph(MessagesState).add_node(work).add_edge(START, "work").compile(checkpointer=saver)
    thread = {"configurable": {"thread_id": "ann"}}
    for wish in ("one", "two", "three"):
        graph.invoke({"messages": [wish]}, thread)
    history = list(graph.get_state_history(thread))
    print(len(history), "checkpoints,", len({state.metadata["snapshot"] for state in history}), "snapshots")

    after_two = next(state for state in history if len(state.values["messages"]) == 4 and not state.next)
    graph.invoke({"messages": ["other"]}, after_two.config)
    print("rewound:", saver.sandbox(thread).files.read_text("notes").split())

    for wish in ("left", "right"):
        fork = graph.update_state(after_two.config, {"messages": [wish]}, as_node="__start__")
        graph.invoke(None, fork)
        print("forked:", saver.sandbox(thread).files.read_text("notes").split())
    print("in the first sandbox:", sandbox.files.read_text("notes").split())
sandbox.stop()
