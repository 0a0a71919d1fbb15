"""What every catalog must do: requests with a key of their client's, and what they have made. See catalog.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from snapshotd.catalog.base import Catalog
from snapshotd.errors import Conflict
from snapshotd.types import RequestKey, SnapshotID, new_id
from tests.contracts.refusal import refuses
from tests.records import follow, fork, started

DAY_NS = 24 * 3600 * 10**9
REQUEST = RequestKey("key-1", "digest", 5 * DAY_NS)


def what_is_made_is_recorded_with_it(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    assert catalog.requests.find(REQUEST) is None
    second = follow(first)
    catalog.snapshots.commit(second, (), expected_head=first.id, request=REQUEST)
    assert catalog.requests.find(REQUEST) == (second.id,)
    tagging = replace(REQUEST, key="key-2")
    catalog.refs.tag(first.id, "t", request=tagging)
    assert catalog.requests.find(tagging) == (first.id,)
    forking = replace(REQUEST, key="key-3")
    forks = [fork(second, trajectory), fork(second, trajectory)]
    catalog.trajectories.add([(one, None) for one in forks], request=forking)
    assert catalog.requests.find(forking) == tuple(one.id for one in forks)
    catalog.requests.add(None, ["nothing"])
    catalog.requests.forget(forking)
    assert catalog.requests.find(forking) is None


def nothing_is_recorded_of_what_was_not_made(catalog: Catalog) -> None:
    _, first = started(catalog)
    second = follow(first)

    def commit() -> None:
        catalog.snapshots.commit(second, (), expected_head=SnapshotID(new_id()), request=REQUEST)

    refuses(Conflict, commit)
    assert catalog.requests.find(REQUEST) is None


def a_key_belongs_to_one_request_and_for_a_day(catalog: Catalog) -> None:
    catalog.requests.add(REQUEST, ["a", "b"])
    assert catalog.requests.find(replace(REQUEST, at_ns=REQUEST.at_ns + DAY_NS)) == ("a", "b")
    other = replace(REQUEST, digest="another")
    refuses(Conflict, catalog.requests.find, other, says=("key-1", "another request"))
    late = replace(other, at_ns=REQUEST.at_ns + DAY_NS + 1)
    assert catalog.requests.find(late) is None
    catalog.requests.add(late, ["c"])
    assert catalog.requests.find(late) == ("c",)


def keys_of_a_day_ago_go(catalog: Catalog) -> None:
    catalog.requests.add(REQUEST, ["a"])
    catalog.requests.add(replace(REQUEST, key="key-2", at_ns=REQUEST.at_ns + DAY_NS + 1), ["b"])
    assert catalog.requests.find(REQUEST) is None


CHECKS: tuple[Callable[[Catalog], None], ...] = (
    what_is_made_is_recorded_with_it,
    nothing_is_recorded_of_what_was_not_made,
    a_key_belongs_to_one_request_and_for_a_day,
    keys_of_a_day_ago_go,
)
