"""Secrets of an experiment's variants: their present values, and no error that quotes one."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.base import Forked, SandboxRequest, Variant
from snapshotd.engine.experiments.base import ExperimentRequest, Scorer
from snapshotd.engine.experiments.service import ExperimentService
from snapshotd.engine.secrecy import Secrecy
from snapshotd.errors import Conflict
from snapshotd.secrets.vault import FileVault
from tests.unit.daemon.fake_engine import FakeEngine


class Bench:
    """The real experiments over the fake engine."""

    def __init__(self, folder: Path) -> None:
        self.engine, catalog = FakeEngine(), SqliteCatalog(folder / "catalog.db")
        self.experiments = ExperimentService(self.engine, catalog, Secrecy(FileVault(folder), catalog))
        self.source = self.engine.create(SandboxRequest())[1].id

    def create(self, repeat: int, **secrets: str) -> None:
        variants = tuple(Variant(label, secrets=(("TOKEN", value),)) for label, value in secrets.items())
        self.experiments.create(
            ExperimentRequest(
                "way", self.source, variants, Scorer(("true",)), args=("true",), repeat=repeat, parallel=1
            )
        )

    def follow(self) -> None:
        deque(self.experiments.events("way"), 0)
        self.experiments.close()


def test_branches_that_begin_later_get_the_new_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, got, begun, go_on = Bench(tmp_path), list[str](), threading.Semaphore(0), threading.Event()
    fork = bench.engine.fork

    def noting(*args: Any, **options: Any) -> Forked:
        got.append(dict(options["variants"][0].secrets)["TOKEN"])
        begun.release()
        assert go_on.wait(60)
        return fork(*args, **options)

    monkeypatch.setattr(bench.engine, "fork", noting)
    bench.create(2, a="the-old-value")
    assert begun.acquire(timeout=60)
    bench.create(2, a="the-new-value")
    go_on.set()
    bench.follow()
    assert got == ["the-old-value", "the-new-value"]


def test_an_error_quotes_no_secret_of_another_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)

    def refusing(*args: Any, **options: Any) -> Forked:
        raise Conflict("neither value-of-the-first nor value-of-the-second will do")

    monkeypatch.setattr(bench.engine, "fork", refusing)
    bench.create(1, a="value-of-the-first", b="value-of-the-second")
    bench.follow()
    errors = [one.error or "" for one in bench.experiments.get("way").branches]
    assert all(error.startswith("neither [secret:") for error in errors), errors
    assert not any("value-of" in error for error in errors)
