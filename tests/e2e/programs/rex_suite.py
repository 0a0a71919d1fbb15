"""SWE-ReX's own tests of what runs commands, over `RexRuntime`; `SNAPSHOTD_TEST_REX` is the folder of the sources that have
them. They want a runtime on their own machine, with its files: here their temporary folder is one of both places."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from swerex.runtime.abstract import BashAction, CloseBashSessionRequest, Command, CreateBashSessionRequest

from snapshotd.client import Sandbox
from snapshotd.integrations.swe_rex import RexDeployment, RexRuntime

BOX: list[str] = []


class _Action(BashAction):
    timeout: float | None = 60


class _Command(Command):
    timeout: float | None = 60


def _load() -> ModuleType:
    """Their module, with a `conftest` of ours beside it."""
    package = ModuleType("rex_tests")
    package.__path__ = []
    conftest: Any = ModuleType("rex_tests.conftest")
    conftest._Action, conftest._Command = _Action, _Command
    sys.modules |= {"rex_tests": package, "rex_tests.conftest": conftest}
    place = Path(os.environ["SNAPSHOTD_TEST_REX"]) / "tests" / "test_execution.py"
    spec = importlib.util.spec_from_file_location("rex_tests.test_execution", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


globals().update({name: item for name, item in vars(_load()).items() if name.startswith("test_")})


class InBoth(type(Path())):  # type: ignore[misc]
    """A path whose text is read in the sandbox, and written there as well as here."""

    def read_text(self, *args: Any, **kwargs: Any) -> str:
        return Sandbox.connect(BOX[-1]).files.read_text(str(self))

    def write_text(self, data: str, *args: Any, **kwargs: Any) -> int:
        Sandbox.connect(BOX[-1]).files.write(str(self), data)
        return super().write_text(data, *args, **kwargs)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    return InBoth(tmp_path)


@pytest.fixture
async def remote_runtime() -> AsyncIterator[RexRuntime]:
    deployment = RexDeployment(runtime="runc")
    await deployment.start()
    BOX.append(deployment.runtime.box.id)
    await deployment.runtime.box.exec(
        "command -v python || ln -s $(command -v python3) /usr/local/bin/python", check=True
    )
    yield deployment.runtime
    await deployment.stop()


@pytest.fixture
async def runtime_with_default_session(remote_runtime: RexRuntime) -> AsyncIterator[RexRuntime]:
    await remote_runtime.create_session(CreateBashSessionRequest())
    yield remote_runtime
    await remote_runtime.close_session(CloseBashSessionRequest())
