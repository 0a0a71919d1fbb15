"""Runs inside a sandbox: makes tool calls that the page shows.

page_agent.py CALLS PAUSE_S      so many calls, each tenth of which changes a file; prints one JSON line: `client_ms`, the
                                 agent's own wait at the end of each call
"""

import json
import sys
import time

from snapshotd.agent import message, tool

ended = 0.0


@tool
def look(number):
    global ended
    ended = time.perf_counter()
    return f"line {number}"


@tool
def write(path, number):
    global ended
    with open(path, "w") as file:
        file.write(f"step {number}\n")
    ended = time.perf_counter()


def main(calls, pause_s):
    seen = []
    for number in range(calls):
        if number % 100 == 0:
            message("assistant", f"I go on with number {number}")
        write(f"f{number % 500}", number) if number % 10 == 0 else look(number)
        seen.append((time.perf_counter() - ended) * 1e3)
        time.sleep(pause_s)
    print(json.dumps({"client_ms": seen}))


main(int(sys.argv[1]), float(sys.argv[2]))
