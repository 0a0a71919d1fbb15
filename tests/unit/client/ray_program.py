"""Run by an interpreter that has Ray: a cluster on this machine, whose machines are those of the sockets that are named, and a
driver in it. `ray_program.py run COMMAND... -- SOCKET...`, or `ray_program.py check SOCKET...`; prints JSON at its end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ray.cluster_utils import Cluster

from snapshotd.client import Branch, Fleet
from snapshotd.errors import DaemonUnavailable

MEMORY = 1 << 20


@contextlib.contextmanager
def cluster_of(sockets: Sequence[str]) -> Iterator[tuple[Cluster, list[Any]]]:
    cluster, nodes = Cluster(), []
    try:
        cluster.add_node(num_cpus=1, include_dashboard=False, object_store_memory=80 << 20)  # the head has no daemon
        nodes += [
            cluster.add_node(
                num_cpus=2,
                resources={"snapshotd": 1, f"machine-{number}": 1},
                env_vars={"SNAPSHOTD_SOCKET": path},
                object_store_memory=80 << 20,
            )
            for number, path in enumerate(sockets)
        ]
        yield cluster, nodes
    finally:
        cluster.shutdown()


def where(branch: Branch) -> tuple[bool, str]:
    """Whether it runs on the branch's node, and a file of the branch."""
    import ray

    return ray.get_runtime_context().get_node_id() == branch.node, branch.files.read_text("task")


def fail(branch: Branch) -> None:
    raise KeyError(branch.node)


def die_once(branch: Branch) -> str:
    """Its worker dies behind the command, the first time."""
    branch.exec("echo once >> log", check=True)
    marker = os.path.join(os.environ["MARKERS"], branch.id)
    if not os.path.exists(marker):
        with open(marker, "x"):
            pass
        os._exit(3)
    return branch.files.read_text("log")


def wait_until_gone(fleet: Fleet, node: str) -> None:
    """Ray takes a moment to see that a machine is gone; a function that is sent there meanwhile may have begun."""
    import ray

    deadline = time.monotonic() + 60
    while any(one["Alive"] for one in ray.nodes() if one["NodeID"] == node):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with contextlib.suppress(DaemonUnavailable):
        while time.monotonic() < deadline:
            fleet.client(node).version()


def grouped(fleet: Fleet, task: Branch, nodes: Sequence[str]) -> dict[str, Any]:
    """Forks in a placement group that has all processors of a machine, so that no function runs there but within it."""
    import ray
    from ray.util import placement_group, remove_placement_group

    other = next(node for node in nodes if node != task.node)
    has = next(one["Resources"] for one in ray.nodes() if one["NodeID"] == other)
    machine = next(name for name in has if name.startswith("machine-"))
    group = placement_group([{"CPU": 2, machine: 1}])
    try:
        branches = fleet.fork(task, 4, memory=MEMORY, placement_group=group)
        return {
            "grouped_on": sorted({branch.node == other for branch in branches}),
            "grouped": fleet.map(where, branches),
        }
    finally:
        remove_placement_group(group)


def check(sockets: Sequence[str]) -> dict[str, Any]:
    with cluster_of(sockets) as (cluster, nodes):
        os.environ["RAY_ADDRESS"] = cluster.address
        with Fleet.open("ray") as fleet:
            rooms = [room.node for room in fleet.nodes()]
            task = fleet.create()
            task.files.write("task", "a task\n")
            branches = fleet.fork(task, 16, memory=MEMORY, per_node=8)
            found = {"nodes": len(rooms), "at_home": sum(branch.node == task.node for branch in branches)}
            found["where"] = fleet.map(where, branches)
            found["failed"] = [type(each).__name__ for each in fleet.map(fail, branches[:2])]
            found["worker"] = [str(each) for each in fleet.map(die_once, branches[:2], token="t")]
            found["worker_without_token"] = [type(each).__name__ for each in fleet.map(die_once, branches[2:3])]
            found |= grouped(fleet, task, rooms)
            fresh = fleet.fork(task, 16, memory=MEMORY, per_node=8)
            away = next(branch.node for branch in fresh if branch.node != task.node)
            cluster.remove_node(next(node for node in nodes if node.node_id == away), allow_graceful=False)
            wait_until_gone(fleet, away)
            found["moved"] = fleet.map(where, fresh[8:])
            found["moved_to_home"] = all(branch.node == task.node for branch in fresh)
            return found


def run(command: Sequence[str], sockets: Sequence[str]) -> dict[str, Any]:
    with cluster_of(sockets) as (cluster, _):
        done = subprocess.run(
            command, env={**os.environ, "RAY_ADDRESS": cluster.address}, capture_output=True, text=True, timeout=200
        )
        return {"out": done.stdout, "err": done.stderr[-4000:], "code": done.returncode}


if __name__ == "__main__":
    verb, *words = sys.argv[1:]
    if verb == "check":
        told = check(words)
    else:
        at = words.index("--")
        told = run([sys.executable, *words[:at]], words[at + 1 :])
    sys.stdout.write(json.dumps(told, default=repr) + "\n")
