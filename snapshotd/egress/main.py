"""The proxy of one sandbox: a process without rights. `base.py` says what it does, `proxy.py` starts it.

Arguments: the descriptors of its control socket and of a pidfd of the sandbox's init, the user to
become, and the sandbox's name, for people who look at processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import encodings.idna  # noqa: F401 - a look at files that this process will not see any more
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from snapshotd.egress import sightings
from snapshotd.egress.answering import NameServer
from snapshotd.egress.base import DESCRIPTORS_MAX, MESSAGE_MAX_BYTES, MOST_CONNECTIONS, PROXY_PORT, VERSION
from snapshotd.egress.buffers import Buffers
from snapshotd.egress.lookup import Lookups
from snapshotd.egress.names import Pool
from snapshotd.egress.refusals import RefusalLog
from snapshotd.egress.relay import Relay
from snapshotd.kernel import landlock
from snapshotd.kernel import syscalls as sc
from snapshotd.network import HostRules

_OPEN_FILES = 2 * MOST_CONNECTIONS + 512
_DATA_BYTES = 1 << 30
_TAKEN_AT_ONCE = 64
_TELL_AGAIN_S = 0.05


class ProxySockets:
    """The sockets of the process, and what belongs to them."""

    def __init__(self, control: socket.socket, ended: asyncio.Event) -> None:
        self._control, self._ended = control, ended
        self._loop = asyncio.get_running_loop()
        self._refusals = RefusalLog(lambda sentence: self._say({"refused": sentence}))
        self._pool, lookups = Pool(), Lookups()
        buffers = Buffers()
        self._relay = Relay(HostRules(()), self._pool, lookups, self._refusals.add, buffers)
        self._names = NameServer(HostRules(()), self._pool, lookups, self._refusals, buffers)
        self._listeners: dict[int, socket.socket] = {}

    def read_control(self) -> None:
        """Take the daemon's next message."""
        try:
            data, fds, _, _ = socket.recv_fds(self._control, MESSAGE_MAX_BYTES, DESCRIPTORS_MAX)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._ended.set()
            return
        message = json.loads(data)
        sockets = [socket.socket(fileno=fd) for fd in fds]
        for sock in sockets:
            sock.setblocking(False)
        if message.get("names"):
            self._open_names(*sockets)
            return
        if message.get("report"):
            self._tell({"version": VERSION, "ports": sorted(self._listeners)})
            return
        self._apply(HostRules(message["rules"]), dict(zip(message["ports"], sockets, strict=True)))
        self._tell({"applied": len(message["rules"])})

    def _open_names(
        self, datagrams: socket.socket, listener: socket.socket, watch: socket.socket | None = None
    ) -> None:
        self._loop.add_reader(datagrams, self._names.take_datagrams, datagrams)
        self._loop.add_reader(listener, self._accept, listener, self._names.take_connection)
        if watch is not None:
            self._loop.add_reader(
                watch, sightings.take, watch, self._listeners.__contains__, self._pool.name_of, self._refusals
            )

    def _apply(self, rules: HostRules, listeners: dict[int, socket.socket]) -> None:
        """Apply rules, with listeners for new ports. Listeners of ports that no rule has any more are closed."""
        self._listeners |= listeners
        for listener in listeners.values():
            self._loop.add_reader(listener, self._accept, listener, self._relay.take)
        for port in self._listeners.keys() - rules.ports - {PROXY_PORT}:
            listener = self._listeners.pop(port)
            self._loop.remove_reader(listener)
            listener.close()
        self._names.change(rules)
        self._relay.change(rules)

    def _accept(self, listener: socket.socket, take: Callable[[socket.socket], None]) -> None:
        for _ in range(_TAKEN_AT_ONCE):
            try:
                taken, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:
                continue  # it has ended already, or there are too many files open
            with contextlib.suppress(OSError):  # it has ended already
                take(taken)

    def _tell(self, message: dict[str, Any]) -> None:
        """Send a message to the daemon, again until the daemon has room for it."""
        if not self._say(message):
            self._loop.call_later(_TELL_AGAIN_S, self._tell, message)

    def _say(self, message: dict[str, Any]) -> bool:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError:
            return False  # the daemon does not read
        return True


async def _serve(control: socket.socket, init: int) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    proxy = ProxySockets(control, ended)
    control.setblocking(False)
    loop.add_reader(init, ended.set)
    loop.add_reader(control, proxy.read_control)
    await ended.wait()


def _give_up_rights(user: int) -> None:
    """Become a user that owns nothing, without capabilities, for good."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_DATA_BYTES, _DATA_BYTES))
    most = min(_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.suppress(PermissionError):  # a user namespace may forbid it, and then there are none to give up
        os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    sc.set_capabilities(0, 0, 0)  # a user namespace may have no other user to become
    sc.prctl(sc.PR_SET_NO_NEW_PRIVS, 1)
    landlock.confine(())


def main(arguments: list[str]) -> None:
    control, init, user = map(int, arguments[:3])
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _give_up_rights(user)
    asyncio.run(_serve(socket.socket(fileno=control), init))
    os._exit(0)  # threads may be at a lookup


if __name__ == "__main__":
    main(sys.argv[1:])
