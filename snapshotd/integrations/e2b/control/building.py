"""Builds templates: a sandbox of an image or of another template, in which the steps are made; its last snapshot is the
template. Each step is a call, so `snapshotd log` shows a build like any other work.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import posixpath
import re
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from snapshotd.api.record import Json
from snapshotd.client import AsyncSnapshotd
from snapshotd.errors import CommandNotFound, NotFound, SnapshotdError
from snapshotd.integrations.e2b.failures import WireError
from snapshotd.integrations.e2b.people import People
from snapshotd.integrations.e2b.records import Box, Build, variant_of

USER = "user"
_FIRST_ID = 1000
_STEP_S = 3600.0
_LOG_MAX = 10_000
_COPY_MAX_BYTES = 4 << 30
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


async def begin_sandbox(
    client: AsyncSnapshotd, people: People, image: str, network: str, tenant: str
) -> tuple[str, str]:
    """A sandbox of an image, with the user that E2B's sandboxes have: its trajectory, and the snapshot with that user."""
    info, _ = await client.create(image=image, network=network, tenant=tenant)
    try:
        names = await people.names(info.id)
        if USER not in names.people:
            number = next(n for n in range(_FIRST_ID, 60_000) if n not in names.users and n not in names.groups)
            rows = {
                "/etc/passwd": f"{USER}:x:{number}:{number}::/home/{USER}:{await _shell(client, info.id)}\n",
                "/etc/group": f"{USER}:x:{number}:\n",
            }
            files = {path: await _read(client, info.id, path) + row.encode() for path, row in rows.items()}
            await client.write_files(info.id, files)
            await people.names(info.id, afresh=True)
        await client.make_dir(info.id, f"/home/{USER}", user=USER)
        with contextlib.suppress(CommandNotFound):  # every sandbox has this directory, where some clients work
            await client.exec(info.id, ["chown", f"{USER}:", "/workspace"], cwd="/", idle_timeout=0)
        if await _is_there(client, info.id, "/etc/sudoers.d"):
            await client.write_file(
                info.id, f"/etc/sudoers.d/{USER}", f"{USER} ALL=(ALL:ALL) NOPASSWD: ALL\n", mode=0o440
            )
        return info.id, (await client.trajectory(info.id)).head
    except BaseException:
        await client.remove(info.id, force=True)
        raise


async def _shell(client: AsyncSnapshotd, sandbox: str) -> str:
    return "/bin/bash" if await _is_there(client, sandbox, "/bin/bash") else "/bin/sh"


async def _is_there(client: AsyncSnapshotd, sandbox: str, path: str) -> bool:
    try:
        await client.stat_file(sandbox, path)
    except NotFound:
        return False
    return True


async def _read(client: AsyncSnapshotd, sandbox: str, path: str) -> bytes:
    try:
        data = b"".join([piece async for piece in client.read_file(sandbox, path)])
    except NotFound:
        return b""
    return data if not data or data.endswith(b"\n") else data + b"\n"


@dataclass(slots=True)
class TemplateBuild:
    """A build that waits, goes on, or has ended. `files`: the folder of uploaded archives."""

    id: str
    owner: str
    template: str
    name: str
    tags: list[str]
    cpus: float | None
    memory_mb: int | None
    status: str = "waiting"
    reason: Json | None = None
    log: list[Json] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


def note(building: TemplateBuild, message: str, step: int | None = None, level: str = "info") -> None:
    """One more line of a build's log."""
    if len(building.log) < _LOG_MAX:
        told = {"timestamp": moment(time.time()), "level": level, "message": _ANSI.sub("", message)}
        building.log.append(told if step is None else {**told, "step": str(step)})


