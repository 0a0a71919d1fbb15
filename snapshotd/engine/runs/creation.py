"""The beginning of a trajectory: its first layers, its record, and its sandbox."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from snapshotd.api.commands import CommandFields
from snapshotd.api.trajectories import RunAgentRequest, SandboxFields
from snapshotd.catalog.base import own_tenant, present_tenant
from snapshotd.engine.context import Context
from snapshotd.engine.journal.gateways import provider_env
from snapshotd.engine.journal.keyvalue import tenant_env
from snapshotd.engine.journal.reuse import INPUTS
from snapshotd.engine.protocol.agent_handler import HandlerSlot
from snapshotd.engine.requests import present
from snapshotd.engine.runs import folder_mode, inputs, programs, python_packages
from snapshotd.engine.runs.forks import check_name
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.sandbox.step import marker
from snapshotd.errors import NotPermitted, UsageError
from snapshotd.service import parse
from snapshotd.types import (
    NO_ISOLATION,
    AgentSpec,
    ExperimentID,
    LayerID,
    Limits,
    Network,
    SandboxSpec,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Stack,
    ToolCall,
    Trajectory,
    TrajectoryID,
    TrajectoryStatus,
    new_id,
)


class Creation:
    """Makes new trajectories with a running sandbox."""

    def __init__(self, context: Context, sessions: Sessions) -> None:
        self._context, self._catalog, self._sessions = context, context.catalog, sessions

    def begin(
        self,
        request: SandboxFields,
        agent: AgentSpec | None,
        namespace_pid: int,
        *,
        reuse: dict[str, bool] | None = None,
        experiment: ExperimentID | None = None,
    ) -> tuple[Trajectory, Snapshot, Sandbox, HandlerSlot]:
        """A launched sandbox with its recorded trajectory and first snapshot; on any error nothing is left. `namespace_pid`: process
        in whose view of the files the request's paths are meant; 0: the daemon."""
        check_name(request.name)
        file = request.agent if isinstance(request, RunAgentRequest) else None
        agent_file = None if file is None else Path(file)
        if request.services is not None:
            parse(request.services, "the file of services")
        requirements = python_packages.read_requirements(request, agent_file, namespace_pid)
        runtime = self._context.runtime(request.runtime)
        isolated = runtime.name != NO_ISOLATION
        limits = Limits(**request.limits.given)
        wanted = Network.NONE if request.network is None else Network.parse(request.network)
        if isolated:
            runtime.check_limits(limits)
            if wanted == folder_mode.NETWORK:
                raise UsageError("the machine's own network is for sandboxes without isolation; choose none or bridge")
        elif present_tenant() is not None:
            raise NotPermitted(
                "a sandbox without isolation is this machine itself, so only the daemon's own users and the scope admin may make one"
            )
        else:
            folder_mode.check(request)
            if requirements:
                raise folder_mode.no_requirements()
        images = self._context.images
        image = (
            self._context.ensure_image(request.image, lambda _: None) if isolated else images.empty((), "/workspace")
        )
        spec = SandboxSpec(image.id, runtime.name, wanted if isolated else folder_mode.NETWORK, limits)
        stack = Stack(image.id)
        if request.program is not None:
            stack = stack.push(programs.layer_for(self._context, stack, Path(request.program), namespace_pid))
        if requirements:
            stack = stack.push(python_packages.layer_for(self._context, spec, requirements, self._install))
        arguments: dict[str, Any] = {
            "image": image.name,
            "workspace": request.workspace and str(Path(request.workspace)),
        }
        below = stack
        directories = () if isolated else folder_mode.DIRECTORIES
        layer = inputs.build(self._context.store, stack, request, agent_file, namespace_pid, directories)
        if layer is not None:
            stack = stack.push(layer)
        if agent is not None:
            digest = inputs.digest(self._context.store, below, layer, request.services or "")
            arguments |= {INPUTS: digest, **(reuse or {})}
        snapshot = first_snapshot(stack, marker("start", arguments))
        plain, secret = provider_env(request.providers, capture_tokens=request.capture_tokens)
        open_env = (*request.env.items(), *plain, *tenant_env(own_tenant(request.tenant)))
        secrets = (*request.secrets.items(), *secret)
        env = self._context.secrecy.environment(snapshot.trajectory, open_env, secrets)
        trajectory = Trajectory(
            id=snapshot.trajectory,
            name=request.name,
            spec=spec,
            agent=agent,
            head=snapshot.id,
            status=TrajectoryStatus.RUNNING,
            created_at_ns=snapshot.created_at_ns,
            experiment=experiment,
            env=env,
            began=None if agent is None else snapshot.id,
        )
        if agent is not None:
            trajectory = replace(trajectory, agent=self._context.secrecy.conceal_agent(trajectory, agent))
        sandbox: Sandbox | None = None
        try:
            sandbox, calls = self._sessions.launch(trajectory, snapshot)
            self._catalog.trajectories.add([(trajectory, snapshot)], request=present())
            self._context.ownership.add_new([trajectory.id])
        except BaseException:
            if sandbox is not None:
                self._sessions.discard(sandbox)
            if layer is not None:
                self._context.store.remove(layer)
            raise
        if layer is not None:
            self._context.store.unpin([layer])
        return trajectory, snapshot, sandbox, calls

    def _install(self, spec: SandboxSpec, script: str, env: dict[str, str], ca_bundle: bytes) -> LayerID:
        trajectory, snapshot = throw_away(spec, Stack(spec.image))
        errors: list[bytes] = []
        with self._sessions.throw_aways.start(trajectory, snapshot) as sandbox:
            if ca_bundle:
                (self._context.run_dir / "c" / sandbox.container.id / "ca.pem").write_bytes(ca_bundle)
            result = self._sessions.commands.exec(
                sandbox,
                CommandFields(("/bin/sh", "-c", script), cwd="/", env=env),
                sink=lambda _, data: errors.append(data[-2000:]),
                record=False,
            )
            if result.exit_code != 0:
                said = result.call.error or b"".join(errors)[-2000:].decode(errors="replace").strip()
                raise UsageError(f"the agent's dependencies cannot be installed (exit code {result.exit_code}): {said}")
            with sandbox.lock:
                captured = sandbox.root.capture()
            if captured.method == "unchanged":
                raise UsageError("the agent's dependencies cannot be installed: pip succeeded, but wrote nothing")
            return python_packages.keep_packages_only(self._context, captured.stack.layers[0])


def first_snapshot(stack: Stack, call: ToolCall) -> Snapshot:
    """The snapshot that a new trajectory begins with."""
    return Snapshot(
        id=SnapshotID(new_id()),
        parent=None,
        trajectory=TrajectoryID(new_id()),
        seq=0,
        stack=stack,
        call=call,
        messages=0,
        state=SnapshotState.CAPTURED,
        pause_ns=0,
        created_at_ns=time.time_ns(),
        method="build",
        own_layers=len(stack.layers),
    )


def throw_away(spec: SandboxSpec, stack: Stack, env: tuple[tuple[str, str], ...] = ()) -> tuple[Trajectory, Snapshot]:
    """Records for a sandbox that no catalog row will ever mention."""
    snapshot = first_snapshot(stack, marker("start", {}))
    trajectory = Trajectory(
        id=snapshot.trajectory,
        name=None,
        spec=spec,
        agent=None,
        head=snapshot.id,
        status=TrajectoryStatus.RUNNING,
        created_at_ns=snapshot.created_at_ns,
        env=env,
    )
    return trajectory, snapshot
