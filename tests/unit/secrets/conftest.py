"""One vault for the tests of a module, each of which records for trajectories of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.secrets.redactor import Redactor
from snapshotd.secrets.vault import Vault


@pytest.fixture(scope="module")
def vault(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vault]:
    opened = Vault(tmp_path_factory.mktemp("state"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def redactor(vault: Vault) -> Redactor:
    return Redactor(vault)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path
