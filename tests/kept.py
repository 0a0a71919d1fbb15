"""What takes a minute to make and is the same for every run, kept in `.cache/tests` of the checkout until what it is
made of changes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "tests"


def cached(name: str, made_of: str, make: Callable[[Path], None]) -> Path:
    """The file or folder `name` in the cache, made unless it is there. Who asks for it while another process makes it
    waits."""
    CACHE.mkdir(parents=True, exist_ok=True)
    stem, dot, suffix = name.partition(".")
    path = CACHE / f"{stem}-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}{dot}{suffix}"
    with open(CACHE / f"{stem}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            fresh = Path(scratch) / "fresh"
            make(fresh)
            os.replace(fresh, path)
        for old in CACHE.glob(f"{stem}-*"):
            if old != path:
                _remove(old)
    return path


def installed(name: str, *requirements: str) -> Path:
    """A folder with packages of PyPI, as `pip install --target` makes it."""

    def install(target: Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(target), *requirements]
        subprocess.run(command, check=True, capture_output=True, timeout=240)

    return cached(name, " ".join(requirements), install)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
