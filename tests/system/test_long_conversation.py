"""A conversation of thousands of messages: the last thousand cost what the first thousand did, in statements and in
bytes."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.engine import Engine
from tests import long, mind_rig
from tests.mind_rig import Agent

pytestmark = pytest.mark.runc
MESSAGES, PART, WINDOW, EACH = long.size(2_500, 10_000), 1_000, 100, 20
"""All; those that are measured at both ends; in so many at once; those before each step."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a thousand messages. `written_bytes`: of a hundred, the median, since SQLite tidies up now and then."""

    statements: int
    written_bytes: float
    stored_bytes: int


@contextmanager
def _statements(engine: Engine) -> Iterator[list[int]]:
    """How many this thread asks of the catalog."""
    count, own = [0], threading.get_ident()
    catalog = engine.life._catalog
    assert isinstance(catalog, SqliteCatalog)

    def traced(*_: Any) -> bool:
        count[0] += threading.get_ident() == own
        return True

    catalog._db.connection.exec_trace = traced
    try:
        yield count
    finally:
        catalog._db.connection.exec_trace = None


def _measured(agent: Agent, first: int) -> Cost:
    """What this thread does for the messages that begin with this one, and by how much the packs grow."""
    packs, windows = _packs_bytes(agent.engine), []
    with _statements(agent.engine) as count:
        for start in range(first, first + PART, WINDOW):
            before = _written_bytes()
            _say(agent, start, WINDOW)
            windows.append(_written_bytes() - before)
    agent.engine.storage.flush()
    return Cost(count[0], statistics.median(windows), _packs_bytes(agent.engine) - packs)


def _written_bytes() -> int:
    lines = Path("/proc/thread-self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


def _packs_bytes(engine: Engine) -> int:
    packs = engine.life._context.state_dir / "repo" / "store"
    return sum(path.stat().st_size for path in packs.rglob("*") if path.is_file())


def _say(agent: Agent, first: int, count: int) -> None:
    for number in range(first, first + count):
        agent.say(f"message {number:06} of many thousands, which says no more than that it is there")
        if number % EACH == EACH - 1:
            agent.tool("step", {"number": f"{number:06}"})


@pytest.mark.long  # e2e/test_scale.py has snapshots
def test_the_last_thousand_messages_cost_what_the_first_did(small_root: Path) -> None:
    with mind_rig.engine(small_root) as engine:
        agent = mind_rig.agent(engine)
        engine.storage.flush()
        _say(agent, 0, WINDOW)  # the first of all looks up what it then knows
        first = _measured(agent, WINDOW)
        _say(agent, WINDOW + PART, MESSAGES - 2 * PART - WINDOW)
        engine.storage.flush()
        last = _measured(agent, MESSAGES - PART)
        assert len(agent.said()) == MESSAGES
    assert first.statements == last.statements > 0
    assert last.written_bytes < 1.5 * first.written_bytes
    assert last.stored_bytes < 1.5 * first.stored_bytes
    assert first.stored_bytes < 1000 * PART, "and it is little"
