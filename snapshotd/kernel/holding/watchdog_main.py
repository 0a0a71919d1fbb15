"""The watchdog: stops the sandboxes of a daemon that does not renew its word in time, because it was killed, or is stopped itself.

    python -m snapshotd.kernel.holding.watchdog_main SLACK_NS     standard input: a socket to the daemon

The daemon writes JSON lines. `{"until_ns":..., "members":[...]}`: everything that runs, and until when it may, by
CLOCK_BOOTTIME; answered by one byte, "f" if it had been stopped meanwhile, else ".". `{"add":...}`: one more sandbox. `{"end":true}`:
nothing runs any more. SLACK_NS after the time the watchdog stops everything, whether the daemon is still connected or
not; where nobody is connected, it ends then.

Sandboxes in cgroups are let go on by the daemon; those that were stopped by signals by the watchdog, before it answers.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from snapshotd.errors import SandboxFailed
from snapshotd.kernel.holding import cgroup
from snapshotd.kernel.holding.held import HeldMembers
from snapshotd.kernel.holding.members import Members, PidNamespace
from snapshotd.kernel.holding.process_tree import ProcessTree
from snapshotd.kernel.holding.stopping import StoppedBySignals


def describe(members: Members) -> list[Any]:
    """The members of a sandbox, for another process."""
    if isinstance(members, HeldMembers):
        return describe(members.inner)
    if isinstance(members, cgroup.Cgroup):
        return ["cgroup", members.path]
    if isinstance(members, PidNamespace):
        return ["namespace", members.first, members.inode]
    assert isinstance(members, ProcessTree)
    return ["tree", members.first, members.started]


def find(words: list[Any]) -> Members | None:
    """The members that `describe` has described; None: they are gone."""
    kind, *rest = words
    if kind == "cgroup":
        return cgroup.at(rest[0])
    if kind == "namespace":
        return PidNamespace(*rest)
    try:
        tree = ProcessTree(rest[0])
    except (FileNotFoundError, ProcessLookupError):
        return None
    return tree if tree.started == rest[1] else None


class _Watch:
    def __init__(self, slack_ns: int) -> None:
        self._slack_ns = slack_ns
        self._until_ns: int | None = None
        self._all: list[list[Any]] = []
        self._stopped: list[Members] | None = None
        """All that was stopped; None: nothing is to stand still."""

    def left_s(self) -> float | None:
        """Seconds until everything has to stand still. None: it does already, or the daemon has said nothing yet."""
        if self._until_ns is None or self._stopped is not None:
            return None
        return max(0, self._until_ns + self._slack_ns - time.clock_gettime_ns(time.CLOCK_BOOTTIME)) / 1e9

    def hear(self, word: dict[str, Any]) -> bytes:
        """Do as the daemon says; returns the answer to it."""
        if "add" in word:
            self._all.append(word["add"])
            if self._stopped is not None:
                self._stop(word["add"])
            return b""
        stopped, self._stopped = self._stopped, None
        for members in stopped or ():
            if isinstance(members, StoppedBySignals):
                members.thaw()
        self._until_ns, self._all = word["until_ns"], word["members"]
        return b"." if stopped is None else b"f"

    def stop(self) -> None:
        """Have everything stand still."""
        self._stopped = []
        for words in self._all:
            self._stop(words)

    def _stop(self, words: list[Any]) -> None:
        members = find(words)
        if members is None:
            return
        try:
            members.freeze()
        except SandboxFailed:
            with suppress(SandboxFailed):  # it is gone
                for pid in members.members():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        else:
            assert self._stopped is not None
            self._stopped.append(members)


def main() -> None:
    daemon = socket.socket(fileno=0)
    watch, text, connected = _Watch(int(sys.argv[1])), b"", True
    while connected or watch.left_s() is not None:
        left_s = watch.left_s()
        if not connected:
            time.sleep(left_s or 0)
        elif select.select([daemon], [], [], left_s)[0]:
            with suppress(ConnectionError):
                data = daemon.recv(1 << 16)
                text += data
                connected = bool(data)
            *lines, text = text.split(b"\n")
            for word in map(json.loads, lines):
                if "end" in word:
                    return
                with suppress(OSError):  # the daemon has just died
                    daemon.sendall(watch.hear(word))
        if watch.left_s() == 0:
            watch.stop()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal of the daemon is not for us
    main()
