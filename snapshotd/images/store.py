"""The images: root file systems that sandboxes start from, where they lie, and every way to get one.

    <layers>/images/<image id>/root        the files, immutable once the catalog knows the image
    <layers>/images/.tmp-<image id>/root   being made or removed; rubbish after a crash

Write order: files, then durable (syncfs), then renamed to their final name, then the catalog's row, which is the
commit. Removal goes the other way round. Opening the store removes the files that no row refers to, so only one process
may open it (the daemon, under its lock).

Concurrency: thread-safe. Images are made one at a time: the second of two runs that need the same missing image waits
and finds it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from snapshotd.errors import NO_ROOM, InternalError, NotFound, OutOfSpace, SandboxFailed, Unsupported, UsageError
from snapshotd.formats.ingest_nodes import printable
from snapshotd.images import build, machine, recipes
from snapshotd.images.archive_file import open_archive
from snapshotd.images.base import ImageCatalog, Progress
from snapshotd.images.config import DEFAULT_WORKDIR
from snapshotd.images.root import MADE_AT_NS, measure, prepare_root
from snapshotd.images.shared import SharedBuilds
from snapshotd.images.sources import Source, of_archive, open_source
from snapshotd.kernel import files
from snapshotd.types import Image, ImageID, new_id

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@-]{0,254}")
"""An image's name: the form of Docker's references, which includes our own names."""
_TMP = ".tmp-"


@dataclass(frozen=True, slots=True)
class _Facts:
    """The fields of a new image's row besides its files."""

    name: str
    source: str
    source_id: str
    env: tuple[tuple[str, str], ...] = ()
    workdir: str = DEFAULT_WORKDIR


class ImageStore:
    """The text of `base.py` holds for all methods.

    Images in a directory of the layer store, which must exist. Opening it removes what no row refers to. `builds`:
    those that other stores of this machine have made."""

    def __init__(self, layers_dir: Path, catalog: ImageCatalog, builds: SharedBuilds) -> None:
        self._dir = layers_dir / "images"
        self._dir.mkdir(mode=0o700, exist_ok=True)
        self._catalog = catalog
        self._builds = builds
        self._making = threading.RLock()
        self._making_empty = threading.Lock()
        """An empty image takes no time, so it waits for no build, which takes a minute."""
        self._sweep()

    def _sweep(self) -> None:
        known = {image.id for image in self._catalog.images.list()}
        with _open_dir(self._dir) as fd:
            for name in os.listdir(fd):
                if name not in known:
                    files.remove_tree(fd, name)

    # -- looking -------------------------------------------------------------------------------------------------------

    def list(self) -> list[Image]:
        """All images, newest first."""
        return self._catalog.images.list()

    def find(self, ref: str) -> Image:
        """By name or unique id prefix."""
        return self._catalog.images.find(ref)

    def find_made(self, name: str) -> Image:
        """As `find`, for a caller who may make none: NotFound says how the daemon's owner does."""
        try:
            return self.find(name)
        except NotFound:
            shown, verb = (_shown(name[:80]), "build" if name in recipes.shipped() else "import")
            raise NotFound(
                f"this daemon has no image {shown}, and your token may make none: ask the daemon's owner for "
                f"`snapshotd image {verb} {shown}` there, or take one that `snapshotd image ls` lists"
            ) from None

    def ensure(self, name: str, progress: Progress) -> Image:
        """The image that `name` stands for, made if need be: an existing one, else a recipe that comes with snapshotd,
        else a Docker image.

        NotFound names the next step. Building takes a minute, importing seconds; having it already, microseconds.
        """
        try:
            return self.find(name)
        except NotFound:
            pass
        with self._making:
            try:
                return self.find(name)  # another thread made it meanwhile
            except NotFound:
                pass
            if name in recipes.shipped():
                return self.build(name, None, progress)
            try:
                return self._from_elsewhere(name, name, progress)
            except (NotFound, Unsupported) as exc:  # no such image, or no engine
                known = ", ".join(sorted({*recipes.shipped(), *(i.name for i in self.list() if i.name)}))
                message = (
                    f"there is no image {_shown(name)} here (known: {known}), and {exc.message}; "
                    f"`snapshotd image import` also takes a folder or an archive"
                )
                raise NotFound(message) from exc

    def _from_elsewhere(self, source: str, name: str, progress: Progress) -> Image:
        """From the Docker engine, else from the registry that a name leads to. NotFound, Unsupported: neither has it."""
        from snapshotd.images.registry import RegistryBlobs, is_address  # few daemons need it: 70 ms to import

        try:
            return self._from_docker(source, name, progress)
        except (NotFound, Unsupported) as exc:
            if not is_address(source):
                raise
            none_here = exc.message
        progress(f"asking the registry for {source}")
        blobs = RegistryBlobs(source)
        with contextlib.closing(blobs), self._making:
            try:
                archive = of_archive("registry", open_archive(blobs, f"the image {source} of the registry"))
            except (NotFound, SandboxFailed) as exc:
                raise NotFound(f"{none_here}, and {exc.message}") from exc
            return self._from_source(archive, source, _check_name(name), progress)

    # -- making --------------------------------------------------------------------------------------------------------

    def build(self, recipe: str, name: str | None, progress: Progress) -> Image:
        """From a recipe's name or folder; one that is unchanged is not built again."""
        found = recipes.find_recipe(recipe)
        own = machine.content() if found.variant == "machine" else None
        facts = _Facts(
            _check_name(name or found.name),
            f"recipe {found.name}",
            found.source_id if own is None else f"{found.source_id}:{own.digest}",
            found.env,
            found.workdir,
        )
        with self._making:
            if have := self._reuse(facts, progress):
                return have
            if own is not None:
                progress(f"making the image {facts.name} of this machine's own programs")
                return self._make(facts, lambda root: machine.build_root(own, root))
            return self._make(facts, lambda root: self._build_packages(found, root, progress))

    def _build_packages(self, recipe: recipes.Recipe, root: Path, progress: Progress) -> None:
        build.check_ids()

        def anew() -> None:
            build.check_available()
            progress(f"building the image {recipe.name}: this machine does it once, and it takes a minute or two")
            build.build_root(recipe, root, progress)

        self._builds.fill(build.digest(recipe), root, anew, progress)

    def import_(self, source: str, name: str | None, progress: Progress) -> Image:
        """From a folder, a root file system tar, a `docker save` or OCI archive, an OCI layout, or a Docker image name.

        A path is taken as a path when it exists or looks like one (it begins with `/` or `.`); `docker:NAME` is always
        Docker's. One that we have already (same content) is not taken again.
        """
        if not source:
            raise UsageError("the import source is empty; give a folder, an archive or a Docker image name")
        path = Path(source)
        looks_like_path = source.startswith(("/", "./", "../")) or source in (".", "..")
        if not source.startswith("docker:") and (looks_like_path or path.exists()):
            return self._from_path(path, name, progress)
        docker_name = source.removeprefix("docker:")
        try:
            return self._from_elsewhere(docker_name, name or docker_name, progress)
        except NotFound as exc:
            raise NotFound(
                f"{exc.message}, or give the path of a folder or archive (there is none at {source})"
            ) from exc

    def _from_docker(self, docker_name: str, name: str, progress: Progress) -> Image:
        from snapshotd.images.docker import DockerImages

        checked, engine = _check_name(name), DockerImages()
        with self._making:
            config = engine.inspect(docker_name)
            facts = _Facts(checked, f"docker {docker_name}", config.source_id, config.env, config.workdir)

            def fill(root: Path) -> None:
                with _open_dir(root) as fd:
                    self._warn(engine.extract(config, fd, progress).warnings, progress)

            return self._reuse(facts, progress) or self._make(facts, fill)

    def _from_path(self, path: Path, name: str | None, progress: Progress) -> Image:
        checked = _check_name(name or _default_name(path))
        with self._making, open_source(path, self._dir, progress) as source:
            return self._from_source(source, str(path), checked, progress)

    def _from_source(self, source: Source, where: str, name: str, progress: Progress) -> Image:
        facts = _Facts(name, f"{source.kind} {where}", source.source_id, source.env, source.workdir)
        return self._reuse(facts, progress) or self._make(facts, lambda root: self._extract(source, root, progress))

    def _extract(self, source: Source, root: Path, progress: Progress) -> None:
        with _open_dir(root) as fd:
            for report in source.extract(fd, progress):
                self._warn(report.warnings, progress)

    @staticmethod
    def _warn(warnings: tuple[str, ...], progress: Progress) -> None:
        for warning in warnings:
            progress(f"warning: {warning}")

    def _reuse(self, facts: _Facts, progress: Progress) -> Image | None:
        """An image with this content: itself if the name is right, else a copy of it under the new name."""
        same = [image for image in self.list() if image.source_id == facts.source_id]
        for image in same:
            if image.name == facts.name:
                progress(f"the image {image.name} is there already and unchanged")
                return image
        if not same:
            return None
        progress(f"copying the image {same[0].name or same[0].id}, which has the same content")
        return self._make(facts, lambda root: _copy_root(self._dir / same[0].id / "root", root))

    def empty(self, env: tuple[tuple[str, str], ...], workdir: str) -> Image:
        """An image with nothing in it, for whole trees from elsewhere; made once for each pair of defaults."""
        with self._making_empty:
            source_id = "empty:" + hashlib.sha256(json.dumps([env, workdir]).encode()).hexdigest()
            for image in self.list():
                if image.source_id == source_id:
                    return image
            facts = _Facts(f"empty-{source_id[6:18]}", "nothing, for what was imported", source_id, env, workdir)
            return self._make(facts, lambda _: None, prepare=False)

    def adopt(self, image: Image, write: Callable[[Path], None]) -> None:
        """Have an image of another node of the fleet, with its id, unless it is here. `write` fills an empty root with its
        files; it is not called where another image here has the same stored tree. Its name is left out when taken."""
        with self._making:
            here = self.list()
            if any(one.id == image.id for one in here):
                return
            facts = _Facts(image.name, image.source, image.source_id, image.env, image.workdir)
            same = next((one for one in here if one.tree is not None and one.tree == image.tree), None)
            if same is not None:
                source = self._dir / same.id / "root"
                write = partial(_copy_root, source)
            if any(one.name == image.name for one in here):
                image = replace(image, name="")
            self._make(facts, write, prepare=False, row=image)

    def _make(
        self, facts: _Facts, fill: Callable[[Path], None], *, prepare: bool = True, row: Image | None = None
    ) -> Image:
        """Make an image: `fill` gets the empty root directory, `prepare` adds the files that every sandbox needs. `row`: what is
        recorded of one that is made already. Nothing is left behind when it fails."""
        image_id = ImageID(new_id()) if row is None else row.id
        tmp = self._dir / f"{_TMP}{image_id}"
        try:
            (tmp / "root").mkdir(parents=True)
            # The container's root may be an unprivileged id that must get through; above, the store is 0700.
            os.chmod(tmp, 0o711)
            files.give(str(tmp / "root"), 0, 0)  # an ordinary user's daemon is another user in its namespace
            os.chmod(tmp / "root", 0o755)
            os.utime(tmp / "root", ns=(MADE_AT_NS, MADE_AT_NS))  # many an archive says nothing of its root
            fill(tmp / "root")
            with _open_dir(tmp / "root") as fd:
                if prepare:
                    prepare_root(fd)
                size, count = measure(fd)
                files.sync_filesystem(fd)
            os.rename(tmp, self._dir / image_id)
            with _open_dir(self._dir) as fd:
                os.fsync(fd)
            now = time.time_ns()
            made = row or Image(
                image_id, facts.name, facts.source, facts.source_id, size, count, now, facts.env, facts.workdir
            )
            self._catalog.images.add(made)
        except OSError as exc:
            self._discard(image_id)
            kind = OutOfSpace if exc.errno in NO_ROOM else InternalError
            raise kind(
                f"the image {facts.name} cannot be written to {self._dir}: {exc.strerror or exc}; check the disk"
            ) from exc
        except BaseException:
            self._discard(image_id)
            raise
        self._catalog.flush()
        return made

    def _discard(self, image_id: ImageID) -> None:
        with _open_dir(self._dir) as fd:
            for name in (f"{_TMP}{image_id}", image_id):
                files.remove_tree(fd, name)

    # -- removing ------------------------------------------------------------------------------------------------------

    def remove(self, ref: str) -> None:
        """Forget an image and delete its files. Conflict while a trajectory uses it."""
        image = self.find(ref)
        self._catalog.images.remove(image.id)
        self._catalog.flush()  # before the files go: after a power cut there must be no row without them
        with _open_dir(self._dir) as fd:
            os.rename(image.id, f"{_TMP}{image.id}", src_dir_fd=fd, dst_dir_fd=fd)
            files.remove_tree(fd, f"{_TMP}{image.id}")


def _open_dir(path: Path) -> AbstractContextManager[int]:
    return files.closing_fd(os.open(path, files.DIR_FLAGS))


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{_shown(name)!r} cannot be an image's name; use letters, digits, and `_.:/@-` after the first"
        )
    return name


def _shown(name: str) -> str:
    """A name that a user gave, which may be no Unicode."""
    return printable(name.encode(errors="backslashreplace"))


def _default_name(path: Path) -> str:
    """A file's or folder's own name without the endings of archives."""
    name = re.sub(r"(\.(tar|tgz|oci|docker|gz|xz|zst))+$", "", path.resolve().name)
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-._") or "imported"


def _copy_root(source: Path, target: Path) -> None:
    """Copy an image's root, sharing its extents where the file system can. The tree is ours and does not change."""
    program = shutil.which("cp")
    if program is None:
        raise InternalError("the program cp is missing on this machine")
    command = [program, "-a", "--reflink=auto", "--sparse=auto", "--", f"{source}/.", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise OutOfSpace(f"the image in {source} cannot be copied: {result.stderr.strip()[:300]}; check the disk")
