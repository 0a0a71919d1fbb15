"""The engine: every verb of the product, each a few lines over the parts. See `engine/base.py` for the contract."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from snapshotd.api.commands import CommandFields, ExecRequest
from snapshotd.api.storage import CheckInfo, Policy, PruneInfo, RepairInfo, UsageInfo
from snapshotd.api.trajectories import ForkPlace
from snapshotd.engine import share
from snapshotd.engine.base import (
    Asking,
    Connection,
    Decision,
    Event,
    ExecResult,
    ExportForm,
    Forked,
    Imported,
    OutputSink,
    ProgressSink,
    RunRequest,
    SandboxInfo,
    SandboxRequest,
    Variant,
)
from snapshotd.engine.caller import Caller
from snapshotd.engine.command_verbs import LocalCommandVerbs
from snapshotd.engine.context import Context
from snapshotd.engine.events import completed
from snapshotd.engine.file_verbs import LocalFileVerbs
from snapshotd.engine.folder_expiry import FolderExpiry
from snapshotd.engine.folder_verbs import FolderVerbs
from snapshotd.engine.mind.approvals import Gate
from snapshotd.engine.mind.calls import AgentCalls
from snapshotd.engine.mind.gateways import provider_env
from snapshotd.engine.mind.keyvalue import tenant_env
from snapshotd.engine.mind.reuse import INPUTS, REPLIES, REUSE
from snapshotd.engine.mind.webhook import Webhooks
from snapshotd.engine.mind_verbs import Mind, MindVerbs
from snapshotd.engine.requests import Requests, present
from snapshotd.engine.runs import folder_mode, inputs, ports, programs, python_packages, recover, snapshot_now
from snapshotd.engine.runs.file_calls import FileCalls
from snapshotd.engine.runs.forks import Forks, check_name, children
from snapshotd.engine.runs.launch import Launcher
from snapshotd.engine.runs.resume import Resumes
from snapshotd.engine.runs.sessions import Sessions, check_not_running, free_bytes
from snapshotd.engine.sandbox.attach import Survivor
from snapshotd.engine.sandbox.background import Background
from snapshotd.engine.sandbox.disk_watch import DiskWatch
from snapshotd.engine.sandbox.idle import IdleWatch
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.sandbox.step import marker
from snapshotd.engine.storing import evict, look, reserve, retention
from snapshotd.engine.storing.archive_queue import Archive
from snapshotd.engine.storing.browse import Browse
from snapshotd.engine.storing.cold import Cold
from snapshotd.engine.storing.evict import Disposal
from snapshotd.engine.storing.merging import Merger
from snapshotd.engine.storing.upkeep import Upkeep
from snapshotd.engine.storing.worker import Worker
from snapshotd.engine.transfer import bundle, imports
from snapshotd.engine.transfer.trajectories.turns import Replies
from snapshotd.errors import SnapshotdError, UsageError
from snapshotd.kernel.abilities import weaker
from snapshotd.kernel.memory import available_bytes
from snapshotd.layers.store import release
from snapshotd.trees.base import Change, RestoreReport
from snapshotd.trees.base import Entry as TreeEntry
from snapshotd.types import (
    NO_ISOLATION,
    AgentSpec,
    Image,
    LayerID,
    Limits,
    Message,
    Network,
    RequestKey,
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
    short,
)

MAX_FORKS = 256
STEP_BYTES = 256 << 10
"""With less space than this even a step that changes nothing may fail: a layer's directories, an output, the catalog's
log."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of the engine, put together in daemon/wiring.py."""

    context: Context
    requests: Requests
    worker: Worker
    merger: Merger
    cold: Cold
    archive: Archive
    disposal: Disposal
    launcher: Launcher
    background: Background
    webhooks: Webhooks
    gate: Gate
    sessions: Sessions
    upkeep: Upkeep
    forks: Forks
    resumes: Resumes
    files: FileCalls
    mind: Mind
    browse: Browse
    replies: Replies


