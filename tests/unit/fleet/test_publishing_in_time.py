"""A publication that comes so late that the repository may have begun to delete what it needs is refused by the coordination."""

from __future__ import annotations

import pytest

from snapshotd.errors import Conflict
from snapshotd.fleet.base import PUBLISH_WITHIN_NS, SECOND_NS, NodeID
from snapshotd.repo.fleet.base import GRACE_S
from snapshotd.types import SnapshotID, TrajectoryID
from tests.postgres_server import PostgresServer, new_fleet

NODE, LINE = NodeID("north"), TrajectoryID("1" * 32)
FIRST, SECOND = SnapshotID("2" * 32), SnapshotID("3" * 32)


def test_the_bound_is_what_the_repository_relies_on() -> None:
    assert PUBLISH_WITHIN_NS == GRACE_S / 4 * SECOND_NS


def test_what_was_stored_too_long_ago_is_not_published(postgres: PostgresServer, postgres_url: str) -> None:
    try:
        with new_fleet(postgres_url) as fleet:
            lease = fleet.register(NODE, "machine", 0).lease
            claim = fleet.own(LINE, NODE, lease.epoch)
            now_ns = fleet.clock_ns()
            with fleet.publishing(claim, None, FIRST, stored_ns=now_ns - PUBLISH_WITHIN_NS + 60 * SECOND_NS) as new:
                assert new
            late = pytest.raises(Conflict, match="were published 21660 s ago and its row was not")
            with late, fleet.publishing(claim, FIRST, SECOND, stored_ns=now_ns - PUBLISH_WITHIN_NS - 60 * SECOND_NS):
                pass
            assert fleet.find_published([FIRST, SECOND]) == [FIRST]
            assert fleet.owner(LINE).head == FIRST
            with fleet.publishing(claim, FIRST, SECOND, stored_ns=fleet.clock_ns()) as new:
                assert new
    finally:
        postgres.ask("DROP SCHEMA snapshotd_fleet CASCADE")
