"""A graph that waits for a person, who decides with `snapshotd approve` or `snapshotd deny`."""

from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import interrupt

from snapshotd.client import Sandbox
from snapshotd.integrations.langgraph import SnapshotdSaver

sandbox = Sandbox.create(name="release")
with SnapshotdSaver("release.db", sandbox=sandbox) as saver:

    def publish(state: MessagesState) -> dict:
        saver.exec("echo 1.1 > version")
        answer = interrupt("Publish version 1.1?")
        return {"messages": [("ai", f"the answer is {answer}")]}

    graph = StateGraph(MessagesState).add_node(publish).add_edge(START, "publish").compile(checkpointer=saver)
    thread = {"configurable": {"thread_id": "ann"}}
    done = graph.invoke({"messages": ["go"]}, thread)
    while "__interrupt__" in done:
        print("waits:", done["__interrupt__"][0].value, flush=True)
        saver.wait_for_decisions(thread)
        done = graph.invoke(None, thread)
    print(done["messages"][-1].content)
sandbox.stop()
