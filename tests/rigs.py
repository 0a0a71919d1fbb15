"""Rigs for tests of the runtime drivers, in directories that container root, an unprivileged id of the host, can
reach."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from snapshotd.runtime.docker import DockerRuntime
from snapshotd.runtime.keeper import KeeperClient
from snapshotd.runtime.runc import RuncRuntime
from snapshotd.runtime.starter import Starter
from snapshotd.types import IdMap
from tests.contracts.runtime import Rig
from tests.dockerd import Engine

ID_MAP = IdMap(base=100_000, count=65_536)


@contextlib.contextmanager
def work_directory() -> Iterator[Path]:
    """An empty directory that everybody may search; removed at the end. Not below pytest's own, which is closed to
    others."""
    directory = Path(tempfile.mkdtemp(prefix="snapshotd-runtime-", dir="/var/tmp"))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def runc(instance: str, directory: Path, tree: Path, id_map: IdMap | None) -> Rig:
    """A rig for the runc driver, whose run directory is `runc` in `directory`."""
    keeper, starter = KeeperClient(directory / "keeper" / "keeper.sock"), Starter()
    runtime = RuncRuntime(instance, directory / "runc", id_map, keeper=keeper, starter=starter)
    return Rig(
        runtime, directory, tree, _init(), keeper=keeper, starter=starter, with_user_namespaces=id_map is not None
    )


def docker(instance: str, directory: Path, tree: Path, engine: Engine) -> Rig:
    """A rig for the Docker driver, whose run directory is `docker` in `directory`."""
    keeper, starter = KeeperClient(directory / "keeper" / "keeper.sock"), Starter()
    runtime = DockerRuntime(instance, engine.host, run_dir=directory / "docker", keeper=keeper, starter=starter)
    places = (engine.data_root, engine.exec_root)
    return Rig(runtime, directory, tree, _init(), places, keeper=keeper, starter=starter)


def _init() -> Path:
    program = shutil.which("catatonit")
    assert program is not None, "catatonit is not installed"
    return Path(program)
