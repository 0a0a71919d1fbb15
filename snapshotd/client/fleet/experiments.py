"""An experiment that nodes share. Each daemon drives the branches that it got, as an experiment of the same name; the stop
rules are for all branches together, so the program that began it looks at them.

The shares follow from the description and the nodes alone, so that the same command finds them again. On its node a branch is
a variant of its own: run 2 of `cold` in the experiment `parser` is the trajectory `parser.cold.2.0`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from snapshotd.at_once import at_once
from snapshotd.client.branching.experiment_file import Experiment
from snapshotd.client.fleet.base import KnownNodes
from snapshotd.client.fleet.making import filled
from snapshotd.errors import SnapshotdError
from snapshotd.fleet.base import NodeID
from snapshotd.fleet.places import NodeRoom
from snapshotd.scores import FINAL, STOPPED, ExperimentBranch, ExperimentInfo, Spending, why_ended

_At = tuple[str, int]


def shares(plan: Experiment, rooms: Sequence[NodeRoom]) -> dict[NodeID, Experiment]:
    """The part of each node that gets any: so many branches, and so many at once, as it has processors. By name of the node."""
    order = [(label, run) for run in range(plan.repeat) for label in plan.variants]
    rooms = sorted(rooms, key=lambda room: room.node)
    bounds = _bounds(len(order), [room.cpus for room in rooms])
    parallel = None if plan.parallel is None else _bounds(plan.parallel, [room.cpus for room in rooms])
    found = {}
    for number, room in enumerate(rooms):
        first, end = bounds[number : number + 2]
        variants = {
            f"{label}.{run}": filled(first + index, label, plan.variants[label], plan.program)
            for index, (label, run) in enumerate(order[first:end])
        }
        if variants:
            most = None if parallel is None else max(1, parallel[number + 1] - parallel[number])
            found[room.node] = replace(plan, program=None, variants=variants, repeat=1, parallel=most)
    return found


def _bounds(count: int, weights: Sequence[float]) -> list[int]:
    """The places between the parts of `count` things that are in proportion to weights."""
    total, so_far, bounds = sum(weights), 0.0, [0]
    for weight in weights:
        so_far += weight
        bounds.append(round(count * so_far / total))
    return bounds


class SharedExperiment:
    """One experiment, from its beginning to its end."""

    def __init__(
        self,
        nodes: KnownNodes,
        plan: Experiment,
        rooms: Sequence[NodeRoom],
        on_change: Callable[[ExperimentInfo], object],
    ) -> None:
        self._nodes, self._plan, self._on_change = nodes, plan, on_change
        self._shares = shares(plan, rooms)
        self._changing = threading.Lock()
        self._seen: dict[NodeID, ExperimentInfo] = {}
        self._ended: str | None = None
        self._began = time.monotonic()

    def run(self) -> ExperimentInfo:
        """Begin it on all nodes, and wait until it has ended. A node that goes away fails its branches; errors of the
        description are raised."""
        nodes = list(self._shares)
        for node in nodes:
            self._saw(node, self._nodes.client(node).create_experiment(self._shares[node]))
        try:
            for _ in at_once(nodes, len(nodes), self._follow, thread="fleet"):
                pass
        except BaseException:
            self._stop(STOPPED)
            raise
        stopped = [info.ended for info in self._seen.values() if (info.ended or "").startswith(STOPPED)]
        return replace(self.info(), ended=self._ended or (stopped or ["all branches have ended"])[0])

    def info(self) -> ExperimentInfo:
        """All branches, in the order in which they begin."""
        first = next(iter(self._seen.values()))
        found = {at: one for node, info in self._seen.items() for at, one in _name_in_whole(info).items()}
        order = [(label, run) for run in range(self._plan.repeat) for label in self._plan.variants]
        branches = tuple(found.get(at, ExperimentBranch(*at)) for at in order)
        return replace(first, ended=self._ended, branches=branches)

    def places(self) -> Mapping[_At, NodeID]:
        """The node of each branch."""
        return {at: node for node, info in self._seen.items() for at in _name_in_whole(info)}

    def _follow(self, node: NodeID) -> None:
        try:
            self._saw(
                node,
                self._nodes.client(node).follow_experiment(
                    self._plan.name, on_change=lambda info: self._saw(node, info)
                ),
            )
        except SnapshotdError as exc:
            lost = tuple(
                one if one.state in FINAL else replace(one, state="failed", error=f"node {node}: {exc.message}")
                for one in self._seen[node].branches
            )
            self._saw(node, replace(self._seen[node], branches=lost))

    def _saw(self, node: NodeID, info: ExperimentInfo) -> None:
        with self._changing:
            self._seen[node] = info
            if len(self._seen) < len(self._shares):
                return
            now = self.info()
            why = None if self._ended else self._why_ended(now)
            self._on_change(now)
        if why is not None:
            self._stop(why)

    def _why_ended(self, info: ExperimentInfo) -> str | None:
        plan = self._plan
        seconds = time.monotonic() - self._began
        stop = Spending(**plan.stop)  # type: ignore[arg-type]
        return why_ended(info.branches, seconds, first_pass=plan.first_pass, best_of=plan.best_of, stop=stop)

    def _stop(self, why: str) -> None:
        with self._changing:
            self._ended = self._ended or why
        for node in self._shares:
            try:
                self._nodes.client(node).stop_experiment(self._plan.name)
            except SnapshotdError:
                continue  # it has gone, or has none


def _name_in_whole(info: ExperimentInfo) -> dict[_At, ExperimentBranch]:
    """A node's branches as they are called in the whole."""
    found = {}
    for one in info.branches:
        label, _, run = one.label.rpartition(".")
        found[label, int(run)] = replace(one, label=label, run=int(run))
    return found
