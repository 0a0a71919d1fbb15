"""Agents reach the values of their own tenant, and of no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from snapshotd.api.trajectories import CreateRequest, ForkRequest
from snapshotd.catalog.base import as_tenant
from snapshotd.engine.base import EditRequest
from snapshotd.engine.engine import Engine
from snapshotd.engine.secrecy import TENANT
from snapshotd.errors import NotFound, UsageError
from snapshotd.types import DEFAULT_TENANT
from tests.mind_rig import Agent

pytestmark = pytest.mark.runc


def _begun(engine: Engine, tenant: str) -> Agent:
    return Agent(engine, engine.runs.create(CreateRequest(runtime="runc", tenant=tenant))[0].id)


def _put(agent: Agent, value: Any) -> None:
    agent.calls.store(
        "put", {"namespace": "n", "key": "k", "value": value, "ttl_s": None, "expected_version": None}, None
    )


def _get(agent: Agent) -> Any:
    return agent.calls.store("get", {"namespace": "n", "key": "k", "version": None}, None).get("value")


def test_agents_reach_the_values_of_their_tenant_alone(engine: Engine) -> None:
    acme, other, nobody = _begun(engine, "acme"), _begun(engine, "other"), _begun(engine, DEFAULT_TENANT)
    _put(acme, "of acme")
    assert [_get(agent) for agent in (acme, other, nobody)] == ["of acme", None, None]
    _put(nobody, "of all")
    assert [_get(agent) for agent in (acme, other, nobody)] == ["of acme", None, "of all"]
    assert engine.values.get("acme", "n", "k").value == "of acme"
    assert engine.values.get(DEFAULT_TENANT, "n", "k").value == "of all"
    with pytest.raises(NotFound):
        engine.values.get("other", "n", "k")


def test_forks_and_edits_stay_with_the_tenant(engine: Engine) -> None:
    agent = _begun(engine, "firm")
    head = agent.tool("write", {}, "echo 1 > one")
    _put(agent, 1)
    (forked,) = engine.branching.fork(head.id, ForkRequest()).trajectories
    edited = engine.branching.edit(head.id, EditRequest(env=(("OTHER", "x"),)))
    assert [_get(Agent(engine, made.id)) for made in (forked, edited)] == [1, 1]
    assert TENANT not in agent.sh("env")


def test_a_tenant_is_a_name(engine: Engine) -> None:
    for wrong in ("", "a/b", "-x", "x" * 65):
        with pytest.raises(UsageError, match="tenant"):
            engine.runs.create(replace(CreateRequest(runtime="runc"), tenant=wrong))


@pytest.mark.parametrize(("image", "command"), [("codex", "build codex"), ("debian:1", "import debian:1")])
def test_a_tenant_is_told_who_makes_an_image(engine: Engine, image: str, command: str) -> None:
    with (
        as_tenant("acme"),
        pytest.raises(NotFound, match=f"ask the daemon's owner for `snapshotd image {command}` there"),
    ):
        engine.runs.create(CreateRequest(runtime="runc", tenant="acme", image=image))
