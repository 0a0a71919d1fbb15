"""The workspace and the steps of compare.py: the same on the host and, as an agent, inside a sandbox.

compare_change.py KIND ROUNDS      inside a sandbox; prints one JSON line: milliseconds from each change to the return of its call
"""

import json
import os
import random
import sys
import time

FILES, FILE_BYTES, FOLDERS = 20_000, 10_000, 200
KINDS = {"one file": 1, "1,000 files": 1000}


def content(seed):
    """Half text, half noise, as of sources and build results."""
    rng = random.Random(seed)
    words = [b"%012x" % rng.getrandbits(48) for _ in range(50)]
    text = b" ".join(words[rng.getrandbits(5)] for _ in range(FILE_BYTES // 26))
    return text + rng.getrandbits(8 * (FILE_BYTES - len(text))).to_bytes(FILE_BYTES - len(text), "big")


def make(folder):
    for number in range(FOLDERS):
        os.mkdir(os.path.join(folder, f"d{number}"))
    for number in range(FILES):
        with open(os.path.join(folder, f"d{number % FOLDERS}", f"f{number}"), "wb") as file:
            file.write(content(number))


def change(folder, kind, number):
    """Give new content to as many files as the kind says."""
    for index in range(KINDS[kind]):
        which = (number * 7919 + index) % FILES
        with open(os.path.join(folder, f"d{which % FOLDERS}", f"f{which}"), "wb") as file:
            file.write(content(f"{kind} {number} {index}"))


def main(kind, rounds):
    from snapshotd.agent import tool

    ended = 0.0

    @tool
    def step(number):
        nonlocal ended
        change(".", kind, number)
        ended = time.perf_counter()

    waited = []
    for number in range(rounds):
        step(number)
        waited.append((time.perf_counter() - ended) * 1e3)
        time.sleep(0.3)  # an agent thinks between calls
    print(json.dumps(waited))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
