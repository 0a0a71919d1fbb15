"""Leases and fences under every failure at once: skewed clocks, stopped machines, lost and late messages, a database that
is away, two machines with one name. The invariants are the promises of `fleet.base`.

Each seeded defect has to be caught: a model that misses one checks too little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from snapshotd.fleet import protocol
from snapshotd.fleet.base import RecordedIntent
from tests import long
from tests.model.fleet_machine import Fleet

TestFleet = Fleet.TestCase
TestFleet.settings = settings(
    max_examples=long.size(60, 3000),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def skip_check(*_: Any, **__: Any) -> None:
    """A check that checks nothing."""


def publish_at_any_head(row: Any, claim: Any, _: Any, snapshot: Any) -> Any:
    protocol.check_claim(row, claim)
    return replace(row, head=snapshot)


TAKE = protocol.take_trajectory


def take_released(row: Any, after: int, holder: Any, taker: Any, seen: Any, now_ns: int) -> Any:
    """A trajectory that was handed over keeps its fence."""
    if row.node is None:
        return replace(row, node=taker.node, epoch=taker.epoch)
    return TAKE(row, after, holder, taker, seen, now_ns)


def forget_undecided(row: Any, claim: Any, call: Any, _: Any) -> Any:
    protocol.check_claim(row, claim)
    return RecordedIntent(call, row.trajectory, claim.fence)


OF_MACHINES = (
    "no freezing",
    "thaws everything",
    "binds early",
    "rows before bytes",
    "drops what is unpublished",
    pytest.param("does not wait", marks=pytest.mark.long),
    pytest.param("watches carelessly", marks=pytest.mark.long),
    pytest.param("counts from the answer", marks=pytest.mark.long),
    pytest.param("runs without a look at the clock", marks=pytest.mark.long),
)
OF_RULES: dict[str, Callable[..., Any]] = {
    "check_run_out": skip_check,
    "check_epoch": skip_check,
    "doubt_intent": lambda row: row,
    "open_intent": forget_undecided,
    "check_claim": skip_check,
    "adopt_trajectory": lambda row, _, now: replace(row, epoch=now.epoch),
    "move_head": publish_at_any_head,
    "take_trajectory": take_released,
}
SLOW_TO_CATCH = ("check_claim", "adopt_trajectory", "move_head", "take_trajectory")


@pytest.mark.parametrize("fault", OF_MACHINES)
def test_a_careless_machine_is_caught(fault: str) -> None:
    catch(type("Careless", (Fleet,), {"faults": frozenset({fault})}))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in SLOW_TO_CATCH)) for name in OF_RULES]
)
def test_a_wrong_rule_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, name, OF_RULES[name])
    catch(Fleet)


def catch(machine: type[Fleet]) -> None:
    bound = settings(TestFleet.settings, max_examples=5000, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises(AssertionError) as caught:
        run_state_machine_as_test(seed(1)(machine), settings=bound)
    assert str(caught.value), "a promise is broken, and not the test"
