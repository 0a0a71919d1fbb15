"""A process that has imported the daemon and forks one on request: imports are most of what a start costs, and a walk starts hundreds.

A daemon made so differs from one that a client starts in its command line alone. Standard library and snapshotd only: it runs as a script.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from snapshotd.errors import Conflict, SnapshotdError


class Starter:
    """`env` is that of the daemons; `start` adds to it."""

    def __init__(self, state_dir: Path, socket_path: Path, env: dict[str, str]) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._ours, theirs):
            end.settimeout(None)  # a test's default timeout would make both ends nonblocking, in the other process, too
        self._log = state_dir / "daemon.log"
        argv = [sys.executable, "-P", __file__, str(theirs.fileno()), str(socket_path)]
        self._process = subprocess.Popen(argv, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd="/")
        theirs.close()
        self._state_dir = state_dir

    def start(self, timeout_s: float, **env: str) -> bool:
        """Start a daemon and wait for it. False when it died without a word; what it says it died of is an AssertionError, but for a
        Conflict, as for a client: what the last daemon was just starting may have its lock for a moment more. TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while True:
            news = self._start(max(0.0, deadline - time.monotonic()), env)
            if news.get("error", {}).get("code") != Conflict.__name__:
                assert "error" not in news, news
                return "ready" in news

    def _start(self, timeout_s: float, env: dict[str, str]) -> dict[str, Any]:
        ready_r, ready_w = os.pipe2(os.O_CLOEXEC)
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            socket.send_fds(self._ours, [json.dumps({"state_dir": str(self._state_dir), "env": env}).encode()], [ready_w, log])
        finally:
            os.close(ready_w)
            os.close(log)
        with open(ready_r, "rb") as ready:
            if not select.select([ready], [], [], timeout_s)[0]:
                raise TimeoutError(f"the daemon has been starting for more than {timeout_s:.0f} s")
            return dict(json.loads(ready.readline() or "{}"))

    def close(self) -> None:
        """End the process; a daemon that runs goes on."""
        self._ours.close()
        self._process.wait(30)


def _serve_requests(commands: socket.socket, socket_path: Path) -> None:
    from snapshotd.daemon import server, wiring

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a dead daemon
    while True:
        data, fds, _, _ = socket.recv_fds(commands, 1 << 16, 2)
        if not data:
            return
        request = json.loads(data)
        if os.fork() == 0:
            commands.close()
            _become_daemon(fds, request["env"])
            code = 1
            try:
                options = server.ServerOptions(Path(request["state_dir"]), socket_path, ready_fd=fds[0])
                code = server.serve(options, wiring.open_engine)
            except SnapshotdError:
                pass  # the pipe says it
            except BaseException:  # noqa: BLE001 - as at the end of any program
                traceback.print_exc()
            finally:
                os._exit(code)
        for fd in fds:
            os.close(fd)


def _become_daemon(fds: list[int], env: dict[str, str]) -> None:
    """What a client's start would have given it; and what is read from the environment at import is read again."""
    from snapshotd import failpoints
    from snapshotd.engine import evict

    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(fds[1], 1)
    os.dup2(fds[1], 2)
    os.close(fds[1])
    os.environ.update(env)
    importlib.reload(failpoints)  # into the same names, which those who have imported `hit` see
    evict.BUDGET = env["SNAPSHOTD_LAYER_BUDGET"]


if __name__ == "__main__":
    _serve_requests(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]))
