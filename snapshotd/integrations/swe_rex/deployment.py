"""`RexDeployment`: how SWE-ReX, and what is built on it, gets a sandbox."""

from __future__ import annotations

from typing import Any, Literal

from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.hooks.abstract import CombinedDeploymentHook, DeploymentHook
from swerex.exceptions import DeploymentNotStartedError, DeploymentStartupError
from swerex.runtime.abstract import IsAliveResponse
from swerex.utils.log import get_logger

from snapshotd.client import AsyncSandbox, AsyncSnapshotd
from snapshotd.errors import SnapshotdError
from snapshotd.integrations.swe_rex.runtime import RexRuntime

IDLE_S = 1800.0
"""A sandbox whose program has gone away ends, with a last snapshot, after so many seconds without a command."""


class RexDeployment(AbstractDeployment):
    """One sandbox; the words are those of `Sandbox.create`. With `snapshot` it is a fork of that one, in which shells go on
    as they were there, and `image` is not used. `user` runs the commands; else root."""

    def __init__(
        self,
        *,
        image: str = "default",
        snapshot: str | None = None,
        network: str | None = None,
        runtime: Literal["auto", "runc", "docker", "none"] = "auto",
        user: str | None = None,
    ) -> None:
        self.logger = get_logger("rex-deploy")
        self._image, self._snapshot, self._network = image, snapshot, network
        self._kind, self._user = runtime, user
        self._runtime: RexRuntime | None = None
        self._hooks = CombinedDeploymentHook()

    def add_hook(self, hook: DeploymentHook) -> None:
        """`hook` is told of each step of the start."""
        self._hooks.add_hook(hook)

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        """Say whether the sandbox runs. DeploymentNotStartedError."""
        return await self.runtime.is_alive(timeout=timeout)

    async def start(self) -> None:
        """Begin the sandbox. DeploymentStartupError: it runs already, there is no such image or snapshot, or no daemon."""
        if self._runtime is not None:
            raise DeploymentStartupError("the deployment has been started; stop it first")
        self._hooks.on_custom_step("Starting sandbox")
        client = AsyncSnapshotd()
        try:
            if self._snapshot is not None:
                forked = await client.fork(self._snapshot, idle_timeout=IDLE_S)
                box = AsyncSandbox(client, forked.trajectories[0])
            else:
                more: dict[str, Any] = {} if self._network is None else {"network": self._network}
                box = await AsyncSandbox.create(
                    client=client, image=self._image, runtime=self._kind, idle_timeout=IDLE_S, **more
                )
        except SnapshotdError as exc:
            raise DeploymentStartupError(exc.message) from exc
        self._runtime = RexRuntime(client, box, user=self._user)

    async def stop(self) -> None:
        """Stop the sandbox, which keeps its snapshots. Not an error when it does not run."""
        runtime, self._runtime = self._runtime, None
        if runtime is None:
            return
        await runtime.close()
        try:
            await runtime.box.stop()
        except SnapshotdError as exc:
            self.logger.warning("sandbox %s was not stopped: %s", runtime.box.id[:12], exc.message)

    @property
    def runtime(self) -> RexRuntime:
        """The runtime of the sandbox. DeploymentNotStartedError."""
        if self._runtime is None:
            raise DeploymentNotStartedError
        return self._runtime
