"""`GymProvider`: the sandboxes of NeMo Gym. Every command and every uploaded file is one snapshot, and a rollout is cloned and
restored from any of them, under a fence."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_gym.sandbox.providers.base import (
    SandboxCreateError,
    SandboxExecResult,
    SandboxHandle,
    SandboxSpec,
    SandboxStatus,
)

from snapshotd.client import AsyncSandbox, AsyncSnapshotd
from snapshotd.errors import NotFound, SnapshotdError
from snapshotd.integrations.nemo_gym.generations import Generation, Generations, StaleHandleError

_OPTIONS = {"snapshot", "network", "runtime"}
_STATUSES = {"running": SandboxStatus.RUNNING, "interrupted": SandboxStatus.ERROR, "failed": SandboxStatus.ERROR}
_NO_CODE = 125
"""The return code of a command that the sandbox did not run, as in NeMo Gym's own providers."""


@dataclass(slots=True)
class GymSandbox:
    """The `raw` of a handle. `snapshot`: the newest, after the last call through this handle."""

    box: AsyncSandbox
    generation: Generation
    snapshot: str
    env: dict[str, str]


class GymProvider:
    """`{"snapshotd": {...}}` in the configuration of NeMo Gym. `image` is for specifications without one, `user` runs commands
    that name none. `SandboxSpec.provider_options` may have `snapshot`, `network` and `runtime`."""

    name = "snapshotd"

    def __init__(
        self, *, image: str = "default", network: str | None = None, runtime: str = "auto", user: str | None = None
    ) -> None:
        self._image, self._user = image, user
        self._defaults = {"network": network, "runtime": runtime}
        self._client = AsyncSnapshotd()
        self._generations = Generations(self._client)

    # -- NeMo Gym's protocol -------------------------------------------------------------------------------------------

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Start a sandbox, or with the option `snapshot` a fork of that one. SandboxCreateError. ValueError: an unknown option."""
        if unknown := set(spec.provider_options) - _OPTIONS:
            raise ValueError(f"Unknown provider option(s): {', '.join(sorted(unknown))}")
        if (spec.resources.gpu or 0) > 0 or spec.entrypoint:
            raise SandboxCreateError("snapshotd has no GPUs, and starts no entrypoint: run it as a command")
        options: dict[str, Any] = {**self._defaults, **spec.provider_options}
        async with _creating():
            if (snapshot := options.pop("snapshot", None)) is not None:
                box = await self._fork(snapshot, spec.ttl_s)
            else:
                limits = {
                    "cpus": spec.resources.cpu,
                    "memory": None if spec.resources.memory_mib is None else spec.resources.memory_mib << 20,
                    "disk": None if spec.resources.disk_gib is None else spec.resources.disk_gib << 30,
                }
                more = {key: value for key, value in (options | limits).items() if value is not None}
                box = await AsyncSandbox.create(
                    client=self._client, image=spec.image or self._image, idle_timeout=spec.ttl_s or 0, **more
                )
            handle = await self._begin(box, dict(spec.env))
            if spec.workdir is not None:
                handle.raw.snapshot = (await self._client.make_dir(box.id, spec.workdir)).id
            return handle

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: int | float | None = None,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        """Run a command by `sh -c`. StaleHandleError, also for one whose rollout was restored while it ran: its result is of the
        past."""
        one: GymSandbox = handle.raw
        name = self._user if user is None else str(user)
        try:
            await self._generations.check(one.generation)
            done = await one.box.exec(
                ["/bin/sh", "-c", command], cwd=cwd, env=one.env | (env or {}), user=name, timeout=timeout_s
            )
            await self._generations.check(one.generation)
        except SnapshotdError as exc:
            with suppress(SnapshotdError):
                await self._generations.check(one.generation)  # the sandbox may have ended because of a restore
            return SandboxExecResult(None, exc.message, _NO_CODE, "sandbox")
        one.snapshot = done.snapshot_id or one.snapshot
        if done.timed_out:
            return SandboxExecResult(done.stdout, f"{done.stderr}(ended after {timeout_s} s)", _NO_CODE, "timeout")
        return SandboxExecResult(done.stdout, done.stderr, done.exit_code)

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        """Copy a file into the sandbox. RuntimeError: it cannot be written, or the daemon is not there; the target is then as it was."""
        one: GymSandbox = handle.raw
        content = Path(source_path).read_bytes()
        with _moving():
            await self._generations.check(one.generation)
            done = await one.box.files.write(target_path, content, user=self._user)
        one.snapshot = done.snapshot.id

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        """Copy a file out of the sandbox. FileNotFoundError; RuntimeError: it cannot be read, or the daemon is not there. The target is
        then as it was."""
        one: GymSandbox = handle.raw
        with _moving():
            await self._generations.check(one.generation)
            try:
                content = await one.box.files.read(source_path)
            except NotFound as exc:
                raise FileNotFoundError(f"{source_path}: {exc.message}") from exc
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        Path(target_path).write_bytes(content)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        one: GymSandbox = handle.raw
        try:
            await self._generations.check(one.generation)
            return _STATUSES.get((await one.box.info).status, SandboxStatus.STOPPED)
        except StaleHandleError:
            return SandboxStatus.STOPPED
        except SnapshotdError:
            return SandboxStatus.UNKNOWN

    async def close(self, handle: SandboxHandle) -> None:
        """Stop the sandbox. Its snapshots stay, for `clone` and `restore`. Not an error when it is gone."""
        one: GymSandbox = handle.raw
        try:
            await one.box.stop()
        except NotFound:
            pass

    async def aclose(self) -> None:
        """Nothing: a client keeps no connection."""

    # -- another process: NeMo Gym's `ConnectableProvider` -------------------------------------------------------------

    async def serialize_handle(self, handle: SandboxHandle, *, scope: str | None = None) -> dict[str, Any]:
        """JSON from which `connect` makes a handle of the same sandbox, and `clone` and `restore` one of this moment."""
        one: GymSandbox = handle.raw
        return {
            "sandbox_id": one.box.id,
            "execution": one.generation.execution,
            "generation": one.generation.number,
            "snapshot": one.snapshot,
            "env": one.env,
        }

    async def connect(self, descriptor: Mapping[str, Any]) -> SandboxHandle:
        """A handle of the same sandbox. StaleHandleError; SandboxCreateError: the sandbox is gone."""
        generation = Generation(descriptor["execution"], descriptor["generation"])
        async with _creating():
            box = await AsyncSandbox.connect(descriptor["sandbox_id"], client=self._client)
            await self._generations.check(generation)
            return self._handle(box, generation, (await box.head()).id, dict(descriptor["env"]))

    # -- snapshot, clone, restore --------------------------------------------------------------------------------------

    async def snapshot(self, handle: SandboxHandle) -> dict[str, Any]:
        """A descriptor of this moment that outlives the sandbox: the snapshot is stored, and no prune takes it until
        `retire`. Files are in it; processes and terminals are not."""
        one: GymSandbox = handle.raw
        await self._generations.check(one.generation)
        taken = await one.box.snapshot(f"nemo-gym-{uuid.uuid4().hex}", wait="stored")
        one.snapshot = taken.id
        return await self.serialize_handle(handle)

    async def clone(self, descriptor: Mapping[str, Any]) -> SandboxHandle:
        """Start a new rollout with the files of a descriptor, which may be cloned any number of times. SandboxCreateError."""
        async with _creating():
            return await self._begin(await self._fork(descriptor["snapshot"], None), dict(descriptor["env"]))

    async def restore(self, descriptor: Mapping[str, Any]) -> SandboxHandle:
        """Go on with the same rollout, in a new sandbox with these files; the earlier sandbox is stopped, and its handles are
        stale. StaleHandleError: another restore of this generation was first. SandboxCreateError: nothing has changed."""
        last = Generation(descriptor["execution"], descriptor["generation"])
        async with _creating():
            await self._generations.check(last)
            box = await self._fork(descriptor["snapshot"], None)
            try:
                drawn = await self._generations.draw(last)
            except StaleHandleError:
                await box.remove(force=True)
                raise
            try:
                await (await AsyncSandbox.connect(descriptor["sandbox_id"], client=self._client)).stop()
            except NotFound:
                pass
            return self._handle(box, drawn, descriptor["snapshot"], dict(descriptor["env"]))

    async def retire(self, descriptor: Mapping[str, Any]) -> None:
        """End a rollout: its handles are stale, its sandbox is stopped, and a prune may take the snapshots that were taken by
        `snapshot`. Not an error the second time."""
        await self._generations.retire(descriptor["execution"])
        try:
            box = await AsyncSandbox.connect(descriptor["sandbox_id"], client=self._client)
            await box.stop()
            for one in await box.snapshots():
                for tag in one.info.tags:
                    if tag.startswith("nemo-gym-"):
                        await self._client.untag(tag)
        except NotFound:
            pass

    # -- parts ---------------------------------------------------------------------------------------------------------

    async def _fork(self, snapshot: str, ttl_s: float | None) -> AsyncSandbox:
        forked = await self._client.fork(snapshot, idle_timeout=ttl_s or 0)
        return AsyncSandbox(self._client, forked.trajectories[0])

    async def _begin(self, box: AsyncSandbox, env: dict[str, str]) -> SandboxHandle:
        return self._handle(box, await self._generations.begin(uuid.uuid4().hex), (await box.head()).id, env)

    def _handle(self, box: AsyncSandbox, generation: Generation, snapshot: str, env: dict[str, str]) -> SandboxHandle:
        return SandboxHandle(box.id, self.name, GymSandbox(box, generation, snapshot, env))


@asynccontextmanager
async def _creating() -> AsyncIterator[None]:
    try:
        yield
    except SnapshotdError as exc:
        raise SandboxCreateError(exc.message) from exc


@contextmanager
def _moving() -> Iterator[None]:
    try:
        yield
    except SnapshotdError as exc:
        raise RuntimeError(exc.message) from exc
