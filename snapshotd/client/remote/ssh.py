"""The way through the user's own ssh: each connection is a `snapshotd dial` on the other machine, which carries it to
the daemon's socket there. That machine's ssh and the socket's rights decide about it; ssh asks what it has to ask.

ssh keeps the connection to the other machine open for a minute, so that the next request need not make one.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

from snapshotd.client.exchange import DaemonAway
from snapshotd.client.links import ByteLink, Links
from snapshotd.config import places
from snapshotd.errors import SnapshotdError, UsageError

_END_S = 5.0
_WORD = re.compile(r"[\w.:][\w.:@%+=-]*")
"""A user or a host: no option of ssh, and nothing that a shell would see more in (a `ProxyCommand` passes both to one)."""


class SshWay:
    """See the module's text."""

    is_here = False

    def __init__(self, host: str) -> None:
        """`host`: ssh://[USER@]HOST[:PORT][/SOCKET]. UsageError."""
        try:
            parts = urlsplit(host)
            port = parts.port
        except ValueError:
            parts, port = urlsplit("ssh://"), None
        name, user = parts.hostname or "", None if parts.username is None else unquote(parts.username)
        words = [name, *([] if user is None else [user])]
        if not all(map(_WORD.fullmatch, words)) or not host.isprintable() or parts.password or parts.query:
            raise UsageError(
                f"{host[:80]!r} is no machine for ssh; write ssh://USER@HOST, and :PORT if it is another one"
            )
        self.place = host
        self._target = name if user is None else f"{user}@{name}"
        remote = ["snapshotd", *(["--socket", unquote(parts.path)] if parts.path not in ("", "/") else []), "dial"]
        self._argv = [
            "ssh",
            "-T",
            "-o",
            "ConnectTimeout=30",
            *_sharing_options(),
            *([] if port is None else ["-p", str(port)]),
            "--",
            self._target,
            shlex.join(remote),
        ]

    async def connect(self, links: Links) -> ByteLink:
        connected, process = await links.apart(self._dial)
        return _SshLink(links.adopt(connected), process, self._target)

    def sign(self, head: bytes) -> bytes:
        return head

    def connect_error(self, exc: OSError) -> SnapshotdError:
        return DaemonAway(
            f"ssh cannot be run ({exc.strerror or exc}); install it, or name another place in SNAPSHOTD_HOST"
        )

    def _dial(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(self._argv, stdin=theirs.fileno(), stdout=theirs.fileno())
            except BaseException:
                ours.close()
                raise
        return ours, process


class _SshLink:
    """A connection that ends with the process that carries it."""

    def __init__(self, link: ByteLink, process: subprocess.Popen[bytes], target: str) -> None:
        self._link, self._process, self._target = link, process, target
        self._answered = False
        self.send, self.break_off = link.send, link.break_off

    @property
    def deadline(self) -> float | None:
        return self._link.deadline

    @deadline.setter
    def deadline(self, at: float | None) -> None:
        self._link.deadline = at

    async def receive(self) -> bytes:
        try:
            data = await self._link.receive()
        except ConnectionError:
            data = b""
        if not data and not self._answered:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_END_S)
                raise DaemonAway(
                    f"ssh to {self._target} ended with exit code {code} before the daemon there had answered; "
                    f"`ssh {self._target} snapshotd daemon --status` shows how it is"
                )
        self._answered = True
        return data

    def close(self) -> None:
        self._link.close()
        if self._process.returncode is None:  # it ends by itself; a thread takes note
            threading.Thread(target=self._process.wait, name="ssh", daemon=True).start()
            self._process.returncode = self._process.returncode

    async def finish(self) -> None:
        await self._link.finish()
        self.close()


def _sharing_options() -> list[str]:
    """Options by which ssh keeps the connection to the other machine for the next request, in a folder of the user's."""
    own = places()
    folder = Path("/run/snapshotd-ssh") if own.is_root else own.sockets
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return []
    if status.st_uid != os.geteuid() or status.st_mode & 0o022 or len(str(folder)) > 50:
        return []
    return ["-o", "ControlMaster=auto", "-o", f"ControlPath={folder}/%C", "-o", "ControlPersist=60"]
