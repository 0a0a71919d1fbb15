"""Starts the daemons of a walk, hundreds of them: forked (tests/forked.py), and waited for as a client does."""

from __future__ import annotations

import json
import os
import select
import time
from pathlib import Path
from typing import Any

from snapshotd.client.autostart import daemon_argv
from snapshotd.errors import Conflict
from tests import forked


class Starter:
    """`env` is that of the daemons; `start` adds to it."""

    def __init__(self, state_dir: Path, socket_path: Path, env: dict[str, str]) -> None:
        self._state_dir, self._socket_path, self._env = state_dir, socket_path, env

    def start(self, timeout_s: float, **env: str) -> bool:
        """Start a daemon and wait for it. False when it died without a word; what it says it died of is an
        AssertionError, but for a Conflict, as for a client: what the last daemon was just starting may have its lock
        for a moment more. TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while True:
            news = self._start(max(0.0, deadline - time.monotonic()), env)
            if news.get("error", {}).get("code") != Conflict.__name__:
                assert "error" not in news, news
                return "ready" in news

    def _start(self, timeout_s: float, env: dict[str, str]) -> dict[str, Any]:
        ready_r, ready_w = os.pipe2(os.O_CLOEXEC)
        log = os.open(self._state_dir / "daemon.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            argv = daemon_argv(self._state_dir, self._socket_path, ready_w)
            fds = {1: log, 2: log, ready_w: ready_w}
            forked.start(argv[argv.index("snapshotd") + 1 :], fds, env={**self._env, **env}, cwd="/", new_session=True)
        finally:
            os.close(ready_w)
            os.close(log)
        with open(ready_r, "rb") as ready:
            if not select.select([ready], [], [], timeout_s)[0]:
                raise TimeoutError(f"the daemon has been starting for more than {timeout_s:.0f} s")
            return dict(json.loads(ready.readline() or "{}"))
