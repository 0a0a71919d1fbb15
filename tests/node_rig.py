"""Nodes of a fleet: small daemons (tests/small_daemon.py) over one real PostgreSQL server and one store."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from snapshotd.repo.key import load_key
from tests.postgres_server import PostgresServer
from tests.unit.daemon.process import Daemon, start

T = TypeVar("T")
TERMS_MS = (3000, 400, 1000)
"""How long a lease lasts, how often it is renewed, and the margin."""
DEADLINE_S = 30.0


class Fleet:
    """A fleet of a test's own, below a short directory."""

    def __init__(
        self, server: PostgresServer, directory: Path, name: str = "fleet", user: str = "postgres", store: str = ""
    ) -> None:
        """`store`: its address; by default a folder."""
        self.server, self.directory, self.database, self._user = server, directory, name, user
        server.ask(f"CREATE DATABASE {name} OWNER {user}")
        self._clocks: dict[str, str] = {}
        self.nodes: dict[str, Daemon] = {}
        self.store = store or (directory / "store").as_uri()
        load_key(directory)
        self._clock = directory / "clock"
        self._clock.write_text("0")
        self._key = directory / "key"

    @property
    def url(self) -> str:
        return self.server.url_of(self.database, self._user)

    def begin(self, node: str, *, key: Path | None = None, **environment: str) -> Daemon:
        """Start a node, or the next daemon of one. `key`: a copy of the fleet's."""
        home = self.directory / node
        (home / "state" / "repo").mkdir(parents=True, exist_ok=True)
        shutil.copy(key or self._key, home / "state" / "repo" / "key")
        own = {
            "SNAPSHOTD_FLEET": self.url,
            "SNAPSHOTD_NODE": node,
            "SNAPSHOTD_NODE_ADDRESS": f"https://{node}.example.com:7676",
            "SNAPSHOTD_STORE": self.store,
            "SMALL_CLOCK": str(self._clock),
            "SMALL_LEASE": " ".join(map(str, TERMS_MS)),
        }
        self.nodes[node] = start(home / "state", home / "s", **{**own, **self._clocks, **environment})
        return self.nodes[node]

    def begin_reachable(self, node: str) -> str:
        """Start a node that other machines reach. Returns its address."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            place = f"127.0.0.1:{free.getsockname()[1]}"
        self.begin(node, SMALL_LISTEN=place, SNAPSHOTD_NODE_ADDRESS=f"https://{place}")
        return f"https://{place}"

    def pass_time(self, seconds: float) -> None:
        """Put the clock by which garbage grows old forward, on all nodes."""
        self._clock.write_text(str(float(self._clock.read_text()) + seconds))

    def have_clock(self) -> None:
        """Before any node begins: the database's clock can jump."""
        self.ask("CREATE TABLE public.ahead AS SELECT 0::bigint AS ns")
        self._clocks = {"SMALL_AHEAD": "1"}

    def jump(self, seconds: float) -> None:
        """Let it jump, and return when all nodes have renewed their leases by it."""
        self.ask(f"UPDATE public.ahead SET ns = ns + {int(seconds * 1e9)}")
        ((count, before),) = self.ask("SELECT count(*), coalesce(sum(renewals), 0) FROM snapshotd_fleet.nodes")
        renewed = f"SELECT 1 FROM snapshotd_fleet.nodes HAVING sum(renewals) >= {before} + 2 * {count}"
        await_that(lambda: self.ask(renewed), "the leases are not renewed")

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        return self.server.ask(sql, self.database)

    def owner(self, trajectory: str) -> tuple[Any, ...] | None:
        """Node, epoch and fence of a trajectory's owner; None: it has no row."""
        rows = self.ask(f"SELECT node, epoch, fence FROM snapshotd_fleet.owners WHERE trajectory = '{trajectory}'")
        return rows[0] if rows else None

    def close(self) -> None:
        for daemon in self.nodes.values():
            daemon.close()


@contextmanager
def own_fleet(directory: Path, store: str = "") -> Iterator[Fleet]:
    """A fleet over a PostgreSQL server of its own."""
    with closing(PostgresServer()) as server, closing(Fleet(server, directory, store=store)) as made:
        yield made


def await_that(look: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """The first true answer of `look`."""
    deadline = time.monotonic() + deadline_s
    while not (found := look()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found
