"""A daemon of one sandbox that keeps everything in memory and follows docs/agent-protocol.md to the letter: it checks every request, keeps
a journal, and answers a program that is started again from it. No files, no snapshots, no engine. agent_peer.py has the requests."""

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


class FakeDaemon:
    """`refuse[op]` makes a request fail, `at_end(pid)` runs inside call_end, `gated` names the calls that a person has to approve.

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
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)  # the path may be longer than an address
        self._listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)
        self._listener.listen(64)
        acceptor = threading.Thread(target=self._accept, args=(self._listener,), daemon=True)
        acceptor.start()
        try:
            yield self
        finally:
            self.close()
            acceptor.join(20)
            for thread in self._threads:
                thread.join(20)

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
                question["decision"] = {"approved": False, "reason": "closed"}
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
                raise Diverged(f"{kind} {name}({arguments}) is not {expected.kind} {expected.name}({expected.arguments}); fork to go on.")
            self.replaying = False
            return None

    def skip_body(self, entry: Entry) -> None:
        with self.lock:
            self.old_journal = [other for other in self.old_journal if other.within != entry.id]
