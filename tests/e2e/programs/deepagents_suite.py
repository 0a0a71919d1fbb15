"""The suite for sandboxes of LangChain's standard tests, over `SnapshotdBackend`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from langchain_tests.integration_tests import SandboxIntegrationTests

from snapshotd.client import Sandbox
from snapshotd.integrations.deepagents import SnapshotdBackend


class TestBackend(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def sandbox(self) -> Iterator[SnapshotdBackend]:
        box = Sandbox.create(image="minimal", runtime="runc")
        box.exec("ln -s python3 /usr/bin/python", check=True)  # the suite calls it so
        yield SnapshotdBackend(box)
        box.remove(force=True)
