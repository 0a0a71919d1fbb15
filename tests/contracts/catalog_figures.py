"""What every catalog must do: sums over trajectories, and what journal entries tell of a snapshot. See catalog.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from snapshotd.catalog.base import CallFacts, Catalog, TrajectoryTotals
from snapshotd.types import EntryKind, FileChanges, LayerID, ModelUse, SideEffect, SnapshotState, Stack, new_id
from tests.records import CREATED_AT_NS, committed, ended_entry, fork, make_call, started

NONE = ModelUse()


def own_snapshots_are_added_up(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    catalog.snapshots.set_files(first.id, FileChanges(1, 0, 0, 10))
    layers = tuple(LayerID(new_id()) for _ in range(3))
    stack = Stack(first.stack.image, layers)
    usage = {"input_tokens": 100, "output_tokens": 7, "cached_tokens": 50, "cost_usd": 0.25}
    second = committed(
        catalog,
        first,
        stack=stack,
        own_layers=2,
        files=None,
        entries=[ended_entry(first, details={"usage": usage}), ended_entry(first, details={"usage": {"cost_usd": 1}})],
    )
    model = ModelUse(2, 10, 100, 7, 50, 1.25)
    total = catalog.figures.totals()[trajectory.id]
    assert (total.snapshots, total.newest, total.file_bytes, total.model) == (2, second.id, 10, model)
    assert list(total.layers) == list(layers[:2])
    catalog.snapshots.set_files(second.id, FileChanges(0, 1, 0, 5))
    assert catalog.figures.totals()[trajectory.id].file_bytes == 15, "files are counted after the commit"
    third = committed(catalog, second, files=FileChanges(0, 0, 0, 1))
    total = catalog.figures.totals()[trajectory.id]
    assert (total.snapshots, total.newest, total.file_bytes, total.model) == (3, third.id, 16, model)
    assert catalog.snapshots.get_many([first.id, third.id, first.id]) == {
        first.id: catalog.snapshots.get(first.id),
        third.id: third,
    }


def amounts_that_are_none_do_not_count(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    for usage in ("all", {"input_tokens": -5, "output_tokens": True, "cost_usd": 1e300}, {"cached_tokens": "7"}, None):
        details: dict[str, Any] = {} if usage is None else {"usage": usage}
        first = committed(catalog, first, entries=[ended_entry(first, details=details)])
    assert catalog.figures.totals()[trajectory.id].model == ModelUse(4, 20)


def totals_stay_true_when_the_newest_rows_go(catalog: Catalog) -> None:
    """SQLite gives the numbers of rows that were the last ones again."""
    kept, first = started(catalog)
    gone, last = started(catalog)
    for _ in range(5):
        last = committed(catalog, last, files=None)
    assert catalog.figures.totals()[gone.id].snapshots == 6
    catalog.trajectories.remove(gone.id)
    for _ in range(3):
        first = committed(catalog, first, files=FileChanges(0, 0, 0, 1))
    assert {line: (sum_.snapshots, sum_.newest) for line, sum_ in catalog.figures.totals().items()} == {
        kept.id: (4, first.id)
    }


def a_fork_without_steps_has_no_totals(catalog: Catalog) -> None:
    trajectory, first = started(catalog)
    child = fork(first, trajectory)
    catalog.trajectories.add([(child, None)])
    assert set(catalog.figures.totals()) == {trajectory.id}
    committed(catalog, first)
    assert catalog.figures.totals()[trajectory.id].snapshots == 2


def more_than_a_page_is_added_up(catalog: Catalog) -> None:
    trajectory, last = started(catalog)
    ids = [last.id]
    for _ in range(450):
        last = committed(catalog, last, entries=[ended_entry(last, details={"usage": {"input_tokens": 1}})])
        ids.append(last.id)
    total = catalog.figures.totals()[trajectory.id]
    assert isinstance(total, TrajectoryTotals)
    assert (total.snapshots, total.model.input_tokens) == (451, 450)
    assert len(catalog.figures.facts(ids)) == 450
    assert catalog.figures.states() == dict.fromkeys(SnapshotState, 0) | {SnapshotState.CAPTURED: 451}


def a_snapshot_has_what_its_entries_tell(catalog: Catalog) -> None:
    _, first = started(catalog)
    call = make_call()
    entry = ended_entry(
        first,
        id=call.id,
        kind=EntryKind.TOOL,
        side_effect=SideEffect.IRREVERSIBLE,
        arguments=call.arguments,
        details={"sub_agent": "2"},
        began_at_ns=CREATED_AT_NS,
        ended_at_ns=CREATED_AT_NS + 9,
    )
    model = ended_entry(first, details={"usage": {"output_tokens": 3}}, ended_at_ns=CREATED_AT_NS + 7)
    second = committed(catalog, first, call=call, entries=[model, entry])
    facts = catalog.figures.facts([first.id, second.id])
    assert facts == {second.id: CallFacts(SideEffect.IRREVERSIBLE, "2", ModelUse(1, 7, 0, 3))}


def snapshots_are_counted_by_state(catalog: Catalog) -> None:
    _, first = started(catalog)
    second = committed(catalog, first)
    catalog.snapshots.set_state([second.id], SnapshotState.LOST)
    some = {SnapshotState.CAPTURED: 1, SnapshotState.LOST: 1}
    assert catalog.figures.states() == dict.fromkeys(SnapshotState, 0) | some


CHECKS: tuple[Callable[[Catalog], None], ...] = (
    own_snapshots_are_added_up,
    amounts_that_are_none_do_not_count,
    totals_stay_true_when_the_newest_rows_go,
    a_fork_without_steps_has_no_totals,
    more_than_a_page_is_added_up,
    a_snapshot_has_what_its_entries_tell,
    snapshots_are_counted_by_state,
)
