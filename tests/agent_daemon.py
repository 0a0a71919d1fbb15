"""A daemon of one sandbox that keeps everything in memory and follows docs/agent-protocol.md to the letter: it checks
every request, keeps a journal, and answers a program that is started again from it. No files, no snapshots, no engine.
agent_peer.py has the requests."""

from __future__ import annotations

import copy
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapshotd.errors import Diverged

DECISION_S = 60.0


@dataclass
class Entry:
    """One entry of the journal."""

    id: str
    kind: str
    name: str
    arguments: Any
    key: str
    status: str | None = None
    outcome: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    within: str | None = None
    """Entries made inside of this one's body are not asked for again when it is skipped."""


class Killed(Exception):  # noqa: N818 - what happened to the daemon
    """Nobody is there any more to answer this."""


class FakeDaemon:
    """`refuse[op]` makes a request fail, `at_end(pid)` runs inside call_end, `gated` names the calls that a person has
    to approve, `deaths[op]` says where in a request the daemon is killed and started again.

    `resumed` gives a daemon that answers from this one's journal.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.requests: list[dict[str, Any]] = []
        self.events: list[tuple[Any, ...]] = []
        self.calls: dict[str, dict[str, Any]] = {}
        self.journal: list[Entry] = []
        self.facts: list[tuple[str, Any]] = []
        self.conversation: list[dict[str, Any]] = []
        self.state: dict[str, Any] = {}
        self.tasks: list[dict[str, Any]] = []
        self.values: dict[tuple[str, str], list[Any]] = {}
        self.outputs: dict[str, dict[str, bytes]] = {}
        self.refuse: dict[str, Exception] = {}
        self.edits: dict[str, Any] = {}
        """By tool: the arguments that an approver puts in the place of the program's."""
        self.gated: set[str] = set()
        self.waiting: list[dict[str, Any]] = []
        self.at_end: Callable[[int], None] = lambda pid: None
        self.at_replayed: Callable[[], None] = lambda: None
        """Where the daemon switches the root to that of the recorded snapshot."""
        self.deaths: dict[str, str] = {}
        """By request, for the next of that kind: `arriving` (its line is there, its body not), `before` it is done,
        `after` that, `answering` (half of the answer is on the wire)."""
        self.at_death: Callable[[int], None] = lambda pid: None
        """Runs while the daemon is away, with the process whose request it was."""
        self.answers: dict[tuple[str, str], dict[str, Any]] = {}
        """What was answered, by kind and id of the request."""
        self.pids: list[int] = []
        self.lost: list[str] = []
        self.body_limit_bytes = 64 << 20
        self.old_journal: list[Entry] = []
        self.old_facts: list[tuple[str, Any]] = []
        self.old_messages = 0
        self.replaying = False
        self._snapshots = 0
        self._threads: list[threading.Thread] = []
        self._sockets: set[socket.socket] = set()
        self._killed: set[socket.socket] = set()
        self._one_death = threading.Lock()
        self._listener: socket.socket | None = None
        self._path: Path | None = None

    def resumed(self) -> FakeDaemon:
        """A daemon for the program's second start."""
        other = FakeDaemon()
        with self.lock:
            other.old_journal = copy.deepcopy(self.journal)
            other.old_facts = list(self.facts)
            other.conversation = copy.deepcopy(self.conversation)
            other.values = copy.deepcopy(self.values)
        other.replaying = True
        return other

    # -- the test's side --

    def named(self, name: str) -> list[dict[str, Any]]:
        return [call for call in self.calls.values() if call["name"] == name]

    def sent(self, op: str) -> list[dict[str, Any]]:
        return [request for request in self.requests if request["op"] == op]

    def question(self) -> dict[str, Any]:
        """The oldest question that waits; polls for it."""
        deadline = time.monotonic() + DECISION_S
        while True:
            with self.lock:
                if self.waiting:
                    return self.waiting[0]
            assert time.monotonic() < deadline, "nobody asked"
            time.sleep(0.005)

    def decide(self, question: dict[str, Any], approved: bool, **decision: Any) -> None:
        with self.lock:
            self.waiting.remove(question)
            question["decision"] = {"approved": approved, **decision}
            self.changed.notify_all()

    # -- serving --

    @contextmanager
    def serving(self, path: Path) -> Iterator[FakeDaemon]:
        self._path = path
        self._listen(path)
        try:
            yield self
        finally:
            self.close()
            for thread in self._threads:
                thread.join(60)

    def _listen(self, path: Path) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)  # the path may be longer than an address
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)
        listener.listen(64)
        acceptor = threading.Thread(target=self._accept, args=(listener,), daemon=True)
        with self.lock:
            self._threads.append(acceptor)
        self._listener = listener
        acceptor.start()

    def die(self, pid: int = 0) -> None:
        """Be killed, with everything that was not written down, and started again."""
        assert self._path is not None
        with self._one_death:
            with self.lock:
                self._killed |= self._sockets
            self.close()
            self.at_death(pid)
            self._listen(self._path)

    def close(self) -> None:
        """End every connection, as a daemon that is killed. Idempotent."""
        if self._listener is None or self._path is None:
            return
        listener, self._listener = self._listener, None
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        self._path.unlink(missing_ok=True)
        with self.lock:
            for connected in self._sockets:
                try:
                    connected.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
            for question in self.waiting:
                question["decision"] = None
            self.waiting.clear()
            self.changed.notify_all()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connected,), daemon=True)
            with self.lock:
                self._sockets.add(connected)
                self._threads.append(thread)
            thread.start()

    def _serve(self, connected: socket.socket) -> None:
        from tests.agent_peer import Peer  # which needs this module

        Peer(self, connected).run()

    def forget(self, connected: socket.socket, lost: set[str]) -> None:
        with self.lock:
            self._sockets.discard(connected)
            if connected not in self._killed:  # else the daemon has gone, not the agent
                self.lost.extend(sorted(lost))

    def snapshot(self) -> str:
        with self.lock:
            self._snapshots += 1
            return f"{self._snapshots:032x}"

    # -- the journal --

    def recorded(self, kind: str, name: str, arguments: Any) -> Entry | None:
        """The old entry that stands here, taken out; None where the journal has ended: live from then on."""
        with self.lock:
            if not self.replaying:
                return None
            for entry in self.old_journal:
                if (entry.kind, entry.name, entry.arguments) == (kind, name, arguments):
                    self.old_journal.remove(entry)
                    if entry.status is not None:
                        self.at_replayed()
                    return entry
            if self.old_journal:
                expected = self.old_journal[0]
                raise Diverged(
                    f"{kind} {name}({arguments}) is not {expected.kind} {expected.name}({expected.arguments}); fork to go on."
                )
            self.replaying = False
            return None

    def skip_body(self, entry: Entry) -> None:
        with self.lock:
            self.old_journal = [other for other in self.old_journal if other.within != entry.id]