class LocalEngine(FolderVerbs, MindVerbs, LocalFileVerbs, LocalCommandVerbs):
    """The real engine, on this machine's kernel and runtimes. `start` it before the first request."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._context, self._catalog = parts.context, parts.context.catalog
        self._cold, self._archive, self._background = parts.cold, parts.archive, parts.background
        self._sessions, self._forks, self._resumes = parts.sessions, parts.forks, parts.resumes
        self._upkeep, self._files, self._mind, self._browse = parts.upkeep, parts.files, parts.mind, parts.browse
        self._watches: tuple[DiskWatch | IdleWatch | FolderExpiry, ...] = ()
        self._closed = threading.Event()

    def start(self, survivors: list[Survivor]) -> None:
        """Begin to work, and go on with the sandboxes of an earlier daemon that recovery has found."""
        sweep = self._parts.disposal.sweep_what_was_held
        self._context.store.on_unneeded(lambda: self._background.later(sweep))
        self._archive.start(self._parts.disposal.evict)
        self._store_what_has_no_layers()
        self._sessions.go_on(survivors)
        self._background.go_on(snapshot for snapshot in self._catalog.all_snapshots() if snapshot.files is None)
        idle = IdleWatch(self._sessions.live, lambda sandbox: self._sessions.stop(sandbox.trajectory, only=sandbox))
        expiry = FolderExpiry(self._upkeep, self._context.config.folder_prune_s)
        self._watches = (idle, DiskWatch(self._context, self._sessions.launched), expiry)

    def _store_what_has_no_layers(self) -> None:
        """Runs before the first request, for snapshots captured on a layer that was still being rebuilt when the daemon
        died. The files below their own layers are in the repository alone, so these snapshots cannot be read until they
        are stored."""
        if all(self._cold.is_hot(self._catalog.get_snapshot(snapshot)) for snapshot in self._catalog.unstored()):
            return
        try:
            self._archive.wait()
        except SnapshotdError:
            return  # the archive has logged it, and tries again

    def asking(self, request: RequestKey | None) -> AbstractContextManager[Asking]:
        return self._parts.requests.asking(request)

    # -- sandboxes and runs --------------------------------------------------------------------------------------------

    def create(self, request: SandboxRequest) -> tuple[Trajectory, Snapshot]:
        trajectory, snapshot, sandbox, calls = self._begin(request, None, None)
        sandbox.use.end_when_idle(request.idle_timeout_s)
        try:
            self._sessions.adopt(sandbox, calls)
        except BaseException:
            self._sessions.discard(sandbox)
            self._parts.disposal.forget(trajectory.id)
            raise
        self._background.submit(snapshot)
        return trajectory, snapshot

    def run(self, request: RunRequest) -> Trajectory:
        if (request.agent is None) == (not request.command):
            raise UsageError("give either an agent file or a command, not both or neither")
        if request.agent is not None:
            os.close(inputs.open_agent(request.agent, request.sandbox.namespace_pid))
        isolated = self._context.runtime(request.sandbox.runtime).name != NO_ISOLATION
        if request.user is not None and not isolated:
            raise folder_mode.refused("another user", "leave it out; commands run as the daemon's own")
        agent = inputs.agent_spec(request, isolated=isolated)
        trajectory, snapshot, sandbox, calls = self._begin(
            request.sandbox, request.agent, agent, reuse=_reuse_arguments(request)
        )
        try:
            self._sessions.adopt(sandbox, calls)
            assert trajectory.agent is not None
            self._sessions.start_agent(sandbox, trajectory.agent, first=snapshot)
        except BaseException:
            self._sessions.discard(sandbox)
            self._parts.disposal.forget(trajectory.id)
            raise
        return trajectory

    def _begin(
        self,
        request: SandboxRequest,
        agent_file: Path | None,
        agent: AgentSpec | None,
        *,
        reuse: dict[str, bool] | None = None,
    ) -> tuple[Trajectory, Snapshot, Sandbox, AgentCalls]:
        """A launched sandbox with its recorded trajectory and first snapshot; on any error nothing is left."""
        check_name(request.name)
        requirements = python_packages.wanted(request, agent_file)
        runtime = self._context.runtime(request.runtime)
        isolated = runtime.name != NO_ISOLATION
        if isolated:
            runtime.check_limits(request.limits or Limits())
            if request.network is folder_mode.NETWORK:
                raise UsageError("the machine's own network is for sandboxes without isolation; choose none or bridge")
        else:
            folder_mode.check(request)
            if requirements:
                raise folder_mode.no_requirements()
        images = self._context.images
        image = images.ensure(request.image, lambda _: None) if isolated else images.empty((), "/workspace")
        network = (request.network or Network.NONE) if isolated else folder_mode.NETWORK
        spec = SandboxSpec(image.id, runtime.name, network, request.limits or Limits())
        stack = Stack(image.id)
        if request.program is not None:
            stack = stack.push(programs.layer_for(self._context, stack, request.program, request.namespace_pid))
        if requirements:
            stack = stack.push(python_packages.layer_for(self._context, spec, requirements, self._install))
        arguments = _start_arguments(request, image)
        below = stack
        directories = () if isolated else folder_mode.DIRECTORIES
        layer = inputs.build(self._context.store, stack, request, agent_file, directories)
        if layer is not None:
            stack = stack.push(layer)
        if agent is not None:
            arguments |= {INPUTS: inputs.digest(self._context.store, below, layer), **(reuse or {})}
        snapshot = _first_snapshot(stack, marker("start", arguments))
        plain, secret = provider_env(request.providers, capture_tokens=request.capture_tokens)
        open_env = (*request.env, *plain, *tenant_env(request.tenant))
        env = self._context.secrecy.environment(snapshot.trajectory, open_env, (*request.secrets, *secret))
        trajectory = Trajectory(
            id=snapshot.trajectory,
            name=request.name,
            spec=spec,
            agent=agent,
            head=snapshot.id,
            status=TrajectoryStatus.RUNNING,
            created_at_ns=snapshot.created_at_ns,
            env=env,
            began=None if agent is None else snapshot.id,
        )
        if agent is not None:
            trajectory = replace(trajectory, agent=self._context.secrecy.concealed(trajectory, agent))
        sandbox: Sandbox | None = None
        try:
            sandbox, calls = self._sessions.launch(trajectory, snapshot)
            self._catalog.add_trajectories([(trajectory, snapshot)], request=present())
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
        trajectory, snapshot = _throw_away(spec, Stack(spec.image))
        errors: list[bytes] = []
        with self._sessions.throw_away(trajectory, snapshot) as sandbox:
            if ca_bundle:
                (self._context.run_dir / "c" / sandbox.container.id / "ca.pem").write_bytes(ca_bundle)
            result = self._sessions.exec(
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

    def events(self, ref: str, *, follow: bool) -> Iterator[Event]:
        trajectory = self._catalog.resolve_trajectory(ref)
        last: Event | None = None
        for last in completed(self._context.events.follow(trajectory.id, wait=follow), self.output):
            yield last
        if follow and last is not None and last["event"] != "finished":
            yield {
                "event": "finished",
                "trajectory": trajectory.id,
                "exit_code": trajectory.exit_code,
                "snapshots": self._catalog.count_snapshots(trajectory.id),
                "status": trajectory.status,
            }

    def exec(self, ref: str, request: ExecRequest, *, sink: OutputSink, caller: Caller | None = None) -> ExecResult:
        trajectory = self._catalog.resolve_trajectory(ref)
        head = None if request.if_head is None else self._catalog.resolve_snapshot(request.if_head).id
        sandbox = self._sessions.running(trajectory, request.idle_timeout_s)
        return self._sessions.exec(sandbox, request, sink=sink, record=True, expected_head=head, caller=caller)

    def exec_snapshot(
        self, ref: str, request: CommandFields, *, sink: OutputSink, caller: Caller | None = None
    ) -> ExecResult:
        with self._context.pins.pinned(self._catalog.resolve_snapshot(ref).id) as source:
            owner = self._catalog.get_trajectory(source.trajectory)
            trajectory, _ = _throw_away(self._context.sandbox_spec(owner.spec), source.stack, env=owner.env)
            trajectory = replace(trajectory, head=source.id, forked_from=source.id)  # it may see its ancestors' secrets
            with self._sessions.throw_away(trajectory, source) as sandbox:
                return self._sessions.exec(sandbox, request, sink=sink, record=False, caller=caller)

    def take_snapshot(self, ref: str, *, name: str | None = None, if_changed: bool = False) -> Snapshot:
        trajectory = self._catalog.resolve_trajectory(ref)
        taken = snapshot_now.take_snapshot(
            self._context, self._sessions, self._background.submit, trajectory, name, if_changed=if_changed
        )
        if name is not None:
            self._archive.tags_changed()
        return taken

    def connect(self, ref: str, port: int, ended: Callable[[], object]) -> Connection:
        trajectory = self._catalog.resolve_trajectory(ref)
        return ports.connect(self._sessions.find(trajectory.id), trajectory, port, ended)

    def fork(
        self,
        ref: str,
        n: int,
        *,
        args: tuple[str, ...] | None,
        name: str | None,
        resume: bool = False,
        variants: tuple[Variant, ...] = (),
        idle_timeout_s: float | None = None,
        part: ForkPlace | None = None,
    ) -> Forked:
        if not 1 <= n <= MAX_FORKS:
            raise UsageError(f"cannot fork {n} times: the number must be from 1 to {MAX_FORKS}")
        forked = children(n, args, name, variants, part)
        for one in forked:
            check_name(one.name)
        with self._context.pins.pinned(self._catalog.resolve_snapshot(ref).id) as source:
            return self._forks.fork(
                source,
                forked,
                self._mind.editing,
                resume=resume,
                idle_timeout_s=idle_timeout_s,
                part=part,
                request=present(),
            )

    def resume(self, ref: str, *, decisions: tuple[Decision, ...] = ()) -> Trajectory:
        return self._resumes.resume(self._catalog.resolve_trajectory(ref), decisions)

    def stop(self, ref: str, *, discard: bool = False) -> Trajectory:
        trajectory = self._catalog.resolve_trajectory(ref)
        if discard:
            reserve.adjust(self._context.state_dir)
        self._sessions.stop(trajectory, keep=not discard)
        return self._catalog.get_trajectory(trajectory.id)

    def remove(self, ref: str, *, force: bool) -> None:
        trajectory = self._catalog.resolve_trajectory(ref)
        self._check_whole(ref, trajectory)
        if not force:
            check_not_running(self._sessions.find(trajectory.id), trajectory)
        self._catalog.check_removable(trajectory.id)  # before anything ends that would stay
        reserve.adjust(self._context.state_dir)
        self._sessions.stop(trajectory, keep=False)
        self._parts.disposal.forget(trajectory.id)
        reserve.adjust(self._context.state_dir)

    def _check_whole(self, ref: str, trajectory: Trajectory) -> None:
        """UsageError: `ref` names one snapshot of the trajectory, and `rm` removes whole trajectories only."""
        if ref in (trajectory.name, trajectory.id):
            return
        snapshot = self._catalog.resolve_snapshot(ref)
        whole = f"`snapshotd rm {trajectory.name or short(trajectory.id)}` forgets the whole trajectory"
        if ref in snapshot.tags:
            raise UsageError(
                f"{ref} is a tag of snapshot {short(snapshot.id)}: `snapshotd tag --delete {ref}` takes it away, {whole}"
            )
        if not trajectory.id.startswith(ref):
            raise UsageError(
                f"{ref} is a snapshot of trajectory {short(trajectory.id)}, and goes only with all of it: {whole}"
            )

    # -- looking -------------------------------------------------------------------------------------------------------

    def trajectories(self) -> list[Trajectory]:
        return self._catalog.trajectories()

    def sandboxes(self) -> list[SandboxInfo]:
        return [
            SandboxInfo(
                self._catalog.get_trajectory(s.trajectory.id),
                s.container.id,
                s.container.pid,
                s.started_at_ns,
                s.use.agent_running,
            )
            for s in self._sessions.live()
            if not s.closed
        ]

    def trajectory(self, ref: str) -> Trajectory:
        return self._catalog.resolve_trajectory(ref)

    def snapshot(self, ref: str) -> Snapshot:
        return self._catalog.resolve_snapshot(ref)

    def log(self, ref: str, last: int | None = None) -> list[Snapshot]:
        return self._catalog.snapshots(self._catalog.resolve_trajectory(ref).id, last)

    def all_snapshots(self) -> list[Snapshot]:
        return list(self._catalog.all_snapshots())

    def conversation(self, ref: str) -> list[Message]:
        return list(self._catalog.conversation(self._catalog.resolve_snapshot(ref).id))

    def output(self, ref: str, which: Literal["stdout", "stderr", "output"]) -> Iterator[bytes]:
        return self._context.recorded(self._catalog.resolve_snapshot(ref), which) or iter(())

    def diff(self, a: str, b: str | None) -> Iterator[Change]:
        return look.changes(self._context, a, b)

    def patch(self, a: str, b: str | None, *, root: bytes, write: Callable[[bytes], object]) -> int:
        return look.write_patch(self._context, a, b, root, write)

    def cat(self, ref: str, path: bytes) -> Iterator[bytes]:
        return look.cat(self._context, ref, path)

    def lstat(self, ref: str, path: bytes) -> tuple[TreeEntry, bytes | None]:
        return look.lstat(self._context, ref, path)

    def restore(self, ref: str, to: Path, *, path: bytes, namespace_pid: int = 0) -> RestoreReport:
        return look.restore(self._context, ref, to, path, namespace_pid, self._cold.restore)

    def tag(self, ref: str, name: str, *, move: bool) -> SnapshotID:
        with self._context.pins.pinned(self._catalog.resolve_snapshot(ref).id) as snapshot:
            self._catalog.tag(snapshot.id, name, move=move, request=present())
        self._archive.tags_changed()
        return snapshot.id

    def untag(self, name: str) -> None:
        self._catalog.untag(name)
        self._archive.tags_changed()

    # -- durable storage -----------------------------------------------------------------------------------------------

    def usage(self) -> UsageInfo:
        return self._upkeep.usage(evict.budget_bytes(self._context))

    def policy(self, ref: str | None) -> Policy:
        return retention.get_policy(self._catalog, None if ref is None else self._catalog.resolve_trajectory(ref).id)

    def set_policy(self, ref: str | None, policy: Policy | None) -> None:
        if ref is not None and policy is not None and policy.max_bytes is not None:
            raise UsageError(
                "a trajectory's own policy cannot limit the size of the repository, which is one for all: leave out its name"
            )
        retention.set_policy(self._catalog, None if ref is None else self._catalog.resolve_trajectory(ref).id, policy)

    def prune(self, policy: Policy | None, *, dry_run: bool, grace_s: float, progress: ProgressSink) -> PruneInfo:
        reserve.adjust(self._context.state_dir)
        try:
            return self._upkeep.prune(policy, dry_run=dry_run, grace_s=grace_s, progress=progress)
        finally:
            reserve.adjust(self._context.state_dir)

    def check(self, *, read_data: bool, progress: ProgressSink) -> CheckInfo:
        return self._upkeep.check(read_data=read_data, progress=progress)

    def repair(self, progress: ProgressSink) -> RepairInfo:
        return self._upkeep.repair(progress)

    def export(
        self,
        ref: str,
        *,
        form: ExportForm,
        whole: bool,
        since: str | None,
        forks: bool,
        write: Callable[[bytes], object],
        progress: ProgressSink,
    ) -> tuple[str, ...]:
        if form == "atif" or form == "jsonl":
            if whole or since is not None:
                raise UsageError(
                    f"an export as {form} holds a trajectory from its beginning; leave out what it begins after"
                )
            replies = self._parts.replies
            return share.export_trajectories(self._context, replies, ref, form, forks, write, progress)
        if forks:
            raise UsageError(f"an export as {form} holds no forks; export each of them")
        snapshot = self._catalog.resolve_snapshot(ref)
        if form != "bundle":
            if whole or since is not None:
                raise UsageError(
                    f"the format {form} holds the files of one snapshot: name a single snapshot, and none that it begins after"
                )
            return share.export_files(self._context, snapshot, form, write)
        base = None if since is None else self._catalog.resolve_snapshot(since)
        line = bundle.line_of(self._catalog, snapshot, whole=whole, since=base.id if base else None)
        if any(s.state is SnapshotState.CAPTURED for s in (*line, *([base] if base else ()))):
            progress("waiting until all is stored")
            self._archive.wait()
        return share.export_bundle(self._context, line, base, write, progress)

    def import_bundle(self, read: Callable[[int], bytes], name: str | None, progress: ProgressSink) -> Imported:
        spec = self._context.imported_spec()
        imported = imports.import_bundle(
            self._context, read, name=name, policy=spec, base_image=self._context.images.empty, progress=progress
        )
        self._archive.kick()
        if self._catalog.tags():
            self._archive.tags_changed()
        return imported

    def mount(self, directory: Path, namespace_pid: int) -> None:
        self.flush()
        self._browse.mount(directory, namespace_pid)

    def unmount(self, directory: Path, namespace_pid: int) -> None:
        self._browse.unmount(directory, namespace_pid)

    # -- images --------------------------------------------------------------------------------------------------------

    def images(self) -> list[Image]:
        return self._context.images.list()

    def ensure_image(self, name: str, progress: ProgressSink) -> Image:
        if self._context.runtime("auto").name == NO_ISOLATION:
            return self._context.images.empty((), "/workspace")
        return self._context.images.ensure(name, progress)

    def build_image(self, recipe: str, name: str | None, progress: ProgressSink) -> Image:
        return self._context.images.build(recipe, name, progress)

    def import_image(self, source: str, name: str | None, progress: ProgressSink) -> Image:
        return self._context.images.import_(source, name, progress)

    def remove_image(self, ref: str) -> None:
        self._context.images.remove(ref)

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        context = self._context
        return {
            "instance": context.instance,
            "state_dir": str(context.state_dir),
            "mode": str(context.mode),
            "weaker": weaker(context.mode, context.store.host),
            "layer_kind": context.store.kind,
            "free_bytes": context.store.free_bytes(),
            "free_memory_bytes": available_bytes(),
            "runtimes": {name: runtime.unavailable() or "available" for name, runtime in context.runtimes.items()},
            "trajectory_count": len(self._catalog.trajectories()),
            "sandbox_count": len(self._sessions.live()),
            "policy_file": str(self._parts.gate.policy.path),
            "image_count": len(context.images.list()),
            "durability": self._durability(),
            "settings": context.config.shown(),
        }

    def _durability(self) -> str:
        """`ok`, or the reason why snapshots cannot be taken or stored."""
        context = self._context
        try:
            context.store.proof.check()
        except SnapshotdError as exc:
            return exc.message
        if self._archive.failure is not None:
            return self._archive.failure.message
        if self._archive.stuck:
            return self._archive.stuck
        for place in (context.store.root, context.state_dir):
            if free_bytes(place) < STEP_BYTES:
                return (
                    f"no step can be captured: the disk of {place} is full; free space, remove trajectories with "
                    "`snapshotd rm`, or `snapshotd prune`"
                )
        return "ok"

    def flush(self, ref: TrajectoryID | None = None) -> None:
        self._background.wait()
        self._archive.wait()

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        for watch in self._watches:
            watch.close()
        self._mind.close()
        self._parts.webhooks.close()
        self._browse.close()
        self._sessions.close()
        self._parts.launcher.close()
        self._background.close()
        self._archive.close()
        self._cold.close()
        self._parts.worker.close()
        self._context.keeper.close()
        for runtime in self._context.runtimes.values():
            runtime.close()
        recover.mark_clean(self._context)
        self._context.secrecy.vault.close()
        self._context.spool.close()
        self._context.repo.close()
        self._catalog.close()
        release(self._context.store)
        for directory in (self._context.run_dir, self._context.share_dir):
            shutil.rmtree(directory, ignore_errors=True)  # files that stay do no harm: the next start makes it anew


def _start_arguments(request: SandboxRequest, image: Image) -> dict[str, Any]:
    return {"image": image.name, "workspace": str(request.workspace) if request.workspace else None}


def _reuse_arguments(request: RunRequest) -> dict[str, bool]:
    """UsageError: replies are to be reused, and calls not."""
    if request.reuse_replies and not request.reuse:
        raise UsageError("the replies of earlier runs are reused together with their calls only; ask for `reuse`, too")
    asked = {REUSE: request.reuse, REPLIES: request.reuse_replies}
    return {name: True for name, wanted in asked.items() if wanted}


def _first_snapshot(stack: Stack, call: ToolCall) -> Snapshot:
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


def _throw_away(spec: SandboxSpec, stack: Stack, env: tuple[tuple[str, str], ...] = ()) -> tuple[Trajectory, Snapshot]:
    """Records for a sandbox that no catalog row will ever mention."""
    snapshot = _first_snapshot(stack, marker("start", {}))
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
