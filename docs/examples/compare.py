"""The demo's arithmetic, on what `snapshotd ... --json` prints. `snapshotd` must be on PATH and its daemon reachable.

    compare.py check TRAJECTORY CALLS            every one of the agent's CALLS tool calls has its snapshot
    compare.py fork-point TRAJECTORY TOOL        the snapshot right before the first call of TOOL
    compare.py table SNAPSHOT TRAJECTORY...      what each fork of SNAPSHOT made of it; exit code 1 unless their tests differ

`table` does not believe the agents: it runs the test suite itself, in a throw-away fork of each trajectory's last
snapshot.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import datetime
from typing import Any

AGENT_TOOLS = {"run_tests", "read_file", "edit_file"}
TESTS = ["env", "PYTHONDONTWRITEBYTECODE=1", "python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no"]


def ask(*arguments: str) -> Any:
    """What one snapshotd command prints as JSON. `exec` ends with the code of its command, which may be anything."""
    return json.loads(
        subprocess.run(["snapshotd", *arguments], stdout=subprocess.PIPE, check=arguments[0] != "exec").stdout
    )


def agent_calls(trajectory: str) -> list[dict[str, Any]]:
    return [entry for entry in ask("log", trajectory, "--json") if entry["tool"]["name"] in AGENT_TOOLS]


def check(trajectory: str, expected: int) -> str:
    calls = agent_calls(trajectory)
    ids = {entry["id"] for entry in calls}
    if len(ids) != expected or len(calls) != expected:
        raise SystemExit(
            f"the agent made {expected} tool calls, but {trajectory} has {len(calls)} of them in {len(ids)} snapshots"
        )
    return f"{expected} tool calls, {len(ids)} snapshots"


def fork_point(trajectory: str, tool: str) -> str:
    for entry in agent_calls(trajectory):
        if entry["tool"]["name"] == tool:
            return str(entry["parent"])
    raise SystemExit(f"the log of {trajectory} has no call of {tool}")


def row(base: str, trajectory: str) -> list[str]:
    """One line of the table: tests passed and failed, files of the workspace that differ from `base`, seconds,
    snapshots."""
    log = ask("log", trajectory, "--json")
    head = log[-1]["id"]
    tested = ask("exec", "--json", "--snapshot", head, "--", *TESTS)
    summary = tested["stdout"].rstrip().rpartition("\n")[2]
    counts = {word: number for number, word in re.findall(r"(\d+) (passed|failed|error)", summary)}
    if "passed" not in counts:
        raise SystemExit(f"the tests of {trajectory} did not run: {summary or tested['stderr']}")
    changes = [item for item in ask("diff", base, head, "--json") if item["path"].startswith("/workspace/")]
    seconds = (when(log[-1]["created_at"]) - when(log[0]["created_at"])).total_seconds() + log[0]["tool"][
        "duration_ms"
    ] / 1000
    return [
        trajectory[:12],
        counts["passed"],
        counts.get("failed", "0"),
        str(len(changes)),
        f"{seconds:.1f} s",
        str(len(log)),
    ]


def when(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def table(base: str, trajectories: list[str]) -> None:
    rows = [
        ["trajectory", "passed", "failed", "files changed", "time", "snapshots"],
        *(row(base, item) for item in trajectories),
    ]
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(rows[0]))]
    for cells in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    if len({tuple(cells[1:3]) for cells in rows[1:]}) < 2:
        raise SystemExit("the forks ended with the same test results; they were meant to differ")


def main(command: str, *arguments: str) -> None:
    if command == "check":
        print(check(arguments[0], int(arguments[1])))
    elif command == "fork-point":
        print(fork_point(arguments[0], arguments[1]))
    elif command == "table":
        table(arguments[0], list(arguments[1:]))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:] or ["help"])
