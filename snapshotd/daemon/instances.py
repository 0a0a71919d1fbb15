"""Instances of the daemon on one machine: each state directory has a name below /run, by which its sandboxes are found again."""

from __future__ import annotations

import contextlib
from pathlib import Path

from snapshotd.config import UserPlaces

_STATE_DIR = "state-dir"
"""File in the directory of an instance that says whose it is."""


def make_run_dir(where: UserPlaces, instance: str, state_dir: Path) -> Path:
    """Make the directory of an instance below /run."""
    run_dir = where.run_root / instance
    above = () if where.is_closed else (where.run_root,)
    for directory in (*above, run_dir, run_dir / "runc", run_dir / "c"):
        directory.mkdir(mode=0o711, exist_ok=True)
        directory.chmod(0o711)
    (run_dir / _STATE_DIR).write_text(inode_of(state_dir))
    return run_dir


def find_abandoned(root: Path, state_dir: Path) -> str | None:
    """Find the instance whose sandboxes a killed daemon of this state directory has left; None: there is none. The next daemon
    takes its name: under another name it would not find the sandboxes, and they would run for ever."""
    for name in root.glob(f"*/{_STATE_DIR}"):
        with contextlib.suppress(FileNotFoundError):  # its daemon is just ending
            if name.read_text() == inode_of(state_dir):
                return name.parent.name
    return None


def inode_of(state_dir: Path) -> str:
    """The name of a state directory on this machine. Its path will not do, which leads elsewhere in another mount namespace."""
    found = state_dir.stat()
    return f"{found.st_dev}:{found.st_ino}"