def moment(at: float) -> str:
    """A time in the form of the API."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at % 1 * 1000):03d}Z"


class _StepError(Exception):
    """A step of a build did not do."""


class Builder:
    """Makes the steps of one build. `file_of`: the uploaded archive of a digest."""

    def __init__(
        self,
        client: AsyncSnapshotd,
        people: People,
        building: TemplateBuild,
        file_of: Callable[[str], Path],
        network: str,
    ) -> None:
        self._client, self._people, self._building, self._file_of = client, people, building, file_of
        self._network = network
        self._made = Build(building.id, "", "", 0.0, cpus=building.cpus, memory_mb=building.memory_mb)

    async def build(
        self, image: str | None, base: Build | None, steps: list[Json], start: str | None, ready: str | None
    ) -> Build:
        """Make the steps in a sandbox of an image, or of another build. Errors: those of the daemon, and WireError, with the step in
        the building's `reason`."""
        made, building = self._made, self._building
        made.start, made.ready = start, ready
        if base is not None:
            forked = await self._client.fork(
                base.snapshot, variants={"build": {**variant_of(made), "network": self._network}}, idle_timeout=0
            )
            made.trajectory = forked.trajectories[0].id
            made.env, made.user, made.workdir = dict(base.env), base.user, base.workdir
            made.start, made.ready = start or base.start, ready or base.ready
        else:
            assert image is not None
            await self._client.ensure_image(image, progress=lambda *told: note(building, " ".join(map(str, told))))
            made.trajectory, _ = await begin_sandbox(self._client, self._people, image, self._network, building.owner)
        try:
            for number, step in enumerate(steps):
                note(
                    building,
                    f"[{number + 1}/{len(steps)}] {step.get('type')} {' '.join(map(str, step.get('args') or []))}",
                    number,
                )
                try:
                    await self._step(number, step)
                except (SnapshotdError, WireError, _StepError) as exc:
                    building.reason = {"message": str(exc), "step": str(number + 1)}
                    raise WireError("invalid_argument", str(exc)) from exc
            await self._client.stop(made.trajectory)
            made.snapshot = (await self._client.trajectory(made.trajectory)).head
            made.built_at = time.time()
            return made
        except BaseException:
            with contextlib.suppress(SnapshotdError):
                await self._client.remove(made.trajectory, force=True)
            raise

    async def _step(self, number: int, step: Json) -> None:
        kind, args = str(step.get("type", "")).upper(), [str(one) for one in step.get("args") or []]
        if kind == "RUN" and args:
            await self._run(number, args[0], (args[1] if len(args) > 1 else "") or self._made.user)
        elif kind == "COPY" and len(args) >= 2:
            await self._copy(args, str(step.get("filesHash", "")))
        elif kind == "ENV" and len(args) % 2 == 0:
            self._made.env |= dict(zip(args[::2], args[1::2], strict=True))
        elif kind == "WORKDIR" and len(args) == 1:
            self._made.workdir = await self._path(args[0], self._made.user)
            await self._client.make_dir(self._made.trajectory, self._made.workdir, user=self._made.user)
        elif kind == "USER" and len(args) == 1:
            await self._people.find(self._box(args[0]), args[0])
            self._made.user = args[0]
        else:
            raise _StepError(f"the step {kind or 'without a type'} with {len(args)} arguments is not known")

    async def _run(self, number: int, command: str, user: str) -> None:
        person = await self._people.find(self._box(user), user)
        lines = _Lines(lambda line: note(self._building, line, number))
        options: dict[str, Any] = {
            "cwd": self._made.workdir or person.home,
            "env": {"HOME": person.home, "USER": user, "LOGNAME": user, **self._made.env},
            "user": user,
            "on_output": lambda _, data: lines.take(data),
            "timeout": _STEP_S,
            "idle_timeout": 0,
        }
        try:
            done = await self._client.exec(self._made.trajectory, ["/bin/bash", "-l", "-c", command], **options)
        except CommandNotFound:
            done = await self._client.exec(self._made.trajectory, ["/bin/sh", "-l", "-c", command], **options)
        lines.end()
        if done.exit_code != 0:
            raise _StepError(f"failed to run command {command!r}: exit status {done.exit_code}")

    async def _copy(self, args: list[str], digest: str) -> None:
        source, to, user, mode = [*args, "", ""][:4]
        if mode and not re.fullmatch(r"[0-7]{1,5}", mode):
            raise _StepError(f"{mode!r} is no mode; give octal digits")
        path = await self._path(to, user or self._made.user)
        into = to.endswith("/") or to in (".", "") or await self._is_directory(path)
        with tempfile.TemporaryFile() as moved:
            await asyncio.to_thread(move_members, self._file_of(digest), moved, source, path, into, mode)
            moved.seek(0)
            await self._client.write_archive(self._made.trajectory, "/", moved, user=user or self._made.user)

    async def _is_directory(self, path: str) -> bool:
        try:
            return (await self._client.stat_file(self._made.trajectory, path)).is_dir
        except NotFound:
            return False

    async def _path(self, path: str, user: str) -> str:
        person = await self._people.find(self._box(user), user)
        return self._people.path(self._box(user), person, path)

    def _box(self, user: str) -> Box:
        return Box(self._made.trajectory, "", "", 0.0, 0.0, user=user, workdir=self._made.workdir)


class _Lines:
    """Cuts output into lines."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say, self._rest = say, b""

    def take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._say(line.decode(errors="replace").rstrip("\r"))

    def end(self) -> None:
        if self._rest:
            self._say(self._rest.decode(errors="replace"))


def move_members(archive: Path, out: Any, source: str, to: str, into: bool, mode: str) -> None:
    """Write the archive of a COPY anew, with its members where they are to be: a file at `to`, or with `into` below it; of
    a directory, what is in it; of a pattern, each that it fits. Members are named from the root of the client's folder.
    WireError: a name leads out of it, or the archive cannot be read."""
    source = posixpath.normpath(source)
    try:
        with tarfile.open(archive) as given, tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as made:
            members = [one for one in given if one.isfile() or one.isdir() or one.issym() or one.islnk()]
            names = {id(one): posixpath.normpath(one.name) for one in members}
            files, total = {names[id(one)]: one for one in members if one.isfile()}, 0
            for name in names.values():
                if name.startswith(("/", "../")) or name == "..":
                    raise WireError(
                        "invalid_argument", f"the archive has {name!r}, which leads out of the client's folder"
                    )
            is_file = any(names[id(one)] == source and not one.isdir() for one in members)
            is_pattern = not any(name == source or name.startswith(f"{source}/") for name in names.values())
            for one in members:
                place = _place(names[id(one)], source, to, is_file=is_file, is_pattern=is_pattern, into=into)
                if place is None:
                    continue
                held = files.get(posixpath.normpath(one.linkname)) if one.islnk() else one if one.isfile() else None
                if one.islnk():
                    if held is None:
                        raise WireError(
                            "invalid_argument", f"the archive has no file {one.linkname!r}, to which {one.name!r} links"
                        )
                    one.type, one.size = tarfile.REGTYPE, held.size
                total += one.size if held else 0
                if total > _COPY_MAX_BYTES or one.issparse() or (held is not None and held.issparse()):
                    raise WireError("invalid_argument", "the archive has sparse files, or unpacked more than 4 GiB")
                content = None if held is None else given.extractfile(held)
                one.name = place.lstrip("/")
                one.uid = one.gid = 0
                one.uname = one.gname = ""
                if mode and not one.issym():
                    one.mode = int(mode, 8)
                made.addfile(one, content or io.BytesIO())
    except tarfile.TarError as exc:
        raise WireError("invalid_argument", f"the uploaded archive cannot be read: {exc}") from exc


def _place(name: str, source: str, to: str, *, is_file: bool, is_pattern: bool, into: bool) -> str | None:
    """The path at which a member is to be; None: it is not meant, or is the directory itself."""
    if is_file:
        if name != source:
            return None
        return posixpath.join(to, posixpath.basename(name)) if into else to
    if is_pattern:
        fixed = posixpath.dirname(re.split(r"[*?\[{]", source, maxsplit=1)[0])
        rest = posixpath.relpath(name, fixed or ".")
        return None if rest == "." or rest.startswith("../") else posixpath.join(to, rest)
    if source == ".":
        return None if name == "." else posixpath.join(to, name)
    return posixpath.join(to, name[len(source) + 1 :]) if name.startswith(f"{source}/") else None


def new_build() -> str:
    """An id in the form that SDKs ask for."""
    return str(uuid4())
