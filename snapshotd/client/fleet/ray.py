"""The nodes of a Ray cluster. Functions run as Ray tasks on the node of their branch, and everything else goes through one
actor per node, so neither tokens nor addresses are needed.

A node is a machine of the cluster that has the custom resource `snapshotd` (`ray start --resources '{"snapshotd": 1}'`), or
any machine where none has it. Its daemon is the one that `Snapshotd()` finds there. An actor for each sandbox would cost a
second of processor time each; the one actor of a node is named, detached, and serves all drivers.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable
from itertools import count
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from snapshotd.client.client import Snapshotd
from snapshotd.client.exchange import READ_BYTES, DaemonAway, use_keys
from snapshotd.client.fleet.branch import Branch
from snapshotd.client.fleet.listed import ListedNodes
from snapshotd.client.links import ByteLink, Links
from snapshotd.client.transport import Transport
from snapshotd.errors import DaemonUnavailable, LimitExceeded, SnapshotdError, UsageError
from snapshotd.fleet.base import NodeID

R = TypeVar("R")
NAMESPACE = "snapshotd"
RESOURCE = "snapshotd"
_CALLS_AT_ONCE = 1000
_TASK_RETRIES = 3
"""Retries of a task whose worker died, where all that it asks for is made once."""
_START_S = 60


class NodeConnections:
    """Connections to the daemon of this machine. The actor of a node is one of these: its methods never wait in a thread."""

    def __init__(self) -> None:
        self._links: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._numbers = count()

    async def socket_path(self) -> str:
        """Start the daemon here, if none runs, and say where it listens. Errors: those of `Snapshotd.version`."""

        def find() -> str:
            client = Snapshotd()
            client.version()
            return str(client.socket_path)

        return await asyncio.to_thread(find)

    async def open(self) -> int:
        """A new connection's number. OSError."""
        link = await asyncio.open_unix_connection(str(Snapshotd().socket_path))
        number = next(self._numbers)
        self._links[number] = link
        return number

    async def send(self, number: int, data: bytes) -> None:
        """OSError; so are errors of a connection that is closed."""
        _, writer = self._find(number)
        writer.write(data)
        await writer.drain()

    async def receive(self, number: int) -> bytes:
        """The next bytes; nothing at the end."""
        reader, _ = self._find(number)
        return await reader.read(READ_BYTES)

    async def close(self, number: int) -> None:
        """Idempotent."""
        link = self._links.pop(number, None)
        if link is not None:
            link[1].close()

    def _find(self, number: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return self._links[number]
        except KeyError:
            raise ConnectionResetError("the connection is closed") from None


class ActorLink:
    """A connection through the actor of a node."""

    def __init__(self, actor: Any) -> None:
        self._actor, self._sending = actor, threading.Lock()
        self.deadline: float | None = None
        self._number = self._ask(actor.open)

    async def send(self, data: bytes) -> None:
        with self._sending:
            self._ask(self._actor.send, self._number, data)

    async def receive(self) -> bytes:
        data: bytes = self._ask(self._actor.receive, self._number)
        return data

    def break_off(self) -> None:
        with contextlib.suppress(RayError):
            self._actor.close.remote(self._number)

    def close(self) -> None:
        self.break_off()

    async def finish(self) -> None:
        with self._sending:
            self.break_off()

    def _ask(self, method: Any, *args: Any) -> Any:
        """A method's result. OSError: the node has gone; TimeoutError at the deadline."""
        timeout = None if self.deadline is None else max(self.deadline - time.monotonic(), 1e-3)
        try:
            return ray.get(method.remote(*args), timeout=timeout)
        except GetTimeoutError:
            raise TimeoutError from None
        except RayTaskError as exc:
            raise exc.cause if isinstance(exc.cause, OSError) else exc from None
        except RayError as exc:
            raise ConnectionResetError(f"the actor of the node has gone: {type(exc).__name__}") from exc


class ActorWay:
    """The way to the daemon of a node of a Ray cluster."""

    is_here = False

    def __init__(self, node: str) -> None:
        """`node`: Ray's id of it."""
        self.node, self.place = node, f"ray:{node}"

    async def connect(self, links: Links) -> ByteLink:
        try:
            return ActorLink(actor_of(self.node))
        except (RayActorError, ValueError) as exc:
            raise ConnectionRefusedError(str(exc).splitlines()[0]) from exc

    def sign(self, head: bytes) -> bytes:
        return head

    def connect_error(self, exc: OSError) -> SnapshotdError:
        return DaemonAway(f"no daemon answers on node {self.node[:12]} of the Ray cluster ({exc}); start it there")


def actor_of(node: str) -> Any:
    """The actor of a node, which is made where there is none."""
    options: dict[str, Any] = {
        "name": f"node-{node}",
        "namespace": NAMESPACE,
        "get_if_exists": True,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_concurrency": _CALLS_AT_ONCE,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    return ray.remote(NodeConnections).options(**options).remote()


def client_through(place: str) -> Snapshotd:
    """A client of the daemon at `ray:NODE`; in a task on that node, over its socket."""
    node = place.removeprefix("ray:")
    if ray.is_initialized() and ray.get_runtime_context().get_node_id() == node:
        return Snapshotd()
    return _client_through_actor(node)


class RayNodes(ListedNodes):
    """See the module's text."""

    def __init__(self, address: str | None = None, *, task_cpus: float = 0.1) -> None:
        """`address`: as `ray.init` takes it; None: the cluster that this program has joined, or `ray.init` finds or starts.
        `task_cpus`: processors that Ray promises to one function."""
        self._joined = not ray.is_initialized()
        if self._joined:
            ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
        self._task_cpus = task_cpus
        self._groups: dict[str, Any] = {}
        """Branch to its placement group."""
        alive = [node for node in ray.nodes() if node["Alive"]]
        chosen = [node for node in alive if node["Resources"].get(RESOURCE)] or alive
        names = sorted(node["NodeID"] for node in chosen)
        ray.get([actor_of(name).socket_path.remote() for name in names], timeout=_START_S)
        super().__init__({NodeID(name): _client_through_actor(name) for name in names})

    def within(self, group: Any) -> Collection[NodeID]:
        if not group.wait(_START_S):
            raise LimitExceeded(
                "the placement group is not placed yet: wait until the cluster has room for it, or ask for less"
            )
        found = set(self.names()).intersection(_bundles(group).values())
        if not found:
            raise UsageError("no machine of the placement group is a node: give its bundles the resource `snapshotd`")
        return found

    def bind(self, branches: Iterable[Branch], group: Any) -> None:
        self._groups.update((branch.id, group) for branch in branches if group is not None)

    def _place(self, branch: Branch) -> Any:
        """The machine of a branch; within a placement group, one of its bundles there."""
        group = self._groups.get(branch.id)
        if group is None:
            return NodeAffinitySchedulingStrategy(branch.node, soft=False)
        there = [index for index, node in _bundles(group).items() if node == branch.node]
        return PlacementGroupSchedulingStrategy(group, there[int(branch.id, 16) % len(there)])

    def run(self, function: Callable[[Branch], R], branch: Branch, token: str | None) -> R:
        task = ray.remote(_work).options(
            num_cpus=self._task_cpus,
            max_retries=0 if token is None else _TASK_RETRIES,
            scheduling_strategy=self._place(branch),
        )
        try:
            result: R = ray.get(task.remote(function, branch, token))
            return result
        except RayTaskError as exc:
            raise exc.cause from None
        except RayError as exc:
            raise DaemonUnavailable(
                f"the function's Ray task on node {branch.node[:12]} went away ({type(exc).__name__}), and it may have been at "
                "work: look at the branch, or give `map` a token"
            ) from exc

    def close(self) -> None:
        if self._joined:
            ray.shutdown()


def _bundles(group: Any) -> dict[int, str]:
    """Number of a bundle to its machine."""
    found: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return found


def _client_through_actor(node: str) -> Snapshotd:
    return Snapshotd._over(Transport(ActorWay(node)))


def _work(function: Callable[[Branch], R], branch: Branch, token: str | None) -> R:
    """The task. Ray runs it again, under the same token, where its worker has died."""
    with contextlib.nullcontext() if token is None else use_keys(token):
        return function(branch)
