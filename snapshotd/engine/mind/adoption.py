"""The adoption of a launched sandbox, whose steps are recorded from then on: it gets its writer's fence, its mind, a
recorder, the library's calls and its model endpoint."""

from __future__ import annotations

from snapshotd.engine.context import Context
from snapshotd.engine.mind.approvals import Gate
from snapshotd.engine.mind.calls import AgentCalls
from snapshotd.engine.mind.gateways import Gateways
from snapshotd.engine.mind.idempotency import Keys, cut_off
from snapshotd.engine.mind.keyvalue import KeyValueStore
from snapshotd.engine.mind.recorder import Recorder
from snapshotd.engine.mind.replay import Resumption
from snapshotd.engine.mind.reuse import Reuse, wanted
from snapshotd.engine.sandbox.attach import Survivor, record_of
from snapshotd.engine.sandbox.places import Places
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.sandbox.step import StepListener
from snapshotd.types import SnapshotID


class Adoption:
    """See the module's text. Thread-safe."""

    def __init__(
        self,
        context: Context,
        listener: StepListener,
        places: Places,
        gate: Gate,
        store: KeyValueStore,
        gateways: Gateways,
    ) -> None:
        """`listener` is told of every step."""
        self._context, self._listener, self._places = context, listener, places
        self._gate, self._store, self._gateways = gate, store, gateways

    def adopt(self, sandbox: Sandbox, calls: AgentCalls, resumption: Resumption | None, keys: Keys | None) -> Recorder:
        """Record the steps of a new sandbox from now on. With a `resumption` its program is replayed first; `keys`: of
        calls that it makes again."""
        self._own(sandbox, sandbox.head if resumption is None else resumption.began.id)
        if sandbox.trajectory.agent is not None:
            record = record_of(self._context, sandbox.container.id)
            record.open()
            sandbox.survival.use(record)
        recorder = self._recorder(sandbox, resumption, keys)
        calls.bind(sandbox, recorder, self._gate, self._store)
        self._gateways.open(sandbox, recorder)
        return recorder

    def go_on(self, sandbox: Sandbox, calls: AgentCalls, survivor: Survivor) -> Recorder:
        """Record the steps of a sandbox that an earlier daemon left. SandboxFailed."""
        self._own(sandbox, sandbox.head)
        recorder = self._recorder(sandbox, None, cut_off(self._context.catalog, survivor.trajectory))
        recorder.restore(survivor.record)
        calls.bind(sandbox, recorder, self._gate, self._store)
        calls.restore()
        survivor.record.open()
        sandbox.survival.use(survivor.record)
        sandbox.outlive(survivor.facts)
        sandbox.use.end_when_idle(survivor.facts.get("idle_timeout_s", 0.0))
        self._gateways.open(sandbox, recorder, survivor.record)
        return recorder

    def _own(self, sandbox: Sandbox, state_of: SnapshotID) -> None:
        catalog = self._context.catalog
        sandbox.writer.own(catalog.draw_fence(sandbox.trajectory.id))
        sandbox.mind.put(catalog.state(state_of), changed=False)

    def _recorder(self, sandbox: Sandbox, resumption: Resumption | None, keys: Keys | None) -> Recorder:
        reuse = Reuse(self._context, sandbox) if wanted(self._context.catalog, sandbox.trajectory) else None
        return Recorder(self._context, sandbox, self._listener, self._places, resumption, keys, reuse)
