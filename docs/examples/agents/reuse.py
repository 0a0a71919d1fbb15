"""Slow tools: a second run with --reuse is answered from the first, and does not wait for them again."""

import os
import sys
import time

from snapshotd.agent import tool


@tool
def build(part):
    time.sleep(0.5)
    with open(part, "w") as file:
        file.write(f"{part} built at {time.time_ns()}\n")


@tool(reuse=False)
def publish(part):
    print("publishing", part, os.path.getsize(part), flush=True)


for part in ("parser", "printer", "linker"):
    build(part)
if sys.argv[1:]:
    publish(*sys.argv[1:])
