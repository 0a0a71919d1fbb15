"""A live sandbox: one container, and the lock that makes its steps happen one at a time.

    root         its files (root.py)
    writer       the trajectory's head, and the fence under which it moves (writer.py)
    mind         the agent's state and messages that no snapshot has yet (`UnsavedMind`)
    survival     what the next daemon needs to go on with it (live.py)
    use          the commands and the program that run in it

Everything that a step changes is changed under `lock`. A command that a client runs owns it from its start to its
commit (`SandboxUse.command`): meanwhile steps may be taken, but no other thread gives the sandbox another root or
another past.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from snapshotd.egress.way_out import WayOut
from snapshotd.engine.protocol.agent_protocol import AgentServer
from snapshotd.engine.sandbox.live import Survival
from snapshotd.engine.sandbox.root import SandboxRoot, frozen
from snapshotd.engine.sandbox.writer import TrajectoryWriter
from snapshotd.errors import Conflict, LimitExceeded
from snapshotd.gateway.base import Gateway
from snapshotd.kernel.holding.members import Members
from snapshotd.kernel.limits import Hits, hits
from snapshotd.network import HostRules, Network
from snapshotd.runtime.base import Container, Process, Runtime
from snapshotd.types import Message, SnapshotID, Trajectory, TrajectoryID, short

BACKGROUND_MAX = 32
"""Commands that run in the background of one sandbox. Each takes two threads and up to five descriptors of the
daemon."""
CUT_OFF_DEADLINE_S = 10.0
"""A killed command is captured as fast as any; every command before it in the lock's queue may copy changed files."""


@dataclass(eq=False, slots=True)
class ClientCommand:
    """A command that a client runs."""

    background: bool = False
    """It runs on without a client (engine/runs/commands.py)."""
    mark: str = ""
    """The value of `processes.MARK` in its environment; "" if it has none."""
    process: Process | None = None
    """Once it is started."""
    cut_off: bool = False
    """The sandbox ends, and the command with it."""
    timed_out: bool = False
    """It took longer than its caller allows, and was ended (engine/sandbox/timeout.py)."""
    alone: bool = True
    """No other command ran beside it so far; if it has a timeout, no process but init was alive when it began."""
    service: str = ""
    """The service that it is (engine/runs/services/starts.py); "" for a command that is none."""
    ready: bool = False
    """The service is ready."""
    failure: str | None = None
    """Why the service was ended."""


