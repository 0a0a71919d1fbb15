"""What a hook in a user's own folder costs: `python benchmarks/hooks.py [--files N]` (as root, with a daemon of its own).

The wait of an agent for the whole hook, its Python included, in a folder of 5,000 files: where nothing changed, and where
one file did. Beside it the start of Python alone, and the processor time of program and daemon: on a busy machine the
wait is mostly that for a processor. Figures of one run on one machine: compare within a run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from snapshotd.api.wire import hook_socket_of
from snapshotd.client import Snapshotd
from snapshotd.client.local.hook_settings import PROGRAM

ROUNDS = 50
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        client = Snapshotd(Path(place) / "state")
        pid = int(client.status()["pid"])
        try:
            measure(Path(place), client.state_dir, pid, given.files, given.rounds)
        finally:
            stop = [sys.executable, "-m", "snapshotd", "--state-dir", str(client.state_dir), "daemon", "--stop"]
            subprocess.run(stop, check=False)


def measure(place: Path, state_dir: Path, pid: int, files: int, rounds: int) -> None:
    folder = place / "project"
    for number in range(files):
        path = folder / f"d{number % 100}" / f"f{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"x = {number}\n" * 50)
    (folder / ".gitignore").write_text("*.log\nbuild/\n")

    def hook(event: str, number: int) -> None:
        call = {"tool_name": "Bash", "tool_input": {"command": "x"}, "tool_use_id": f"t{number}", "tool_response": {}}
        asked = json.dumps({"hook_event_name": event, "session_id": "s", "cwd": str(folder), **call})
        words = [sys.executable, "-I", "-S", str(PROGRAM), str(hook_socket_of(state_dir)), "hook", "claude"]
        subprocess.run(words, input=asked.encode(), cwd=folder, check=True)

    hook("SessionStart", 0)
    time.sleep(2)
    print(f"{files} files, {rounds} rounds, load {os.getloadavg()[0]:.1f} at the start; milliseconds")
    row("python alone", pid, rounds, lambda number: subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True))
    row("nothing changed", pid, rounds, lambda number: hook("PreToolUse", number))

    def changed(number: int) -> None:
        hook("PostToolUse", number)

    def change(number: int) -> None:
        with (folder / f"d{number % 100}" / f"f{number}.py").open("a") as file:
            file.write("changed\n")

    row("one file changed", pid, rounds, changed, before=change)


def row(
    name: str,
    pid: int,
    rounds: int,
    act: Callable[[int], object],
    before: Callable[[int], object] = lambda number: None,
) -> None:
    waited = []
    daemon, program = daemon_s(pid), children_s()
    for number in range(rounds):
        before(number)
        began = time.perf_counter()
        act(number)
        waited.append((time.perf_counter() - began) * 1e3)
    cpu = [(now - then) * 1e3 / rounds for now, then in ((children_s(), program), (daemon_s(pid), daemon))]
    waited.sort()
    shown = f"p50 {statistics.median(waited):6.1f}  least {waited[0]:6.1f}  p95 {waited[int(len(waited) * 0.95)]:6.1f}"
    print(f"{name:18} {shown}  processor: program {cpu[0]:5.1f}, daemon {cpu[1]:5.1f}")


def children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def daemon_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


if __name__ == "__main__":
    main()
