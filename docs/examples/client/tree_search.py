"""Search a tree of actions in one sandbox: each action is a snapshot, and a dead end is left by a rewind."""

from snapshotd.client import Sandbox, Snapshot

GOAL, DEPTH = "19", 4
ACTIONS = ["echo $(($(cat n) * 2)) > n", "echo $(($(cat n) + 5)) > n"]


def search(here: Snapshot, depth: int) -> list[str] | None:
    """The actions that lead from a snapshot to the goal."""
    for action in ACTIONS:
        result = sandbox.exec(action + "; cat n", check=True)
        number = result.stdout.strip()
        if number == GOAL:
            return [action]
        if depth > 1 and int(number) < int(GOAL):
            rest = search(sandbox.head(), depth - 1)
            if rest is not None:
                return [action, *rest]
        sandbox.rewind(here)
    return None


with Sandbox.create() as sandbox:
    sandbox.files.write("n", "1\n")
    for action in search(sandbox.head(), DEPTH) or ["there is no way"]:
        print(action)
    print(sandbox.files.read_text("n").strip(), "is there")
    tools = [snapshot.info.tool.name for snapshot in sandbox.snapshots()]
    print(tools.count("exec"), "actions,", tools.count("rewind"), "rewinds")
sandbox.remove()
