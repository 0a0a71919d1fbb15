"""Experiments as versions before the catalog's seventh kept them: values under a tenant of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.api.trajectories import CreateRequest
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.base import Variant
from snapshotd.engine.engine import Engine
from snapshotd.engine.experiments import earlier
from snapshotd.engine.experiments.base import ExperimentRequest, Scorer
from snapshotd.engine.experiments.service import ExperimentService
from snapshotd.engine.secrecy import Secrecy
from snapshotd.errors import Conflict, NotFound
from snapshotd.scores import STOPPED
from snapshotd.secrets.vault import Vault
from snapshotd.types import Experiment, ExperimentID
from tests.mind_rig import clear

TEXT = """\
from = "{}"
program = ["true"]
repeat = 2
[variants.cold]
env.WAY = "cold"
[variants.warm]
[score]
command = ["true"]
"""


class Kept:
    """A catalog with an experiment in the old form, of four branches: two are scored, one ran, one waits."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.catalog = engine, SqliteCatalog(folder / "catalog.db")
        self.first = engine.runs.create(CreateRequest(runtime="none"))[1].id
        self.secrecy = Secrecy(Vault(folder), self.catalog)
        self.put("list", "parser", self.head(None))
        for label, run, state, score in (
            ("cold", 0, "scored", 1.0),
            ("warm", 0, "scored", 0.5),
            ("cold", 1, "running", None),
        ):
            self.put("branches/parser", f"{label}.{run}", self.branch(label, run, state, score))

    def head(self, ended: str | None) -> dict[str, Any]:
        text = TEXT.format(self.first)
        began_at = "2026-01-31T12:00:00.123456+00:00"
        return {
            "text": text,
            "digest": "d" * 64,
            "folder": "/home/someone",
            "snapshot": self.first,
            "began_at": began_at,
            "ended": ended,
        }

    def branch(self, label: str, run: int, state: str, score: float | None) -> dict[str, Any]:
        return {
            "label": label,
            "run": run,
            "state": state,
            "trajectory": f"{run}{len(label)}" * 16,
            "error": None,
            "score": score,
            "passed": score == 1.0,
            "exit_code": None if score is None else 0,
            "seconds": 2.5,
            "calls": 3,
            "tokens": [100, 20],
            "cost": 0.25,
            "files": 1,
            "lines": 2,
            "outside": 0,
            "protected": ["/workspace/x"] if label == "warm" else [],
        }

    def put(self, namespace: str, key: str, value: Any) -> None:
        self.catalog.values.put(earlier.TENANT, namespace, key, value, now_ns=time.time_ns())

    def opened(self) -> ExperimentService:
        """As a daemon that starts."""
        experiments = ExperimentService(self.engine.experiments._services, self.catalog, self.secrecy)
        experiments.start()
        return experiments


@pytest.fixture
def kept(engine: Engine, tmp_path: Path) -> Iterator[Kept]:
    yield Kept(engine, tmp_path)
    clear(engine)


def request(source: str, *labels: str) -> ExperimentRequest:
    return ExperimentRequest(
        "parser", source, tuple(Variant(label) for label in labels), Scorer(("true",)), args=("true",), repeat=2
    )


def test_names_branches_and_scores_are_kept(kept: Kept) -> None:
    experiments = kept.opened()
    (info,) = experiments.list()
    assert (info.name, info.snapshot, info.began_at) == ("parser", kept.first, "2026-01-31T12:00:00.123456Z")
    assert info.ended == STOPPED
    assert [(one.called, one.state, one.score, one.passed) for one in info.branches] == [
        ("cold.0", "scored", 1.0, True),
        ("warm.0", "scored", 0.5, False),
        ("cold.1", "stopped", None, False),
        ("warm.1", "skipped", None, False),
    ]
    warm = info.branches[1]
    assert (warm.tokens, warm.cost, warm.calls, warm.protected) == ((100, 20), 0.25, 3, ("/workspace/x",))
    assert kept.catalog.values.search(earlier.TENANT, "", now_ns=time.time_ns()) == []
    experiments.close()
    assert kept.opened().list() == [info], "it is done once"


def test_it_goes_on_when_it_is_run_again(kept: Kept) -> None:
    experiments = kept.opened()
    with pytest.raises(Conflict, match="another description"):
        experiments.create(request(kept.first, "cold", "hot"))
    experiments.create(request(kept.first, "cold", "warm"))
    *_, last = experiments.events("parser")
    assert (last["event"], last["ended_because"]) == ("ended", "all branches have ended")
    assert [(one["label"], one["run"], one["score"]) for one in last["branches"]] == [
        ("cold", 0, 1.0),
        ("warm", 0, 0.5),
        ("cold", 1, 1.0),
        ("warm", 1, 1.0),
    ]
    names = sorted(line.name for line in kept.engine.snapshots.trajectories() if line.name is not None)
    assert names == ["parser.cold.1", "parser.warm.1"], "what was scored does not run again"
    experiments.close()


def test_one_that_was_cut_off_is_taken_over_once(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog has it, and its values are half gone."""
    with monkeypatch.context() as patch:
        patch.setattr(type(kept.catalog.values), "delete", lambda *_, **__: (_ for _ in ()).throw(NotFound("killed")))
        with pytest.raises(NotFound):
            earlier.adopt(kept.catalog)
    kept.catalog.values.delete(earlier.TENANT, "branches/parser", "cold.0", now_ns=time.time_ns())
    (info,) = kept.opened().list()
    assert [one.score for one in info.branches] == [1.0, 0.5, None, None]
    assert kept.catalog.values.search(earlier.TENANT, "", now_ns=time.time_ns()) == []


def test_one_that_had_ended_stays_so(kept: Kept) -> None:
    kept.put("list", "parser", kept.head("cold.0 passed"))
    experiments = kept.opened()
    asked = experiments.create(request(kept.first, "cold", "warm"))
    assert (asked.ended, asked.best and asked.best.called) == ("cold.0 passed", "cold.0")
    assert [line for line in kept.engine.snapshots.trajectories() if line.name] == []
    experiments.remove("parser")
    assert experiments.list() == []


def test_one_that_cannot_be_read_keeps_no_daemon_from_starting(kept: Kept) -> None:
    record = Experiment(ExperimentID("e" * 32), "broken", kept.first, 1, "", {"name": "broken", "variants": "TOKEN"})
    kept.catalog.experiments.add(record, ())
    info = kept.opened().get("broken")
    assert info.ended == f"{STOPPED}: its description cannot be read"
