"""Runs inside a sandbox: makes one kind of change per tool call and measures what the agent itself sees of the
snapshot.

    pause_agent.py SCENARIO ROUNDS

Prints one JSON line: `client_ms`, the time from the end of the tool's own work to the return of the call, once per
round.
"""

import json
import os
import sys
import time

from snapshotd.agent import tool

FILES = {"none": 0, "1-file": 1, "200-files": 200, "5000-files": 5000}
BIG_BYTES = 1 << 30
work_done = 0.0


@tool
def prepare() -> None:
    """The big file exists, and is in a sealed layer, before the first measured write into it."""
    with open("big", "wb") as f:
        block = os.urandom(1 << 20)
        for _ in range(BIG_BYTES // len(block)):
            f.write(block)


@tool
def change(scenario: str, number: int) -> None:
    global work_done
    if scenario == "4k-in-1g":
        with open("big", "r+b", buffering=0) as f:
            f.seek((number * 7919 * 4096) % BIG_BYTES)
            f.write(os.urandom(4096))
    for index in range(FILES.get(scenario, 0)):
        with open(f"d{number % 5}/f{index}", "w") as f:
            f.write(f"{number} {index}\n")
    work_done = time.perf_counter()


def main(scenario: str, rounds: int) -> None:
    for name in range(5):
        os.makedirs(f"d{name}", exist_ok=True)
    if scenario == "4k-in-1g":
        prepare()
    seen = []
    for number in range(rounds):
        change(scenario, number)
        seen.append((time.perf_counter() - work_done) * 1e3)
        time.sleep(0.05)  # an agent thinks between calls; the daemon counts and flushes meanwhile
    print(json.dumps({"client_ms": seen}))


main(sys.argv[1], int(sys.argv[2]))
