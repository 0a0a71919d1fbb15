"""The store outlives the run: each run finds what the one before it left."""

from snapshotd.agent import store, tool


@tool
def count():
    last = store.entry("runs", namespace="team/counter")
    return store.put(
        "runs", (last.value if last else 0) + 1, namespace="team/counter", expected_version=last.version if last else 0
    )


print("run number", count())
