"""A package that an integration does not know, too old or too new, is refused before any of it is imported; and one that
lacks a module that it needs, with the name of that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from snapshotd.engine.host.integrations import INTEGRATIONS
from snapshotd.errors import Unsupported

ROOT = Path(__file__).parents[3]
COMMANDS = {"mcp": ["mcp"], "e2b": ["serve", "--e2b"]}
"""Servers have no module for programs: a command starts them."""


def _module(extra: str) -> Path:
    """The folder of an integration. Ray has none: it is a way of the client (snapshotd/client/fleet/ray.py)."""
    return ROOT / "snapshotd" / "integrations" / extra.replace("-", "_")


def _beside(numbers: tuple[int, ...], step: int) -> str:
    return ".".join(map(str, (*numbers[:-1], max(0, numbers[-1] + step))))


def _run(extra: str, version: str, folder: Path, **env: str) -> tuple[str, str]:
    """Imports an integration, or starts its server, where `folder` has another version of its package; the last line that
    it says, which is one sentence with the command that helps."""
    one = INTEGRATIONS[extra]
    about = folder / f"{one.package.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {one.package}\nVersion: {version}\n")
    done = subprocess.run(
        [sys.executable, "-m", "snapshotd", *COMMANDS[extra]]
        if extra in COMMANDS
        else [sys.executable, "-c", f"import snapshotd.integrations.{_module(extra).name}"],
        env={
            "PYTHONPATH": f"{folder}:{ROOT}",
            "SNAPSHOTD_STATE_DIR": str(folder / "state"),
            "PATH": "/usr/bin:/bin",
            **env,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("snapshotd: " if extra in COMMANDS else "ImportError: "), done.stderr
    assert said.endswith(f"run `{one.install}`")
    assert done.returncode == (Unsupported.exit_code if extra in COMMANDS else 1)
    assert not (folder / "state").exists()
    return said, done.stderr


@pytest.mark.parametrize("age", ["old", "new"])
@pytest.mark.parametrize("extra", [one for one in INTEGRATIONS if _module(one).is_dir()])
def test_another_version_is_one_sentence(extra: str, age: str, tmp_path: Path) -> None:
    one = INTEGRATIONS[extra]
    version = _beside(one.least, -1) if age == "old" else _beside(one.below, 0)
    if age == "old" and not one.least[-1]:
        version = "0.0"
    said, _ = _run(extra, version, tmp_path)
    assert f"{one.package} is {version}, but" in said


NEEDED = {
    "claude-agent": "claude_agent_sdk",
    "deepagents": "deepagents",
    "e2b": "python_multipart",
    "inspect-ai": "inspect_ai",
    "langgraph": "ormsgpack",
    "mcp": "mcp_types",
    "mini-swe-agent": "minisweagent",
    "nemo-gym": "nemo_gym",
    "openai-agents": "griffe",
    "otel": "opentelemetry",
    "swe-rex": "swerex",
}
"""A module of another package where a checkout has the integration's, else one of its own."""
HIDES = """import os, sys
class Hides:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["HIDDEN"]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hides())
"""


@pytest.mark.parametrize("extra", NEEDED)
def test_a_module_that_is_missing_is_one_sentence(extra: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDES)
    version = ".".join(map(str, INTEGRATIONS[extra].least))
    said, errors = _run(extra, version, tmp_path, HIDDEN=NEEDED[extra])
    assert f"the module {NEEDED[extra]}, which snapshotd[{extra}] needs, is not installed" in said
    assert errors.count("Traceback") == (0 if extra in COMMANDS else 1)
