"""Stopping an experiment whose branches are being forked."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.base import Forked, SandboxRequest, Variant
from snapshotd.engine.experiments.base import ExperimentRequest, Scorer
from snapshotd.engine.experiments.service import ExperimentService
from snapshotd.engine.secrecy import Secrecy
from snapshotd.secrets.vault import FileVault
from tests.storage_rig import wait_until
from tests.unit.daemon.fake_engine import FakeEngine


def test_no_branch_is_forked_after_the_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty may run at once, and all of them are about to be forked."""
    engine, catalog = FakeEngine(), SqliteCatalog(tmp_path / "catalog.db")
    experiments = ExperimentService(engine, catalog, Secrecy(FileVault(tmp_path), catalog))
    first = engine.create(SandboxRequest())[1].id
    fork, begun, go_on = engine.fork, threading.Semaphore(0), threading.Event()

    def slow(*args: Any, **options: Any) -> Forked:
        begun.release()
        assert go_on.wait(60)
        return fork(*args, **options)

    monkeypatch.setattr(engine, "fork", slow)
    request = ExperimentRequest(
        "way", first, (Variant("a"),), Scorer(("true",)), args=("true",), repeat=60, parallel=60
    )
    experiments.create(request)
    assert begun.acquire(timeout=60)
    stopping = threading.Thread(target=experiments.stop, args=("way",))
    stopping.start()
    wait_until(lambda: experiments.get("way").ended is not None, "the experiment has ended")
    go_on.set()
    stopping.join(60)
    states = [one.state for one in experiments.get("way").branches]
    assert len(engine.trajectories()) - 1 == sum(state != "skipped" for state in states) <= 8
    assert sum(state == "skipped" for state in states) >= 52
