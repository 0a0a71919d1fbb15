"""A conversation of ten thousand messages: the last thousand cost what the first thousand did, in statements and in bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.engine import LocalEngine
from tests import mind_rig
from tests.mind_rig import Agent

pytestmark = pytest.mark.runc
MESSAGES, PART, EACH = 10_000, 1_000, 20
"""All; those that are measured at both ends; those before each step."""


@dataclass(slots=True)
class Cost:
    statements: int = 0
    written_bytes: int = 0
    stored_bytes: int = 0


@contextmanager
def _measured(engine: LocalEngine) -> Iterator[Cost]:
    """What this thread asks of the catalog and writes, and by how much the packs grow."""
    cost, own = Cost(), threading.get_ident()
    catalog = engine._catalog
    assert isinstance(catalog, SqliteCatalog)

    def traced(*_: Any) -> bool:
        if threading.get_ident() == own:
            cost.statements += 1
        return True

    packs, written = _packs_bytes(engine), _written_bytes()
    catalog._db.connection.exec_trace = traced
    try:
        yield cost
    finally:
        catalog._db.connection.exec_trace = None
    cost.written_bytes = _written_bytes() - written
    engine.flush()
    cost.stored_bytes = _packs_bytes(engine) - packs


def _written_bytes() -> int:
    lines = Path("/proc/thread-self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


def _packs_bytes(engine: LocalEngine) -> int:
    packs = engine._context.state_dir / "repo" / "store"
    return sum(path.stat().st_size for path in packs.rglob("*") if path.is_file())


def _say(agent: Agent, first: int, count: int) -> None:
    for number in range(first, first + count):
        agent.say(f"message {number:06} of ten thousand, which says no more than that it is there")
        if number % EACH == EACH - 1:
            agent.tool("step", {"number": f"{number:06}"})


def test_the_last_thousand_messages_cost_what_the_first_did(small_root: Path) -> None:
    with mind_rig.engine(small_root) as engine:
        agent = mind_rig.agent(engine)
        engine.flush()
        with _measured(engine) as first:
            _say(agent, 0, PART)
        _say(agent, PART, MESSAGES - 2 * PART)
        engine.flush()
        with _measured(engine) as last:
            _say(agent, MESSAGES - PART, PART)
        assert len(agent.said()) == MESSAGES
    assert first.statements == last.statements > 0
    assert last.written_bytes < 1.5 * first.written_bytes
    assert last.stored_bytes < 1.5 * first.stored_bytes
    assert first.stored_bytes < 1000 * PART, "and it is little"
