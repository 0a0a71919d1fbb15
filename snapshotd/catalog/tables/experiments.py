"""Experiments in the catalog's database."""

from __future__ import annotations

import builtins
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from snapshotd.catalog import rows
from snapshotd.catalog.database import CatalogDatabase, Row, Value
from snapshotd.catalog.tables.requests import add_request
from snapshotd.catalog.tenancy import own_condition
from snapshotd.errors import Conflict, NotFound
from snapshotd.scores import ExperimentBranch
from snapshotd.types import Experiment, RequestKey, TrajectoryID

_SELECT = "SELECT id, name, snapshot, began_at_ns, digest, description, ended FROM experiments"
_BRANCH_SELECT = """
SELECT e.name, b.label, b.run, b.state, b.trajectory, b.outcome
FROM experiment_branches b JOIN experiments e ON e.pk = b.experiment
"""


class ExperimentTable:
    """Experiments, and one record for each of their branches. They outlive trajectories and snapshots that they name.
    NotFound: there is no experiment of a name."""

    def __init__(self, db: CatalogDatabase) -> None:
        self._db = db

    def add(
        self,
        experiment: Experiment,
        branches: Sequence[ExperimentBranch],
        *,
        files: bytes | None = None,
        request: RequestKey | None = None,
    ) -> None:
        """Record a new one with all its branches, in the order in which they begin, as what `request` has made. Conflict:
        there is one of this name."""
        one = experiment
        with self._db.transaction():
            if self._db.read("SELECT 1 FROM experiments WHERE name = ?", (one.name,)):
                raise Conflict(f"there is an experiment {one.name} already; choose another name")
            pk = self._db.insert(
                "INSERT INTO experiments (id, name, snapshot, began_at_ns, digest, description, ended, files)"
                " VALUES (?,?,?,?,?,?,?,?)",
                (
                    one.id,
                    one.name,
                    one.snapshot,
                    one.began_at_ns,
                    one.digest,
                    None if one.description is None else rows.encode_json(one.description),
                    rows.encode_text_or_none(one.ended),
                    files,
                ),
            )
            for branch in branches:
                self._db.write(
                    "INSERT INTO experiment_branches (state, trajectory, outcome, experiment, label, run)"
                    " VALUES (?,?,?,?,?,?)",
                    (*_encode(branch), pk, branch.label, branch.run),
                )
            add_request(self._db, request, [one.name])

    def list(self) -> builtins.list[Experiment]:
        """The experiments that the present tenant sees, in the order of their names."""
        condition, values = _own_condition()
        return [_decode(row) for row in self._db.read(f"{_SELECT} WHERE {condition} ORDER BY name", values)]

    def get(self, name: str) -> Experiment:
        """The experiment of this name. NotFound, also where the present tenant does not see the snapshot that it began from. The other
        methods look at no tenant."""
        condition, values = _own_condition()
        found = self._db.read_one(f"{_SELECT} WHERE name = ? AND {condition}", (name, *values))
        if found is None:
            raise _no(name)
        return _decode(found)

    def files(self, name: str) -> bytes | None:
        """The scorer's files."""
        found: bytes | None = self._row("SELECT files FROM experiments", name)[0]
        return found

    def branches(self, name: str) -> builtins.list[ExperimentBranch]:
        """The branches of an experiment, in the order in which they begin."""
        pk = self._number(name)
        return [_decode_branch(row) for row in self._db.read(_BRANCH_SELECT + "WHERE e.pk = ? ORDER BY b.pk", (pk,))]

    def describe(self, name: str, digest: str, description: Any, files: bytes | None) -> None:
        """Record the description anew: of one that came from an earlier version, or whose secrets have other values."""
        text = rows.encode_json(description)
        with self._db.transaction():
            self._db.write(
                "UPDATE experiments SET digest = ?, description = ?, files = ? WHERE pk = ?",
                (digest, text, files, self._number(name)),
            )

    def set_ended(self, name: str, why: str | None) -> None:
        """Record why no other branch begins; None: some may again."""
        with self._db.transaction():
            ended = rows.encode_text_or_none(why)
            self._db.write("UPDATE experiments SET ended = ? WHERE pk = ?", (ended, self._number(name)))

    def save(self, name: str, branch: ExperimentBranch) -> None:
        """Record a branch anew. NotFound: the experiment has none of its label and run."""
        with self._db.transaction():
            changed = self._db.write(
                "UPDATE experiment_branches SET state = ?, trajectory = ?, outcome = ?"
                " WHERE experiment = ? AND label = ? AND run = ?",
                (*_encode(branch), self._number(name), branch.label, branch.run),
            )
            if not changed:
                raise NotFound(f"the experiment {name} has no branch {branch.called}")

    def of_trajectory(self, trajectory_id: TrajectoryID) -> tuple[str, ExperimentBranch] | None:
        """The name of the experiment that a trajectory is a branch of, and that branch."""
        found = self._db.read_one(_BRANCH_SELECT + "WHERE b.trajectory = ?", (trajectory_id,))
        return None if found is None else (found[0], _decode_branch(found))

    def remove(self, name: str) -> None:
        """Forget an experiment with its branches' records."""
        with self._db.transaction():
            pk = self._number(name)
            self._db.write("DELETE FROM experiment_branches WHERE experiment = ?", (pk,))
            self._db.write("DELETE FROM experiments WHERE pk = ?", (pk,))

    def _number(self, name: str) -> int:
        number: int = self._row("SELECT pk FROM experiments", name)[0]
        return number

    def _row(self, select: str, name: str) -> Row:
        found = self._db.read_one(f"{select} WHERE name = ?", (name,))
        if found is None:
            raise _no(name)
        return found


def _no(name: str) -> NotFound:
    return NotFound(f"there is no experiment {name[:100]!r}; `snapshotd experiment ls` lists those there are")


def _own_condition() -> tuple[str, tuple[Value, ...]]:
    """SQL that is true for an experiment whose snapshot the present tenant sees, and its values."""
    condition, values = own_condition()
    if not values:
        return condition, values
    return (
        "EXISTS (SELECT 1 FROM snapshots s JOIN trajectories t ON t.pk = s.trajectory"
        f" WHERE s.id = experiments.snapshot AND {condition})",
        values,
    )


def _encode(branch: ExperimentBranch) -> tuple[str, str | None, str]:
    outcome = dataclasses.asdict(branch)
    for key in ("label", "run", "state", "trajectory"):
        del outcome[key]
    return branch.state, branch.trajectory, rows.encode_json(outcome)


def _decode_branch(row: Row) -> ExperimentBranch:
    _, label, run, state, trajectory, outcome = row
    with rows.intact("experiment", row):
        rest = json.loads(outcome)
        lists = {key: tuple(rest[key]) for key in ("tokens", "protected")}
        return ExperimentBranch(label, run, state, trajectory, **{**rest, **lists})


def _decode(row: Row) -> Experiment:
    identity, name, snapshot, began, digest, description, ended = row
    with rows.intact("experiment", row):
        described = None if description is None else json.loads(description)
        return Experiment(identity, name, snapshot, began, digest, described, rows.decode_text_or_none(ended))
