"""Launched sandboxes: the daemon adopts one, and records its steps from then on, or uses it once and throws it away."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from snapshotd.catalog.base import Catalog
from snapshotd.engine.context import Context
from snapshotd.engine.journal.approval.gate import Gate
from snapshotd.engine.journal.calls import AgentCalls
from snapshotd.engine.journal.gateways import Gateways
from snapshotd.engine.journal.idempotency import Keys, cut_off_keys
from snapshotd.engine.journal.keyvalue import KeyValueStore
from snapshotd.engine.journal.pipeline import Journal
from snapshotd.engine.journal.replay import Resumption
from snapshotd.engine.journal.retracing import NoReplay
from snapshotd.engine.journal.reuse import Reuse, is_wanted
from snapshotd.engine.journal.unrecorded import UnrecordedCalls
from snapshotd.engine.protocol.agent_handler import HandlerSlot
from snapshotd.engine.sandbox.attach import Survivor, record_of
from snapshotd.engine.sandbox.places import Places
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.sandbox.step import StepListener
from snapshotd.errors import NotFound, SandboxFailed
from snapshotd.kernel.net.uplink import bring_up, take_down
from snapshotd.types import ContainerID, Network, Snapshot, SnapshotID, Trajectory, short

_END_S = 10.0
_log = logging.getLogger(__name__)


class Adoption:
    """The start of recording: a sandbox gets its writer's fence, its mind, a journal, the library's calls and its model
    endpoint. Thread-safe."""

    def __init__(
        self,
        context: Context,
        listener: StepListener,
        places: Places,
        gate: Gate,
        store: KeyValueStore,
        gateways: Gateways,
        start_services: Callable[[Sandbox], object],
    ) -> None:
        """`listener` is told of every step; `start_services` is called when a replay has met all."""
        self._context, self._listener, self._places = context, listener, places
        self._start_services = start_services
        self._gate, self._store, self._gateways = gate, store, gateways

    def adopt(self, sandbox: Sandbox, calls: HandlerSlot, resumption: Resumption | None, keys: Keys | None) -> Journal:
        """Record the steps of a new sandbox from now on. With a `resumption` its program is replayed first; `keys`: of
        calls that it makes again."""
        self._own(sandbox, sandbox.head if resumption is None else resumption.began.id)
        if sandbox.trajectory.agent is not None:
            record = record_of(self._context, sandbox.container.id)
            record.open()
            sandbox.survival.use(record)
        journal = self._journal(sandbox, resumption, keys)
        calls.bind(AgentCalls(self._context, journal, self._store))
        self._gateways.open(sandbox, journal)
        if journal.replay.retraces:
            _take_network(sandbox, journal.replay)
        journal.replay.call_when_met(partial(self._start_services, sandbox))
        journal.replay.begin()
        return journal

    def go_on(self, sandbox: Sandbox, calls: HandlerSlot, survivor: Survivor) -> Journal:
        """Record the steps of a sandbox that an earlier daemon left. SandboxFailed."""
        self._own(sandbox, sandbox.head)
        journal = self._journal(sandbox, None, cut_off_keys(self._context.catalog, survivor.trajectory))
        journal.recorder.restore(survivor.record)
        handler = AgentCalls(self._context, journal, self._store)
        handler.restore()
        calls.bind(handler)
        survivor.record.open()
        sandbox.survival.use(survivor.record)
        sandbox.outlive(survivor.facts)
        sandbox.use.end_when_idle(survivor.facts.get("idle_timeout_s", 0.0))
        self._gateways.open(sandbox, journal, survivor.record)
        return journal

    def _own(self, sandbox: Sandbox, state_of: SnapshotID) -> None:
        catalog = self._context.catalog
        sandbox.writer.own(catalog.trajectories.draw_fence(sandbox.trajectory.id))
        sandbox.mind.put(catalog.conversations.state(state_of), changed=False)

    def _journal(self, sandbox: Sandbox, resumption: Resumption | None, keys: Keys | None) -> Journal:
        reuse = Reuse(self._context, sandbox) if is_wanted(self._context.catalog, sandbox.trajectory) else None
        return Journal(self._context, sandbox, self._listener, self._places, self._gate, resumption, keys, reuse)


def _take_network(sandbox: Sandbox, replay: NoReplay) -> None:
    """Take the sandbox's network away until the replay has met all: what its program does outside between its recorded
    calls, and what the tools do that it runs by itself, must not happen twice. SandboxFailed."""
    name, pid = short(sandbox.trajectory.id), sandbox.container.pid
    if sandbox.way_out is not None:
        sandbox.way_out.suspend()
        replay.call_when_met(sandbox.way_out.resume)
        return
    if sandbox.trajectory.spec.network != Network.BRIDGE:
        return
    try:
        uplink = take_down(pid)
    except OSError as exc:
        raise SandboxFailed(
            f"the network of {name} cannot be switched off for its replay: {exc.strerror}; resume again"
        ) from exc

    def give_back() -> None:
        try:
            bring_up(pid, uplink)
        except OSError as exc:
            raise SandboxFailed(
                f"the network of {name} cannot be switched on after its replay: {exc.strerror}; resume again"
            ) from exc

    replay.call_when_met(give_back)


class ThrowAways:
    """Throw-away sandboxes: no row of the catalog mentions them, and nothing of them is recorded. Thread-safe."""

    def __init__(
        self,
        context: Context,
        launch: Callable[[Trajectory, Snapshot], tuple[Sandbox, HandlerSlot]],
        discard: Callable[[Sandbox], object],
    ) -> None:
        self._context, self._launch, self._discard = context, launch, discard
        self._live: dict[ContainerID, Sandbox] = {}
        self._closed = False
        self._changing = threading.Condition()
        """Told of sandboxes that have ended."""

    @contextlib.contextmanager
    def start(self, trajectory: Trajectory, snapshot: Snapshot) -> Iterator[Sandbox]:
        """Start a sandbox that ends with the block. SandboxFailed: the daemon was told to stop meanwhile."""
        sandbox, calls = self._launch(trajectory, snapshot)
        try:
            with self._changing:
                if self._closed:
                    raise _daemon_stops()
                self._live[sandbox.container.id] = sandbox
            calls.bind(UnrecordedCalls(sandbox))
            yield sandbox
            if sandbox.closed:
                raise _daemon_stops()
        finally:
            try:
                self._discard(sandbox)
            finally:
                self._context.secrecy.forget(trajectory.id)  # its output was searched for secrets, and is not kept
                with self._changing:
                    self._live.pop(sandbox.container.id, None)
                    self._changing.notify_all()

    def end(self, end: Callable[[Sandbox], object]) -> None:
        """End all with `end`, and let none begin any more. Errors are logged."""
        with self._changing:
            self._closed = True
            live = list(self._live.values())
        for sandbox in live:
            try:
                end(sandbox)
            except Exception:  # noqa: BLE001 - a defect with one must not cost the others what they hold
                _log.exception("a throw-away sandbox is left behind")

    def wait_until_gone(self) -> None:
        """Return when the threads that use throw-away sandboxes have noticed their end, or after some seconds."""
        with self._changing:
            self._changing.wait_for(lambda: not self._live, _END_S)


def _daemon_stops() -> SandboxFailed:
    return SandboxFailed("the daemon was told to stop, which ended this throw-away sandbox; repeat the command")


def renew_network(catalog: Catalog, sandboxes: Iterable[Sandbox], end: Callable[[Sandbox], object]) -> None:
    """Put the rules that are recorded for a trajectory's network in force in its sandboxes, if they have others.
    SandboxFailed; then that sandbox is handed to `end`."""
    for sandbox in sandboxes:
        if sandbox.way_out is None:
            continue
        try:
            with (
                contextlib.suppress(NotFound),
                sandbox.use.changing_network,
            ):  # not recorded yet, or thrown away: as it was
                recorded = catalog.trajectories.get(sandbox.trajectory.id).spec.network
                if recorded != sandbox.trajectory.spec.network:
                    sandbox.set_network(recorded)
        except BaseException:
            end(sandbox)
            raise
