"""Long-term memory across threads, found by words."""

from snapshotd.integrations.langgraph import SnapshotdStore

with SnapshotdStore("agent.db") as store:
    store.put(("users", "ann"), "food", {"text": "Ann likes crème brûlée"})
    store.put(("users", "ann"), "work", {"text": "Ann works on the daemon"}, ttl=60)
    store.put(("users", "anna"), "food", {"text": "Anna likes pasta"})
    for item in store.search(("users", "ann"), query="What does she like: creme or tea?"):
        print(item.key, item.value["text"])
