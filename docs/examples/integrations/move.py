"""All threads into LangGraph's own saver; the other way round is the way in."""

from langgraph.checkpoint.sqlite import SqliteSaver

from snapshotd.integrations.langgraph import SnapshotdSaver, copy_threads

with SnapshotdSaver("agent.db") as ours, SqliteSaver.from_conn_string("plain.db") as theirs:
    print(copy_threads(ours, theirs), "checkpoints")
