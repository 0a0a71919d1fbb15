"""A graph that remembers: run it again, and it goes on."""

from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph

from snapshotd.integrations.langgraph import SnapshotdSaver


def answer(state: MessagesState) -> dict:
    return {"messages": [AIMessage(f"this is message {len(state['messages']) + 1}")]}


builder = StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer")
with SnapshotdSaver("agent.db") as saver:
    graph = builder.compile(checkpointer=saver)
    done = graph.invoke({"messages": ["hello"]}, {"configurable": {"thread_id": "ann"}})
    print(done["messages"][-1].content)
