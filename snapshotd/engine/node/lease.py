"""The lease of this daemon's node: got, renewed, and what its end means. See `base.py`, and `fleet/base.py` for the promises.

Threads: `fleet-lease` registers and renews; `fleet-freeze` stops the sandboxes when the lease is over by the node's own
clock, however long a renewal is under way, and lets them go on. Requests that change who owns what take turns (`turn`), so
that the answer of a renewal is never older than a claim.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from snapshotd.engine.node.freezer import Freezer
from snapshotd.engine.node.watchdog import Watchdog
from snapshotd.errors import Conflict, NotFound, SnapshotdError, Unavailable
from snapshotd.fleet.base import SECOND_NS, NodeID, Renewed, Sighting
from snapshotd.fleet.coordination import PostgresCoordination
from snapshotd.fleet.places import NodeRoom
from snapshotd.fleet.protocol import HeldLease, has_run_out, hold_lease, watch_node
from snapshotd.kernel.holding.members import Members

ANSWER_S = 12.0
"""Longest wait for an answer of the database, and for one's turn to ask it."""
FIRST_S = 10.0
"""Wait for the first lease before the daemon goes on without one."""
_log = logging.getLogger(__name__)


def now_ns() -> int:
    """The node's own clock, which goes on while the machine sleeps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """`host`: the machine, its boot and the state directory, which no other daemon has at the same time."""

    node: NodeID
    host: str
    address: str


class LeaseListener(Protocol):
    """The one who goes by the lease."""

    def room(self) -> NodeRoom | None:
        """The node's room, for a renewal; None: it is not known yet."""

    def take_answer(self, renewed: Renewed, *, first: bool) -> None:
        """An answer came; no other request is under way. `first`: the node has just registered. SnapshotdError."""

    def tell_new(self) -> None:
        """Tell the database of what is new. SnapshotdError."""

    def end_lost(self) -> None:
        """End the sandboxes of what was taken over, before anything goes on."""


@dataclass(slots=True)
class _State:
    """The lease as it is known. The condition guards it."""

    held: HeldLease | None = None
    frozen: bool = True
    answered: bool = False
    """A renewal came that `fleet-freeze` has not looked at."""
    draining: bool = False
    replaced: str = ""
    """Why this daemon is not the node's any more."""
    failure: str = ""
    """Why the last renewal failed."""


