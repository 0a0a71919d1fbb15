"""`Fleet`: sandboxes are forked over many nodes, and a function is run on each."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from snapshotd.api.trajectories import SandboxOptions
from snapshotd.api.wire import FORK_MAX
from snapshotd.at_once import PER_PROCESSOR, at_once
from snapshotd.client.client import Snapshotd
from snapshotd.client.exchange import new_key, use_keys
from snapshotd.client.fleet.addressed import AskedNodes
from snapshotd.client.fleet.base import KnownNodes
from snapshotd.client.fleet.branch import Branch, place_of
from snapshotd.client.fleet.experiments import SharedExperiment
from snapshotd.client.fleet.lease import LEASE_S, DriverLease
from snapshotd.client.fleet.listed import ListedNodes
from snapshotd.client.fleet.making import Making, number_forks
from snapshotd.client.fleet.placing import ForkPlaces
from snapshotd.client.local.arguments import check_count, check_seconds
from snapshotd.client.local.sizes import size_given
from snapshotd.client.results import SnapshotInfo
from snapshotd.client.sandbox import Sandbox, Snapshot
from snapshotd.errors import DaemonUnavailable, NotFound, SnapshotdError, Unsupported, UsageError
from snapshotd.fleet.base import NodeID
from snapshotd.fleet.places import ForkNeed, NodeRoom

if TYPE_CHECKING:
    from snapshotd.client.branching.experiment_file import Experiment
    from snapshotd.scores import ExperimentInfo

R = TypeVar("R")
MEMORY = "256m"
"""Memory that a branch is expected to use, unless the caller says."""


class Fleet:
    """The nodes, and the branches that this program (the driver) has made there. Used as a context manager, or closed.

    Its branches end with it: `close` stops them, with a last snapshot each, and so do their nodes a minute after a driver
    that was killed. Nothing is removed. `detached` branches live on.
    """

    def __init__(self, nodes: KnownNodes, *, lease_s: float = LEASE_S) -> None:
        """`open` is how one is made. `lease_s`: how long after the end of a driver its branches are stopped."""
        check_seconds("lease_s", lease_s)
        self._nodes, self._lease = nodes, DriverLease(nodes, lease_s)
        self._placed: dict[str, ForkPlaces] = {}
        """By the snapshot, for a branch that has to go elsewhere."""

    @classmethod
    def open(
        cls,
        where: str | Sequence[str] | None = None,
        *,
        token: str | None = None,
        pin: str | None = None,
        ca: str | None = None,
        lease_s: float = LEASE_S,
    ) -> Self:
        """The fleet at a place:

        - None: this machine's daemon, as `Snapshotd()` finds it.
        - "https://HOST:PORT" (also ssh:// and unix://): this node, and all others of its fleet, by the addresses that they have
          told it.
        - a list of such addresses: these nodes and no others.
        - "postgresql://...": the nodes in the database of a fleet, for operators. It needs `pip install 'snapshotd[fleet]'`.
        - "ray", or "ray://HOST:PORT": the nodes of a Ray cluster, and functions run as Ray tasks beside them. It needs
          `pip install 'snapshotd[ray]'` here and on the nodes.

        Each node is known by its login (`snapshotd login`). `token`, `pin` and `ca` take the login's place for the addresses that are
        named here, and for no other: what a fleet says of its nodes may be false.

        UsageError: it is none of these; and errors of the database, or of Ray."""
        return cls(_nodes_at(where, token, pin, ca), lease_s=lease_s)

    def nodes(self) -> list[NodeRoom]:
        """The nodes that answer, with their room."""
        return self._nodes.rooms()

    def client(self, node: str) -> Snapshotd:
        """A client of a node's daemon. NotFound, NotPermitted."""
        return self._nodes.client(NodeID(node))

    def create(self, *, detached: bool = False, **options: Unpack[SandboxOptions]) -> Branch:
        """A new sandbox on the node with most free memory, as `Sandbox.create`."""
        rooms = self._nodes.rooms() if len(self._nodes.names()) > 1 else []
        fit = [room for room in rooms if room.lease_ns > 0 and not room.draining]
        node = max(fit, key=lambda room: room.free_bytes).node if fit else self._nodes.names()[0]
        client = self._nodes.client(node)
        info, _ = client.create(idle_timeout=0 if detached else self._lease.lease_s, **options)
        return self._hold([Branch(client, info, node)], detached=detached)[0]

    def fork(
        self,
        source: Snapshot | Sandbox | str,
        n: int = 1,
        *,
        variants: Mapping[str, Mapping[str, Any]] | None = None,
        args: Sequence[str] | None = None,
        name: str | None = None,
        resume: bool = False,
        memory: int | str = MEMORY,
        cpus: float = 1.0,
        per_node: int | None = None,
        token: str | None = None,
        detached: bool = False,
        placement_group: Any = None,
    ) -> list[Branch]:
        """`n` running sandboxes that start from a snapshot (of a sandbox: from its newest one), in their order. `variants`,
        `args`, `name` and `resume` as in `Snapshotd.fork`; `{index}` is the number among all of them.

        The snapshot's home node is filled first, then others in blocks. `memory` and `cpus` are what one branch is expected
        to use, and `per_node` is the most that one node gets. A node of a list that lacks the snapshot gets it from its
        home as a bundle, for which its token needs the scope admin; a node of a database gets it by itself.

        With a `token`, forks are made once: the same call within a day, by another driver too, returns the same branches.

        With a `placement_group` of Ray (`ray.util.placement_group`), its machines alone get forks, and functions run as tasks
        within it, on what it has reserved.

        All or none where one node takes them; else those that were made are stopped after an error. NotFound; LimitExceeded:
        there is no room; DaemonUnavailable: no node that could be asked answers."""
        labels = number_forks(n, variants, args, name)
        count = n if labels is None else len(labels)
        check_count("n", count, 1, FORK_MAX * 256)
        info, home = self._find(source)
        need = ForkNeed(size_given("memory", memory) or 0, cpus, base=info.id)
        placement = ForkPlaces(self._nodes, info, home, need, per_node, placement_group)
        blocks = placement.place(count) if token is None else placement.place_once(count, token)
        self._placed[info.id] = placement
        idle_s = None if detached else self._lease.lease_s
        with Making(self._nodes, placement, labels, idle_s, resume=resume, token=token or new_key()) as making:
            try:
                made = making.make(blocks)
            except BaseException:
                self._stop(making.made)
                raise
        self._nodes.bind(made, placement_group)
        return self._hold(made, detached=detached)

    def map(
        self,
        function: Callable[[Branch], R],
        branches: Sequence[Branch],
        *,
        parallel: int | None = None,
        token: str | None = None,
    ) -> list[R | Exception]:
        """The results of a function of each branch, in their order, `parallel` at once (None: eight for each processor of
        the nodes). An error stands in the place of its result.

        The function runs in a thread of this process, or as a Ray task beside the branch's node. Where a node has gone
        before the function began, and nothing was done in the branch yet, a new fork on another node takes the branch's
        place, once; the object in `branches` is that one from then on.

        With a `token`, what the function asks of its branch is asked under keys that follow from it: a second map with
        the same token gets the answers of the first one, and runs no command again that has ended."""
        most = parallel or max(1, int(PER_PROCESSOR * sum(room.cpus for room in self._nodes.rooms())))

        def work(index: int) -> tuple[R | Exception]:
            branch = branches[index]
            try:
                self._check_begun(branch)
                own = None if token is None else f"{token} {index}"
                with contextlib.nullcontext() if own is None else use_keys(own):
                    return (self._nodes.run(function, branch, own),)
            except Exception as exc:  # noqa: BLE001 - the caller's function may raise anything, and its error is a value
                return (exc,)

        results = dict(at_once(range(len(branches)), most, work, thread="fleet"))
        return [results[index][0] for index in range(len(branches))]

    def run_experiment(
        self, experiment: str | Path | Experiment, *, on_change: Callable[[ExperimentInfo], object] = lambda _: None
    ) -> ExperimentInfo:
        """As `Snapshotd.run_experiment`, with the branches shared among the nodes by their processors. Each node drives its
        own, and this program has the stop rules hold for all. The same call goes on with one that was stopped, if the
        same nodes answer. KeyboardInterrupt: all are stopped."""
        from snapshotd.client.branching.experiment_file import Experiment, read_experiment

        plan = experiment if isinstance(experiment, Experiment) else read_experiment(experiment)
        rooms = [room for room in self._nodes.rooms() if room.lease_ns > 0 and not room.draining]
        if len(rooms) == 1:
            return self._nodes.client(rooms[0].node).run_experiment(plan, on_change=on_change)
        if isinstance(plan.source, str):
            info, home = self._find(self._find_origin(plan.name) or plan.source)
            plan = dataclasses.replace(plan, source=info.id)
            placement = ForkPlaces(self._nodes, info, home, ForkNeed(0), None)
            if not self._nodes.is_published(info):
                self._nodes.publish(info, home)
            with Making(self._nodes, placement, None, None, token=new_key()) as making:
                for room in rooms:
                    making.bring(room.node)
        return SharedExperiment(self._nodes, plan, rooms, on_change).run()

    def forget(self, branches: Sequence[Branch]) -> None:
        """Hold these branches no more. A lease later their nodes stop the ones that still run."""
        self._lease.remove(branches)

    def close(self) -> None:
        """Stop the branches that are not detached; nodes that do not answer stop theirs by themselves. Idempotent."""
        self._lease.close()
        self._stop(self._lease.branches())
        self._nodes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _hold(self, made: list[Branch], *, detached: bool) -> list[Branch]:
        if not detached:
            self._lease.add(made)
        return made

    def _find(self, source: Snapshot | Sandbox | str) -> tuple[SnapshotInfo, NodeID]:
        """The snapshot, and its home node."""
        if isinstance(source, str):
            info, answered = self._ask_all(source)
            return info, self._nodes.home(info, answered)
        info = source.info if isinstance(source, Snapshot) else source._client.snapshot(source.id)
        if isinstance(source, Branch):
            return info, source.node
        place = place_of(source._client)
        found = next((one for one in self._nodes.names() if place_of(self._nodes.client(one)) == place), None)
        if found is None:
            raise UsageError(
                f"the sandbox or snapshot is at {place}, which is no node of this fleet: name it by its id"
            )
        return info, found

    def _find_origin(self, experiment: str) -> str | None:
        """The snapshot of an experiment that has begun before."""
        for node in self._nodes.names():
            with contextlib.suppress(NotFound, DaemonUnavailable):
                return self._nodes.client(node).experiment(experiment).snapshot
        return None

    def _ask_all(self, ref: str) -> tuple[SnapshotInfo, NodeID]:
        missing: SnapshotdError | None = None
        for node in self._nodes.names():
            try:
                return self._nodes.client(node).snapshot(ref), node
            except NotFound as exc:
                missing = exc
            except DaemonUnavailable as exc:
                missing = missing or exc
        raise missing or NotFound(f"the fleet has no node, so nothing is called {ref}")

    def _check_begun(self, branch: Branch) -> None:
        """Put a branch whose node has gone elsewhere. Raises the reason why it cannot be worked in."""
        try:
            branch._client.trajectory(branch.id)
        except DaemonUnavailable:
            if not branch.is_fresh or branch.began_at not in self._placed or len(self._nodes.names()) == 1:
                raise
            branch.move_to(self._fork_elsewhere(branch))

    def _fork_elsewhere(self, branch: Branch) -> Branch:
        placement = self._placed[branch.began_at]
        with Making(self._nodes, placement, None, self._lease.lease_s, token=new_key()) as making:
            (made,) = making.make(placement.place(1, without=[branch.node]))
        self._nodes.bind([made], placement.group)
        return made

    def _stop(self, branches: Sequence[Branch]) -> None:
        def stop(branch: Branch) -> None:
            with contextlib.suppress(SnapshotdError):  # it was removed, or its node has gone
                branch.stop()

        for _ in at_once(branches, 32, stop, thread="fleet"):
            pass


def _nodes_at(where: str | Sequence[str] | None, token: str | None, pin: str | None, ca: str | None) -> KnownNodes:
    if where is None:
        client = Snapshotd()
        return ListedNodes({NodeID("local"): client})
    if isinstance(where, str) and where.startswith(("postgresql://", "postgres://")):
        from snapshotd.client.fleet.database import DatabaseNodes

        if token or pin or ca:
            raise UsageError(
                "the nodes of a database are known by their logins alone: leave out token, pin and ca, and run `snapshotd login` for each"
            )
        return DatabaseNodes(where)
    if isinstance(where, str) and (where == "ray" or where.startswith("ray://")):
        try:
            from snapshotd.client.fleet.ray import RayNodes
        except ModuleNotFoundError as exc:
            raise Unsupported(f"{exc.name} is not installed: run `pip install 'snapshotd[ray]'`") from exc
        return RayNodes(None if where == "ray" else where)
    if isinstance(where, str):
        first = Snapshotd(host=where, token=token, pin=pin, ca=ca, autostart=False)
        known = first.fleet_nodes()
        return AskedNodes(first) if known else ListedNodes({NodeID(where): first})
    places = list(where)
    if not places:
        raise UsageError("the list of nodes is empty; name at least one address")
    return ListedNodes(
        {NodeID(place): Snapshotd(host=place, token=token, pin=pin, ca=ca, autostart=False) for place in places}
    )
