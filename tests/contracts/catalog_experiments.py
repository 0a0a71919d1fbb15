"""What every catalog must do: experiments and their branches. See catalog.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from snapshotd.catalog.base import Catalog
from snapshotd.errors import Conflict, NotFound
from snapshotd.scores import ExperimentBranch
from snapshotd.types import Experiment, ExperimentID, RequestKey, SnapshotID, TrajectoryID
from tests.contracts.refusal import refuses

EXPERIMENT = Experiment(
    ExperimentID("e" * 32), "parser", SnapshotID("a" * 32), 5_000_000_001, "digest", {"name": "parser", "n": [1, None]}
)
BRANCHES = tuple(ExperimentBranch(label, run) for run in range(2) for label in ("warm", "cold"))


def an_experiment_is_kept_with_its_branches(catalog: Catalog) -> None:
    table, request = catalog.experiments, RequestKey("key", "digest", 1)
    assert list(table.list()) == []
    table.add(EXPERIMENT, BRANCHES, files=b"\0tar\xff", request=request)
    assert catalog.requests.find(request) == ("parser",)
    refuses(Conflict, table.add, replace(EXPERIMENT, id=ExperimentID("f" * 32)), BRANCHES, says=("parser",))
    assert table.get("parser") == EXPERIMENT
    assert table.files("parser") == b"\0tar\xff"
    assert tuple(table.branches("parser")) == BRANCHES, "in the order in which they begin"
    other = replace(EXPERIMENT, id=ExperimentID("f" * 32), name="a-first-one", description=None)
    table.add(other, ())
    assert list(table.list()) == [other, EXPERIMENT]
    assert (table.files("a-first-one"), list(table.branches("a-first-one"))) == (None, [])


def a_branch_is_recorded_anew(catalog: Catalog) -> None:
    table = catalog.experiments
    table.add(EXPERIMENT, BRANCHES)
    line = TrajectoryID("1" * 32)
    assert table.of_trajectory(line) is None
    running = replace(BRANCHES[1], state="running", trajectory=line)
    table.save("parser", running)
    scored = replace(
        running,
        state="scored",
        score=0.1,
        passed=True,
        exit_code=3,
        seconds=1.5,
        calls=7,
        tokens=(1, 2),
        cost=0.25,
        files=4,
        lines=5,
        outside=6,
        protected=("/workspace/tests/\udc80",),
        error="no \ud800",
    )
    table.save("parser", scored)
    assert tuple(table.branches("parser")) == (BRANCHES[0], scored, *BRANCHES[2:])
    assert table.of_trajectory(line) == ("parser", scored)
    refuses(NotFound, table.save, "parser", replace(scored, run=9), says=("cold.9",))
    refuses(NotFound, table.save, "parser", replace(scored, label="hot"))


def it_ends_and_goes_on(catalog: Catalog) -> None:
    table = catalog.experiments
    table.add(replace(EXPERIMENT, description=None, ended="it was stopped"), BRANCHES)
    assert table.get("parser").ended == "it was stopped"
    table.describe("parser", "another", {"n": 1}, b"files")
    table.set_ended("parser", None)
    assert table.get("parser") == replace(EXPERIMENT, digest="another", description={"n": 1})
    assert (table.files("parser"), tuple(table.branches("parser"))) == (b"files", BRANCHES)
    table.set_ended("parser", "\ud800 ended")
    assert table.get("parser").ended == "\ud800 ended"


def it_is_forgotten(catalog: Catalog) -> None:
    table = catalog.experiments
    table.add(EXPERIMENT, BRANCHES)
    table.remove("parser")
    assert list(table.list()) == []
    for asked in (table.get, table.files, table.branches, table.remove):
        refuses(NotFound, asked, "parser", says=("parser",))
    refuses(NotFound, table.set_ended, "parser", None)
    refuses(NotFound, table.describe, "parser", "", {}, None)
    table.add(EXPERIMENT, BRANCHES[:1])
    assert tuple(table.branches("parser")) == BRANCHES[:1]


CHECKS: tuple[Callable[[Catalog], None], ...] = (
    an_experiment_is_kept_with_its_branches,
    a_branch_is_recorded_anew,
    it_ends_and_goes_on,
    it_is_forgotten,
)
