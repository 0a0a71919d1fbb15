"""Experiments of earlier versions, which kept them in the key-value store under a tenant of their own: one value for each
experiment, with the text of its file, and one for each branch that had begun."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

from snapshotd.catalog.base import Catalog, KeyValues
from snapshotd.errors import Conflict
from snapshotd.scores import STOPPED, ExperimentBranch
from snapshotd.types import Experiment, ExperimentID, SnapshotID, StoredValue

TENANT = "snapshotd-experiments"
_LIST = "list"
_PAGE = 500


def adopt(catalog: Catalog) -> None:
    """Move the experiments of earlier versions into the catalog's table. It can be repeated after a crash. An experiment
    that had not ended is stopped: it names files on its user's machine, and goes on when that user runs it again."""
    values = catalog.values
    for found in list(_all(values, _LIST)):
        branches = f"branches/{found.key}"
        begun = [_decode_branch(one.value) for one in _all(values, branches)]
        with suppress(Conflict):  # it was taken in before
            catalog.experiments.add(*_decode_experiment(found.key, found.value, begun))
        for one in list(_all(values, branches)):
            values.delete(TENANT, branches, one.key, now_ns=time.time_ns())
        values.delete(TENANT, _LIST, found.key, now_ns=time.time_ns())


def _decode_experiment(
    name: str, value: dict[str, Any], begun: list[ExperimentBranch]
) -> tuple[Experiment, list[ExperimentBranch]]:
    began_at = datetime.fromisoformat(value["began_at"])
    identity = (value["snapshot"][:20] + f"{int(began_at.timestamp()):012x}")[:32]
    described = tomllib.loads(value["text"])
    labels = list(described.get("variants") or map(str, range(described.get("n", 1))))
    known = {(one.label, one.run): one for one in begun}
    ats = [(label, run) for run in range(described.get("repeat", 1)) for label in labels]
    record = Experiment(
        id=ExperimentID(identity),
        name=name,
        snapshot=SnapshotID(value["snapshot"]),
        began_at_ns=int(began_at.timestamp() * 1e6) * 1000,
        digest="",
        description=None,
        ended=value["ended"] or STOPPED,
    )
    return record, [known.get(at) or ExperimentBranch(*at) for at in ats]


def _decode_branch(value: dict[str, Any]) -> ExperimentBranch:
    state = "stopped" if value["state"] == "running" else value["state"]
    lists = {key: tuple(value[key]) for key in ("tokens", "protected")}
    return ExperimentBranch(**{**value, **lists, "state": state})


def _all(values: KeyValues, namespace: str) -> Iterator[StoredValue]:
    after = ""
    while page := values.search(TENANT, namespace, now_ns=time.time_ns(), limit=_PAGE, after=after):
        yield from page
        after = page[-1].key
