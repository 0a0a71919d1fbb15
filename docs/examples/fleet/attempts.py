"""Make sixteen attempts at a task, on as many machines as there are, and keep the best."""

from snapshotd.client import Branch, Fleet

FLEET = None  # this machine

PROGRAM = """\
import os

def root(n):
    x = n + 1
    for _ in range(int(os.environ["STEPS"])):
        x = (x + n // x) // 2
    return x

print(sum(root(n * n) == n for n in range(1, 41)))
"""


def attempt(branch: Branch) -> int:
    """Stands for an agent at work: how many of forty cases its program gets right."""
    branch.files.write("program.py", PROGRAM)
    return int(branch.exec("python3 program.py", check=True).stdout)


with Fleet.open(FLEET) as fleet:
    task = fleet.create()
    task.files.write("task.txt", "write root(n), the integer square root of n\n")
    attempts = {f"steps-{steps}": {"env": {"STEPS": str(steps)}} for steps in range(16)}
    branches = fleet.fork(task, variants=attempts, per_node=8)
    scores = fleet.map(attempt, branches)
    print(scores)
    best = branches[scores.index(max(scores))]
    print(best.exec("cat task.txt; echo $STEPS", check=True).stdout, end="")
    print(len({branch.node for branch in branches}), "node(s)")
