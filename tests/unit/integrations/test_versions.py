"""A package that an integration does not know, too old or too new, is refused before any of it is imported."""

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


@pytest.mark.parametrize("age", ["old", "new"])
@pytest.mark.parametrize("extra", [one for one in INTEGRATIONS if _module(one).is_dir()])
def test_another_version_is_one_sentence(extra: str, age: str, tmp_path: Path) -> None:
    one = INTEGRATIONS[extra]
    version = _beside(one.least, -1) if age == "old" else _beside(one.below, 0)
    if age == "old" and not one.least[-1]:
        version = "0.0"
    about = tmp_path / f"{one.package.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {one.package}\nVersion: {version}\n")
    done = subprocess.run(
        [sys.executable, "-m", "snapshotd", *COMMANDS[extra]]
        if extra in COMMANDS
        else [sys.executable, "-c", f"import snapshotd.integrations.{_module(extra).name}"],
        env={
            "PYTHONPATH": f"{tmp_path}:{ROOT}",
            "SNAPSHOTD_STATE_DIR": str(tmp_path / "state"),
            "PATH": "/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("snapshotd: " if extra in COMMANDS else "ImportError: "), done.stderr
    assert f"{one.package} is {version}, but" in said
    assert said.endswith(f"run `{one.install}`")
    assert done.returncode == (Unsupported.exit_code if extra in COMMANDS else 1)
    assert not (tmp_path / "state").exists()