class LeaseKeeper:
    """See the module's text. Thread-safe."""

    def __init__(self, facts: NodeFacts, fleet: PostgresCoordination, watchdog: Watchdog) -> None:
        self.facts, self.fleet, self._watchdog = facts, fleet, watchdog
        self._turns = threading.RLock()
        self._freezer = Freezer()
        self._changed, self._state = threading.Condition(), _State()
        self._seen: dict[NodeID, Sighting] = {}
        self._wake, self._closing = threading.Event(), threading.Event()
        self._due = False
        """The lease is to be renewed at once."""
        self._threads: list[threading.Thread] = []

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self, listener: LeaseListener) -> None:
        """Begin to hold the lease. Returns when the node has it, or after `FIRST_S` without it: then everything is frozen
        until it has."""
        self._watchdog.start()
        self._threads = [
            threading.Thread(target=self._keep, args=(listener,), name="fleet-lease"),
            threading.Thread(target=self._watch, args=(listener,), name="fleet-freeze"),
        ]
        for thread in self._threads:
            thread.start()
        state = self._state
        with self._changed:
            if not self._changed.wait_for(lambda: not state.frozen or bool(state.replaced), FIRST_S):
                _log.warning("the node has no lease yet, so no sandbox runs: %s", state.failure or "no answer")

    def close(self) -> None:
        """Every sandbox has ended. Idempotent. The lease runs out by itself."""
        self._closing.set()
        self._wake.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._watchdog.close()

    def hurry(self, *, renew: bool = False) -> None:
        """Wake the lease's thread to tell the database what is new; with `renew`, to renew the lease with the node's
        room."""
        self._due |= renew
        self._wake.set()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Take the turn to ask the database who owns what. Turns may nest. Unavailable: an earlier turn waits too long
        for the database."""
        if not self._turns.acquire(timeout=ANSWER_S):
            raise Unavailable(
                f"the fleet's database has not answered node {self.facts.node} for {ANSWER_S:.0f} s: try again when it does"
            )
        try:
            yield
        finally:
            self._turns.release()

    # -- questions -----------------------------------------------------------------------------------------------------

    def hold(self, members: Members) -> Members:
        """See `Ownership`."""
        held = self._freezer.hold(members)
        self._watchdog.add(held)
        return held

    def may_act(self) -> bool:
        """True while the lease holds, by the node's own clock."""
        held = self._state.held
        return held is not None and not self._state.replaced and held.may_act(now_ns())

    def check(self) -> None:
        """Unavailable: the lease is over; Conflict: another daemon is this node."""
        state = self._state
        if state.replaced:
            raise Conflict(state.replaced)
        if not self.may_act() or state.frozen:
            why = f" ({state.failure})" if state.failure else ""
            raise Unavailable(
                f"node {self.facts.node} cannot renew its lease{why}, so its sandboxes stand still: try again when the fleet's database "
                "answers, or on another node"
            )

    @property
    def draining(self) -> bool:
        """The node is to hand over what it owns."""
        return self._state.draining

    def epoch(self) -> int:
        """The number of this daemon among those of the node. Unavailable: it has not registered yet."""
        held = self._state.held
        if held is None:
            raise Unavailable(f"node {self.facts.node} has no lease yet: try again when the fleet's database answers")
        return held.epoch

    def find_expired(self, node: NodeID) -> Sighting | None:
        """The sighting of a node that has not renewed for a whole lease, by this node's clock; None: it has, or was not
        watched for so long."""
        seen = self._seen.get(node)
        return seen if seen is not None and has_run_out(seen, now_ns(), self.fleet.terms) else None

    def status(self) -> dict[str, Any]:
        """Facts for `daemon --status`."""
        state, terms = self._state, self.fleet.terms
        left_ns = 0 if state.held is None else state.held.freeze_at_ns + terms.margin_ns - now_ns()
        shown = "draining" if state.draining else "leased"
        return {
            "node": self.facts.node,
            "node_address": self.facts.address,
            "node_state": "replaced" if state.replaced else "frozen" if state.frozen else shown,
            "node_failure": state.replaced or state.failure,
            "lease_s": max(0.0, round(left_ns / SECOND_NS, 1)),
        }

    # -- renewing ------------------------------------------------------------------------------------------------------

    def _keep(self, listener: LeaseListener) -> None:
        state = self._state
        while not self._closing.is_set() and not state.replaced:
            began_ns, self._due = now_ns(), False
            try:
                self._ask(listener)
                listener.tell_new()
                state.failure = ""
            except SnapshotdError as exc:
                self._note_failure(exc)
            self._wait(began_ns, listener)

    def _note_failure(self, exc: SnapshotdError) -> None:
        if exc.message != self._state.failure:
            _log.warning("the lease of node %s is not renewed: %s", self.facts.node, exc.message)
        with self._changed:
            self._state.failure = exc.message
            if isinstance(exc, Conflict) and self._state.held is not None:
                self._state.replaced, self._state.answered = exc.message, True
                self._changed.notify_all()

    def _wait(self, began_ns: int, listener: LeaseListener) -> None:
        """Wait until the next renewal, and tell the database of new trajectories meanwhile."""
        pause_ns = SECOND_NS if self._state.failure else self.fleet.terms.renew_ns
        while (left_ns := began_ns + pause_ns - now_ns()) > 0:
            if not self._wake.wait(left_ns / SECOND_NS) or self._closing.is_set() or self._state.held is None:
                return
            self._wake.clear()
            if self._due:
                return
            try:
                listener.tell_new()
            except SnapshotdError as exc:
                _log.info("the fleet is told later what is new here: %s", exc.message)

    def _ask(self, listener: LeaseListener) -> None:
        terms = self.fleet.terms
        with self.turn():
            sent_ns, first = now_ns(), self._state.held is None
            renewed = self._register() if first else self.fleet.renew(self.facts.node, self.epoch(), listener.room())
            at_ns = now_ns()
            self._seen = {row.node: watch_node(row, self._seen.get(row.node), at_ns) for row in renewed.late}
            held = hold_lease(renewed.lease.epoch, sent_ns, terms)
            if first:
                self._state.held = held
            listener.take_answer(renewed, first=first)
            with self._changed:
                self._state.held, self._state.draining, self._state.answered = held, renewed.draining, True
                self._changed.notify_all()

    def _register(self) -> Renewed:
        node = self.facts.node
        try:
            row = self.fleet.watch(node)
        except NotFound:
            return self.fleet.register(node, self.facts.host, 0)
        self._seen[node] = watch_node(row, self._seen.get(node), now_ns())
        return self.fleet.register(node, self.facts.host, row.epoch, seen=self.find_expired(node))

    # -- freezing ------------------------------------------------------------------------------------------------------

    def _watch(self, listener: LeaseListener) -> None:
        state = self._state
        while True:
            with self._changed:
                self._changed.wait_for(lambda: state.answered or self._closing.is_set(), self._time_left_s())
                if self._closing.is_set():
                    return
                answered, state.answered = state.answered, False
            if self.may_act():
                if answered:
                    self._go_on(listener)
            elif not state.frozen:
                state.frozen = True
                count = self._freezer.freeze()
                _log.error("the lease of node %s is over: %d sandboxes stand still", self.facts.node, count)

    def _time_left_s(self) -> float | None:
        """The time until all sandboxes must be frozen; None: they are, or there is no lease."""
        state = self._state
        return None if state.held is None or state.frozen else max(0, state.held.freeze_at_ns - now_ns()) / SECOND_NS

    def _go_on(self, listener: LeaseListener) -> None:
        """End the sandboxes of trajectories that were taken over, then thaw the others if any was frozen."""
        held = self._state.held
        assert held is not None
        listener.end_lost()
        stood_still = self._watchdog.renew(held.freeze_at_ns, self._freezer.everything())
        if not stood_still and not self._state.frozen:
            return
        self._freezer.thaw()
        with self._changed:
            self._state.frozen = False
            self._changed.notify_all()
        _log.info("node %s holds its lease (epoch %d)", self.facts.node, held.epoch)
