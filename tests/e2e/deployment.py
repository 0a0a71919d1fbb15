"""What `docs/examples/deploy` is built from where there is no registry: a base image of Debian's packages, and wheels.

Both come from the package mirrors of the machine, take a minute, and are kept (tests/kept.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from snapshotd.engine.host.system_packages import PACKAGES
from snapshotd.images.build import build_root
from snapshotd.images.recipes import load_recipe
from tests import long, s3_service
from tests.capabilities import require
from tests.kept import cached

CHECKOUT = Path(__file__).resolve().parents[2]
BASE_IMAGE = "snapshotd-base:test"
SERVICES_IMAGE = "snapshotd-services"
_CONTEXT = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    ".dockerignore",
    "snapshotd",
    "sandbox-images",
    "docs/examples/deploy",
)
_MADE_BY_COMPOSE = {"docs/examples/deploy": ("run", "data", ".env")}
_PYTHON_OF_BOOKWORM = "3.11"


def stage(directory: Path, extras: str = "") -> Path:
    """A copy of what the image is made of, with a wheelhouse, so that nothing is written into the checkout. Returns the
    compose file. `extras`: those of the image, as in `EXTRAS` of the Dockerfile."""
    for name in _CONTEXT:
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (CHECKOUT / name).is_dir():
            shutil.copytree(
                CHECKOUT / name, target, ignore=shutil.ignore_patterns("__pycache__", *_MADE_BY_COMPOSE.get(name, ()))
            )
        else:
            shutil.copy2(CHECKOUT / name, target)
    _fill_wheelhouse(directory, extras)
    return directory / "docs" / "examples" / "deploy" / "compose.yaml"


DOCKER = ("docker",)
"""The engine of DOCKER_HOST."""


def import_base(engine: Sequence[str] = DOCKER) -> None:
    """Make the base image known to an engine, which is the beginning of its commands."""
    subprocess.run([*engine, "import", str(base_archive()), BASE_IMAGE], check=True, capture_output=True, timeout=240)


def make_services_image(directory: Path, engine: Sequence[str] = DOCKER) -> None:
    """Make an image that is a PostgreSQL server or an S3 service, as the environment of fleet.yaml says, known to an engine.
    `directory`: an empty one."""
    recipe = _recipe("postgresql")
    archive = cached("services.tar", recipe, lambda path: _make_base(recipe, path))
    subprocess.run(
        [*engine, "import", str(archive), f"{SERVICES_IMAGE}-base"], check=True, capture_output=True, timeout=240
    )
    shutil.copy2(s3_service.program("seaweedfs"), directory / "weed")
    shutil.copy2(Path(__file__).with_name("services_entry.sh"), directory / "entry")
    (directory / "Dockerfile").write_text(
        f'FROM {SERVICES_IMAGE}-base\nCOPY weed entry /usr/local/bin/\nENTRYPOINT ["sh", "/usr/local/bin/entry"]\n'
    )
    command = [*engine, "build", "--tag", SERVICES_IMAGE, str(directory)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)


def compose_command() -> list[str]:
    """The plugin where Docker has it, else the program of Debian 12."""
    require("compose")
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60, check=False)
    return ["docker", "compose"] if plugin.returncode == 0 else ["docker-compose"]


def base_archive() -> Path:
    """A root with Debian's packages, all that snapshotd needs of them."""
    recipe = _recipe("python3", "python3-venv", *(package.name for package in PACKAGES if package.level == "run"))
    return cached("base.tar", recipe, lambda path: _make_base(recipe, path))


def _recipe(*packages: str) -> str:
    return f'suite = "bookworm"\nvariant = "minbase"\npackages = {json.dumps(packages)}\n'


def _make_base(recipe: str, archive: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="snapshotd-base-", dir="/var/tmp") as scratch:
        folder, root = Path(scratch) / "base", Path(scratch) / "root"
        folder.mkdir()
        root.mkdir()
        (folder / "image.toml").write_text(recipe)
        build_root(load_recipe(folder), root, lambda _: None)
        subprocess.run(
            ["tar", "-C", str(root), "--xattrs", "--numeric-owner", "-cf", str(archive), "."], check=True, timeout=240
        )


def _fill_wheelhouse(project: Path, extras: str) -> None:
    """Our own wheel is built anew each time; it also says which others are needed, for the base image's Python, not for
    ours."""
    house = project / "wheelhouse"
    house.mkdir()
    if long.LONG:
        _pip("wheel", "--no-deps", "--wheel-dir", str(house), str(project))
    else:
        _build_wheel(project, house)
    (own,) = house.iterdir()

    def download(target: Path) -> None:
        _pip(
            "download",
            "--only-binary=:all:",
            "--python-version",
            _PYTHON_OF_BOOKWORM,
            "--dest",
            str(target),
            f"{own}[{extras}]" if extras else str(own),
        )
        (target / own.name).unlink()

    name = f"{extras.replace(',', '_')}_wheels" if extras else "wheels"
    others = cached(name, (project / "pyproject.toml").read_text(), download)
    shutil.copytree(others, house, dirs_exist_ok=True)


def _build_wheel(project: Path, house: Path) -> None:
    """As pip does it, without a new environment for hatchling each time, which is most of pip's work."""
    (needed,) = tomllib.loads((project / "pyproject.toml").read_text())["build-system"]["requires"]
    backend = cached("backend", needed, lambda target: _pip("install", "--target", str(target), needed))
    program = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    env = {**os.environ, "PYTHONPATH": str(backend)}
    subprocess.run([sys.executable, "-c", program, str(house)], cwd=project, env=env, check=True, timeout=240)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=240, check=False)
    assert result.returncode == 0, (command, result.stdout[-2000:], result.stderr[-2000:])