class SandboxUse:
    """The use of one sandbox, whose `lock` guards it."""

    def __init__(self, trajectory: TrajectoryID, *, agent_running: bool = False) -> None:
        self.lock = threading.RLock()
        self.commands: list[ClientCommand] = []
        """Clients' commands that run, or that have ended and are not committed yet."""
        self.services: list[ClientCommand] = []
        """Services that run. They are no use of the sandbox: it may idle, and be given another root, which they do not
        outlive."""
        self.starting_services = threading.Lock()
        """Held while services are started, so that each is started once."""
        self.changing_network = threading.Lock()
        """Held while the recorded rules are read and put in force, so that the last ones stay in force."""
        self._notices: list[str] = []
        self.agent_running = agent_running
        self.idle_timeout_s = 0.0
        """After so long without anything happening the sandbox ends (engine/sandbox/idle.py). 0: never."""
        self.kept_alive_s = 0.0
        """When a client last asked to let it idle anew (of time.monotonic)."""
        self.ended_for: list[str] = []
        """Reasons why processes of the present command were ended, if that was for the disk that they took
        (engine/sandbox/disk_watch.py)."""
        self.closed = False
        """No more steps. Set under `lock`."""
        self._ending = False
        self._changing = threading.Condition(self.lock)
        """Told of changes of `commands` and `closed`."""
        self._trajectory = trajectory

    def end_when_idle(self, timeout_s: float) -> None:
        """Set `idle_timeout_s`."""
        self.idle_timeout_s = timeout_s

    def keep_alive(self) -> None:
        """Set `kept_alive_s` to now."""
        self.kept_alive_s = time.monotonic()

    def mark_program_running(self) -> None:
        """Note that the trajectory's program runs, until the sandbox ends."""
        self.agent_running = True

    @property
    def ending(self) -> bool:
        """The sandbox is about to end, or has ended."""
        return self._ending or self.closed

    @contextlib.contextmanager
    def command(self, *, background: bool = False, service: str = "") -> Iterator[ClientCommand]:
        """Inside, the sandbox belongs to a command that a client runs; a `service` runs in it without owning it. Several
        may do so at once. Conflict: the sandbox is about to end; LimitExceeded: too many run in the background."""
        command = ClientCommand(background=background, service=service)
        running = self.services if service else self.commands
        with self.lock:
            if background and not service and sum(one.background for one in self.commands) >= BACKGROUND_MAX:
                raise LimitExceeded(
                    f"{BACKGROUND_MAX} commands run in the background of {short(self._trajectory)} already: end one of them "
                    f"(`snapshotd kill`), or run this one in another sandbox"
                )
            if self._ending:
                raise Conflict(
                    f"the sandbox of {short(self._trajectory)} is just ending, so no command begins in it; try again"
                )
            command.alone = not self.commands and not self.services
            for other in self.commands:
                other.alone = False
            running.append(command)
        try:
            yield command
        finally:
            with self.lock:
                running.remove(command)
                self._changing.notify_all()

    def cut_off_commands(self) -> None:
        """Kill the commands that run, and let none begin any more: the sandbox is about to end. Returns when they are
        recorded, or after a limit, because a client that does not take its output holds its command up. The caller
        holds `lock`; other threads take it in between."""
        self._ending = True
        self._changing.notify_all()
        for command in (*self.commands, *self.services):
            command.cut_off = True
            if command.process is not None:
                command.process.kill()
        self.wait_for_commands(CUT_OFF_DEADLINE_S)
        self.wait_for_services(CUT_OFF_DEADLINE_S)

    def wait_for_commands(self, timeout_s: float | None = None) -> None:
        """Return when the sandbox belongs to no command, or is closed, or after this time. The caller holds `lock`, which
        other threads take meanwhile."""
        self._changing.wait_for(lambda: not self.commands or self.closed, timeout_s)

    def wait_for_services(self, timeout_s: float, service: ClientCommand | None = None) -> None:
        """Return when the services have ended, or this one has. Otherwise as `wait_for_commands`."""

        def are_gone() -> bool:
            return self.closed or (not self.services if service is None else service not in self.services)

        self._changing.wait_for(are_gone, timeout_s)

    def wait_for_end(self, timeout_s: float) -> bool:
        """True once the sandbox is about to end; False after this time."""
        with self.lock:
            return self._changing.wait_for(lambda: self.ending, timeout_s)

    def tell(self, sentences: Iterable[str]) -> None:
        """Have the next user of the sandbox told these sentences."""
        self._notices.extend(sentences)

    def take_notices(self) -> list[str]:
        """Take the sentences of `tell` that no user has been told yet."""
        told, self._notices = self._notices, []
        return told

    def carry_on(self) -> None:
        """Let commands begin again: the sandbox does not end after all."""
        self._ending = False

    def close(self) -> None:
        """Let no step be taken any more. The caller holds `lock`."""
        self.closed = True
        self._changing.notify_all()


@dataclass(slots=True)
class UnsavedMind:
    """The agent's mind as far as no snapshot has it: its state, and its messages since the head. The sandbox's lock guards
    it."""

    state: dict[str, Any] = field(default_factory=dict)
    """The agent's state: `values` (its own JSON) and `tasks` (engine/journal/tasks.py). Replaced, never changed in
    place."""
    changed: bool = False
    """The next snapshot has to save the state."""
    messages: list[Message] = field(default_factory=list)
    """Messages of the conversation that the next snapshot will bind."""
    bytes: int = 0
    """Size of the messages that the agent appended since the head, as JSON."""

    def put(self, state: dict[str, Any], *, changed: bool) -> None:
        """Replace the state. `changed`: it is another one than the head's."""
        self.state, self.changed = state, changed

    def say(self, message: Message, size: int) -> None:
        """Append a message of the agent."""
        self.bytes += size
        self.messages.append(message)

    def drop_saved(self, messages: int) -> None:
        """Forget the state and the first `messages` messages: a snapshot has them."""
        del self.messages[:messages]
        self.bytes, self.changed = 0, False


