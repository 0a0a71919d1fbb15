"""What tests of the library share: Pythons, a shell, something that runs meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

PYTHON = os.environ.get("SNAPSHOTD_TEST_AGENT_PYTHON", sys.executable)
OLDEST = (3, 8)
Shell = Callable[..., "subprocess.CompletedProcess[str]"]


def meanwhile(function: Callable[[], Any]) -> Future[Any]:
    """Run it in the background; `result(60)` waits for it."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return future


def environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""  # it has just ended


def pythons() -> list[Path]:
    """The one that runs this, and one of every other version that pyenv has, from the oldest that the library
    supports."""
    found = {sys.version_info[:2]: Path(sys.executable)}
    for path in sorted(
        (Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions").glob("3.*.*/bin/python3")
    ):
        major, minor = path.parts[-3].split(".")[:2]
        if minor.isdigit() and (int(major), int(minor)) >= OLDEST:
            found.setdefault((int(major), int(minor)), path)
    return [found[version] for version in sorted(found)]


def run(python: Path, library: Path, socket_path: Path, *command: str) -> str:
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(library),
        "SNAPSHOTD_AGENT_SOCKET": str(socket_path),
        "PYTHONWARNINGS": "error",
    }
    folder = socket_path.parent
    done = subprocess.run(
        [str(python), *command], env=env, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout
