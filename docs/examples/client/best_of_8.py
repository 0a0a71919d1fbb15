"""Make eight attempts in eight forks of one sandbox, and go on with the best."""

from concurrent.futures import ThreadPoolExecutor

from snapshotd.client import Sandbox

PROGRAM = """\
def root(n):
    x = n + 1
    for _ in range({steps}):
        x = (x + n // x) // 2
    return x
"""
CHECK = "from program import root; print(sum(root(n * n) == n for n in range(1, 41)))"


def attempt(fork: Sandbox, steps: int) -> int:
    """Stands for an agent at work: how many of forty cases its program gets right."""
    fork.files.write("program.py", PROGRAM.format(steps=steps))
    return int(fork.exec(["python3", "-c", CHECK], check=True).stdout)


with Sandbox.create() as sandbox:
    sandbox.files.write("task.txt", "write root(n), the integer square root of n\n")
    forks = sandbox.fork(8)
    with ThreadPoolExecutor(8) as pool:
        scores = list(pool.map(attempt, forks, range(8)))
    print(scores)

    best = forks[scores.index(max(scores))]
    for fork in forks:
        if fork is not best:
            fork.remove(force=True)
    done = best.exec("ls; grep range program.py", check=True)
    print(done.stdout, end="")
    print("task.txt alone is in the first one:", [item.name for item in sandbox.files.list()] == ["task.txt"])
    best.remove(force=True)
sandbox.remove()