@dataclass(slots=True)
class Sandbox:
    """See the module's text. Made by `launch.Launcher`; ended by `close`."""

    trajectory: Trajectory
    runtime: Runtime
    container: Container
    cgroup: Members
    server: AgentServer
    started_at_ns: int
    root: SandboxRoot
    writer: TrajectoryWriter
    survival: Survival
    use: SandboxUse
    mind: UnsavedMind = field(default_factory=UnsavedMind)
    connections: dict[socket.socket, Callable[[], object]] = field(default_factory=dict)
    """Clients' connections to servers inside (engine/runs/ports.py), each with what to call when the sandbox ends."""
    gateway: Gateway | None = None
    """Its model endpoint, if its trajectory has providers."""
    way_out: WayOut | None = None
    """Its way to the hosts that it may reach, if its network allows some."""
    _released: bool = False

    @property
    def lock(self) -> threading.RLock:
        """See the module's text."""
        return self.use.lock

    @property
    def head(self) -> SnapshotID:
        """The trajectory's head."""
        return self.writer.head

    @property
    def closed(self) -> bool:
        """No more steps."""
        return self.use.closed

    @property
    def isolated(self) -> bool:
        """False if it is a plain folder, and its commands are processes like any others."""
        return self.container.root is None

    @property
    def refused(self) -> tuple[str, ...]:
        """Sentences about connections that were refused and that no snapshot has yet."""
        return () if self.way_out is None else self.way_out.refused

    def hits(self) -> Hits:
        """The hits at its limits so far: none where it has no limits of its own."""
        return hits(self.container.pid) if self.isolated else Hits()

    def renew(self, trajectory: Trajectory) -> None:
        """Take the trajectory's record, which has changed."""
        self.trajectory = trajectory

    def set_network(self, network: Network) -> None:
        """Put the rules of this network in force. SandboxFailed."""
        with self.lock:
            spec = replace(self.trajectory.spec, network=network)
            self.trajectory = replace(self.trajectory, spec=spec)
        if self.way_out is not None:
            self.way_out.apply(HostRules(network.rules))

    def set_gateway(self, gateway: Gateway) -> None:
        """Take the sandbox's model endpoint, which ends with it."""
        self.gateway = gateway

    def outlive(self, facts: dict[str, Any]) -> None:
        """Let the next daemon go on with this sandbox if this one dies from now on. `facts`: as `LiveRecord.keep`."""
        with self.lock:
            if self.mind.changed:
                self.survival.set_state(self.head, self.mind.state)
            self.survival.outlive(facts, self.root.present())

    def kill(self, choose: Callable[[list[int]], Iterable[int]], number: int = signal.SIGKILL) -> list[int]:
        """Send a signal to the processes that `choose` takes from a list of all but init, and return them. The processes
        stand still meanwhile. The caller holds `lock`."""
        with frozen(self.cgroup):
            chosen = list(choose([pid for pid in self.cgroup.processes() if pid != self.container.pid]))
            for pid in chosen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        return chosen

    def close(self) -> None:
        """End the container and let go of its layers. Idempotent. Files in the live upper that came after the head are
        gone.

        Not under `lock` beyond the first lines: a call of the agent may be waiting for it, and its connection is waited
        for here.
        """
        with self.lock:
            self.use.close()
            if self._released:
                return
            self._released = True
        self.survival.remove()
        self.server.close()
        if self.gateway is not None:
            self.gateway.close()
        for ended in list(self.connections.values()):
            ended()
        self.runtime.destroy(self.container.id)
        if self.way_out is not None:
            self.way_out.close()
        self.root.release()
