"""An irreversible call: what it does to the world outside (here: the store) happens at most once."""

import os
import signal
import sys

from snapshotd.agent import current_call, store, tool


def cancel(call):
    print("cancelled the", call["arguments"]["item"])


@tool(side_effect="irreversible", compensate=cancel)
def order(item, fragile=False):
    count = store.put("ordered", {"item": item, "key": current_call().key}, namespace="shop/" + item)
    if fragile and count == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # after it was ordered, and before anybody knew
    return f"receipt {count}"


@tool
def note(text):
    with open("notes", "a") as file:
        file.write(text + "\n")


if __name__ == "__main__":
    note("shopping")
    item = sys.argv[1]
    receipt = order(item, fragile="fragile" in sys.argv)
    note(f"{item}: {receipt}")
    print(item + ":", receipt)
