"""State directories that have an image already, taken in and stored: made once for all processes of a run, and copied
for each daemon. To take an image in costs 3 s of CPU, a copy 0.2 s."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from snapshotd.catalog.sqlite import SqliteCatalog
from tests import way
from tests.e2e.support import Snap, daemon_with, ended

NO_ENGINE = {"DOCKER_HOST": "unix:///run/snapshotd-no-such-engine.sock"}


def state_with(image: Path, shared: Path) -> Path:
    """The state directory of a daemon that was stopped; its default image is this archive. In `shared`, the folder of
    this run. Read only: `daemon_on` works on a copy."""
    folder = shared / f"state of {image.name}"
    with open(shared / f"{image.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            scratch = folder.with_suffix(".scratch")
            with daemon_with(image, scratch, NO_ENGINE) as snap:
                trajectory, _ = snap.create("--runtime", "runc")
                snap("exec", "--wait", "stored", trajectory, "--", "true")  # the repository has the image's files, too
                snap("rm", "--force", trajectory)
            for name in ("daemon.log", "secrets.key", "secrets.db"):
                (scratch / name).unlink()
            layers = scratch / "layers.img"
            if layers.exists():
                _trim(layers)
            os.replace(scratch, folder)
    return folder


def _trim(image: Path) -> None:
    """Give back the blocks of files that are gone, two thirds of it: each daemon gets a copy."""
    with tempfile.TemporaryDirectory() as mounted:
        subprocess.run(["mount", "-o", "loop", image, mounted], check=True)
        try:
            subprocess.run(["fstrim", mounted], check=True)
        finally:
            subprocess.run(["umount", mounted], check=True)


@contextlib.contextmanager
def daemon_on(state: Path, state_dir: Path, env: dict[str, str] | None = None) -> Iterator[Snap]:
    """A daemon on a copy of a prepared state directory. It is stopped at the end, and nothing may be left. The copy goes
    then, unless a test has failed: a run would leave 20 GB."""
    copy_state(state, state_dir)
    with ended(Snap(state_dir, env)) as snap:
        snap("ls")  # starts it
        yield snap
    subprocess.run(way.owning("rm", "-r", state_dir), check=True)


def copy_state(state: Path, target: Path) -> None:
    """A state directory of its own: another instance, which has the same image. Its file system, if it has one, may be
    mounted beside the other's."""
    subprocess.run(way.owning("cp", "-a", "--sparse=always", state, target), check=True)
    layers = target / "layers.img"
    if layers.exists():
        subprocess.run(["xfs_admin", "-U", "generate", layers], check=True, capture_output=True)
    catalog = SqliteCatalog(target / "catalog.db")
    catalog.set_meta("instance", secrets.token_hex(6))
    catalog.close()
