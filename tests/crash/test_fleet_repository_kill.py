"""A node of a fleet that dies at each step of a publication, a merge and a collection, over a folder or a real S3 service: nothing
that was published is lost, and a second node collects meanwhile."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd import failpoints
from snapshotd.store.base import Store
from snapshotd.store.open import open_store
from tests import forked, long, s3_service
from tests.crash import fleet_kill_child
from tests.fleet_rig import GRACE_S, Kept, Node, packs_in, tombstones_in, write

PUBLICATION = ("repo.fleet.segment_made", "repo.fleet.segment_put", "repo.fleet.segment_noted")
MERGE = ("repo.fleet.merged",)
COLLECTION = tuple(
    name
    for name in failpoints.NAMES
    if name.startswith(("repo.fleet.", "repo.gc.")) and name not in (*MERGE, "repo.gc.relisted")
)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_service.running() as address:
        yield address


@pytest.fixture(
    params=["file", pytest.param("s3", marks=pytest.mark.long)]
)  # contract/test_fleet_repository.py is over S3
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return (tmp_path / "bucket").as_uri()
    endpoint = request.getfixturevalue("endpoint")
    return f"s3://{s3_service.make_bucket(endpoint)}?endpoint={endpoint}"


@pytest.fixture
def bucket(url: str) -> Iterator[Store]:
    store = open_store(url)
    yield store
    store.close()


def run(directory: Path, name: str, url: str, kept: Kept, later_s: float, what: str, failpoint: str = "") -> bool:
    """Run in a process of its own; True if it died at the failpoint."""
    oracle = directory / "kept"
    oracle.write_bytes(pickle.dumps(kept))
    env = {**os.environ, "SNAPSHOTD_FAILPOINT": failpoint}
    words = [str(directory), name, url, str(oracle), str(later_s), what]
    code, _, said = forked.run(words, env=env, timeout_s=120, module=fleet_kill_child.__name__)
    assert code in (0, failpoints.EXIT_CODE), said
    return code == failpoints.EXIT_CODE


@pytest.mark.parametrize("point", long.some([*PUBLICATION, "repo.index.committed", "repo.pack.stored"], 2))
def test_a_publication_that_is_cut_off_goes_on(tmp_path: Path, bucket: Store, url: str, point: str) -> None:
    a = Node(tmp_path, "a", bucket)
    kept = write(a, 1, 3)
    a.close()
    if point in PUBLICATION:
        assert run(tmp_path, "a", url, kept, 0, "publish", point)
    b = Node(tmp_path, "b", bucket)
    b.merge()
    assert b.index.last_merged("a")[0] == (1 if point in PUBLICATION[1:] else 0)
    segments = {key: bucket.get(key) for key in bucket.keys("nodes/a/index/")}
    a = Node(tmp_path, "a", bucket)
    more = write(a, 2, 2)
    a.publish_all(kept | more)
    b.merge()
    for node in (a, b):
        assert node.reads(kept | more)
        node.close()
    assert all(bucket.get(key) == data for key, data in segments.items()), "nothing changes in a segment"


def test_a_merge_that_is_cut_off_goes_on(tmp_path: Path, bucket: Store, url: str) -> None:
    a, b = Node(tmp_path, "a", bucket), Node(tmp_path, "b", bucket)
    kept: Kept = {}
    for seed in (1, 2, 3):
        kept |= write(a, seed, 1)
        a.publish_all(kept)
    _ = b.repo
    b.close()
    assert run(tmp_path, "b", url, {}, 0, "merge", "repo.fleet.merged:2")
    b = Node(tmp_path, "b", bucket)
    assert b.index.last_merged("a")[0] == 2
    b.merge()
    assert b.reads(kept)
    a.close()
    b.close()


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("point", long.some(COLLECTION, 4))
def test_a_collection_that_is_cut_off_loses_nothing(
    tmp_path: Path, bucket: Store, url: str, point: str, count: int
) -> None:
    """While it lies dead a second node, which does not know of it, collects; then the first one goes on."""
    a, b = Node(tmp_path, "a", bucket), Node(tmp_path, "b", bucket)
    of_a, of_b = write(a, 1, 14), write(b, 2, 3)
    a.publish_all(of_a)
    b.publish_all(of_b)
    kept = {name: one for number, (name, one) in enumerate((of_a | of_b).items()) if number % 2}
    needed_again = {name: one for name, one in of_a.items() if name not in kept and name.endswith("-2")}
    a.close()
    later_s = 2 * GRACE_S
    died = run(tmp_path, "a", url, kept, later_s, "collect", f"{point}:{count}")
    if not died:
        if point != "repo.fleet.taken_back":  # else the collection itself takes back what a root needs
            b.publish_all(needed_again, later_s)
        kept |= needed_again
        died = run(tmp_path, "a", url, kept, later_s + 1.5 * GRACE_S, "collect", f"{point}:{count}")
        later_s += 1.5 * GRACE_S
    assert died or count > 1
    b.merge()
    assert b.reads(kept)
    b.collect_all(kept, later_s + 60)
    assert b.reads(kept)
    a = Node(tmp_path, "a", bucket)
    assert a.reads(kept)
    for collector, later in ((a, 120.0), (b, 2 * GRACE_S), (a, 2 * GRACE_S + 60), (a, 4 * GRACE_S), (b, 6 * GRACE_S)):
        collector.collect_all(kept, later_s + later)
        for node in (a, b):
            node.merge()
            assert node.reads(kept)
    fresh = Node(tmp_path, "c", bucket)
    fresh.merge()
    assert fresh.reads(kept)
    places = [list(node.index.objects()) for node in (a, b, fresh)]
    assert places[0] == places[1] == places[2]
    a.collect_all({}, later_s + 8 * GRACE_S)
    b.collect_all({}, later_s + 10 * GRACE_S)
    a.collect_all({}, later_s + 12 * GRACE_S)
    assert packs_in(bucket) == tombstones_in(bucket) == []
    for node in (a, b, fresh):
        node.close()
