"""`SnapshotdSandboxClient`: where the SDK's `Runner` gets its sandboxes."""

from __future__ import annotations

import uuid
from typing import Any
from weakref import WeakValueDictionary

from agents.sandbox.errors import WorkspaceStartError
from agents.sandbox.manifest import Manifest
from agents.sandbox.session import SandboxSession, SandboxSessionState
from agents.sandbox.session.dependencies import Dependencies
from agents.sandbox.session.manager import Instrumentation
from agents.sandbox.session.sandbox_client import BaseSandboxClient
from agents.sandbox.snapshot import NoopSnapshot, SnapshotBase, SnapshotSpec
from agents.sandbox.workspace_paths import coerce_posix_path, posix_path_as_path

from snapshotd.client import AsyncSandbox, AsyncSnapshotd
from snapshotd.errors import NotFound, SnapshotdError
from snapshotd.integrations.openai_agents.session import IDLE_S, SnapshotdSandboxSession
from snapshotd.integrations.openai_agents.state import SnapshotdOptions, SnapshotdSessionState, SnapshotdSnapshot, gone
from snapshotd.integrations.openai_agents.stored import StoredThread, ThreadPlace


class SnapshotdSandboxClient(BaseSandboxClient[SnapshotdOptions]):
    """Sandboxes whose every call is a snapshot.

        Runner.run(agent, "...", run_config=RunConfig(sandbox=SandboxRunConfig(client=SnapshotdSandboxClient())))

    A state that is resumed, from a `RunState` or as `session_state`, has the files of its own moment. Its sandbox goes on
    where it still stands there; otherwise a fork of the snapshot does, so that one state can be gone on from twice.
    """

    backend_id = "snapshotd"
    supports_default_options = True

    def __init__(
        self,
        client: AsyncSnapshotd | None = None,
        *,
        instrumentation: Instrumentation | None = None,
        dependencies: Dependencies | None = None,
    ) -> None:
        """`client`: of another daemon than the default one."""
        self._client = client or AsyncSnapshotd()
        self._instrumentation = instrumentation or Instrumentation()
        self._dependencies = dependencies
        self._of_threads: WeakValueDictionary[str, SnapshotdSandboxSession] = WeakValueDictionary()

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: SnapshotdOptions | None = None,
    ) -> SandboxSession:
        """A new sandbox; with a `SnapshotdSnapshot` a fork of it. An archive of another kind of sandbox is unpacked. The
        store for archives that a `SnapshotSpec` means is not needed. WorkspaceStartError; SnapshotNotRestorableError."""
        chosen = options or SnapshotdOptions()
        wanted = self._validate_manifest_for_create(Manifest() if manifest is None else manifest)
        identity = uuid.uuid4()
        at = snapshot if isinstance(snapshot, SnapshotBase) else NoopSnapshot(id=str(identity))
        if chosen.thread is not None and (place := await StoredThread(self._client, chosen.thread).place()) is not None:
            at, box = SnapshotdSnapshot(id=place.snapshot), await self._at(place)
        elif isinstance(at, SnapshotdSnapshot):
            box = await self._at(ThreadPlace(None, at.id))
        else:
            box = await self._new(chosen, wanted)
        state = SnapshotdSessionState(
            session_id=identity,
            snapshot=at,
            manifest=wanted,
            exposed_ports=chosen.exposed_ports,
            trajectory=box.id,
            thread=chosen.thread,
        )
        return self._session(state, box)

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        """Go on with the files of a state. SnapshotNotRestorableError: they are gone."""
        if not isinstance(state, SnapshotdSessionState):
            raise TypeError("SnapshotdSandboxClient.resume expects a SnapshotdSessionState")
        state.assert_path_grants_rebound()
        if not isinstance(state.snapshot, SnapshotdSnapshot):  # its sandbox was never started
            return await self.create(snapshot=state.snapshot, manifest=state.manifest)
        box = await self._at(ThreadPlace(state.trajectory, state.snapshot.id))
        return self._session(state.model_copy(update={"trajectory": box.id}), box)

    async def delete(self, session: SandboxSession) -> SandboxSession:
        """The sandbox has ended; its snapshots stay, since states name them. `snapshotd rm` removes them."""
        return session

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        return self._deserialize_session_state_payload(payload, SnapshotdSessionState)

    def place_of(self, thread: str) -> ThreadPlace | None:
        """The place of a thread's files now; None: no session of this client has them."""
        session = self._of_threads.get(thread)
        if session is None or not isinstance(session.state.snapshot, SnapshotdSnapshot):
            return None
        return ThreadPlace(session.state.trajectory, session.state.snapshot.id)

    def forget(self, thread: str) -> None:
        """The thread has gone back: what its session has is no longer its own."""
        self._of_threads.pop(thread, None)

    def _session(self, state: SnapshotdSessionState, box: AsyncSandbox) -> SandboxSession:
        inner = SnapshotdSandboxSession(state, box, self._client)
        if state.thread is not None:
            self._of_threads[state.thread] = inner
        return self._wrap_session(inner, instrumentation=self._instrumentation)

    async def _new(self, options: SnapshotdOptions, manifest: Manifest) -> AsyncSandbox:
        more: dict[str, Any] = {} if options.network is None else {"network": options.network}
        try:
            return await AsyncSandbox.create(
                client=self._client,
                image=options.image,
                runtime=options.runtime,
                env=options.env,
                name=options.name,
                idle_timeout=IDLE_S,
                **more,
            )
        except SnapshotdError as exc:
            root = posix_path_as_path(coerce_posix_path(manifest.root))
            raise WorkspaceStartError(path=root, cause=exc, message=exc.message) from exc

    async def _at(self, place: ThreadPlace) -> AsyncSandbox:
        """A sandbox with exactly these files: its own, or a fork. SnapshotNotRestorableError."""
        try:
            info = await self._client.snapshot(place.snapshot)
            if info.state not in ("captured", "stored"):
                raise gone(place.snapshot, NotFound(f"snapshot {place.snapshot[:12]} was {info.state}"))
            if place.trajectory is not None and await self._stands(place):
                return await AsyncSandbox.connect(place.trajectory, client=self._client)
            forked = await self._client.fork(place.snapshot, idle_timeout=IDLE_S)
            return AsyncSandbox(self._client, forked.trajectories[0])
        except SnapshotdError as exc:
            raise gone(place.snapshot, exc) from exc

    async def _stands(self, place: ThreadPlace) -> bool:
        """True if the sandbox has the files of the snapshot: no command of a program that was killed is at work on them."""
        assert place.trajectory is not None
        try:
            commands = await self._client.commands(place.trajectory)
            if any(one.status == "running" and not one.background for one in commands):
                return False
            return (await self._client.trajectory(place.trajectory)).head == place.snapshot
        except NotFound:
            return False
