"""What every catalog must do: a caller of one tenant resolves refs as if there were nothing else. See catalog.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from snapshotd.catalog.base import Catalog, as_tenant, present_tenant
from snapshotd.errors import Ambiguous, Conflict, NotFound
from snapshotd.terms import DEFAULT_TENANT, NO_ISOLATION, TENANT_VARIABLE
from snapshotd.types import FOLDER, Experiment, ExperimentID, Snapshot, SnapshotID, Trajectory, TrajectoryID
from tests.contracts.refusal import refuses
from tests.records import begin, make_approval, make_image, started


def _of(catalog: Catalog, tenant: str, identity: str, **fields: object) -> tuple[Trajectory, Snapshot]:
    """A trajectory with its first snapshot."""
    image = make_image(f"image-{identity}")
    catalog.images.add(image)
    trajectory, first = begin(image, env=(("A", "1"), (TENANT_VARIABLE, tenant)), **fields)
    trajectory, first = (
        replace(trajectory, id=TrajectoryID(identity)),
        replace(first, trajectory=TrajectoryID(identity)),
    )
    catalog.trajectories.add([(trajectory, first)])
    return trajectory, first


def refs_of_others_mean_nothing(catalog: Catalog) -> None:
    mine, first = _of(catalog, "acme", "a" * 32, name="mine")
    theirs, other = _of(catalog, "other", "a" * 31 + "b", name="theirs")
    nobodys, third = started(catalog, name="nobodys")
    for snapshot, tag in ((first, "mine-tag"), (other, "theirs-tag")):
        catalog.refs.tag(snapshot.id, tag)
    refuses(Ambiguous, catalog.refs.find_trajectory, "a" * 20)
    with as_tenant("acme"):
        assert present_tenant() == "acme"
        assert catalog.refs.find_trajectory("a" * 20).id == mine.id, "no other begins like that, as far as it knows"
        for ref in ("mine", "mine-tag", first.id, first.id[:12], mine.id):
            assert catalog.refs.find_snapshot(ref).id == first.id
        for ref in ("theirs", "theirs-tag", other.id, other.id[:12], theirs.id, "nobodys", third.id, nobodys.id):
            refuses(NotFound, catalog.refs.find_snapshot, ref)
            refuses(NotFound, catalog.refs.find_trajectory, ref)
        refuses(NotFound, catalog.refs.untag, "theirs-tag")
        with as_tenant(None):
            assert catalog.refs.find_trajectory("theirs").id == theirs.id
        assert catalog.trajectories.get(theirs.id).id == theirs.id, "by exact id the engine finds everything"
    with as_tenant(DEFAULT_TENANT):
        assert catalog.refs.find_trajectory("nobodys").id == nobodys.id
        refuses(NotFound, catalog.refs.find_trajectory, "mine")
    assert present_tenant() is None
    assert set(catalog.refs.tags()) == {"mine-tag", "theirs-tag"}


def names_of_others_are_taken_and_tell_no_more(catalog: Catalog) -> None:
    mine, first = _of(catalog, "acme", "a" * 32, name="mine")
    theirs, other = _of(catalog, "other", "b" * 32, name="theirs")
    catalog.refs.tag(other.id, "theirs-tag")
    with as_tenant("acme"):
        for name in ("theirs", "theirs-tag"):
            for move in (False, True):
                _refuses_without_ids(
                    lambda name=name, move=move: catalog.refs.tag(first.id, name, move=move), theirs, other
                )
            _refuses_without_ids(lambda name=name: started(catalog, name=name), theirs, other)
    assert catalog.refs.find_snapshot("theirs-tag").id == other.id
    assert {one.id for one in catalog.trajectories.list()} == {mine.id, theirs.id}


def _refuses_without_ids(action: Callable[[], object], trajectory: Trajectory, snapshot: Snapshot) -> None:
    told = ""
    try:
        action()
    except Conflict as exc:
        told = exc.message
    assert told, "it was not refused"
    assert trajectory.id[:12] not in told
    assert snapshot.id[:12] not in told


def a_tenants_trajectories_are_listed(catalog: Catalog) -> None:
    mine, _ = _of(catalog, "acme", "a" * 32)
    theirs, _ = _of(catalog, "other", "b" * 32)
    nobodys, _ = started(catalog)
    assert catalog.trajectories.of_tenant("acme") == {mine.id}
    assert catalog.trajectories.of_tenant(DEFAULT_TENANT) == {nobodys.id}
    assert catalog.trajectories.of_tenant("acme", mine.id) == {mine.id}
    assert catalog.trajectories.of_tenant("acme", theirs.id) == catalog.trajectories.of_tenant("unknown") == set()


def what_is_of_the_machine_is_no_tenants(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    for runtime in (FOLDER, NO_ISOLATION):
        spec = replace(trajectory.spec, runtime=runtime)
        other, _ = started(catalog, spec=spec, name=f"of-{runtime}")
        with as_tenant(DEFAULT_TENANT):
            refuses(NotFound, catalog.refs.find_trajectory, f"of-{runtime}")
            assert catalog.refs.find_trajectory(first.id).id == trajectory.id
        assert catalog.trajectories.of_tenant(DEFAULT_TENANT) == {trajectory.id}
        assert catalog.trajectories.of_tenant(DEFAULT_TENANT, other.id) == set()
        assert catalog.refs.find_trajectory(f"of-{runtime}").id == other.id


def approvals_and_experiments_of_others_are_not_found(catalog: Catalog) -> None:
    _, first = _of(catalog, "acme", "a" * 32)
    asked = make_approval(first)
    catalog.approvals.add(asked)
    experiment = Experiment(ExperimentID("e" * 32), "parser", first.id, 1, "digest", {})
    gone = Experiment(ExperimentID("f" * 32), "gone", SnapshotID("9" * 32), 1, "digest", {})
    catalog.experiments.add(experiment, ())
    catalog.experiments.add(gone, ())
    with as_tenant("acme"):
        assert catalog.approvals.find(asked.id[:8]) == asked
        assert catalog.experiments.get("parser") == experiment
        assert list(catalog.experiments.list()) == [experiment]
    with as_tenant("other"):
        refuses(NotFound, catalog.approvals.find, asked.id)
        refuses(NotFound, catalog.experiments.get, "parser")
        assert list(catalog.experiments.list()) == []
    assert list(catalog.experiments.list()) == [gone, experiment]


CHECKS: tuple[Callable[[Catalog], None], ...] = (
    refs_of_others_mean_nothing,
    names_of_others_are_taken_and_tell_no_more,
    a_tenants_trajectories_are_listed,
    what_is_of_the_machine_is_no_tenants,
    approvals_and_experiments_of_others_are_not_found,
)
