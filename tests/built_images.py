"""Images built from the shipped recipes, once for all processes of a run: a build is half a minute of work, or a whole
one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from snapshotd import images
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.images.recipes import Recipe, load_recipe, shipped
from snapshotd.images.shared import SharedBuilds
from snapshotd.images.store import ImageStore
from tests import long
from tests.kept import cached

RECIPE = "essential"
"""The smallest one of Debian's packages: they are the same on every machine."""
SAID = "said.json"
"""In the folder of a build: what the store said meanwhile."""


def minimal(shared: Path) -> Path:
    """A folder with an image store (`layers`, `catalog.db`) that has built `essential`. Read only. Built again only if
    what it is made of has changed; in the long set once a run, whose folder is `shared`."""

    def make(folder: Path) -> None:
        (folder / "layers").mkdir(parents=True)
        build_minimal(folder)

    return cached("minimal_store", made_of(RECIPE, shared), make)


def build_minimal(folder: Path) -> None:
    """Build it in a folder with an empty directory `layers`."""
    catalog, said = SqliteCatalog(folder / "catalog.db"), list[str]()
    ImageStore(folder / "layers", catalog, SharedBuilds(folder / "builds")).build(RECIPE, None, said.append)
    shutil.rmtree(folder / "builds")
    catalog.close()
    (folder / SAID).write_text(json.dumps(said))


def minimal_archive(shared: Path) -> Path:
    """The same as `docker save` would write it."""

    def make(archive: Path) -> None:
        (image,) = (minimal(shared) / "layers/images").iterdir()
        write_archive(image / "root", load_recipe(shipped()[RECIPE]), archive)

    return cached("minimal.tar", made_of(RECIPE, shared), make)


def made_of(recipe: str, shared: Path) -> str:
    """What a built image depends on, but for Debian's packages."""
    modules = [*sorted(Path(images.__file__).parent.glob("*.py")), Path(__file__)]
    text = "".join(path.read_text() for path in modules) + load_recipe(shipped()[recipe]).source_id
    return text + (str(shared) if long.LONG else "")


def write_archive(root: Path, recipe: Recipe, archive: Path) -> None:
    """The files, and what the recipe says of environment and working directory."""
    with tempfile.TemporaryDirectory(prefix="snapshotd-archive-", dir="/var/tmp") as scratch:
        layer = Path(scratch) / "layer.tar"
        subprocess.run(["tar", "-C", root, "--xattrs", "-cf", layer, "."], check=True)
        with open(layer, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        config = {"Env": [f"{name}={value}" for name, value in recipe.env], "WorkingDir": recipe.workdir}
        machine = {"os": "linux", "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]}
        data = json.dumps(
            {**machine, "config": config, "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]}}
        ).encode()
        name = f"{hashlib.sha256(data).hexdigest()}.json"
        (Path(scratch) / name).write_bytes(data)
        (Path(scratch) / "manifest.json").write_text(json.dumps([{"Config": name, "Layers": ["layer.tar"]}]))
        subprocess.run(["tar", "-C", scratch, "-cf", archive, "manifest.json", name, "layer.tar"], check=True)
