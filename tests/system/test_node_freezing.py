"""Real sandboxes of a node whose lease is over: their processes stand still, whether the daemon sees to it or its watchdog."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotd.api.commands import BackgroundRequest
from snapshotd.daemon import joining
from snapshotd.engine.engine import Engine
from snapshotd.engine.node.lease import now_ns
from snapshotd.engine.node.watchdog import Watchdog
from snapshotd.engine.sandbox.root import frozen
from snapshotd.errors import Unavailable
from snapshotd.fleet.base import LeaseTerms
from snapshotd.kernel.holding import cgroup
from snapshotd.kernel.holding.held import HeldMembers
from tests import mind_rig
from tests.e2e.support import wait_until
from tests.mind_rig import Agent
from tests.postgres_server import PostgresServer

pytestmark = pytest.mark.runc
SECOND_NS = 1_000_000_000


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    made = PostgresServer()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def engine(small_root: Path, server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    store = Path(tempfile.mkdtemp(prefix="snapshotd-node-", dir="/var/tmp"))
    monkeypatch.setenv("SNAPSHOTD_FLEET", server.url)
    monkeypatch.setenv("SNAPSHOTD_STORE", store.as_uri())
    monkeypatch.setenv("SNAPSHOTD_NODE", "north")
    monkeypatch.setattr(joining, "LeaseTerms", lambda: LeaseTerms(3 * SECOND_NS, SECOND_NS // 2, SECOND_NS))
    try:
        with mind_rig.engine(small_root) as opened:
            yield opened
    finally:
        shutil.rmtree(store)


def cpu_of(members: HeldMembers) -> Callable[[], int]:
    """The processor time that a sandbox has taken."""
    group = members.inner
    assert isinstance(group, cgroup.Cgroup)

    def read() -> int:
        return sum(
            sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
            for pid in group.members()
        )

    return read


def stands_still(read: Callable[[], int]) -> bool:
    before = read()
    time.sleep(0.3)  # nothing tells that nothing happens
    return read() == before


def busy(engine: Engine) -> HeldMembers:
    """The members of a sandbox in which a process takes all the time that it gets."""
    agent: Agent = mind_rig.agent(engine)
    engine.runs.exec_in_background(agent.id, BackgroundRequest(("sh", "-c", "while :; do :; done")))
    (sandbox,) = engine.runs._sessions.live()
    assert isinstance(sandbox.cgroup, HeldMembers)
    wait_until(lambda: not stands_still(cpu_of(sandbox.cgroup)), "nothing changes")
    return sandbox.cgroup


@pytest.mark.long  # test_the_watchdog_stops_what_its_daemon_does_not
def test_a_sandbox_stands_still_from_before_the_end_of_the_lease_until_it_is_renewed(
    engine: Engine, server: PostgresServer
) -> None:
    members = busy(engine)
    read = cpu_of(members)
    server.stop()
    wait_until(lambda: engine.life.status()["node_state"] == "frozen", "nothing changes")
    assert engine.life.status()["lease_s"] > 0.3, "before its end"
    assert stands_still(read)
    with frozen(members):
        pass
    assert stands_still(read), "a snapshot lets nothing go on"
    with pytest.raises(Unavailable):
        mind_rig.agent(engine)
    server.start()
    wait_until(lambda: not stands_still(read), "nothing changes")


def test_the_watchdog_stops_what_its_daemon_does_not(engine: Engine, tmp_path: Path) -> None:
    members = busy(engine)
    read = cpu_of(members)
    watchdog = Watchdog(tmp_path / "watchdog", SECOND_NS // 10)
    watchdog.start()
    try:
        watchdog.renew(now_ns() + SECOND_NS // 2, [members])
        wait_until(lambda: stands_still(read), "nothing changes")
        assert watchdog.renew(now_ns() + 60 * SECOND_NS, [members]), "it says that it has"
        members.let_go()
        assert not stands_still(read)
    finally:
        watchdog.close()
