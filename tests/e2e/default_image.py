"""The image that a user's daemon has, built as a user builds it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from snapshotd.images.recipes import load_recipe, shipped
from tests import built_images
from tests.e2e.support import Snap, ended
from tests.kept import cached

BUILD_TIMEOUT_S = 1200
"""Packages come over the network, and other tests have the processors."""


def default_archive(shared: Path) -> Path:
    """An archive as `docker save` writes it. Built again only if the recipe or the modules that build it have changed;
    in the long set once a run, whose folder is `shared`."""
    return cached("default.tar", built_images.made_of("default", shared) + Path(__file__).read_text(), _make)


def _make(archive: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="snapshotd-default-", dir="/var/tmp"))
    snap = Snap(folder / "state", {"SNAPSHOTD_IMAGE_BUILDS": str(folder / "builds")})  # none of another version
    snap.timeout_s = BUILD_TIMEOUT_S
    try:
        with ended(snap):
            snap("image", "build", "default")
            _, first = snap.create("--runtime", "runc")
            snap("restore", first, "--to", folder / "root")
            (folder / "root").chmod(0o755)  # what is restored is closed to others, for the setuid programs in it
            built_images.write_archive(folder / "root", load_recipe(shipped()["default"]), archive)
    finally:
        snap.stop_daemon()  # one may still work in there after a failure
        shutil.rmtree(folder)
