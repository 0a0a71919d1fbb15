"""A fleet without nodes, in a database of its own; those of one file share the server."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node_rig import Fleet
from tests.postgres_server import PostgresServer


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    made = PostgresServer()
    yield made
    made.close()


@pytest.fixture
def fleet(server: PostgresServer, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="fleet-") as name:
        made = Fleet(server, Path(name), f"fleet_{abs(hash(request.node.name)) % 10**9}")
        try:
            yield made
        finally:
            made.close()
